"""The tables of docs/errors.md for tests that provoke their rows, and what commands are started
under to make them fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import REPOSITORY

DOCUMENT = REPOSITORY / "docs" / "errors.md"
NEEDS_MOUNT = "needs Linux and the right to mount a file system"


class Row(NamedTuple):
    """A row of a table: what is wrong, the lines that are printed, with <placeholders>, and the
    exit status."""

    what: str
    printed: str
    status: int


def rows(heading: str) -> list[Row]:
    """The rows under a `##` heading of the page and the headings below it."""
    section = re.split(r"^## (.+)\n", DOCUMENT.read_text(), flags=re.MULTILINE)
    text = dict(zip(section[1::2], section[2::2], strict=True))[heading]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [
        Row(
            row[0],
            "\n".join(part.strip().strip("`").rstrip() for part in row[1].split("<br>")),
            int(row[2]),
        )
        for row in cells
        if len(row) == 3 and row[2].isdigit()
    ]


def pattern_of(printed: str) -> str:
    """The text as a pattern: a <placeholder> stands for one or more characters of its line."""
    return ".+".join(map(re.escape, re.split(r"<[^<>\n]+>", printed)))


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`; the lock of a run only says which process had it last."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name != ".lock"
    }


# ---- what a command can be started under ---------------------------------------------------------


def python(code: str) -> tuple[object, ...]:
    """A prefix that runs `code` and then becomes the command behind it."""
    return (sys.executable, "-c", f"{code}\nimport os, sys\nos.execvp(sys.argv[1], sys.argv[1:])")


# Root passes over permission bits by two capabilities; without them it is refused like others.
WITH_SHORT_FILES = python(
    "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
)
"""A checkpoint is longer: writing it fails in the middle, as on a full disk."""
WITHOUT_PRIVILEGES = python(
    "import ctypes, sys\nif sys.platform == 'linux':\n [ctypes.CDLL(None).prctl(24, c, 0, 0, 0) for"
    " c in (1, 2)]"
)


@contextmanager
def small_disk(place: Path, options: str = "size=8m") -> Iterator[Path]:
    """A file system of 8 MiB, or what `options` of mount say."""
    place.mkdir()
    if (
        sys.platform != "linux"
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True
        ).returncode
    ):
        pytest.skip(NEEDS_MOUNT)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def leave_free(disk: Path, free_kib: int) -> Path:
    """Fill `disk` up to `free_kib`; returns the file to delete."""
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - free_kib * 1024))
    return filler
