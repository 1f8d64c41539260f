"""Compare how data_prep and the library `datasets` read image folders with metadata.csv or
metadata.jsonl."""

import csv
import json
import shutil
from pathlib import Path

import datasets
import pytest
from prep_sources import Stored, stored
from small_shards import add, image_bytes

from data_prep.imagefolder import main

CLASSES = {f"{n}.jpg": ("a", "a/b", "c")[n % 3] for n in range(30)}


def write_images(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(number))


def write_csv(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def rows(classes: dict[str, str], **more: str) -> list[dict]:
    return [{"file_name": name, "label": label, **more} for name, label in classes.items()]


def prepared(folder: Path, out: Path, *flags: str) -> dict:
    command = [str(folder), "--out", str(out), "--workers", "1", *flags]
    assert main([*command, "--no-apply-exif"]) == 0
    return json.loads((out / "_info.json").read_text())


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_each_row_is_an_image_of_its_class(tmp_path, kind):
    folder = tmp_path / "photos"
    classes = {f"{'old/' if n % 4 else ''}{name}": CLASSES[name] for n, name in enumerate(CLASSES)}
    write_images(folder, list(classes))
    listed = rows(classes, caption='a "photo", in\ntwo lines')
    if kind == "csv":
        write_csv(folder / "metadata.csv", listed)
    else:
        (folder / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in listed))
    info = prepared(folder, tmp_path / "out", "--val-fraction", "0.2")
    assert info["class_names"] == ["a", "a/b", "c"]
    samples = {**stored(tmp_path / "out", "train"), **stored(tmp_path / "out", "val")}
    theirs = datasets.load_dataset("imagefolder", data_dir=str(folder), split="train")
    theirs = theirs.cast_column("image", datasets.Image(decode=False))
    expected = [
        Stored(Path(row["image"]["path"]).read_bytes(), info["class_names"].index(row["label"]))
        for row in theirs
    ]
    assert sorted(samples.values()) == sorted(expected)
    assert len(expected) == 30


@pytest.mark.parametrize("at", ["root", "splits"])
def test_splits_with_one_table_or_two(tmp_path, at):
    splits = {"train": dict(list(CLASSES.items())[:18]), "test": dict(list(CLASSES.items())[18:])}
    everything = {}
    for split, classes in splits.items():
        write_images(tmp_path / "in" / split, list(classes))
        everything |= {f"{split}/{name}": label for name, label in classes.items()}
        if at == "splits":
            write_csv(tmp_path / "in" / split / "metadata.csv", rows(classes))
    if at == "root":
        write_csv(tmp_path / "in" / "metadata.csv", rows(everything))
    info = prepared(tmp_path / "in", tmp_path / "out")
    assert {split: described["num_samples"] for split, described in info["splits"].items()} == {
        "train": 18,
        "val": 12,
    }


def test_images_without_a_row_are_reported(tmp_path):
    write_images(tmp_path / "in", [*CLASSES, "more/x.jpg"])
    write_csv(tmp_path / "in" / "metadata.csv", rows(CLASSES))
    info = prepared(tmp_path / "in", tmp_path / "out")
    assert "images that no list names are not used: more (1)" in info["origin"]
    assert info["listed"] == {"train": 27, "val": 3}


def test_a_table_of_captions_beside_class_folders_is_not_one_of_classes(tmp_path):
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/2.jpg"):
        add(tmp_path / "in" / name)
    captions = [{"file_name": f"cat/{n}.jpg", "text": f"number {n}"} for n in (1, 2)]
    write_csv(tmp_path / "in" / "metadata.csv", captions)
    assert prepared(tmp_path / "in", tmp_path / "out")["class_names"] == ["cat", "dog"]


def test_a_column_may_be_named(tmp_path):
    write_images(tmp_path / "in", list(CLASSES))
    listed = [{"file_name": name, "breed": kind, "age": "1"} for name, kind in CLASSES.items()]
    write_csv(tmp_path / "in" / "metadata.csv", listed)
    info = prepared(tmp_path / "in", tmp_path / "out", "--label-column", "breed")
    assert info["class_names"] == ["a", "a/b", "c"]


def test_a_file_is_listed_once_or_with_the_same_label(tmp_path, capsys):
    write_images(tmp_path / "in", list(CLASSES))
    listed = [*rows(CLASSES), {"file_name": "./0.jpg", "label": " a"}]
    write_csv(tmp_path / "in" / "metadata.csv", listed)
    assert prepared(tmp_path / "in", tmp_path / "out")["listed"] == {"train": 27, "val": 3}
    write_csv(tmp_path / "in" / "metadata.csv", [*listed, {"file_name": "0.jpg", "label": "c"}])
    assert main([str(tmp_path / "in"), "--out", str(tmp_path / "more")]) == 2
    error = capsys.readouterr().err
    assert "in: 1 rows of metadata.csv have no label or several labels, have another label" in error
    assert ": 0.jpg (train: c); correct or remove these rows" in error


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_table_in_an_archive_has_the_same_meaning_as_in_a_folder(tmp_path, kind):
    """If the table contains labels, the folders in the archive do not have to be classes."""
    names = [f"photos/{place}/{n}.jpg" for place in ("indoors", "outdoors") for n in range(2)]
    write_images(tmp_path / "in", names)
    table = tmp_path / "in" / "photos" / "metadata.jsonl"
    captions = [{"file_name": name.removeprefix("photos/"), "text": "a class"} for name in names]
    classes = [{**row, "label": "ab"[n % 2]} for n, row in enumerate(captions)]
    for listed, expected in ((captions, ["indoors", "outdoors"]), (classes, ["a", "b"])):
        table.write_text("".join(f"{json.dumps(row)}\n" for row in listed))
        archive = shutil.make_archive(str(tmp_path / "".join(expected)), kind, tmp_path / "in")
        info = prepared(Path(archive), tmp_path / f"out-{expected[0]}")
        assert info["class_names"] == expected


def test_a_row_with_several_labels_or_without_the_field_is_an_error(tmp_path, capsys):
    write_images(tmp_path / "in", ["0.jpg", "1.jpg"])
    for label, reason in (({"label": ["a", "b"]}, "1.jpg (['a', 'b'])"), ({}, "1.jpg (no label)")):
        listed = [{"file_name": "0.jpg", "label": "a"}, {"file_name": "1.jpg", **label}]
        text = "".join(f"{json.dumps(row)}\n" for row in listed)
        (tmp_path / "in" / "metadata.jsonl").write_text(text)
        assert main([str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {tmp_path / 'in'}: 1 rows of metadata.jsonl have no label")
        assert reason in error
