"""Pixel operations on batches, each sample with its own argument.

An operation gets images (B, C, H, W) float32 of integer grey levels 0..255 and arguments
(B, 1, 1, 1) float32, and returns float32 of the same shape. `to_levels` clamps to 0..255 and cuts
fractions off, as Pillow does; an operation that rounds does so itself. None draws random numbers,
waits for the device or branches on a value: rows do not affect each other.

Equal to Pillow on a CPU, to the level, unless the docstring of an operation says otherwise; a GPU
may differ by one level where the exact result is an integer.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


def to_levels(images: Tensor) -> Tensor:
    """Convert float images to uint8: clamp to 0..255, cut fractions off."""
    return images.clamp(0.0, 255.0).to(torch.uint8)


def grey(images: Tensor) -> Tensor:
    """Return (B, 1, H, W): Pillow's luma in its integer weights; grey images as they are."""
    if images.shape[1] == 1:
        return images
    # No tensor of the weights: creating one is a host-device sync. The sums are exact in float32.
    red, green, blue = images.split(1, 1)
    return ((19595.0 * red + 38470.0 * green + 7471.0 * blue + 32768.0) / 65536.0).floor()


def blend(other: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Return `other` at factor 0, `images` at 1, extrapolated above (in the order of Blend.c)."""
    return other + factor * (images - other)


# --- levels ---------------------------------------------------------------------------------------


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Scale brightness: black at 0, the image at 1."""
    return images * factor


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Scale contrast: the mean grey at 0, the image at 1."""
    # In double: a float32 sum over all pixels could round to a different level.
    mean = grey(images).double().mean((2, 3), keepdim=True)
    return blend((mean + 0.5).floor().float(), images, factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Scale colour: grey at 0, the image at 1."""
    return blend(grey(images), images, factor)


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
    distances = ((turned + channel).remainder(6.0) for channel in (5.0, 3.0, 1.0))
    taken = torch.cat([torch.minimum(d, 4.0 - d).clamp(0.0, 1.0) for d in distances], 1)
    return (value - chroma * taken) * (255.999 / 255.0)  # torchvision's way back to levels


def grayscale(images: Tensor) -> Tensor:
    """Make all channels grey."""
    return grey(images).expand_as(images)


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


def auto_contrast(images: Tensor) -> Tensor:
    """Stretch each channel to 0..255."""
    images = images.double()  # as Pillow: its highest level may come out as 254
    low = images.amin((2, 3), keepdim=True)
    high = images.amax((2, 3), keepdim=True)
    # `255.0 / tensor` would be a product with its reciprocal, which rounds differently.
    scale = torch.full_like(high, 255.0) / (high - low).clamp(min=1.0)
    return torch.where(high > low, (images * scale - low * scale).floor(), images).float()


def equalize(images: Tensor) -> Tensor:
    """Equalize each channel's histogram, with Pillow's rounding (PIL/ImageOps.py, equalize)."""
    flat = images.long().flatten(2)
    counts = torch.zeros(*flat.shape[:2], 256, device=images.device, dtype=torch.long)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    table = ((step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table.gather(2, flat), flat).float().view_as(images)


# --- neighbours -----------------------------------------------------------------------------------


def sharpness(images: Tensor, factor: Tensor, rounding: float = 0.5) -> Tensor:
    """Sharpen: smoothed at 0, the image at 1.

    Smoothing is Pillow's SMOOTH, a 3 x 3 mean whose middle counts five times, which leaves the
    border as it is. `rounding`: added to the mean before its fraction is cut off.
    """
    three = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
    nine = three[..., :-2] + three[..., 1:-1] + three[..., 2:]
    smoothed = images.clone()
    smoothed[:, :, 1:-1, 1:-1] = (
        (nine + 4.0 * images[:, :, 1:-1, 1:-1]) / 13.0 + rounding
    ).floor_()
    return blend(smoothed, images, factor)


def gaussian_blur(images: Tensor, radius: Tensor) -> Tensor:
    """Blur with a Gaussian of `radius` = 0..2 pixels, as Pillow does.

    Three box filters along each axis, rounded after each one (Gwosdek et al. 2011; BoxBlur.c). Up
    to three levels off at the few radii, such as 1, whose weights put sums just between two levels.
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
    # Up to radius 2 a box reaches at most one full pixel, and a part of a second one.
    near = torch.where(full > 0, inner, outer)
    far = torch.where(full > 0, outer, 0.0)
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
                .add_(images * inner)
                .add_(0.5)
                .floor_()
            )
    return images


# --- geometry -------------------------------------------------------------------------------------


Matrix = tuple[Tensor | float, ...]
"""a to f of (x, y) -> (a x + b y + c, d x + e y + f), each (B, 1, 1, 1) or a number."""


def affine(images: Tensor, matrix: Matrix, fill: Tensor | float) -> Tensor:
    """Take output pixel (x, y) from the point to which `matrix` maps it, bilinear; outside: `fill`.

    Both are measured from the centre of the image. As Pillow's, up to one level off.
    """
    a, b, c, d, e, f = (
        value.view(-1, 1, 1) if isinstance(value, Tensor) else value for value in matrix
    )
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device, dtype=torch.float32).view(1, -1, 1)
    x = torch.arange(width, device=images.device, dtype=torch.float32).view(1, 1, -1)
    y = y - (height - 1) / 2
    x = x - (width - 1) / 2
    at_x = a * x + b * y + c
    at_y = d * x + e * y + f
    inside = (at_x >= -width / 2) & (at_x < width / 2) & (at_y >= -height / 2) & (at_y < height / 2)
    points = torch.broadcast_tensors(at_x * (2.0 / width), at_y * (2.0 / height))
    grid = torch.stack(points, -1).expand(len(images), -1, -1, -1)
    warped = F.grid_sample(
        images, grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    # A thousandth of a level more, or an exact level could come out below itself and be cut.
    return torch.where(inside[:, None], warped + 2.0**-10, fill)


def affine_nearest(images: Tensor, matrix: Matrix, fill: Tensor | float) -> Tensor:
    """Do as `affine`, but take the nearest pixel, with points measured from the first pixel.

    Halves are rounded away from 0 (TensorFlow's ImageProjectiveTransformV3).
    """
    a, b, c, d, e, f = (
        value.view(-1, 1, 1) if isinstance(value, Tensor) else value for value in matrix
    )
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device, dtype=torch.float32).view(1, -1, 1)
    x = torch.arange(width, device=images.device, dtype=torch.float32).view(1, 1, -1)
    at_x, at_y = (
        (at.abs() + 0.5).floor() * at.sign() for at in (a * x + b * y + c, d * x + e * y + f)
    )
    inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
    nearest = (at_y.clamp(0, height - 1) * width + at_x.clamp(0, width - 1)).long()
    pixels = nearest.expand(len(images), -1, -1).flatten(1)[:, None]
    found = images.flatten(2).gather(2, pixels.expand(-1, images.shape[1], -1))
    return torch.where(inside[:, None], found.view_as(images), fill)


def rotate(images: Tensor, degrees: Tensor, fill: Tensor | float) -> Tensor:
    """Turn the content counter-clockwise about the centre."""
    angle = degrees * (math.pi / 180.0)
    return affine(images, (angle.cos(), -angle.sin(), 0.0, angle.sin(), angle.cos(), 0.0), fill)


def shear_x(images: Tensor, shear: Tensor, fill: Tensor | float) -> Tensor:
    """Move row y left by `shear` * y pixels, y counted from the upper border."""
    return affine(images, (1.0, shear, shear * (images.shape[-2] / 2), 0.0, 1.0, 0.0), fill)


def shear_y(images: Tensor, shear: Tensor, fill: Tensor | float) -> Tensor:
    """Move column x up by `shear` * x pixels, x counted from the left border."""
    return affine(images, (1.0, 0.0, 0.0, shear, 1.0, shear * (images.shape[-1] / 2)), fill)


def translate_x(images: Tensor, pixels: Tensor, fill: Tensor | float) -> Tensor:
    """Move the content left by `pixels`."""
    return affine(images, (1.0, 0.0, pixels, 0.0, 1.0, 0.0), fill)


def translate_y(images: Tensor, pixels: Tensor, fill: Tensor | float) -> Tensor:
    """Move the content up by `pixels`."""
    return affine(images, (1.0, 0.0, 0.0, 0.0, 1.0, pixels), fill)


def shift_reflected(images: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Move the view by integer pixels (B,) int64; beyond the border the image is mirrored.

    Without its outermost pixel; any dtype.
    """
    height, width = images.shape[-2:]
    row = torch.arange(height, device=images.device)
    column = torch.arange(width, device=images.device)
    y, x = (
        (side - 1) - ((side - 1) - (at + offset[:, None]).abs()).abs()
        for side, at, offset in ((height, row, down), (width, column, right))
    )
    rows = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    # Indexing around a slice puts the channels last, which is the order of images in memory.
    return images[rows, :, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


def in_box(images: Tensor, top: Tensor, bottom: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return (B, 1, H, W) bool: which pixels are in rows [top, bottom) and columns [left, right).

    Each bound is (B, 1, 1, 1) float32.
    """
    y = torch.arange(images.shape[-2], device=images.device).view(1, 1, -1, 1)
    x = torch.arange(images.shape[-1], device=images.device).view(1, 1, 1, -1)
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


def noise(seeds: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Return standard normal numbers (B, channels, height, width) float32.

    A pure function of `seeds` (B,) int32 and the position of the pixel. A 32-bit hash (lowbias32,
    Wellons 2018) serves two neighbouring pixels; its halves choose among 65,536 quantiles, which
    reach to 4.2: a look-up is far cheaper than a logarithm and a cosine.
    """
    num = channels * height * width
    pairs = torch.arange(-(-num // 2), device=seeds.device, dtype=torch.int32)
    bits = _hash32(pairs ^ _hash32(seeds)[:, None])
    chosen = torch.stack([bits & 0xFFFF, (bits >> 16) & 0xFFFF], -1).flatten(1)[:, :num]
    quantiles = _normal_quantiles(seeds.device).index_select(0, chosen.flatten())
    return quantiles.view(-1, channels, height, width)


@lru_cache
def _normal_quantiles(device: torch.device) -> Tensor:
    shares = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
    return torch.special.ndtri(shares).float().to(device)


def _hash32(x: Tensor) -> Tensor:
    # Products wrap; the masks make the arithmetic shifts of int32 logical ones.
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
