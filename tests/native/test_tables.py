"""Test that the comment at the top of vit/data/decode/c/blocks.h describes its tables correctly,
and that the C files compile without warnings."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from vit.data.decode.native import SOURCES

WARNINGS = ["-Wall", "-Wextra", "-Werror"]
pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None and os.environ.get("VIT_REQUIRE_NATIVE") != "1",
    reason="no gcc: apt-get install gcc",
)


def test_the_comment_describes_the_tables_correctly(tmp_path):
    source = str(Path(__file__).with_name("tables.c"))
    program = str(tmp_path / "tables")
    subprocess.run(["gcc", "-O1", *WARNINGS, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "tests/native/test_tables.py" in (SOURCES / "blocks.h").read_text()


@pytest.mark.parametrize("name", ["window.c", "transcode.c"])
def test_c_files_compile_without_warnings_about_aliasing(name, tmp_path):
    """A compiler may reorder memory accesses that violate C's aliasing rules. gcc warns about the
    violations that it detects."""
    aliasing = ["-fstrict-aliasing", "-Wstrict-aliasing=1"]
    options = ["-O3", *WARNINGS, *aliasing, "-c"]
    command = ["gcc", *options, str(SOURCES / name), "-o", str(tmp_path / "object")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", [SOURCES, Path(__file__).parent], ids=lambda path: path.name)
def test_lines_of_c_have_at_most_100_columns(folder):
    """ruff enforces the same limit for Python files. `.clang-format` configures the layout of the C
    files."""
    for path in sorted(folder.glob("*.[ch]")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert len(line) <= 100, f"{path}:{number}"
