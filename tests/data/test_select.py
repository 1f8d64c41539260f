"""Test that exclusion files and subsets select the samples that plain Python selects."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import index
from vit.config.base import Selection
from vit.data.select import choose
from vit.data.shards.split import Split
from vit.data.shards.tar import INDEX_DTYPE
from vit.data.storage.opening import open_split
from vit.system.files import ShardError
from vit.system.hashing import fold


@pytest.fixture(scope="module")
def split(shards):
    return open_split(shards, "train")


def test_an_empty_selection_is_the_whole_split(split):
    assert choose(split, Selection()).numbers is None


@pytest.mark.parametrize("with_idx", [True, False])
def test_keys_and_classes_are_excluded(shards, tmp_path, with_idx, split):
    root = shutil.copytree(shards, tmp_path / "root")
    if not with_idx:
        for path in root.glob("*.idx"):
            path.unlink()
    keys = [split.key(number) for number in (3, 40, 59)]
    (tmp_path / "bad.txt").write_text(
        "# broken\n" + "\n".join(keys) + f"\nlabel=0\nclass={split.class_names[2]}\nnobody\n"
    )
    chosen = choose(open_split(root, "train"), Selection(exclude=str(tmp_path / "bad.txt")))
    expected = [n for n in range(60) if split.index["label"][n] == 1 and n not in (3, 40, 59)]
    assert chosen.numbers.tolist() == expected
    gone = 60 - len(expected)
    assert (
        f"{len(expected)} of 60 samples of {root} 'train'; excluded: {gone} by data.exclude (which"
        " changes all batches; 1 of its keys do not exist: nobody); no image is left in 2 of 3"
        " classes" in chosen.summary
    )


def test_a_quarantine_list_excludes_the_keys_of_its_split(split, tmp_path):
    entries = [
        {"split": "train", "key": split.key(5)},
        {"split": "val", "key": split.key(6)},
        {"split": "train", "key": "left out already"},
    ]
    (tmp_path / "quarantine.jsonl").write_text(
        "".join(json.dumps(entry) + "\n" for entry in entries)
    )
    chosen = choose(split, Selection(exclude=str(tmp_path / "quarantine.jsonl")))
    assert chosen.used.tolist() == [n for n in range(60) if n != 5]


def test_invalid_exclusions_are_reported(split, tmp_path):
    path = tmp_path / "bad.txt"
    with pytest.raises(
        ShardError, match=r"data\.exclude=.*bad\.txt: cannot be read \(No such file"
    ):
        choose(split, Selection(exclude=str(path)))
    path.write_text("label=x\nclass=nobody\nlabel=3\n")
    message = (
        r"each line must be a key, label=NUMBER \(0 to 2\) or .*; line 1 is 'label=x', line 2 is"
        r" 'class=nobody', line 3 is 'label=3'"
    )
    with pytest.raises(ShardError, match=message):
        choose(split, Selection(exclude=str(path)))
    path.write_text("label=-1\n")
    with pytest.raises(ShardError, match="line 1 is 'label=-1'"):
        choose(split, Selection(exclude=str(path)))
    path.write_text("these\nare other keys\n")
    with pytest.raises(
        ShardError,
        match=rf"'train' .these, are other keys.; expected keys such as '{split.key(0)}', without",
    ):
        choose(split, Selection(exclude=str(path)))
    path.write_text("label=0\nlabel=1\nlabel=2\n")
    for subset in ({}, {"fraction": 0.5}, {"samples_per_class": 1}):
        with pytest.raises(ShardError, match=r"0 of 60 samples .*; no sample is left for training"):
            choose(split, Selection(exclude=str(path), **subset))


def test_the_example_of_the_data_page_writes_the_keys_of_small_images(
    shards, split, tmp_path, monkeypatch
):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    [code] = re.findall(r"```python\n(import vit\n.*?small\.txt.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    for limit_px, num_small in ((1, 0), (10_000, 60)):
        exec(code.replace("data/digits", str(shards)).replace("64", str(limit_px)), {})
        keys = (tmp_path / "small.txt").read_text().splitlines()
        assert keys == [split.key(number) for number in range(num_small)]


def test_a_choice_of_all_samples_has_no_identity(split):
    chosen = choose(split, Selection(fraction=1.0))
    assert (chosen.numbers, chosen.identity, choose(split, Selection()).identity) == (None, "", "")
    assert chosen.summary.endswith("excluded: 0 by data.fraction=1")


def test_a_swapped_line_of_the_idx_file_is_not_trusted(shards, tmp_path, split):
    root = shutil.copytree(shards, tmp_path / "root")
    [idx] = root.glob("train-00000.idx")
    lines = idx.read_text().splitlines()
    lines[4], lines[5] = lines[5], lines[4]
    idx.write_text("\n".join(lines) + "\n")
    (tmp_path / "bad.txt").write_bytes(b"\xef\xbb\xbf" + split.key(3).encode())
    chosen = choose(open_split(root, "train"), Selection(exclude=str(tmp_path / "bad.txt")))
    assert chosen.changes.holes.tolist() == [3]


def test_keys_that_are_equal_in_the_idx_file_are_distinguished(tmp_path, shards):
    root = tmp_path / "root"
    root.mkdir()
    split = open_split(shards, "train")
    with tarfile.open(root / "train-00000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, key in enumerate(("a b3", "a_b3", "a b4")):
            for extension, content in (("jpg", split.read(number)), ("cls", b"0")):
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    index.main([str(root)])
    own = open_split(root, "train")
    for keys, gone in (
        (["a b3"], [0]),
        (["a_b3"], [1]),
        (["a b3", "a_b3"], [0, 1]),
        (["a b4"], [2]),
        (["a_b4"], [2]),
    ):
        (tmp_path / "bad.txt").write_text("\n".join(keys))
        chosen = choose(own, Selection(exclude=str(tmp_path / "bad.txt")))
        assert sorted({*range(3)} - {*chosen.numbers.tolist()}) == gone, keys


def test_subsets_are_nested_and_have_the_requested_sizes(split):
    def numbers_of(selection: Selection) -> list[int]:
        numbers = choose(split, selection).numbers
        return [*range(60)] if numbers is None else numbers.tolist()

    labels = split.index["label"]
    sizes = Counter(split.index["label"].tolist())
    before: set[int] = set()
    for fraction in (0.05, 0.1, 0.5, 0.9, 1.0):
        chosen = set(numbers_of(Selection(fraction=fraction)))
        assert before <= chosen
        assert len(chosen) == round(60 * fraction)
        by_class = Counter(
            labels[numbers_of(Selection(fraction=fraction, fraction_of="class"))].tolist()
        )
        assert by_class == {label: max(round(size * fraction), 1) for label, size in sizes.items()}
        before = chosen
    before = set()
    for count in (1, 2, 7, 1000):
        chosen = numbers_of(Selection(samples_per_class=count))
        assert Counter(labels[chosen].tolist()) == {
            label: min(size, count) for label, size in sizes.items()
        }
        assert before <= set(chosen)
        before = set(chosen)
    drawn = {
        tuple(choose(split, Selection(samples_per_class=2, subset_seed=seed)).numbers.tolist())
        for seed in range(5)
    }
    assert len(drawn) == 5


def with_labels(labels: np.ndarray) -> Split:
    """Return a split with the given labels, whose shard does not exist."""
    index = np.zeros(len(labels), INDEX_DTYPE)
    index["label"] = labels
    return Split("nowhere", "train", ["t.tar"], [len(labels)], index, int(labels.max()) + 1, [])


@given(
    labels=st.lists(st.integers(0, 5), min_size=2, max_size=80),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 100),
)
def test_a_subset_has_the_smallest_hashes(labels, fraction, seed):
    split = with_labels(np.array(labels))

    def smallest(count_of) -> list[int]:
        taken = []
        for label in set(labels):
            own = [number for number, one in enumerate(labels) if one == label]
            own.sort(key=lambda number: int(fold(seed, number)))
            taken += own[: count_of(len(own))]
        return sorted(taken)

    by_hash = sorted(range(len(labels)), key=lambda number: int(fold(seed, number)))
    for options, expected in (
        ({"fraction": fraction}, sorted(by_hash[: max(round(fraction * len(labels)), 1)])),
        (
            {"fraction": fraction, "fraction_of": "class"},
            smallest(lambda size: max(round(fraction * size), 1)),
        ),
        ({"samples_per_class": 3}, smallest(lambda size: 3)),
    ):
        numbers = choose(split, Selection(subset_seed=seed, **options)).numbers
        assert expected == ([*range(len(labels))] if numbers is None else numbers.tolist())


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"fraction": 0.1}, 24),
        ({"fraction": 0.1, "fraction_of": "class"}, 36),
        ({"samples_per_class": 100}, 36),
    ],
)
def test_a_subset_of_many_samples_needs_little_memory(options, most):
    num = 1 << 21
    split = with_labels(np.arange(num) * 7 % 1000)
    tracemalloc.start()
    choose(split, Selection(**options))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes / num < most


def test_the_subset_of_a_seed_never_changes(split):
    """Papers identify subsets by their seeds."""
    assert choose(split, Selection(fraction=0.1)).numbers.tolist() == [2, 21, 31, 43, 50, 57]
