"""Define a folder in which the scenarios of tests/data_prep/test_prep_errors.py run data_prep
commands."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from error_rows import snapshot
from fake_imagenet import Fake, as_official, make_fake
from processes import REPOSITORY, environment, jpeg

from data_prep.write.catalogue import Catalogue, open_catalogue
from vit.data.shards.index_file import left_out
from vit.data.shards.info_file import read_sidecar
from vit.data.shards.tar import scan_tar

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
KIT = "ILSVRC2012_devkit_t12.tar.gz"


_catalogues = ExitStack()


def new_catalogue(*arguments: Any, **options: Any) -> Catalogue:
    """Call `open_catalogue`, and keep a reference to the result so that its folder exists until the
    test ends."""
    return _catalogues.enter_context(open_catalogue(*arguments, **options))


def close_catalogues() -> None:
    _catalogues.close()


class Place:
    """A folder in which data_prep commands are run. A `Place` stores the output of the last command
    and the files that this command changed."""

    def __init__(self, folder: Path, captured: pytest.CaptureFixture[str]):
        self.folder = folder
        self.out = folder / "out"
        self.captured = captured

    def run(
        self, module: str, *arguments: object, prefix: tuple[object, ...] = (), alone: bool = False
    ) -> None:
        """Run `python -m data_prep.<module>`. If `alone` is true or a prefix is given, the command
        runs in a separate process."""
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
            try:
                self.status = importlib.import_module(f"data_prep.{module}").main(line)
            except SystemExit as stopped:
                self.status = int(stopped.code or 0)
        self.stdout, self.stderr = self.captured.readouterr()
        self.after = snapshot(self.folder)

    def prepare(self, module: str, *arguments: object, **options: Any) -> None:
        self.run(module, *arguments, "--out", self.out, "--workers", 1, **options)

    def continues(self) -> None:
        """Run the same command again, and check that it completes the dataset.

        The output of the first run is kept for later checks.
        """
        first_call = dict(self.__dict__)
        self.again()
        assert self.status == 0, self.stderr
        whole_shards_only(self.out, complete=True)
        self.__dict__.update(first_call)


def command(module: str) -> list[str]:
    return [sys.executable, "-m", f"data_prep.{module}"]


def whole_shards_only(out: Path, complete: bool = False) -> None:
    """Check that each tar can be read completely and matches its sidecar file. If `complete` is
    true, all tars must exist."""
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
            if path.name.startswith(("_catalogue", "_spool", "_writing"))
        ]


Scenario = Callable[[Place], None]
SCENARIOS: dict[str, Scenario] = {}
BEGUN: set[str] = set()


def scenario(problem: str, *, begun: bool = False) -> Callable[[Scenario], Scenario]:
    """Register the scenario for the row `problem`. `begun` states whether the command fails only
    after it has started to write shards."""

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
