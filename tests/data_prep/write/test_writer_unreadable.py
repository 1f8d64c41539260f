"""Test that unreadable images are skipped, listed and retried, and that other images are
converted."""

import errno
import hashlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from checksums import digests
from PIL import Image
from small_shards import FOUR, image_bytes, small_splits, source_of

from data_prep.errors import PrepError
from data_prep.write.catalog import Source
from data_prep.write.plan import Settings
from data_prep.write.samples import Sample
from data_prep.write.writer import write
from vit.data.storage.opening import open_split


def test_skipped_images_are_tried_again_even_after_a_kill(written, tmp_path):
    root = tmp_path / "root"
    lenient = replace(FOUR, max_unreadable=0.1)
    write(damaged(tmp_path), root, lenient)
    stale = (root / "_info.json").read_bytes()
    write(source_of(tmp_path, small_splits()), root, lenient)
    assert digests(root) == digests(written)
    (root / "_info.json").write_bytes(stale)  # as if killed before replacing the file
    for lost in ("quarantine.jsonl", "train.index.npy", "dataset.md", "train-00001.idx"):
        (root / lost).unlink(missing_ok=True)
        write(source_of(tmp_path, small_splits()), root, lenient)
        assert digests(root) == digests(written), lost


def test_repairing_unreadable_images_does_not_change_the_number_of_shards(tmp_path):
    splits = {
        "train": [
            (f"{n}.jpg", 0, image_bytes(n, size=(300, 300) if n == 5 else (8, 8)))
            for n in range(40)
        ]
    }
    broken = {
        "train": [
            (name, label, b"<html>" if name == "5.jpg" else data)
            for name, label, data in splits["train"]
        ]
    }
    settings = Settings(max_unreadable=0.5, shard_bytes=None)
    with pytest.raises(PrepError):
        write(
            source_of(tmp_path / "a", broken),
            tmp_path / "root",
            replace(settings, max_unreadable=0),
        )
    write(source_of(tmp_path / "a", splits), tmp_path / "root", settings)
    assert open_split(tmp_path / "root", "train").num_samples == 40


def hiccup(sample: Sample) -> bytes:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), sample.file)


def test_an_archive_that_cannot_be_read_for_a_moment_loses_no_image(written, small, tmp_path):
    root = tmp_path / "root"
    with pytest.raises(OSError, match="Stale file handle"):
        write(replace(small, read=hiccup), root, replace(FOUR, max_unreadable=0.9))
    assert not list(root.glob("*.tar"))
    write(small, root, replace(FOUR, max_unreadable=0.9))
    assert digests(root) == digests(written)


def damaged(folder: Path) -> Source:
    splits = small_splits()
    splits["train"][3] = ("train.3.JPEG", 0, image_bytes(3)[:-100])
    splits["train"][17] = ("train.17.JPEG", 2, b"<html>")
    return source_of(folder, splits)


def test_unreadable_images_are_skipped_and_listed(tmp_path, capsys):
    root = tmp_path / "root"
    write(damaged(tmp_path), root, replace(FOUR, max_unreadable=0.1))
    assert "skipped: 2 unreadable images, listed in" in capsys.readouterr().out
    listed = {
        entry["key"]: entry
        for entry in map(json.loads, (root / "quarantine.jsonl").read_text().splitlines())
    }
    assert sorted(listed) == ["train_17", "train_3"]
    entry = listed["train_17"]
    expected = {
        "split": "train",
        "label": 2,
        "name": "train.17.JPEG",
        "file": "images.bin",
        "size": 6,
    }
    assert expected.items() <= entry.items()
    assert entry["sha256"] == hashlib.sha256(b"<html>").hexdigest()
    assert "truncated" in listed["train_3"]["reason"]
    split = open_split(root, "train")
    assert sorted(split.key(i) for i in range(split.num_samples)) == sorted(
        f"train_{n}" for n in range(23) if n not in (3, 17)
    )
    assert json.loads((root / "_info.json").read_text())["quarantined"] == 2


def test_images_that_are_not_rgb_jpegs_are_converted_and_counted(tmp_path, capsys):
    splits = small_splits()
    for n, (form, mode) in enumerate(
        [("JPEG", "CMYK"), ("PNG", "RGBA"), ("JPEG", "CMYK"), ("WEBP", "RGB")]
    ):
        splits["train"][n] = (f"train.{n}.JPEG", n % 3, image_bytes(n, form, mode))
    write(source_of(tmp_path, splits), tmp_path / "root", FOUR)
    info = json.loads((tmp_path / "root" / "_info.json").read_text())
    assert sum(info["changed"].values()) == 4
    assert info["changed"]["CMYK JPEG"] == 2
    assert "2 CMYK JPEG" in capsys.readouterr().out
    split = open_split(tmp_path / "root", "train")
    for i in range(split.num_samples):
        with Image.open(io.BytesIO(split.read(i))) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
