"""Test that excluding or relabeling samples changes nothing else in any batch."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from data.numbered import filled
from hypothesis import given, settings
from hypothesis import strategies as st

from vit.config.base import Selection
from vit.config.schema import AugmentConfig
from vit.data.augment.draw import partners
from vit.data.batches import TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.order import make_order
from vit.data.select import HOLES_AT_MOST, choose
from vit.data.shards.split import Split
from vit.data.sources import TrainSet, images_by_class, train_set_of, train_set_of_sources
from vit.data.storage.opening import open_split
from vit.system.files import ShardError

FORMAT = ImageFormat((16, 16), 3, "bilinear")
AUGMENT = AugmentConfig(mixup_alpha=0.8, cutmix_alpha=1.0, mix_group_size=2, randaugment_layers=2)
ROWS = 12


def train_set(
    split: Split, selection: Selection, weights: tuple[float | None, float] | None
) -> TrainSet:
    """Return a training set from one split, or from the same split as two sources with weights.

    The selection applies to the last source.
    """
    if weights is None:
        return train_set_of(split, selection)
    return train_set_of_sources([split, split], [Selection(), selection], weights, split, 1)


@settings(max_examples=40)
@given(st.data())
@pytest.mark.full
def test_all_other_rows_equal_those_of_a_run_without_changes(shards, tmp_path_factory, data):
    """The test reads three epochs on 1 or 3 ranks with mixing and copies, starting at a random
    step."""
    split = open_split(shards, "train")
    weights = data.draw(st.sampled_from([None, (1.0, 3.0)]))
    numbers = st.integers(0, split.num_samples - 1)
    holes = data.draw(st.sets(numbers, min_size=1, max_size=int(HOLES_AT_MOST * 60)))
    relabeled = data.draw(st.dictionaries(numbers, st.integers(0, 2), max_size=4))
    folder = tmp_path_factory.mktemp("lists")
    (folder / "holes.txt").write_text("\n".join(map(split.key, holes)))
    lines = [f"{split.key(number)},label={label}" for number, label in relabeled.items()]
    (folder / "labels.csv").write_text("\n".join(lines))
    selection = Selection(
        exclude=f"{folder}/holes.txt", relabel=f"{folder}/labels.csv" if relabeled else None
    )
    plain, changed = (train_set(split, each, weights) for each in (Selection(), selection))
    first = 0 if weights is None else split.num_samples
    holes = {first + number for number in holes}
    labels = {first + number: label for number, label in relabeled.items()}
    assert changed.num_draws == plain.num_draws
    order, other_order = (
        make_order(
            each.num_draws, ROWS, 5, shares=each.shares, aug_repeats=3, num_lanes=1, block_samples=1
        )
        for each in (plain, changed)
    )
    num_steps = 3 * order.steps_per_epoch
    ranks = data.draw(st.sampled_from([1, 3]))
    own = ROWS // ranks
    for position in range(data.draw(st.integers(0, num_steps - 1)), num_steps):
        expected = filled(TrainBatches(plain.split, order, AUGMENT, FORMAT), position, 0, ROWS)
        parts = [
            filled(
                TrainBatches(
                    changed.split,
                    other_order,
                    AUGMENT,
                    FORMAT,
                    rows=range(rank * own, rank * own + own),
                    changes=changed.changes,
                ),
                position,
                0,
                own,
            )
            for rank in range(ranks)
        ]
        ids = expected.ids.tolist()
        is_hole = np.array([number in holes for number in ids])
        assert torch.cat([part.ids for part in parts]).tolist() == ids
        # A row whose partner is excluded cannot be mixed with it.
        partner = partners(AUGMENT, ROWS)
        same = ~is_hole & ~is_hole[partner]
        for name in ("images", "table"):
            rows = torch.cat([getattr(part, name) for part in parts])
            assert torch.equal(rows[same], getattr(expected, name)[same]), (name, position)
            if name == "images":
                assert torch.equal(rows[~is_hole], expected.images[~is_hole])
                assert not rows[is_hole].any(), "nobody looks at an excluded image"
        row_weights = torch.cat([part.weights for part in parts]).numpy()
        assert (row_weights == 0).tolist() == is_hole.tolist()
        if not is_hole.all():
            assert row_weights.sum() == pytest.approx(ROWS)
            assert len(set(row_weights[~is_hole].tolist())) == 1
        new = torch.cat([part.labels for part in parts]).numpy()[~is_hole]
        old = expected.labels.numpy()[~is_hole]
        used = np.array(ids)[~is_hole].tolist()
        assert new.tolist() == [labels.get(i, label) for i, label in zip(used, old, strict=True)]


def test_a_batch_without_excluded_samples_is_equal_to_the_bit(split, tmp_path):
    order = make_order(60, ROWS, 0)
    [hole] = order.batch(0)[:1].tolist()
    (tmp_path / "list").write_text(split.key(hole))
    changed = train_set_of(split, Selection(exclude=str(tmp_path / "list")))
    rows = [
        filled(TrainBatches(split, order, AUGMENT, FORMAT, changes=changes), 1, 0, ROWS)
        for changes in (changed.changes, train_set_of(split, Selection()).changes)
    ]
    for name in ("images", "labels", "weights", "table", "ids"):
        assert torch.equal(getattr(rows[0], name), getattr(rows[1], name)), name


@pytest.fixture
def split(shards: Path) -> Split:
    """Return the 60 training images."""
    return open_split(shards, "train")


def test_more_excluded_samples_close_up_and_the_summary_names_both_forms(split, tmp_path):
    path = tmp_path / "list"
    for number, places, words in ((3, 60, "rows without weight"), (4, 56, "changes all batches")):
        path.write_text("\n".join(map(split.key, range(number))))
        chosen = choose(split, Selection(exclude=str(path)))
        assert chosen.num_samples == places
        assert f"{60 - number} of 60 samples" in chosen.summary
        assert f"{number} by data.exclude" in chosen.summary
        assert words in chosen.summary
        assert len(chosen.used) == 60 - number
        assert chosen.identity != choose(split, Selection()).identity


def test_a_subset_keeps_its_samples_when_one_of_them_is_excluded(split, tmp_path):
    half = choose(split, Selection(fraction=0.5))
    (tmp_path / "list").write_text(split.key(int(half.numbers[7])))
    chosen = choose(split, Selection(fraction=0.5, exclude=str(tmp_path / "list")))
    assert chosen.numbers.tolist() == half.numbers.tolist()
    assert chosen.changes.holes.tolist() == [half.numbers[7]]


@pytest.mark.parametrize("weights", [None, (1.0, 3.0)])
def test_the_classes_are_counted_after_the_changes(split, tmp_path, weights):
    old = split.index["label"]
    (tmp_path / "holes").write_text(f"{split.key(0)}\n{split.key(1)}")
    with (tmp_path / "labels").open("w", newline="") as file:
        csv.writer(file).writerow([split.key(2), f"class={split.class_names[(old[2] + 1) % 3]}"])
    selection = Selection(exclude=str(tmp_path / "holes"), relabel=str(tmp_path / "labels"))
    counts = [
        images_by_class(train_set(split, each, weights), 3) for each in (Selection(), selection)
    ]
    times = 1 if weights is None else 1.5
    expected = counts[0].copy()
    for number in range(3):
        expected[old[number]] -= times
    expected[(old[2] + 1) % 3] += times
    assert counts[1] == pytest.approx(expected)


@pytest.mark.parametrize("line", ["KEY", "KEY,3", "KEY,label=3", "KEY,class=bird", "KEY,label=0,1"])
def test_an_invalid_line_of_labels_is_refused(split, tmp_path, line):
    (tmp_path / "labels").write_text(f"# new\n\n{line.replace('KEY', split.key(0))}\n")
    with pytest.raises(ShardError, match=r"relabel=.*label=NUMBER \(0 to 2\).*line 3 is"):
        choose(split, Selection(relabel=str(tmp_path / "labels")))


def test_a_list_for_another_data_set_is_refused(split, tmp_path):
    (tmp_path / "labels").write_text("nobody,label=1\n")
    with pytest.raises(ShardError, match=r"data\.relabel=.*: none of its 1 keys is in"):
        choose(split, Selection(relabel=str(tmp_path / "labels")))
    (tmp_path / "labels").write_text(f"nobody,label=1\n{split.key(0)},label=1\n")
    summary = choose(split, Selection(relabel=str(tmp_path / "labels"))).summary
    assert "1 relabeled by data.relabel; 1 of its keys do not exist: nobody" in summary
