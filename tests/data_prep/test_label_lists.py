"""Test data sets whose labels are in lists: published ones are read without flags."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_imagenet import tar_of
from prep_place import new_catalogue
from prep_sources import Files, edit, put, without, write, zip_of
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
