"""Test the properties of the sample order that users rely on.

Batches must depend only on the order and not on the number of ranks or workers. Repeated samples
must be counted exactly.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from data.numbered import filled
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from order_oracle import anew, brute_force, orders, pairs
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler
from webdataset import TarWriter

from data_prep import index
from vit.config.io import load_config
from vit.config.schema import AugmentConfig, Config
from vit.data.augment.draw import partners
from vit.data.batches import TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.order import Order, make_order
from vit.data.storage.opening import open_split
from vit.training.plan import create_order, make_plan

FORMAT = ImageFormat((16, 16), 3, "bilinear")
AUGMENT = AugmentConfig(mixup_alpha=0.8, cutmix_alpha=1.0, mix_group_size=2, randaugment_layers=2)


# --- equal batches on any ranks and workers -------------------------------------------------------


@settings(max_examples=15)
@given(orders(lanes=(24,)), st.integers(0, 12))
def test_resuming_on_another_number_of_ranks_continues_the_batches(order, stop):
    """Each rank creates a new `Order` in each attempt, as real processes do."""

    def train(ranks: int, steps: range) -> list[list[tuple[int, int]]]:
        share = order.global_batch_size // ranks
        own = [anew(order) for _ in range(ranks)]
        return [
            [row for r in range(ranks) for row in pairs(own[r], step, r * share, (r + 1) * share)]
            for step in steps
        ]

    shuffles = range(11 // order.steps_per_shuffle + 1)
    expected = [batch for shuffle in shuffles for batch in brute_force(order, shuffle)][:12]
    assert train(4, range(stop)) == expected[:stop]
    for ranks in (1, 2, 3, 8):
        assert train(ranks, range(stop, 12)) == expected[stop:]


@settings(max_examples=50)
@given(orders(), st.integers(0, 1000))
def test_resuming_at_any_step_of_an_epoch_continues_its_batches(order, epoch):
    shuffle, first = divmod(epoch * order.steps_per_epoch, order.steps_per_shuffle)
    expected = brute_force(order, shuffle)[first : first + order.steps_per_epoch]
    for step in range(order.steps_per_epoch):
        resumed = anew(order)
        rest = range(step, min(step + 3, order.steps_per_epoch))
        assert [
            pairs(resumed, epoch * order.steps_per_epoch + later) for later in rest
        ] == expected[rest.start : rest.stop]


@settings(max_examples=25)
@given(st.data(), st.sampled_from([1, 3]), st.sampled_from(["batch", "sampler"]))
def test_images_and_random_numbers_are_the_same_on_any_ranks_and_in_any_parts(
    shards, data, aug_repeats, form
):
    split = open_split(shards, "train")
    position = data.draw(st.integers(0, 30))
    order = make_order(
        split.num_samples, 24, seed=3, num_lanes=2, aug_repeats=aug_repeats, aug_repeats_form=form
    )
    shuffle, step = divmod(position, order.steps_per_shuffle)
    whole = filled(TrainBatches(split, order, AUGMENT, FORMAT), position, 0, 24)
    assert whole.ids.tolist() == [sample for sample, _ in brute_force(order, shuffle)[step]]
    assert whole.labels.tolist() == split.index["label"][whole.ids.numpy()].tolist()

    ranks = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    share = 24 // ranks
    borders = sorted(
        {
            0,
            share,
            *data.draw(st.lists(st.integers(0, share // 2).map(lambda pair: 2 * pair), max_size=3)),
        }
    )
    for rank in range(ranks):
        batches = TrainBatches(
            split, order, AUGMENT, FORMAT, rows=range(rank * share, (rank + 1) * share)
        )
        for low, high in data.draw(st.permutations(list(pairwise(borders)))):
            part = filled(batches, position, low, high - low)
            rows = slice(rank * share + low, rank * share + high)
            for name in ("ids", "images", "labels", "weights", "table"):
                assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), (
                    f"{name} of rows {rows} at position {position}"
                )


def test_batches_do_not_depend_on_the_division_into_shards(tmp_path):
    rng = np.random.default_rng(0)
    roots = []
    images = [rng.integers(0, 256, (20, 30, 3), dtype=np.uint8) for _ in range(40)]
    for lengths in ((40,), (1, 38, 1), (7, 13, 3, 17)):
        root = tmp_path / "-".join(map(str, lengths))
        samples = iter(enumerate(images))
        root.mkdir()
        for shard, length in enumerate(lengths):
            with TarWriter(str(root / f"train-{shard:05d}.tar")) as tar:
                for sample, image in (next(samples) for _ in range(length)):
                    encoded = io.BytesIO()
                    Image.fromarray(image).save(encoded, "JPEG")
                    tar.write(
                        {"__key__": f"{sample:03d}", "jpg": encoded.getvalue(), "cls": sample % 5}
                    )
        assert index.main([str(root)]) == 0
        roots.append(root)
    seen = []
    for root in roots:
        split = open_split(root, "train")
        order = make_order(split.num_samples, 12, seed=1, block_samples=4, window_blocks=2)
        seen.append(
            [
                filled(TrainBatches(split, order, AUGMENT, FORMAT), position, 0, 12)
                for position in range(4)
            ]
        )
    for other in seen[1:]:
        for ours, theirs in zip(seen[0], other, strict=True):
            assert all(
                torch.equal(getattr(ours, name), getattr(theirs, name))
                for name in ("ids", "images", "labels", "table")
            )


# --- repeated augmentation ------------------------------------------------------------------------


def epoch_of(order: Order, epoch: int) -> list[list[tuple[int, int]]]:
    return [
        pairs(order, epoch * order.steps_per_epoch + step) for step in range(order.steps_per_epoch)
    ]


@given(orders(), st.integers(0, 20))
def test_an_epoch_has_the_stated_numbers_of_rows_and_distinct_images(order, epoch):
    rows = list(chain(*epoch_of(order, epoch)))
    assert len(rows) == order.num_samples // order.global_batch_size * order.global_batch_size
    assert len(set(rows)) == len(rows), (
        "a copy of a sample occurs twice, so its augmentation would be repeated"
    )
    assert len({sample for sample, _ in rows}) == order.distinct_per_epoch
    assert 0 <= order.distinct_per_epoch - len(rows) / order.aug_repeats < order.num_lanes
    assert {copy for _, copy in rows} <= set(range(order.aug_repeats))


@given(orders(forms=("batch",)), st.integers(0, 5))
def test_by_batch_copies_share_a_batch_and_every_image_occurs_equally_often(order, shuffle):
    epochs = [
        epoch_of(order, shuffle * order.aug_repeats + number) for number in range(order.aug_repeats)
    ]
    shown: Counter[int] = Counter()
    for batch in chain(*epochs):
        copies: dict[int, list[int]] = {}
        for sample, copy in batch:
            copies.setdefault(sample, []).append(copy)
        assert all(sorted(numbers) == list(range(order.aug_repeats)) for numbers in copies.values())
        assert len(copies) == order.global_batch_size // order.aug_repeats
        shown.update(sample for sample, _ in batch)
    assert set(shown.values()) == {order.aug_repeats}
    assert len(shown) == order.num_samples - order.dropped_per_epoch


@settings(max_examples=50)
@given(orders(repeats=(2, 3, 4)), st.integers(0, 100))
def test_a_rank_has_all_copies_of_its_images_if_ranks_divide_the_shard_readers(order, position):
    """With `aug_repeats_form=sampler`, each batch contains all copies of its images."""
    for ranks in (r for r in range(1, order.num_lanes + 1) if order.num_lanes % r == 0):
        size = order.global_batch_size // ranks
        owners = [
            {sample for sample, _ in pairs(order, position, r * size, (r + 1) * size)}
            for r in range(ranks)
        ]
        assert sum(map(len, owners)) == len(set.union(*owners))


@pytest.mark.parametrize(("num_samples", "repeats"), [(1024, 3), (1024, 2), (2560, 3)])
def test_by_sampler_images_occur_as_often_as_in_the_deit_sampler_of_timm(num_samples, repeats):
    theirs = Counter(
        i
        for rank in range(4)
        for i in RepeatAugSampler(range(num_samples), 4, rank, num_repeats=repeats)
    )
    order = make_order(
        num_samples, 64, num_lanes=1, aug_repeats=repeats, aug_repeats_form="sampler"
    )
    ours = Counter(sample for sample, _ in chain(*epoch_of(order, 3)))
    assert Counter(ours.values()) == Counter(theirs.values())
    assert order.distinct_per_epoch == len(theirs) == math.ceil(num_samples / repeats)


def test_copies_are_augmented_differently(shards):
    split = open_split(shards, "train")
    order = make_order(split.num_samples, 24, aug_repeats=4)
    batch = filled(TrainBatches(split, order, AUGMENT, FORMAT), 1, 0, 24)
    for sample in batch.ids.unique():
        rows = batch.ids == sample
        assert int(rows.sum()) == 4
        assert len(batch.images[rows].flatten(1).unique(dim=0)) == 4
        assert len(batch.table[rows][:, 8:].unique(dim=0)) > 1


def config_of(tmp_path: Path, *overrides: str):
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {root: x, global_batch_size: 48}\naugment: {mixup_alpha: 0.8}\ntrain: {epochs: 2}\n"
    )
    return load_config(path, list(overrides))


def order_of(config: Config) -> Order:
    return create_order(config, 1000)


@settings(max_examples=60)
@given(
    st.integers(2, 600),
    st.sampled_from([2, 3, 4, 5]),
    st.sampled_from(["batch", "sampler"]),
    st.sampled_from([2, 4]),
)
def test_by_default_copies_of_an_image_never_mix_with_each_other(images, repeats, form, group):
    size = images * repeats * group if form == "batch" else images * group
    order = make_order(10**6, size, aug_repeats=repeats, aug_repeats_form=form, block_samples=1)
    # `create_order` rejects batches with fewer than four distinct images, because the copies of a
    # sample would be too close together.
    assume(size // repeats >= 4)
    for position in range(repeats):
        ids = order.batch(position)
        for mode in ("batch", "pair"):
            partner = partners(AugmentConfig(mix_group_size=group, mixup_mode=mode), size)
            assert (ids != ids[partner]).all(), f"{mode}, {order}"


def test_if_copies_would_mix_the_error_lists_possible_values_of_num_lanes(tmp_path):
    repeated = ("order.aug_repeats=3", "order.num_lanes=16")
    with pytest.raises(
        ValueError, match="copies of an image would mix with each other in groups of 4"
    ) as caught:
        order_of(config_of(tmp_path, *repeated))
    assert "order.aug_repeats=3: with order.num_lanes=16" in str(caught.value)
    assert str(caught.value).endswith(
        "choose order.num_lanes from [1, 2, 4, 8], or another augment.mix_group_size"
    )
    for lanes in (1, 2, 4, 8):
        assert (
            order_of(
                config_of(tmp_path, "order.aug_repeats=3", f"order.num_lanes={lanes}")
            ).num_lanes
            == lanes
        )
    assert order_of(config_of(tmp_path, *repeated, "augment.mixup_alpha=0")).num_lanes == 16


def test_the_plan_reports_the_distinct_images_of_an_epoch(tmp_path):
    for overrides, distinct, lanes in (
        ((), 960, 48),
        (("order.aug_repeats=3",), 320, 4),
        (("order.aug_repeats=3", "order.aug_repeats_form=sampler"), 320, 4),
        (("order.aug_repeats=5", "order.aug_repeats_form=sampler"), 192, 2),
    ):
        plan, order = make_plan(config_of(tmp_path, *overrides), 1000, world_size=2)
        assert (plan.steps_per_epoch, plan.dropped_per_epoch, plan.total_steps) == (20, 40, 40)
        assert (plan.distinct_images_per_epoch, order.num_lanes) == (distinct, lanes)
