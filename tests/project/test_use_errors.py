"""Test the rows of errors/rows.yaml about prediction and plots.

The commands run in the process of the test, and raise ValueError if they detect a mistake.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from error_rows import Row, pattern_of, rows, snapshot
from PIL import Image
from processes import TINY, as_by_another_program, run_here, write_config
from safetensors import safe_open
from safetensors.torch import save_file

ROWS = rows("Prediction and pictures")


class Left(Exception):
    """The exception raised when a command exits with a nonzero status."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    folder = tmp_path_factory.mktemp("base")
    config = write_config(folder, shards, steps=2)
    run_here("launch/train.py", "--config", config, *TINY, f"run.dir={folder / 'run'}")
    return folder / "run"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    Image.new("RGB", (20, 20)).save(tmp_path / "photo.png")
    (tmp_path / "page.jpg").write_text("<!DOCTYPE html>")
    (tmp_path / "photo.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (tmp_path / "empty").mkdir()
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "1.cr2").write_bytes(b"x")
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    with tarfile.open(tmp_path / "cut.tar", "w") as tar:
        tar.add(tmp_path / "photo.png", "a.png")
    os.truncate(tmp_path / "cut.tar", 600)
    return tmp_path


def predict(*arguments: str) -> Callable[[Path, Path], None]:
    """Return a scenario that runs `launch/predict.py` with the trained run. Arguments that begin
    with / are relative to the scenario's folder."""

    def act(base: Path, place: Path) -> None:
        paths_in_place = [f"{place}{word}" if word.startswith("/") else word for word in arguments]
        if "--checkpoint" not in paths_in_place:
            paths_in_place += ["--checkpoint", str(base)]
        run_here("launch/predict.py", *paths_in_place, "--device", "cpu")

    return act


def visualize(*arguments: str) -> Callable[[Path, Path], None]:
    def act(base: Path, place: Path) -> None:
        paths_in_place = [f"{place}{word}" if word.startswith("/") else word for word in arguments]
        run_here(
            "launch/visualize.py",
            *[str(base) if word == "RUN" else word for word in paths_in_place],
        )

    return act


def evaluate(*arguments: str) -> Callable[[Path, Path], None]:
    def act(base: Path, place: Path) -> None:
        run_here("launch/eval.py", base, *arguments, "--device", "cpu")

    return act


def with_other_classes(base: Path, place: Path) -> None:
    source = base / "weights" / "last.safetensors"
    with safe_open(source, "pt") as file:
        metadata = as_by_another_program(file.metadata())
        metadata["class_names"] = '["red", "green", "blue"]'
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, place / "other.safetensors", metadata)
    run_here("launch/visualize.py", "compare", source, place / "other.safetensors")


SCENARIOS = {
    "nothing of that name to predict": predict("/nowhere.jpg"),
    "a folder without images": predict("/empty"),
    "a folder of photos in another format": predict("/raw"),
    "a tar that is cut off": predict("/cut.tar"),
    "several of these at once": predict("/nowhere.jpg", "/photo.png", "/empty"),
    "an empty list on stdin": predict("-"),
    "an image among others that is a web page, cut off, or gone": predict(
        "/photo.png", "/page.jpg"
    ),
    "a photo in HEIC": predict("/photo.png", "/photo.HEIC"),
    "no weights to predict with": predict("/photo.png", "--checkpoint", "/empty"),
    "names of classes that are too few": predict("/photo.png", "--classes", "/names.txt"),
    "a size that is no multiple of the patch": predict("/photo.png", "--image-size", "20"),
    "a CSV where nothing can be written": predict("/photo.png", "--csv", "/photo.png/out.csv"),
    "attention without a sheet": predict("/photo.png", "--attention"),
    "a picture in a format that there is not": visualize("filters", "RUN", "--out", "/a.gif"),
    "a word of visualize.py that there is not": visualize("filtres", "RUN"),
    "two models of other classes side by side": with_other_classes,
}


@pytest.mark.parametrize("row", [row.case() for row in ROWS])
def test_the_mistake_has_the_stated_result(row: Row, base, place, monkeypatch, capfd):
    from vit.distributed import exit

    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr(exit, "leave", leave)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO()))
    before = snapshot(place)
    if row.status == 2:
        with pytest.raises(ValueError) as ended:  # noqa: PT011  # the row has the message
            SCENARIOS[row.what](base, place)
        assert re.fullmatch(pattern_of(row.printed), f"error: {ended.value}"), ended.value
    else:
        with pytest.raises(Left) as left:
            SCENARIOS[row.what](base, place)
        assert left.value.args == (row.status,)
        printed = capfd.readouterr().err
        assert re.search(f"^{pattern_of(row.printed)}$", printed, re.MULTILINE), printed
    (place / "other.safetensors").unlink(missing_ok=True)
    assert snapshot(place) == before, "files were written or changed"


def test_every_scenario_has_a_row_and_every_row_a_scenario():
    assert [row.what for row in ROWS] == list(SCENARIOS)
