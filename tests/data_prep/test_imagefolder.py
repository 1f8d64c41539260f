"""Test image folders: both layouts, labels by sorted class name, and clear errors."""

import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from prep_place import new_catalog
from small_shards import add

from data_prep.errors import PrepError
from data_prep.imagefolder import main, source
from data_prep.read.split_names import splits_of_folders
from data_prep.write.samples import Sample, safe_key
from vit.data.storage.opening import open_split

HELD_OUT = [
    "ape_11",
    "ape_21",
    "ape_22",
    "ape_26",
    "ape_27",
    "ape_8",
    "zebra_10",
    "zebra_14",
    "zebra_19",
    "zebra_7",
]


def listed(folder: Path, val_fraction: float | None = None) -> dict[str, list[Sample]]:
    with tempfile.TemporaryDirectory() as temporary:
        catalog = new_catalog(source(folder, val_fraction), Path(temporary), seed=0)
        return {
            split: catalog.table(split).samples(range(total))
            for split, total in catalog.splits.items()
        }


def test_train_and_val_folders_become_splits(tmp_path, capsys):
    source = tmp_path / "source"
    for name in (
        "train/b/x.jpg",
        "train/b/deep/x.JPEG",
        "train/a/x.png",
        "train/a/x.y.jpg",
        "train/a/x.jpg",
        "val/b/x.jpg",
    ):
        add(source / name)
    for name in ("train/a/.hidden.jpg", "train/.ipynb_checkpoints/c.jpg", "train/a/notes.txt"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("no image")
    out = tmp_path / "out"
    assert main([str(source), "--out", str(out), "--num-shards", "2", "--workers", "1"]) == 0
    assert "complete, 2 classes" in capsys.readouterr().out
    train = open_split(out, "train")
    val = open_split(out, "val")
    assert train.class_names == ["a", "b"]
    labels = {train.key(i): int(train.index["label"][i]) for i in range(train.num_samples)}
    assert sorted(labels.values()) == [0, 0, 0, 1, 1]
    assert {"b_x", "b_deep_x", "a_x_y"} <= labels.keys()
    assert len(labels) == 5
    assert [val.key(i) for i in range(val.num_samples)] == ["b_x"]
    assert val.index["label"].tolist() == [1]
    assert val.read(0) == (source / "val/b/x.jpg").read_bytes()


@pytest.mark.parametrize("name", ["validation", "test"])
def test_other_names_of_val_are_recognized(tmp_path, name):
    for path in ("train/a/1.jpg", "train/b/1.jpg", f"{name}/a/2.jpg"):
        add(tmp_path / path)
    assert {split: len(samples) for split, samples in listed(tmp_path).items()} == {
        "train": 2,
        "val": 1,
    }


def test_the_splits_do_not_depend_on_the_order_of_the_folders():
    """Two groups of folders contain train and val. Sets order names by Python's hash seed."""
    names = ["cat_train", "cat_val", "dog_train", "dog_val"]
    found = [splits_of_folders(order) for order in permutations(names)]
    assert found == [{"cat_train": "train", "cat_val": "val"}] * len(found)


def test_class_folders_without_splits_are_split_by_class(flat):
    splits = listed(flat, 0.2)
    counts = {
        split: [sum(s.label == label for s in samples) for label in (0, 1)]
        for split, samples in splits.items()
    }
    assert counts == {"train": [25, 16], "val": [6, 4]}
    keys = {split: {s.key for s in samples} for split, samples in splits.items()}
    assert not keys["train"] & keys["val"]
    assert len(keys["train"] | keys["val"]) == 51
    add(flat / "ape" / "another.jpg")  # Adding an image may move at most one other image.
    assert len(keys["val"] - {s.key for s in listed(flat, 0.2)["val"]}) <= 1
    assert list(listed(flat, 0)) == ["train"]
    assert [len(s) for s in listed(flat).values()] == [47, 5]


def test_the_choice_of_held_out_images_never_changes(flat):
    """If the choice changed, val would contain images on which a model was trained. The expected
    choice is that of the project's first version."""
    assert sorted(sample.key for sample in listed(flat, 0.2)["val"]) == HELD_OUT


def test_awkward_names_give_safe_and_different_keys(tmp_path):
    for n, name in enumerate(
        ("a.jpg", "a.png", "a b.jpg", "a_b.jpg", "d/e.jpg", "d_e.jpg", "x" * 200 + ".jpg", "é.jpg")
    ):
        add(tmp_path / "c1" / name, n)
    add(tmp_path / "c2" / "a.jpg")
    keys = [sample.key for sample in listed(tmp_path, 0)["train"]]
    assert len(set(keys)) == len(keys) == 9
    assert all(key == safe_key(key) for key in keys)


def test_equal_keys_in_two_classes_are_distinguished(tmp_path):
    paths = (
        "a/b_c.jpg",
        "a_b/c.jpg",
        "a b/c.jpg",
        "a/b/c.png",
        "a.b/d.jpg",
        "a_b_/d.jpg",
        "z/1.jpg",
    )
    for path in paths:
        add(tmp_path / path)
    samples = listed(tmp_path, 0)["train"]
    assert {sample.name for sample in samples} == set(paths)
    assert len({sample.key for sample in samples}) == len(paths)
    assert {sample.key for sample in samples if not re.search("_[0-9a-f]{16}$", sample.key)} == {
        "z_1",
        "a_b_d",
        "a_b__d",
    }


def test_links_are_followed_but_not_circular_ones(tmp_path):
    for path in ("flat/a/1.jpg", "flat/b/1.jpg", "elsewhere/deep/2.jpg"):
        add(tmp_path / path)
    (tmp_path / "flat/b/more").symlink_to(tmp_path / "elsewhere")
    assert {sample.key for sample in listed(tmp_path / "flat", 0)["train"]} == {
        "a_1",
        "b_1",
        "b_more_deep_2",
    }
    (tmp_path / "elsewhere/deep/round").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        PrepError, match=r"b/more/deep/round: this link leads to a parent folder: remove the link"
    ):
        listed(tmp_path / "flat", 0)
    (tmp_path / "flat/b/more").unlink()
    (tmp_path / "flat/b/itself.jpg").symlink_to("itself.jpg")
    with pytest.raises(
        PrepError,
        match=r"flat/b/itself.jpg: cannot be listed \(Too many levels of symbolic links\)",
    ):
        listed(tmp_path / "flat", 0)


def test_irregular_files_are_skipped_and_listed(tmp_path):
    """Opening a pipe would block. A broken link probably points to an image that the user wanted to
    include."""
    for number in range(300):
        add(tmp_path / "flat" / "ab"[number % 2] / f"{number}.jpg", number)
    os.mkfifo(tmp_path / "flat/a/pipe.jpg")
    (tmp_path / "flat/a/lost.jpg").symlink_to("nowhere.jpg")
    assert main([str(tmp_path / "flat"), "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    lines = [
        json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()
    ]
    assert {line["name"]: line["reason"].partition("]")[0] for line in lines} == {
        "a/pipe.jpg": "not a regular file",
        "a/lost.jpg": "[Errno 2",
    }


def numbered(folder: Path, num_classes: int) -> list[str]:
    for number in range(num_classes):
        add(folder / str(number) / "0.jpg", number)
    return ["--workers", "1", "--num-shards", "1", "--val-fraction", "0"]


def test_classes_whose_names_are_labels_are_ordered_as_asked(tmp_path):
    """ImageNet-V2's folders are named 0 to 999. If names were sorted as text, 988 labels would be
    wrong."""
    options = numbered(tmp_path / "v2", 12)
    for order, names in (
        ("number", [str(n) for n in range(12)]),
        ("text", sorted(str(n) for n in range(12))),
    ):
        out = tmp_path / order
        assert (
            main([str(tmp_path / "v2"), "--out", str(out), *options, "--class-order", order]) == 0
        )
        split = open_split(out, "train")
        assert split.class_names == names
        assert [split.key(i) for i in np.argsort(split.index["label"])] == [
            f"{name}_0" for name in names
        ]
    numbered(tmp_path / "ten", 10)
    assert main([str(tmp_path / "ten"), "--out", str(tmp_path / "plain"), *options]) == 0, (
        "these names have the same order as text and as numbers"
    )


def test_unicode_spellings_of_a_class_are_the_same_class(tmp_path):
    """macOS stores letters and accents separately, so the same name has different bytes."""
    apart = "cafe\u0301"
    together = "caf\u00e9"
    for name in (f"train/{together}", "train/tea", f"val/{apart}", "val/tea"):
        add(tmp_path / "mixed" / name / "0.jpg")
    assert (
        main(
            [
                str(tmp_path / "mixed"),
                "--out",
                str(tmp_path / "out"),
                "--workers",
                "1",
                "--num-shards",
                "1",
            ]
        )
        == 0
    )
    assert sorted(open_split(tmp_path / "out", "val").index["label"].tolist()) == [0, 1]


def test_runs_without_torch(flat, tmp_path):
    """Neither the command nor its workers may import torch. Setting `sys.modules["torch"] = None`
    would break scipy."""
    (tmp_path / "blocked" / "torch").mkdir(parents=True)
    (tmp_path / "blocked" / "torch" / "__init__.py").write_text(
        "raise ImportError('torch is blocked')"
    )

    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'blocked'}:{os.getcwd()}"}
    assert (
        subprocess.run(
            [sys.executable, "-c", "import torch"], env=env, capture_output=True
        ).returncode
        == 1
    )

    out = str(tmp_path / "out")
    for command in (
        ["imagefolder", str(flat), "--out", out],
        ["index", out],
        [
            "digits",
            "--out",
            f"{out}-digits",
            "--image-size",
            "16",
            "--renderings",
            "1",
            "--val-renderings",
            "1",
        ],
    ):
        subprocess.run(
            [sys.executable, "-m", f"data_prep.{command[0]}", *command[1:], "--workers", "1"],
            env=env,
            check=True,
        )

    code = (
        "import sys; from vit.data.storage.opening import open_split; open_split(sys.argv[1], "
        " 'val').read(0)"
    )
    subprocess.run([sys.executable, "-c", code, out], env=env, check=True)


def test_help_is_readable():
    done = subprocess.run(
        [sys.executable, "-m", "data_prep.imagefolder", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for flag in (
        "SOURCE",
        "--out ROOT",
        "--num-shards N",
        "--workers N",
        "--seed N",
        "--val-fraction F",
    ):
        assert flag in done.stdout
