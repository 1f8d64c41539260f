"""Test Parquet files from `datasets` and pyarrow: shards must contain each row once, with the row's
bytes and label."""

import datetime
import io
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from prep_sources import Stored, stored
from small_shards import image_bytes

from data_prep import parquet
from vit.data.decode.images import decode

NAMES = ["cat", "dog", "owl"]
IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def rows(count: int, start: int = 0, label: Callable[[int], Any] = lambda n: n % 3) -> list[dict]:
    """Return table rows. Every third image has no name."""
    return [
        {
            "image": {"bytes": image_bytes(start + n), "path": f"{n}.jpg" if n % 3 else None},
            "label": label(n),
        }
        for n in range(count)
    ]


def by_datasets(folder: Path, train: list[dict], num_files: int = 3, **others: list[dict]) -> Path:
    """Write the files that `push_to_hub` uploads."""
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    )
    (folder / "data").mkdir(parents=True)
    for split, listed in {"train": train, **others}.items():
        whole = datasets.Dataset.from_list(listed, features=kinds)
        count = num_files if split == "train" else 1
        for part in range(count):
            name = f"{split}-{part:05d}-of-{count:05d}.parquet"
            whole.shard(count, part).to_parquet(folder / "data" / name)
    return folder


def by_pyarrow(path: Path, listed: list[dict], schema: pyarrow.Schema | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(listed, schema), path)
    return path


def prepared(source: Path, out: Path, *flags: str) -> dict[str, Any]:
    assert parquet.main([str(source), "--out", str(out), "--workers", "1", *flags]) == 0
    return json.loads((out / "_info.json").read_text())


def assert_rows(root: Path, split: str, listed: list[dict], labels: dict[Any, int]) -> None:
    """Assert that the shards contain each of the given rows once, with the row number as the
    key."""
    samples = stored(root, split)
    assert len(samples) == len(listed)
    by_row = {int(key.partition("_")[0]): sample for key, sample in samples.items()}
    assert [by_row[n] for n in range(len(listed))] == [
        Stored(row["image"]["bytes"], labels[row["label"]]) for row in listed
    ]


def test_files_written_by_datasets_are_stored_unchanged(tmp_path):
    train, test = rows(20), rows(7, 100)
    folder = by_datasets(tmp_path / "hub", train, test=test)
    info = prepared(folder, tmp_path / "out")
    assert info["class_names"] == NAMES
    assert_rows(tmp_path / "out", "train", train, {0: 0, 1: 1, 2: 2})
    assert_rows(tmp_path / "out", "val", test, {0: 0, 1: 1, 2: 2})
    assert {"00000000", "00000001_1"} <= stored(tmp_path / "out", "train").keys()
    assert not (tmp_path / "out" / "_spool").exists()


def test_validation_and_test_are_two_splits(tmp_path):
    train, val, test = rows(9), rows(4, 50), rows(5, 100)
    folder = by_datasets(tmp_path / "hub", train, 1, validation=val, test=test)
    assert list(prepared(folder, tmp_path / "out")["splits"]) == ["train", "val", "test"]
    for split, listed in (("train", train), ("val", val), ("test", test)):
        assert_rows(tmp_path / "out", split, listed, {0: 0, 1: 1, 2: 2})


def test_without_val_a_fraction_of_each_class_is_held_out(tmp_path):
    train = rows(60)
    folder = by_datasets(tmp_path / "hub", train)
    prepared(folder, tmp_path / "out", "--val-fraction", "0.25")
    parts = {split: stored(tmp_path / "out", split) for split in ("train", "val")}
    assert Counter(sample.label for sample in parts["val"].values()) == {0: 5, 1: 5, 2: 5}
    both = parts["train"] | parts["val"]
    assert len(parts["train"]) == 45
    assert {int(key[:8]): sample for key, sample in both.items()} == {
        n: Stored(row["image"]["bytes"], row["label"]) for n, row in enumerate(train)
    }


def test_a_test_split_with_secret_labels_is_skipped(tmp_path, capsys):
    folder = by_datasets(tmp_path / "hub", rows(30), test=rows(5, 100, label=lambda _: -1))
    info = prepared(folder, tmp_path / "out")
    assert {split: described["num_samples"] for split, described in info["splits"].items()} == {
        "train": 27,
        "val": 3,
    }
    line = "test: has no image with a label, and is left out"
    assert line in capsys.readouterr().out
    assert line in info["origin"]


def test_class_names_are_read_from_the_readme(tmp_path):
    """Files that the Hugging Face Hub has converted have one folder per split and no `datasets`
    schema."""
    listed = rows(12)
    by_pyarrow(tmp_path / "hub" / "default" / "train" / "0000.parquet", listed)
    by_pyarrow(tmp_path / "hub" / "default" / "test" / "0000.parquet", rows(3, 50))
    (tmp_path / "hub" / "default" / "README.md").write_text(
        "---\nlicense: mit\ndataset_info:\n- config_name: other\n  features:\n  - name: text\n"
        "    dtype: string\n- config_name: default\n  features:\n"
        "  - name: image\n    dtype: image\n"
        "  - name: label\n    dtype:\n      class_label:\n        names:\n"
        "          '0': no\n          '1': 'yes'\n          '2': maybe\n---\n# Data\n"
    )
    info = prepared(tmp_path / "hub", tmp_path / "out")
    assert info["class_names"] == ["False", "yes", "maybe"]  # YAML reads an unquoted no as false
    assert_rows(tmp_path / "out", "train", listed, {0: 0, 1: 1, 2: 2})


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["b", "a", "c"], ["a", "b", "c"]),
        ([7, 30, 9], ["7", "9", "30"]),
        (["7", "30", "9"], ["7", "9", "30"]),
    ],
)
def test_without_names_the_labels_are_the_names(tmp_path, values, names):
    listed = rows(12, label=lambda n: values[n % 3])
    path = by_pyarrow(tmp_path / "mine.parquet", listed)
    info = prepared(path, tmp_path / "out", "--val-fraction", "0")
    assert info["class_names"] == names
    labels = {value: names.index(str(value)) for value in values}
    assert_rows(tmp_path / "out", "train", listed, labels)


def test_columns_of_boxes_and_categories_are_accepted(tmp_path):
    """The other columns are boxes, as in detection datasets, and text that pandas stores as a
    category."""
    listed = [{**row, "objects": [{"names": "x", "box": [1, 2]}]} for row in rows(6)]
    whole = datasets.Dataset.from_list(listed).cast_column("image", datasets.Image())
    whole.to_parquet(tmp_path / "train.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "train.parquet")
    texts = pyarrow.array(["b", "a"] * 3).dictionary_encode()
    table = table.set_column(table.schema.get_field_index("label"), "kind", texts)
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    info = prepared(tmp_path / "train.parquet", tmp_path / "out", "--val-fraction", "0")
    assert info["class_names"] == ["a", "b"]
    expected = [{**row, "label": "ba"[n % 2]} for n, row in enumerate(rows(6))]
    assert_rows(tmp_path / "out", "train", expected, {"a": 0, "b": 1})


def test_columns_may_be_named_and_images_may_have_no_path(tmp_path):
    listed = [
        {"front": row["image"]["bytes"], "back": b"x", "coarse": n % 2, "fine": row["label"]}
        for n, row in enumerate(rows(12))
    ]
    path = by_pyarrow(tmp_path / "train.parquet", listed)
    flags = ("--image-column", "front", "--label-column", "fine", "--val-fraction", "0")
    info = prepared(path, tmp_path / "out", *flags)
    assert info["options"]["label_column"] == "fine"
    assert_rows(tmp_path / "out", "train", rows(12), {0: 0, 1: 1, 2: 2})


def test_an_image_that_is_null_is_listed(tmp_path):
    listed = rows(12)
    listed[4]["image"] = None
    listed[6]["image"]["bytes"] = None
    schema = pyarrow.schema([("image", IMAGE), ("label", pyarrow.int64())])
    prepared(by_pyarrow(tmp_path / "train.parquet", listed, schema), tmp_path / "out")
    lines = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    reason = (
        "the parquet file contains no bytes of this image (null); images must be inside the file,"
        " because paths are not followed"
    )
    assert sorted((line["key"], line["reason"]) for line in map(json.loads, lines)) == [
        ("00000004", reason),
        ("00000006", reason),
    ]


def test_missing_files_and_empty_classes_need_partial(tmp_path, capsys):
    folder = by_datasets(tmp_path / "hub", rows(12, label=lambda n: n % 2), test=rows(2, 50))
    (folder / "data" / "train-00001-of-00003.parquet").unlink()
    assert parquet.main([str(folder), "--out", str(tmp_path / "out")]) == 2
    lines = (
        "1 of 3 parquet files of train are missing",
        "train: no images of classes that are listed or in another split: owl",
    )
    error = capsys.readouterr().err
    assert error.endswith(
        f"{lines[0]}\n  {lines[1]}\n  add the missing files, or accept the source with --partial\n"
    )
    info = prepared(folder, tmp_path / "out", "--partial")
    assert info["class_names"] == NAMES
    assert info["origin"] == [f"partial: {line}" for line in lines]


def test_a_dry_run_copies_nothing(tmp_path, capsys):
    folder = by_datasets(tmp_path / "hub", rows(20))
    assert parquet.main([str(folder), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert "train: 17 images in 8 shards" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


# ---- each file states its own classes ------------------------------------------------------------

COLORS = {"red": (200, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 200)}


def of_colors(path: Path, colors: str, names: list[str] | None, as_text: bool = False) -> None:
    """Write a Parquet file of single-color images. `names` contains the file's class names in label
    order."""
    colors_of_rows = colors.split()
    images = [
        {"bytes": jpeg_bytes(Image.new("RGB", (24 + n, 16), COLORS[color])), "path": None}
        for n, color in enumerate(colors_of_rows)
    ]
    labels: list[Any] = list(colors_of_rows)
    kind: Any = datasets.Value("string" if as_text else "int64")
    if names is not None:
        kind = datasets.ClassLabel(names=names)
    if not as_text:
        labels = [(names or list(COLORS)).index(color) for color in colors_of_rows]
    kinds = datasets.Features({"image": datasets.Image(), "label": kind})
    path.parent.mkdir(exist_ok=True)
    datasets.Dataset.from_dict({"image": images, "label": labels}, kinds).to_parquet(path)


def jpeg_bytes(image: Image.Image) -> bytes:
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=95)
    return encoded.getvalue()


def named_colors(root: Path, split: str) -> list[tuple[str, str]]:
    """Return the class name and the actual color of each image."""
    class_names = json.loads((root / "_info.json").read_text())["class_names"]
    pairs = []
    for sample in stored(root, split).values():
        pixel = decode(sample.data).mean((0, 1))
        color = min(COLORS, key=lambda name: np.abs(pixel - COLORS[name]).sum())
        pairs.append((class_names[sample.label], color))
    return pairs


FOUR = "red green red green"


@pytest.mark.parametrize(
    "files",
    [
        {"train": (FOUR, ["red", "green"]), "validation": (FOUR, ["green", "red"])},
        {"train": (FOUR, ["red", "green"]), "validation": ("green green", ["green"])},
        {"train": (FOUR, ["red", "green"]), "validation": (FOUR, ["green", "blue", "red"])},
        {"train": (FOUR, ["red", "green"]), "validation": (FOUR, None, True)},
        {"train": (FOUR, None, True), "validation": (FOUR, ["green", "red"])},
        {
            "train-0": (FOUR, ["red", "green"]),
            "train-1": ("green blue red blue", ["green", "blue", "red"]),
            "test": ("green blue", ["blue", "green"]),
        },
    ],
)
def test_labels_are_matched_by_the_names_in_each_file(tmp_path, files):
    """The color of each image shows its class, even if the files number the classes differently."""
    for name, of_file in files.items():
        of_colors(tmp_path / "in" / f"{name}.parquet", *of_file)
    prepared(tmp_path / "in", tmp_path / "out", "--num-shards", "1")
    for split in ("train", "val"):
        pairs = named_colors(tmp_path / "out", split)
        assert len(pairs) >= 2
        assert all(name == color for name, color in pairs), pairs


@pytest.mark.parametrize(
    ("val", "line"),
    [
        (
            ("red blue", ["red", "blue"]),
            "validation.parquet (red, blue) has images of blue, which train.parquet (red, green)"
            " does not list: add this class there, or remove these images",
        ),
        (
            ("red green", None),
            "validation.parquet (0, 1) has numbers as labels and no class names, but train.parquet"
            " (red, green) has names: record the class names in all files",
        ),
    ],
)
def test_files_whose_classes_cannot_be_matched_are_named(tmp_path, capsys, val, line):
    of_colors(tmp_path / "in" / "train.parquet", FOUR, ["red", "green"])
    of_colors(tmp_path / "in" / "validation.parquet", *val)
    for flags in ([], ["--partial"]):
        assert parquet.main([str(tmp_path / "in"), "--out", str(tmp_path / "out"), *flags]) == 2
        assert capsys.readouterr().err.endswith(f"error: {tmp_path / 'in'}: {line}\n")
    assert not (tmp_path / "out" / "_info.json").exists()


def test_blanks_around_texts_do_not_make_classes(tmp_path):
    listed = rows(12, label=lambda n: ("cat", "dog ", " cat", "dog")[n % 4])
    by_pyarrow(tmp_path / "in" / "train.parquet", listed)
    by_pyarrow(tmp_path / "in" / "val.parquet", rows(2, 20, lambda n: ("cat\n", "dog")[n % 2]))
    info = prepared(tmp_path / "in", tmp_path / "out")
    assert info["class_names"] == ["cat", "dog"]
    assert_rows(tmp_path / "out", "train", listed, {"cat": 0, "dog ": 1, " cat": 0, "dog": 1})


def test_an_empty_text_is_no_label(tmp_path, capsys):
    folder = tmp_path / "in"
    by_pyarrow(folder / "train.parquet", rows(12, label=lambda n: ("cat", "dog")[n % 2]))
    by_pyarrow(folder / "test.parquet", rows(2, 20, label=lambda _: ""))
    info = prepared(folder, tmp_path / "out")
    assert info["class_names"] == ["cat", "dog"]
    assert "test: has no image with a label, and is left out" in capsys.readouterr().out
    by_pyarrow(folder / "train.parquet", rows(12, label=lambda n: ("cat", "dog", " ")[n % 3]))
    assert parquet.main([str(folder), "--out", str(tmp_path / "more")]) == 2
    reason = "train: 4 of 12 images have no label (null, -1 or empty): remove these rows"
    assert reason in capsys.readouterr().err


def test_a_folder_whose_name_is_not_utf8_is_read(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    by_pyarrow(tmp_path / "in" / "train.parquet", rows(12)).parent.rename(folder)
    assert prepared(folder, tmp_path / "out")["splits"]["train"]["num_samples"] == 12


LABELS = {
    "list<int64>": [[0, 1]] * 6,
    "list<double>": [[0.1, 0.9]] * 6,
    "struct<id: int64>": [{"id": 0}] * 6,
    "date32[day]": [datetime.date(2024, 1, 1)] * 6,
    "binary": [b"cat"] * 6,
}


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("flags", [[], ["--label-column", "label"]])
def test_a_label_column_of_another_type_is_one_line(tmp_path, capsys, kind, flags):
    image = pyarrow.array([image_bytes(n) for n in range(6)])
    table = pyarrow.table({"image": image, "caption": ["a"] * 6, "label": LABELS[kind]})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    flags = [str(tmp_path), "--out", str(tmp_path / "out"), *flags]
    assert parquet.main(flags) == 2
    reason = f"has the type {kind.replace('item', 'element')}; expected text or numbers"
    if kind.startswith("list"):
        reason = "has several values in a row"
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'train.parquet'}: label {reason}")
    assert error.count("\n") == 1


def test_booleans_and_whole_floats_are_labels(tmp_path):
    """pandas writes floats if a value is missing. In a test split, -1 or null means that the label
    is secret."""
    for name, values, names in (
        ("floats", [0.0, 2.0, 10.0] * 4, ["0", "2", "10"]),
        ("booleans", [True, False] * 6, ["False", "True"]),
    ):
        listed = rows(12, label=lambda n, values=values: values[n])
        path = by_pyarrow(tmp_path / name / "train.parquet", listed)
        hidden = pyarrow.schema([("image", IMAGE), ("label", pyarrow.float64())])
        secret = rows(2, 50, label=lambda n: [None, float("nan")][n])
        by_pyarrow(path.with_name("test.parquet"), secret, hidden)
        info = prepared(path.parent, tmp_path / name / "out", "--val-fraction", "0")
        assert info["class_names"] == names
        labels = {
            value: names.index(str(int(value) if name == "floats" else value)) for value in values
        }
        assert_rows(tmp_path / name / "out", "train", listed, labels)


def test_fractions_are_not_labels(tmp_path, capsys):
    path = by_pyarrow(tmp_path / "train.parquet", rows(6, label=lambda n: n / 2))
    assert parquet.main([str(path), "--out", str(tmp_path / "out")]) == 2
    assert "train.parquet: labels that are not whole numbers: 0.5, 1.5, 2.5: correct" in (
        capsys.readouterr().err
    )
