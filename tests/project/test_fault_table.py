"""Test that each row of the table in docs/faults.md and each promise in SECURITY.md names
tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from extras.deleted_extras import needs_of

ROOT = Path(__file__).parents[2]
FAULTS = (ROOT / "docs" / "faults.md").read_text()
PROMISES = (ROOT / "SECURITY.md").read_text()
NAMED = r"<br>`(tests/[\w/]+\.py)::(\w+)`"


def rows(page: str, heading: str) -> list[str]:
    table = page.partition(heading)[2].partition("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("| ")][1:]


def test_every_fault_names_a_test():
    faults = rows(FAULTS, "## Faults, one by one")
    assert [len(re.findall(NAMED, row)) for row in faults] == [1] * len(faults)
    assert len(faults) > 20


def test_every_promise_names_its_tests():
    promises = rows(PROMISES, "## What to rely on")
    assert [row for row in promises if not re.search(NAMED, row)] == []
    assert len(promises) > 10


@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, name, marks=needs_of(file))
        for file, name in sorted({*re.findall(NAMED, FAULTS + PROMISES)})
    ],
)
def test_the_named_test_exists(file, name):
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
