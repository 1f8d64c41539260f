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

import vit.data.augment.pixel_ops as pixel_ops


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
    TF_WARP = auto()
    """The same as of `WARP`, for `pixel_ops.affine_nearest`."""
    WARP = auto()
    """a to f of `pixel_ops.affine`, and the colour of what is outside."""
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


_TABLES: dict[Kind, Callable[[Tensor, Tensor, Tensor], None]] = {
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
            (Kind.TF_WARP, Kind.TF_WARP, self._tf_warp),
            (Kind.WARP, Kind.HUE, self._change_floats),
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
        own = self._tables[self._rows(Kind.TABLE, Kind.TABLE, Kind.TABLE)]
        tables = own[:, None].expand(-1, images.shape[1], -1)
        rows = self._rows(Kind.AUTO_CONTRAST, Kind.EQUALIZE, Kind.TABLE)
        if rows.start < rows.stop:
            of_host = tables
            tables = of_host.new_empty(*images.shape[:2], 256)
            if rows.start:
                tables[: rows.start] = of_host
            highest = levels[rows].amax(2, keepdim=True)
            for kind, make in _TABLES.items():
                rows = self._rows(kind, kind, Kind.TABLE)
                if rows.start < rows.stop:
                    within = self._rows(kind, kind, Kind.AUTO_CONTRAST)
                    make(levels[rows], highest[within], tables[rows])
        pixel_ops.look_up(tables, levels, images)

    @staticmethod
    def _tf_warp(images: Tensor, numbers: Tensor) -> None:
        fill = numbers[:, 6:9, None, None].to(torch.uint8)
        pixel_ops.affine_nearest(images, numbers[:, :6], fill, out=images)

    def _change_floats(self, images: Tensor, numbers: Tensor) -> None:
        floats = images.float()
        for first, last, change in (
            (Kind.WARP, Kind.WARP, self._warp),
            (Kind.CONTRAST, Kind.TF_SHARPNESS, self._blend),
            (Kind.BLUR, Kind.BLUR, self._blur),
            (Kind.HUE, Kind.HUE, self._turn_hue),
        ):
            rows = self._rows(first, last, Kind.WARP)
            if rows.start < rows.stop:
                change(floats[rows], numbers[rows])
        beyond = floats[self._rows(Kind.CONTRAST, Kind.HUE, Kind.WARP)]
        if len(beyond):
            beyond.clamp_(0.0, 255.0)
        images.copy_(floats)

    @staticmethod
    def _warp(floats: Tensor, numbers: Tensor) -> None:
        pixel_ops.affine(floats, numbers[:, :6], numbers[:, 6:9, None, None], out=floats)

    def _blend(self, floats: Tensor, numbers: Tensor) -> None:
        """Blend with something else: it is the result at factor 0, and the images are at 1."""
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
        others: list[Tensor] = []
        if colour.stop:
            grey = pixel_ops.grey(floats[: colour.stop])
            others += [pixel_ops.mean_level(grey[contrast])] if contrast.stop else []
            others += [grey[colour]] if colour.start < colour.stop else []
        if tf_colour.start < tf_colour.stop:
            others.append(pixel_ops.tf_grey(floats[tf_colour]))
        if sharp.start < tf_sharp.stop:
            others.append(floats[sharp.start :])  # of which the border stays
        shape = floats.shape[1:]
        other = torch.cat([each.expand(-1, *shape) for each in others])
        for rows, rounding in ((sharp, 6), (tf_sharp, 0)):
            if rows.start < rows.stop:
                pixel_ops.smooth(floats[rows], rounding, other[rows])
        # In the order of Pillow's Blend.c, in place, since new memory costs more than the sums.
        floats.sub_(other).mul_(numbers[:, :1, None, None]).add_(other)

    @staticmethod
    def _blur(floats: Tensor, numbers: Tensor) -> None:
        weights = numbers[:, :3, None, None].split(1, 1)
        floats.copy_(pixel_ops.blur(floats, *weights))

    @staticmethod
    def _turn_hue(floats: Tensor, numbers: Tensor) -> None:
        floats.copy_(pixel_ops.hue(floats, numbers[:, :1, None, None]))

    @staticmethod
    def _cut_out(images: Tensor, numbers: Tensor) -> None:
        images.masked_fill_(pixel_ops.in_box(images, numbers[:, :4]), CUTOUT_GREY)
