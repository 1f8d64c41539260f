"""Each row of the table of faults in docs/resume.md names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"<br>`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "resume.md").read_text())


def test_every_row_names_a_test():
    table = (ROOT / "docs" / "resume.md").read_text().partition("## Faults, one by one")[2]
    rows = [line for line in table.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert len(rows) - 1 == len(NAMED) > 20


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_the_test_exists(file, name):
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
