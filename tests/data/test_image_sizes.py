"""Test image sizes that change between epochs.

Samples and random numbers must not depend on the image size. Each crop must have the size that is
set for its epoch, regardless of the number of ranks and workers.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from vit.config.schema import AugmentConfig
from vit.data import slots
from vit.data.augment.draw import draw_crops, sample_keys
from vit.data.augment.table import BOTTOM, CUTMIX, LAMBDA, LEFT, RIGHT, TOP
from vit.data.batches import TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.storage.opening import open_split

BATCH = 24
STEPS = 2
"""The number of steps in an epoch of 60 images."""
STAGES = ((1, (8, 8)), (2, (24, 12)))
PLAIN = ImageFormat((16, 16), 3, "bilinear")
STAGED = ImageFormat((16, 16), 3, "bilinear", stages=STAGES)
SIZES = [(8, 8)] * STEPS + [(24, 12)] * STEPS + [(16, 16)] * STEPS
MIXED = AugmentConfig(
    mixup_alpha=0.8, cutmix_alpha=1.0, mix_group_size=2, randaugment_layers=2, erasing_prob=0.5
)
SIMPLE = AugmentConfig(crop="simple")
PADDED = AugmentConfig(crop="padded")


def create(
    root, augment: AugmentConfig, form: ImageFormat, rows: range | None = None
) -> TrainBatches:
    split = open_split(root, "train")
    order = make_order(split.num_samples, BATCH, seed=3)
    return TrainBatches(split, order, augment, form, rows=rows)


def tensors(loader: Loader) -> list[list[torch.Tensor]]:
    return [[b.ids, b.labels, b.images.clone(), b.table.clone()] for b in loader]


@pytest.mark.parametrize(
    "augment", [MIXED, SIMPLE, PADDED], ids=["mixed", "simple crop", "padded crop"]
)
@pytest.mark.parametrize(("ranks", "workers", "start"), [(1, 0, 0), (2, 3, 0), (1, 2, 3)])
def test_each_batch_equals_that_of_a_run_at_its_size_on_any_ranks_and_workers(
    ranks, workers, start, augment, shards, monkeypatch
):
    """Workers may prepare batches of two image sizes at the same time, using buffers of one
    size."""
    # Make all workers contribute to each batch.
    monkeypatch.setattr(slots, "PART_ROWS", 5)
    expected = []
    for step in range(start, len(SIZES)):
        form = ImageFormat(SIZES[step], 3, "bilinear")
        with Loader(create(shards, augment, form), step, step + 1) as loader:
            expected += tensors(loader)
    batches_by_rank = []
    for rank in range(ranks):
        rows = range(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        batches = create(shards, augment, STAGED, rows)
        with Loader(batches, start, len(SIZES), num_workers=workers) as loader:
            assert loader.ring.num_slots > 3 or not workers
            batches_by_rank.append(tensors(loader))
    for step, (of_ranks, alone) in enumerate(
        zip(zip(*batches_by_rank, strict=True), expected, strict=True), start
    ):
        for name, number in zip(("ids", "labels", "images", "table"), range(4), strict=True):
            ours = torch.cat([rank[number] for rank in of_ranks])
            assert torch.equal(ours, alone[number]), f"{name} of batch {step}"


def test_samples_and_random_numbers_equal_those_of_a_run_without_stages(shards):
    """Only parameters that are measured in pixels may differ, because they are rounded."""
    staged, plain = (
        [
            batches[:2] + batches[3:]
            for batches in tensors(Loader(create(shards, MIXED, form), 0, 6))
        ]
        for form in (STAGED, PLAIN)
    )
    in_pixels = [TOP, BOTTOM, LEFT, RIGHT]
    num_cut = 0
    for (ids, labels, table), (plain_ids, plain_labels, plain_table), size in zip(
        staged, plain, SIZES, strict=True
    ):
        assert torch.equal(ids, plain_ids)
        assert torch.equal(labels, plain_labels)
        is_cut = plain_table[:, CUTMIX] > 0
        num_cut += int(is_cut.sum())
        assert torch.equal(table[~is_cut, LAMBDA], plain_table[~is_cut, LAMBDA])
        sides = torch.tensor([size[0], size[0], size[1], size[1]])
        # The centers and half widths of boxes are rounded to whole pixels at each image size, so
        # boxes may differ by up to two pixels at the smaller size.
        apart = (table[:, in_pixels] / sides - plain_table[:, in_pixels] / 16).abs()
        assert apart.max() <= 2 / 8
        columns = [n for n in range(table.shape[1]) if n not in (*in_pixels, LAMBDA)]
        # The last five columns contain the borders of the erased box and its noise seed.
        erased = range(table.shape[1] - 5, table.shape[1])
        for column in columns:
            if column not in erased or column == erased[-1]:
                assert torch.equal(table[:, column], plain_table[:, column]), column
    assert num_cut > 10


def test_a_crop_is_the_same_box_resized_to_the_size_of_the_epoch(shards):
    """Pillow and torchvision compute the expected crops. The randomly chosen box must not depend on
    the image size."""
    augment = AugmentConfig(hflip_prob=0.0)
    batches = create(shards, augment, STAGED)
    split = batches.split
    with Loader(batches, 0, len(SIZES)) as loader:
        for step, (batch, size) in enumerate(zip(loader, SIZES, strict=True)):
            ids = batch.ids.numpy()
            keys = sample_keys(batches.order.seed, step // STEPS, ids)
            entries = split.index[ids]
            boxes = draw_crops(augment, keys, entries["width"], entries["height"], PLAIN.size)
            for row, (sample, box) in enumerate(zip(ids.tolist(), boxes.tolist(), strict=True)):
                left, top, width, height = box
                image = Image.open(io.BytesIO(split.read(sample))).convert("RGB")
                pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
                expected = v2.functional.resized_crop(
                    pixels, top, left, height, width, list(size), antialias=True
                )
                apart = (batch.images[row].int() - expected.int()).abs().max()
                # JPEG decoders round differently, so pixel values may differ by one.
                assert apart <= 1, f"row {row} of step {step}"


def test_held_batches_stay_unchanged_when_buffers_change_their_image_size(shards):
    held = []
    with Loader(create(shards, MIXED, STAGED), 0, len(SIZES), num_workers=2) as loader:
        for batch in loader:
            held.append((batch, [batch.images.clone(), batch.table.clone(), batch.ids.clone()]))
    for batch, (images, table, ids) in held:
        assert torch.equal(batch.images, images)
        assert torch.equal(batch.table, table)
        assert torch.equal(batch.ids, ids)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)


def test_a_buffer_fits_the_largest_images():
    assert STAGED.largest == ImageFormat((24, 12), 3, "bilinear")
    assert STAGED.sizes == [(8, 8), (24, 12), (16, 16)]
    assert [STAGED.in_epoch(epoch).size for epoch in range(4)] == [*SIZES[::2], (16, 16)]
    assert STAGED.sizes_text() == "8x8 until epoch 1, 24x12 until epoch 2, then 16x16"
    assert PLAIN.sizes_text() == "16x16"
