"""Test that slices of a split, such as `train[:99%]`, together contain each sample once and return
the same samples as the full split."""

from __future__ import annotations

import pickle
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit.config.base import Selection
from vit.config.schema import Config
from vit.data.open_data import open_split, open_train_set
from vit.data.select import choose
from vit.data.shards.split import Split
from vit.data.shards.split_slice import SplitSlice, parse_name, part_size
from vit.data.shards.tar import INDEX_DTYPE
from vit.system.files import ShardError
from vit.system.hashing import fold


def sorted_by_class(num: int) -> Split:
    """Return a split with ten classes, sorted by class, whose shard does not exist."""
    index = np.zeros(num, INDEX_DTYPE)
    index["label"] = np.arange(num) * 10 // num
    return Split("nowhere", "train", ["train-0.tar"], [num], index, 10, [])


@given(num=st.integers(1, 300), cuts=st.lists(st.integers(0, 1000), max_size=3))
def test_adjacent_parts_contain_each_sample_once(num, cuts):
    whole = sorted_by_class(num)
    bounds = sorted({0, 1000, *cuts})
    numbers = []
    for start, stop in pairwise(bounds):
        name = f"train[{start / 10}%:{stop / 10}%]"
        size = part_size(name, num)
        if not size:
            with pytest.raises(ShardError, match="samples is empty"):
                SplitSlice(whole, name)
            continue
        part = SplitSlice(whole, name)
        assert part.num_samples == len(part) == size
        assert (np.diff(part.numbers.astype(int)) > 0).all(), (
            "a slice must preserve the order of samples"
        )
        numbers += part.numbers.tolist()
    assert sorted(numbers) == list(range(num))


def test_a_twentieth_is_chosen_by_a_hash_and_contains_all_classes():
    whole = sorted_by_class(4_000)
    part = SplitSlice(whole, "train[95%:]")
    by_hash = sorted(range(4_000), key=lambda number: int(fold(number, 1)))
    assert part.numbers.tolist() == sorted(by_hash[3_800:])
    counts = np.bincount(part.index["label"], minlength=10)
    assert counts.sum() == 200
    assert counts.min() >= 8, (
        "the expected number of samples per class is 20, with a standard deviation of 4.2"
    )
    assert SplitSlice(whole, "train[:95%]").num_samples == part_size("train[:95%]", 4_000) == 3_800


def test_subsets_of_any_seed_are_independent_of_parts():
    whole = sorted_by_class(4_000)
    part = set(SplitSlice(whole, "train[:10%]").numbers.tolist())
    for seed in range(101):
        subset = choose(whole, Selection(fraction=0.1, subset_seed=seed)).numbers.tolist()
        assert abs(len(part.intersection(subset)) - 40) <= 28, (
            f"seed {seed}: more than five standard deviations of 5.7"
        )


def test_a_part_of_many_samples_stores_only_their_numbers():
    num = 1 << 21
    split = sorted_by_class(num)
    tracemalloc.start()
    part = SplitSlice(split, "train[:99%]")
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes / part.num_samples == pytest.approx(4, rel=0.01)
    assert peak_bytes / num < 28


def test_a_part_reads_the_samples_of_the_whole_split(shards):
    config = Config(data={"root": str(shards), "train_split": "train[:80%]"}, train={"steps": 1})
    whole = open_split(config, "train")
    part = pickle.loads(pickle.dumps(open_split(config, "train[80%:]")))
    assert part.num_samples == 12
    for i, number in enumerate(part.numbers.tolist()):
        assert part.read(i) == whole.read(number)
        assert part.key(i) == whole.key(number)
        assert part.where(i) == whole.where(number)
        assert part[i][1] == whole[number][1]
    part.prefetch(np.arange(12))
    [(divided, own)] = part.divided(np.arange(2, 5))
    assert (divided is part.whole, own.tolist()) == (True, part.numbers[2:5].tolist())
    trained = open_train_set(config, open_split(config, "val"))
    assert trained.num_draws == 48
    held_out = {whole.key(number) for number in part.numbers.tolist()}
    assert held_out == {whole.key(i) for i in range(60)} - {trained.split.key(i) for i in range(48)}
    assert trained.split.identity() != whole.identity(), "a resumed run must detect the change"


def test_samples_of_a_part_may_be_excluded(shards, tmp_path):
    part = open_split(Config(data={"root": str(shards)}, train={"steps": 1}), "train[:80%]")
    excluded = [3, 17]
    path = tmp_path / "bad.txt"
    path.write_text("\n".join(part.key(i) for i in excluded))
    chosen = choose(part, Selection(exclude=str(path)))
    assert chosen.used.tolist() == [i for i in range(48) if i not in excluded]


@pytest.mark.parametrize(
    "name", ["train[99%]", "train[:9]", "train[99%:1%]", "[:9%]", "train[:101%]", "train[:1.2.3%]"]
)
def test_an_invalid_part_is_an_error_of_one_line(name):
    with pytest.raises(ShardError, match=r"expected a slice such as train\[:99%\]"):
        parse_name(name)


def test_a_name_without_brackets_is_a_whole_split():
    assert parse_name("train").start is None
    assert part_size("train", 7) == 7
