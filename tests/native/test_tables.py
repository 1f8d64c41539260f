"""What the page at the top of vit/data/decode/c/blocks.h tells about its tables is so, and the C
compiles without a warning."""

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


def test_the_page_about_the_tables(tmp_path):
    subprocess.run(
        [
            "gcc",
            "-O1",
            *WARNINGS,
            str(Path(__file__).with_name("tables.c")),
            "-o",
            str(tmp_path / "tables"),
        ],
        check=True,
    )
    done = subprocess.run([str(tmp_path / "tables")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "tests/native/test_tables.py" in (SOURCES / "blocks.h").read_text()


@pytest.mark.parametrize("name", ["window.c", "transcode.c"])
def test_no_warning_and_no_memory_that_is_used_as_two_types(name, tmp_path):
    """C's aliasing rules: a compiler that relies on them may reorder what breaks them. gcc warns
    where it sees that."""
    aliasing = ["-fstrict-aliasing", "-Wstrict-aliasing=1"]
    command = [
        "gcc",
        "-O3",
        *WARNINGS,
        *aliasing,
        "-c",
        str(SOURCES / name),
        "-o",
        str(tmp_path / "object"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
