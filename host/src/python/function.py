"""An adapter for a plain function: it gets the arguments of the call and returns any JSON value.

The configuration names it: `path` is `file.py:function` or `module:function`, or `source` is the text of a module and
`function` the name. A call is `{"args": [...], "kwargs": {...}}`, both optional.

Invariant: what JSON cannot carry is an error of the call, never a changed value.
"""

import inspect
import json


def load(config):
    if config.get("source") is not None:
        module, name = import_source(config["source"]), config["function"]  # noqa: F821 (user_code.py)
    else:
        target, name = split_target(config["path"])  # noqa: F821
        module = import_code(target)  # noqa: F821
    function = vars(module).get(name)
    if not callable(function):
        own = ", ".join(sorted(own_functions(module))) or "none"  # noqa: F821
        raise Unusable(f"there is no function `{name}`; the functions of the module are: {own}")  # noqa: F821
    return PlainFunction(name, function)


class PlainFunction:
    batch = False

    def __init__(self, name, function):
        self.name, self.function = name, function
        self.concurrent = inspect.iscoroutinefunction(function)

    def describe(self):
        return {"function": self.name, "signature": str(inspect.signature(self.function))}

    def call_one(self, arguments, result):
        return as_json(result(self.invoke(arguments)))

    async def call_async(self, arguments):
        return as_json(await self.invoke(arguments))

    def invoke(self, arguments):
        return self.function(*arguments.get("args", ()), **arguments.get("kwargs", {}))


def as_json(value):
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidResult(f"the result cannot be written as JSON: {error}") from None  # noqa: F821
    return value
