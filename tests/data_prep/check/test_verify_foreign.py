"""Test the verification of shards from other tools: hostile members, broken tars and duplicate
images."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from verifying import edit, edit_json, foreign, image_bytes, pair, verify, write_tar

from data_prep.check.data_set import SplitFiles
from data_prep.check.set_checks import _repeated
from data_prep.check.shard_checks import SEEN_DTYPE

# ---- cases that occur only in foreign shards -----------------------------------------------------


def test_broken_tars_of_other_tools_are_reported(tmp_path, capsys):
    root = foreign(
        tmp_path / "foreign",
        *(
            [*pair(f"k{s}", image_bytes(s), 0), *pair(f"l{s}", image_bytes(9 + s), 1)]
            for s in range(5)
        ),
    )

    write_tar(
        root / "train-000.tar", [*pair("a.b", image_bytes(0), 0), *pair("c", image_bytes(1), 0)]
    )
    write_tar(root / "train-001.tar", [("k.jpg", image_bytes(0)), *pair("c", image_bytes(1), 0)])
    write_tar(
        root / "train-002.tar", [*pair("k", image_bytes(0), 0), *pair("k", image_bytes(1), 0)]
    )
    edit(root / "train-003.tar", lambda data: data.__delitem__(slice(1000, None)))
    (root / "train-004.tar").write_bytes(b"\x1f\x8b" + bytes(2000))

    for path in (*root.glob("*.json"), *root.glob("*.idx"), *root.glob("*.npy")):
        path.unlink()

    filenames = [f"train-{n:03d}.tar" for n in range(5)]
    described = {
        "name": "train",
        "filenames": filenames,
        "shard_lengths": [2] * 5,
        "num_samples": 10,
    }
    (root / "_info.json").write_text(json.dumps({"splits": {"train": described}, "num_classes": 2}))

    assert verify(root) == 1
    output = capsys.readouterr().out
    for text in (
        "train-000.tar: sample 'a' has no images (its members: b.jpg, b.cls",
        "train-001.tar: sample 'k' has no .cls",
        "train-002.tar: sample 'k' has two members with the same extension",
        "train-003.tar: truncated",
        "train-004.tar: not a tar but compressed with gzip",
    ):
        assert text in output


def test_names_cannot_confuse_the_terminal(tmp_path, capsys):
    members = [
        *pair("k\x1b[31m\nall right\udcff", image_bytes(0)[:-300], 0),
        *pair("犬", image_bytes(1)[:-300], 1),
    ]
    assert verify(foreign(tmp_path / "foreign", members)) == 1
    output = capsys.readouterr().out
    assert r"train-000.tar: k\x1b[31m\nall right\udcff: cannot be decoded" in output
    assert "train-000.tar: 犬: cannot be decoded" in output


def test_a_key_in_two_shards_is_a_problem(tmp_path, capsys):
    root = foreign(
        tmp_path / "foreign",
        *(
            [*pair("same", image_bytes(s), 0), *pair(f"k{s}", image_bytes(9 + s), 1)]
            for s in range(2)
        ),
    )
    assert verify(root) == 1
    assert (
        "train: a key occurs 2 times: train-000.tar same and train-001.tar same"
        in capsys.readouterr().out
    )


def test_images_that_the_loader_converts_are_a_note_but_a_problem_in_our_own_shards(
    tmp_path, capsys
):
    members = [
        *pair("cmyk", image_bytes(0, mode="CMYK"), 0),
        *pair("png", image_bytes(1, "PNG"), 1),
        *pair("rgb", image_bytes(2), 1),
    ]
    root = foreign(tmp_path / "foreign", members)
    assert verify(root) == 0
    output = capsys.readouterr().out
    assert "train-000.tar: 1 image: CMYK JPEG" in output
    assert "train-000.tar: 1 image: PNG (RGB)" in output
    edit_json(root / "_info.json", lambda info: info.update(catalog="0"))
    assert verify(root) == 1
    output = capsys.readouterr().out.split("Notes")[0]
    assert "train-000.tar: cmyk: our writer does not write such images (CMYK JPEG)" in output
    assert "rgb:" not in output


# ---- duplicate images ----------------------------------------------------------------------------


def test_equal_images_are_counted_and_named(tmp_path, capsys):
    root = tmp_path / "foreign"
    same = image_bytes(0)
    leak = image_bytes(1)
    label = image_bytes(2)
    root.mkdir()
    write_tar(root / "val-000.tar", [*pair("v0", leak, 0), *pair("v1", image_bytes(3), 1)])
    foreign(
        root,
        [*pair("a", same, 0), *pair("b", leak, 0), *pair("c", label, 0)],
        [*pair("d", same, 0), *pair("e", label, 1), *pair("f", image_bytes(4), 1)],
    )
    assert verify(root) == 0
    output = capsys.readouterr().out
    for text in (
        "train, val: equal bytes: 3 images in 6 samples; 1 of these images are in two splits, 1"
        " under two labels\n"
        "      train-000.tar b (class 0) = val-000.tar v0 (class 0)\n"
        "      train-000.tar c (class 0) = train-001.tar e (class 1)\n",
        "no problems, 1 note",
    ):
        assert text in output
    assert verify(root, "--strict") == 1


@pytest.mark.parametrize("num_values", [3, 40, 10**9])
def test_repeated_values_are_all_found(num_values):
    rng = np.random.default_rng(num_values)
    parts = []
    for name in ("train", "val"):
        part = SplitFiles(name, {})
        for shard in range(3):
            part.seen[shard] = np.zeros(7, SEEN_DTYPE)
            part.seen[shard]["image"] = rng.integers(0, num_values, 7)
            part.seen[shard]["label"] = rng.integers(0, 4, 7)
        parts.append(part)
    samples = [
        (int(row["image"]), p, shard, number, int(row["label"]))
        for p, part in enumerate(parts)
        for shard, rows in part.seen.items()
        for number, row in enumerate(rows)
    ]
    count = Counter(sample[0] for sample in samples)
    expected = sorted(sample for sample in samples if count[sample[0]] > 1)
    repeated = _repeated(parts, "image")
    assert repeated[:, 1:].tolist() == [list(sample[1:]) for sample in expected]
    groups = Counter(repeated[:, 0].tolist())
    assert sorted(groups.values()) == sorted(n for n in count.values() if n > 1)
