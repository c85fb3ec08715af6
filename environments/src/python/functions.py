"""Functions of a user as tools.

An adapter of the process pool (host/src/python/user_code.py says what that is): it runs between user_code.py and worker.py as
one module, after schema.py. A call is {"name", "arguments"}, and its result {"text"} or {"error"}.

Invariant: a function keeps no state from one call to the next that a call may rely on: any process may get any call.
"""

import inspect
import json

# ruff: noqa: F821 (Unusable, import_code and others are those of user_code.py and schema.py)


def load(config):
    target, name = split_target(config["path"])
    module = import_code(target)
    functions = own_functions(module)
    if name is not None:
        if not callable(vars(module).get(name)):
            raise Unusable(f"there is no function `{name}`; the functions of the file are: {', '.join(sorted(functions)) or 'none'}")
        functions = {name: vars(module)[name]}
    if not functions:
        raise Unusable("it defines no function; a tool is a function with a docstring and annotated parameters")
    return Functions(functions)


class Functions:
    batch = concurrent = False

    def __init__(self, functions):
        self.functions = functions

    def describe(self):
        return [schema_of(name, function) for name, function in self.functions.items()]

    def call_one(self, call, result):
        try:
            returned = result(self.functions[call["name"]](**call["arguments"]))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"text": clean(returned if isinstance(returned, str) else json.dumps(returned, default=str))}
