"""How user code is imported: a file by its path, a module by its name, or source text.

The first of three parts that run as one Python module: this file, an adapter, and worker.py. The adapter finds what to call
in the user's code and calls it. It defines `load(config)`, which returns an object with

- `describe()`: what was found, as JSON;
- `batch`: true if one call takes a list of arguments, which `call_all(arguments, result)` makes;
- `concurrent`: true if calls run together in one event loop, by awaiting `call_async(arguments)`;
- `call_one(arguments, result)`: one call, where both are false.

Arguments and results are JSON values. `result(value)` waits for a value that is awaitable and returns others as they are.

Invariant: imported code is registered in `sys.modules`, and files beside it can be imported. Standard library only, Python 3.9
or newer.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import types

# Name of the module that is made of source text.
SOURCE_MODULE = "rlrun_source"


class Unusable(Exception):
    """The code cannot be used as it is; the message says what to change."""


class InvalidResult(Exception):
    """The code returned something that its caller does not allow; calling it again cannot help."""


def import_code(target, prepare=None):
    """The module of a file or of a dotted name. `prepare` is called when its directory is on the import path."""
    prepare = prepare or (lambda: None)
    if target.endswith(".py") or os.path.isfile(target):
        return import_file(target, prepare)
    sys.path.insert(0, os.getcwd())
    prepare()
    return importlib.import_module(target)


def import_file(path, prepare):
    path = os.path.abspath(path)
    sys.path.insert(0, os.path.dirname(path))  # helpers beside the file
    prepare()
    name = os.path.splitext(os.path.basename(path))[0]
    if not name.isidentifier() or name in sys.modules:
        name = "rlrun_user_code"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise Unusable(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    spec.loader.exec_module(module)
    return module


def import_source(text):
    """A module made of source text."""
    module = types.ModuleType(SOURCE_MODULE)
    exec(compile(text, "<source>", "exec"), module.__dict__)
    return module


def split_target(path):
    """`file.py:name` or `module:name` as its two parts; the name is None where there is none."""
    target, _, name = path.rpartition(":")
    return (target, name) if target and name.isidentifier() else (path, None)


def own_functions(module):
    """The functions that a module defines itself, by name."""
    found = {key: value for key, value in vars(module).items() if not key.startswith("_") and inspect.isfunction(value)}
    return {key: value for key, value in found.items() if value.__module__ == module.__name__ or module.__name__ == SOURCE_MODULE}


def clean(text):
    """The text without lone surrogates, which JSON cannot carry."""
    return text.encode("utf-8", "replace").decode()
