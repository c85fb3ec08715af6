"""A run of rlrun on a Ray cluster: `python rlrun_ray.py DESCRIPTION`, in a job or with RAY_ADDRESS.

One actor per process of the run, spread over the nodes. An actor owns its process as a child: the child ends with the actor.
Nothing of the run passes through Ray but the address of the run and its credentials, which the first actor reads from the run
directory and the driver gives to the workers. So only the first process needs the run directory; it is on a disk that survives
its node if the run is to survive it.

The exit status is that of the run. Status 75 means: start it again. Samplers may fail at any time; one that does is started
again after a pause. The job fails if a program cannot be started, or if a process fails too often.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

REQUEUE = 75
# Seconds between two looks at a process, and before one is started again (doubled up to the longest).
LOOK, FIRST_PAUSE, LONGEST_PAUSE = 1.0, 1.0, 60.0
# Seconds that a process has after SIGTERM, and that the cluster has to give the resources.
GRACE, RESOURCES = 300.0, 600.0
# Failures of a process that are tried again: of the run and of samplers, which may be preempted often.
RETRIES = {"run": 50, "trainer": 50, "rollout": 1000}
# Seconds after which a process counts as one that works: its earlier failures are forgotten.
STEADY = 600.0
PR_SET_PDEATHSIG = 1
FILES = ("tokens", "ca.pem")


@ray.remote(max_restarts=0, max_concurrency=4)
class Process:
    """A process of the run on this actor's node."""

    def __init__(self):
        self.child = None
        self.directory = tempfile.TemporaryDirectory()

    def start(self, command, address=None):
        """Starts the process; a worker with the address and the credentials of its run."""
        if address is not None:
            command = [address["url"] if word == "URL" else word for word in command]
            for name, text in address["files"].items():
                path = os.path.join(self.directory.name, name)
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                    file.write(text)
                if text:
                    command += [{"tokens": "--token-file", "ca.pem": "--tls-ca"}[name], path]
        self.child = subprocess.Popen(command, preexec_fn=end_with_parent)
        return ray.util.get_node_ip_address(), self.child.pid

    def status(self):
        """The exit status; None while the process runs."""
        return self.child.poll()

    def address(self, run_dir):
        """The address and the credentials of the run in `run_dir`; None if it is not served yet."""
        try:
            with open(os.path.join(run_dir, "address.json")) as file:
                found = json.load(file)
        except FileNotFoundError:
            return None
        files = {}
        for name, key in zip(FILES, ("token_file", "tls_ca")):
            if found[key] is not None:
                with open(os.path.join(run_dir, found[key])) as file:
                    files[name] = file.read()
        return {"url": found["url"], "files": files}

    def terminate(self):
        """Asks the process to end, and waits."""
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(GRACE)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()
        return None if self.child is None else self.child.returncode


def end_with_parent():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Role:
    """A place in the run whose process can be started again."""

    def __init__(self, name, command, strategy, resources):
        self.name, self.command, self.strategy, self.resources = name, command, strategy, resources
        self.actor, self.pause, self.next, self.done = None, FIRST_PAUSE, 0.0, False
        self.ends, self.retries, self.started = 0, RETRIES[name.split()[0]], None

    def start(self, address=None):
        if self.ends > self.retries:
            sys.exit(f"{self.name} has ended {self.ends} times and is not started again; the lines above and its log say why")
        self.actor = Process.options(scheduling_strategy=self.strategy, **self.resources).remote()
        try:
            node, pid = ray.get(self.actor.start.remote(list(self.command), address), timeout=RESOURCES)
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, (FileNotFoundError, PermissionError)):
                return self.ended(f"{error.cause} before its start")
            # The actor runs, so its node is there: another attempt would fail too.
            program = self.command[0]
            sys.exit(f"{self.name} cannot be started: {error.cause}; {program} must be a program on every node, see --program")
        except ray.exceptions.RayError as error:
            # Its node is gone; Ray gives its place to another one.
            return self.ended(f"{type(error).__name__} before its start")
        self.started = time.monotonic()
        print(f"{self.name} started on {node}, process {pid}", flush=True)

    def status(self):
        """The exit status of the process, REQUEUE if its actor or node is gone, None while it runs."""
        try:
            return ray.get(self.actor.status.remote(), timeout=GRACE)
        except ray.exceptions.RayError as error:
            print(f"{self.name}: its actor is gone: {type(error).__name__}", flush=True)
            return REQUEUE

    def address(self, run_dir):
        """Where the run in `run_dir` is; None if it is not served, or its node is gone."""
        try:
            return ray.get(self.actor.address.remote(run_dir), timeout=GRACE)
        except ray.exceptions.RayError:
            return None

    def ended(self, status):
        """Notes an end; the process is started again after a pause."""
        print(f"{self.name} ended with status {status}", flush=True)
        ray.kill(self.actor)
        if self.started is not None and time.monotonic() - self.started > STEADY:
            self.ends, self.pause = 0, FIRST_PAUSE
        self.ends, self.started = self.ends + 1, None
        self.actor, self.next = None, time.monotonic() + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def terminate(self):
        if self.actor is not None:
            try:
                ray.get(self.actor.terminate.remote(), timeout=GRACE + 10)
            except ray.exceptions.RayError:
                pass


def run(description):
    """Supervises all processes until the run ends; returns its exit status."""
    resources = {"num_cpus": description["cpus"], "num_gpus": description["gpus"]}
    counts = [("trainer", description["trainer_ranks"]), ("rollout", description["rollout_workers"])]
    size = 1 + sum(count for _, count in counts)
    bundle = {"CPU": description["cpus"], **({"GPU": description["gpus"]} if description["gpus"] else {})}
    group = placement_group([bundle] * size, strategy="SPREAD")
    ray.get(group.ready(), timeout=RESOURCES)

    def role(index, name, command):
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        return Role(name, command, strategy, resources)

    lead = role(0, "run", description["lead"])
    workers = []
    for kind, count in counts:
        for number in range(count):
            command = list(description[kind])
            if kind == "trainer":
                command[command.index("--rank-offset") :] = ["--rank", str(number + 1)]
            workers.append(role(1 + len(workers), f"{kind} {number}", command))
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    address = None
    try:
        lead.start()
        while True:
            time.sleep(LOOK)
            if stopping:
                lead.terminate()
            if lead.actor is None:
                if stopping:
                    return REQUEUE
                if time.monotonic() >= lead.next:
                    lead.start()
                    for worker in workers:
                        worker.done = False
                continue
            if (status := lead.status()) is not None:
                lead.ended(status)
                if status != REQUEUE or stopping:
                    return status
                address = None
                continue
            # A run that was started again may have another address.
            address = address or lead.address(description["run_dir"])
            for worker in workers if address is not None else []:
                if worker.actor is None:
                    if not worker.done and time.monotonic() >= worker.next:
                        worker.start(address)
                elif (ended := worker.status()) is not None:
                    worker.ended(ended)
                    # With status 0 the run has ended for it.
                    worker.done = ended == 0
                    # It may have joined an earlier address.
                    address = None
    finally:
        for worker in workers:
            worker.terminate()
        lead.terminate()
        remove_placement_group(group)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        description = json.load(file)
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"))
    sys.exit(run(description))
