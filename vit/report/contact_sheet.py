"""A contact sheet of the augmentation of a config, drawn before anything is trained.

The data's story: the first images of the training split are made into batches as for training, once
for each draw: an epoch of as many images as the sheet has rows, so that each epoch shows the same
images with other random numbers. The host's table says in words what was done to each; `Augment`
does it, without mixing, and once more with it for the last column. One PNG comes out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vit.config import AugmentConfig, Config
from vit.data.augment.apply import create_augment
from vit.data.augment.draw import mixes
from vit.data.augment.table import describe
from vit.data.batches import Batch, ImageFormat, TrainBatches
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.open_data import choose_num_classes, open_split, open_train_set
from vit.report.figures import (
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
    """Draw a row for each of the first `num_images` of the training split, up to a multiple of
    `augment.mix_group_size` where images mix: the original's middle, `num_draws` draws of the
    augmentation, and one as it is mixed. Returns `picture`.

    Raises ShardError where the data cannot be read, ValueError where there are too few.
    """
    data = config.data
    train = (
        open_train_set(data, open_split(data, data.val_split), num_classes=config.model.num_classes)
        if data.reader == "index"
        else None
    )
    split, drawn = (
        (open_split(data, data.train_split), ())
        if train is None
        else (train.split, train.shares[:1])
    )
    num_images_there = drawn[0].num_samples if drawn else split.num_samples
    group = config.augment.mix_group_size if mixes(config.augment) else 1
    num_rows = -(-num_images // group) * group
    if num_rows > num_images_there:
        raise ValueError(
            f"{num_rows} images are asked for, {config.data.root} has {num_images_there} to train"
            " on: ask for fewer"
        )
    drawn = tuple(replace(share, num_draws=num_rows, num_samples=num_rows) for share in drawn)
    num_classes = choose_num_classes(config.model, data, split)
    side = _side(num_draws + 1 + (group > 1))
    image = ImageFormat.from_config(config.model, config.data)
    order = make_order(num_rows, num_rows, config.train.seed, shares=drawn)
    height, width = image.size
    middle = AugmentConfig(
        crop_scale=(1.0, 1.0), crop_ratio=(width / height, width / height), hflip_prob=0.0
    )
    with Loader(TrainBatches(split, order, middle, image), 0, 1) as loader:
        originals = next(loader)
        rows = np.argsort(originals.ids.numpy())
        columns = [("original", [Cell(originals.images[row].clone(), []) for row in rows])]
    resting = config.model_copy(
        update={
            "augment": config.augment.model_copy(update={"mixup_alpha": 0.0, "cutmix_alpha": 0.0})
        }
    )
    with Loader(
        TrainBatches(split, order, config.augment, image, on_bad_image=config.data.on_bad_image),
        0,
        num_draws + 1,
    ) as loader:
        for number, batch in enumerate(loader):
            if number < num_draws:
                inputs, _ = _augmented(resting, num_classes, batch, device)
                columns.append(
                    (
                        f"draw {number + 1}",
                        [
                            Cell(inputs[row], _in_words(config, batch, row, side))
                            for row in _sorted(batch)
                        ],
                    )
                )
            elif group > 1:
                inputs, targets = _augmented(config, num_classes, batch, device)
                shares = [share_lines(target, split.class_names, side) for target in targets]
                columns.append(
                    ("as mixed", [Cell(inputs[row], shares[row]) for row in _sorted(batch)])
                )
    return _plot(columns, f"Augmentation of {split.root}, {width} × {height} pixels", picture)


def _augmented(
    config: Config, num_classes: int, batch: Batch, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs (B, C, H, W) float in [0, 1], the normalisation taken back, and targets (B, classes),
    on the host."""
    on_device = batch.to(device)
    inputs, targets = create_augment(config.augment, config.data, num_classes, device)(
        on_device.images, on_device.labels, batch.table
    )
    shift, scale = (
        torch.tensor(values).view(-1, 1, 1) for values in (config.data.mean, config.data.std)
    )
    return (inputs.cpu() * scale + shift).clamp(0, 1), targets.cpu()


def _sorted(batch: Batch) -> list[int]:
    return np.argsort(batch.ids.numpy()).tolist()


def _in_words(config: Config, batch: Batch, row: int, width_in: float) -> list[str]:
    words = (
        ["not readable"]
        if batch.weights[row] == 0
        else describe(config.augment, batch.table[row].numpy())
    )
    return wrap(", ".join(words), int(width_in * 72 / (0.55 * CAPTION_PT)))


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
