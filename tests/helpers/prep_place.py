"""Define a folder for the scenarios of tests/data_prep/test_prep_errors.py, which run data_prep
commands."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_rows import snapshot
from fake_imagenet import Fake, as_official, make_fake
from processes import REPOSITORY, environment, jpeg

from data_prep.write.catalog import Catalog, open_catalog
from vit.data.shards.index_file import left_out
from vit.data.shards.info_file import read_sidecar
from vit.data.shards.tar import scan_tar

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
KIT = "ILSVRC2012_devkit_t12.tar.gz"


_catalogs = ExitStack()


def new_catalog(*arguments: Any, **options: Any) -> Catalog:
    """Call `open_catalog`. Keep a reference to the result, so that the folder exists until the
    test ends."""
    return _catalogs.enter_context(open_catalog(*arguments, **options))


def close_catalogs() -> None:
    _catalogs.close()


class Place:
    """A folder in which a scenario runs data_prep commands. It stores the last command's output and
    the files that the command changed."""

    def __init__(self, folder: Path, captured: pytest.CaptureFixture[str]):
        self.folder = folder
        self.out = folder / "out"
        self.captured = captured

    def run(
        self,
        module: str,
        *arguments: object,
        prefix: tuple[object, ...] = (),
        alone: bool = False,
        fork: Callable[[], None] | None = None,
    ) -> None:
        """Run `python -m data_prep.<module>`. With `alone` or a prefix, run the command in a
        separate process. With `fork`, run the command in a fork of this process that first calls
        `fork`."""
        self.before = snapshot(self.folder)
        self.again = lambda: self.run(module, *arguments, prefix=prefix, alone=True)
        self.captured.readouterr()
        line = [str(argument) for argument in arguments]
        if prefix or alone:
            self.status = subprocess.run(
                [*map(str, prefix), *command(module), *line],
                cwd=REPOSITORY,
                env=environment(),
                timeout=240,
            ).returncode
        else:
            main = importlib.import_module(f"data_prep.{module}").main
            self.status = forked(fork, main, line) if fork else status_of(main, line)
        self.stdout, self.stderr = self.captured.readouterr()
        self.after = snapshot(self.folder)

    def refused(self, message: str) -> None:
        """Check that the command has printed one error that matches `message`, and has changed no
        file. All lines of the error except the first and the last must be indented."""
        assert self.status == 2, self.stdout + self.stderr
        assert re.search(message, self.stderr), (
            f"expected\n{message}\nbut this was printed:\n{self.stderr}"
        )
        lines = self.stderr[self.stderr.index("error: ") :].splitlines()
        assert not [line for line in lines[1:-1] if not line.startswith("  ")], self.stderr
        assert self.after == self.before, "files were written or changed"

    def prepare(self, module: str, *arguments: object, **options: Any) -> None:
        """Run the command `data_prep.<module>`, which writes to `out`."""
        self.run(module, *arguments, "--out", self.out, "--workers", 1, **options)

    def continues(self) -> None:
        """Check that running the same command again completes the dataset.

        The first call's output is kept for later checks.
        """
        first_call = dict(self.__dict__)
        self.again()
        assert self.status == 0, self.stderr
        whole_shards_only(self.out, complete=True)
        self.__dict__.update(first_call)


def status_of(main: Callable[[list[str]], int], line: list[str]) -> int:
    try:
        return main(line)
    except SystemExit as stopped:  # raised by argparse
        return int(stopped.code or 0)


def forked(before: Callable[[], None], main: Callable[[list[str]], int], line: list[str]) -> int:
    """Run a command in a fork of this process that first calls `before`, and wait for the command
    and its workers. Return the exit status, which is negative if a signal killed the fork."""
    if pid := os.fork():
        _, status = os.waitpid(pid, 0)
        wait_for_end_of_group(pid)
        return os.waitstatus_to_exitcode(status)
    status = 99
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist ignores SIGINT
        before()
        status = status_of(main, line)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for_end_of_group(group: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.01)


def without_privileges() -> None:
    """Drop the two capabilities that allow root to ignore permission bits."""
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capget(head, sets)
    sets[0] &= ~0b110
    ctypes.CDLL(None).capset(head, sets)


def command(module: str) -> list[str]:
    return [sys.executable, "-m", f"data_prep.{module}"]


def whole_shards_only(out: Path, complete: bool = False) -> None:
    """Check that each tar can be read to its end and matches its sidecar. If `complete` is true,
    all tars must exist."""
    assert not [path.name for path in out.rglob("*") if path.name.endswith((".tmp", ".part"))], (
        "partial files were left"
    )
    for tar in out.glob("*.tar"):
        sidecar = read_sidecar(tar)
        assert sidecar is not None, f"{tar.name} has no sidecar"
        assert len(scan_tar(tar, left_out=left_out(tar))) == sidecar["num_samples"]
        assert tar.stat().st_size == sidecar["bytes"]
    if complete:
        info = json.loads((out / "_info.json").read_text())
        assert {name for split in info["splits"].values() for name in split["filenames"]} == {
            tar.name for tar in out.glob("*.tar")
        }
        assert not [
            path.name
            for path in out.iterdir()
            if path.name.startswith(("_catalog", "_spool", "_writing"))
        ]


Scenario = Callable[[Place], None]
SCENARIOS: dict[str, Scenario] = {}
BEGUN: set[str] = set()


def scenario(problem: str, *, begun: bool = False) -> Callable[[Scenario], Scenario]:
    """Register the scenario for the row `problem`. `begun` tells whether the command has already
    started to write shards when the problem occurs."""

    def register(function: Scenario) -> Scenario:
        SCENARIOS[problem] = function
        BEGUN.update([problem] if begun else [])
        return function

    return register


# ---- sources to prepare --------------------------------------------------------------------------


@functools.cache
def imagenet() -> Fake:
    return make_fake(num_classes=10, train_per_class=5, val_per_class=2)


def official(place: Place, fake: Fake | None = None) -> Path:
    return as_official(fake or imagenet(), place.folder)[0]


def images(
    place: Place, classes: tuple[str, ...] = ("cat", "dog"), each: int = 12, side: int = 24
) -> Path:
    rng = np.random.default_rng(0)
    for name, number in itertools.product(classes, range(each)):
        path = place.folder / "images" / name / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(rng.integers(0, 256, (side, side, 3), np.uint8)))
    return place.folder / "images"
