"""The kinds of augmentation operations. The device runs all operations of a kind together.

In a round, each image gets one operation. Images are sorted by kind, so that images of one kind,
and of kinds that share computation, are contiguous. The number of GPU kernels therefore depends on
the number of kinds, not on the number of images.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from functools import partial

import torch
from torch import Tensor

import vit.data.augment.pixel_ops as pixel_ops


class Kind(IntEnum):
    """The kinds of operations, in the order in which a round sorts its images."""

    NONE = 0
    FLIP = auto()
    TABLE = auto()
    """A lookup of each level in a table that the host has computed."""
    AUTO_CONTRAST = auto()
    TF_AUTO_CONTRAST = auto()
    EQUALIZE = auto()
    TF_WARP = auto()
    """A warp by `pixel_ops.affine_nearest`, with the parameters of `WARP`."""
    WARP = auto()
    """A warp by `pixel_ops.affine`. Parameters: matrix entries a to f, and the fill color."""
    CONTRAST = auto()
    """A blend of the mean gray level (factor 0) and the image (factor 1)."""
    SATURATION = auto()
    """A blend of the gray image (factor 0) and the image (factor 1)."""
    TF_SATURATION = auto()
    SHARPNESS = auto()
    """A blend of the smoothed image (factor 0) and the image (factor 1)."""
    TF_SHARPNESS = auto()
    BLUR = auto()
    """A Gaussian blur. The parameters are `pixel_ops.box_weights`."""
    HUE = auto()
    """A hue shift. The parameter is the rotation of the color wheel in turns."""
    CUTOUT = auto()
    """A gray square, given by its top, bottom, left and right."""


NUM_NUMBERS = 9
"""The maximum number of parameters per operation; warps use 9."""
CUTOUT_GRAY = 128


_TABLES: dict[Kind, Callable[[Tensor, Tensor, Tensor], None]] = {
    Kind.AUTO_CONTRAST: partial(pixel_ops.auto_contrast_table, dtype=torch.float64),
    Kind.TF_AUTO_CONTRAST: partial(pixel_ops.auto_contrast_table, dtype=torch.float32),
    Kind.EQUALIZE: pixel_ops.equalize_table,
}


class Round:
    """A round of operations that changes images (B, C, H, W) uint8, sorted by kind, in place.

    Args:
        starts: The first row of each kind, followed by B.
        numbers: The parameters (B, NUM_NUMBERS) float32 on the device.
        tables: The lookup tables (n, 256) uint8 on the device, at least one per `Kind.TABLE` image.
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
        """Return the rows of kinds `first` to `last`, relative to the first row of `within`."""
        offset = self._starts[within]
        return slice(self._starts[first] - offset, self._starts[last + 1] - offset)

    @staticmethod
    def _flip(images: Tensor, numbers: Tensor) -> None:
        images.copy_(images.flip(-1))

    def _change_levels(self, images: Tensor, numbers: Tensor) -> None:
        """Apply the operations that map levels to levels, with one table per image and channel."""
        levels = images.flatten(2).long()
        host_rows = self._rows(Kind.TABLE, Kind.TABLE, Kind.TABLE)
        host_tables = self._tables[host_rows][:, None].expand(-1, images.shape[1], -1)
        if host_rows.stop == len(images):
            pixel_ops.look_up(host_tables, levels, images)
            return

        # The tables of the other rows depend on the image, so compute them on the device.
        tables = host_tables.new_empty(*images.shape[:2], 256)
        if host_rows.stop:
            tables[host_rows] = host_tables
        highest = levels[host_rows.stop :].amax(2, keepdim=True)
        for kind, write_tables in _TABLES.items():
            rows = self._rows(kind, kind, Kind.TABLE)
            if rows.start < rows.stop:
                within = self._rows(kind, kind, Kind.AUTO_CONTRAST)
                write_tables(levels[rows], highest[within], tables[rows])
        pixel_ops.look_up(tables, levels, images)

    @staticmethod
    def _tf_warp(images: Tensor, numbers: Tensor) -> None:
        fill = numbers[:, 6:9, None, None].to(torch.uint8)
        pixel_ops.affine_nearest(images, numbers[:, :6], fill, out=images)

    def _change_floats(self, images: Tensor, numbers: Tensor) -> None:
        """Apply the operations that compute with floating-point numbers, kind by kind."""
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

        # Warps need no clamping, because they interpolate between levels.
        unclamped = floats[self._rows(Kind.CONTRAST, Kind.HUE, Kind.WARP)]
        if len(unclamped):
            unclamped.clamp_(0.0, 255.0)
        images.copy_(floats)

    @staticmethod
    def _warp(floats: Tensor, numbers: Tensor) -> None:
        pixel_ops.affine(floats, numbers[:, :6], numbers[:, 6:9, None, None], out=floats)

    def _blend(self, floats: Tensor, numbers: Tensor) -> None:
        """Blend each image with a base image: factor 0 returns the base image, factor 1 the
        image."""
        contrast, color, tf_color, sharp, tf_sharp = (
            self._rows(kind, kind, Kind.CONTRAST)
            for kind in (
                Kind.CONTRAST,
                Kind.SATURATION,
                Kind.TF_SATURATION,
                Kind.SHARPNESS,
                Kind.TF_SHARPNESS,
            )
        )

        bases: list[Tensor] = []
        if color.stop:  # rows with contrast or color
            gray = pixel_ops.gray(floats[: color.stop])
            if contrast.stop:
                bases.append(pixel_ops.mean_level(gray[contrast]))
            if color.start < color.stop:
                bases.append(gray[color])
        if tf_color.start < tf_color.stop:
            bases.append(pixel_ops.tf_gray(floats[tf_color]))
        if sharp.start < tf_sharp.stop:
            # `smooth` does not write the border, so start with a copy of the image.
            bases.append(floats[sharp.start :])

        base_images = torch.cat([base.expand(-1, *floats.shape[1:]) for base in bases])
        for rows, rounding in ((sharp, 6), (tf_sharp, 0)):
            if rows.start < rows.stop:
                pixel_ops.smooth(floats[rows], rounding, base_images[rows])

        # Any order of operations other than that in Pillow's Blend.c would round differently. Work
        # in place, because allocating memory costs more than the arithmetic.
        floats.sub_(base_images).mul_(numbers[:, :1, None, None]).add_(base_images)

    @staticmethod
    def _blur(floats: Tensor, numbers: Tensor) -> None:
        weights = numbers[:, :3, None, None].split(1, 1)
        floats.copy_(pixel_ops.blur(floats, *weights))

    @staticmethod
    def _turn_hue(floats: Tensor, numbers: Tensor) -> None:
        floats.copy_(pixel_ops.hue(floats, numbers[:, :1, None, None]))

    @staticmethod
    def _cut_out(images: Tensor, numbers: Tensor) -> None:
        images.masked_fill_(pixel_ops.in_box(images, numbers[:, :4]), CUTOUT_GRAY)
