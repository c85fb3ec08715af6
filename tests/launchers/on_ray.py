#!/usr/bin/env python3
"""A run on a real Ray cluster of two nodes: PYTHON on_ray.py RLRUN DIR [--set KEY=VALUE ...]

Ray listens on all interfaces, so this process moves to a network of its own first, which needs root. `rlrun launch ray`
submits the default recipe; its sampler is killed, its run is stopped with SIGTERM, and both are started again.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time

from on_slurm import lines, parsed, pids, steps, wait

CLONE_NEWNET = 0x40000000


def own_network():
    """Moves this process to a network with nothing but loopback."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        sys.exit("this needs root: %s" % os.strerror(ctypes.get_errno()))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def running(client, job):
    """The log of the job, which must not have ended."""
    log = client.get_job_logs(job)
    if client.get_job_status(job).is_terminal():
        sys.exit("the job has ended\n" + log)
    return log


def disturb(client, job, run):
    """Kills the sampler and stops the run, which are started again; returns the steps that were saved."""
    log = lambda: client.get_job_logs(job)
    wait("steps with a sampler", lambda: "rollout 0 started" in running(client, job) and len(steps(run)) >= 3, log)

    [worker] = pids("worker", "rollout", "recipe.toml")
    os.kill(worker, signal.SIGKILL)
    wait("another sampler", lambda: running(client, job).count("rollout 0 started") == 2, log)
    print("ok a sampler was killed and started again", flush=True)

    [lead] = pids("--resume-or-start", "recipe.toml")
    os.kill(lead, signal.SIGTERM)
    wait("the end with status 75", lambda: "run ended with status 75" in log(), log)
    saved = len(steps(run))
    return saved


def main():
    arguments, directory = parsed(__doc__)
    rlrun = arguments.rlrun
    run = os.path.join(directory, "run")
    own_network()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Jobs and the command-line program are started with the programs beside this interpreter.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    from ray.cluster_utils import Cluster
    from ray.job_submission import JobSubmissionClient

    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": 8265}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **dashboard})
    cluster.add_node(num_cpus=1)
    try:
        address = "http://127.0.0.1:8265"
        command = [rlrun, "launch", "ray", arguments.recipe, "--run-dir", run, "--interface", "lo", "--address", address]
        for value in ["buffer.credentials=%s" % json.dumps(os.path.join(directory, "keys"))] + arguments.set:
            command += ["--set", value]
        subprocess.run(command, check=True)
        client = JobSubmissionClient(address)
        [job] = [job.submission_id for job in client.list_jobs()]
        log = lambda: client.get_job_logs(job)
        saved = 0 if arguments.undisturbed else disturb(client, job, run)
        wait("the end of the job", lambda: client.get_job_status(job).is_terminal(), log)
        assert str(client.get_job_status(job)) == "SUCCEEDED", (client.get_job_status(job), log())
        done = steps(run)
        assert [line["step"] for line in done] == list(range(1, len(done) + 1)) and len(done) > saved, (len(done), saved)
        accuracy = [line["eval/accuracy"] for line in lines(os.path.join(run, "metrics.jsonl")) if "eval/accuracy" in line]
        print("ok stopped at step %d and resumed; %d steps; accuracy %.3f to %.3f" % (saved, len(done), accuracy[0], accuracy[-1]))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
