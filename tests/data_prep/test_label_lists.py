"""Test data sets whose labels are in lists: published ones are read without flags."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_imagenet import tar_of
from prep_place import new_catalogue
from prep_sources import Files, edit, without, write, zip_of
from published_layouts import LAYOUTS, class_of, food_101, pets, picture, text, tiny_imagenet

from data_prep.errors import PrepError
from data_prep.imagefolder import source


class Listed(NamedTuple):
    class_names: list[str]
    splits: dict[str, list]
    """The samples of each split, with their encoded images."""
    notes: list[str]


def listed(path: Path, **options) -> Listed:
    opened = source(path, **options)
    catalogue = new_catalogue(opened, path.parent / "catalogue", seed=0)
    splits = {
        split: [
            (sample, opened.read(sample)) for sample in catalogue.table(split).samples(range(n))
        ]
        for split, n in catalogue.splits.items()
    }
    return Listed(catalogue.class_names, splits, catalogue.notes)


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
    notes = of(pets().files, tmp_path / "pets").notes
    assert notes[0] == "the images in these folders are not used: annotations/trimaps (18)"
    assert notes[1] == "images that no list names are not used: images (1)"
    notes = of(tiny_imagenet().files, tmp_path / "tiny").notes
    assert notes[0] == (
        "the images in these folders are not used: tiny-imagenet-200/test/images (6)"
    )
    notes = of(LAYOUTS["Places365"]().files, tmp_path / "places").notes
    assert notes == [
        "the images in these folders are not used: test_256 (2)",
        "places365_test.txt contains no labels, and is not used",
    ]
    notes = of(LAYOUTS["DTD"]().files, tmp_path / "dtd").notes
    assert [note for note in notes if "not used" in note] == [
        f"dtd/labels/{split}2.txt, dtd/labels/{split}10.txt are not used"
        for split in ("train", "val", "test")
    ]


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


def test_an_image_in_two_splits_is_an_error(tmp_path):
    with pytest.raises(PrepError, match=r"1 rows of train.txt, val.txt .*: 3.jpg \(val: dog\)"):
        of(FLAT | {"train.txt": text(ROWS), "val.txt": text(ROWS[3:4])}, tmp_path)


def test_a_label_that_no_training_image_has_is_an_error(tmp_path):
    files = edit("val_annotations.txt", lambda data: data.replace(b"n01443537", b"n09999999"))
    with pytest.raises(PrepError, match="these classes have no training folder: n09999999"):
        of(files(tiny_imagenet().files), tmp_path)


def test_a_list_of_other_images_is_reported_and_not_used(tmp_path):
    """For example, a list beside class folders that was made for other files."""
    files = {f"{name}/{n}.jpg": picture(0, n) for name in ("cat", "dog") for n in range(6)}
    found = of(files | {"train.txt": b"fish/1.jpg 0\n"}, tmp_path)
    assert found.class_names == ["cat", "dog"]
    assert "train.txt names no image of the source, and is not used" in found.notes


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
    """Windows writes backslashes and a byte order mark, and lists may begin with `./`."""
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
