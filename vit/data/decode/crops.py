"""Decode encoded image bytes into cropped and resized uint8 views.

`vit.data.decode.images` decodes a window of the image. torch's antialiased uint8 resize then writes
directly to a row of the batch, without converting pixels to float.
"""

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vit.config.schema import EvalConfig
from vit.data import stages
from vit.data.decode.images import Pixels, decode_box, read_image_size, region, undecodable
from vit.data.decode.jpeg_cut import Window
from vit.data.decode.jpeg_header import MAX_PIXELS
from vit.data.decode.upright import upright
from vit.data.stages import Stage

PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
log = logging.getLogger(__name__)


# ---- pixels to views -----------------------------------------------------------------------------


def resize(
    pixels: Pixels,
    size: tuple[int, int],
    interpolation: str,
    out: Tensor | None = None,
    scales: tuple[float | None, float | None] = (None, None),
) -> Tensor:
    """Resize (H, W, C) uint8 pixels to `size` = (height, width), with antialiasing.

    scales: new size / old size, for height and width. Required if `pixels` and `size` are only the
    first rows or columns of an image and its resized version.
    Returns (C, height, width) uint8, channels last in memory, or `out`.
    """
    if out is None:
        out = _new_view(size, pixels.shape[2])
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    if image.shape == out.shape:
        return out.copy_(image)

    operator = _resize_operator(interpolation)
    if operator is None:
        return out.copy_(_resize_by_torch(image, size, interpolation))
    operator(image[None], size, False, *scales, out=out[None])
    return out


def _resize_by_torch(image: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    return F.interpolate(image[None], size, mode=interpolation, antialias=True)[0]


@cache
def _resize_operator(interpolation: str) -> Callable[..., Tensor] | None:
    """Return the operator behind torch's public function, or None if the operator has changed.

    The operator takes 0.6 times as long as the function, because it writes to existing memory in
    any channel order. Because the operator is private and may change in a new torch release, each
    process first compares it with the public function on a small image.
    """
    # Reduce and enlarge an image of 60 x 90 pixels, first the entire image and then only its
    # beginning.
    y, x = torch.arange(60)[:, None], torch.arange(90)
    planes = torch.stack([(x * y) % 256, (3 * x + 5 * y) % 256, 255 - x + 0 * y])
    image = planes.to(torch.uint8).permute(1, 2, 0).contiguous().permute(2, 0, 1)

    try:
        operator: Callable[..., Tensor] = getattr(
            torch.ops.aten, f"_upsample_{interpolation}2d_aa"
        ).out

        for size in ((41, 33), (75, 120)):
            expected = _resize_by_torch(image, size, interpolation)
            down = _plan_line(60, size[0], 20, interpolation, can_stop=True)
            across = _plan_line(90, size[1], 30, interpolation, can_stop=True)
            beginning = image[:, : down.length, : across.length]
            for part, part_size, scales in (
                (image, size, (None, None)),
                (beginning, (down.resized, across.resized), (down.scale, across.scale)),
            ):
                view = _new_view(part_size, 3)
                operator(part[None], part_size, False, *scales, out=view[None])
                if not torch.equal(view, expected[:, : part_size[0], : part_size[1]]):
                    raise ValueError("it returns different pixels")
    except Exception as error:  # later releases may raise any exception
        log.warning(
            "torch %s: resizing takes 1.7 times as long, because the fast internal operator has"
            " changed: %s",
            torch.__version__,
            error,
        )
        return None

    return operator


def decode_views(
    data: bytes,
    windows: Sequence[Window],
    size: tuple[int, int],
    interpolation: str,
    channels: int = 3,
    *,
    out: Sequence[Tensor] | None = None,
    stored_size: tuple[int, int] | None = None,
) -> Sequence[Tensor]:
    """Decode an image once for several views: each of `windows`, resized to `size`.

    Returns one (channels, height, width) uint8 tensor per window, channels last in memory, or
    `out`. Raises ValueError in the same cases as `decode_box`.

    Args:
        size: The (height, width) of each view.
        stored_size: See `decode_box`.
    """
    if out is None:
        out = [_new_view(size, channels) for _ in windows]
    box = _bounding_box(windows)
    pixels = decode_box(data, box, channels, stored_size=stored_size)

    stages.current.enter(Stage.RESIZE)
    for window, view in zip(windows, out, strict=True):
        resize(region(pixels, window, *box[:2]), size, interpolation, view)
    return out


def _bounding_box(windows: Sequence[Window]) -> Window:
    left = min(window[0] for window in windows)
    top = min(window[1] for window in windows)
    right = max(window[0] + window[2] for window in windows)
    bottom = max(window[1] + window[3] for window in windows)
    return left, top, right - left, bottom - top


def _resize_by_pillow(pixels: Pixels, size: tuple[int, int], interpolation: str) -> Tensor:
    """Resize like `resize`, but with Pillow's arithmetic."""
    image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    resized = np.array(image.resize((size[1], size[0]), PILLOW[interpolation]))
    return torch.from_numpy(resized.reshape(*size, pixels.shape[2])).permute(2, 0, 1)


def _new_view(size: tuple[int, int], channels: int) -> Tensor:
    return torch.empty((*size, channels), dtype=torch.uint8).permute(2, 0, 1)


# ---- the evaluation view -------------------------------------------------------------------------


def decode_center(
    data: bytes,
    size: tuple[int, int],
    view: EvalConfig,
    interpolation: str,
    channels: int = 3,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the evaluation view: resize the image as `view` specifies, and crop its center to
    `size`.

    The pixels are the same as those of torchvision's `v2.Resize` and `v2.CenterCrop` on a tensor.
    If `view.resizer` is pillow, they are the same as those of torchvision and timm's
    `create_transform` on a Pillow image. For a JPEG, only the visible part is decoded. With
    `view.apply_exif`, the image is first rotated upright. Returns (channels, height, width) uint8.
    Raises ValueError in the same cases as `decode_box`.
    """
    data = upright(data, channels) if view.apply_exif else data
    try:
        width, height = read_image_size(data)
    except ValueError as error:
        raise undecodable(data, error) from None
    resized = resized_size((height, width), size, view)
    if math.prod(resized) > MAX_PIXELS:  # an extreme aspect ratio makes the long side huge
        raise undecodable(
            data,
            ValueError(
                f"{width} x {height} pixels are too elongated: after resizing they would exceed"
                f" {MAX_PIXELS} pixels"
            ),
        )

    can_stop = view.resizer == "torch" and _resize_operator(interpolation) is not None
    down = _plan_line(height, resized[0], size[0], interpolation, can_stop)
    across = _plan_line(width, resized[1], size[1], interpolation, can_stop)
    pixels = _decode_visible(data, down, across, channels)

    stages.current.enter(Stage.RESIZE)
    new_size = down.resized, across.resized
    if view.resizer == "torch":
        image = resize(pixels, new_size, interpolation, scales=(down.scale, across.scale))
    else:
        image = _resize_by_pillow(pixels, new_size, interpolation)
    crop = image[:, down.first : down.first + size[0], across.first : across.first + size[1]]
    return crop if out is None else out.copy_(crop)


class _Line(NamedTuple):
    """The pixels along one axis (rows or columns) that the center crop needs."""

    start: int
    stop: int
    """The end of the visible range [start, stop) of stored pixels."""
    length: int
    """The end of the range [0, length) of pixels to resize. The range begins at the image's first
    pixel, because any other start changes the rounding of filter positions."""
    resized: int
    """The number of pixels after the resize."""
    scale: float | None
    """The scale to pass to torch if only the beginning of the axis is resized; otherwise None."""
    first: int
    """The first pixel of the crop after the resize."""


def _decode_visible(data: bytes, down: _Line, across: _Line, channels: int) -> Pixels:
    """Decode the visible part of an image, and return the pixels to resize.

    All other pixels stay uninitialized, because they do not affect the crop.
    """
    pixels = np.empty((down.length, across.length, channels), np.uint8)
    visible = pixels[down.start : down.stop, across.start : across.stop]
    box = (across.start, down.start, across.stop - across.start, down.stop - down.start)
    decoded = decode_box(data, box, channels, place=visible)
    if decoded is not visible:
        visible[:] = decoded
    return pixels


def _plan_line(
    original: int, resized: int, cropped: int, interpolation: str, can_stop: bool
) -> _Line:
    """Plan the resize of one axis from `original` to `resized` pixels, of which only the central
    `cropped` pixels are kept.

    can_stop: whether the resize takes a scale argument, which lets it stop after the visible
    pixels.
    """
    first = round((resized - cropped) / 2)
    scale = original / resized
    # half the filter width, plus 1 for rounding
    reach = max(scale, 1.0) * (2 if interpolation == "bicubic" else 1) + 1
    start = max(math.floor((first + 0.5) * scale - reach), 0)
    stop = min(math.ceil((first + cropped - 0.5) * scale + reach), original)

    if can_stop and stop != first + cropped:  # torch only copies lines of unchanged length
        # torch inverts its scale argument. The inverse must be exactly the scale that torch
        # computes without the argument. For one line in eight, no such number exists.
        near = resized / original
        for inverse in (near, math.nextafter(near, 0), math.nextafter(near, 2 * near)):
            if 1 / inverse == scale:
                return _Line(
                    start, stop, length=stop, resized=first + cropped, scale=inverse, first=first
                )

    return _Line(start, stop, length=original, resized=resized, scale=None, first=first)


def resized_size(
    image: tuple[int, int], size: tuple[int, int], view: EvalConfig
) -> tuple[int, int]:
    """Return the (height, width) that `image` is resized to, before its center is cropped to
    `size`.

    image, size: (height, width).
    """
    cover_h, cover_w = int(size[0] / view.crop_pct), int(size[1] / view.crop_pct)
    if view.crop_mode == "squash":
        return cover_h, cover_w

    height, width = image
    if cover_h != cover_w:  # timm/data/transforms.py, ResizeKeepRatio; not in torchvision
        ratio = min(height / cover_h, width / cover_w)
        return round(height / ratio), round(width / ratio)
    if height <= width:  # torchvision/transforms/functional.py, _compute_resized_output_size
        return cover_h, int(cover_h * width / height)
    return int(cover_w * height / width), cover_w
