"""Image folders: both layouts, labels by sorted class name, and errors that say what was expected."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from data_prep.imagefolder import catalogue, main
from data_prep.writer import safe_key
from vit.data.shards import open_split


def add(path: Path, number: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (number % 256, 50, 50)).save(path)
    return path


@pytest.fixture
def flat(tmp_path) -> Path:
    for name, num in (("zebra", 20), ("ape", 31)):
        for n in range(num):
            add(tmp_path / "flat" / name / f"{n}.jpg", n)
    return tmp_path / "flat"


def test_train_and_val(tmp_path, capsys):
    source = tmp_path / "source"
    for name in ("train/b/x.jpg", "train/b/deep/x.JPEG", "train/a/x.png", "train/a/x.y.jpg", "train/a/x.jpg", "val/b/x.jpg"):
        add(source / name)
    for name in ("train/a/.hidden.jpg", "train/.ipynb_checkpoints/c.jpg", "train/a/notes.txt"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("no image")
    out = tmp_path / "out"
    assert main([str(source), "--out", str(out), "--num-shards", "2", "--workers", "1"]) == 0
    assert "complete, 2 classes" in capsys.readouterr().out
    train, val = open_split(out, "train"), open_split(out, "val")
    assert train.class_names == ["a", "b"]
    labels = {train.key(i): int(train.index["label"][i]) for i in range(train.num_samples)}
    assert sorted(labels.values()) == [0, 0, 0, 1, 1]
    assert {"b_x", "b_deep_x", "a_x_y"} <= labels.keys()
    assert len(labels) == 5
    assert [val.key(i) for i in range(val.num_samples)] == ["b_x"]
    assert val.index["label"].tolist() == [1]
    assert val.read(0) == (source / "val/b/x.jpg").read_bytes()


@pytest.mark.parametrize("name", ["validation", "test"])
def test_other_names_of_val(tmp_path, name):
    for path in ("train/a/1.jpg", "train/b/1.jpg", f"{name}/a/2.jpg"):
        add(tmp_path / path)
    assert {split: len(samples) for split, samples in catalogue(tmp_path).splits.items()} == {"train": 2, "val": 1}


def test_classes_alone_are_split_by_class(flat):
    found = catalogue(flat, 0.2)
    counts = {split: [sum(s.label == label for s in samples) for label in (0, 1)] for split, samples in found.splits.items()}
    assert found.class_names == ["ape", "zebra"]
    assert counts == {"train": [25, 16], "val": [6, 4]}
    keys = {split: {s.key for s in samples} for split, samples in found.splits.items()}
    assert not keys["train"] & keys["val"]
    assert len(keys["train"] | keys["val"]) == 51
    add(flat / "ape" / "another.jpg")  # one image more moves at most one other
    assert len(keys["val"] - {s.key for s in catalogue(flat, 0.2).splits["val"]}) <= 1
    assert list(catalogue(flat, 0).splits) == ["train"]
    assert [len(s) for s in catalogue(flat).splits.values()] == [47, 5]


def test_awkward_names_give_safe_and_different_keys(tmp_path):
    for n, name in enumerate(("a.jpg", "a.png", "a b.jpg", "a_b.jpg", "d/e.jpg", "d_e.jpg", "x" * 200 + ".jpg", "é.jpg")):
        add(tmp_path / "c1" / name, n)
    add(tmp_path / "c2" / "a.jpg")
    samples = catalogue(tmp_path, 0).splits["train"]
    assert len({safe_key(s.key) for s in samples}) == len(samples) == 9


@pytest.mark.parametrize(
    ("paths", "argument", "message"),
    [
        ([], "missing", "missing: no such folder; expected a folder with one subfolder of images for each class"),
        ([], "", "no images"),
        (["a/notes.txt", "b/notes.txt"], "", "no images .* in its 2 subfolders"),
        (["a/1.jpg", "a/2.jpg"], "", r"only one class \(a\)"),
        (["a/1.jpg", "b/x.txt"], "", "classes without images: b"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/c/1.jpg"], "", "val: classes that train lacks: c"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/x.txt"], "", "val: no images"),
        (["val/a/1.jpg"], "", "has val/ but no train/"),
    ],
)
def test_errors_are_one_line_and_status_2(tmp_path, paths, argument, message, capsys):
    source = tmp_path / "source"
    source.mkdir()
    for path in paths:
        add(source / path) if path.endswith("jpg") else (
            (source / path).parent.mkdir(parents=True, exist_ok=True),
            (source / path).write_text(""),
        )
    assert main([str(source / argument), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_unreadable_image_is_named_with_its_path(flat, tmp_path, capsys):
    bad = flat / "ape" / "3.jpg"
    bad.write_bytes(bad.read_bytes()[:-20])
    assert main([str(flat), "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    assert f"ape_3 ({bad}): " in capsys.readouterr().err
    assert not (tmp_path / "out" / "_info.json").exists()


def test_runs_without_torch(flat, tmp_path):
    """In the command and in its workers. (`sys.modules["torch"] = None` would be shorter, but scipy stumbles over it.)"""
    (tmp_path / "blocked" / "torch").mkdir(parents=True)
    (tmp_path / "blocked" / "torch" / "__init__.py").write_text("raise ImportError('torch is blocked')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'blocked'}:{os.getcwd()}"}
    assert subprocess.run([sys.executable, "-c", "import torch"], env=env, capture_output=True).returncode == 1
    out = str(tmp_path / "out")
    for command in (
        ["imagefolder", str(flat), "--out", out],
        ["index", out],
        ["digits", "--out", f"{out}-digits", "--image-size", "16", "--renderings", "1"],
    ):
        subprocess.run([sys.executable, "-m", f"data_prep.{command[0]}", *command[1:], "--workers", "1"], env=env, check=True)
    code = "import sys; from vit.data.shards import open_split; open_split(sys.argv[1], 'val').read(0)"
    subprocess.run([sys.executable, "-c", code, out], env=env, check=True)


def test_help_is_readable():
    done = subprocess.run([sys.executable, "-m", "data_prep.imagefolder", "--help"], capture_output=True, text=True, check=True)
    for flag in ("SOURCE", "--out ROOT", "--num-shards N", "--workers N", "--seed N", "--val-fraction F"):
        assert flag in done.stdout
