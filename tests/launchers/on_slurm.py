#!/usr/bin/env python3
"""A run on a real Slurm with two nodes: python3 on_slurm.py RLRUN DIR [--set KEY=VALUE ...]

Starts munged, slurmctld and two slurmd of this host from a configuration in DIR, submits `rlrun launch slurm` of the default
recipe, and ends all of them. Needs root and Debian's packages slurm-wlm and munge.

1. The sampler of the second node is killed with SIGKILL, as a node that is taken away; another one joins.
2. The job is signalled as Slurm does before its time limit: the run saves and ends with status 75, the job goes back into the
   queue and resumes.
3. The run is killed with SIGKILL, without time to save: the job goes back into the queue and resumes from its last checkpoint.
4. Two samplers join from an array of their own; one is preempted and joins again.
5. The run ends, and the job with it. No group was trained on twice, no step is missing.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from run_directory import lines, steps, text_of, wait

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobRequeue=1
KillWait=30
SlurmdTimeout=30
InactiveLimit=0
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=1000
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=60:00 State=UP
"""


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """The daemons, until they are closed."""

    def __init__(self, directory):
        self.directory, self.daemons = directory, []
        os.makedirs(os.path.join(directory, "state"))
        self.path = os.path.join(directory, "slurm.conf")
        ports = free_ports(3)
        with open(self.path, "w") as file:
            file.write(
                CONFIGURATION.format(host=socket.gethostname(), ports=ports, directory=directory, cpus=os.cpu_count())
            )
        self.environment = dict(os.environ, SLURM_CONF=self.path)
        key = os.path.join(directory, "munge.key")
        with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(os.urandom(1024))
        files = {"key-file": key, "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        # Its checks are of directories that a system has; this one is of a test.
        self.start(["munged", "--foreground", "--force"] + ["--%s=%s" % (k, os.path.join(directory, v)) for k, v in files.items()])
        wait("munged", lambda: os.path.exists(os.path.join(directory, "munge.socket")))
        self.start(["slurmctld", "-D", "-f", self.path])
        for node in ("n1", "n2"):
            self.start(["slurmd", "-D", "-f", self.path, "-N", node])
        wait("two idle nodes", lambda: self.ask("sinfo", "-h", "-o", "%D %t").strip() == "2 idle")

    def start(self, command):
        log = open(os.path.join(self.directory, "daemons.log"), "ab")
        daemon = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        self.daemons.append(daemon)

    def ask(self, *command):
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def state(self, job):
        fields = dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", job)))
        return fields.get("JobState"), fields.get("Reason"), int(fields.get("Restarts", -1))

    def close(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def parsed(description):
    """The arguments, and the directory, which is empty."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rlrun", type=os.path.abspath)
    parser.add_argument("directory")
    parser.add_argument("--recipe", default="recipes/grpo_math.toml")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--undisturbed", action="store_true", help="kill and signal nothing")
    arguments = parser.parse_args()
    directory = os.path.abspath(arguments.directory)
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    return arguments, directory


def main():
    arguments, directory = parsed(__doc__)
    run = os.path.join(directory, "run")
    cluster = Cluster(directory)
    job = None
    try:
        sets = ["buffer.listen=127.0.0.1:%d" % free_ports(1)[0], "buffer.credentials=%s" % json.dumps(os.path.join(directory, "keys")), "log.samples=1000"]
        command = [arguments.rlrun, "launch", "slurm", arguments.recipe, "--run-dir", run, "--grace", "30", "--time", "30:00"]
        for value in sets + arguments.set:
            command += ["--set", value]
        said = subprocess.run(command, env=cluster.environment, check=True, capture_output=True, text=True).stdout
        job = re.search(r"batch job (\d+)", said).group(1)
        log = "%s-%s.log" % (run, job)
        text = lambda: text_of(log)

        saved = 0 if arguments.undisturbed else disturb(cluster, job, run, text, arguments.rlrun, arguments.recipe)
        wait("the end of the job", lambda: cluster.state(job)[0] not in ("RUNNING", "PENDING", "COMPLETING"), text)
        assert cluster.state(job)[0] == "COMPLETED", (cluster.state(job), text())
        done = steps(run)
        assert [line["step"] for line in done] == list(range(1, len(done) + 1)), [line["step"] for line in done]
        assert len(done) > saved, (len(done), saved)
        groups = [
            group["group"]
            for line in done
            for group in lines(os.path.join(run, "samples", "step_%06d.jsonl" % line["step"]))
        ]
        assert len(groups) == len(set(groups)), "a group was trained on twice"
        accuracy = [line["eval/accuracy"] for line in lines(os.path.join(run, "metrics.jsonl")) if "eval/accuracy" in line]
        print("ok %d steps, %d groups, each once; accuracy %.3f to %.3f" % (len(done), len(groups), accuracy[0], accuracy[-1]))
    finally:
        if job is not None and cluster.state(job)[0] in ("RUNNING", "PENDING"):
            cluster.ask("scancel", job)
            wait("the end of the cancelled job", lambda: cluster.state(job)[0] not in ("RUNNING", "COMPLETING"))
        cluster.close()


def disturb(cluster, job, run, text, rlrun, recipe):
    """What the description says to the run and its samplers; returns the last step before the run was killed."""
    joined = lambda: text().count("joined https://127.0.0.1:")
    wait("steps with a sampler of the second node", lambda: joined() == 1 and len(steps(run)) >= 3, text)
    [worker] = pids("worker", "rollout", run)
    os.kill(worker, 9)
    before = len(steps(run))
    wait("another sampler", lambda: joined() == 2, text)
    print("ok a sampler was killed at step %d; another one has joined at step %d" % (before, len(steps(run))), flush=True)

    subprocess.run(["scancel", "--signal=TERM", job], env=cluster.environment, check=True)
    wait("the job in the queue", lambda: cluster.state(job)[2] == 1 and cluster.state(job)[0] == "PENDING", text)
    saved = len(steps(run))
    assert "stopped and saved" in text(), text()
    # Slurm waits for two minutes; an administrator can end that, once the nodes have forgotten the first start.
    time.sleep(10)
    wait("its second start", lambda: started(cluster, job), text)
    print("ok the job was signalled at step %d, saved and queued again" % saved, flush=True)

    wait("steps after the second start", lambda: len(steps(run)) > saved, text)
    killed = len(steps(run))
    for process in pids("--resume-or-start", run):
        os.kill(process, 9)
    wait("the job in the queue again", lambda: cluster.state(job)[2] == 2 and cluster.state(job)[0] == "PENDING", text)
    time.sleep(10)
    wait("its third start", lambda: started(cluster, job), text)
    wait("steps after the third start", lambda: len(steps(run)) > killed, text)
    print("ok the run was killed at step %d and goes on at step %d" % (killed, len(steps(run))), flush=True)

    log = os.path.join(cluster.directory, "array-%a.log")
    command = "%s worker rollout --join %s --recipe %s" % (rlrun, run, os.path.abspath(recipe))
    said = cluster.ask("sbatch", "--parsable", "--array=0-1", "--requeue", "--open-mode=append", "--output=" + log, "--wrap", command)
    array = said.strip()
    logged = lambda task: text_of(log.replace("%a", str(task)))
    joins = lambda task: logged(task).count("joined https://127.0.0.1:")
    try:
        wait("both samplers of the array", lambda: joins(0) == 1 and joins(1) == 1, lambda: said + logged(0) + logged(1))
        cluster.ask("scontrol", "requeue", array + "_0")
        # As above.
        time.sleep(10)
        again = lambda: cluster.ask("scontrol", "update", "job=%s_0" % array, "StartTime=now") is not None and joins(0) == 2
        wait("the preempted sampler again", again, lambda: logged(0))
        print("ok a sampler of an array was preempted and has joined again at step %d" % len(steps(run)), flush=True)
    finally:
        cluster.ask("scancel", array)
    return killed


def started(cluster, job):
    cluster.ask("scontrol", "update", "job=" + job, "StartTime=now")
    return cluster.state(job)[0] in ("RUNNING", "COMPLETED")


def pids(*words):
    """Processes whose command line has all of these words, one of them as a part."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/cmdline" % pid, "rb") as file:
                command = file.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "rlrun" in os.path.basename(command[0]) and all(any(word in part for part in command) for word in words):
            found.append(int(pid))
    return found


if __name__ == "__main__":
    main()
