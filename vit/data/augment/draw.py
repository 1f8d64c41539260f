"""Random numbers of augmentation, on the host: where to crop, what to change, how to mix. Free of
torch.

The data's story: a counter-based hash of (seed, epoch, sample, copy) gives each sample its own key.
From the key come the crop, which goes to the decoder, and a row of a small float table (B, K),
which travels with the batch and says everything that `vit.data.augment.apply` does on the device.
How to mix is drawn for groups, pairs or rows of the *global* batch from (seed, position). So what
happens to a sample depends on nothing but these numbers: not on ranks, workers, the batch around it
or the device.

A stream of random numbers, once published, stays: `tests/data/augment/golden_draws.json` holds the
draws of the recipes. A new kind of draw takes a new number below; new operations go to the end of
their set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vit.config import AugmentConfig
from vit.data.order import fold, uniform

# Columns that every table has. `table_layout` says what follows them.
FLIP, LAMBDA, CUTMIX, TOP, BOTTOM, LEFT, RIGHT, FIRST_OP = range(8)
# What a hash is for, as a part of its key.
_CROP, _FLIP, _RANDAUGMENT, _MIX, _THREE_AUGMENT, _JITTER, _ERASE, _MIX_PAIR, _MIX_ROW = range(9)

OP_NAMES: dict[str, tuple[str, ...]] = {
    "timm": (
        "auto_contrast",
        "equalize",
        "invert",
        "rotate",
        "posterize",
        "solarize",
        "solarize_add",
        "color",
        "contrast",
        "brightness",
        "sharpness",
        "shear_x",
        "shear_y",
        "translate_x",
        "translate_y",
    ),
    "torchvision": (
        "identity",
        "shear_x",
        "shear_y",
        "translate_x",
        "translate_y",
        "rotate",
        "brightness",
        "color",
        "contrast",
        "sharpness",
        "posterize",
        "solarize",
        "auto_contrast",
        "equalize",
    ),
    "big_vision": (
        "auto_contrast",
        "equalize",
        "invert",
        "rotate",
        "posterize",
        "solarize",
        "color",
        "contrast",
        "brightness",
        "sharpness",
        "shear_x",
        "shear_y",
        "translate_x",
        "translate_y",
        "cutout",
        "solarize_add",
    ),
    "three_augment": ("grayscale", "solarize", "blur"),
    "color_jitter": ("brightness", "contrast", "saturation", "hue"),
}
"""The sets of operations, each in its source's order, which is part of the stream: RandAugment's of
timm/data/auto_augment.py (`_RAND_INCREASING_TRANSFORMS`), torchvision/transforms/autoaugment.py and
big_vision/pp/autoaugment.py; DeiT III's; torchvision's."""
RANDAUGMENT_PROB = 0.5
"""timm applies each chosen operation with this probability; torchvision and big_vision always."""
SIMPLE_CROP_MARGIN = 4
"""Pixels of reflected margin round the resized image, out of which the simple crop is taken (DeiT
III)."""
BLUR_RADIUS = (0.1, 2.0)
"""Range of 3-Augment's Gaussian radius in pixels."""
CROP_TRIES = ERASE_TRIES = 10


@dataclass(frozen=True)
class OpColumn:
    """One operation for each sample: its number in `OP_NAMES[op_set]`, or -1 for none, in `column`,
    and its strength in the next one.

    big_vision's layers have two more, the place of its cutout: uniform numbers in [0, 1) for x and
    y.
    """

    op_set: str
    column: int


@dataclass(frozen=True)
class TableLayout:
    """Which columns of the table mean what; `None`: not drawn."""

    op_columns: tuple[OpColumn, ...]
    """In the order in which they are applied: RandAugment's, 3-Augment's, colour jitter's."""
    shift: int | None
    """Two columns: pixels by which the view lies beyond the image's left (negative) or right, and
    upper or lower border."""
    erase: int | None
    """Four columns: top, bottom, left, right of the erased box, which is empty at 0; then
    `num_noise` more."""
    num_noise: int
    """3: the colour; 1: a whole number below 2**24 from which the noise of all pixels is made."""
    width: int
    """K."""


def table_layout(config: AugmentConfig) -> TableLayout:
    """The columns that `draw_table` writes and `vit.data.augment.apply.Augment` reads."""
    op_columns = []
    column = FIRST_OP
    sets: list[str] = [config.randaugment_ops] * config.randaugment_layers
    sets += ["three_augment"] * config.three_augment + ["color_jitter"] * sum(
        amount > 0 for amount in config.color_jitter
    )
    for ops in sets:
        op_columns.append(OpColumn(ops, column))
        column += 4 if ops == "big_vision" else 2
    shift = None
    erase = None
    if config.crop == "simple":
        shift = column
        column = column + 2
    num_noise = {"const": 0, "rand": 3, "pixel": 1}[config.erasing_mode]
    if config.erasing_prob > 0:
        erase = column
        column = column + 4 + num_noise
    return TableLayout(tuple(op_columns), shift, erase, num_noise, column)


def sample_keys(
    seed: int, epoch: int, ids: NDArray[np.int64], copies: NDArray[np.int64] | int = 0
) -> NDArray[np.uint64]:
    """One key for each sample (B,) and its copy, (B,) or one number; all that is random about them
    in an epoch comes from it."""
    return fold(seed, epoch, ids, copies)


# --- crops ----------------------------------------------------------------------------------------


def draw_crops(
    config: AugmentConfig,
    keys: NDArray[np.uint64],
    widths: NDArray,
    heights: NDArray,
    size: tuple[int, int],
) -> NDArray[np.int64]:
    """Windows (B, 4) of the originals, to be resized to `size` = (height, width): left, top, width,
    height in pixels."""
    if config.crop == "simple":
        return _simple_crops(keys, widths, heights, size)[0]
    return _random_resized_crops(config, keys, widths, heights)


def _random_resized_crops(
    config: AugmentConfig, keys: NDArray[np.uint64], widths: NDArray, heights: NDArray
) -> NDArray[np.int64]:
    """Szegedy et al. 2015 with torchvision's details (transforms/v2/_geometry.py,
    RandomResizedCrop): up to ten tries of area and log-uniform aspect, rounded; else the largest
    centred window whose aspect is allowed."""
    w, h = widths.astype(np.float64), heights.astype(np.float64)
    low, high = config.crop_scale
    area = (w * h)[:, None] * (
        low + (high - low) * uniform(keys[:, None], _CROP, 0, np.arange(CROP_TRIES))
    )
    log_low, log_high = (math.log(r) for r in config.crop_ratio)
    aspect = np.exp(
        log_low + (log_high - log_low) * uniform(keys[:, None], _CROP, 1, np.arange(CROP_TRIES))
    )
    tries_w = np.rint(np.sqrt(area * aspect))
    tries_h = np.rint(np.sqrt(area / aspect))
    fits = (tries_w > 0) & (tries_h > 0) & (tries_w <= w[:, None]) & (tries_h <= h[:, None])
    rows = np.arange(len(keys))
    first = fits.argmax(1)
    clipped = np.clip(w / h, *config.crop_ratio)
    found = fits.any(1)
    crop_w = np.where(
        found, tries_w[rows, first], np.where(w / h > clipped, np.rint(h * clipped), w)
    )
    crop_h = np.where(
        found, tries_h[rows, first], np.where(w / h < clipped, np.rint(w / clipped), h)
    )
    left = np.where(found, np.floor(uniform(keys, _CROP, 2) * (w - crop_w + 1)), (w - crop_w) // 2)
    top = np.where(found, np.floor(uniform(keys, _CROP, 3) * (h - crop_h + 1)), (h - crop_h) // 2)
    return np.stack([left, top, np.maximum(crop_w, 1), np.maximum(crop_h, 1)], 1).astype(np.int64)


def _simple_crops(
    keys: NDArray[np.uint64], widths: NDArray, heights: NDArray, size: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """DeiT III's simple random crop (facebookresearch/deit:augment.py): resize until `size` is just
    covered, reflect four pixels beyond each border, take a window of `size`. Returns windows (B, 4)
    as `draw_crops`, and how far (B, 2), in x and y, each view lies beyond the image, in pixels of
    `size`. Windows begin at whole pixels of the original, the nearest to the drawn one.
    """
    height, width = size
    w = widths.astype(np.float64)
    h = heights.astype(np.float64)
    starts = []
    crops = []
    shifts = []
    for axis, (own, side, whole) in enumerate(
        ((w, width, np.floor(w * height / h)), (h, height, np.floor(h * width / w)))
    ):
        covered = np.maximum(whole, side)
        drawn = (
            np.floor(uniform(keys, _CROP, 4, axis) * (covered + 2 * SIMPLE_CROP_MARGIN - side + 1))
            - SIMPLE_CROP_MARGIN
        )
        inside = np.clip(drawn, 0, covered - side)
        crop = np.clip(np.rint(np.minimum(w / width, h / height) * side), 1, own)
        starts.append(np.rint(inside * (own - crop) / np.maximum(covered - side, 1)))
        crops.append(crop)
        shifts.append(drawn - inside)
    return np.stack([*starts, *crops], 1).astype(np.int64), np.stack(shifts, 1)


# --- the table ------------------------------------------------------------------------------------


def draw_table(
    config: AugmentConfig,
    keys: NDArray[np.uint64],
    widths: NDArray,
    heights: NDArray,
    size: tuple[int, int],
) -> NDArray[np.float32]:
    """The table (B, K) for images of `size` = (height, width) out of originals of `widths` x
    `heights` pixels, mixing columns at rest (`draw_mix` fills them)."""
    layout = table_layout(config)
    table = np.zeros((len(keys), layout.width), dtype=np.float32)
    table[:, FLIP] = uniform(keys, _FLIP) < config.hflip_prob
    table[:, LAMBDA] = 1.0
    drawn = [_draw_randaugment(config, keys, layer) for layer in range(config.randaugment_layers)]
    if config.three_augment:
        op = np.floor(uniform(keys, _THREE_AUGMENT, 0) * len(OP_NAMES["three_augment"]))
        drawn.append(
            [
                op,
                BLUR_RADIUS[0]
                + (BLUR_RADIUS[1] - BLUR_RADIUS[0]) * uniform(keys, _THREE_AUGMENT, 1),
            ]
        )
    drawn += _draw_jitter(config, keys)
    for op_column, columns in zip(layout.op_columns, drawn, strict=True):
        table[:, op_column.column : op_column.column + len(columns)] = np.stack(columns, 1)
    if layout.shift is not None:
        table[:, layout.shift : layout.shift + 2] = _simple_crops(keys, widths, heights, size)[1]
    if layout.erase is not None:
        columns = [*_draw_erasing(config, keys, size), *_draw_noise(config, keys)]
        table[:, layout.erase : layout.erase + len(columns)] = np.stack(columns, 1)
    return table


def _draw_randaugment(config: AugmentConfig, keys: NDArray[np.uint64], layer: int) -> list[NDArray]:
    """The columns of one layer of RandAugment (Cubuk et al. 2020): operation, signed strength on
    the set's own scale, cutout's place."""
    chosen, applied, negated, u1, u2 = (uniform(keys, _RANDAUGMENT, layer, i) for i in range(5))
    op = np.floor(chosen * len(OP_NAMES[config.randaugment_ops]))
    strength = np.full(len(keys), config.randaugment_magnitude)
    place: list[NDArray] = []
    if config.randaugment_ops == "timm":
        std = 0.5 if config.randaugment_magnitude_std is None else config.randaugment_magnitude_std
        gauss = np.sqrt(-2.0 * np.log(1.0 - u1)) * np.cos(2.0 * np.pi * u2)
        strength = np.clip(strength + std * gauss, 0.0, 10.0)
        op = np.where(applied < RANDAUGMENT_PROB, op, -1)
    elif config.randaugment_ops == "big_vision":
        place = [uniform(keys, _RANDAUGMENT, layer, 5), uniform(keys, _RANDAUGMENT, layer, 6)]
    return [op, np.where(negated < 0.5, -strength, strength), *place]


def _draw_jitter(config: AugmentConfig, keys: NDArray[np.uint64]) -> list[list[NDArray]]:
    """For each of the operations that are on, in an order drawn anew for each sample: its number
    and its factor (hue: its shift).

    torchvision/transforms/v2/_color.py, ColorJitter: factors are uniform in [max(0, 1 - amount), 1
    + amount], shifts in [-amount, amount].
    """
    ops = np.array(
        [op for op, amount in enumerate(config.color_jitter) if amount > 0], dtype=np.int64
    )
    factors = np.empty((len(ops), len(keys)))
    for row, op in enumerate(ops):
        amount = config.color_jitter[op]
        low, high = (
            (-amount, amount)
            if OP_NAMES["color_jitter"][op] == "hue"
            else (max(0.0, 1.0 - amount), 1.0 + amount)
        )
        factors[row] = low + (high - low) * uniform(keys, _JITTER, 0, op)
    order = np.argsort(uniform(keys, _JITTER, 1, ops[:, None]), axis=0)
    return [[ops[slot], np.take_along_axis(factors, slot[None], 0)[0]] for slot in order]


def _draw_erasing(
    config: AugmentConfig, keys: NDArray[np.uint64], size: tuple[int, int]
) -> list[NDArray]:
    """Top, bottom, left, right of the erased box (Zhong et al. 2020), in pixels; 0 where nothing is
    erased.

    timm/data/random_erasing.py, RandomErasing with one box: up to ten tries of area and log-uniform
    aspect (height over width), rounded; the first that is smaller than the image on both sides.
    """
    height, width = size
    low, high = config.erasing_area
    area = (
        height
        * width
        * (low + (high - low) * uniform(keys[:, None], _ERASE, 0, np.arange(ERASE_TRIES)))
    )
    log_low, log_high = (math.log(r) for r in config.erasing_aspect)
    aspect = np.exp(
        log_low + (log_high - log_low) * uniform(keys[:, None], _ERASE, 1, np.arange(ERASE_TRIES))
    )
    tries_h = np.rint(np.sqrt(area * aspect))
    tries_w = np.rint(np.sqrt(area / aspect))
    fits = (tries_h < height) & (tries_w < width)
    rows = np.arange(len(keys))
    first = fits.argmax(1)
    erased = fits.any(1) & (uniform(keys, _ERASE, 2) < config.erasing_prob)
    box_h, box_w = (np.where(erased, tries[rows, first], 0) for tries in (tries_h, tries_w))
    top = np.where(erased, np.floor(uniform(keys, _ERASE, 3) * (height - box_h + 1)), 0)
    left = np.where(erased, np.floor(uniform(keys, _ERASE, 4) * (width - box_w + 1)), 0)
    return [top, top + box_h, left, left + box_w]


def _draw_noise(config: AugmentConfig, keys: NDArray[np.uint64]) -> list[NDArray]:
    """What fills the box: a standard normal colour, or the number from which the device makes the
    noise of each pixel."""
    if config.erasing_mode == "rand":
        u1, u2 = (uniform(keys[:, None], _ERASE, i, np.arange(3)) for i in (5, 6))
        return list((np.sqrt(-2.0 * np.log(1.0 - u1)) * np.cos(2.0 * np.pi * u2)).T)
    return [np.floor(uniform(keys, _ERASE, 7) * 2**24)] if config.erasing_mode == "pixel" else []


# --- mixing ---------------------------------------------------------------------------------------


def mixes(config: AugmentConfig) -> bool:
    """Whether MixUp or CutMix is on."""
    return config.mixup_alpha > 0 or config.cutmix_alpha > 0


def partners(config: AugmentConfig, num_rows: int) -> NDArray[np.int64]:
    """For each row the row it mixes with: the next of its group, in a ring; with `pair` the first
    with the last, and so on inwards."""
    size = config.mix_group_size
    rows = np.arange(num_rows)
    inside = rows % size
    return (
        rows - inside + (size - 1 - inside if config.mixup_mode == "pair" else (inside + 1) % size)
    )


def draw_mix(
    config: AugmentConfig,
    table: NDArray[np.float32],
    weights: NDArray[np.float32],
    seed: int,
    position: int,
    first_row: int,
    size: tuple[int, int],
) -> None:
    """Fill the mixing columns of `table` (B, K) for rows [first_row, first_row + B) of the global
    batch at `position`.

    MixUp (Zhang et al. 2018) and CutMix (Yun et al. 2019). Lambda, box and the choice between the
    two are shared by a group, a pair, or each row's own (`mixup_mode`). `size` = (height, width) of
    the images. A row whose partner has weight 0 (it could not be read) stays unmixed.
    """
    if not mixes(config):
        return
    assert first_row % config.mix_group_size == 0 == len(table) % config.mix_group_size, (
        "groups must not be torn apart"
    )
    row = first_row + np.arange(len(table))
    partner = partners(config, len(table))
    if config.mixup_mode == "batch":
        keys = fold(seed, position, row // config.mix_group_size, _MIX)
    elif config.mixup_mode == "pair":
        keys = fold(seed, position, np.minimum(row, first_row + partner), _MIX_PAIR)
    else:
        keys = fold(seed, position, row, _MIX_ROW)
    both = config.mixup_alpha > 0 and config.cutmix_alpha > 0
    cutmix = (
        uniform(keys, 0) < config.cutmix_switch_prob
        if both
        else np.full(len(table), config.cutmix_alpha > 0)
    )
    mixup_lambda, cutmix_lambda = (
        _symmetric_beta(alpha, fold(keys, 1)) if alpha else np.ones(len(table))
        for alpha in (config.mixup_alpha, config.cutmix_alpha)
    )
    height, width = size
    cut = np.sqrt(1.0 - cutmix_lambda)
    middle_y = np.floor(uniform(keys, 2) * height)
    middle_x = np.floor(uniform(keys, 3) * width)
    half_h = np.floor(cut * height) // 2
    half_w = np.floor(cut * width) // 2
    top, bottom = np.clip(middle_y - half_h, 0, height), np.clip(middle_y + half_h, 0, height)
    left, right = np.clip(middle_x - half_w, 0, width), np.clip(middle_x + half_w, 0, width)
    kept = 1.0 - (bottom - top) * (right - left) / (height * width)
    mixed = (uniform(keys, 4) < config.mix_prob) & (weights[partner] > 0)
    table[:, LAMBDA] = np.where(mixed, np.where(cutmix, kept, mixup_lambda), 1.0)
    table[:, CUTMIX] = cutmix & mixed
    for column, values in ((TOP, top), (BOTTOM, bottom), (LEFT, left), (RIGHT, right)):
        table[:, column] = np.where(cutmix & mixed, values, 0)


def _symmetric_beta(alpha: float, keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Beta(alpha, alpha), one for each key: Johnk's method (1964), whose rejections only move on a
    counter of the same key."""
    out = np.empty(len(keys))
    todo = np.arange(len(keys))
    attempt = 0
    while len(todo):
        x, y = (
            np.maximum(uniform(keys[todo], attempt, i), 1e-300) ** (1.0 / alpha) for i in range(2)
        )
        accept = (x + y <= 1.0) & (x + y > 0.0)
        out[todo[accept]] = x[accept] / (x[accept] + y[accept])
        todo = todo[~accept]
        attempt = attempt + 1
    return out


# --- in words -------------------------------------------------------------------------------------


def describe(config: AugmentConfig, row: NDArray[np.float32]) -> list[str]:
    """What a row (K,) of the table does to its image, mixing apart, in the order it is done:
    "flip", "rotate -8.7", "erase"."""
    layout = table_layout(config)
    words = []
    if layout.shift is not None and row[layout.shift : layout.shift + 2].any():
        words.append("shift {:+.0f} {:+.0f}".format(*row[layout.shift : layout.shift + 2]))
    words += ["flip"] * bool(row[FLIP])
    for op_column in layout.op_columns:
        op, strength = row[op_column.column : op_column.column + 2]
        if op >= 0:
            name = OP_NAMES[op_column.op_set][int(op)]
            words.append(
                name
                if name in _WITHOUT_STRENGTH.get(op_column.op_set, _PARAMETERLESS)
                else f"{name} {strength:.2g}"
            )
    if layout.erase is not None and row[layout.erase + 1] > row[layout.erase]:
        words.append("erase")
    return words


_PARAMETERLESS = ("identity", "auto_contrast", "equalize", "invert")
_WITHOUT_STRENGTH = {"three_augment": ("grayscale", "solarize")}
