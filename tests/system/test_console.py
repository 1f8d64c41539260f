"""Test that a process writes only to its own streams, even if it was started without any
streams."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
