"""Compare the two measures of shuffle quality with brute-force counts.

On real shards, both measures must rank a perfect shuffle higher than webdataset's shuffle buffer.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from vit.data.order import make_order
from vit.start.shuffle_quality import measure_shuffle, quality_of

SHUFFLE = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "shuffle.py"))
# The tests use blocks of 64 samples, which require a large dataset.
BY_CLASS = np.repeat(np.arange(1000, dtype=np.int32), 300)

PERFECT_DISTANCE = 1 / 3
"""The mean distance between two independent uniform positions."""


def test_measures_equal_a_brute_force_count():
    labels = np.array([0, 0, 0, 1, 1, 2])
    batches = [np.array([0, 1]), np.array([5, 2]), np.array([3, 4])]
    quality = quality_of(
        [(labels[ids], ids) for ids in batches],
        np.arange(3) / 3,
        1 / 3,
        len(labels),
        np.bincount(labels),
    )
    assert quality.classes_per_batch == pytest.approx((1 + 2 + 1) / 3)
    # Samples 0 to 5 are read at times 0, 1, 5, 2, 3 and 4.
    assert quality.distance == pytest.approx((0 + 0 + 3 + 1 + 1 + 1) / 6 / 6)
    hits = [1 - scipy.stats.hypergeom(6, size, 2).pmf(0) for size in (3, 2, 1)]
    assert quality.perfect_classes_per_batch == pytest.approx(sum(hits))


def test_a_perfect_shuffle_has_the_expected_measures():
    # The 50 classes differ widely in size.
    labels = np.random.default_rng(0).choice(50, 20_000, p=np.arange(1, 51) / 1275).astype(np.int32)
    shuffled = np.random.default_rng(1).permutation(len(labels)).reshape(-1, 40)
    quality = quality_of(
        [(labels[ids], ids) for ids in shuffled],
        np.arange(500) / 500,
        1 / 500,
        len(labels),
        np.bincount(labels),
    )
    assert quality.classes_per_batch == pytest.approx(quality.perfect_classes_per_batch, rel=0.01)
    assert quality.distance == pytest.approx(PERFECT_DISTANCE, rel=0.02)


@pytest.mark.parametrize("aug_repeats", [1, 4])
def test_blocks_of_class_sorted_shards_are_reported_and_the_remedy_helps(aug_repeats):
    poor = measure_shuffle(make_order(len(BY_CLASS), 1024, aug_repeats=aug_repeats), BY_CLASS)
    assert poor.classes_per_batch < 0.95 * poor.perfect_classes_per_batch
    assert str(poor).endswith(
        "neighbors in the shards have the same class and stay together in blocks of 64: set"
        " order.block_samples=1 to separate them"
    )
    dealt = np.random.default_rng(0).permutation(BY_CLASS)
    for block, labels in ((1, BY_CLASS), (64, dealt)):
        good = measure_shuffle(
            make_order(len(BY_CLASS), 1024, block_samples=block, aug_repeats=aug_repeats), labels
        )
        assert good.classes_per_batch == pytest.approx(good.perfect_classes_per_batch, rel=0.02)
        assert good.distance == pytest.approx(PERFECT_DISTANCE, abs=0.02)
        assert str(good).endswith("samples moved by 33 % of the data set (33 %)"), (
            "the report on a good shuffle must contain no remedy"
        )


def test_an_epoch_of_one_batch_and_one_class_is_measured():
    quality = measure_shuffle(make_order(10, 10), np.zeros(10, dtype=np.int32))
    assert (quality.classes_per_batch, quality.perfect_classes_per_batch) == (1, 1)


def test_the_buffer_of_webdataset_mixes_class_sorted_shards_worse(tmp_path):
    """The test reads 30 real shards of 50 samples. The shuffle buffer holds two shards, which is
    typical for ImageNet."""
    labels = np.repeat(np.arange(30), 50)
    paths = SHUFFLE["write_shards"](tmp_path / "shards", labels, 50)
    theirs = {
        shuffled: SHUFFLE["webdataset_quality"](paths, labels, 100, shuffled, 60)
        for shuffled in (False, True)
    }
    ours = measure_shuffle(make_order(len(labels), 60), labels)
    assert ours.classes_per_batch > 0.95 * ours.perfect_classes_per_batch
    assert (
        max(quality.classes_per_batch for quality in theirs.values())
        < 0.6 * ours.perfect_classes_per_batch
    )
    assert theirs[False].distance < 0.1 < 0.25 < ours.distance
