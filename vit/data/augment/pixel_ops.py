"""Arithmetic of pixels in batches, each sample with its own argument.

Levels are whole numbers 0..255. Images (B, C, H, W) and tables of levels (B, C, 256) are uint8 or
float32, and so is what comes out, as the docstrings say; arguments are (B, 1, 1, 1) float32.
`to_levels` clamps to 0..255 and cuts fractions off, as Pillow does; an operation that rounds does
so itself. None draws random numbers, waits for the device or branches on a value: rows do not
affect each other.

Equal to Pillow on a CPU, to the level, unless the docstring of an operation says otherwise; a GPU
may differ by one level where the exact result is an integer.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = torch.arange(256, dtype=torch.float32)
"""All of them, on the host: what an operation makes of them is its table."""


def to_levels(images: Tensor) -> Tensor:
    """Convert floats to uint8: clamp to 0..255, cut fractions off."""
    return images.clamp(0.0, 255.0).to(torch.uint8)


# --- levels by themselves: images or `LEVELS`, float32 --------------------------------------------


def invert(images: Tensor) -> Tensor:
    """Return the negative."""
    return 255.0 - images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the `bits` highest of 8 bits; 0: black."""
    unit = torch.exp2(8.0 - bits)
    return (images / unit).floor() * unit


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert levels of `threshold` and more."""
    return torch.where(images < threshold, images, 255.0 - images)


def solarize_add(images: Tensor, addition: Tensor) -> Tensor:
    """Brighten the darker half of the range by `addition` levels."""
    return torch.where(images < 128.0, (images + addition).clamp(max=255.0), images)


# --- tables of levels from what an image has ------------------------------------------------------


def auto_contrast_table(levels: Tensor, highest: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Write tables that stretch each channel to 0..255 into `out` (B, C, 256) uint8.

    levels: (B, C, H * W) int64. highest: (B, C, 1), of `levels`. dtype: in which it is computed:
    float64 by Pillow, whose highest level may come out as 254, float32 by TensorFlow.
    """
    pair = torch.add(highest, levels.amin(2, keepdim=True), alpha=256)
    stretched = _stretched(dtype, levels.device)
    torch.index_select(stretched, 0, pair.flatten(), out=out.view(-1, 256))


@lru_cache
def _stretched(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return all tables (65536, 256), by 256 times the lowest level plus the highest one."""
    every = torch.arange(256, dtype=dtype)
    tables = torch.empty(256, 256, 256, dtype=torch.uint8)
    for low, of_low in enumerate(tables):
        span = (every - low)[:, None]
        # `255.0 / tensor` would be a product with its reciprocal, which rounds differently.
        factors = torch.where(span > 0, torch.full_like(span, 255.0) / span, 1.0)
        offsets = torch.where(span > 0, low * factors, 0.0)
        # What it has for levels that the channel lacks does not matter.
        of_low.copy_((every * factors - offsets).clamp_(0.0, 255.0))
    return tables.view(-1, 256).to(device)


def _range(stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if torch.compiler.is_compiling():  # it costs nothing within a graph
        return torch.arange(stop, dtype=dtype, device=device)
    return _kept_range(stop, dtype, device)


@lru_cache
def _kept_range(stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Made on the host: when `to` returns, it is there for all streams of a GPU. What one stream
    # makes and keeps, another could read before it is made.
    return torch.arange(stop, dtype=dtype).to(device)


def equalize_table(levels: Tensor, highest: Tensor, out: Tensor) -> None:
    """Write tables that equalize each channel's histogram into `out` (B, C, 256) uint8.

    levels: (B, C, H * W) int64. highest: (B, C, 1), of `levels`. With Pillow's rounding
    (PIL/ImageOps.py, equalize).
    """
    every = _range(256, torch.int64, levels.device)
    counts = torch.zeros(*levels.shape[:2], 257, device=levels.device, dtype=torch.int64)
    counts[..., 1:].scatter_add_(2, levels, every[1].expand_as(levels))
    below = counts.cumsum(2)[..., :256]  # number of pixels of lower levels
    step = below.gather(2, highest) // 255
    table = (below + step // 2) // step.clamp(min=1)
    # `minimum` casts as it writes, which `clamp` does not.
    torch.minimum(torch.where(step > 0, table, every), every[-1], out=out)


def look_up(tables: Tensor, levels: Tensor, out: Tensor) -> None:
    """Write what `tables` have for `levels` (B, C, H * W) int64 into uint8 images `out`."""
    torch.gather(tables, 2, levels, out=out.flatten(2))


# --- what images are blended with, and other colours: float32 -------------------------------------


def grey(images: Tensor) -> Tensor:
    """Return Pillow's luma (B, 1, H, W); grey images as they are."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, 1)
    half = _constant((0.5,), torch.float32, images.device)
    # Pillow's integer weights. All sums have at most 24 bits, so float32 is as exact.
    sums = torch.add(half, red, alpha=19595 / 65536).add_(green, alpha=38470 / 65536)
    return sums.add_(blue, alpha=7471 / 65536).floor_()


@lru_cache
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (1, C, 1, 1); anew for each batch it would be a host-device sync."""
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)


def tf_grey(images: Tensor) -> Tensor:
    """Do as tf.image.rgb_to_grayscale of uint8: its weights, times 255.5, fraction cut off."""
    weights = _constant((0.2989, 0.5870, 0.1140), torch.float32, images.device)
    red, green, blue = (images / 255.0).mul_(weights).split(1, 1)
    return (red + green).add_(blue).mul_(255.5).floor_()


def mean_level(grey: Tensor) -> Tensor:
    """Return the rounded mean (B, 1, 1, 1) of grey images (B, 1, H, W)."""
    # In double: a float32 sum over all pixels could round to a different level.
    return grey.mean((2, 3), keepdim=True, dtype=torch.float64).add_(0.5).floor_().float()


def smooth(images: Tensor, rounding: int, out: Tensor) -> None:
    """Do as Pillow's SMOOTH: a 3 x 3 mean whose middle counts five times, of whole levels.

    Written into `out`, like `images` but for its border of one pixel, which stays. `rounding`:
    thirteenths that are added to the mean before its fraction is cut off.
    """
    # A CPU pools 13 times as slowly as it adds, a GPU launches a quarter of the kernels.
    sum_of_nine = _added if images.device.type == "cpu" else _pooled
    sums = sum_of_nine(images).add_(images[:, :, 1:-1, 1:-1], alpha=4.0).add_(rounding)
    torch.div(sums, 13.0, rounding_mode="trunc", out=out[:, :, 1:-1, 1:-1])


def _added(images: Tensor) -> Tensor:
    """Return the sums of 3 x 3 pixels, (B, C, H - 2, W - 2)."""
    three = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
    return (three[..., :-2] + three[..., 1:-1]).add_(three[..., 2:])


def _pooled(images: Tensor) -> Tensor:
    """Do as `_added`, to the bit: sums of whole levels are exact."""
    return F.avg_pool2d(images, 3, stride=1, divisor_override=1)


def hue(images: Tensor, turns: Tensor) -> Tensor:
    """Turn the colour wheel by `turns` in -0.5..0.5; value and saturation stay.

    Equal to torchvision's on tensors up to one level (transforms/v2/functional/_color.py,
    adjust_hue_image); Pillow's own way has only 256 hues.
    """
    red, green, blue = images.split(1, 1)
    value = images.amax(1, keepdim=True)
    least = images.amin(1, keepdim=True)
    chroma = value - least
    safe = chroma.clamp(min=1.0)  # levels are whole: a chroma is 0 or at least 1
    sixths = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2.0 + (blue - red) / safe, 4.0 + (red - green) / safe),
    )
    # Each channel is `value` less the part of the chroma that its distance from the hue takes:
    # Smith 1978 without cases.
    turned = sixths + 6.0 * turns
    distances = (turned + _constant((5.0, 3.0, 1.0), torch.float32, images.device)).remainder_(6.0)
    taken = torch.minimum(distances, 4.0 - distances).clamp_(0.0, 1.0)
    return (value - chroma * taken) * (255.999 / 255.0)  # torchvision's way back to levels


def box_weights(radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of a pixel, its neighbours and theirs for `blur`, each like `radius`.

    Pillow's Gaussian of `radius` = 0..2 pixels is three box filters along each axis (Gwosdek et al.
    2011; BoxBlur.c), whose box reaches at most one full pixel, and a part of a second one.
    """
    variance = radius * radius / 3.0
    full = ((torch.sqrt(12.0 * variance + 1.0) - 1.0) / 2.0).floor()
    part = (
        (2 * full + 1)
        * (full * (full + 1) - 3.0 * variance)
        / (6.0 * (variance - (full + 1) * (full + 1)))
    )
    inner = 1.0 / (2.0 * (full + part) + 1.0)
    outer = (1.0 - (2.0 * full + 1.0) * inner) / 2.0
    return inner, torch.where(full > 0, inner, outer), torch.where(full > 0, outer, 0.0)


def blur(images: Tensor, middle: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """Blur three times along each axis with `box_weights`, rounded after each one.

    Up to three levels off Pillow at the few radii, such as 1, whose weights put sums just between
    two levels.
    """
    for axis in (3, 2):
        size = images.shape[axis]
        for _ in range(3):
            padded = F.pad(images, (2, 2, 0, 0) if axis == 3 else (0, 0, 2, 2), mode="replicate")
            left2, left1, right1, right2 = (padded.narrow(axis, at, size) for at in (0, 1, 3, 4))
            # In place, since new memory costs more than the sums.
            images = (
                (left1 + right1)
                .mul_(near)
                .add_((left2 + right2).mul_(far))
                .add_(images * middle)
                .add_(0.5)
                .floor_()
            )
    return images


# --- geometry -------------------------------------------------------------------------------------


def _mapped(matrix: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return (B, 2, H, W): where `matrix` (B, 6) maps (x, y): (a x + b y + c, d x + e y + f)."""
    rows = matrix.view(-1, 2, 3, 1, 1)
    # In this order: another one rounds differently.
    return (rows[:, :, 0] * x + rows[:, :, 1] * y[:, None]).add_(rows[:, :, 2])


@lru_cache
def _from_centre(side: int, device: torch.device) -> Tensor:
    return (torch.arange(side, dtype=torch.float32) - (side - 1) / 2).to(device)


def affine(images: Tensor, matrix: Tensor, fill: Tensor, out: Tensor | None = None) -> Tensor:
    """Take output pixel (x, y) from the point to which `matrix` (B, 6) maps it; outside: `fill`.

    Bilinear, of float32 images; points are measured from the centre. As Pillow's, up to one level
    off. `fill`: (B, C, 1, 1). out: where to write the result, such as `images`.
    """
    height, width = images.shape[-2:]
    at = _mapped(matrix, _from_centre(width, images.device), _from_centre(height, images.device))
    low = _constant((-width / 2, -height / 2), torch.float32, images.device)
    high = _constant((width / 2, height / 2), torch.float32, images.device)
    inside = ((at >= low) & (at < high)).all(1, keepdim=True)
    points = at.mul_(_constant((2.0 / width, 2.0 / height), torch.float32, images.device))
    warped = F.grid_sample(
        images,
        points.permute(0, 2, 3, 1),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    # A thousandth of a level more, or an exact level could come out below itself and be cut.
    return torch.where(inside, warped.add_(2.0**-10), fill, out=out)


def affine_nearest(
    images: Tensor, matrix: Tensor, fill: Tensor, out: Tensor | None = None
) -> Tensor:
    """Do as `affine`, but take the nearest pixel, with points measured from the first pixel.

    Of images of any dtype. Halves are rounded away from 0 (TensorFlow's
    ImageProjectiveTransformV3).
    """
    height, width = images.shape[-2:]
    x, y = (_range(side, torch.float32, images.device) for side in (width, height))
    at = _mapped(matrix, x, y)
    at_x, at_y = (at.abs() + 0.5).floor_().copysign_(at).unbind(1)
    in_x, in_y = at_x.clamp(0, width - 1), at_y.clamp(0, height - 1)
    inside = (in_x == at_x) & (in_y == at_y)
    nearest = torch.add(in_x, in_y, alpha=width).long()
    pixels = nearest.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    found = images.flatten(2).gather(2, pixels)
    return torch.where(inside[:, None], found.view_as(images), fill, out=out)


def shift_reflected(images: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Move the view by integer pixels (B,) int64; beyond the border the image is mirrored.

    Without its outermost pixel; any dtype.
    """
    height, width = images.shape[-2:]
    row, column = (_range(side, torch.int64, images.device) for side in (height, width))
    y, x = (
        (side - 1) - ((side - 1) - (at + offset[:, None]).abs()).abs()
        for side, at, offset in ((height, row, down), (width, column, right))
    )
    rows = _range(len(images), torch.int64, images.device).view(-1, 1, 1)
    # Indexing around a slice puts the channels last, which is the order of images in memory.
    return images[rows, :, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


def in_box(images: Tensor, box: Tensor) -> Tensor:
    """Return (B, 1, H, W) bool: which pixels are in `box` (B, 4) float32.

    Its columns: top, bottom, left, right; pixels in rows [top, bottom) and columns [left, right).
    """
    height, width = images.shape[-2:]
    at = _range(max(height, width), torch.float32, images.device)
    inside = (at >= box[:, 0::2, None]) & (at < box[:, 1::2, None])
    return (inside[:, 0, :height, None] & inside[:, 1, None, :width])[:, None]


def noise(seeds: Tensor, quantiles: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Return standard normal numbers (B, channels, height, width) float32.

    A pure function of `seeds` (B,) int32 and the position of the pixel. A 32-bit hash (lowbias32,
    Wellons 2018) serves two neighbouring pixels; its halves choose among the 65,536 `quantiles`,
    which reach to 4.2: a look-up is far cheaper than a logarithm and a cosine.
    """
    num = channels * height * width
    pairs = torch.arange(-(-num // 2), device=seeds.device, dtype=torch.int32)
    bits = _hash32(pairs ^ _hash32(seeds)[:, None])
    chosen = torch.stack([bits & 0xFFFF, (bits >> 16) & 0xFFFF], -1).flatten(1)[:, :num]
    return quantiles.index_select(0, chosen.flatten()).view(-1, channels, height, width)


def normal_quantiles(device: torch.device) -> Tensor:
    """Return (65536,) float32: what `noise` chooses from."""
    shares = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
    return torch.special.ndtri(shares).float().to(device)


def _hash32(x: Tensor) -> Tensor:
    # Products wrap; the masks make the arithmetic shifts of int32 logical ones.
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
