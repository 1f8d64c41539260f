"""Encoded image bytes in, cropped and resized uint8 views out.

The data's story: of an image the window is decoded (`vit.data.decode.images`), and goes through
torch's antialiased uint8 resize, straight into its row of the batch. Nothing is converted to float
here.
"""

from __future__ import annotations

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

from vit.config import EvalConfig
from vit.data import stages
from vit.data.decode.images import Pixels, decode_box, read_image_size, span, undecodable
from vit.data.decode.jpeg_cut import Window
from vit.data.stages import Stage

REDUCE_FROM = 2.5
"""With `scaled`, a window of so many times the view in both sides is decoded at 1/2, of twice and
four times as many at 1/4 and 1/8. The views of photographs are then 44 dB from exact ones (median;
worst twentieth 38), at 2 times 41, where bilinear is 39 from bicubic."""
PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


log = logging.getLogger(__name__)


# --- pixels to views ------------------------------------------------------------------------------


def resize(
    pixels: Pixels,
    size: tuple[int, int],
    interpolation: str,
    out: Tensor | None = None,
    scales: tuple[float | None, float | None] = (None, None),
) -> Tensor:
    """Antialiased resize of (H, W, C) uint8 pixels to `size` = (height, width): (C, height, width)
    uint8, channels last, or `out`.

    `scales`: of height and width, size by size before; where one is given, `size` is only the
    beginning of the resized image.
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
    """Of a (C, H, W) uint8 image, by torch's public function."""
    return F.interpolate(image[None], size, mode=interpolation, antialias=True)[0]


@cache
def _resize_operator(interpolation: str) -> Callable[..., Tensor] | None:
    """The operator that torch's public function calls; it writes into memory that is there, in any
    order of channels: 0.6 of the time.

    It is no promise of torch's. So a small image goes through both once in a process, and another
    release of torch, in which the operator is gone or has another meaning, gives no other pixels:
    then None.
    """
    y, x = torch.arange(60)[:, None], torch.arange(90)
    image = (
        torch.stack([(x * y) % 256, (3 * x + 5 * y) % 256, 255 - x + 0 * y])
        .to(torch.uint8)
        .permute(1, 2, 0)
        .contiguous()
        .permute(2, 0, 1)
    )
    try:
        operator: Callable[..., Tensor] = getattr(
            torch.ops.aten, f"_upsample_{interpolation}2d_aa"
        ).out
        for size in ((41, 33), (75, 120)):
            expected = _resize_by_torch(image, size, interpolation)
            down, across = (
                _plan_line(*line, interpolation, can_stop=True)
                for line in zip((60, 90), size, (20, 30), strict=True)
            )
            beginning = image[:, : down.length, : across.length]
            for part, part_size, scales in (
                (image, size, (None, None)),
                (beginning, (down.resized, across.resized), (down.scale, across.scale)),
            ):
                found = _new_view(part_size, 3)
                operator(part[None], part_size, False, *scales, out=found[None])
                if not torch.equal(found, expected[:, : part_size[0], : part_size[1]]):
                    raise ValueError("it gives other pixels")
    except Exception as error:  # whatever a future release makes of it
        log.warning(
            "torch %s: its public function resizes, at 1.7 times the time, as the operator behind"
            " it has changed: %s",
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
    scaled: bool = False,
) -> Sequence[Tensor]:
    """Views of one image from one decoding: each of `windows`, resized to `size` = (height, width).

    Returns (channels, height, width) uint8 tensors, `out` if it is given: one for each window,
    channels last in memory. With `scaled` the views of windows of `REDUCE_FROM` times the size and
    more are made of a reduced image, if it is a JPEG, and are not to the pixel. `stored_size` as in
    `decode_box`, which says what is raised.
    """
    if out is None:
        out = [_new_view(size, channels) for _ in windows]
    wanted = [_reduction(window, size) if scaled else 1 for window in windows]
    for reduce in set(wanted):  # a view must not depend on the others
        numbers = [number for number, other in enumerate(wanted) if other == reduce]
        left, top = min(windows[n][0] for n in numbers), min(windows[n][1] for n in numbers)
        right, bottom = (
            max(windows[n][0] + windows[n][2] for n in numbers),
            max(windows[n][1] + windows[n][3] for n in numbers),
        )
        box = left, top, right - left, bottom - top
        pixels, reduced = decode_box(data, box, channels, reduce=reduce, stored_size=stored_size)
        stages.current.enter(Stage.RESIZE)
        for n in numbers:
            x, y, width, height = windows[n]
            part = pixels[span(y, height, top, reduced), span(x, width, left, reduced)]
            if reduced == 1:
                resize(part, size, interpolation, out[n])
            else:  # torch knows no borders between pixels
                x, y = x % reduced, y % reduced
                borders = x / reduced, y / reduced, (x + width) / reduced, (y + height) / reduced
                out[n].copy_(_resize_by_pillow(part, size, interpolation, borders))
    return out


def _reduction(window: Window, size: tuple[int, int]) -> int:
    """1/2, 1/4 and 1/8 of the image suffice for this view of `size` = (height, width) of the
    window: 2, 4 or 8; else 1."""
    times = min(window[2] / size[1], window[3] / size[0]) / REDUCE_FROM
    return 8 if times >= 4 else 4 if times >= 2 else 2 if times >= 1 else 1


def _resize_by_pillow(
    pixels: Pixels,
    size: tuple[int, int],
    interpolation: str,
    borders: tuple[float, float, float, float] | None = None,
) -> Tensor:
    """As `resize`, by Pillow's arithmetic, of all or of what lies between `borders`: left, top,
    right, bottom."""
    image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    resized = np.array(image.resize((size[1], size[0]), PILLOW[interpolation], borders))
    return torch.from_numpy(resized.reshape(*size, pixels.shape[2])).permute(2, 0, 1)


def _new_view(size: tuple[int, int], channels: int) -> Tensor:
    return torch.empty((*size, channels), dtype=torch.uint8).permute(2, 0, 1)


# --- the evaluation view --------------------------------------------------------------------------


def decode_center(
    data: bytes,
    size: tuple[int, int],
    view: EvalConfig,
    interpolation: str,
    channels: int = 3,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The evaluation view, (channels, height, width) uint8: the image resized as `view` says, and
    the centre of it of `size`.

    To the pixel what torchvision's `v2.Resize` and `v2.CenterCrop` make of a tensor; with
    `view.resizer` pillow, what they and timm's `create_transform` make of Pillow's images. Of a
    JPEG only what the view shows is decoded. Raises ValueError as `decode_box` does.
    """
    try:
        width, height = read_image_size(data)
    except ValueError as error:
        raise undecodable(data, error) from None
    resized = resized_size((height, width), size, view)
    can_stop = view.resizer == "torch" and _resize_operator(interpolation) is not None
    down, across = (
        _plan_line(*line, interpolation, can_stop)
        for line in zip((height, width), resized, size, strict=True)
    )
    pixels = np.empty((down.length, across.length, channels), np.uint8)
    place = pixels[down.start : down.stop, across.start : across.stop]
    part, _ = decode_box(
        data, (across.start, down.start, *place.shape[1::-1]), channels, place=place
    )
    if part is not place:
        place[:] = part
    stages.current.enter(Stage.RESIZE)
    if view.resizer == "torch":
        scales = down.scale, across.scale
        view_and_before = resize(
            pixels[: down.length, : across.length],
            (down.resized, across.resized),
            interpolation,
            scales=scales,
        )
    else:
        view_and_before = _resize_by_pillow(pixels, (down.resized, across.resized), interpolation)
    cropped = view_and_before[
        :, down.first : down.first + size[0], across.first : across.first + size[1]
    ]
    return cropped if out is None else out.copy_(cropped)


class _Line(NamedTuple):
    """A row or column of the image on its way to the centre crop."""

    start: int
    stop: int
    """Pixels [start, stop) of the image are seen."""
    length: int
    """Pixels that are resized. A line has to begin where the image begins, or the filter's places
    are rounded differently."""
    resized: int
    """Pixels that these become."""
    scale: float | None
    """What torch has to know if a line ends where the view ends."""
    first: int
    """Of the crop, in the resized line."""


def _plan_line(
    original: int, resized: int, cropped: int, interpolation: str, can_stop: bool
) -> _Line:
    """The centre `cropped` pixels of a line of `original` pixels that is resized to `resized`."""
    first = round((resized - cropped) / 2)
    scale = original / resized
    # the filter's half width; 1 for rounding
    reach = max(scale, 1.0) * (2 if interpolation == "bicubic" else 1) + 1
    start = max(math.floor((first + 0.5) * scale - reach), 0)
    stop = min(math.ceil((first + cropped - 0.5) * scale + reach), original)
    # torch works with the inverse of what it is given, which must be the very number that it works
    # with otherwise; one line in eight has none. And it does nothing to a line whose length stays.
    near = resized / original
    inverse = next(
        (
            number
            for number in (near, math.nextafter(near, 0), math.nextafter(near, 2 * near))
            if 1 / number == scale
        ),
        None,
    )
    if not can_stop or inverse is None or stop == first + cropped:
        return _Line(start, stop, original, resized, None, first)
    return _Line(start, stop, stop, first + cropped, inverse, first)


def resized_size(
    image: tuple[int, int], size: tuple[int, int], view: EvalConfig
) -> tuple[int, int]:
    """Height and width that an `image` (height, width) is resized to before the centre of `size` is
    cropped."""
    if view.resize_px is not None:
        cover_h = cover_w = view.resize_px
    else:
        cover_h, cover_w = int(size[0] / view.crop_pct), int(size[1] / view.crop_pct)
    if view.crop_mode == "squash":
        return cover_h, cover_w
    height, width = image
    if cover_h != cover_w:  # timm/data/transforms.py, ResizeKeepRatio: torchvision cannot
        ratio = min(height / cover_h, width / cover_w)
        return round(height / ratio), round(width / ratio)
    if height <= width:  # torchvision/transforms/functional.py, _compute_resized_output_size
        return cover_h, int(cover_h * width / height)
    return int(cover_w * height / width), cover_w
