"""Test that functions and folders do not exceed a size limit.

`LARGER` lists exceptions with their own limits, which must not be raised. When a function or folder
fits the general limit, remove its exception.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_STATEMENTS = 55
"""The maximum number of statements in a function. Lines are not counted, so that blank lines and
comments do not matter."""
FOLDER_FILES = 20
LARGER = {"tests/helpers/servers.py:_answer": 71}
"""Maps each `file:function` or folder that exceeds the general limit to its current size."""
LISTED = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT).stdout
CODE = [
    Path(name)
    for name in LISTED.splitlines()
    if Path(name).suffix in (".py", ".c", ".h", ".sh") and (ROOT / name).is_file()
]


def sizes() -> dict[str, tuple[int, int]]:
    measured: dict[str, tuple[int, int]] = {}
    for path in CODE:
        text = (ROOT / path).read_text()
        if path.name != "__init__.py":
            folder = str(path.parent)
            measured[folder] = (measured.get(folder, (0, 0))[0] + 1, FOLDER_FILES)
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    inside = [each for each in ast.walk(node) if isinstance(each, ast.stmt)]
                    number = len(inside) - 1 - (ast.get_docstring(node) is not None)
                    name = f"{path}:{node.name}"
                    largest = max(number, measured.get(name, (0, 0))[0])
                    measured[name] = (largest, FUNCTION_STATEMENTS)
    return measured


@pytest.mark.skipif(not CODE, reason="not a git checkout")
def test_nothing_exceeds_its_limit():
    measured = sizes()
    too_large = [
        f"{name}: {size}, at most {LARGER.get(name, limit)}"
        for name, (size, limit) in measured.items()
        if size > LARGER.get(name, limit)
    ]
    assert not too_large, (
        "these functions or folders are too large: split them by role, or shorten them"
    )


def test_exceptions_from_the_limits_are_still_needed():
    measured = sizes()
    assert not [
        name for name in LARGER if name not in measured or measured[name][0] <= measured[name][1]
    ]
    assert all(size - measured[name][0] < 10 for name, size in LARGER.items()), (
        "these limits are higher than needed: lower the numbers"
    )
