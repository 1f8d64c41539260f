"""Test Animals-10: the split must depend only on the keys, and the recipe must train."""

import io
import json
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from prep_place import new_catalog
from processes import metrics, run

from data_prep import animals10
from vit.data.storage.opening import open_split

# Copied from the dataset's page on Kaggle, in the same order.
CLASSES = [
    ("dog", "cane"),
    ("cat", "gatto"),
    ("horse", "cavallo"),
    ("spider", "ragno"),
    ("butterfly", "farfalla"),
    ("chicken", "gallina"),
    ("sheep", "pecora"),
    ("cow", "mucca"),
    ("squirrel", "scoiattolo"),
    ("elephant", "elefante"),
]
ITALIAN = dict(CLASSES)


def photographs() -> dict[str, bytes]:
    """Return a dict from paths below raw-img to images. Each class has 20 to 29 images. Most of
    them are named OIP-<letters>.jpeg, and some have the suffix .jpg or .png. Two names differ only
    in their suffixes."""
    files = {}
    for number, (_, folder) in enumerate(CLASSES):
        for n in range(20 + number):
            encoded = io.BytesIO()
            extension = ("jpg", "png", "jpeg", "jpeg")[n % 4]
            color = (20 + 20 * number, 5 * n, 120)
            Image.new("RGB", (40 + n, 30), color).save(
                encoded, "PNG" if extension == "png" else "JPEG"
            )
            files[f"{folder}/OIP-{'x' if n < 2 else f'_{n}hAa-'}.{extension}"] = encoded.getvalue()
    return files


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return photographs()


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def pack(
    path: Path,
    files: dict[str, bytes],
    prefix: str = "raw-img/",
    compression: int = zipfile.ZIP_DEFLATED,
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(prefix + name, content)
        archive.writestr("translate.py", 'translate = {"cane": "dog"}')
    return path


@pytest.fixture(scope="module")
def kaggle(files, tmp_path_factory) -> Path:
    return pack(tmp_path_factory.mktemp("kaggle") / "archive.zip", files)


@pytest.fixture(scope="module")
def root(kaggle, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("animals10") / "root"
    assert (
        animals10.main([str(kaggle), "--out", str(root), "--num-shards", "2", "--workers", "1"])
        == 0
    )
    return root


def test_the_split_is_by_class_and_hash(files, tmp_path):
    source = put(tmp_path / "raw-img", files)

    def splits(name: str, *arguments) -> dict[str, set[str]]:
        catalog = new_catalog(animals10.source(source, *arguments), tmp_path / name, seed=0)
        return {
            split: {sample.key for sample in catalog.table(split).samples(range(n))}
            for split, n in catalog.splits.items()
        }

    two = splits("two")
    three = splits("three", (0.7, 0.15, 0.15))
    assert list(two) == ["train", "val"]
    assert list(three) == ["train", "val", "test"]
    assert two["val"] == three["val"], "a test split must not take images from val"
    assert three["train"] | three["test"] == two["train"]
    assert not three["train"] & three["test"]
    assert len(three["test"]) == sum(
        round(0.3 * (20 + n)) - round(0.15 * (20 + n)) for n in range(10)
    )
    other = splits("other", (0.85, 0.15), 1)
    assert len(other["val"]) == len(two["val"])
    assert other["val"] != two["val"]
    (source / "cane" / "new.jpeg").write_bytes(files["cane/OIP-_2hAa-.jpeg"])
    again = splits("again")
    assert len(two["val"] - again["val"]) <= 1, "one more image may move at most one other image"
    most = splits("most", (0.01, 0.99))
    assert Counter(key.split("_")[0] for key in most["train"]) == dict.fromkeys(ITALIAN, 1), (
        "each class must keep one image"
    )


def test_unexpected_counts_are_reported_and_recorded(root, kaggle, files, tmp_path, capsys):
    put(tmp_path / "some" / "raw-img", files)
    put(tmp_path / "some", {"contact.png": files["cane/OIP-x.jpg"]})
    assert (
        animals10.main(
            [
                str(tmp_path / "some"),
                "--out",
                str(tmp_path / "out"),
                "--num-shards",
                "1",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        f"some: {len(files)} images, Kaggle's zip has 26,179: butterfly 24 of 2,112, cat 21 of"
        " 1,668" in printed
    )
    assert "some: 1 images outside the class folders are left out: contact.png" in printed
    origin = json.loads((tmp_path / "out" / "_info.json").read_text())["origin"]
    assert "val has only 36 images" in origin.pop(0)
    assert [line.split(":")[0] for line in origin] == ["some", "some"]
    assert all(line in printed for line in origin)


def test_the_table_of_names_and_counts():
    assert {english: italian for italian, english in animals10.ENGLISH.items()} == ITALIAN
    assert sum(animals10.OFFICIAL.values()) == 26_179
    assert sorted(animals10.OFFICIAL) == sorted(ITALIAN)


SMALL = [
    "model.embed_dim=48",
    "model.depth=2",
    "model.num_heads=3",
    "data.global_batch_size=8",
    "loader.num_workers=0",
    "train.steps=3",
    "train.epochs=null",
    "train.precision=fp32",
    "train.device=cpu",
    "eval.every_epochs=null",
    "eval.batch_size=8",
    "log.every_steps=1",
    "log.wandb=off",
    "log.report=false",
]


def test_the_recipe_trains_on_it(root, tmp_path):
    where = [f"data.root={root}", f"run.dir={tmp_path / 'run'}"]
    done = run("launch/train.py", "--config", "configs/animals10.yaml", *SMALL, *where)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert losses[0] == pytest.approx(np.log(10), abs=2e-3), (
        "a zero head of ten classes starts at a loss of ln 10"
    )
    assert len(losses) == 3
    (last,) = metrics(tmp_path / "run", "eval")
    assert last["num_images"] == open_split(root, "val").num_samples
