#!/usr/bin/env python3
"""A host that disappears: python3 lost_host.py RLRUN DIR [--moto PROGRAM] [--steps N] [--losses N]

The buffer of a run is in a PostgreSQL of this test, its checkpoints are in a bucket: a directory, or with `--moto` an S3 server.
The run is killed with SIGKILL and its directory removed, several times, each time at another step; the same command goes on in
another directory. At the end all steps are there, and no group was trained on twice relative to the checkpoints that the run went
on from: every group of the final record is there once. Needs PostgreSQL's server programs.
"""

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from run_directory import LIMIT, lines, steps, wait

RECIPE = "recipes/grpo_math.toml"


def server_programs():
    """The directory of PostgreSQL's server programs, the newest first; `None` if there is none."""
    roots = ["/usr/lib/postgresql/" + version + "/bin" for version in sorted(os.listdir("/usr/lib/postgresql"), reverse=True)] \
        if os.path.isdir("/usr/lib/postgresql") else []
    return next((root for root in roots if os.path.exists(os.path.join(root, "initdb"))), None)


class Database:
    """A PostgreSQL on a socket in a directory of its own, which other users can enter, until it is closed."""

    def __init__(self):
        directory = tempfile.mkdtemp(prefix="rlrun-postgres-")
        self.programs, self.data = server_programs(), os.path.join(directory, "data")
        if self.programs is None:
            sys.exit("PostgreSQL's server programs are not installed")
        # The server refuses root.
        self.user = "postgres" if os.getuid() == 0 else None
        if self.user:
            shutil.chown(directory, self.user, self.user)
        self.ask("initdb", "--pgdata", self.data, "--username=rlrun", "--auth=trust", "--no-sync")
        self.socket = directory
        self.server = subprocess.Popen(
            self.command("postgres", "-D", self.data, "-k", directory, "-c", "listen_addresses=", "-c", "max_wal_size=8GB"),
            stdout=subprocess.DEVNULL, stderr=open(os.path.join(directory, "server.log"), "wb"),
        )
        wait("PostgreSQL", lambda: self.ready())

    def command(self, program, *arguments):
        command = [os.path.join(self.programs, program), *arguments]
        return ["setpriv", "--reuid", self.user, "--regid", self.user, "--clear-groups", *command] if self.user else command

    def ask(self, program, *arguments):
        return subprocess.run(self.command(program, *arguments), check=True, capture_output=True, text=True, cwd="/").stdout

    def ready(self):
        answer = subprocess.run(self.command("pg_isready", "-h", self.socket, "-q"), cwd="/", capture_output=True)
        return answer.returncode == 0

    def close(self):
        self.server.send_signal(signal.SIGINT)
        self.server.wait(60)
        shutil.rmtree(self.socket)


class Bucket:
    """The URL of a bucket, and the variables of its server."""

    def __init__(self, directory, moto):
        self.environment, self.server = dict(os.environ), None
        if moto is None:
            os.makedirs(directory)
            self.url = "file://" + directory
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.server = subprocess.Popen([moto, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        endpoint = "http://127.0.0.1:%d" % port
        wait("the S3 server", lambda: answers(endpoint))
        urllib.request.urlopen(urllib.request.Request(endpoint + "/runs", method="PUT"), timeout=30).read()
        self.url = "s3://runs/lost"
        self.environment.update(
            AWS_ENDPOINT_URL=endpoint, AWS_ALLOW_HTTP="true", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_REGION="us-east-1",
        )

    def close(self):
        if self.server is not None:
            self.server.terminate()
            self.server.wait(30)


def answers(url):
    try:
        urllib.request.urlopen(url, timeout=5).read()
        return True
    except OSError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rlrun", type=os.path.abspath)
    parser.add_argument("directory", type=os.path.abspath)
    parser.add_argument("--moto", help="the program moto_server: an S3 server in place of a directory")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--losses", type=int, default=3)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.directory, ignore_errors=True)
    os.makedirs(arguments.directory)
    database = Database()
    bucket = Bucket(os.path.join(arguments.directory, "bucket"), arguments.moto)
    running = None
    try:
        sets = {
            "warmup.steps": 30, "trainer.steps": arguments.steps, "eval.interval": 0, "checkpoint.interval": 5, "log.samples": 1000,
            "data.arithmetic.eval_tasks": 20, "buffer.store": "postgres",
            "buffer.url": "postgres:///postgres?host=%s&user=rlrun" % database.socket, "buffer.schema": "lost",
            "checkpoint.url": bucket.url,
        }
        known = 0
        for attempt in range(arguments.losses + 1):
            run = os.path.join(arguments.directory, "host-%d" % attempt)
            command = [arguments.rlrun, RECIPE, "--resume-or-start", "--run-dir", run, "--quiet"]
            command += [part for key, value in sets.items() for part in ("--set", "%s=%s" % (key, value))]
            running = subprocess.Popen(command, env=bucket.environment, stderr=subprocess.PIPE, text=True)
            if attempt == arguments.losses:
                said = running.communicate(timeout=LIMIT)[1]
                assert running.returncode == 0, said
                break
            last = known + random.Random(attempt).randrange(7, 16)
            advanced = lambda: running.poll() is not None or len(steps(run)) >= last
            wait("step %d" % last, advanced)
            assert running.poll() is None, running.communicate()[1]
            running.kill()
            running.communicate()
            lost = steps(run)[-1]["step"]
            shutil.rmtree(run)
            print("ok host %d was lost at step %d" % (attempt, lost), flush=True)
            known = lost
        done = [line["step"] for line in steps(run)]
        assert done == list(range(1, arguments.steps + 1)), done
        groups = [
            group["group"] for step in done for group in lines(os.path.join(run, "samples", "step_%06d.jsonl" % step))
        ]
        assert len(groups) == 16 * len(done), "%d groups of %d steps" % (len(groups), len(done))
        assert len(groups) == len(set(groups)), "a group was trained on twice"
        print("ok %d hosts were lost; %d steps, %d groups, each once" % (arguments.losses, len(done), len(groups)))
    finally:
        if running is not None and running.poll() is None:
            running.kill()
            running.wait()
        bucket.close()
        database.close()


if __name__ == "__main__":
    main()
