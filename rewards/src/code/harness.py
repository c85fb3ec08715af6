"""Runs a program in the sandbox and reports what it did. What is expected of a call is never told here.

It reads orders, one JSON object a line, and writes reports likewise, both on descriptors of their own, so that the program
has its standard streams for itself. The program runs in this same interpreter: nothing here can be kept from it.
"""

import json
import os
import sys
import types


def main():
    orders = os.fdopen(int(sys.argv[1]), "r", encoding="utf-8")
    report_fd = int(sys.argv[2])
    dumps, loads, write, leave = json.dumps, json.loads, os.write, os._exit

    def report(**fields):
        line = (dumps(fields, allow_nan=False, default=plain) + "\n").encode()
        while line:
            line = line[write(report_fd, line):]

    order = loads(orders.readline())
    program, form = order["program"], order["form"]
    # The directory of `-c` is not a place to import from.
    sys.path[:] = [entry for entry in sys.path if entry]
    sys.argv = ["program.py"]
    remember(program)
    module = types.ModuleType("__main__" if form == "script" else "solution")
    sys.modules[module.__name__] = module
    namespace = module.__dict__
    if form != "script":
        # If this fails, no program is to blame: the harness is not ready.
        exec(order["prelude"], namespace)
    report(ready=True)
    if form == "script":
        orders.close()
        os.close(report_fd)
        exec(compile(program, "<program>", "exec"), namespace)
        return
    try:
        exec(compile(program, "<program>", "exec"), namespace)
        function = find(namespace, order["fn_name"]) if form == "calls" else None
    except BaseException as error:
        report(broken=describe(error))
        leave(0)
    report(loaded=True)
    while True:
        order = loads(orders.readline() or '{"end": true}')
        if "end" in order:
            leave(0)
        try:
            if form == "calls":
                answer = {"value": function(*order["args"])}
                dumps(answer, allow_nan=False, default=plain)
            else:
                test(namespace, order["test"], order["entry_point"])
                answer = {"passed": order["nonce"]}
        except BaseException as error:
            answer = {"failed": describe(error)}
        report(**answer)


def find(namespace, name):
    """A function of the program, or a method of its class Solution."""
    if name not in namespace and "Solution" in namespace:
        return getattr(namespace["Solution"](), name)
    return namespace[name]


def test(namespace, code, entry_point):
    """Runs test code beside the program, and what it defines: `check`, test functions, test cases of unittest."""
    before = dict(namespace)
    exec(compile(code, "<test>", "exec"), namespace)
    new = {name: value for name, value in namespace.items() if before.get(name) is not value}
    if entry_point and "check" in new:
        new["check"](find(namespace, entry_point))
    for name, value in new.items():
        if name.startswith("test") and isinstance(value, types.FunctionType) and not value.__code__.co_argcount:
            value()
    unittest = sys.modules.get("unittest")
    if unittest is None:
        return
    cases = [value for value in new.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    for case in cases:
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
        for _, trace in result.errors + result.failures:
            raise AssertionError(trace.strip().splitlines()[-1])


def describe(error):
    """One line: the error and the line of the program or the test that it came from."""
    where, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name in ("<program>", "<test>"):
            where = " (line %d of the %s)" % (trace.tb_lineno, name[1:-1])
        trace = trace.tb_next
    try:
        text = str(error)
    except BaseException:
        text = "no message"
    return ("%s: %s" % (type(error).__name__, text))[:300] + where


def plain(value):
    """Arrays of libraries as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError("%s cannot be compared with JSON" % type(value).__name__)


def remember(program):
    """Lets tracebacks show the lines of the program."""
    import linecache

    lines = program.splitlines(True)
    linecache.cache["<program>"] = (len(program), None, lines, "<program>")


main()
