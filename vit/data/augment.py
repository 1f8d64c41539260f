"""Random numbers on the host, pixels on the device.

The data's story: for each sample the host draws from a counter-based hash of (seed, epoch, sample, copy) where to crop, whether to flip,
which RandAugment operations to apply; and from (seed, batch, group) how to mix. The crop is handed to the decoder. The rest is a small
float table (B, K) that travels with the batch, so that `Augment` on the device is a pure function of (images, labels, table): the same on
any number of ranks, workers and devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vit.config import AugmentConfig, Config
from vit.data.order import fold, uniform

# Columns of the table.
FLIP, LAMBDA, CUTMIX, TOP, BOTTOM, LEFT, RIGHT, FIRST_OP = range(8)
# What a hash is for, as a part of its key.
_CROP, _FLIP, _RANDAUGMENT, _MIX = range(4)


# --- drawn on the host -------------------------------------------------------------------------------------------------------------------


def sample_keys(seed: int, epoch: int, ids: NDArray[np.int64], copy: int = 0) -> NDArray[np.uint64]:
    """One key for each sample (B,); all that is random about a sample in an epoch comes from it."""
    return fold(seed, epoch, ids, copy)


def draw_crops(config: AugmentConfig, keys: NDArray[np.uint64], widths: NDArray, heights: NDArray) -> NDArray[np.int64]:
    """Random-resized-crop windows (B, 4): left, top, width, height in pixels of the originals.

    Szegedy et al. 2015 with torchvision's details (transforms/v2/_geometry.py, RandomResizedCrop): up to ten tries of area and log-uniform
    aspect, rounded; else the largest centred window whose aspect is allowed.
    """
    w, h = widths.astype(np.float64), heights.astype(np.float64)
    low, high = config.crop_scale
    area = (w * h)[:, None] * (low + (high - low) * uniform(keys[:, None], _CROP, 0, np.arange(10)))
    log_low, log_high = (math.log(r) for r in config.crop_ratio)
    aspect = np.exp(log_low + (log_high - log_low) * uniform(keys[:, None], _CROP, 1, np.arange(10)))
    tries_w, tries_h = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    fits = (tries_w > 0) & (tries_h > 0) & (tries_w <= w[:, None]) & (tries_h <= h[:, None])
    rows, first = np.arange(len(keys)), fits.argmax(1)
    clipped = np.clip(w / h, *config.crop_ratio)
    found = fits.any(1)
    crop_w = np.where(found, tries_w[rows, first], np.where(w / h > clipped, np.rint(h * clipped), w))
    crop_h = np.where(found, tries_h[rows, first], np.where(w / h < clipped, np.rint(w / clipped), h))
    left = np.where(found, np.floor(uniform(keys, _CROP, 2) * (w - crop_w + 1)), (w - crop_w) // 2)
    top = np.where(found, np.floor(uniform(keys, _CROP, 3) * (h - crop_h + 1)), (h - crop_h) // 2)
    return np.stack([left, top, np.maximum(crop_w, 1), np.maximum(crop_h, 1)], 1).astype(np.int64)


def draw_table(config: AugmentConfig, keys: NDArray[np.uint64]) -> NDArray[np.float32]:
    """The table (B, K) of `Augment`, mixing columns at rest (`draw_mix` fills them)."""
    table = np.zeros((len(keys), FIRST_OP + 2 * config.randaugment_layers), dtype=np.float32)
    table[:, FLIP] = uniform(keys, _FLIP) < config.hflip_prob
    table[:, LAMBDA] = 1.0
    for layer in range(config.randaugment_layers):
        chosen, applied, negated, u1, u2 = (uniform(keys, _RANDAUGMENT, layer, i) for i in range(5))
        gauss = np.sqrt(-2.0 * np.log(1.0 - u1)) * np.cos(2.0 * np.pi * u2)
        strength = np.clip(config.randaugment_magnitude + config.randaugment_magnitude_std * gauss, 0.0, 10.0)
        table[:, FIRST_OP + 2 * layer] = np.where(applied < RANDAUGMENT_PROB, np.floor(chosen * len(OPS)), -1)
        table[:, FIRST_OP + 2 * layer + 1] = np.where(negated < 0.5, -strength, strength)
    return table


def _symmetric_beta(alpha: float, keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Beta(alpha, alpha), one for each key: Johnk's method (1964), whose rejections only move on a counter of the same key."""
    out, todo, attempt = np.empty(len(keys)), np.arange(len(keys)), 0
    while len(todo):
        x, y = (np.maximum(uniform(keys[todo], attempt, i), 1e-300) ** (1.0 / alpha) for i in range(2))
        accept = (x + y <= 1.0) & (x + y > 0.0)
        out[todo[accept]] = x[accept] / (x[accept] + y[accept])
        todo, attempt = todo[~accept], attempt + 1
    return out


def draw_mix(
    config: AugmentConfig,
    table: NDArray[np.float32],
    weights: NDArray[np.float32],
    seed: int,
    position: int,
    first_row: int,
    size: tuple[int, int],
) -> None:
    """Fill the mixing columns of `table` (B, K) for rows [first_row, first_row + B) of the global batch at `position`.

    MixUp (Zhang et al. 2018) and CutMix (Yun et al. 2019): all rows of a group share lambda and box; a row mixes with the next row of its
    group. `size` = (height, width) of the images. A row whose partner has weight 0 (it could not be read) stays unmixed.
    """
    if not _mixes(config):
        return
    assert first_row % config.mix_group_size == 0 == len(table) % config.mix_group_size, "groups must not be torn apart"
    group = (first_row + np.arange(len(table))) // config.mix_group_size
    keys = fold(seed, position, group, _MIX)
    both = config.mixup_alpha > 0 and config.cutmix_alpha > 0
    cutmix = uniform(keys, 0) < config.cutmix_switch_prob if both else np.full(len(table), config.cutmix_alpha > 0)
    mixup_lambda, cutmix_lambda = (
        _symmetric_beta(alpha, fold(keys, 1)) if alpha else np.ones(len(table)) for alpha in (config.mixup_alpha, config.cutmix_alpha)
    )
    (height, width), cut = size, np.sqrt(1.0 - cutmix_lambda)
    middle_y, middle_x = np.floor(uniform(keys, 2) * height), np.floor(uniform(keys, 3) * width)
    half_h, half_w = np.floor(cut * height) // 2, np.floor(cut * width) // 2
    top, bottom = np.clip(middle_y - half_h, 0, height), np.clip(middle_y + half_h, 0, height)
    left, right = np.clip(middle_x - half_w, 0, width), np.clip(middle_x + half_w, 0, width)
    kept = 1.0 - (bottom - top) * (right - left) / (height * width)
    mixed = (uniform(keys, 4) < config.mix_prob) & (weights[partners(len(table), config.mix_group_size)] > 0)
    table[:, LAMBDA] = np.where(mixed, np.where(cutmix, kept, mixup_lambda), 1.0)
    table[:, CUTMIX] = cutmix & mixed
    for column, values in ((TOP, top), (BOTTOM, bottom), (LEFT, left), (RIGHT, right)):
        table[:, column] = np.where(cutmix & mixed, values, 0)


def partners(num_rows: int, group_size: int) -> NDArray[np.int64]:
    """For each row the row it mixes with: the next one of its group, the last one's being the first."""
    rows = np.arange(num_rows)
    return rows // group_size * group_size + (rows + 1) % group_size


def _mixes(config: AugmentConfig) -> bool:
    return config.mixup_alpha > 0 or config.cutmix_alpha > 0


# --- applied on the device ---------------------------------------------------------------------------------------------------------------


class Augment:
    """Flips, RandAugment, normalisation, MixUp and CutMix of whole micro-batches on the device.

    `mean`, `std`: per channel, for images scaled to [0, 1]. Without a table (evaluation) only `normalize` is used.
    """

    def __init__(self, config: AugmentConfig, num_classes: int, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device):
        self.config, self.num_classes = config, num_classes
        self.scale = (1.0 / (255.0 * torch.tensor(std))).view(1, -1, 1, 1).to(device)
        self.shift = (-torch.tensor(mean) / torch.tensor(std)).view(1, -1, 1, 1).to(device)
        # What a warp leaves empty: timm's img_mean, the mean colour of ImageNet, whatever `mean` is.
        self.fill = torch.tensor([124.0, 116.0, 104.0]).view(1, 3, 1, 1).to(device)

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to float32 with the data's mean and deviation taken out."""
        return torch.addcmul(self.shift, images.float(), self.scale)

    def __call__(self, images: Tensor, labels: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """`images` (B, C, H, W) uint8 and `labels` (B,) int64 on the device, `table` (B, K) float32 on the host, whose row lists it makes.

        Returns inputs (B, C, H, W) float32 and soft targets (B, num_classes) float32.
        """
        on_device = table.to(images.device, non_blocking=True)
        images = torch.where(on_device[:, FLIP].view(-1, 1, 1, 1) > 0, images.flip(-1), images)
        for layer in range(self.config.randaugment_layers):
            images = self._randaugment(images, table[:, FIRST_OP + 2 * layer].numpy(), on_device[:, FIRST_OP + 2 * layer + 1])
        inputs, targets = self.normalize(images), F.one_hot(labels, self.num_classes).float()
        if _mixes(self.config):
            partner = torch.from_numpy(partners(len(table), self.config.mix_group_size)).to(images.device, non_blocking=True)
            height, width = images.shape[-2:]
            y = torch.arange(height, device=images.device).view(1, -1, 1)
            x = torch.arange(width, device=images.device).view(1, 1, -1)
            top, bottom, left, right, given = (on_device[:, c].view(-1, 1, 1) for c in (TOP, BOTTOM, LEFT, RIGHT, LAMBDA))
            box = ((y >= top) & (y < bottom) & (x >= left) & (x < right)).float()
            share = torch.where(on_device[:, CUTMIX].view(-1, 1, 1) > 0, box, 1.0 - given)
            inputs = torch.lerp(inputs, inputs[partner], share[:, None])
            targets = torch.lerp(targets, targets[partner], 1.0 - on_device[:, LAMBDA, None])
        return inputs, targets

    def _randaugment(self, images: Tensor, ops: NDArray[np.float32], strength: Tensor) -> Tensor:
        """Changes `images`, which the flip has copied."""
        for number in np.unique(ops[ops >= 0]):
            rows = torch.from_numpy(np.flatnonzero(ops == number)).to(images.device, non_blocking=True)
            changed = OPS[int(number)](images[rows].float(), strength[rows].view(-1, 1, 1, 1), self.fill)
            images[rows] = changed.round_().clamp_(0, 255).to(torch.uint8)
        return images


def create_augment(config: Config, num_classes: int, device: torch.device) -> Augment:
    """The device's part of the image path, for training and evaluation."""
    return Augment(config.augment, num_classes, config.data.mean, config.data.std, device)


# --- RandAugment (Cubuk et al. 2020) with timm's "increasing" operations (timm/data/auto_augment.py, `rand-m9-mstd0.5-inc1`)
# ------------------ Each takes images (B, 3, H, W) float32 in 0..255, signed strengths (B, 1, 1, 1) in -10..10, and the fill colour.

RANDAUGMENT_PROB = 0.5
"""timm applies each chosen operation with this probability."""


def _grey(images: Tensor) -> Tensor:
    # Pillow's integer weights, whose sums stay exact in float32. No tensor of them: making one would wait for the GPU.
    red, green, blue = images.split(1, 1)
    return ((19595.0 * red + 38470.0 * green + 7471.0 * blue + 32768.0) / 65536.0).floor()


def _factor(strength: Tensor) -> Tensor:
    return (1.0 + 0.09 * strength).clamp(min=0.1)


def _blend(other: Tensor, images: Tensor, strength: Tensor) -> Tensor:
    return torch.lerp(other, images, _factor(strength))


def auto_contrast(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Stretch each channel to 0..255."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, ((images - low) * (255.0 / (high - low).clamp(min=1.0))).floor(), images)


def equalize(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Flatten each channel's histogram, with Pillow's rounding (PIL/ImageOps.py, equalize)."""
    flat = images.long().flatten(2)
    counts = torch.zeros(*flat.shape[:2], 256, device=images.device, dtype=torch.long).scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    table = ((step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table.gather(2, flat), flat).float().view_as(images)


def invert(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Negative."""
    return 255.0 - images


def posterize(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Keep 4 bits at no strength, none at the full one."""
    unit = torch.exp2(4.0 + (strength.abs() * 0.4).floor())
    return (images / unit).floor() * unit


def solarize(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Negative of what is brighter than a falling threshold."""
    return torch.where(images < 256.0 - (strength.abs() * 25.6).floor(), images, 255.0 - images)


def solarize_add(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Brighten the darker half of the range."""
    return torch.where(images < 128.0, (images + (strength.abs() * 11.0).floor()).clamp(max=255.0), images)


def color(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Towards grey or away from it."""
    return _blend(_grey(images).expand_as(images), images, strength)


def contrast(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Towards the mean grey or away from it."""
    return _blend((_grey(images).mean((2, 3), keepdim=True) + 0.5).floor().expand_as(images), images, strength)


def brightness(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Towards black or away from it."""
    return images * _factor(strength)


def sharpness(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Towards a 3x3 smoothing or away from it; Pillow leaves the border as it is."""
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = ((9.0 * F.avg_pool2d(images, 3, 1) + 4.0 * images[:, :, 1:-1, 1:-1]) / 13.0).round()
    return _blend(smooth, images, strength)


def _warp(images: Tensor, fill: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """Bilinear look-up of output pixel (x, y), measured from the centre, at (a x + b y + c, d x + e y + f); outside is the fill colour."""
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device, dtype=torch.float32).view(1, -1, 1) - (height - 1) / 2
    x = torch.arange(width, device=images.device, dtype=torch.float32).view(1, 1, -1) - (width - 1) / 2
    at_x, at_y = a * x + b * y + c, d * x + e * y + f
    grid = torch.stack([at_x * (2.0 / width), at_y * (2.0 / height)], -1)
    inside = (at_x >= -width / 2) & (at_x < width / 2) & (at_y >= -height / 2) & (at_y < height / 2)
    warped = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return torch.where(inside[:, None], warped, fill)


def _rows(strength: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    flat = strength.view(-1, 1, 1)
    return flat, torch.ones_like(flat), torch.zeros_like(flat)


def rotate(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """By up to 30 degrees about the centre."""
    s, _, zero = _rows(strength)
    angle = s * (3.0 * math.pi / 180.0)
    return _warp(images, fill, angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero)


def shear_x(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """By up to 0.3, the top row staying in place as in Pillow's coordinates."""
    s, one, zero = _rows(strength)
    return _warp(images, fill, one, 0.03 * s, 0.03 * s * images.shape[-2] / 2, zero, one, zero)


def shear_y(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """By up to 0.3, the left column staying in place."""
    s, one, zero = _rows(strength)
    return _warp(images, fill, one, zero, zero, 0.03 * s, one, 0.03 * s * images.shape[-1] / 2)


def translate_x(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """By up to 0.45 of the width."""
    s, one, zero = _rows(strength)
    return _warp(images, fill, one, zero, 0.045 * s * images.shape[-1], zero, one, zero)


def translate_y(images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """By up to 0.45 of the height."""
    s, one, zero = _rows(strength)
    return _warp(images, fill, one, zero, zero, zero, one, 0.045 * s * images.shape[-2])


OPS: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    auto_contrast,
    equalize,
    invert,
    rotate,
    posterize,
    solarize,
    solarize_add,
    color,
    contrast,
    brightness,
    sharpness,
    shear_x,
    shear_y,
    translate_x,
    translate_y,
)
"""Their order is part of the stream of random numbers: new ones go to the end."""
