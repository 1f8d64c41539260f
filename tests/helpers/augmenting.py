"""Create test images, keys and augmentation parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from vit.config.schema import AugmentConfig
from vit.data.augment.apply import Augment
from vit.data.augment.draw import draw_mix, draw_table, sample_keys
from vit.data.augment.table import FIRST_OP, FLIP, table_layout

CPU = torch.device("cpu")
DEIT3 = AugmentConfig(
    crop="simple", auto_augment="three_augment", color_jitter=(0.3, 0.3, 0.3, 0.0)
)
POLICIES = {
    "timm": AugmentConfig(
        randaugment_layers=2, mixup_alpha=0.8, cutmix_alpha=1.0, erasing_prob=0.25
    ),
    "torchvision": AugmentConfig(
        randaugment_layers=2, randaugment_ops="torchvision", erasing_prob=0.1, erasing_mode="const"
    ),
    "big_vision": AugmentConfig(
        randaugment_layers=2, randaugment_ops="big_vision", mixup_alpha=0.2, mixup_mode="elem"
    ),
    "deit3": DEIT3.model_copy(update={"mixup_alpha": 0.8, "cutmix_alpha": 1.0}),
    "auto_augment": AugmentConfig(auto_augment="v0", magnitude_std=0.5),
    "jitter": AugmentConfig(
        color_jitter=(0.4, 0.4, 0.4, 0.1),
        erasing_prob=0.5,
        erasing_mode="rand",
        cutmix_alpha=1.0,
        mixup_mode="pair",
    ),
}


def keys_of(num: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return sample_keys(seed, epoch, np.arange(num))


def table_of(
    config: AugmentConfig, num: int, size: tuple[int, int] = (24, 20), first: int = 0
) -> np.ndarray:
    """Return augmentation parameters for `num` images of 300 x 200 pixels, starting at row `first`.
    The images are not mixed."""
    keys = sample_keys(0, 0, np.arange(first, first + num))
    return draw_table(config, keys, np.full(num, 300), np.full(num, 200), size)


def mixed_table(
    config: AugmentConfig, num: int, size: tuple[int, int] = (24, 20), seed: int = 0
) -> np.ndarray:
    table = table_of(config, num, size)
    draw_mix(config, table, np.ones(num, np.float32), seed, 0, 0, size, 0)
    return table


def on_pixels(config: AugmentConfig, channels: int = 3) -> Augment:
    """Return an `Augment` for ten classes that does not normalize, so that its outputs are gray
    levels."""
    return Augment(config, 10, (0.0,) * channels, (1 / 255,) * channels, CPU)


def changed(config: AugmentConfig, images: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Apply the augmentation parameters in `table` to (B, C, H, W) uint8 images, and return integer
    gray levels."""
    labels = torch.zeros(len(images), dtype=torch.int64)
    inputs, _ = on_pixels(config, images.shape[1])(
        torch.from_numpy(images), labels, torch.from_numpy(table)
    )
    return inputs.numpy().round().astype(int)


def one_op(
    config: AugmentConfig, images: np.ndarray, op: int, *values: float | np.ndarray
) -> np.ndarray:
    """Apply the single operation `op` to the images, and return integer gray levels.

    `values` contains the strength and the position, each as one number for all images or one number
    per image.
    """
    table = table_of(config, len(images), images.shape[2:])
    table[:, FLIP] = 0
    for op_column in table_layout(config).op_columns:
        table[:, op_column.column] = -1
    table[:, FIRST_OP] = op
    for column, value in enumerate(values, FIRST_OP + 1):
        table[:, column] = value
    return changed(config, images, table)


def at_strengths(
    config: AugmentConfig, images: np.ndarray, op: int, strengths: Sequence[float]
) -> Iterator[np.ndarray]:
    levels = one_op(
        config, np.concatenate([images] * len(strengths)), op, np.repeat(strengths, len(images))
    )
    yield from levels.reshape(len(strengths), *images.shape)


def random_images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def photographs() -> np.ndarray:
    """Return seven images with shape (7, 3, 40, 120): edges, a low-contrast image, a dark one, a
    bright one, noise, and two images in which some channels are constant."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:40, :120]
    waves = np.stack([np.sin(x / 9 + k) + np.cos(y / 7 - k) for k in range(3)]) * 50 + 128
    edges = waves.copy()
    edges[:, 10:25, 12:30] += 70
    flat_channel = edges.copy()
    flat_channel[1] = 77
    images = [
        edges,
        waves / 5 + 90,
        waves / 3,
        waves / 3 + 170,
        generator.integers(0, 256, waves.shape),
        flat_channel,
        np.full(waves.shape, 60.0),
    ]
    return np.clip(np.stack(images), 0, 255).astype(np.uint8)
