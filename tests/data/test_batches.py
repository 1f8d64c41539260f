"""Test that batches do not depend on the number of ranks, the number of workers or the first
step."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from checksums import indexed_as_it_is
from servers import WebServer

from vit.config.schema import AugmentConfig, EvalConfig
from vit.data import slots
from vit.data.augment.table import FIRST_OP, FLIP, LAMBDA
from vit.data.batches import EvalBatches, TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.storage import cached_tars
from vit.data.storage.opening import open_split
from vit.system.files import ShardError

BATCH = 24
FORMAT = ImageFormat((16, 16), 3, "bilinear")
AUGMENT = AugmentConfig(mixup_alpha=0.8, cutmix_alpha=1.0, mix_group_size=2, randaugment_layers=2)


def global_batches(
    root, ranks: int, workers: int, start: int, stop: int
) -> list[list[torch.Tensor]]:
    """Return the global batches at positions [start, stop): ids, images, labels and augmentation
    parameters, concatenated over ranks."""
    split = open_split(root, "train")
    order = make_order(split.num_samples, BATCH, seed=3)
    share = BATCH // ranks
    parts = []
    for rank in range(ranks):
        batches = TrainBatches(
            split, order, AUGMENT, FORMAT, rows=range(rank * share, (rank + 1) * share)
        )
        with Loader(batches, start, stop, num_workers=workers) as loader:
            parts.append([[b.ids, b.images, b.labels, b.table] for b in loader])
    return [
        [torch.cat(pieces) for pieces in zip(*step, strict=True)]
        for step in zip(*parts, strict=True)
    ]


@pytest.fixture(scope="module")
def reference(shards):
    # The run has six epochs with two batches of 24 images, so each epoch omits 12 of the 60
    # samples.
    return global_batches(shards, 1, 0, 0, 12)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 3), (2, 1), (3, 2), (4, 5)])
def test_batches_are_the_same_for_any_number_of_ranks_and_workers(
    ranks, workers, shards, reference, monkeypatch
):
    # Make all workers contribute to each batch.
    monkeypatch.setattr(slots, "PART_ROWS", 5)
    for step, (ours, expected) in enumerate(
        zip(global_batches(shards, ranks, workers, 0, 12), reference, strict=True)
    ):
        for name, a, b in zip(("ids", "images", "labels", "table"), ours, expected, strict=True):
            assert torch.equal(a, b), f"{name} of batch {step} on {ranks} ranks x {workers} workers"


@pytest.mark.parametrize("start", range(11))
def test_a_loader_that_starts_at_any_step_yields_the_same_batches(start, shards, reference):
    for ours, expected in zip(
        global_batches(shards, 2, 0, start, 12), reference[start:], strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_the_needed_batch_is_fetched_first_and_none_after_the_end(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(cached_tars, "BLOCK_BYTES", 4000)
    monkeypatch.setattr(cached_tars, "NUM_THREADS", 1)

    def fetched(num_batches: int, cache: str) -> list[str]:
        with WebServer(
            {f"/{path.name}": path.read_bytes() for path in shards.iterdir() if path.is_file()}
        ) as server:
            split = open_split(server.url, "train", tmp_path / cache)
            num_before = len(server.requests)
            batches = TrainBatches(
                split, make_order(60, 4), AugmentConfig(), FORMAT, num_batches=num_batches
            )
            with Loader(batches, 0, 1) as loader:
                next(loader)
            assert isinstance(split.tars, cached_tars.CachedTars)
            # Wait until the prefetched blocks have arrived.
            while split.tars._under_way:
                time.sleep(0.01)
            return [f"{path} {part}" for _, path, part in server.requests[num_before:]]

    of_the_first_alone = fetched(1, "a")
    with_a_later_one = fetched(100, "b")
    assert 1 <= len(of_the_first_alone) <= 4
    # The requests for the first batch may arrive in any order.
    assert set(with_a_later_one[: len(of_the_first_alone)]) == set(of_the_first_alone)
    assert len(with_a_later_one) > len(of_the_first_alone)


def test_an_epoch_has_a_sample_at_most_once_and_with_its_own_label(shards, reference):
    split = open_split(shards, "train")
    ids = torch.cat([batch[0] for batch in reference[:2]]).numpy()
    assert len(set(ids)) == 48
    assert set(ids) <= set(range(60))
    labels = torch.cat([batch[2] for batch in reference[:2]]).numpy()
    assert (labels == split.index["label"][ids]).all()
    assert all(
        split.key(int(i)).startswith(f"class{label}_") for i, label in zip(ids, labels, strict=True)
    )


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 7), (2, 8), (3, 5), (8, 4)])
def test_evaluation_batches_contain_every_sample_once_and_have_equal_shapes(
    ranks, batch_size, shards
):
    split = open_split(shards, "val")
    seen = []
    lengths = set()
    for rank in range(ranks):
        batches = EvalBatches(split, FORMAT, EvalConfig(), batch_size, rank=rank, world_size=ranks)
        lengths.add(len(batches))
        with Loader(batches, 0, len(batches)) as loader:
            for batch in loader:
                assert batch.images.shape == (batch_size, 3, 16, 16)
                seen += batch.ids[batch.weights > 0].tolist()
    assert sorted(seen) == list(range(23))
    assert len(lengths) == 1, "every rank must make the same number of forward passes"


def corrupted(shards, tmp_path, label_of=4):
    """Return a copy of the shards in which the JPEG data of one training sample consists of
    zeros."""
    import shutil

    shutil.copytree(shards, tmp_path / "shards")
    split = open_split(shards, "train")
    row = split.index[label_of]
    with (tmp_path / "shards" / Path(split.where(label_of)).name).open("r+b") as file:
        file.seek(int(row["offset"]))
        file.write(bytes(int(row["size"])))
    indexed_as_it_is(open_split(tmp_path / "shards", "train"), label_of)
    return tmp_path / "shards"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_an_error_that_names_it(workers, shards, tmp_path):
    split = open_split(corrupted(shards, tmp_path), "train")
    batches = TrainBatches(split, make_order(60, BATCH), AUGMENT, FORMAT)
    with (
        pytest.raises(
            ShardError,
            match=rf"{split.key(4)!r} at byte \d+: cannot decode .*; set loader.on_bad_image=skip",
        ),
        Loader(batches, 0, 5, num_workers=workers) as loader,
    ):
        list(loader)


def test_a_skipped_image_keeps_its_row_with_weight_0_and_is_not_mixed(shards, tmp_path):
    split = open_split(corrupted(shards, tmp_path), "train")
    with Loader(
        TrainBatches(split, make_order(60, BATCH), AUGMENT, FORMAT, on_bad_image="skip"), 0, 5
    ) as loader:
        batch = next(b for b in loader if 4 in b.ids)
    row = batch.ids.tolist().index(4)
    assert batch.bad_keys == (split.key(4),)
    assert np.flatnonzero(batch.weights == 0).tolist() == [row]
    assert batch.table[row ^ 1, 1] == 1.0, (
        "the other row in the mixing group must keep its own image and label"
    )


def test_mixing_ends_after_its_last_epoch_and_nothing_else_changes(shards):
    split = open_split(shards, "train")
    order = make_order(split.num_samples, BATCH, seed=3)
    steps = order.steps_per_epoch
    tables = []
    for end in (None, 1):
        augment = AUGMENT.model_copy(update={"mixup_off_epoch": end})
        with Loader(TrainBatches(split, order, augment, FORMAT), steps - 1, steps + 1) as loader:
            tables.append([batch.table.clone() for batch in loader])
    (last, first), (same, unmixed) = tables
    assert torch.equal(last, same), "the last batch of epoch 1 must still be mixed"
    assert (first[:, LAMBDA] < 1).any()
    assert (unmixed[:, LAMBDA] == 1).all()
    drawn = [FLIP, *range(FIRST_OP, first.shape[1])]
    assert torch.equal(first[:, drawn], unmixed[:, drawn])
