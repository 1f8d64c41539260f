"""Generate batches of noise images with random augmentation parameters from the recipe.

As in the loader, images, labels and weights are on the device, and augmentation parameters are on
the host. The time of a step depends on the augmentation parameters but not on the pixel values.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vit.config.schema import Config
from vit.data.augment.draw import draw_mix, draw_table, sample_keys
from vit.data.augment.table import table_layout
from vit.data.batches import Batch, BatchLayout, write_rows
from vit.data.image_format import ImageFormat

STORED_PX = (500, 375)
"""The width and height of an average ImageNet image, in pixels."""
NOISE_ROWS = 16
"""The number of distinct noise images. Images are repeated, because generating them takes longer
than a step on a GPU."""


def synthetic_batches(
    config: Config, num_rows: int, num_classes: int, device: torch.device, count: int = 4
) -> list[Batch]:
    """Return `count` batches of `num_rows` images on `device`.

    Each batch has its own augmentation parameters. Even batches share one set of images, labels and
    weights, and odd batches share another.
    """
    batches: list[Batch] = []
    for position in range(count):
        batch = _batch_on_host(config, num_rows, num_classes, position)
        on_gpu = device.type == "cuda"
        if on_gpu:
            batch = batch.pin_memory()
        if position < 2:
            batches.append(batch.to(device))
        else:
            batches.append(replace(batches[position % 2], table=batch.table))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return batches


def _batch_on_host(config: Config, num_rows: int, num_classes: int, position: int) -> Batch:
    """Return the batch at `position`, with the memory layout of the loader's buffers."""
    image_format = ImageFormat.from_config(config.model, config.data)
    layout = BatchLayout(num_rows, image_format, table_layout(config.augment).width)
    batch = layout.batch_in(memoryview(bytearray(layout.num_bytes)))
    rng = np.random.default_rng(position)
    noise = rng.integers(0, 256, (NOISE_ROWS, *batch.images.shape[1:]), dtype=np.uint8)
    rows = torch.arange(num_rows) % NOISE_ROWS
    torch.index_select(torch.from_numpy(noise), 0, rows, out=batch.images)
    ids = np.arange(num_rows) + position * num_rows
    keys = sample_keys(config.train.seed, 0, ids)
    widths = np.full(num_rows, STORED_PX[0])
    heights = np.full(num_rows, STORED_PX[1])
    size = image_format.size
    table = draw_table(config.augment, keys, widths, heights, size)
    weights = np.ones(num_rows, dtype=np.float32)
    draw_mix(
        config.augment,
        table,
        weights=weights,
        seed=config.train.seed,
        position=position,
        first_row=0,
        size=size,
        epoch=0,
    )
    write_rows(batch, rng.integers(0, num_classes, num_rows), weights, table, ids)
    return batch
