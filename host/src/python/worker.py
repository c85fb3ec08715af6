"""The processes that call user code: a fork server that imports the code once, and the workers that it forks.

Standard library only, Python 3.9 or newer. Runs as three things: `fork_server` (one for each pool), `work` (a worker, forked
by the server), and `spawned_worker` (a worker that is a new process, for code that starts threads or CUDA when it is
imported). Frames are a 4-byte little-endian length and JSON, on a socket that is never file descriptor 0, 1 or 2, so
nothing that user code prints can break them. It is the last part of the module that user_code.py begins; the adapter
between them defines `load`.

Invariant: every call of a batch is reported exactly once, in the order in which the calls end, and then `done` is sent. From
the reports the other side knows at each moment which calls a death or a timeout is about.
"""

import asyncio
import ctypes
import faulthandler
import fcntl
import gc
import inspect
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback

if not hasattr(os, "memfd_create"):
    import tempfile

# Lowest descriptor of our sockets: above what user code opens, and above what it closes by number.
SOCKET_FD = 100
# Longest frame in bytes; the same number stands in protocol.rs.
MAX_FRAME = 64 << 20
# Lines and characters of a traceback that are shown.
TRACEBACK_LINES, TRACEBACK_CHARS = 12, 4000
# If the event loop was blocked for more than this share of the timeout, a late call is repeated alone instead of charged.
BLOCKED_SHARE = 0.25
# CPU seconds of a call beyond what its wall time allows: a second limit, should the one on wall time fail.
CPU_SECONDS = 600
# Seconds between two looks at the memory of a worker.
MEMORY_LOOK = 0.05
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


# Processes


def prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def die_with_parent():
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def own_socket(fd):
    """The socket of an inherited descriptor, moved to a number of its own; the old number becomes /dev/null."""
    moved = socket.socket(fileno=fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, SOCKET_FD))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, fd)
    os.close(null)
    return moved


def fork_server(config):
    """Imports the code, reports what it found, forks on request, and ends all processes when its socket closes."""
    # One thread of the process that started this one waits for the report, so until then this process dies with it.
    # Afterwards the control socket closes when that process ends, which leaves time to clean up.
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.setsid()
    control = own_socket(0)
    sys.stdout.reconfigure(line_buffering=True)
    try:
        subject = load(config["adapter"])  # noqa: F821 (the adapter)
        kinds = {"batch": subject.batch, "concurrent": subject.concurrent}
        report = {"kind": "loaded", "description": subject.describe(), **kinds}
    except Unusable as unusable:  # noqa: F821 (user_code.py)
        report = {"kind": "failed", "reason": str(unusable)}
    except BaseException as error:  # user code runs at import, and may raise anything
        report = {"kind": "failed", "reason": "the file cannot be imported:\n" + traceback_text(error)}
    reason = spawn_reason()
    report["spawn"] = reason
    send(control, report)
    if report["kind"] == "failed":
        os._exit(1)
    prctl(PR_SET_PDEATHSIG, 0)
    supervisor = Supervisor(control, config, None if reason else subject)
    try:
        supervisor.serve()
    finally:  # also if the other side ends in the middle of a report
        supervisor.end()


def spawn_reason():
    """Why this process must not be forked, or None."""
    if sys.platform == "darwin":
        return "frameworks of macOS do not work after a fork"
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"importing it starts threads ({names})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing it initialises CUDA"
    return None


class Supervisor:
    """Forks workers, reports how they end, and kills the processes that they leave behind."""

    def __init__(self, control, config, subject):
        self.control, self.config, self.subject = control, config, subject
        self.workers = set()
        self.spared = set(children(os.getpid()))  # what the import itself started
        self.wake, alarm = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(alarm, False)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.collect()
        gc.freeze()  # what is imported stays shared with the workers

    def serve(self):
        while True:
            # At most a second: user code may have installed its own handler of SIGCHLD.
            ready, _, _ = select.select([self.control, self.wake], [], [], 1.0)
            if self.wake in ready:
                try:
                    os.read(self.wake, 4096)
                except BlockingIOError:
                    pass
            self.reap()
            if self.control in ready:
                data, fds, _, _ = socket.recv_fds(self.control, 65536, 2)
                if not data:
                    return
                for fd in fds:  # they are received as inheritable
                    os.set_inheritable(fd, False)
                request = json.loads(data[4:])
                self.fork(request["id"], *fds)

    def fork(self, number, channel, output):
        sys.stdout.flush()
        sys.stderr.flush()
        mine = os.getpid()
        try:
            pid = os.fork() if self.subject else self.spawn(channel, output)
        except OSError as error:
            send(self.control, {"kind": "refused", "id": number, "reason": f"no process can be started: {error}"})
            return
        finally:
            if os.getpid() == mine:
                os.close(channel)
                os.close(output)
        if pid == 0:
            try:
                self.control.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(self.wake)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
                os.setsid()
                prepare(self.config, mine)
                work(own_socket(channel), self.subject, self.config)
            except BaseException:
                traceback.print_exc()
            finally:  # a copy of this server must not clean up
                os._exit(1)
        self.workers.add(pid)
        send(self.control, {"kind": "forked", "id": number, "pid": pid})

    def spawn(self, channel, output):
        """A new process that imports the code itself. It reads what to run from its standard input."""
        if hasattr(os, "memfd_create"):
            script = os.memfd_create("rlrun")
        else:
            with tempfile.TemporaryFile() as file:
                script = os.dup(file.fileno())
        own = dict(self.config, channel=SOCKET_FD, parent=os.getpid())
        for part in (SOURCE.encode(), json.dumps(own).encode()):  # noqa: F821 (set by the bootstrap)
            os.write(script, struct.pack("<I", len(part)) + part)
        os.lseek(script, 0, os.SEEK_SET)
        actions = [(os.POSIX_SPAWN_DUP2, script, 0), (os.POSIX_SPAWN_DUP2, output, 1)]
        actions += [(os.POSIX_SPAWN_DUP2, output, 2), (os.POSIX_SPAWN_DUP2, channel, SOCKET_FD)]
        try:
            return os.posix_spawn(sys.executable, [sys.executable, "-c", self.config["bootstrap"]], os.environ, file_actions=actions)
        finally:
            os.close(script)

    def reap(self):
        ended = {}
        for pid in list(self.workers):
            try:
                found, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                found, status = pid, 0
            if found:
                ended[pid] = status
                self.workers.discard(pid)
        for pid, status in ended.items():
            kill_group(pid)
        if ended:
            self.kill_orphans()
        for pid, status in ended.items():
            signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
            send(self.control, {"kind": "exited", "pid": pid, "signal": signalled, "code": code})

    def kill_orphans(self):
        """Kills what an ended worker left, in any session: such processes become children of this one, a subreaper."""
        for _ in range(100):
            left = [pid for pid in children(os.getpid()) if pid not in self.workers and pid not in self.spared]
            if not left:
                return
            for pid in left:
                kill(pid)
                wait(pid)

    def end(self):
        for pid in self.workers:
            kill_group(pid)
            kill(pid)
            wait(pid)
        self.workers.clear()
        self.spared.clear()
        self.kill_orphans()
        kill_tagged(os.environ.get("RLRUN_PROCESS_POOL"))
        os._exit(0)


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def wait(pid):
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


def kill_group(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def processes():
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def children(of):
    """Process ids of the children, ended ones included; empty where there is no /proc."""
    found = []
    for pid in processes():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The name of the program is in parentheses and may contain any character.
                if int(file.read().rpartition(b")")[2].split()[1]) == of:
                    found.append(pid)
        except OSError:
            pass
    return found


def kill_tagged(tag):
    """Kills every other process that has the tag of this pool in its environment."""
    wanted = f"RLRUN_PROCESS_POOL={tag}".encode()
    for pid in processes():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if pid != os.getpid() and wanted in file.read().split(b"\0"):
                    kill(pid)
        except OSError:
            pass


# Workers


def prepare(config, parent_pid):
    """Makes this process, which leads a session of its own, a worker: sets its limits and what happens when its parent ends."""
    die_with_parent()
    if os.getppid() != parent_pid:
        os._exit(0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    faulthandler.enable()  # a segmentation fault leaves the Python stack in the log
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        limit_memory(config["memory_mb"] << 20)
    else:
        watch_memory(config["memory_mb"] << 20)


def limit_memory(allowed):
    """Limits the address space to `allowed` bytes beyond what it has now."""
    try:
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + allowed
    except OSError:  # a sandbox without /proc
        most = allowed
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def watch_memory(allowed):
    """Kills this process when more than `allowed` bytes beyond what it has become resident: macOS refuses a limit of the address space."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss (getrusage(2))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + allowed

    def watch():
        while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit <= most:
            time.sleep(MEMORY_LOOK)
        os.write(2, f"rlrun: this process took more than its limit of {allowed >> 20} MiB of memory\n".encode())
        kill(os.getpid())

    threading.Thread(target=watch, name="memory", daemon=True).start()


def spawned_worker(config):
    """A worker that is a new process; it imports the code before it is ready."""
    os.setsid()
    die_with_parent()
    channel = own_socket(config["channel"])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdout.reconfigure(line_buffering=True)
    os.register_at_fork(after_in_child=die_with_parent)
    subject = load(config["adapter"])  # noqa: F821
    prepare(config, config["parent"])
    work(channel, subject, config)


def work(channel, subject, config):
    """Makes calls until the socket closes. Never returns."""
    mine = os.getpid()
    worker = Worker(channel, subject, config["timeout_s"])
    worker.send({"kind": "ready"})
    while True:
        frame = receive(channel)
        if frame is None:
            os._exit(0)
        calls = json.loads(frame)["calls"]
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = used.ru_utime + used.ru_stime + CPU_SECONDS + 100 * config["timeout_s"] * len(calls)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), resource.getrlimit(resource.RLIMIT_CPU)[1]))
        worker.run_batch(calls)
        if os.getpid() != mine:  # user code forked, and its child returned too
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that was left would end the worker later


class Worker:
    """Makes the calls of a batch and reports on each."""

    def __init__(self, channel, subject, timeout_s):
        self.channel, self.subject, self.timeout_s = channel, subject, timeout_s
        self.loop = None
        self.retire = False  # ask for a fresh process after this batch
        self.pid = os.getpid()

    def send(self, *messages):
        if os.getpid() != self.pid:
            os._exit(0)
        send(self.channel, *messages)

    def run_batch(self, calls):
        self.retire = False
        if self.subject.batch:
            last = self.all_at_once(calls)
        elif self.subject.concurrent:
            last = []
            self.run(self.together(calls))
        else:
            last = []
            for index, arguments in enumerate(calls):
                if last:
                    self.send(*last)
                last = [self.one(index, arguments)]
        self.send(*last, {"kind": "done", "retire": self.retire})

    def run(self, awaitable):
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        return self.loop.run_until_complete(awaitable)

    def result(self, value):
        """What a plain call returned; a coroutine is awaited."""
        return self.run(awaited(value)) if inspect.isawaitable(value) else value

    def all_at_once(self, calls):
        try:
            results = self.subject.call_all(calls, self.result)
        except BaseException as error:
            repeat = not isinstance(error, InvalidResult)  # noqa: F821
            return [{"kind": "raised", "reason": self.error_text(error), "repeat": repeat}]
        return [report(index, result) for index, result in enumerate(results)]

    def one(self, index, arguments):
        try:
            return report(index, self.subject.call_one(arguments, self.result))
        except BaseException as error:  # SystemExit too: the worker goes on
            return {"kind": "error", "call": index, "reason": self.error_text(error)}

    async def together(self, calls):
        """Calls of an `async def`, in one event loop."""
        pending = {asyncio.ensure_future(self.one_of(index, call)): index for index, call in enumerate(calls)}
        lag = {"seconds": 0.0}
        ticker = asyncio.ensure_future(tick(lag))
        _, late = await asyncio.wait(list(pending), timeout=self.timeout_s)
        ticker.cancel()
        if not late:
            return
        # If calls blocked each other, it is unknown which of them was slow: each is called again alone.
        kind = "alone" if len(calls) > 1 and lag["seconds"] > BLOCKED_SHARE * self.timeout_s else "timeout"
        self.send(*({"kind": kind, "call": pending[task]} for task in late))
        for task in late:
            task.cancel()
        _, stubborn = await asyncio.wait(list(late), timeout=0.1)
        self.retire = self.retire or bool(stubborn)

    async def one_of(self, index, arguments):
        try:
            result = await self.subject.call_async(arguments)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.send({"kind": "error", "call": index, "reason": self.error_text(error)})
            return
        self.send(report(index, result))

    def error_text(self, error):
        # After an allocation that failed, a fresh process has its memory in one piece.
        self.retire = self.retire or isinstance(error, MemoryError)
        return str(error) if isinstance(error, InvalidResult) else traceback_text(error)  # noqa: F821


async def awaited(awaitable):
    return await awaitable


async def tick(lag):
    """Adds up for how long the event loop did not run."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.02)
        lag["seconds"] += max(0.0, time.monotonic() - before - 0.02)


def report(index, result):
    return {"kind": "result", "call": index, "result": result}


def traceback_text(error):
    """The last lines of a traceback, without the frames of this module."""
    lines = []
    trace = traceback.TracebackException.from_exception(error)
    trace.stack = traceback.StackSummary.from_list([f for f in trace.stack if f.filename != "<rlrun>"])
    for part in trace.format():
        lines.extend(part.rstrip("\n").split("\n"))
    return clean("\n".join(lines[-TRACEBACK_LINES:])[-TRACEBACK_CHARS:])  # noqa: F821


# Frames


def send(channel, *messages):
    parts = []
    for message in messages:
        body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
        if len(body) > MAX_FRAME:
            body = json.dumps(too_long(message, len(body))).encode()
        parts.append(struct.pack("<I", len(body)) + body)
    channel.sendall(b"".join(parts))


def too_long(message, size):
    reason = f"the result of the function is {size} bytes of JSON, more than {MAX_FRAME}"
    return {"kind": "error", "call": message.get("call", 0), "reason": reason}


def receive(channel):
    header = receive_exactly(channel, 4)
    return None if header is None else receive_exactly(channel, struct.unpack("<I", header)[0])


def receive_exactly(channel, size):
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def main(config):
    if "channel" in config:
        spawned_worker(config)
    fork_server(config)
