"""Runs a program in the sandbox and reports its results. The expected result of a call is never sent here.

It reads orders, one JSON object a line, and writes reports likewise, both on descriptors of their own, so that the program
has its standard streams for itself. The program runs in this same interpreter: nothing here can be kept from it.
"""

import json
import os
import sys
import types

# Stands before every statement of a test that can fail; called `REACHED()` there.
REACHED = "__reached__"


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
        # A failure here is not the fault of the program: the harness is not ready.
        exec(order["prelude"], namespace)
    if form == "tests":
        counter = [0]
        namespace[REACHED] = counting(counter)
        exec(compile(marked(order["setup"], "<setup>"), "<setup>", "exec"), namespace)
    report(ready=True)
    if form == "script":
        orders.close()
        os.close(report_fd)
        exec(compile(program, "<program>", "exec"), namespace)
        return
    try:
        defined = functions(program) if form == "tests" else []
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
                test(namespace, order["test"], order["entry_point"], counter, defined)
                answer = {"passed": order["nonce"]}
        except Untested as error:
            answer = {"untested": error.args[0], "nonce": order["nonce"]}
        except BaseException as error:
            answer = {"failed": describe(error)}
        report(**answer)


def find(namespace, name):
    """A function of the program, or a method of its class Solution."""
    if name not in namespace and "Solution" in namespace:
        return getattr(namespace["Solution"](), name)
    return namespace[name]


class Untested(Exception):
    """No program can fail the test."""


def counting(counter):
    def reached():
        counter[0] += 1

    return reached


def functions(program):
    """Names of the functions that the program defines at top level."""
    import ast

    body = ast.parse(program, "<program>").body
    return sorted({node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))})


def test(namespace, code, entry_point, counter, defined):
    """Runs test code after the program, and its `check`, test functions and test cases of unittest."""
    try:
        tree = marked(code, "<test>")
    except (SyntaxError, ValueError) as error:
        raise Untested("it cannot be read as Python: %s" % error) from None
    before = dict(namespace)
    counter[0] = 0
    exec(compile(tree, "<test>", "exec"), namespace)
    new = {name: value for name, value in namespace.items() if before.get(name) is not value}
    called = counter[0]
    check = new.get("check")
    if isinstance(check, types.FunctionType):
        if not check.__code__.co_argcount:
            check()
        elif entry_point:
            check(find(namespace, entry_point))
        # Test code may call `check` itself.
        elif not called and len(defined) == 1:
            check(find(namespace, defined[0]))
        elif not called:
            raise Untested(
                "it defines `check`, the program defines %s at top level, and no column `entry_point` says which function it is for"
                % (", ".join(defined) or "no function")
            )
    for name, value in new.items():
        if name.startswith("test") and isinstance(value, types.FunctionType) and not value.__code__.co_argcount:
            counter[0] += 1
            value()
    unittest = sys.modules.get("unittest")
    values = new.values() if unittest else ()
    for case in [value for value in values if isinstance(value, type) and issubclass(value, unittest.TestCase)]:
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
        counter[0] += result.testsRun - len(result.skipped)
        for _, trace in result.errors + result.failures:
            raise AssertionError(trace.strip().splitlines()[-1])
    if not counter[0]:
        raise Untested("nothing that could fail was reached: no assert, no test function, no test case of unittest")


def marked(code, name):
    """Test code with a call of REACHED before each statement that can fail."""
    import ast

    def within(nodes):
        """All that these statements run themselves."""
        nodes = list(nodes)
        while nodes:
            node = nodes.pop()
            yield node
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                nodes.extend(ast.iter_child_nodes(node))

    def fails(node):
        """Calls of `assertEqual`, `numpy.testing.assert_allclose`, `pytest.raises`, `sys.exit` and the like."""
        if not isinstance(node, ast.Call):
            return False
        called = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        return any(word in called.lower() for word in ("assert", "raises", "exit"))

    def can_fail(node):
        if isinstance(node, ast.Assert):
            return not isinstance(node.test, ast.Constant)
        if isinstance(node, ast.If):
            return any(isinstance(inner, ast.Raise) or fails(inner) for inner in within(node.body + node.orelse))
        if isinstance(node, ast.Try):
            return any(isinstance(inner, (ast.Raise, ast.Assert)) for inner in within([node]))
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return any(fails(inner) for inner in within(node.items))
        simple = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)
        return isinstance(node, simple) and any(fails(inner) for inner in within([node]))

    class Marks(ast.NodeTransformer):
        def visit(self, node):
            node = self.generic_visit(node)
            if not (isinstance(node, ast.stmt) and can_fail(node)):
                return node
            call = ast.Call(ast.Name(REACHED, ast.Load()), [], [])
            return [ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node)), node]

    return Marks().visit(ast.parse(code, name))


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
