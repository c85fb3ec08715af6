"""A reward function that does what the completion says, and a server of completions that are well: their length."""

import ctypes
import math
import os
import signal
import subprocess
import sys
import time


def write_pid(name, pid):
    with open(name, "a") as file:
        file.write(f"{pid}\n")


def spin():
    while True:
        pass


def compute_score(solution_str, ground_truth, extra_info=None, **kwargs):
    word, _, rest = solution_str.partition(" ")
    if word == "loop":
        spin()
    if word == "stubborn":
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        spin()
    if word == "sleep":
        time.sleep(float(rest))
    if word == "fork":
        # A child in the group, one in a session of its own, an orphan, and another program.
        for number in range(3):
            if os.fork() == 0:
                if number:
                    os.setsid()
                if number < 2:
                    write_pid(rest, os.getpid())
                else:
                    # Its parent writes the pid of the orphan, which may die with its parent.
                    orphan = os.fork()
                    if orphan:
                        write_pid(rest, orphan)
                        os._exit(0)
                time.sleep(1000)
        subprocess.Popen([sys.executable, "-c", "import os,sys,time; print(os.getpid(), file=open(sys.argv[1],'a')); time.sleep(1000)", rest], start_new_session=True)
        spin()
    if word == "programs":
        # One in a session of its own, and one with an environment of its own.
        own = [sys.executable, "-c", "import os,sys,time; print(os.getpid(), file=open(sys.argv[1],'a')); time.sleep(1000)", rest]
        subprocess.Popen(own, start_new_session=True)
        subprocess.Popen(own, env={})
        spin()
    if word == "memory":
        return float(len(bytearray(1 << 40)))
    if word == "grow":
        blocks = []
        while True:
            blocks.append(bytearray(8 << 20))
    if word == "print":
        for _ in range(40_000):
            print("x" * 100)
    if word == "fd1":
        os.write(1, b"\x00\x00\x00\x02{}" * 100)
        os.write(2, b"\xff\xff\xff\xff")
    if word == "exit":
        sys.exit(3)
    if word == "os_exit":
        os._exit(3)
    if word == "once":
        # Dies the first time only.
        if not os.path.exists(rest):
            open(rest, "w").close()
            os._exit(3)
    if word == "segv":
        print("about to read address 0")
        ctypes.string_at(0)
    if word == "raise":
        raise ValueError(f"{rest} is no number \udc80")
    if word == "return_none":
        return None
    if word == "return_text":
        return "1.0"
    if word == "details":
        return {"score": 1, "huge": 10**400, "inf": math.inf, "text": "a\udc80", "set": {1}, "deep": [[[[[[[[1]]]]]]]]}
    if word == "nan":
        return math.nan
    if word == "garbage":
        for fd in range(100, 110):
            try:
                os.write(fd, b"\xff\xff\xff\xffnonsense")
            except OSError:
                pass
    if word == "child_returns":
        os.fork()
    if word == "alarm":
        signal.alarm(1)
    if word == "pid":
        return float(os.getpid())
    return float(len(solution_str))


async def awaited(solution_str, ground_truth, **kwargs):
    """The same in an event loop, where a call may also wait."""
    import asyncio

    word, _, rest = solution_str.partition(" ")
    if word == "wait":
        await asyncio.sleep(float(rest))
    return compute_score(solution_str, ground_truth)
