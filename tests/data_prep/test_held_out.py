"""Test that a held-out split without images, or without images of a class, is reported with
remedies that work."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from prep_place import new_catalog
from prep_sources import parquet_of
from small_shards import add, image_bytes

from data_prep import imagefolder, parquet


def folder_of(counts: dict[str, int], at: Path) -> Path:
    for name, count in counts.items():
        for number in range(count):
            add(at / "in" / name / f"{number}.jpg", number)
    return at / "in"


def parquet_file(counts: dict[str, int], at: Path) -> Path:
    rows = [
        {"image": {"bytes": image_bytes(number), "path": None}, "label": name}
        for name, count in counts.items()
        for number in range(count)
    ]
    (at / "train-0.parquet").write_bytes(parquet_of(rows))
    return at / "train-0.parquet"


SOURCES = {
    "imagefolder": (folder_of, imagefolder.source),
    "parquet": (parquet_file, parquet.source),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    ("counts", "lacking"),
    [
        ({"a": 4, "b": 4}, ["a", "b"]),
        ({"a": 40, "b": 4, "c": 3}, ["b", "c"]),
        ({"a": 2, "b": 30}, ["a"]),
        ({"a": 5, "b": 15}, ["a"]),
    ],
)
def test_the_printed_fraction_gives_each_class_an_image(name, counts, lacking, tmp_path, capsys):
    write, source = SOURCES[name]
    made = partial(source, write(counts, tmp_path))
    catalog = new_catalog(made(), tmp_path / "first", seed=0)
    assert ("val" in catalog.splits) == (len(lacking) < len(counts))
    printed = capsys.readouterr().out
    assert f"val has no image of {', '.join(lacking)}, because 0.1 of up to" in printed
    assert ("data.train_split='train[:90%]'" in printed) == (len(lacking) == len(counts))
    (fraction,) = re.findall(r"use --val-fraction ([\d.]+) or add images", printed)
    catalog = new_catalog(made(val_fraction=float(fraction)), tmp_path / "second", seed=0)
    val = catalog.table("val").samples(range(catalog.splits["val"]))
    assert {sample.label for sample in val} == set(range(len(counts)))
    assert "has no image of" not in capsys.readouterr().out


def test_a_test_of_one_class_is_reported(tmp_path, capsys):
    """Lists of test images often contain 0 in place of the real labels."""
    both = {"a": 20, "b": 20}
    for split, counts in {"train": both, "val": both, "test": {"a": 3}}.items():
        folder_of(counts, tmp_path / split)
    new_catalog(imagefolder.source(tmp_path), tmp_path / "catalog", seed=0)
    line = (
        "test has no image of b, so its accuracy does not cover all classes: add images, or remove"
        " test\n"
    )
    assert line in capsys.readouterr().out


def test_a_given_val_without_a_class_is_reported(tmp_path, capsys):
    """The note also names classes for which the held-out split has an empty folder."""
    for split, counts in {"train": {"a": 4, "b": 4, "c": 4}, "val": {"a": 2}}.items():
        folder_of(counts, tmp_path / split)
    (tmp_path / "val" / "in" / "b").mkdir()
    new_catalog(imagefolder.source(tmp_path), tmp_path / "catalog", seed=0)
    line = (
        "val has no image of b, c, so its accuracy does not cover all classes: add images, or"
        " remove val to hold out a part of train"
    )
    assert line in capsys.readouterr().out

    parquet_file({"a": 4, "b": 4}, tmp_path).rename(tmp_path / "train.parquet")
    parquet_file({"a": 2}, tmp_path).rename(tmp_path / "val.parquet")
    new_catalog(parquet.source(tmp_path), tmp_path / "second", seed=0)
    assert line.replace("b, c", "b") in capsys.readouterr().out


def test_classes_without_training_images_are_not_said_to_be_rounded(tmp_path, capsys):
    parquet_file({"a": 20, "b": 20}, tmp_path).rename(tmp_path / "train.parquet")
    parquet_file({"c": 2}, tmp_path).rename(tmp_path / "test.parquet")
    source = parquet.source(tmp_path, val_fraction=0.1, allow_partial=True)
    new_catalog(source, tmp_path / "catalog", seed=0)
    assert "rounds to 0" not in capsys.readouterr().out


def test_classes_of_one_image_need_more_images(tmp_path, capsys):
    source = imagefolder.source(folder_of({"a": 1, "b": 1}, tmp_path))
    new_catalog(source, tmp_path / "catalog", seed=0)
    printed = capsys.readouterr().out
    assert "rounds to 0: add images, or set data.train_split='train[:90%]'" in printed


def test_a_small_val_is_reported_unless_more_was_held_out(tmp_path, capsys):
    folder = folder_of({"a": 300, "b": 250}, tmp_path)
    new_catalog(imagefolder.source(folder), tmp_path / "first", seed=0)
    assert "val has only 55 images, so an accuracy is uncertain by up to 13" in (
        capsys.readouterr().out
    )
    for fraction in (0.0, 0.19, 0.2):
        source = imagefolder.source(folder, val_fraction=fraction)
        new_catalog(source, tmp_path / f"{fraction}", seed=0)
        assert "val has" not in capsys.readouterr().out
