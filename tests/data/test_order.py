"""Test the sample order: its hash, permutation, batches and sizes.

The expected batches come from a brute-force implementation (tests/helpers/order_oracle.py) and a
golden file.

`PYTHONPATH=tests/helpers python tests/data/test_order.py` rewrites golden_order.json. Rewrite the
file only if a change intentionally prevents existing runs from resuming.
"""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from order_oracle import SEEDS, anew, brute_force, feistel, key_of, mix, orders, pairs

from vit.data.order import make_order, sample_checksum
from vit.system.hashing import Permutation, fold, hash64, uniform

GOLDEN = Path(__file__).with_name("golden_order.json")


# --- the hash -------------------------------------------------------------------------------------


def test_hash_is_the_published_splitmix64():
    steps = np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    # The published first outputs of the generator for state 0.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert hash64(steps).tolist() == published


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5))
def test_fold_chains_the_hash_over_its_parts(parts):
    assert int(fold(*parts)) == key_of(*parts)


def test_fold_broadcasts_and_depends_on_the_order_of_its_parts():
    table = fold(1, np.arange(3)[:, None], np.arange(4))
    assert table.shape == (3, 4)
    assert table[2, 1] == fold(1, 2, 1) != fold(1, 1, 2)
    assert len(np.unique(table)) == 12


def test_uniform_numbers_are_uniform():
    numbers = uniform(3, np.arange(20_000))
    assert 0 <= numbers.min() < numbers.max() < 1
    assert scipy.stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


# --- the permutation ------------------------------------------------------------------------------


@given(st.integers(1, 600), SEEDS)
def test_permutation_is_a_feistel_network_that_hits_each_value_once(n, key):
    values = Permutation(n, key)(np.arange(n))
    assert sorted(values.tolist()) == list(range(n))
    assert values.tolist() == [feistel(n, key, i) for i in range(n)]


def test_each_sample_is_equally_likely_at_each_position():
    n = 12
    epochs = 3000
    counts = np.zeros((n, n), dtype=int)
    order = make_order(n, n, num_lanes=1)
    for epoch in range(epochs):
        counts[order.batch(epoch), np.arange(n)] += 1
    assert scipy.stats.chisquare(counts.ravel()).pvalue > 1e-3


# --- the order ------------------------------------------------------------------------------------


@given(orders(), st.integers(0, 1000))
def test_batches_equal_those_of_the_brute_force_oracle(order, shuffle):
    start = shuffle * order.steps_per_shuffle
    assert [pairs(order, start + step) for step in range(order.steps_per_shuffle)] == brute_force(
        order, shuffle
    )


@given(orders(repeats=(1,)), st.integers(0, 3))
def test_samples_of_an_epoch_are_distinct_and_in_range(order, epoch):
    start = epoch * order.steps_per_epoch
    ids = np.concatenate([order.batch(start + step) for step in range(order.steps_per_epoch)])
    assert (
        len(np.unique(ids))
        == len(ids)
        == order.num_samples - order.dropped_per_epoch
        == order.distinct_per_epoch
    )
    assert ids.min() >= 0
    assert ids.max() < order.num_samples


@given(orders(), st.integers(0, 10_000), st.data())
def test_any_number_of_ranks_divides_the_same_batch(order, position, data):
    batch = pairs(order, position)
    for ranks in (r for r in range(1, len(batch) + 1) if len(batch) % r == 0):
        size = len(batch) // ranks
        assert [
            row for r in range(ranks) for row in pairs(order, position, r * size, (r + 1) * size)
        ] == batch
    start = data.draw(st.integers(0, len(batch) - 1))
    stop = data.draw(st.integers(start + 1, len(batch)))
    assert pairs(order, position, start, stop) == batch[start:stop]
    assert order.rows(position, start, stop).tolist() == [sample for sample, _ in batch[start:stop]]


@settings(max_examples=50)
@given(orders(), st.lists(st.integers(0, 60), min_size=1, max_size=30))
def test_any_batch_is_computed_without_the_earlier_ones(order, positions):
    in_turn = anew(order)
    sequence = [in_turn.batch(position).tolist() for position in range(61)]
    assert [order.batch(position).tolist() for position in positions] == [
        sequence[position] for position in positions
    ]


@pytest.mark.parametrize("block_samples", [1, 16])
def test_epochs_and_seeds_differ_and_the_same_seed_repeats(block_samples):
    def epochs(seed: int) -> list[tuple[int, ...]]:
        order = make_order(1000, 48, seed, block_samples=block_samples, window_blocks=2)
        return [
            tuple(order.batch(position))
            for position in range(0, 10 * order.steps_per_epoch, order.steps_per_epoch)
        ]

    assert epochs(5) == epochs(5)
    assert len({*epochs(5), *epochs(6), *epochs(5 + 2**40)}) == 30


def test_the_dropped_tail_differs_from_epoch_to_epoch():
    order = make_order(100, 32)
    samples = [
        frozenset(np.concatenate([order.batch(3 * epoch + step) for step in range(3)]).tolist())
        for epoch in range(50)
    ]
    assert order.dropped_per_epoch == 4
    assert frozenset.union(*samples) == frozenset(range(100))
    assert len(set(samples)) == 50


@settings(max_examples=30)
@given(orders(), st.integers(0, 50))
def test_checksum_of_the_plan_is_the_sum_over_the_ranks(order, position):
    size = order.global_batch_size // order.num_lanes
    ranks = [order.rows(position, r * size, (r + 1) * size) for r in range(order.num_lanes)]
    assert sum(sample_checksum(rows) for rows in ranks) % 2**64 == sample_checksum(
        order.batch(position)
    )
    assert (
        sample_checksum(order.batch(position))
        == sum(mix(int(s)) for rows in ranks for s in rows) % 2**64
    )


@pytest.mark.parametrize(
    "settings", [{}, {"num_lanes": 16}, {"window_blocks": 4}, {"aug_repeats": 2}]
)
def test_a_cache_of_the_current_blocks_reads_each_once_and_a_smaller_one_many_times(settings):
    order = make_order(300_000, 512, **settings)

    def fetched_for_each_used(capacity: int) -> float:
        cache = dict[int, None]()
        used = set[int]()
        num_fetched = 0
        for position in range(order.steps_per_epoch // 2):
            for block in np.unique(order.batch(position) // order.block_samples).tolist():
                num_fetched += block not in cache
                cache.pop(block, None)
                cache[block] = None
                used.add(block)
                if len(cache) > capacity:
                    del cache[next(iter(cache))]
        return num_fetched / len(used)

    enough = order.blocks_at_a_time(512, 0)
    assert fetched_for_each_used(enough) < 1.1
    assert fetched_for_each_used(enough // 2) > 2


def test_checksum_notices_a_repeated_sample():
    assert (
        sample_checksum(np.array([3, 5, 7]))
        == sample_checksum(np.array([7, 3, 5]))
        != sample_checksum(np.array([3, 5, 5]))
    )


# --- sizes and defaults ---------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("aug_repeats", [1, 4])
@pytest.mark.parametrize("num_samples", [1_281_167, 10**9])
def test_a_large_dataset_starts_at_any_step_with_little_memory(num_samples, aug_repeats):
    order = make_order(num_samples, 4096, aug_repeats=aug_repeats)
    position = 10**6 * order.steps_per_epoch + order.steps_per_epoch // 3
    tracemalloc.start()
    ids = np.concatenate([order.batch(position), order.batch(position + 1)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(ids)) == 8192 // aug_repeats
    assert ids.max() < num_samples
    assert peak < 8 * 2**20, (
        "the order must need less memory than a list of ImageNet's samples (10 MB)"
    )


def test_blocks_keep_reads_together():
    order = make_order(1_281_167, 4096)
    position = 100
    window = 16 * 64
    ids = np.concatenate([order.rows(position + step, 0, 64) for step in range(3 * window // 64)])
    assert len(np.unique(ids // 64)) < 4 * 16 + 2, (
        "three windows of a shard reader must read at most the blocks that four read"
    )


def test_defaults_are_a_true_permutation_for_small_data_and_blocks_for_large():
    small = make_order(262_143, 96)
    large = make_order(262_144, 96)
    assert (small.block_samples, large.block_samples) == (1, 64)
    assert (
        small.num_lanes,
        make_order(10_000, 4096).num_lanes,
        make_order(1000, 130).num_lanes,
        make_order(1000, 67).num_lanes,
    ) == (48, 64, 26, 1)
    assert make_order(1000, 67).steps_per_epoch == 14


def test_impossible_sizes_are_refused_with_possible_ones():
    with pytest.raises(
        ValueError,
        match=r"data\.global_batch_size=11 exceeds the 10 training samples: choose at most 10",
    ):
        make_order(10, 11)
    with pytest.raises(
        ValueError,
        match=(
            r"order\.num_lanes=5 does not divide 12 \(data\.global_batch_size=12, .*\): choose one"
            r" of \[1, 2, 3, 4, 6, 12\]"
        ),
    ):
        make_order(100, 12, num_lanes=5)
    message = (
        r"order\.aug_repeats=3 does not divide data\.global_batch_size=16: use 15 or 18 images per"
        r" batch, "
    )
    with pytest.raises(
        ValueError,
        match=message
        + r"order\.aug_repeats from \[1, 2, 4, 8, 16\], or order\.aug_repeats_form=sampler",
    ):
        make_order(100, 16, aug_repeats=3)
    message = (
        r"order\.num_lanes=3 does not divide 4"
        r" \(data\.global_batch_size=12, order\.aug_repeats=3\): "
    )
    with pytest.raises(ValueError, match=message + r"choose one of \[1, 2, 4\]"):
        make_order(100, 12, num_lanes=3, aug_repeats=3)


# --- the golden file ------------------------------------------------------------------------------


def golden_values() -> dict:
    permutation = make_order(1000, 24, seed=7)
    blocks = make_order(300_000, 32, seed=2**62 + 1, num_lanes=4)
    whole = make_order(1000, 24, seed=7, aug_repeats=3)
    cut = make_order(300_000, 32, seed=7, num_lanes=2, aug_repeats=3, aug_repeats_form="sampler")
    return {
        "hash64": {str(x): int(hash64(x)) for x in (0, 1, 2, 2**32, 2**63, 2**64 - 1)},
        "uniform(42, 0..4, 3)": uniform(42, np.arange(5), 3).tolist(),
        "permutation of 1000, batches of 24, seed 7": {
            str(p): permutation.batch(p).tolist() for p in (0, 1, 41, 10**6)
        },
        "300000 in blocks of 64, batches of 32 in 4 lanes, seed 2**62 + 1": {
            str(p): blocks.batch(p).tolist() for p in (0, 9374, 10**6)
        },
        "permutation of 1000, batches of 24 with 3 copies, seed 7": {
            str(p): pairs(whole, p) for p in (0, 41, 10**6)
        },
        "300000 in blocks of 64, batches of 32 in 2 lanes with 3 copies by sampler, seed 7": {
            str(p): pairs(cut, p) for p in (0, 10**6)
        },
    }


def test_the_order_equals_that_of_all_earlier_releases():
    message = (
        "the stream of random numbers changed: every run that was started before would resume "
    )
    message += "with other batches. See the docstring of this file"
    assert json.loads(json.dumps(golden_values())) == json.loads(GOLDEN.read_text()), message


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in golden_values().items())
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
