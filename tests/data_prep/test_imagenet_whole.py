"""Test archives like the original ImageNet archives with all 1,000 classes, and repeatedly kill the
command.

The shards must match those of an uninterrupted run, and all other readers must be able to read
them. VIT_KILLS sets the number of kills.
"""

import filecmp
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import webdataset
from checksums import digests
from fake_imagenet import Fake, make_fake, write_archives, write_parquets
from PIL import Image

from data_prep import verify
from vit.data.shards.data_set import open_split

KILLS = int(os.environ.get("VIT_KILLS", "3"))
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
def test_a_command_killed_at_random_moments_continues(archives, undisturbed, tmp_path):
    expected, _, seconds = undisturbed
    out = tmp_path / "imagenet"
    moments = random.Random(0)
    for kill in range(KILLS):
        process = subprocess.Popen(
            command(archives, out, workers=2), start_new_session=True, stdout=subprocess.DEVNULL
        )
        time.sleep(moments.uniform(0.2, seconds))
        if kill % 2:
            os.killpg(process.pid, signal.SIGKILL)  # as if the machine had lost power
        else:
            process.kill()  # The workers need time to notice the kill.
        process.wait()
        for tar in out.glob("*.tar"):
            assert filecmp.cmp(tar, expected / tar.name, shallow=False), (
                f"{tar.name} was damaged by kill {kill}"
            )
    subprocess.run(command(archives, out, workers=2), check=True)
    assert digests(out) == digests(expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tars", "parquet"])
def test_simultaneous_array_tasks_share_one_catalogue_and_succeed(
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
    if layout == "parquet":  # the offset in the source differs
        tars.pop("quarantine.jsonl")
    assert {name: written[name] for name in tars} == tars
    assert not [
        name
        for name in os.listdir(out)
        if name.startswith(("_catalogue", "_spool", "_writing", "."))
    ]


def test_verify_passes(undisturbed, capsys):
    root, _, _ = undisturbed
    assert verify.main([str(root), "--workers", "2"]) == 0, capsys.readouterr().out
    assert verify.main([str(root), "--quick", "--workers", "1"]) == 0


@pytest.fixture(scope="module")
def labels(undisturbed, fake) -> dict[str, int]:
    """Return {key: label} for every readable training image."""
    root, _, _ = undisturbed
    left_out = json.loads((root / "quarantine.jsonl").read_text())["key"]
    return {key: label for key, label in fake.labels("train").items() if key != left_out}


def test_the_reader_of_this_project_reads_the_same_labels_and_bytes(undisturbed, fake, labels):
    root, _, _ = undisturbed
    split = open_split(root, "train")
    images = fake.images("train")
    assert {split.key(i): int(split.index["label"][i]) for i in range(split.num_samples)} == labels
    changed = [
        split.key(i) for i in range(split.num_samples) if split.read(i) != images[split.key(i)]
    ]
    assert len(changed) == 2  # CMYK, PNG
    val = open_split(root, "val")
    assert {val.key(i): int(val.index["label"][i]) for i in range(val.num_samples)} == fake.labels(
        "val"
    )


def test_plain_tar_and_webdataset_read_the_same_labels(undisturbed, labels):
    root, _, _ = undisturbed
    by_tar = {}
    by_webdataset = {}
    for path in sorted(root.glob("train-*.tar")):
        subprocess.run(["tar", "-tf", path], check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(path) as tar:
            by_tar |= {
                m.name[:-4]: int(tar.extractfile(m).read()) for m in tar if m.name.endswith(".cls")
            }
        for sample in webdataset.WebDataset(str(path), shardshuffle=False).decode("pil"):
            assert sample["jpg"].mode == "RGB"
            by_webdataset[sample["__key__"]] = sample["cls"]
    assert by_tar == by_webdataset == labels


def test_timm_reads_the_same_labels(undisturbed, fake):
    from timm.data import create_dataset

    root, _, _ = undisturbed
    dataset = create_dataset("wds/", root=str(root), split="val", is_training=False, batch_size=1)
    assert np.bincount([label for _, label in dataset], minlength=1000).tolist() == [1] * 1000
    images = fake.images("val")
    by_pixels = {
        Image.open(io.BytesIO(images[key])).tobytes(): label
        for key, label in fake.labels("val").items()
    }
    assert all(by_pixels[image.tobytes()] == label for image, label in dataset)


def test_hugging_face_datasets_reads_the_same_labels(undisturbed, labels, tmp_path):
    import datasets

    root, _, _ = undisturbed
    tars = {"train": [str(path) for path in sorted(root.glob("train-*.tar"))]}
    loaded = datasets.load_dataset(
        "webdataset", data_files=tars, split="train", streaming=True, cache_dir=str(tmp_path)
    )
    assert {row["__key__"]: int(row["cls"]) for row in loaded} == labels


def test_a_missing_shard_is_named_and_written_again(undisturbed, archives, tmp_path, capsys):
    expected, _, _ = undisturbed
    root = tmp_path / "imagenet"
    shutil.copytree(expected, root)
    (root / "train-00007.tar").unlink()
    assert verify.main([str(root), "--workers", "1"]) == 1
    assert "train-00007.tar" in capsys.readouterr().out
    subprocess.run(command(archives, root, workers=1), check=True)
    assert digests(root) == digests(expected)
