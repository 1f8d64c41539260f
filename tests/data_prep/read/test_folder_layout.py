"""Test which folders become splits and classes, for the same images in a folder, a zip and tars.

Each image has the color of its true class, so a wrong label is visible in the pixels.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from fake_imagenet import tar_of
from PIL import Image
from prep_place import new_catalog
from prep_sources import tgz_of, zip_of

from data_prep import imagefolder
from data_prep.errors import PrepError
from data_prep.read.split_names import split_of

FORMS = {"zip": zip_of, "tar": lambda files: tar_of(files.items()), "tar.gz": tgz_of}
PER_FOLDER = 12
"""The number of images in each folder. If a tenth is held out, one image of each folder becomes
part of val."""


class Case(NamedTuple):
    folders: str
    """The folders that contain images, separated by spaces. A + stands for a space in a name. In
    `a/b=c`, the images have the color of class c."""
    splits: dict[str, str] | None = None
    """Maps each split to its folders. If "val" is missing, a tenth of train becomes val."""
    error: str = ""
    note: str = ""
    """A regular expression that must match a part of the output."""
    flags: dict[str, object] = {}  # noqa: RUF012  (never changed)
    others: str = ""
    """The paths of files that are not images, separated by spaces."""


def splits(**folders: str) -> dict[str, str]:
    return folders


def pairs(train: str, val: str, test: str = "") -> Case:
    """Return a case with the classes cat and dog in two or three split folders."""
    expected = {"train": train, "val": val, "test": test}
    expected = {split: f"{at}/cat {at}/dog" for split, at in expected.items() if at}
    return Case(" ".join(expected.values()), expected)


TWO = "two readings are possible"
CASES = {
    # ---- split names
    "usual": pairs("train", "val"),
    "validation": pairs("train", "validation"),
    "lone test": pairs("train", "test")._replace(note=r"splits: train, val \(test/\); 2 classes"),
    "roboflow": pairs("train", "valid", "test")._replace(note=r"train, val \(valid/\), test; 2"),
    "dev": pairs("train", "dev", "test"),
    "eval": pairs("train", "eval"),
    "Training": pairs("Training", "Testing"),
    "capitals": pairs("TRAIN", "VAL", "TEST"),
    "Train": pairs("Train", "Val"),
    "doubled": pairs("seg_train/seg_train", "seg_test/seg_test"),
    "set": pairs("training_set", "test_set"),
    "doubled set": pairs("training_set/training_set", "test_set/test_set"),
    "digits": pairs("train2017", "val2017"),
    "numbered": pairs("01_train", "02_val", "03_test"),
    "data": pairs("train_data", "val_data", "test_data"),
    "images": pairs("Train+Images", "Test+Images"),
    "no separator": pairs("trainset", "testset"),
    "one with filler": pairs("train", "validation_set"),
    "a test and a fraction": Case(
        "train/cat train/dog test/cat test/dog",
        splits(train="train/cat train/dog", test="test/cat test/dog"),
        flags={"val_fraction": 0.1},
    ),
    "only train": Case("train/cat train/dog", splits(train="train/cat train/dog")),
    # ---- outer folders and other files
    "wrapper": Case("images/cat images/dog", splits(train="images/cat images/dog")),
    "two wrappers": Case(
        "data/data/cat data/data/dog", splits(train="data/data/cat data/data/dog")
    ),
    "wrapped splits": pairs("chest_xray/chest_xray/train", "chest_xray/chest_xray/test"),
    "data/train": pairs("data/train", "data/val"),
    "a wrapper that names a split": pairs("test_project/train", "test_project/val"),
    "wrapped in each": pairs("train/images", "val/images"),
    "wrapper with other folders": Case(
        "CUB/images/cat CUB/images/dog",
        splits(train="CUB/images/cat CUB/images/dog"),
        others="CUB/parts/parts.txt CUB/README readme.txt",
    ),
    "hidden": Case(
        "cat dog .cache/bird __MACOSX/cat", splits(train="cat dog"), others="cat/.DS_Store"
    ),
    "labels without images": pairs("train", "val")._replace(
        others="labels/cat.txt train.csv README.md", note=""
    ),
    "deep": Case("cat/young cat/old/a dog", splits(train="cat/young=cat cat/old/a=cat dog")),
    # ---- classes that are named like splits
    "a class train": Case("bus car train", splits(train="bus car train")),
    "control and test": Case("control test", splits(train="control test")),
    "test and train": Case("bus test train", splits(train="bus test train")),
    "all names": Case(
        "bus dev eval test train val valid", splits(train="bus dev eval test train val valid")
    ),
    "evaluation": Case("bus evaluation", splits(train="bus evaluation")),
    "words": Case(
        "training+shoes test+tube train_station",
        splits(train="training+shoes test+tube train_station"),
    ),
    "trains": Case("steam+train diesel+train bus", splits(train="steam+train diesel+train bus")),
    "within train": Case(
        "train/bus train/test train/train val/bus val/test val/train",
        splits(train="train/bus train/test train/train", val="val/bus val/test val/train"),
    ),
    "asked for classes": Case(
        "bus train/steam=train train/diesel=train",
        splits(train="bus train/steam=train train/diesel=train"),
        flags={"layout": "classes"},
    ),
    "splits as classes": Case(
        "test train", splits(train="test train"), flags={"layout": "classes"}
    ),
    # ---- folders that could be splits or classes
    "a class train with folders": Case("bus car train/steam train/diesel", error=TWO),
    "extra": Case("train/cat train/dog test/cat test/dog extra/cat", error=TWO),
    "asked for splits": Case(
        "train/cat train/dog test/cat extra/cat",
        splits(train="train/cat train/dog", val="test/cat"),
        flags={"layout": "splits"},
        note="not used: extra/cat",
    ),
    "asked for splits with only train": Case(
        "train/cat train/dog",
        splits(train="train/cat train/dog"),
        flags={"layout": "splits"},
        note=r"splits: train, val \(0.1 of train\); 2 classes",
    ),
    "an empty val": Case(
        "train/cat train/dog", error="val: contains no images in class", others="val/cat/1.txt"
    ),
    "only val, as classes": Case(
        "val/cat val/dog", splits(train="val/cat val/dog"), flags={"layout": "classes"}
    ),
    "holdout": Case("train/cat train/dog holdout/cat holdout/dog", error=TWO),
    "years": Case("2023/cat 2023/dog 2024/cat 2024/dog", error=TWO),
    "years of other classes": Case("2023/cat 2023/dog 2024/cat 2024/dog 2024/bus", error=TWO),
    "years in classes": Case(
        "cat/2023 cat/2024 dog/2023 dog/2024",
        splits(train="cat/2023=cat cat/2024=cat dog/2023=dog dog/2024=dog"),
    ),
    "one folder in each class": Case(
        "cat/images dog/images", splits(train="cat/images=cat dog/images=dog")
    ),
    "splits in classes": Case("cat/train cat/test dog/train dog/test", error=TWO),
    "folds": Case(
        "train.X1/cat train.X2/dog val.X/cat val.X/dog", error="train.X1, train.X2, val.X mean"
    ),
    "splits in one folder": Case(
        "data/train/cat data/train/dog data/val/cat samples", error="data, samples contain"
    ),
    "masks": Case("train/cat train/dog test/cat train_masks/cat test_masks/cat", error=TWO),
    "a train with one folder": Case(
        "bus/images=bus car/images=car train/images=train",
        splits(train="bus/images=bus car/images=car train/images=train"),
    ),
    "two trains": Case("train/cat train/dog training/cat", error="train, training mean the same"),
    "two vals": Case("train/cat val/cat valid/cat", error="train, val, valid mean the same"),
    "no train in a wrapper": Case("x/val/cat x/test/cat", error="x: has test/, val/ but no train"),
    "only val": Case("val/cat val/dog", error="has val/ but no train/"),
    "no train": Case("val/cat test/cat", error="has test/, val/ but no train/"),
    # ---- images outside class folders
    "unlabeled test": Case(
        "train/cat train/dog test", splits(train="train/cat train/dog"), note="not used: test"
    ),
    "unlabeled test in a folder": Case(
        "train/cat train/dog valid/cat test/unknown",
        splits(train="train/cat train/dog", val="valid/cat"),
        note="not used: test/unknown",
    ),
    "Intel": Case(
        "seg_train/seg_train/cat seg_train/seg_train/dog seg_test/seg_test/cat seg_pred/seg_pred",
        splits(
            train="seg_train/seg_train/cat seg_train/seg_train/dog", val="seg_test/seg_test/cat"
        ),
        note="not used: seg_pred/seg_pred",
    ),
    "a test class": Case("train/cat train/dog test/bus", error="no training folder: bus"),
    "a picture beside the splits": Case(
        "train/cat train/dog val/cat =bus",
        splits(train="train/cat train/dog", val="val/cat"),
        note="not used: SOURCE itself",
    ),
    "a picture beside a wrapper": Case(
        "all/cat all/dog =bus", splits(train="all/cat all/dog"), note="not used: SOURCE itself"
    ),
    "ASL alphabet": Case(
        "asl_train/asl_train/cat asl_train/asl_train/dog asl_test/asl_test",
        splits(train="asl_train/asl_train/cat asl_train/asl_train/dog"),
        note="not used: asl_test/asl_test",
    ),
    "no labels": Case(
        "train/cat train/dog validation/cat no_label/no_label",
        splits(train="train/cat train/dog", val="validation/cat"),
        note="not used: no_label/no_label",
    ),
    "flat val": Case("train/cat train/dog val", error="val: contains no images in class folders"),
    "flat splits": Case("train test", error="train: contains 12 images outside class folders"),
    "flat": Case("", error="contains 12 images outside class folders.*use --no-classes"),
    "flat splits without classes": Case(
        "train test", splits(train="train", val="test"), flags={"no_classes": True}
    ),
    "classes without classes": Case(
        "bus train", splits(train="bus train"), flags={"no_classes": True}
    ),
}


def color_of(name: str) -> tuple[int, int, int]:
    """Return a color for a class name. The colors of the names in CASES differ, even after JPEG
    compression."""
    number = sum((place + 1) * ord(letter) for place, letter in enumerate(name)) % 343
    return number // 49 * 40, number // 7 % 7 * 40, number % 7 * 40


def folders_of(text: str) -> dict[str, str]:
    """Return a dict that maps each folder in `text` to the class of its images."""
    found = {}
    for word in text.split(" "):
        folder, _, name = word.replace("+", " ").partition("=")
        found[folder] = name or folder.rpartition("/")[2]
    return found


def files_of(case: Case) -> dict[str, bytes]:
    files = dict.fromkeys(case.others.split(), b"text")
    for folder, name in folders_of(case.folders).items():
        data = io.BytesIO()
        Image.new("RGB", (16, 16), color_of(name)).save(data, "JPEG", quality=95)
        files |= {f"{folder}/{n}.jpg".lstrip("/"): data.getvalue() for n in range(PER_FOLDER)}
    return dict(sorted(files.items()))


def write(files: dict[str, bytes], form: str, at: Path) -> Path:
    if form != "folder":
        (at / f"in.{form}").write_bytes(FORMS[form](files))
        return at / f"in.{form}"
    for name, data in files.items():
        path = at / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return at / "in"


class Found(NamedTuple):
    class_names: list[str]
    keys: dict[str, dict[str, int]]
    """Maps each split to a dict from keys to labels."""
    images: dict[str, Counter[tuple[str, bytes]]]
    """Maps each split to the number of images for each pair of class name and color."""


def read(source: Path, at: Path, **flags: object) -> Found:
    made = imagefolder.source(source, **flags)
    catalog = new_catalog(made, at, seed=0)
    keys = {}
    images = {}
    for split, total in catalog.splits.items():
        samples = catalog.table(split).samples(range(total))
        keys[split] = {sample.key: sample.label for sample in samples}
        images[split] = Counter(
            (
                catalog.class_names[sample.label] if catalog.class_names else "",
                np.asarray(Image.open(io.BytesIO(made.read(sample))))[8, 8].tobytes(),
            )
            for sample in samples
        )
    return Found(catalog.class_names, keys, images)


def expected_images(case: Case) -> dict[str, Counter]:
    assert case.splits is not None
    images = {}
    for split, text in case.splits.items():
        images[split] = Counter[tuple[str, bytes]]()
        for folder, name in folders_of(text).items():
            pixel = np.asarray(Image.open(io.BytesIO(files_of(case)[f"{folder}/0.jpg"])))[8, 8]
            images[split][("" if case.flags.get("no_classes") else name), pixel.tobytes()] += (
                PER_FOLDER
            )
    return images


@pytest.mark.parametrize("name", CASES)
def test_a_folder_a_zip_and_a_tar_have_the_same_splits_and_labels(name, tmp_path, capsys):
    case = CASES[name]
    results = []
    for form in ("folder", *FORMS):
        (tmp_path / form).mkdir()
        source = write(files_of(case), form, tmp_path / form)
        if case.error:
            with pytest.raises(PrepError, match=case.error):
                read(source, tmp_path / form / "catalog", **case.flags)
            continue
        found = read(source, tmp_path / form / "catalog", **case.flags)
        assert re.search(case.note, capsys.readouterr().out), form
        results.append(found)
        images = dict(found.images)
        wanted = expected_images(case)
        if "val" not in wanted and "val" in images:
            images["train"] = images["train"] + images.pop("val")
        assert images == wanted, form
    assert all(found == results[0] for found in results)


@pytest.mark.parametrize(
    ("name", "split"),
    {
        "Train": "train",
        "TRAINING": "train",
        "train_256": "train",
        "imgs_train": "train",
        "Validation Set": "val",
        "val2017": "val",
        "test-images": "test",
        "testset": "test",
        "evaluation": "test",
        "trainer": None,
        "training shoes": None,
        "test tube": None,
        "devices": None,
        "Valencia": None,
        "train_val": None,
        "set": None,
        "": None,
        "data" * 60: None,
    }.items(),
)
def test_names_of_splits(name, split):
    assert split_of(name) == split
