"""Compare the order over selected samples and several sources with a plain Python
implementation."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from order_oracle import SEEDS, brute_force, feistel, key_of

from vit.config.base import Selection
from vit.config.schema import AugmentConfig
from vit.data.augment.draw import sample_keys
from vit.data.batches import TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.order import Share, make_order, shares_of
from vit.data.shards.split_slice import SplitSlice
from vit.data.sources import train_set_of, train_set_of_sources
from vit.data.storage.opening import open_split
from vit.start.shuffle_quality import measure_shuffle
from vit.system.files import ShardError


def oracle_pass(num_samples: int, number: int, block: int, key: int) -> list[int]:
    """Return the samples in pass `number` over a source. Blocks are shuffled, and the pass starts
    and ends at the block borders of an endless sequence."""
    whole = num_samples // block
    blocks = [
        range(b * block, (b + 1) * block)
        for b in (feistel(max(whole, 1), key_of(key, number), i) for i in range(whole))
    ]
    rest = [*range(whole * block, num_samples)]
    lead = min(-number * num_samples % block, num_samples)
    if (num_samples - lead) // block < whole:
        rest += blocks.pop()
    return [*rest[:lead], *(sample for b in blocks for sample in b), *rest[lead:]]


def oracle(share: Share, shuffle: int, block: int, key: int) -> list[tuple[int, int]]:
    """Return a list of (sample, number of times it was drawn before) for one shuffle."""
    chosen = range(share.num_samples) if share.chosen is None else share.chosen.tolist()
    if share.num_draws == share.num_samples:
        return [(share.first + sample, 0) for sample in chosen]
    drawn = []
    first_pass = shuffle * share.num_draws // share.num_samples
    for draw in range(shuffle * share.num_draws, (shuffle + 1) * share.num_draws):
        number, inside = divmod(draw, share.num_samples)
        sample = oracle_pass(share.num_samples, number, block, key)[inside]
        drawn.append((share.first + int(chosen[sample]), number - first_pass))
    return drawn


@st.composite
def mixtures(draw):
    """Generate an order and up to three sources, some of which have selected samples."""
    shares = []
    first = 0
    for _ in range(draw(st.integers(1, 3))):
        num_samples = draw(st.integers(1, 40))
        skipped = draw(st.integers(0, 5))
        chosen = (
            np.sort(
                np.random.default_rng(num_samples).permutation(num_samples + skipped)[:num_samples]
            )
            if skipped
            else None
        )
        num_draws = draw(st.one_of(st.just(num_samples), st.integers(1, 90)))
        shares.append(Share(num_draws, num_samples, first, chosen))
        first += num_samples + skipped
    total = sum(share.num_draws for share in shares)
    lanes = draw(st.sampled_from([1, 2, 3]))
    repeats = draw(st.sampled_from([1, 1, 2]))
    batch = lanes * repeats * draw(st.integers(1, 3))
    if batch > total:
        lanes = 1
        repeats = 1
        batch = 1
    sizes = {
        "num_lanes": lanes,
        "block_samples": draw(st.integers(1, 9)),
        "window_blocks": 2,
        "aug_repeats": repeats,
    }
    return make_order(total, batch, draw(SEEDS), shares=tuple(shares), **sizes)


@settings(max_examples=60)
@given(mixtures())
@pytest.mark.full
def test_an_order_of_several_sources_equals_the_oracle(order):
    plain = replace(order, shares=())
    for shuffle in range(3):
        drawn = [
            pair
            for number, share in enumerate(order.shares)
            for pair in oracle(share, shuffle, order.block_samples, key_of(order.seed, 4, number))
        ]
        for step, rows in enumerate(brute_force(plain, shuffle)):
            expected = [
                (drawn[draw][0], copy + order.aug_repeats * drawn[draw][1]) for draw, copy in rows
            ]
            position = shuffle * order.steps_per_shuffle + step
            ids, copies = order.rows_and_copies(position, 0, order.global_batch_size)
            assert list(zip(ids.tolist(), copies.tolist(), strict=True)) == expected
            part = order.rows(position, order.global_batch_size // 2, order.global_batch_size)
            assert part.tolist() == [
                sample for sample, _ in expected[order.global_batch_size // 2 :]
            ], "a range of rows of a batch differs"


@settings(max_examples=100)
@given(st.integers(1, 300), st.integers(1, 500), st.integers(1, 20), SEEDS)
def test_each_sample_of_a_source_is_drawn_equally_often(num_samples, num_draws, block, seed):
    share = Share(num_draws, num_samples)
    counts = Counter[int]()
    for shuffle in range(5):
        samples, times = share(np.arange(num_draws), shuffle, block, np.uint64(seed))
        assert len(set(zip(samples.tolist(), times.tolist(), strict=True))) == num_draws, (
            "each draw of a sample must have its own augmentation"
        )
        counts.update(samples.tolist())
        often = [counts[sample] for sample in range(num_samples)]
        assert max(often) - min(often) <= 1


def test_the_example_in_the_module_docstring_is_correct():
    share = Share(num_draws=3, num_samples=5)
    key = np.uint64(key_of(0, 4, 0))
    drawn = [share(np.arange(3), epoch, 1, key)[0].tolist() for epoch in range(5)]
    assert drawn == [[3, 2, 0], [4, 1, 1], [3, 4, 0], [2, 2, 4], [1, 3, 0]]


def test_blocks_stay_whole_in_every_pass():
    """Adjacent samples in a shard must be read together, so each run of 64 consecutive samples may
    contain at most one jump."""
    share = Share(640, 1000)
    for shuffle in range(20):
        samples, _ = share(np.arange(640), shuffle, 64, np.uint64(7))
        borders = (np.diff(samples.reshape(10, 64), axis=1) != 1).sum(axis=1)
        assert sorted(borders.tolist())[:-2] == [0] * 8, borders


def test_batch_shares_and_shuffle_measures_follow_the_weights():
    order = make_order(3000, 60, 1, shares=(Share(2000, 500), Share(1000, 4000, 500)))
    from_first = [int((order.batch(step) < 500).sum()) for step in range(order.steps_per_epoch)]
    assert sum(from_first) == pytest.approx(2000, abs=60)
    # Allow a deviation of five standard deviations.
    assert max(abs(count - 40) for count in from_first) < 16
    quality = measure_shuffle(order, np.arange(4500) % 90)
    assert quality.classes_per_batch == pytest.approx(quality.perfect_classes_per_batch, rel=0.05)
    assert quality.distance == pytest.approx(1 / 3, rel=0.05)


def test_without_weights_each_sample_is_drawn_once_and_with_weights_a_block_has_one_source():
    assert shares_of([10, 20], [None, None]) == [10, 20]
    assert shares_of([100, 300], [3, 1]) == [300, 100]
    assert shares_of([300_000, 100_001], [1.0, 2.0]) == [133_312, 266_688]
    assert all(draws % 64 == 0 for draws in shares_of([300_000, 100_001], [1.0, 2.0]))
    with pytest.raises(
        ValueError,
        match=r"weight 1e-05 of 1.00001 yields less than 64 of 400,000 draws: set it to 0\.00016",
    ):
        shares_of([200_000, 200_000], [0.00001, 1.0])


def test_the_rows_of_a_mixture_equal_the_golden_rows():
    """If the golden rows changed, existing runs on several sources could not resume."""
    shares = (
        Share(300_032, 100_003),
        Share(99_968, 500_000, 100_003, np.arange(0, 1_000_000, 2, dtype=np.uint32)),
    )
    order = make_order(400_000, 8, 11, shares=shares)
    rows = [
        [part.tolist() for part in order.rows_and_copies(position, 0, 8)]
        for position in (0, 50_000)
    ]
    assert rows == [
        [[87923, 35721, 20974, 1066959, 583055, 38185, 35599, 779657], [1, 0, 2, 0, 0, 0, 0, 0]],
        [[458941, 34535, 83143, 43518, 697397, 11775, 525637, 1039471], [0, 2, 1, 1, 0, 2, 0, 0]],
    ]
    small = make_order(40, 8, 11, shares=(Share(30, 10), Share(10, 10, 10)))
    assert small.rows(1000, 0, 8).tolist() == [8, 9, 16, 1, 8, 0, 7, 5]


# ---- real shards ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(shards, tmp_path_factory):
    """Copy the shards, rename and reorder their classes, and add a class."""
    root = shutil.copytree(shards, tmp_path_factory.mktemp("other") / "set")
    info = json.loads((root / "_info.json").read_text())
    names = info["class_names"]
    info["class_names"] = [names[2], "new", names[0]]
    (root / "_info.json").write_text(json.dumps(info))
    return root


def test_classes_are_mapped_by_name(shards, other, tmp_path):
    splits = [open_split(shards, "train"), open_split(other, "train")]
    val = open_split(shards, "val")
    with pytest.raises(
        ShardError,
        match=(
            r"data\.sources\[1\] \(.*set 'train'\): has classes that .* 'val' lacks: 'new'; list"
            r" them in its exclude file, one class=NAME per line"
        ),
    ):
        train_set_of_sources(splits, [Selection(), Selection()], [None, None], val, None)
    (tmp_path / "new.txt").write_text("class=new\n")
    choice = Selection(exclude=str(tmp_path / "new.txt"))
    of = train_set_of_sources(splits, [Selection(), choice], [None, None], val, None)
    labels = of.split.index["label"]
    own = splits[1].index["label"]
    assert labels[:60].tolist() == splits[0].index["label"].tolist()
    chosen = of.shares[1].chosen
    assert labels[60 + chosen].tolist() == [{0: 2, 2: 0}[int(label)] for label in own[chosen]]
    assert (
        of.split.index[np.array([0, 60 + chosen[0]])]["label"].tolist()
        == labels[[0, 60 + chosen[0]]].tolist()
    )
    assert (of.split.num_samples, of.num_draws, of.split.num_classes) == (120, 60 + len(chosen), 3)
    assert of.split.read(60 + int(chosen[0])) == splits[1].read(int(chosen[0]))
    assert "by data.sources[1].exclude" in of.summary[1]


def renamed(shards, root, names):
    shutil.copytree(shards, root)
    info = json.loads((root / "_info.json").read_text())
    (root / "_info.json").write_text(json.dumps({**info, "class_names": names}))
    return open_split(root, "train")


def test_contradictory_class_names_are_refused(shards, tmp_path):
    cats, eels = (
        renamed(shards, tmp_path / names[0], names)
        for names in (["cat", "dog", "eel"], ["eel", "dog", "cat"])
    )
    val = renamed(shards, tmp_path / "nameless", [])
    message = (
        r"sources\[2\] .*: label 0 means 'eel', but 'cat' in data\.sources\[1\] .*nameless 'train'"
        " has no class names"
    )
    with pytest.raises(ShardError, match=message):
        train_set_of_sources([val, cats, eels], [Selection()] * 3, [None] * 3, val, None)
    by_number = train_set_of_sources([val, cats], [Selection()] * 2, [None] * 2, val, None)
    assert "by number" not in by_number.summary[0]
    assert by_number.summary[1].endswith(
        f"its labels are mapped by number, because {val.root} 'train' has no class names"
    )
    by_number = train_set_of_sources([val, eels], [Selection()] * 2, [None] * 2, eels, None)
    assert by_number.summary[0].endswith(
        f"its labels are mapped by number, because {val.root} 'train' has no class names"
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_weighted_sources_are_the_same_on_any_ranks_and_repeats_differ_in_augmentation(
    shards, workers
):
    split = open_split(shards, "train")
    val = open_split(shards, "val")
    of = train_set_of_sources(
        [split, open_split(shards, "val")],
        [Selection(samples_per_class=2), Selection()],
        [3.0, 1.0],
        val,
        None,
    )
    assert [share.num_draws for share in of.shares] == [22, 7]
    order = make_order(of.num_draws, 12, 5, shares=of.shares)
    image = ImageFormat((16, 16), 3, "bilinear")

    def batches(first: int, rank: int, world_size: int) -> list:
        share = 12 // world_size
        made = TrainBatches(
            of.split, order, AugmentConfig(), image, rows=range(rank * share, (rank + 1) * share)
        )
        with Loader(made, first, 6, num_workers=workers) as loader:
            return [batch.clone() for batch in loader]

    whole = batches(0, 0, 1)
    halves = [batches(3, rank, 2) for rank in (0, 1)]
    for number in range(3):
        for name in ("images", "labels", "ids", "table"):
            both = torch.cat([getattr(half[number], name) for half in halves])
            assert torch.equal(both, getattr(whole[3 + number], name)), name
    ids, copies = order.rows_and_copies(0, 0, 12)
    assert len(set(ids.tolist())) < 12, "nine draws from six samples must repeat some samples"
    assert len(set(sample_keys(5, 0, ids, copies).tolist())) == 12


def test_a_selection_does_not_change_the_sample_numbers_of_a_split(shards):
    split = open_split(shards, "train")
    of = train_set_of(split, Selection(fraction=0.5))
    order = make_order(of.num_draws, 10, 3, shares=of.shares)
    seen = np.concatenate([order.batch(step) for step in range(order.steps_per_epoch)])
    assert sorted(seen.tolist()) == of.shares[0].chosen.tolist()


def test_sources_that_are_parts_of_a_split_are_read_as_the_whole_split(shards):
    whole = open_split(shards, "train")
    parts = [SplitSlice(whole, f"train[{part}]") for part in (":40%", "70%:")]
    of = train_set_of_sources(parts, [Selection()] * 2, [None] * 2, whole, None)
    numbers = np.concatenate([part.numbers for part in parts]).tolist()
    assert len({whole.where(number) for number in numbers}) > 1
    for i, number in enumerate(numbers):
        assert of.split.read(i) == whole.read(number)
        assert of.split.key(i) == whole.key(number)
        assert of.split.where(i) == whole.where(number)
        assert of.split.index[i]["offset"] == whole.index[number]["offset"]
    divided = of.split.divided(np.arange(len(numbers)))
    assert [(split.name, own.tolist()) for split, own in divided] == [
        ("train", part.numbers.tolist()) for part in parts
    ], "slices must use the whole split's cache entries"
