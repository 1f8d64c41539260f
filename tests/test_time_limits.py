"""Test that no test fails because the machine is busy.

A limit that only stops a hanging test must be at least a minute. This test finds limits that are
numbers or module constants in `timeout=`, `wait(...)`, `join(...)`, `communicate(...)`, deadlines
such as `deadline = time.monotonic() + 20`, and assertions about elapsed time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
SHORTEST_S = 60.0
SHORT = {
    "helpers/warm_python.py: select": "repeated until the process is stopped",
    "project/test_families.py: run": "the test needs a run that times out",
}
"""Maps each call that may have a shorter limit to the reason."""
CLOCKS = {"monotonic", "perf_counter", "process_time", "time", "steady_s"}
WAITS = {"wait", "join", "communicate"}


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def reads_clock(node: ast.AST) -> bool:
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(name_of(call.func) in CLOCKS and not call.args for call in calls)


def short_limits(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of the call or statement of each limit below `SHORTEST_S`."""
    tree = ast.parse(source)
    constants = {
        target.id: assignment.value.value
        for assignment in tree.body
        if isinstance(assignment, ast.Assign) and isinstance(assignment.value, ast.Constant)
        for target in assignment.targets
        if isinstance(target, ast.Name)
    }

    def is_short(node: ast.expr) -> bool:
        value = getattr(node, "value", None)
        value = constants.get(node.id) if isinstance(node, ast.Name) else value
        return type(value) in (int, float) and 0 < value < SHORTEST_S

    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            limits = [each.value for each in node.keywords if each.arg in ("timeout", "timeout_s")]
            limits += node.args[:1] if name_of(node.func) in WAITS else []
            if any(map(is_short, limits)):
                yield node.lineno, name_of(node.func)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            is_deadline = name_of(node.targets[0]).startswith(("deadline", "end"))
            if is_deadline and reads_clock(node.value.left) and is_short(node.value.right):
                yield node.lineno, "deadline"
        elif isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            sides = [node.test.left, *node.test.comparators]
            for left, operator, right in zip(sides, node.test.ops, sides[1:], strict=False):
                is_upper_limit = isinstance(operator, ast.Lt | ast.LtE) and is_short(right)
                if reads_clock(left) and is_upper_limit:
                    yield node.lineno, "assert"


def test_limits_that_only_stop_hanging_tests_are_at_least_a_minute():
    found = {
        f"{path.relative_to(TESTS)}: {name}": f"line {line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, name in short_limits(path.read_text(encoding="utf-8"))
    }
    assert {place: line for place, line in found.items() if place not in SHORT} == {}
    assert SHORT.keys() <= found.keys(), "remove the exceptions that no test needs"


def test_short_limits_are_found():
    source = """
LIMIT_S = 5
process.wait(timeout=20)
process.communicate(1.5)
thread.join(LIMIT_S)
run(script, timeout_s=30)
deadline = time.monotonic() + 20
assert time.process_time() - began < 3
assert 0.5 < time.monotonic() - began_s < 8
assert time.monotonic() - began > 2.5
process.wait(timeout=60)
server.is_away_until = time.monotonic() + 0.6
names.append(", ".join(words))
deadline = time.monotonic() + 60
"""
    assert [name for _, name in sorted(short_limits(source))] == [
        *("wait", "communicate", "join", "run", "deadline", "assert", "assert")
    ]
