"""Read the rows of errors/rows.yaml, and define command prefixes that make commands fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import warm_python
import yaml
from checksums import digest
from extras.deleted_extras import needs
from processes import REPOSITORY, TINY, call, command, environment, write_config

from vit.checkpoint.checkpoint import complete_checkpoints, read_info

DOCUMENT = REPOSITORY / "tests" / "project" / "errors" / "rows.yaml"
NEEDS_MOUNT = "needs Linux and the right to mount a file system"


class Row(NamedTuple):
    """A row of the error table: the mistake, the printed lines with <placeholders>, and the exit
    status."""

    what: str
    printed: str
    status: int
    needs: str = ""
    """The folder in vit/extras/ that the scenario needs, or an empty string."""

    def case(self, *marks: pytest.MarkDecorator) -> Any:
        """Return the row as a test parameter. The test is skipped if the extra that it needs has
        been deleted."""
        needed = [needs(self.needs)] if self.needs else []
        return pytest.param(self, id=self.what, marks=[*needed, *marks])


def rows(section: str) -> list[Row]:
    parts = yaml.load(DOCUMENT.read_text(), yaml.CSafeLoader)[section].values()
    return [Row(**row) for part in parts for row in part]


def pattern_of(printed: str) -> str:
    """Convert `printed` to a regular expression in which each <placeholder> matches one or more
    characters of a line."""
    return ".+".join(map(re.escape, re.split(r"<[^<>\n]+>", printed)))


def snapshot(folder: Path) -> dict[str, str]:
    """Return the digests of all files in `folder` except the run's lock file."""
    return {
        str(p.relative_to(folder)): digest(p.read_bytes())
        for p in folder.rglob("*")
        if p.is_file() and p.name != ".lock"
    }


# ---- prefixes for commands -----------------------------------------------------------------------


def python(code: str) -> tuple[object, ...]:
    """Return a command prefix that runs `code` in the same process before the command."""
    return (sys.executable, "-c", f"{code}\nimport os, sys\nos.execvp(sys.argv[1], sys.argv[1:])")


WITH_SHORT_FILES = python(
    "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
)
"""A command prefix that limits the file size to less than the size of a checkpoint. Writing a
checkpoint then fails midway, as it does when a disk becomes full."""
# Drop the two capabilities that allow root to ignore file permissions.
WITHOUT_PRIVILEGES = python(
    "import ctypes, sys\nif sys.platform == 'linux':\n [ctypes.CDLL(None).prctl(24, c, 0, 0, 0) for"
    " c in (1, 2)]"
)


@contextmanager
def small_disk(place: Path, options: str = "size=8m") -> Iterator[Path]:
    """Mount an 8 MiB file system. The mount options in `options` may set a different size."""
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
    """Fill `disk` with one file until only `free_kib` remain free, and return this file."""
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free - free_kib * 1024))
    return filler


# ---- training and evaluation ---------------------------------------------------------------------


TRAINING_ROWS = rows("Training and evaluation")


class Place:
    """A folder with a config in which commands are run. A `Place` stores the output of the last
    command and the files that this command changed."""

    def __init__(self, folder: Path, shards: Path, finished: Path):
        self.folder = folder
        self.shards = shards
        self.finished = finished
        self.run_dir = folder / "run"
        self.config = write_config(folder, shards)

    def run(self, *line: object, **variables: str) -> None:
        self.before = snapshot(self.folder)
        env = {**environment(), "CUDA_VISIBLE_DEVICES": "", **variables}
        self.done = call([str(part) for part in line], env)
        self.after = snapshot(self.folder)

    def train(
        self,
        *overrides: object,
        prefix: tuple[object, ...] = (),
        config: Path | None = None,
        **variables: str,
    ) -> None:
        """Run `launch/train.py` on one rank.

        If a prefix or environment variables are given, a new interpreter is started, because they
        would have no effect on an interpreter that is already running.
        """
        arguments = [
            "--config",
            config or self.config,
            f"run.dir={self.run_dir}",
            *TINY,
            *overrides,
        ]
        python = sys.executable if prefix or variables else warm_python.python(environment())
        self.run(
            *prefix, *command("launch/train.py", *arguments, ranks=0, python=python), **variables
        )

    def evaluate(self, checkpoint: Path, *flags: object) -> None:
        python = warm_python.python(environment())
        self.run(
            *command(
                "launch/eval.py",
                "--checkpoint",
                checkpoint,
                "--num-workers",
                0,
                *flags,
                ranks=0,
                python=python,
            )
        )

    def own_shards(self) -> Path:
        root = shutil.copytree(self.shards, self.folder / "shards")
        self.config.write_text(self.config.read_text().replace(str(self.shards), str(root)))
        return root


class Scenarios:
    """The test scenarios for the rows of "Training and evaluation" in the error table. The
    decorator `@scenario("first cell of the row")` registers a function that takes a `Place`.

    Each test checks the output, the exit status and the remaining files. If a mistake is found
    before training starts, the command must not create any files. If a mistake is found later, all
    files must be complete.
    """

    def __init__(self) -> None:
        self.of: dict[str, Callable[[Place], None]] = {}
        self.begun: set[str] = set()
        """The rows whose mistake is found only after training has started."""
        self.slow: set[str] = set()
        """The rows whose scenarios take more than five seconds."""

    def __call__(
        self, problem: str, *, begun: bool = False, slow: bool = False
    ) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
        def register(function: Callable[[Place], None]) -> Callable[[Place], None]:
            assert problem not in self.of, f"two scenarios for {problem}"
            self.of[problem] = function
            self.begun.update([problem] if begun else [])
            self.slow.update([problem] if slow else [])
            return function

        return register

    def rows(self) -> list[Any]:
        return [
            row.case(*([pytest.mark.slow] if row.what in self.slow else []))
            for row in TRAINING_ROWS
            if row.what in self.of
        ]

    def check(self, row: Row, place: Place) -> None:
        """Check that the output, the exit status and the files match the row."""
        output = place.done.stderr
        assert place.done.returncode == row.status, output
        assert re.search(f"^{pattern_of(row.printed)}$", output, re.MULTILINE), (
            f"expected\n{row.printed}\nbut this was printed:\n{output}"
        )
        if row.printed.startswith("error: "):
            assert "Traceback" not in output
            assert len(re.findall(r"^(rank \d+: )?error: ", output, re.MULTILINE)) == 1, output
            assert re.search(f"^{pattern_of(row.printed)}\\s*\\Z", output, re.MULTILINE), (
                f"more was printed after the expected lines:\n{output}"
            )
        if row.what not in self.begun:
            assert place.after == place.before, "files were written or changed"
            return
        changed = {name for name in place.before if place.after.get(name) != place.before[name]}
        assert {Path(name).name for name in changed} <= {"metrics.jsonl", "config.yaml"}, (
            "files from before the command have changed"
        )
        left_over = [name for name in place.after if name.endswith(".tmp") or "/.tmp_" in name]
        assert not left_over, "partial files were left"
        for checkpoint in complete_checkpoints(place.run_dir):
            read_info(checkpoint, verify=True)
