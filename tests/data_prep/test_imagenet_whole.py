"""Test the preparation of archives with all 1,000 classes, like the original ImageNet archives.
Several commands prepare these archives at the same time."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checksums import digests
from fake_imagenet import Fake, make_fake, write_archives, write_parquets

from data_prep import verify

ODD = 7
"""The number of images that are not plain color JPEGs. One of these images is truncated."""


def command(source: Path, out: Path, workers: int) -> list[str]:
    options = ["--partial", "--num-shards", "20", "--workers", str(workers)]
    return [sys.executable, "-m", "data_prep.imagenet", str(source), "--out", str(out), *options]


@pytest.fixture(scope="module")
def fake() -> Fake:
    return make_fake(num_classes=1000, train_per_class=3, val_per_class=1, odd=True)


@pytest.fixture(scope="module")
def archives(fake, tmp_path_factory) -> Path:
    return write_archives(fake, tmp_path_factory.mktemp("downloads"))


@pytest.fixture(scope="module")
def undisturbed(archives, tmp_path_factory) -> tuple[Path, str, float]:
    """Return the shards, the output and the duration in seconds of an uninterrupted run."""
    out = tmp_path_factory.mktemp("undisturbed") / "imagenet"
    began = time.monotonic()
    done = subprocess.run(
        command(archives, out, workers=1), check=True, capture_output=True, text=True
    )
    return out, done.stdout, time.monotonic() - began


def test_the_layout_is_reported_and_odd_images_are_counted(undisturbed, fake):
    root, printed, _ = undisturbed
    info = json.loads((root / "_info.json").read_text())
    assert info["class_names"] == fake.wnids
    assert "ILSVRC2012_img_train.tar" in printed
    assert info["listed"] == {"train": 3000 + ODD, "val": 1000}
    assert info["quarantined"] == 1
    assert info["changed"] == {"CMYK JPEG": 1, "PNG (RGBA)": 1}
    (entry,) = map(json.loads, (root / "quarantine.jsonl").read_text().splitlines())
    assert entry["file"] == "ILSVRC2012_img_train.tar"
    with open(root.parent.parent / "downloads0" / entry["file"], "rb") as tar:
        tar.seek(entry["offset"])
        assert tar.read(entry["size"]) == fake.images("train")[entry["key"]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tars", pytest.param("parquet", marks=pytest.mark.full)])
def test_simultaneous_array_tasks_share_one_catalog_and_succeed(
    fake, archives, undisturbed, tmp_path, layout
):
    source = archives if layout == "tars" else write_parquets(fake, tmp_path / "parquet")
    expected = undisturbed[0]
    out = tmp_path / "imagenet"
    tasks = [
        subprocess.Popen(
            [*command(source, out, workers=1), "--shards", part],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in ("0/3", "1/3", "2/3", "2/3")
    ]
    printed = [task.communicate()[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0] * 4, printed
    written = digests(out)
    tars = {
        name: data
        for name, data in digests(expected).items()
        if name.endswith((".tar", ".idx", ".npy", ".jsonl"))
    }
    if layout == "parquet":  # the offset differs between the layouts
        tars.pop("quarantine.jsonl")
    assert {name: written[name] for name in tars} == tars
    assert not [
        name for name in os.listdir(out) if name.startswith(("_catalog", "_spool", "_writing", "."))
    ]


def test_verify_passes(undisturbed, capsys):
    root, _, _ = undisturbed
    assert verify.main([str(root), "--workers", "2"]) == 0, capsys.readouterr().out
    assert verify.main([str(root), "--quick", "--workers", "1"]) == 0
