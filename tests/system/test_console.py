"""Test that a process writes only to its own streams, even if it was started without any
streams, and that printing never ends a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from processes import REPOSITORY
from small_shards import add

from vit.system import redact

PROGRAM = """
import os, sys
from vit.system.redact import guard_console
guard_console()
guard_console()
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
    print("out")
    print("err", file=sys.stderr, flush=True)
    os.write(2, b"by C++")
    sys.stdout.flush()
    sys.stdin.read()
    assert not (sys.stdout.isatty() or sys.stderr.isatty())
    file.write("its own")
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_started_without_streams_prints_into_none_of_its_files(closed, tmp_path):
    path = tmp_path / "file"
    line = f'exec "$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-c", PROGRAM, path],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert path.read_text() == "its own"


CLASSES = ("猫", "Käse & Öl")


def test_names_are_escaped_on_a_stream_that_cannot_encode_them():
    program = (
        "from vit.system.redact import guard_console; guard_console(); print('猫 ü', '\\udcff')"
    )
    for encoding, printed in (
        ("ascii", b"\\u732b \\xfc \\udcff\n"),
        ("utf-8", "猫 ü \\udcff\n".encode()),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            check=True,
        )
        assert done.stdout == printed


def test_a_command_ends_well_and_writes_utf_8_if_stdout_is_ascii(tmp_path):
    for name in CLASSES:
        for number in range(2):
            add(tmp_path / "in" / name / f"é{number}.png", number)
    out = tmp_path / "ö"
    for command in (
        ["imagefolder", tmp_path / "in", "--out", out, "--val-fraction", "0", "--workers", "1"],
        ["verify", out],
    ):
        done = subprocess.run(
            [sys.executable, "-m", f"data_prep.{command[0]}", *map(str, command[1:])],
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "\\xf6: " in done.stdout
    info = json.loads((out / "_info.json").read_text("utf-8"))
    assert set(info["class_names"]) == set(CLASSES)
    assert all(name in (out / "dataset.md").read_text("utf-8") for name in CLASSES)


def test_a_line_longer_than_a_screen_is_cut_in_its_middle():
    line = f"error: first{'x' * 5000}: remedy"
    cut = redact.printed(f"{line}\nshort")
    assert cut.startswith("error: first")
    assert cut.endswith("x: remedy\nshort")
    first = cut.partition("\n")[0]
    assert len(first) < 24 * 80
    assert "x [...] x" in first
    assert redact.printed("y" * 1800) == "y" * 1800
