"""Test Animals-10: every known layout must give the same shards, and the recipe must train."""

import io
import json
import re
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from prep_place import new_catalogue
from processes import metrics, run

from data_prep import animals10
from vit.data.shards.data_set import open_split

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
    """Return images by their path below raw-img: 20 to 29 per class, mostly OIP-<letters>.jpeg,
    some .jpg and .png. Two names differ only in their suffix."""
    files = {}
    for number, (_, folder) in enumerate(CLASSES):
        for n in range(20 + number):
            encoded = io.BytesIO()
            extension = ("jpg", "png", "jpeg", "jpeg")[n % 4]
            colour = (20 + 20 * number, 5 * n, 120)
            Image.new("RGB", (40 + n, 30), colour).save(
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


def test_the_zip(root, files):
    train = open_split(root, "train")
    val = open_split(root, "val")
    assert train.class_names == sorted(ITALIAN)
    assert train.num_samples + val.num_samples == len(files)
    keys = {
        split.key(i): train.class_names[int(split.index["label"][i])]
        for split in (train, val)
        for i in range(split.num_samples)
    }
    of_class = Counter(keys.values())
    assert of_class == {
        english: sum(path.startswith(f"{italian}/") for path in files)
        for english, italian in CLASSES
    }
    assert all(key.startswith(f"{english}_OIP-") for key, english in keys.items())
    assert {key for key in keys if key.startswith("spider_OIP-x")} == {
        key for key in keys if re.fullmatch("spider_OIP-x_[0-9a-f]{16}", key)
    }
    in_val = Counter(train.class_names[label] for label in val.index["label"].tolist())
    assert in_val == {english: round(0.15 * count) for english, count in of_class.items()}
    key = next(val.key(i) for i in range(val.num_samples) if "hAa" in val.key(i))
    english, stem = key.split("_", 1)
    original = next(
        content for path, content in files.items() if path.startswith(f"{ITALIAN[english]}/{stem}.")
    )
    stored = val.read(next(i for i in range(val.num_samples) if val.key(i) == key))
    assert (
        np.asarray(Image.open(io.BytesIO(stored))).shape
        == np.asarray(Image.open(io.BytesIO(original))).shape
    )


def test_every_layout_gives_the_same_shards(root, files, tmp_path):
    english = {italian: name for name, italian in CLASSES}
    renamed = {
        f"{english[path.split('/')[0]]}/{path.split('/')[1]}": content
        for path, content in files.items()
    }
    shouting = {
        path.replace(italian, italian.capitalize()): files[path]
        for path in files
        for italian in [path.split("/")[0]]
    }
    mac = {**files, "__MACOSX/raw-img/cane/._OIP-x.jpeg": b"resource fork", ".DS_Store": b""}
    sources = [
        put(tmp_path / "extracted" / "raw-img", files).parent,
        put(tmp_path / "moved", files),
        put(tmp_path / "nested" / "archive" / "raw-img" / "raw-img", files).parent.parent.parent,
        put(tmp_path / "english", renamed),
        put(tmp_path / "shouting", shouting),
        pack(tmp_path / "stored.zip", mac, prefix="", compression=zipfile.ZIP_STORED),
        pack(tmp_path / "deep.zip", files, prefix="a/b c/"),
    ]
    wanted = catalogue_of(root)
    for number, source in enumerate(sources):
        assert (
            new_catalogue(animals10.source(source), tmp_path / f"c{number}", seed=0).sha256
            == wanted
        ), source
    out = tmp_path / "out"
    assert (
        animals10.main([str(sources[2]), "--out", str(out), "--num-shards", "2", "--workers", "2"])
        == 0
    )
    for path in out.glob("*.tar"):
        assert path.read_bytes() == (root / path.name).read_bytes()


def catalogue_of(root: Path) -> str:
    return json.loads((root / "_info.json").read_text())["catalogue"]


def test_the_split_is_by_class_and_hash(files, tmp_path):
    source = put(tmp_path / "raw-img", files)

    def splits(name: str, *arguments) -> dict[str, set[str]]:
        catalogue = new_catalogue(animals10.source(source, *arguments), tmp_path / name, seed=0)
        return {
            split: {sample.key for sample in catalogue.table(split).samples(range(n))}
            for split, n in catalogue.splits.items()
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
    assert [line.split(":")[0] for line in origin] == ["some", "some"]
    assert all(line in printed for line in origin)


def test_the_table_of_names_and_counts():
    assert {english: italian for italian, english in animals10.ENGLISH.items()} == ITALIAN
    assert sum(animals10.OFFICIAL.values()) == 26_179
    assert sorted(animals10.OFFICIAL) == sorted(ITALIAN)


def without(files: dict[str, bytes], *folders: str) -> dict[str, bytes]:
    return {path: content for path, content in files.items() if path.split("/")[0] not in folders}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda files: without(files, "ragno", "cane"),
            r"no images of dog \(cane\), spider \(ragno\): provide each of the ten",
        ),
        (lambda files: {"readme.txt": b""}, r"no images of dog \(cane\), horse \(cavallo\), "),
        (
            lambda files: {**files, "leone/1.jpeg": b"", "tigre/1.jpeg": b""},
            r"unknown folders next to the class folders: leone, tigre:",
        ),
        (lambda files: {**files, "dog/1.jpeg": b""}, r"dog has 2 folders \(.*cane, .*dog\):"),
        (
            lambda files: {**files, "copy/ragno/1.jpeg": b""},
            r"spider has 2 folders \(.*copy/ragno, .*ragno\)",
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_wrong_folders_give_one_line(files, tmp_path, capsys, change, message, packed):
    source = (
        pack(tmp_path / "source.zip", change(files))
        if packed
        else put(tmp_path / "source", change(files))
    )
    assert animals10.main([str(source), "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert re.match(r"error: .*\n\Z", error)
    assert re.search(message, error), error
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such file or folder; expected Kaggle's animals10 zip"),
        (
            ["{kaggle}", "--fractions", "0.85"],
            "--fractions 0.85: expected two fractions (train, val) or three (train, val, test)",
        ),
        (["{kaggle}", "--fractions", "0.8", "0.3"], "--fractions 0.8 0.3: expected"),
        (["{kaggle}", "--fractions", "1.5", "-0.5"], "expected"),
        (["{kaggle}", "--fractions", "nan", "0.5"], "--fractions nan 0.5: expected"),
        (["{cut}"], "cut.zip: not a complete zip"),
        (["{text}"], "text.zip: not a complete zip"),
    ],
)
def test_wrong_arguments_give_one_line(kaggle, tmp_path, capsys, arguments, message):
    (tmp_path / "cut.zip").write_bytes(kaggle.read_bytes()[:-3000])
    (tmp_path / "text.zip").write_text("Not found")
    places = {"kaggle": kaggle, "cut": tmp_path / "cut.zip", "text": tmp_path / "text.zip"}
    command = [argument.format(**places) for argument in arguments]
    assert animals10.main([*command, "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert re.match(r"error: .*\n\Z", error)
    assert message in error
    assert not list(tmp_path.glob("out/*"))


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
