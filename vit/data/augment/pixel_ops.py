"""Pixel arithmetic on batches, with different arguments for each sample.

Levels are integers 0..255. Images (B, C, H, W) and lookup tables (B, C, 256) are uint8 or float32,
as each docstring states. Arguments are (B, 1, 1, 1) float32. `to_levels` clamps to 0..255 and
truncates fractions, as Pillow does, so operations that round must round before that call.
Operations draw no random numbers, do not wait for the device and do not branch on values, so rows
do not affect each other.

On a CPU, results are identical to Pillow's unless a docstring states a difference. On a GPU,
results may differ by one level where the exact result is an integer.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = torch.arange(256, dtype=torch.float32)
"""All levels, on the host. Applying an operation to these levels gives its lookup table."""


def to_levels(images: Tensor) -> Tensor:
    """Convert floats to uint8: clamp to 0..255 and truncate fractions."""
    return images.clamp(0.0, 255.0).to(torch.uint8)


# --- operations on each level: images or `LEVELS`, float32 ----------------------------------------


def invert(images: Tensor) -> Tensor:
    return 255.0 - images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` of each level's 8 bits; 0 bits give black."""
    unit = torch.exp2(8.0 - bits)
    return (images / unit).floor() * unit


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert levels of at least `threshold`."""
    return torch.where(images < threshold, images, 255.0 - images)


def solarize_add(images: Tensor, addition: Tensor) -> Tensor:
    """Add `addition` to levels in the darker half of the range."""
    return torch.where(images < 128.0, (images + addition).clamp(max=255.0), images)


# --- lookup tables that depend on the image -------------------------------------------------------


def auto_contrast_table(levels: Tensor, highest: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Write lookup tables that stretch each channel to 0..255 into `out` (B, C, 256) uint8.

    Args:
        levels: The levels (B, C, H * W) int64.
        highest: The maximum of `levels`, (B, C, 1).
        dtype: Float64 for Pillow's arithmetic, in which the highest level may become 254; float32
            for TensorFlow's.
    """
    pair = torch.add(highest, levels.amin(2, keepdim=True), alpha=256)
    tables = _stretched(dtype, levels.device)
    torch.index_select(tables, 0, pair.flatten(), out=out.view(-1, 256))


@lru_cache
def _stretched(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return all lookup tables (65536, 256). Row 256 * lowest + highest stretches the range from
    lowest to highest."""
    every = torch.arange(256, dtype=dtype)
    tables = torch.empty(256, 256, 256, dtype=torch.uint8)
    for low, tables_of_low in enumerate(tables):
        span = (every - low)[:, None]
        # Divide tensors: `255.0 / tensor` would multiply by the reciprocal and round differently.
        factors = torch.where(span > 0, torch.full_like(span, 255.0) / span, 1.0)
        offsets = torch.where(span > 0, low * factors, 0.0)
        # Entries outside [lowest, highest] are arbitrary, because the channel has no such levels.
        tables_of_low.copy_((every * factors - offsets).clamp_(0.0, 255.0))
    return tables.view(-1, 256).to(device)


def _range(stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if torch.compiler.is_compiling():  # a compiled graph creates the range at no cost
        return torch.arange(stop, dtype=dtype, device=device)
    return _kept_range(stop, dtype, device)


@lru_cache
def _kept_range(stop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A tensor created on one GPU stream could be read by another stream before it is written. A
    # tensor from the host can be read by all streams when `to` returns.
    return torch.arange(stop, dtype=dtype).to(device)


def equalize_table(levels: Tensor, highest: Tensor, out: Tensor) -> None:
    """Write lookup tables that equalize each channel's histogram into `out` (B, C, 256) uint8.

    Rounding is the same as in Pillow (PIL/ImageOps.py, equalize).

    Args:
        levels: The levels (B, C, H * W) int64.
        highest: The maximum of `levels`, (B, C, 1).
    """
    every = _range(256, torch.int64, levels.device)
    counts = torch.zeros(*levels.shape[:2], 257, device=levels.device, dtype=torch.int64)
    counts[..., 1:].scatter_add_(2, levels, every[1].expand_as(levels))
    below = counts.cumsum(2)[..., :256]  # number of pixels with lower levels
    step = below.gather(2, highest) // 255
    table = (below + step // 2) // step.clamp(min=1)
    # Use `minimum`, which can write to uint8 directly. `clamp` needs a cast and another tensor.
    torch.minimum(torch.where(step > 0, table, every), every[-1], out=out)


def look_up(tables: Tensor, levels: Tensor, out: Tensor) -> None:
    """Look up `levels` (B, C, H * W) int64 in `tables`, and write the results to uint8 images
    `out`."""
    torch.gather(tables, 2, levels, out=out.flatten(2))


# --- base images for blending, and other colors: float32 ------------------------------------------


def gray(images: Tensor) -> Tensor:
    """Return Pillow's luma (B, 1, H, W); gray images are returned unchanged."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.split(1, 1)
    half = _constant((0.5,), torch.float32, images.device)
    # Use Pillow's integer weights. Sums have at most 24 bits, so float32 is exact too.
    sums = torch.add(half, red, alpha=19595 / 65536).add_(green, alpha=38470 / 65536)
    return sums.add_(blue, alpha=7471 / 65536).floor_()


@lru_cache
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a (1, C, 1, 1) tensor. The result is cached, because creating it forces a host-device
    sync."""
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)


def tf_gray(images: Tensor) -> Tensor:
    """Return tf.image.rgb_to_grayscale of uint8 images: the weighted sum times 255.5, truncated."""
    weights = _constant((0.2989, 0.5870, 0.1140), torch.float32, images.device)
    red, green, blue = (images / 255.0).mul_(weights).split(1, 1)
    return (red + green).add_(blue).mul_(255.5).floor_()


def mean_level(gray: Tensor) -> Tensor:
    """Return the rounded mean (B, 1, 1, 1) of gray images (B, 1, H, W)."""
    # A float32 sum over all pixels could round to another level, so use double precision.
    return gray.mean((2, 3), keepdim=True, dtype=torch.float64).add_(0.5).floor_().float()


def smooth(images: Tensor, rounding: int, out: Tensor) -> None:
    """Apply Pillow's SMOOTH to integer levels: a 3 x 3 mean in which the center counts five times.

    Writes all of `out` except a border of one pixel. `out` has the shape of `images`. `rounding`:
    added to the weighted sum before the sum is divided by 13 and truncated.
    """
    # On a CPU, pooling takes 13 times as long as adding. On a GPU, it needs a quarter of the
    # kernels.
    sum_of_nine = _added if images.device.type == "cpu" else _pooled
    sums = sum_of_nine(images).add_(images[:, :, 1:-1, 1:-1], alpha=4.0).add_(rounding)
    torch.div(sums, 13.0, rounding_mode="trunc", out=out[:, :, 1:-1, 1:-1])


def _added(images: Tensor) -> Tensor:
    three = images[:, :, :-2] + images[:, :, 1:-1] + images[:, :, 2:]
    return (three[..., :-2] + three[..., 1:-1]).add_(three[..., 2:])


def _pooled(images: Tensor) -> Tensor:
    """Return the same sums as `_added`. The sums are identical, because the levels are integers."""
    return F.avg_pool2d(images, 3, stride=1, divisor_override=1)


def hue(images: Tensor, turns: Tensor) -> Tensor:
    """Rotate hues by `turns` of the color wheel (-0.5..0.5), without changing value and saturation.

    The result differs by at most one level from torchvision's result on tensors (adjust_hue_image
    in transforms/v2/functional/_color.py). Pillow has only 256 hues.
    """
    red, green, blue = images.split(1, 1)
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    safe = chroma.clamp(min=1.0)  # levels are integers, so chroma is 0 or at least 1
    # The hue in sixths of the color wheel: red is 0, green 2 and blue 4.
    sixths = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2.0 + (blue - red) / safe, 4.0 + (red - green) / safe),
    )

    # Each channel is `value` minus a fraction of the chroma that depends on the distance between
    # channel and hue (Smith 1978, without branches).
    turned = sixths + 6.0 * turns
    distances = (turned + _constant((5.0, 3.0, 1.0), torch.float32, images.device)).remainder_(6.0)
    taken = torch.minimum(distances, 4.0 - distances).clamp_(0.0, 1.0)
    return (value - chroma * taken) * (255.999 / 255.0)  # scale to levels as in torchvision


def box_weights(radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `blur`'s weights for pixels at distance 0, 1 and 2, shaped like `radius`.

    For `radius` = 0..2 pixels, Pillow's Gaussian blur is three box filters along each axis (Gwosdek
    et al. 2011; BoxBlur.c). The box covers at most one full pixel and a fraction of a second one.
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
    """Blur three times along each axis with `box_weights`, and round after each pass.

    The result differs from Pillow's by up to three levels at a few radii, such as 1, because sums
    fall halfway between two levels.
    """
    for axis in (3, 2):
        size = images.shape[axis]
        for _ in range(3):
            padded = F.pad(images, (2, 2, 0, 0) if axis == 3 else (0, 0, 2, 2), mode="replicate")
            left2, left1, right1, right2 = (padded.narrow(axis, at, size) for at in (0, 1, 3, 4))
            # Work in place, because allocating memory costs more than the arithmetic.
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
    """Map coordinates by `matrix` (B, 6) to points (a x + b y + c, d x + e y + f), (B, 2, H, W)."""
    rows = matrix.view(-1, 2, 3, 1, 1)
    # Keep this order of additions, because any other order rounds differently.
    return (rows[:, :, 0] * x + rows[:, :, 1] * y[:, None]).add_(rows[:, :, 2])


@lru_cache
def _from_center(side: int, device: torch.device) -> Tensor:
    return (torch.arange(side, dtype=torch.float32) - (side - 1) / 2).to(device)


def affine(images: Tensor, matrix: Tensor, fill: Tensor, out: Tensor | None = None) -> Tensor:
    """Sample output pixel (x, y) at the point that `matrix` (B, 6) maps it to.

    Points outside the image get `fill` (B, C, 1, 1). Interpolates float32 images bilinearly, with
    coordinates relative to the center. The result differs from Pillow's by at most one level. out:
    the tensor for the result, which may be `images`.
    """
    height, width = images.shape[-2:]
    at = _mapped(matrix, _from_center(width, images.device), _from_center(height, images.device))
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

    # Add a thousandth of a level. Otherwise, rounding errors could place the result just below an
    # integer, and later truncation would lower the level by one.
    return torch.where(inside, warped.add_(2.0**-10), fill, out=out)


def affine_nearest(
    images: Tensor, matrix: Tensor, fill: Tensor, out: Tensor | None = None
) -> Tensor:
    """Warp like `affine`, but take the nearest pixel, with coordinates relative to the first pixel.

    Accepts images of any dtype. Halves are rounded away from 0, as in TensorFlow's
    ImageProjectiveTransformV3.
    """
    height, width = images.shape[-2:]
    x, y = (_range(side, torch.float32, images.device) for side in (width, height))
    at = _mapped(matrix, x, y)
    at_x, at_y = (at.abs() + 0.5).floor_().copysign_(at).unbind(1)
    in_x, in_y = at_x.clamp(0, width - 1), at_y.clamp(0, height - 1)
    inside = (in_x == at_x) & (in_y == at_y)

    nearest = torch.add(in_x, in_y, alpha=width).long()
    pixels = nearest.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    nearest_pixels = images.flatten(2).gather(2, pixels)
    return torch.where(inside[:, None], nearest_pixels.view_as(images), fill, out=out)


def shift(images: Tensor, right: Tensor, down: Tensor, *, reflect: bool) -> Tensor:
    """Shift the view by `right` and `down` pixels (B,) int64.

    Pixels outside the image are zero or, if `reflect` is true, show the image's reflection, which
    does not repeat the outermost pixels. Accepts images of any dtype.
    """
    height, width = images.shape[-2:]
    row, column = (_range(side, torch.int64, images.device) for side in (height, width))
    # The inner `abs` reflects positions before the first pixel, the outer one those after the last.
    y, x = (
        (side - 1) - ((side - 1) - (at + offset[:, None]).abs()).abs()
        for side, at, offset in ((height, row, down), (width, column, right))
    )

    rows = _range(len(images), torch.int64, images.device).view(-1, 1, 1)
    # Advanced indices around a slice put the channels last, which matches their order in memory.
    shifted = images[rows, :, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)
    if reflect:
        return shifted

    outside = (y != row + down[:, None])[:, :, None] | (x != column + right[:, None])[:, None]
    return shifted.masked_fill_(outside[:, None], 0)


def in_box(images: Tensor, box: Tensor) -> Tensor:
    """Return a mask (B, 1, H, W) of the pixels in `box` (B, 4) float32.

    The columns of `box` are top, bottom, left, right. A box covers rows [top, bottom) and columns
    [left, right).
    """
    height, width = images.shape[-2:]
    at = _range(max(height, width), torch.float32, images.device)
    inside = (at >= box[:, 0::2, None]) & (at < box[:, 1::2, None])
    return (inside[:, 0, :height, None] & inside[:, 1, None, :width])[:, None]


def noise(seeds: Tensor, quantiles: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Return standard normal noise (B, channels, height, width) float32.

    The noise depends only on `seeds` (B,) int32 and the pixel position. Each 32-bit hash
    (lowbias32, Wellons 2018) serves two neighboring pixels: its halves select two of the 65,536
    `quantiles`, which reach +-4.2. A lookup is far cheaper than a logarithm and a cosine.
    """
    num = channels * height * width
    pairs = torch.arange((num + 1) // 2, device=seeds.device, dtype=torch.int32)
    bits = _hash32(pairs ^ _hash32(seeds)[:, None])
    chosen = torch.stack([bits & 0xFFFF, (bits >> 16) & 0xFFFF], -1).flatten(1)[:, :num]
    return quantiles.index_select(0, chosen.flatten()).view(-1, channels, height, width)


def normal_quantiles(device: torch.device) -> Tensor:
    """Return the (65536,) float32 standard normal quantiles from which `noise` selects."""
    shares = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16
    return torch.special.ndtri(shares).float().to(device)


def _hash32(x: Tensor) -> Tensor:
    # Products overflow as intended. The masks turn int32's arithmetic shifts into logical shifts.
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
