"""Test that the catalog contains each sample once, in an order that depends only on the seed and
the keys."""

import os
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prep_place import new_catalog

from data_prep.errors import PrepError
from data_prep.write import samples
from data_prep.write.catalog import Builder, Catalog, Source
from data_prep.write.samples import Sample, read_range, safe_key, stable_hash

CLASSES = ["a", "b", "c"]


def listed(names: list[str], labels: list[int], batch: int = 7, splits=("train",)) -> Source:
    """Return a source with one file. Sample n consists of the ten bytes at offset 10 n."""

    def fill(builder: Builder) -> None:
        builder.classes(CLASSES)
        file = builder.file("images.bin")
        for split in splits:
            for start in range(0, len(names), batch):
                part = range(start, min(start + batch, len(names)))
                places = (
                    [names[n] for n in part],
                    [labels[n] for n in part],
                    [10 * n for n in part],
                    [10] * len(part),
                )
                builder.add(split, file, *places)

    return Source("test", {}, fill, read_range)


def samples_of(found: Catalog, split: str = "train") -> list[Sample]:
    return found.table(split).samples(range(found.splits[split]))


def dealt(keys: list[str], seed: int) -> list[str]:
    """Return the keys, sorted by the hash of (seed, key)."""
    return sorted(keys, key=lambda key: (stable_hash(seed, key), key))


@pytest.mark.parametrize("rows_in_memory", [1 << 21, 16])
def test_every_sample_occurs_once_in_the_order_of_the_hash(tmp_path, monkeypatch, rows_in_memory):
    monkeypatch.setattr(
        "data_prep.write.catalog.ROWS_IN_MEMORY", rows_in_memory
    )  # forces several parts
    names = [f"k{n}.JPEG" for n in range(101)]
    samples = samples_of(
        new_catalog(listed(names, [n % 3 for n in range(101)]), tmp_path / "c", seed=1)
    )
    assert [sample.key for sample in samples] == dealt([f"k{n}" for n in range(101)], 1)
    for sample in samples:
        n = int(sample.key[1:])
        assert sample == Sample(
            f"k{n}", n % 3, f"k{n}.JPEG", os.path.abspath("images.bin"), 10 * n, 10
        )
    assert [s.key for s in samples[:32:8]] == ["k14", "k49", "k4", "k18"], (
        "the order is part of the format: do not change it"
    )


@settings(max_examples=30)
@given(st.permutations(range(40)), st.integers(1, 50), st.integers(0, 3))
def test_the_order_of_listing_has_no_effect(tmp_path_factory, order, batch, seed):
    names = [f"class{n % 3}/image {n}.png" for n in range(40)]
    folder = tmp_path_factory.mktemp("order")
    one = new_catalog(listed(names, [n % 3 for n in range(40)]), folder / "a", seed)
    shuffled = [names[n] for n in order]
    other = new_catalog(listed(shuffled, [n % 3 for n in order], batch), folder / "b", seed)
    assert [(s.key, s.label) for s in samples_of(one)] == [
        (s.key, s.label) for s in samples_of(other)
    ]
    assert one.sha256 == other.sha256


def test_labels_keys_and_classes_are_in_the_fingerprint(tmp_path):
    names = ["x.jpg", "y.jpg"]
    prints = {
        new_catalog(listed(names, [0, 1]), tmp_path / "a", 0).sha256,
        new_catalog(listed(names, [1, 0]), tmp_path / "b", 0).sha256,
        new_catalog(listed(["x.jpg", "z.jpg"], [0, 1]), tmp_path / "c", 0).sha256,
        new_catalog(listed(names, [0, 1], splits=("val",)), tmp_path / "d", 0).sha256,
    }
    assert len(prints) == 4


@pytest.mark.parametrize("rows_in_memory", [1 << 21, 16])
@pytest.mark.parametrize("fraction", [0.1, 0.34, 0.99])
def test_samples_are_held_out_by_class_and_hash_of_the_key(
    tmp_path, monkeypatch, rows_in_memory, fraction
):
    monkeypatch.setattr("data_prep.write.catalog.ROWS_IN_MEMORY", rows_in_memory)
    labels = [0] * 50 + [1] * 7 + [2]
    names = [f"n{n}.jpg" for n in range(58)]
    catalog = new_catalog(
        listed(names, labels),
        tmp_path / "c",
        5,
        finish=lambda b: b.hold_out("train", "val", fraction),
    )
    expected = {}
    for label in range(3):
        members = sorted(
            (f"n{n}" for n in range(58) if labels[n] == label),
            key=lambda key: (stable_hash(key), key),
        )
        count = min(round(fraction * len(members)), len(members) - 1)
        expected |= dict.fromkeys(members[:count], "val") | dict.fromkeys(members[count:], "train")
    assert {
        s.key: split for split in catalog.splits for s in samples_of(catalog, split)
    } == expected
    assert catalog.splits == Counter(expected.values())
    assert [s.key for s in samples_of(catalog, "val")] == dealt(
        [key for key, split in expected.items() if split == "val"], 5
    )


def test_too_few_samples_are_not_split(tmp_path):
    catalog = new_catalog(
        listed(["a.jpg", "b.jpg"], [0, 1]),
        tmp_path / "c",
        0,
        finish=lambda b: b.hold_out("train", "val", 0.3),
    )
    assert catalog.splits == {"train": 2}


def test_files_of_a_killed_process_are_removed(tmp_path):
    left, live, old = (
        tmp_path / f"._catalog-1.{end}.tmp"
        for end in (f"{os.uname().nodename}.999999", "elsewhere.1", "elsewhere.2")
    )
    for folder in (left, live, old):
        (folder / "rows").mkdir(parents=True)
        (folder / "rows" / "train-00000.npy").write_bytes(b"x")
        for path in (folder / "rows" / "train-00000.npy", folder / "rows", folder):
            os.utime(path, (1, 1))
    an_hour_ago = time.time() - 3600
    # A slow writer on another host may still be using this folder.
    os.utime(live / "rows" / "train-00000.npy", (an_hour_ago, an_hour_ago))
    new_catalog(listed(["a.jpg"], [0]), tmp_path, 0)
    assert [folder.exists() for folder in (left, live, old)] == [False, True, False]


@pytest.mark.parametrize(
    ("names", "labels", "message"),
    [
        (
            ["a.jpg", "b.jpg", "a.png", "b.jpg"],
            [0, 1, 2, 0],
            "split 'train': 2 keys are not unique .*: a, b; rename these images",
        ),
        (["x y.jpg", "x_y.jpg"], [0, 1], "1 keys are not unique .*: x_y"),
        (["a.jpg", "b.jpg"], [0, 3], r"1 labels are outside \[0, 3\); the first is 3"),
        (["a.jpg"], [-1], r"1 labels are outside \[0, 3\); the first is -1"),
        ([], [], "contains no samples"),
    ],
)
def test_errors(tmp_path, names, labels, message):
    with pytest.raises(PrepError, match=message):
        new_catalog(listed(names, labels), tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["a.b/c d.jpg", "x" * 300 + ".png", "größe\n.jpg", "日本.jpg", "a\\b.jpg", "\udcff.jpg"]
)
def test_any_name_becomes_a_key(tmp_path, name):
    (sample,) = samples_of(new_catalog(listed([name], [1]), tmp_path / "c", 0))
    assert sample.key == safe_key(os.path.splitext(name)[0])
    assert sample.name == name
    assert not set(sample.key) & set("./\\ \n")
    assert len(f"{sample.key}.json".encode()) <= 100


def test_a_truncated_file_is_reported(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"12345")
    with pytest.raises(OSError, match=r"ends at byte 5, inside k.jpg.*/short"):
        read_range(Sample("k", 0, "k.jpg", str(path), 2, 10))


def test_memory_does_not_grow_with_the_rows(tmp_path):
    """A hundred times as many rows may need only a few MB more memory, because rows are stored on
    disk."""
    code = """
import resource, sys; from pathlib import Path
from data_prep.write.catalog import *
from data_prep.write.samples import read_range
def fill(builder):
    builder.classes(["a"])
    for start in range(0, int(sys.argv[1]), 5000):
        names = [f"{start + n}.jpg" for n in range(5000)]
        builder.add("train", builder.file("x"), names, 0, range(5000), [1] * 5000)
import data_prep.write.catalog; data_prep.write.catalog.ROWS_IN_MEMORY = 20_000
with open_catalog(Source("test", {}, fill, read_range), Path(sys.argv[2]), 0):
    pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peak_kib = [
        int(subprocess.check_output([sys.executable, "-c", code, str(n), str(tmp_path / str(n))]))
        for n in (5_000, 500_000)
    ]
    assert peak_kib[1] - peak_kib[0] < 20_000, (
        "the rows must stay on disk: 500,000 rows take 45 MB as arrays"
    )


def test_few_files_are_open_simultaneously(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "MAX_OPEN_FILES", 3)
    monkeypatch.setattr(samples, "_descriptors", type(samples._descriptors)())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        for n in range(10):
            path = tmp_path / str(n)
            path.write_bytes(b"%d" % n)
            assert read_range(Sample("k", 0, "k.jpg", str(path), 0, 1)) == b"%d" % n
    assert len(os.listdir("/proc/self/fd")) == before + 3
