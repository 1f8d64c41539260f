"""Test data sets whose labels are in lists.

The tests use small copies of published data sets, with the folders and lists that their
documentation describes. The color of each image encodes its class, so the correct label is known
from the image.
"""

import io
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_imagenet import tar_of
from PIL import Image
from prep_place import new_catalog
from prep_sources import Files, edit, without, write, zip_of

from data_prep.errors import PrepError
from data_prep.imagefolder import source

# ---- published data sets -------------------------------------------------------------------------

STEP = 40
"""The difference between the red values of neighboring classes."""


class Published(NamedTuple):
    """A small copy of a data set, with the published folders and lists."""

    files: Files
    class_names: list[str]
    """The classes in label order. The images of class n have the red value n * STEP."""
    splits: dict[str, int]
    """The number of images that each split must have."""
    printed: str
    """The line that the command must print about the lists, or ""."""


def picture(label: int, number: int = 0, format: str = "JPEG") -> bytes:
    encoded = io.BytesIO()
    color = (STEP * label, 3 * number % 256, 90)
    Image.new("RGB", (20 + number % 7, 16), color).save(encoded, format)
    return encoded.getvalue()


def class_of(image: bytes) -> int:
    """Return the class that the color of an image encodes."""
    red = Image.open(io.BytesIO(image)).convert("RGB").getpixel((8, 8))[0]
    return round(red / STEP)


def text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def tiny_imagenet() -> Published:
    """cs231n.stanford.edu/tiny-imagenet-200.zip"""
    names = ["n01443537", "n01629819", "n02124075"]
    root = "tiny-imagenet-200"
    files: Files = {
        f"{root}/wnids.txt": text(names[::-1]),
        f"{root}/words.txt": text(["n00001740\tentity", "n01443537\tgoldfish, Carassius auratus"]),
    }
    for label, name in enumerate(names):
        of_class = [f"{name}_{n}.JPEG" for n in range(5)]
        images = {f"{root}/train/{name}/images/{file}": file for file in of_class}
        files |= {path: picture(label, n) for n, path in enumerate(images)}
        boxes = text([f"{file}\t0\t10\t63\t58" for file in of_class])
        files[f"{root}/train/{name}/{name}_boxes.txt"] = boxes
    for n in range(6):
        files[f"{root}/val/images/val_{n}.JPEG"] = picture(2 * n % 3, 50 + n)
        files[f"{root}/test/images/test_{n}.JPEG"] = picture(0, 70 + n)
    rows = [f"val_{n}.JPEG\t{names[2 * n % 3]}\t0\t32\t44\t62" for n in range(6)]
    files[f"{root}/val/val_annotations.txt"] = text(rows)
    lists = f"list of labels: {root}/val/val_annotations.txt (6 of 6 images)"
    return Published(files, names, {"train": 15, "val": 6}, lists)


def food_101() -> Published:
    """data.vision.ee.ethz.ch/cvl/datasets_extra/food-101: lists of names without suffixes"""
    names = ["apple_pie", "baklava", "beignets"]
    files: Files = {
        "food-101/meta/classes.txt": text(names),
        "food-101/meta/labels.txt": text(["Apple pie", "Baklava", "Beignets"]),
        "food-101/meta/train.json": b"{}",
        "food-101/README.txt": b"Food-101\n",
    }
    lists: dict[str, list[str]] = {"train": [], "test": []}
    for label, name in enumerate(names):
        for n in range(6):
            files[f"food-101/images/{name}/{1000 * label + n}.jpg"] = picture(label, n)
            lists["test" if n < 2 else "train"].append(f"{name}/{1000 * label + n}")
    files |= {f"food-101/meta/{split}.txt": text(rows) for split, rows in lists.items()}
    printed = (
        "lists of labels: food-101/meta/train.txt (12 of 18 images), food-101/meta/test.txt (6 of"
        " 18 images)"
    )
    return Published(files, names, {"train": 12, "val": 6}, printed)


def cub_200() -> Published:
    """README of CUB_200_2011: image numbers join three lists"""
    names = ["001.Black_footed_Albatross", "002.Laysan_Albatross", "003.Sooty_Albatross"]
    root = "CUB_200_2011"
    tables: dict[str, list[str]] = {
        "images": [],
        "image_class_labels": [],
        "train_test_split": [],
        "bounding_boxes": [],
        "attributes/image_attribute_labels": [],
        "classes": [f"{n} {name}" for n, name in enumerate(names, 1)],
        "attributes/class_attribute_labels_continuous": ["0.0 2.7 0.0"] * 3,
    }
    files: Files = {"attributes.txt": text(["1 has_bill_shape::curved"]), f"{root}/README": b"x"}
    for n in range(15):
        label = n // 5
        name = f"{names[label]}/{names[label][4:]}_{n:04d}_{7 * n}.jpg"
        files[f"{root}/images/{name}"] = picture(label, n)
        tables["images"].append(f"{n + 1} {name}")
        tables["image_class_labels"].append(f"{n + 1} {label + 1}")
        tables["train_test_split"].append(f"{n + 1} {int(n % 5 > 1)}")
        tables["bounding_boxes"].append(f"{n + 1} 60.0 27.0 325.0 304.0")
        tables["attributes/image_attribute_labels"].append(f"{n + 1} 1 0 3 27.7080")
    files |= {f"{root}/{name}.txt": text(rows) for name, rows in tables.items()}
    printed = (
        f"list of labels: {root}/images.txt (15 of 15 images); class names:"
        f" {root}/classes.txt; 1 to 3 become the labels from 0 on"
    )
    return Published(files, names, {"train": 9, "val": 6}, printed)


def dtd() -> Published:
    """robots.ox.ac.uk/~vgg/data/dtd: ten partitions, of which the first is used"""
    names = ["banded", "blotchy", "braided"]
    files: Files = {"dtd/imdb/imdb.mat": b"x"}
    joint = []
    for label, name in enumerate(names):
        for n in range(9):
            files[f"dtd/images/{name}/{name}_{n:04d}.jpg"] = picture(label, n)
            joint.append(f"{name}/{name}_{n:04d}.jpg {name} grooved ")
    files["dtd/labels/labels_joint_anno.txt"] = text(joint)
    for partition in (1, 2, 10):
        for place, split in enumerate(("train", "val", "test")):
            third = [(place + partition) % 3 * 3 + n for n in range(3)]
            rows = [f"{name}/{name}_{n:04d}.jpg" for name in names for n in third]
            files[f"dtd/labels/{split}{partition}.txt"] = text(rows)
    each = ", ".join(f"dtd/labels/{s}1.txt (9 of 27 images)" for s in ("train", "val", "test"))
    return Published(files, names, {"train": 9, "val": 9, "test": 9}, f"lists of labels: {each}")


def places365() -> Published:
    """csailvision/places365: names with a leading slash, class folders on two levels"""
    names = ["a/airfield", "a/apartment_building/outdoor", "b/bus_station/indoor"]
    files: Files = {
        "categories_places365.txt": text([f"/{name} {n}" for n, name in enumerate(names)]),
        "places365_test.txt": text([f"Places365_test_{n:08d}.jpg" for n in range(2)]),
    }
    files |= {f"test_256/Places365_test_{n:08d}.jpg": picture(0, 80 + n) for n in range(2)}
    train, val = [], []
    for label, name in enumerate(names):
        for n in range(5):
            files[f"data_256/{name}/{n:08d}.jpg"] = picture(label, n)
            train.append(f"/{name}/{n:08d}.jpg {label}")
    for n in range(6):
        files[f"val_256/Places365_val_{n:08d}.jpg"] = picture((n + 1) % 3, 40 + n)
        val.append(f"Places365_val_{n:08d}.jpg {(n + 1) % 3}")
    files |= {"places365_train_standard.txt": text(train), "places365_val.txt": text(val)}
    printed = (
        "lists of labels: places365_train_standard.txt (15 of 15 images), places365_val.txt (6 of"
        " 6 images); class names: categories_places365.txt"
    )
    return Published(files, names, {"train": 15, "val": 6}, printed)


def pets() -> Published:
    """robots.ox.ac.uk/~vgg/data/pets: classes numbered from 1, class names only in file names"""
    names = ["Abyssinian", "american_bulldog", "Bengal"]
    files: Files = {"annotations/README": b"x", "images/Abyssinian_100.mat": b"x"}
    lists: dict[str, list[str]] = {"trainval": [], "test": []}
    for label, name in enumerate(names):
        for n in range(6):
            files[f"images/{name}_{n + 1}.jpg"] = picture(label, n)
            files[f"annotations/trimaps/{name}_{n + 1}.png"] = picture(0, n, "PNG")
            files[f"annotations/trimaps/._{name}_{n + 1}.png"] = b"x"
            files[f"annotations/xmls/{name}_{n + 1}.xml"] = b"<xml/>"
            lists["test" if n > 3 else "trainval"].append(
                f"{name}_{n + 1} {label + 1} {1 + label % 2} {n + 1}"
            )
    files["images/Bengal_111.jpg"] = picture(2, 99)  # Neither list contains this image.
    head = ["#Image CLASS-ID SPECIES BREED ID", "#ID: 1:37 Class ids"]
    files["annotations/list.txt"] = text([*head, *lists["trainval"], *lists["test"]])
    files |= {f"annotations/{split}.txt": text(rows) for split, rows in lists.items()}
    printed = (
        "lists of labels: annotations/trainval.txt (12 of 19 images), annotations/test.txt (6 of 19"
        " images); class names: the names of the images; 1 to 3 become the labels from 0 on"
    )
    return Published(files, names, {"train": 12, "val": 6}, printed)


def mmpretrain() -> Published:
    """docs/en/user_guides/dataset_prepare.md of MMPretrain: the same names in train and val"""
    files: Files = {}
    for split, count in (("train", 12), ("val", 6)):
        rows = []
        for n in range(count):
            label = (n + len(split)) % 3
            name = f"{n}.png" if n % 2 else f"folder_{n % 4}/{n} of 9.png"
            files[f"data/{split}/{name}"] = picture(label, n, "PNG")
            rows.append(f"{name} {label}")
        files[f"data/meta/{split}.txt"] = text(rows)
    printed = (
        "lists of labels: data/meta/train.txt (12 of 12 images), data/meta/val.txt (6 of 6 images);"
        " class names: the numbers"
    )
    return Published(files, ["0", "1", "2"], {"train": 12, "val": 6}, printed)


def one_csv() -> Published:
    """A table with a header, quotes, a split column, and another column before the one with the
    paths"""
    names = ["ABBOTTS BABBLER", "CROW, BLACK"]
    rows = ["class id,filepaths,labels,data set"]
    files: Files = {}
    for split in ("train", "valid", "test"):
        for n in range(6 if split == "train" else 2):
            path = f"birds/{n}_{split}.jpg"
            files[path] = picture(n % 2, n + len(split))
            rows.append(f'{n % 2},{path},"{names[n % 2]}",{split}')
    files["labels.csv"] = text(rows)
    printed = "list of labels: labels.csv (10 of 10 images)"
    return Published(files, names, {"train": 6, "val": 2, "test": 2}, printed)


def class_tars() -> Published:
    """image-net.org: winter21_whole, with one tar per class"""
    names = ["n01440764", "n01443537", "n01484850"]
    files = {
        f"winter21_whole/{name}.tar": tar_of(
            (f"{name}_{n}.JPEG", picture(label, n)) for n in range(10)
        )
        for label, name in enumerate(names)
    }
    return Published(files, names, {"train": 27, "val": 3}, "")


LAYOUTS: dict[str, Callable[[], Published]] = {
    "Tiny-ImageNet-200": tiny_imagenet,
    "Food-101": food_101,
    "CUB-200-2011": cub_200,
    "DTD": dtd,
    "Places365": places365,
    "Oxford-IIIT Pet": pets,
    "MMPretrain": mmpretrain,
    "a csv": one_csv,
    "ImageNet-21k": class_tars,
}


# ---- reading published data sets -----------------------------------------------------------------


class Listed(NamedTuple):
    class_names: list[str]
    splits: dict[str, list]
    """Maps each split to its samples and their encoded images."""
    notes: list[str]


def listed(path: Path, **options) -> Listed:
    opened = source(path, **options)
    catalog = new_catalog(opened, path.parent / "catalog", seed=0)
    splits = {
        split: [(sample, opened.read(sample)) for sample in catalog.table(split).samples(range(n))]
        for split, n in catalog.splits.items()
    }
    return Listed(catalog.class_names, splits, catalog.notes)


def of(files: Files, folder: Path, **options) -> Listed:
    write(files, folder / "in")
    return listed(folder / "in", **options)


@pytest.mark.parametrize("packed", ["folder", "zip", "tar"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_is_read_without_flags(name, packed, tmp_path, capsys):
    published = LAYOUTS[name]()
    path = tmp_path / "in"
    if packed == "zip":
        path.write_bytes(zip_of(published.files))
    elif packed == "tar":
        path.write_bytes(tar_of(published.files.items()))
    else:
        write(published.files, path)
    if name == "ImageNet-21k":
        if packed != "folder":
            pytest.skip("a tar of tars is unpacked first")
        path /= "winter21_whole"
    found = listed(path)
    assert found.class_names == published.class_names
    assert {split: len(samples) for split, samples in found.splits.items()} == published.splits
    for samples in found.splits.values():
        for sample, image in samples:
            assert sample.label == class_of(image), sample
    assert published.printed in (*capsys.readouterr().out.splitlines(), "")


# ---- what lists leave out ------------------------------------------------------------------------


def test_images_and_lists_that_are_not_used_are_counted(tmp_path):
    for name, expected in {
        "Oxford-IIIT Pet": [
            "the images in these folders are not used: annotations/trimaps (18)",
            "images that no list names are not used: images (1)",
            "lists that repeat images of other lists are not used: annotations/list.txt",
        ],
        "Tiny-ImageNet-200": [
            "the images in these folders are not used: tiny-imagenet-200/test/images (6)"
        ],
        "Places365": [
            "the images in these folders are not used: test_256 (2)",
            "lists that contain no labels are not used: places365_test.txt",
        ],
        "DTD": [
            "lists that repeat images of other lists are not used:"
            " dtd/labels/labels_joint_anno.txt, dtd/labels/test10.txt, dtd/labels/test2.txt,"
            " dtd/labels/train10.txt,"
            " dtd/labels/train2.txt and 2 more"
        ],
    }.items():
        notes = of(LAYOUTS[name]().files, tmp_path / name).notes
        assert [note for note in notes if "not used" in note] == expected


FLAT = {f"{n}.jpg": picture(n % 2, n) for n in range(20)}
ROWS = [f"{n}.jpg {('cat', 'dog')[n % 2]}" for n in range(20)]


def test_a_list_without_a_split_is_divided_by_class(tmp_path):
    found = of(FLAT | {"labels.txt": text(ROWS)}, tmp_path)
    assert found.class_names == ["cat", "dog"]
    assert Counter(s.label for s, _ in found.splits["val"]) == {0: 1, 1: 1}
    assert all(s.label == class_of(image) for s, image in found.splits["train"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("20.jpg cat", r"1 rows of labels.txt .*: 20.jpg \(missing\); correct or remove"),
        ("3.jpg cat", r"1 rows of labels.txt .*: 3.jpg \(train: cat\); correct or remove"),
        ("3.jpg", r"1 rows of labels.txt .*: 3.jpg \(no label\); correct or remove"),
    ],
)
def test_a_wrong_row_is_an_error(row, message, tmp_path):
    with pytest.raises(PrepError, match=message):
        of(FLAT | {"labels.txt": text([*ROWS, row])}, tmp_path)


def test_a_list_without_a_split_beside_one_of_val_is_the_list_of_train(tmp_path):
    found = of(FLAT | {"labels.txt": text(ROWS[:15]), "val.txt": text(ROWS[15:])}, tmp_path)
    assert {split: len(samples) for split, samples in found.splits.items()} == {
        "train": 15,
        "val": 5,
    }


def test_a_column_that_tells_other_splits_than_the_name_of_the_list(tmp_path):
    """The name of a list determines the split only if the list has no split column."""
    rows = ["file,label,split", *(f"{n}.jpg,ab,{'val' if n > 15 else 'train'}" for n in range(20))]
    rows = [row.replace("ab", "ab"[n % 2]) for n, row in enumerate(rows)]
    found = of(FLAT | {"train.csv": text(rows)}, tmp_path)
    assert [len(samples) for samples in found.splits.values()] == [16, 4]


def test_an_image_in_two_splits_is_an_error(tmp_path):
    with pytest.raises(PrepError, match=r"1 rows of train.txt, val.txt .*: 3.jpg \(val: dog\)"):
        of(FLAT | {"train.txt": text(ROWS), "val.txt": text(ROWS[3:4])}, tmp_path)


def test_a_label_that_no_training_image_has_is_an_error(tmp_path):
    files = edit("val_annotations.txt", lambda data: data.replace(b"n01443537", b"n09999999"))
    with pytest.raises(PrepError, match="these classes have no training folder: n09999999"):
        of(files(tiny_imagenet().files), tmp_path)


def test_a_list_of_other_images_is_reported_and_not_used(tmp_path):
    """For example, a list beside class folders may have been made for other files."""
    files = {f"{name}/{n}.jpg": picture(0, n) for name in ("cat", "dog") for n in range(6)}
    found = of(files | {"train.txt": b"fish/1.jpg 0\n"}, tmp_path)
    assert found.class_names == ["cat", "dog"]
    assert "lists that do not name the images in a folder are not used: train.txt" in found.notes


def test_a_list_without_the_class_folders_of_its_images_is_not_used(tmp_path):
    """No single folder contains all images in the list, so the class folders determine the
    labels."""
    names = ["ant", "bee", "cat", "dog"]
    files = {f"train/{names[n % 4]}/{n}.jpg": picture(n % 4, n) for n in range(40)}
    rows = ["file,target", *(f"{n}.jpg,{n % 4}" for n in range(40))]
    found = of(files | {"train.csv": text(rows)}, tmp_path)
    assert found.class_names == names
    assert "lists that do not name the images in a folder are not used: train.csv" in found.notes


def test_layout_ignores_lists(tmp_path):
    found = of(food_101().files, tmp_path, layout="classes", val_fraction=0)
    assert {split: len(samples) for split, samples in found.splits.items()} == {"train": 18}


@pytest.mark.parametrize("separator", [" ", "\t", ","])
@pytest.mark.parametrize("labels", ["names", "numbers"])
def test_every_separator_and_kind_of_label(separator, labels, tmp_path):
    names = ["a cat", "b dog"]
    rows = [
        separator.join([f"my images/{n}.jpg", names[n % 2] if labels == "names" else str(n % 2)])
        for n in range(20)
    ]
    files = {f"my images/{name}": data for name, data in FLAT.items()}
    files |= {"train.txt": text(rows[:14]), "val.txt": text(rows[14:]), "classes.txt": text(names)}
    found = of(files, tmp_path)
    assert found.class_names == names
    for samples in found.splits.values():
        assert all(sample.label == class_of(image) for sample, image in samples)


def test_a_list_in_the_other_layouts_of_its_images(tmp_path):
    """Windows programs write backslashes and a byte order mark, and paths in lists may begin with
    `./`."""
    rows = [row.replace("/", "\\") for row in (f"photos/{row}" for row in ROWS[:10])]
    rows += [f"./photos/{row}" for row in ROWS[10:]]
    files = {f"photos/{name}": data for name, data in FLAT.items()}
    found = of(files | {"train.txt": b"\xef\xbb\xbf" + text(rows)}, tmp_path, val_fraction=0)
    assert len(found.splits["train"]) == 20


def test_keys_are_the_paths_in_the_list(tmp_path):
    for name, files in (
        ("list", food_101().files),
        ("folders", without("meta/")(food_101().files)),
    ):
        found = of(files, tmp_path / name, val_fraction=None)
        keys = {sample.key for samples in found.splits.values() for sample, _ in samples}
        assert "apple_pie_0" in keys
        assert not any(re.search("images|food", key) for key in keys)


# ---- lists that could be read in two ways --------------------------------------------------------

PAIR = ["ant", "bee"]


def pair_rows(separator: str, suffix: str = ".jpg", names: list[str] = PAIR) -> list[str]:
    return [f"{n}{suffix}{separator}{names[n % 2]}" for n in range(20)]


def with_split_column() -> Files:
    """Return images and a list whose split column assigns the first rows to val, although their
    images are in the train folder."""
    rows = [f"{'test' if n % 4 > 1 else 'train'}/{n}.jpg" for n in range(20)]
    files = {row: picture(n % 2, n) for n, row in enumerate(rows)}
    splits = ["val" if n < 2 else row.partition("/")[0] for n, row in enumerate(rows)]
    lines = [f"{row},{PAIR[n % 2]},{splits[n]}" for n, row in enumerate(rows)]
    return files | {"labels.csv": text(["file,label,split", *lines])}


def kaggle_cifar() -> Files:
    """kaggle.com/c/cifar-10: test images have the same names as training images"""
    test = {f"test/{n}.jpg": picture(1 - n % 2, n) for n in range(30)}
    train = {f"train/{n}.jpg": picture(n % 2, n) for n in range(20)}
    return test | train | {"trainLabels.csv": text(["id,label", *pair_rows(",", "")])}


def folders_and(name: str, lines: list[str]) -> Files:
    """Return class folders in which the image names are numbers, and a list with the given name and
    lines."""
    images = {f"{PAIR[n % 2]}/{n // 2}.jpg": picture(n % 2, n) for n in range(20)}
    return images | {name: text(lines)}


UNUSUAL: dict[str, tuple[Files, list[str], dict[str, int]]] = {
    "semicolons": (
        FLAT | {"labels.csv": text(["file;label", *pair_rows(";")])},
        PAIR,
        {"train": 20},
    ),
    "blanks around commas": (FLAT | {"labels.txt": text(pair_rows(" , "))}, PAIR, {"train": 20}),
    "names that begin with a number": (
        FLAT | {"labels.txt": text(pair_rows(" ", names=["3d model", "3d printer"]))},
        ["3d model", "3d printer"],
        {"train": 20},
    ),
    "numbers of rows without a header": (
        FLAT | {"labels.csv": text([f"{n},{row}" for n, row in enumerate(pair_rows(","))])},
        PAIR,
        {"train": 20},
    ),
    "numbers of rows by pandas": (
        FLAT
        | {
            "labels.csv": text(
                [",file,breed", *(f"{n},{row}" for n, row in enumerate(pair_rows(",")))]
            )
        },
        PAIR,
        {"train": 20},
    ),
    "the class first, without a header": (
        FLAT | {"labels.csv": text([",".join(row.split()[::-1]) for row in pair_rows(" ")])},
        PAIR,
        {"train": 20},
    ),
    "a list in a folder beside all images": (
        {f"photos/{name}": image for name, image in FLAT.items()}
        | {"photos/lists/train.txt": text(pair_rows(" "))},
        PAIR,
        {"train": 20},
    ),
    "a column of splits": (with_split_column(), PAIR, {"train": 8, "val": 2, "test": 10}),
    "Kaggle's CIFAR-10": (kaggle_cifar(), PAIR, {"train": 20}),
    "names of lists without blanks": (
        FLAT
        | {"trainlist.txt": text(pair_rows(" ")[:15]), "ValLabels.txt": text(pair_rows(" ")[15:])},
        PAIR,
        {"train": 15, "val": 5},
    ),
    "a list of classes with numbers": (
        folders_and("labels.txt", ["0 ant", "1 bee"]),
        PAIR,
        {"train": 20},
    ),
    "a table of classes with numbers": (
        folders_and("classes.csv", ["id,name", "0,ant", "1,bee"]),
        PAIR,
        {"train": 20},
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_list_in_an_unusual_form_gets_the_right_labels(name, tmp_path):
    files, class_names, splits = UNUSUAL[name]
    found = of(files, tmp_path, val_fraction=None if "val" in splits else 0)
    assert found.class_names == class_names
    assert {split: len(samples) for split, samples in found.splits.items()} == splits
    for samples in found.splits.values():
        assert all(sample.label == class_of(image) for sample, image in samples)


@pytest.mark.parametrize("classes", [["ant", "bee", "cat"], ["name", "ant", "bee"]])
@pytest.mark.parametrize("first", [0, 1])
def test_classes_without_numbers_are_counted_from_0_or_1_only_if_all_have_images(
    classes, first, tmp_path
):
    """Otherwise, the first line could be a header, or the name of class 0 or of class 1."""
    rows = [f"{n}.jpg {first + n % 2}" for n in range(20)]
    with pytest.raises(PrepError, match=f"the names of the classes {first} to {first + 1}"):
        of(FLAT | {"labels.txt": text(rows), "classes.txt": text(classes)}, tmp_path)


def test_numbers_of_classes_in_folders_need_a_sorted_or_numbered_list(tmp_path):
    """ImageFolder numbers the folders in sorted order, but Tiny-ImageNet's wnids.txt is not
    sorted."""
    files = {f"val/{n}.jpg": picture(n % 2, n) for n in range(20)}
    files |= {f"train/{PAIR[n % 2]}/{n}.jpg": picture(n % 2, n) for n in range(20)}
    files["val.txt"] = text([f"{n}.jpg {n % 2}" for n in range(20)])
    for number, lines in enumerate((PAIR, ["1 bee", "0 ant"])):
        found = of(files | {"wnids.txt": text(lines)}, tmp_path / str(number))
        assert found.class_names == PAIR
        assert all(sample.label == class_of(image) for sample, image in found.splits["val"])
    with pytest.raises(PrepError, match=r"wnids.txt: expected the names of the classes"):
        of(files | {"wnids.txt": text(PAIR[::-1])}, tmp_path / "unsorted")
