"""Draw a contact sheet that shows how a config augments training images.

Batches are loaded as in training. An epoch has as many images as the sheet has rows, so every epoch
contains the same images with new random numbers. The captions are derived from the augmentation
parameters. Only the last column shows mixing (MixUp or CutMix).
"""

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit.config.schema import AugmentConfig, Config, StreamConfig
from vit.data.augment.apply import Augment, create_augment
from vit.data.augment.draw import mixes
from vit.data.augment.table import describe
from vit.data.batches import Batch, TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.open_data import choose_num_classes, open_split, open_train_set
from vit.data.order import Order, make_order
from vit.data.shards.split import Split
from vit.data.sources import Sources, TrainSet
from vit.extras.report.drawing import (
    Cell,
    as_colors,
    cell_width_in,
    plot_cells,
    share_lines,
    wrap_caption,
)

CAPTION_PT = 7.5


def make_contact_sheet(
    config: Config, num_images: int, num_draws: int, picture: Path, device: torch.device
) -> Path:
    """Draw a row for each of the first `num_images` training images. Returns `picture`.

    A row shows a center crop of the original, `num_draws` augmented images, and one image with
    mixing. With mixing, the number of rows is rounded up to a multiple of `augment.mix_group_size`.
    Raises ShardError if the data cannot be read, and ValueError if the split has too few images.
    """
    # A stream has no fixed samples, so read its shards through their index.
    config = config.model_copy(update={"stream": StreamConfig()})
    data = config.data
    val_split = open_split(config, data.val_split)
    train = open_train_set(config, val_split, num_classes=config.model.num_classes)
    split = train.split

    order = _one_batch_order(config, train, num_images)
    num_classes = choose_num_classes(config.model, data, split)
    form = ImageFormat.from_config(config.model, data)
    columns = {"original": _original_cells(split, order, form)}
    columns |= _augmented_columns(config, split, order, form, num_classes, num_draws, device)

    height, width = form.size
    return plot_cells(
        list(chain.from_iterable(zip(*columns.values(), strict=True))),
        len(columns),
        heading=f"Augmentation of {split.root}, {width} × {height} pixels",
        picture=picture,
        titles=list(columns),
        caption_pt=CAPTION_PT,
    )


def _one_batch_order(config: Config, train: TrainSet, num_images: int) -> Order:
    """Return an order whose epochs are one batch, so that all batches contain the same images.

    With several data sources, all images are from the first. Raises ValueError if `train` has fewer
    than `num_images`, rounded up to complete groups of mixed images.
    """
    share = train.shares[0] if train.shares else None
    num_available = train.split.num_samples if share is None else share.num_samples
    group_size = config.augment.mix_group_size if mixes(config.augment) else 1
    num_rows = math.ceil(num_images / group_size) * group_size
    if num_rows > num_available:
        raise ValueError(
            f"{num_rows} images were requested, but {config.data.root} has only {num_available}"
            " training images: request fewer"
        )

    shares = () if share is None else (replace(share, num_draws=num_rows, num_samples=num_rows),)
    return make_order(num_rows, num_rows, config.train.seed, shares=shares)


def _original_cells(split: Split | Sources, order: Order, form: ImageFormat) -> list[Cell]:
    """Return a center crop of each image, without a caption."""
    height, width = form.size
    aspect = width / height
    center = AugmentConfig(crop_scale=(1.0, 1.0), crop_ratio=(aspect, aspect), hflip_prob=0.0)
    with Loader(TrainBatches(split, order, center, form), 0, 1) as loader:
        batch = next(loader)
        return [Cell(batch.images[row].clone(), []) for row in _sorted(batch)]


def _augmented_columns(
    config: Config,
    split: Split | Sources,
    order: Order,
    form: ImageFormat,
    num_classes: int,
    num_draws: int,
    device: torch.device,
) -> dict[str, list[Cell]]:
    """Return a column for each of `num_draws` epochs without mixing and, if the config mixes, one
    with mixing, by title."""
    does_mix = mixes(config.augment)
    num_batches = num_draws + does_mix
    width_in = cell_width_in(1 + num_batches)
    unmixed = config.augment.model_copy(update={"mixup_alpha": 0.0, "cutmix_alpha": 0.0})
    # Each column is an epoch, so `mixup_off_epoch` could switch mixing off in the last column.
    mixed = config.augment.model_copy(update={"mixup_off_epoch": None})
    draw = create_augment(unmixed, config.data, num_classes, device)
    mix = create_augment(mixed, config.data, num_classes, device)

    columns = {}
    batches = TrainBatches(split, order, mixed, form, on_bad_image=config.loader.on_bad_image)
    with Loader(batches, 0, num_batches) as loader:
        for number in range(1, num_draws + 1):
            batch = next(loader)
            images, _ = _augmented(batch, draw, config, device)
            columns[f"draw {number}"] = [
                Cell(images[row], _caption(config.augment, batch, row, width_in))
                for row in _sorted(batch)
            ]

        if does_mix:
            batch = next(loader)
            images, targets = _augmented(batch, mix, config, device)
            columns["as mixed"] = [
                Cell(images[row], share_lines(targets[row], split.class_names, width_in))
                for row in _sorted(batch)
            ]
    return columns


def _augmented(
    batch: Batch, augment: Augment, config: Config, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the images as colors, (B, C, H, W), and the targets, (B, classes), on the CPU."""
    on_device = batch.to(device)
    inputs, targets = augment(on_device.images, on_device.labels, batch.table)
    return as_colors(inputs, config.data.mean, config.data.std), targets.cpu()


def _sorted(batch: Batch) -> list[int]:
    """Return the rows of a batch in the order of their samples, which is equal for all epochs."""
    return np.argsort(batch.ids.numpy()).tolist()


def _caption(config: AugmentConfig, batch: Batch, row: int, width_in: float) -> list[str]:
    """Return the lines that list the operations on a row of `batch`."""
    operations = ["not readable"]
    if batch.weights[row] != 0:
        operations = describe(config, batch.table[row].numpy())
    return wrap_caption(", ".join(operations), width_in, CAPTION_PT)
