"""A contact sheet of the augmentation of a config, drawn before anything is trained.

The first training images are made into batches as for training, once for each draw: an epoch has as
many images as the sheet has rows, so that each epoch shows the same images with other random
numbers. The host's table gives the caption of each; `Augment` does what the table says, without
mixing, and once more with it for the last column.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vit.config.schema import AugmentConfig, Config, DataConfig
from vit.data.augment.apply import create_augment
from vit.data.augment.draw import mixes
from vit.data.augment.table import describe
from vit.data.batches import Batch, ImageFormat, TrainBatches
from vit.data.loader import Loader
from vit.data.order import Share, make_order
from vit.open_data import choose_num_classes, open_split, open_train_set
from vit.report.style import (
    SMALL_PT,
    TEXT_PT,
    WIDTH_IN,
    drawing,
    new_sheet,
    place,
    share_lines,
    to_pixels,
)

CAPTION_PT = 7.5
LINE_IN = 0.125
GAP_IN = 0.08


class Cell(NamedTuple):
    """One picture of the sheet."""

    pixels: Tensor
    """(C, H, W) uint8, or float in [0, 1]."""
    caption: list[str]
    """Lines under it."""


def make_contact_sheet(
    config: Config, num_images: int, num_draws: int, picture: Path, device: torch.device
) -> Path:
    """Draw a row for each of the first `num_images` of the training split. Returns `picture`.

    A row shows the centre of the original, `num_draws` draws of the augmentation, and one with
    mixing; where images mix, there are rows for complete groups of `augment.mix_group_size`. Raises
    ShardError if the data cannot be read, ValueError if there are too few images.
    """
    data = config.data
    shares: tuple[Share, ...] = ()
    if data.reader == "index":
        val_split = open_split(data, data.val_split)
        train = open_train_set(data, val_split, num_classes=config.model.num_classes)
        split = train.split
        shares = train.shares[:1]
    else:
        split = open_split(data, data.train_split)
    num_available = shares[0].num_samples if shares else split.num_samples
    does_mix = mixes(config.augment)
    group = config.augment.mix_group_size if does_mix else 1
    num_rows = -(-num_images // group) * group
    if num_rows > num_available:
        raise ValueError(
            f"{num_rows} images are asked for, {data.root} has {num_available} to train on: ask"
            " for fewer"
        )
    shares = tuple(replace(share, num_draws=num_rows, num_samples=num_rows) for share in shares)
    num_classes = choose_num_classes(config.model, data, split)
    form = ImageFormat.from_config(config.model, data)
    # an epoch is one batch: each batch has the same images
    order = make_order(num_rows, num_rows, config.train.seed, shares=shares)
    height, width = form.size
    aspect = width / height
    centre = AugmentConfig(crop_scale=(1.0, 1.0), crop_ratio=(aspect, aspect), hflip_prob=0.0)
    with Loader(TrainBatches(split, order, centre, form), 0, 1) as loader:
        batch = next(loader)
        cells = [Cell(batch.images[row].clone(), []) for row in _sorted(batch)]
    columns = [("original", cells)]

    num_batches = num_draws + does_mix
    side = _side(1 + num_batches)
    unmixed = config.augment.model_copy(update={"mixup_alpha": 0.0, "cutmix_alpha": 0.0})
    batches = TrainBatches(split, order, config.augment, form, on_bad_image=data.on_bad_image)
    with Loader(batches, 0, num_batches) as loader:
        for number, batch in enumerate(loader):
            cells = []
            if number < num_draws:
                title = f"draw {number + 1}"
                inputs, _ = _augmented(unmixed, data, num_classes, batch, device)
                for row in _sorted(batch):
                    cells.append(Cell(inputs[row], _caption(config, batch, row, side)))
            else:
                title = "as mixed"
                inputs, targets = _augmented(config.augment, data, num_classes, batch, device)
                for row in _sorted(batch):
                    caption = share_lines(targets[row], split.class_names, side)
                    cells.append(Cell(inputs[row], caption))
            columns.append((title, cells))
    return _plot(columns, f"Augmentation of {split.root}, {width} × {height} pixels", picture)


def _augmented(
    config: AugmentConfig, data: DataConfig, num_classes: int, batch: Batch, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return inputs (B, C, H, W) float in [0, 1], not normalised, and targets (B, classes).

    Both are on the host.
    """
    on_device = batch.to(device)
    augment = create_augment(config, data, num_classes, device)
    inputs, targets = augment(on_device.images, on_device.labels, batch.table)
    mean = torch.tensor(data.mean).view(-1, 1, 1)
    std = torch.tensor(data.std).view(-1, 1, 1)
    return (inputs.cpu() * std + mean).clamp(0, 1), targets.cpu()


def _sorted(batch: Batch) -> list[int]:
    """Return the rows of a batch in the order of their images."""
    return np.argsort(batch.ids.numpy()).tolist()


def _caption(config: Config, batch: Batch, row: int, width_in: float) -> list[str]:
    operations = ["not readable"]
    if batch.weights[row] != 0:
        operations = describe(config.augment, batch.table[row].numpy())
    return wrap(", ".join(operations), int(width_in * 72 / (0.55 * CAPTION_PT)))


def _side(num_columns: int) -> float:
    return (WIDTH_IN - GAP_IN) / num_columns - GAP_IN


def _plot(columns: list[tuple[str, list[Cell]]], heading: str, picture: Path) -> Path:
    side = _side(len(columns))
    height, width = columns[0][1][0].pixels.shape[1:]
    tall = side * height / width
    row_in = (
        tall + LINE_IN * max(len(cell.caption) for _, cells in columns for cell in cells) + GAP_IN
    )
    with drawing(picture, 0.8 + row_in * len(columns[0][1])) as figure:
        sheet = new_sheet(figure, heading)
        for column, (title, cells) in enumerate(columns):
            left = GAP_IN + column * (side + GAP_IN)
            sheet.text(
                left + side / 2,
                0.6,
                title,
                ha="center",
                va="center",
                size=SMALL_PT if len(columns) > 6 else TEXT_PT,
            )
            for row, cell in enumerate(cells):
                top = 0.75 + row * row_in
                place(sheet, to_pixels(cell.pixels), left, top, side, tall)
                for number, line in enumerate(cell.caption):
                    sheet.text(left, top + tall + LINE_IN * (number + 0.8), line, size=CAPTION_PT)
    return picture
