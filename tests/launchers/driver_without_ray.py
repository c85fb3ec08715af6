#!/usr/bin/env python3
"""The driver of Ray ends if a program cannot be started or a node is lost too often: PYTHON driver_without_ray.py DRIVER

A module of this file replaces Ray: actors are objects of this process, and `lost` loses the nodes of all.
"""

import contextlib
import importlib.util
import io
import sys
import types

sys.dont_write_bytecode = True
lost = False


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        self.cause = cause


class RayActorError(RayError):
    pass


class Actor:
    """What `ray.remote` makes of a class; its calls are made by `get`."""

    def __init__(self, of):
        self.of = of

    def options(self, **_):
        return types.SimpleNamespace(remote=lambda: Actor(self.of()))

    def __getattr__(self, method):
        return types.SimpleNamespace(remote=lambda *arguments: lambda: getattr(self.of, method)(*arguments))


def get(call, timeout=None):
    if lost:
        raise RayActorError
    try:
        return call()
    except Exception as error:
        raise RayTaskError(error) from error


def module(name, **members):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)
    return sys.modules[name]


def driver(path):
    """The driver, with these modules for Ray."""
    exceptions = module("ray.exceptions", RayError=RayError, RayTaskError=RayTaskError)
    util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    module("ray", get=get, kill=lambda _: None, remote=lambda **_: Actor, exceptions=exceptions, util=util)
    module("ray.util")
    module("ray.util.placement_group", placement_group=None, remove_placement_group=None)
    module("ray.util.scheduling_strategies", PlacementGroupSchedulingStrategy=None)
    spec = importlib.util.spec_from_file_location("driver", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def refused(start):
    """The message with which the driver ends."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            start()
    except SystemExit as end:
        return str(end.code)
    raise AssertionError("the driver goes on")


driver = driver(sys.argv[1])
message = refused(driver.Role("run", ["/nowhere/rlrun"], None, {}).start)
assert "/nowhere/rlrun" in message and "No such file" in message and "--program" in message, message

lost = True
lead = driver.Role("run", ["/nowhere/rlrun"], None, {})
with contextlib.redirect_stdout(io.StringIO()):
    for _ in range(1 + driver.RETRIES["run"]):
        lead.start()
message = refused(lead.start)
assert "run has ended 51 times" in message, message
print("ok the driver of Ray")
