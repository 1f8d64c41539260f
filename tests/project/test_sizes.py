"""Functions that a reader can hold in the head, and folders that a reader can list.

What was larger when the limits came may only shrink; then its line here goes.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_LINES = 80
FOLDER_FILES = 20
LARGER = {"tests/helpers/servers.py:_answer": 84}
"""`file:function` or folder -> how large it may still be."""
LISTED = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT).stdout
CODE = [
    Path(name) for name in LISTED.splitlines() if Path(name).suffix in (".py", ".c", ".h", ".sh")
]


def sizes() -> dict[str, tuple[int, int]]:
    """What there is -> its size and the limit of its kind."""
    found: dict[str, tuple[int, int]] = {}
    for path in CODE:
        text = (ROOT / path).read_text()
        if path.name != "__init__.py":
            folder = str(path.parent)
            found[folder] = (found.get(folder, (0, 0))[0] + 1, FOLDER_FILES)
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    assert node.end_lineno is not None
                    lines = node.end_lineno - node.lineno + 1
                    name = f"{path}:{node.name}"
                    found[name] = (max(lines, found.get(name, (0, 0))[0]), FUNCTION_LINES)
    return found


@pytest.mark.skipif(not CODE, reason="not a git checkout")
def test_nothing_is_larger_than_its_limit_or_than_it_was():
    found = sizes()
    too_large = [
        f"{name}: {size}, at most {LARGER.get(name, limit)}"
        for name, (size, limit) in found.items()
        if size > LARGER.get(name, limit)
    ]
    assert not too_large, "split by role, or say less"


def test_what_has_shrunk_has_the_limit_of_all():
    found = sizes()
    assert not [name for name in LARGER if name not in found or found[name][0] <= found[name][1]]
    assert all(size - found[name][0] < 10 for name, size in LARGER.items()), "lower the number"
