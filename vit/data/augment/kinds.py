"""The kinds of operations, and how the device does all operations of a kind at once.

An operation is one for each image, the next one for each, and so on. Images of such a round lie
sorted by kind, so that those of a kind, and of kinds that share work, are one slice: levels are
looked up together, warped together, blended together. A GPU launches as many kernels for 500 images
as for one of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from functools import partial

import torch
from torch import Tensor

from vit.data.augment import pixel_ops


class Kind(IntEnum):
    """What an operation is to the device, in the order of images in a round.

    With the numbers that it needs of each image.
    """

    NONE = 0
    FLIP = auto()
    TABLE = auto()
    """Levels by a table that the host made."""
    AUTO_CONTRAST = auto()
    TF_AUTO_CONTRAST = auto()
    EQUALIZE = auto()
    WARP = auto()
    """a to f of `pixel_ops.affine`, and the colour of what is outside."""
    TF_WARP = auto()
    """The same for `pixel_ops.affine_nearest`."""
    CONTRAST = auto()
    """Blended with its mean grey, which is the image at factor 0; 1: no change."""
    SATURATION = auto()
    """Factor between grey and the image."""
    TF_SATURATION = auto()
    SHARPNESS = auto()
    """Factor between the smoothed image and the image."""
    TF_SHARPNESS = auto()
    BLUR = auto()
    """`pixel_ops.box_weights`."""
    HUE = auto()
    """Turns of the colour wheel."""
    CUTOUT = auto()
    """Top, bottom, left, right of a square that becomes grey."""


NUM_NUMBERS = 9
"""The most numbers that a kind has: those of warps."""
CUTOUT_GREY = 128


_TABLES: dict[Kind, Callable[[Tensor], Tensor]] = {
    Kind.AUTO_CONTRAST: partial(pixel_ops.auto_contrast_table, dtype=torch.float64),
    Kind.TF_AUTO_CONTRAST: partial(pixel_ops.auto_contrast_table, dtype=torch.float32),
    Kind.EQUALIZE: pixel_ops.equalize_table,
}


class Round:
    """A round of operations on images (B, C, H, W) uint8, sorted by kind; changes them in place.

    starts: for each kind its first row, and B. numbers (B, NUM_NUMBERS) float32, and tables of
    levels (at least as many as images of `Kind.TABLE`, 256) uint8: on the device.
    """

    def __init__(self, images: Tensor, starts: Sequence[int], numbers: Tensor, tables: Tensor):
        self._images = images
        self._starts = starts
        self._numbers = numbers
        self._tables = tables

    def __call__(self) -> None:
        for first, last, change in (
            (Kind.FLIP, Kind.FLIP, self._flip),
            (Kind.TABLE, Kind.EQUALIZE, self._change_levels),
            (Kind.WARP, Kind.WARP, self._warp),
            (Kind.TF_WARP, Kind.TF_WARP, self._tf_warp),
            (Kind.CONTRAST, Kind.TF_SHARPNESS, self._blend),
            (Kind.BLUR, Kind.BLUR, self._blur),
            (Kind.HUE, Kind.HUE, self._turn_hue),
            (Kind.CUTOUT, Kind.CUTOUT, self._cut_out),
        ):
            rows = self._rows(first, last)
            if rows.start < rows.stop:
                change(self._images[rows], self._numbers[rows])

    def _rows(self, first: Kind, last: Kind, within: Kind = Kind.NONE) -> slice:
        """Return the rows of kinds `first` to `last`, counted from the first row of `within`."""
        offset = self._starts[within]
        return slice(self._starts[first] - offset, self._starts[last + 1] - offset)

    @staticmethod
    def _flip(images: Tensor, numbers: Tensor) -> None:
        images.copy_(images.flip(-1))

    def _change_levels(self, images: Tensor, numbers: Tensor) -> None:
        levels = images.flatten(2).long()
        by_table = self._tables[self._rows(Kind.TABLE, Kind.TABLE, Kind.TABLE)]
        tables = [by_table[:, None].expand(-1, images.shape[1], -1)]
        for kind, make in _TABLES.items():
            rows = self._rows(kind, kind, Kind.TABLE)
            if rows.start < rows.stop:
                tables.append(make(levels[rows]))
        pixel_ops.look_up(tables[0] if len(tables) == 1 else torch.cat(tables), levels, images)

    @staticmethod
    def _warp(images: Tensor, numbers: Tensor) -> None:
        fill = numbers[:, 6:9, None, None]
        images.copy_(pixel_ops.affine(images.float(), numbers[:, :6], fill))

    @staticmethod
    def _tf_warp(images: Tensor, numbers: Tensor) -> None:
        fill = numbers[:, 6:9, None, None].to(torch.uint8)
        images.copy_(pixel_ops.affine_nearest(images, numbers[:, :6], fill))

    def _blend(self, images: Tensor, numbers: Tensor) -> None:
        """Blend with something else: it is the result at factor 0, and the images are at 1."""
        floats = images.float()
        other = floats.clone()
        contrast, colour, tf_colour, sharp, tf_sharp = (
            self._rows(kind, kind, Kind.CONTRAST)
            for kind in (
                Kind.CONTRAST,
                Kind.SATURATION,
                Kind.TF_SATURATION,
                Kind.SHARPNESS,
                Kind.TF_SHARPNESS,
            )
        )
        if contrast.start < colour.stop:
            grey = pixel_ops.grey(images[contrast.start : colour.stop])
            if contrast.stop:
                other[contrast] = pixel_ops.mean_level(grey[contrast])
            other[colour] = grey[colour]
        if tf_colour.start < tf_colour.stop:
            other[tf_colour] = pixel_ops.tf_grey(floats[tf_colour])
        for rows, rounding in ((sharp, 6), (tf_sharp, 0)):
            if rows.start < rows.stop:
                other[rows, :, 1:-1, 1:-1] = pixel_ops.smoothed(floats[rows], rounding)
        # In the order of Pillow's Blend.c, in place, since new memory costs more than the sums.
        blended = floats.sub_(other).mul_(numbers[:, :1, None, None]).add_(other)
        images.copy_(blended.clamp_(0.0, 255.0))

    @staticmethod
    def _blur(images: Tensor, numbers: Tensor) -> None:
        weights = numbers[:, :3, None, None].split(1, 1)
        images.copy_(pixel_ops.blur(images.float(), *weights).clamp_(0.0, 255.0))

    @staticmethod
    def _turn_hue(images: Tensor, numbers: Tensor) -> None:
        images.copy_(pixel_ops.hue(images.float(), numbers[:, :1, None, None]).clamp_(0.0, 255.0))

    @staticmethod
    def _cut_out(images: Tensor, numbers: Tensor) -> None:
        images.masked_fill_(pixel_ops.in_box(images, numbers[:, :4]), CUTOUT_GREY)
