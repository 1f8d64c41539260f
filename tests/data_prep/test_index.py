"""Shards that others made become readable, and their tars stay as they are."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import webdataset

from data_prep.index import main, split_of
from data_prep.writer import Catalogue, Sample, write
from vit.data.shards import open_split


def jpeg(number: int) -> bytes:
    from io import BytesIO

    from PIL import Image

    encoded = BytesIO()
    Image.new("RGB", (10 + number, 9), (number, 0, 0)).save(encoded, "JPEG")
    return encoded.getvalue()


@pytest.fixture
def foreign(tmp_path) -> Path:
    """Shards by webdataset's own writer, named as timm's ImageNet shards are; labels up to 4 in train, 2 in validation."""
    root = tmp_path / "foreign"
    root.mkdir()
    for split, num_shards in (("train", 3), ("validation", 1)):
        for shard in range(num_shards):
            with webdataset.TarWriter(str(root / f"imagenet1k-{split}-{shard:04d}.tar")) as tar:
                for n in range(4):
                    number = shard * 4 + n
                    tar.write(
                        {
                            "__key__": f"{split}{number}",
                            "jpg": jpeg(number),
                            "cls": number % (5 if split == "train" else 3),
                            "json": {"n": n},
                        }
                    )
    return root


def tars(root: Path) -> dict[str, tuple[str, int]]:
    return {path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in root.glob("*.tar")}


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def test_foreign_shards_become_readable(foreign, capsys):
    before = tars(foreign)
    assert main([str(foreign), "--workers", "2"]) == 0
    assert tars(foreign) == before
    assert "train: 12 samples in 3 shards\nvalidation: 4 samples in 1 shards" in capsys.readouterr().out
    train, validation = open_split(foreign, "train"), open_split(foreign, "validation")
    assert [(train.key(i), train.read(i)) for i in range(12)] == [(f"train{n}", jpeg(n)) for n in range(12)]
    assert train.index["label"].tolist() == [n % 5 for n in range(12)]
    assert train.num_classes == validation.num_classes == 5  # of all splits, not of each
    first = contents(foreign)
    assert main([str(foreign), "--workers", "1"]) == 0
    assert contents(foreign) == first


def test_timm_reads_them_too(foreign):
    from timm.data import create_dataset

    assert main([str(foreign), "--workers", "1"]) == 0
    dataset = create_dataset("wds/", root=str(foreign), split="validation", is_training=False, batch_size=2)
    assert [label for _, label in dataset] == [0, 1, 2, 0]


def test_info_of_others_is_kept(foreign, capsys):
    names = [f"imagenet1k-train-{k:04d}.tar" for k in (2, 0)]  # in their order, one left out
    theirs = {"splits": {"train": {"name": "train", "filenames": names, "shard_lengths": [4, 4], "num_samples": 8}}, "note": "x"}
    (foreign / "_info.json").write_text(json.dumps(theirs))
    assert main([str(foreign), "--workers", "1"]) == 0
    assert json.loads((foreign / "_info.json").read_text()) == theirs
    split = open_split(foreign, "train")
    assert [split.key(i) for i in range(8)] == [f"train{n}" for n in (8, 9, 10, 11, 0, 1, 2, 3)]
    theirs["splits"]["train"]["shard_lengths"] = [4, 5]
    (foreign / "_info.json").write_text(json.dumps(theirs))
    assert main([str(foreign), "--workers", "1"]) == 2
    assert "imagenet1k-train-0000.tar holds 4 samples in" in capsys.readouterr().err


def test_replaced_tar_gets_a_new_sidecar(foreign):
    assert main([str(foreign), "--workers", "1"]) == 0
    (foreign / "_info.json").unlink()
    tar = foreign / "imagenet1k-train-0001.tar"
    data = tar.read_bytes()
    tar.write_bytes(data + bytes(512))
    assert main([str(foreign), "--workers", "1"]) == 0
    train = json.loads((foreign / "_info.json").read_text())["splits"]["train"]
    assert train["shard_bytes"][1] == len(data) + 512
    assert train["shard_sha256"][1] == hashlib.sha256(data + bytes(512)).hexdigest()


def test_our_own_shards_stay_as_they_are(tmp_path):
    root = tmp_path / "own"
    samples = [Sample(f"k{n}", n % 2, jpeg(n)) for n in range(6)]
    write(Catalogue("test", {}, ["a", "b"], {"train": samples}, bytes), root, num_shards=2)
    whole = contents(root)
    (root / "train-00000.idx").unlink()
    (root / "train.index.npy").unlink()
    assert main([str(root), "--workers", "1"]) == 0
    assert contents(root) == whole


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: root.rename(root.with_name("gone")), "foreign: no such folder"),
        (lambda root: [tar.unlink() for tar in root.glob("*.tar")], "no .tar files; expected <split>-00000.tar"),
        (lambda root: (root / "0001.tar").write_bytes(b"x"), "no split in the name of 0001.tar"),
        (lambda root: (root / "imagenet1k-train-0000.tar").write_bytes(b"x" * 600), "imagenet1k-train-0000.tar: not a plain tar"),
        (lambda root: (root / "_writing.json").write_text("{}"), "a writer has not finished here"),
        (lambda root: (root / "imagenet1k-train-0002.json").write_text("[]"), "imagenet1k-train-0002.json: expected a JSON object"),
    ],
)
def test_errors_are_one_line_and_status_2(foreign, prepare, message, capsys):
    prepare(foreign)
    assert main([str(foreign), "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (foreign / "_info.json").exists()


def test_split_names():
    names = {"train-00000.tar": "train", "imagenet1k-train-0000.tar": "train", "val-0.tar": "val", "a-b-validation-17.tar": "validation"}
    names |= {"train-00000-of-00100.tar": "train", "cc3m-heldout-000.tar": "heldout", "00000.tar": None, "data.tar": None, "x-y.tar": None}
    assert {name: split_of(name) for name in names} == names


def test_help_is_readable():
    done = subprocess.run([sys.executable, "-m", "data_prep.index", "--help"], capture_output=True, text=True, check=True)
    assert "ROOT" in done.stdout
    assert "--workers N" in done.stdout
