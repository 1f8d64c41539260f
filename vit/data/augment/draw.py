"""Draw the random numbers for augmentation on the host: crops, operations and mixing.

A counter-based hash of (seed, epoch, sample, copy) gives each sample a key. The key determines the
crop for the decoder and one row of a small float table (B, K), the augmentation table.
`vit.data.augment.apply` applies this table on the device (see `vit.data.augment.table` for its
columns). Mixing depends on (seed, position) and on groups, pairs or rows of the *global* batch.
Augmentation therefore does not depend on the number of ranks, workers or devices.

Published random numbers never change. `tests/data/augment/golden_draws.json` contains the recipes'
random numbers. New random numbers need a new constant below. The length of an operation set affects
the random numbers, so a new operation needs a new set.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vit.config.schema import AugmentConfig
from vit.data.augment.policies import sub_policies
from vit.data.augment.table import (
    BOTTOM,
    CUTMIX,
    FLIP,
    LAMBDA,
    LEFT,
    NO_OP,
    OP_NAMES,
    RIGHT,
    TOP,
    table_layout,
)
from vit.system.hashing import fold, uniform

# Each use of random numbers hashes its own constant into the key. The integers after the constant,
# such as 2 in `uniform(keys, _CROP, 2)`, are counters: each counter of a use gives another random
# number. Never change a constant or a counter.
_CROP, _FLIP, _RANDAUGMENT, _MIX, _THREE_AUGMENT, _JITTER, _ERASE, _MIX_PAIR, _MIX_ROW = range(9)
_AUTO_AUGMENT = 9

RANDAUGMENT_PROB = 0.5
"""The probability that timm applies a selected operation; torchvision and big_vision always apply
it."""

TRIVIAL_AUGMENT_BINS = 31
"""The number of equally likely strengths in TrivialAugment (`num_magnitude_bins` in
torchvision)."""
SIMPLE_CROP_MARGIN = 4
"""The width in pixels of the margin that the simple and the padded crop add to the resized image
(DeiT III; torchvision's `RandomCrop(32, padding=4)` of CIFAR recipes)."""
BLUR_RADIUS = (0.1, 2.0)
"""The range of the blur radius in pixels for 3-Augment's Gaussian blur."""
NUM_TRIES = 10
"""The maximum number of attempts to draw a box that fits in the image, as in torchvision and
timm."""


def sample_keys(
    seed: int, epoch: int, ids: NDArray[np.int64], copies: NDArray[np.int64] | int = 0
) -> NDArray[np.uint64]:
    """Return a key, shape (B,), for each (sample, copy) pair.

    The key seeds all random numbers of the pair in an epoch.
    """
    return fold(seed, epoch, ids, copies)


def _uniform_between(
    bounds: tuple[float, float], key: ArrayLike, *index: ArrayLike
) -> NDArray[np.float64]:
    low, high = bounds
    return low + (high - low) * uniform(key, *index)


def _normal(u1: NDArray[np.float64], u2: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert two uniform numbers to a standard normal number (Box and Muller 1958)."""
    return np.sqrt(-2.0 * np.log(1.0 - u1)) * np.cos(2.0 * np.pi * u2)


def _draw_boxes(
    keys: NDArray[np.uint64],
    stream: int,
    whole_area: NDArray[np.float64] | float,
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw the side lengths (B, NUM_TRIES) of random boxes; aspect = first side / second side.

    Args:
        area: The range of the box's area as a fraction of `whole_area`. The fraction is drawn
            uniformly.
        aspect: The range of the aspect ratio, which is drawn log-uniformly.
    """
    tries = np.arange(NUM_TRIES)
    log_aspect = (math.log(aspect[0]), math.log(aspect[1]))
    areas = whole_area * _uniform_between(area, keys[:, None], stream, 0, tries)
    aspects = np.exp(_uniform_between(log_aspect, keys[:, None], stream, 1, tries))
    return np.rint(np.sqrt(areas * aspects)), np.rint(np.sqrt(areas / aspects))


# --- crops ----------------------------------------------------------------------------------------


def draw_crops(
    config: AugmentConfig,
    keys: NDArray[np.uint64],
    widths: NDArray,
    heights: NDArray,
    size: tuple[int, int],
) -> NDArray[np.int64]:
    """Return crop windows (B, 4) of the stored images: left, top, width, height in pixels.

    The decoder resizes these windows to `size` = (height, width).
    """
    if config.crop != "random_resized":
        return _simple_crops(keys, widths, heights, size)[0]
    return _random_resized_crops(config, keys, widths, heights)


def _random_resized_crops(
    config: AugmentConfig, keys: NDArray[np.uint64], widths: NDArray, heights: NDArray
) -> NDArray[np.int64]:
    """Draw the crops of Szegedy et al. 2015 with torchvision's details.

    As in RandomResizedCrop (transforms/v2/_geometry.py), up to ten boxes are drawn, with uniform
    area and log-uniform aspect, and rounded to pixels. If no box fits, the crop is the largest
    centered window with an allowed aspect ratio.
    """
    w, h = widths.astype(np.float64), heights.astype(np.float64)
    tries_w, tries_h = _draw_boxes(
        keys, _CROP, (w * h)[:, None], config.crop_scale, config.crop_ratio
    )
    fits = (tries_w > 0) & (tries_h > 0) & (tries_w <= w[:, None]) & (tries_h <= h[:, None])
    has_fit = fits.any(1)
    first_fit = np.arange(len(keys)), fits.argmax(1)

    # If no box fits, use the largest window with an allowed aspect ratio.
    nearest_ratio = np.clip(w / h, *config.crop_ratio)
    widest = np.where(w / h > nearest_ratio, np.rint(h * nearest_ratio), w)
    tallest = np.where(w / h < nearest_ratio, np.rint(w / nearest_ratio), h)
    crop_w = np.where(has_fit, tries_w[first_fit], widest)
    crop_h = np.where(has_fit, tries_h[first_fit], tallest)

    left = np.where(
        has_fit, np.floor(uniform(keys, _CROP, 2) * (w - crop_w + 1)), (w - crop_w) // 2
    )
    top = np.where(has_fit, np.floor(uniform(keys, _CROP, 3) * (h - crop_h + 1)), (h - crop_h) // 2)
    return np.stack([left, top, np.maximum(crop_w, 1), np.maximum(crop_h, 1)], 1).astype(np.int64)


def _simple_crops(
    keys: NDArray[np.uint64], widths: NDArray, heights: NDArray, size: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw DeiT III's simple random crops (facebookresearch/deit:augment.py).

    The image is resized until it just covers `size` and padded by four pixels on each side. A
    window of `size` is then cut out. Returns windows (B, 4) like `draw_crops`, and how far each
    view extends beyond the image in x and y, (B, 2), in pixels of the view. Windows begin at the
    stored pixel that is nearest to the drawn position.
    """
    height, width = size
    w, h = widths.astype(np.float64), heights.astype(np.float64)

    stored_per_pixel = np.minimum(w / width, h / height)
    starts = []
    crops = []
    shifts = []
    # For x and y: the stored side, the side of the view, and the resized side if the image's other
    # side is resized to the view's other side.
    axes = ((w, width, np.floor(w * height / h)), (h, height, np.floor(h * width / w)))
    for axis, (stored, side, resized) in enumerate(axes):
        covered = np.maximum(resized, side)
        num_places = covered + 2 * SIMPLE_CROP_MARGIN - side + 1
        place = np.floor(uniform(keys, _CROP, 4, axis) * num_places) - SIMPLE_CROP_MARGIN
        # The decoder crops the part inside the image. The device fills the part outside.
        inside = np.clip(place, 0, covered - side)
        shifts.append(place - inside)

        # Convert the window from pixels of the view to stored pixels.
        crop = np.clip(np.rint(stored_per_pixel * side), 1, stored)
        crops.append(crop)
        starts.append(np.rint(inside * (stored - crop) / np.maximum(covered - side, 1)))

    return np.stack([*starts, *crops], 1).astype(np.int64), np.stack(shifts, 1)


# --- the table ------------------------------------------------------------------------------------


def draw_table(
    config: AugmentConfig,
    keys: NDArray[np.uint64],
    widths: NDArray,
    heights: NDArray,
    size: tuple[int, int],
) -> NDArray[np.float32]:
    """Return the augmentation table (B, K) for images of `size` = (height, width), without mixing.

    widths, heights: sizes of the stored images in pixels. `draw_mix` fills the mixing columns.
    """
    layout = table_layout(config)
    table = np.zeros((len(keys), layout.width), dtype=np.float32)
    table[:, FLIP] = uniform(keys, _FLIP) < config.hflip_prob
    table[:, LAMBDA] = 1.0

    drawn = [_draw_randaugment(config, keys, layer) for layer in range(config.randaugment_layers)]
    drawn += _draw_auto_augment(config, keys)
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
    """Draw one layer of RandAugment (Cubuk et al. 2020).

    The columns are the operation, its signed strength on the scale of the operation set, and the
    cutout position.
    """
    chosen, applied, negated, u1, u2 = (uniform(keys, _RANDAUGMENT, layer, i) for i in range(5))
    op = np.floor(chosen * len(OP_NAMES[config.randaugment_ops]))

    strength = np.full(len(keys), config.randaugment_magnitude)
    place: list[NDArray] = []
    if config.randaugment_ops in ("timm", "timm_inc0"):
        # The default of `augment.magnitude_std` for these operations is 0.5.
        std = 0.5 if config.magnitude_std is None else config.magnitude_std
        strength = np.clip(strength + std * _normal(u1, u2), 0.0, 10.0)
        op = np.where(applied < RANDAUGMENT_PROB, op, NO_OP)
    elif config.randaugment_ops == "big_vision":
        place = [uniform(keys, _RANDAUGMENT, layer, 5), uniform(keys, _RANDAUGMENT, layer, 6)]
    return [op, np.where(negated < 0.5, -strength, strength), *place]


def _draw_auto_augment(config: AugmentConfig, keys: NDArray[np.uint64]) -> list[list[NDArray]]:
    """Draw the operations of 3-Augment (DeiT III), TrivialAugment (Mueller and Hutter 2021) or
    AutoAugment.

    Returns the index and the signed strength of each operation, in the order of application.
    3-Augment and TrivialAugment draw one operation and one strength for each image.
    """
    if config.auto_augment is None:
        return []

    if config.auto_augment == "three_augment":
        op = np.floor(uniform(keys, _THREE_AUGMENT, 0) * len(OP_NAMES["three_augment"]))
        return [[op, _uniform_between(BLUR_RADIUS, keys, _THREE_AUGMENT, 1)]]

    if config.auto_augment == "ta_wide":
        op = np.floor(uniform(keys, _AUTO_AUGMENT, 0) * len(OP_NAMES["ta_wide"]))
        strength = np.floor(uniform(keys, _AUTO_AUGMENT, 1) * TRIVIAL_AUGMENT_BINS)
        return [[op, np.where(uniform(keys, _AUTO_AUGMENT, 2) < 0.5, -strength, strength)]]

    return _draw_policy(config.auto_augment, config.magnitude_std or 0.0, keys)


def _draw_policy(name: str, std: float, keys: NDArray[np.uint64]) -> list[list[NDArray]]:
    """Draw AutoAugment (Cubuk et al. 2019): one pair of operations from the policy `name`.

    Each operation of the pair is applied with its own probability. Otherwise, its index is NO_OP.
    std: the standard deviation of the strengths. See `_draw_auto_augment` for the result.
    """
    pairs = sub_policies(name)
    pair = np.floor(uniform(keys, _AUTO_AUGMENT, 0) * len(pairs.ops)).astype(np.int64)

    drawn: list[list[NDArray]] = []
    for slot in range(2):
        # TrivialAugment uses the counters 1 and 2.
        applied, negated, u1, u2 = (uniform(keys, _AUTO_AUGMENT, 3, slot, i) for i in range(4))
        strength = np.clip(pairs.strengths[pair, slot] + std * _normal(u1, u2), 0.0, 10.0)
        op = np.where(applied < pairs.probs[pair, slot], pairs.ops[pair, slot], NO_OP)
        drawn.append([op, np.where(negated < 0.5, -strength, strength)])
    return drawn


def _draw_jitter(config: AugmentConfig, keys: NDArray[np.uint64]) -> list[list[NDArray]]:
    """Draw a random order and random factors for the enabled jitter operations of each sample.

    Returns each operation's index and its factor (for hue, its shift). As in torchvision's
    ColorJitter (transforms/v2/_color.py), factors are uniform in [max(0, 1 - amount), 1 + amount]
    and shifts in [-amount, amount].
    """
    ops = np.flatnonzero(np.array(config.color_jitter) > 0)
    factors = np.empty((len(ops), len(keys)))
    for row, op in enumerate(ops):
        amount = config.color_jitter[op]
        is_hue = OP_NAMES["color_jitter"][op] == "hue"
        bounds = (-amount, amount) if is_hue else (max(0.0, 1.0 - amount), 1.0 + amount)
        factors[row] = _uniform_between(bounds, keys, _JITTER, 0, op)

    order = np.argsort(uniform(keys, _JITTER, 1, ops[:, None]), axis=0)
    return [[ops[slot], np.take_along_axis(factors, slot[None], 0)[0]] for slot in order]


def _draw_erasing(
    config: AugmentConfig, keys: NDArray[np.uint64], size: tuple[int, int]
) -> list[NDArray]:
    """Draw the box to erase (Zhong et al. 2020): top, bottom, left and right in pixels, all 0 if
    nothing is erased.

    As in timm/data/random_erasing.py with one box, up to ten boxes with uniform area and
    log-uniform aspect ratio (height / width) are drawn and rounded to pixels. The first box that is
    smaller than the image on both sides is used.
    """
    height, width = size
    tries_h, tries_w = _draw_boxes(
        keys, _ERASE, height * width, config.erasing_area, config.erasing_aspect
    )
    fits = (tries_h < height) & (tries_w < width)
    first_fit = np.arange(len(keys)), fits.argmax(1)
    erased = fits.any(1) & (uniform(keys, _ERASE, 2) < config.erasing_prob)

    box_h = np.where(erased, tries_h[first_fit], 0)
    box_w = np.where(erased, tries_w[first_fit], 0)
    top = np.where(erased, np.floor(uniform(keys, _ERASE, 3) * (height - box_h + 1)), 0)
    left = np.where(erased, np.floor(uniform(keys, _ERASE, 4) * (width - box_w + 1)), 0)
    return [top, top + box_h, left, left + box_w]


def _draw_noise(config: AugmentConfig, keys: NDArray[np.uint64]) -> list[NDArray]:
    """Draw the columns that define the fill of the erased box; see `TableLayout.num_noise`."""
    if config.erasing_mode == "rand":
        u1, u2 = (uniform(keys[:, None], _ERASE, i, np.arange(3)) for i in (5, 6))
        return list(_normal(u1, u2).T)
    if config.erasing_mode == "pixel":
        return [np.floor(uniform(keys, _ERASE, 7) * 2**24)]
    return []


# --- mixing ---------------------------------------------------------------------------------------


def mixes(config: AugmentConfig) -> bool:
    """Return whether MixUp or CutMix is enabled."""
    return config.mixup_alpha > 0 or config.cutmix_alpha > 0


def partners(config: AugmentConfig, num_rows: int) -> NDArray[np.int64]:
    """Return each row's partner, which is the row that is mixed into it.

    By default, each row is mixed with the next row of its group, and the last row with the first.
    With `mixup_mode: pair`, the first row is mixed with the last, the second with the second to
    last, and so on.
    """
    size = config.mix_group_size
    rows = np.arange(num_rows)
    inside = rows % size
    partner = size - 1 - inside if config.mixup_mode == "pair" else (inside + 1) % size
    return rows - inside + partner


def draw_mix(
    config: AugmentConfig,
    table: NDArray[np.float32],
    weights: NDArray[np.float32],
    seed: int,
    position: int,
    first_row: int,
    size: tuple[int, int],
    epoch: int,
) -> None:
    """Fill the mixing columns of `table` (B, K) for MixUp (Zhang et al. 2018) and CutMix (Yun et
    al. 2019).

    `table` describes rows [first_row, first_row + B) of the global batch at `position`, in `epoch`
    (counted from 0), with images of `size` = (height, width). Lambda, the box and the method are
    drawn per group, pair or row (`mixup_mode`). A row stays unmixed if its partner has weight 0
    because it could not be decoded.
    """
    is_over = config.mixup_off_epoch is not None and epoch >= config.mixup_off_epoch
    if not mixes(config) or is_over:
        return
    assert first_row % config.mix_group_size == 0 == len(table) % config.mix_group_size, (
        "a group must not be divided"
    )

    num_rows = len(table)
    partner = partners(config, num_rows)
    keys = _mix_keys(config, seed, position, first_row, partner)
    cutmix = np.full(num_rows, config.cutmix_alpha > 0)
    mixup_lambda = cutmix_lambda = np.ones(num_rows)
    if config.mixup_alpha > 0:
        mixup_lambda = _symmetric_beta(config.mixup_alpha, fold(keys, 1))
        cutmix &= uniform(keys, 0) < config.cutmix_switch_prob
    if config.cutmix_alpha > 0:
        cutmix_lambda = _symmetric_beta(config.cutmix_alpha, fold(keys, 1))

    top, bottom, left, right = _draw_cut(keys, cutmix_lambda, size)
    # Compute lambda from the box after clipping it at the border, as in the paper's code.
    area_outside = 1.0 - (bottom - top) * (right - left) / (size[0] * size[1])

    # A partner of weight 0 has a black image that contradicts its label, so do not mix with it.
    mixed = (uniform(keys, 4) < config.mix_prob) & (weights[partner] > 0)
    table[:, LAMBDA] = np.where(mixed, np.where(cutmix, area_outside, mixup_lambda), 1.0)
    table[:, CUTMIX] = cutmix & mixed
    for column, values in ((TOP, top), (BOTTOM, bottom), (LEFT, left), (RIGHT, right)):
        table[:, column] = np.where(cutmix & mixed, values, 0)


def _mix_keys(
    config: AugmentConfig, seed: int, position: int, first_row: int, partner: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Return the key for mixing each row, (B,), which its group, its pair or the row determines.

    Keys are computed from rows of the global batch, so they do not depend on ranks and workers.
    """
    row = first_row + np.arange(len(partner))
    if config.mixup_mode == "batch":
        return fold(seed, position, row // config.mix_group_size, _MIX)
    if config.mixup_mode == "pair":
        # Both partners must get the same random numbers, so compute the key from the lower row of
        # the pair.
        return fold(seed, position, np.minimum(row, first_row + partner), _MIX_PAIR)
    return fold(seed, position, row, _MIX_ROW)


def _draw_cut(
    keys: NDArray[np.uint64], share_outside: NDArray[np.float64], size: tuple[int, int]
) -> list[NDArray[np.float64]]:
    """Draw CutMix's boxes around random pixels: top, bottom, left and right, each (B,).

    `share_outside` is the fraction of the image's area that is outside a box before the box is
    clipped at the image border.
    """
    cut = np.sqrt(1.0 - share_outside)
    borders = []
    for counter, side in enumerate(size, 2):  # `draw_mix` uses the counters 0, 1 and 4
        middle = np.floor(uniform(keys, counter) * side)
        half = np.floor(cut * side) // 2
        borders += [np.clip(middle - half, 0, side), np.clip(middle + half, 0, side)]
    return borders


def _symmetric_beta(alpha: float, keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Draw from Beta(alpha, alpha) for each key by Johnk's method (1964).

    Two uniform numbers u and v give x = u ** (1 / alpha) and y = v ** (1 / alpha). If x + y is at
    most 1, x / (x + y) has this distribution; otherwise, two more numbers are drawn. A rejection
    advances only its own key's counter, so keys do not affect each other.
    """
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
        attempt += 1

    return out
