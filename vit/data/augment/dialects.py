"""The operations of each set at a drawn strength: RandAugment in three dialects, 3-Augment, jitter.

The table has the number of an operation and its strength, on the set's own scale
(`vit.data.augment.draw`). Here the number becomes a function that turns the strength into grey
levels, degrees or pixels, as the set's source does, and calls `vit.data.augment.pixel_ops`.

Sources: timm/data/auto_augment.py, "increasing" operations (`rand-m9-mstd0.5-inc1`), bilinear;
torchvision/transforms/autoaugment.py on Pillow images, with the bilinear interpolation of
torchvision's references, on black; big_vision/pp/autoaugment.py of google-research/big_vision
(nearest pixel, on grey), including the side effects of TensorFlow, which comments explain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from vit.data.augment import pixel_ops
from vit.data.augment.table import OP_NAMES

Op = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(images (B, C, H, W) float32 of integer levels, strength (B, 1, 1, 1), place (B, 2) in [0, 1) or
(B, 0)) -> float32 for `pixel_ops.to_levels`."""

BLACK = 0.0
MIDDLE_GREY = 128.0


@lru_cache
def _mean_colour(device: torch.device) -> Tensor:
    """Return what timm's warps leave empty: its `img_mean`, ImageNet's mean colour.

    Whatever `data.mean` is.
    """
    return torch.tensor([124.0, 116.0, 104.0], device=device).view(1, 3, 1, 1)


# --- timm: strengths -10..10 ----------------------------------------------------------------------


def _timm_factor(strength: Tensor) -> Tensor:
    # In double, as in the source: the last bit decides a level.
    return (1.0 + strength.double() / 10.0 * 0.9).clamp(min=0.1).float()


_TIMM: dict[str, Op] = {
    "auto_contrast": lambda x, s, _: pixel_ops.auto_contrast(x),
    "equalize": lambda x, s, _: pixel_ops.equalize(x),
    "invert": lambda x, s, _: pixel_ops.invert(x),
    "rotate": lambda x, s, _: pixel_ops.rotate(x, 3.0 * s, _mean_colour(x.device)),
    "posterize": lambda x, s, _: pixel_ops.posterize(x, 4.0 - (0.4 * s.abs()).floor()),
    "solarize": lambda x, s, _: pixel_ops.solarize(x, 256.0 - (25.6 * s.abs()).floor()),
    "solarize_add": lambda x, s, _: pixel_ops.solarize_add(x, (11.0 * s.abs()).floor()),
    "color": lambda x, s, _: pixel_ops.saturation(x, _timm_factor(s)),
    "contrast": lambda x, s, _: pixel_ops.contrast(x, _timm_factor(s)),
    "brightness": lambda x, s, _: pixel_ops.brightness(x, _timm_factor(s)),
    "sharpness": lambda x, s, _: pixel_ops.sharpness(x, _timm_factor(s)),
    "shear_x": lambda x, s, _: pixel_ops.shear_x(x, 0.03 * s, _mean_colour(x.device)),
    "shear_y": lambda x, s, _: pixel_ops.shear_y(x, 0.03 * s, _mean_colour(x.device)),
    "translate_x": lambda x, s, _: pixel_ops.translate_x(
        x, 0.045 * s * x.shape[-1], _mean_colour(x.device)
    ),
    "translate_y": lambda x, s, _: pixel_ops.translate_y(
        x, 0.045 * s * x.shape[-2], _mean_colour(x.device)
    ),
}

# --- torchvision: strengths -30..30 ---------------------------------------------------------------


def _torchvision_factor(strength: Tensor) -> Tensor:
    # The source's magnitudes are float32 numbers, whose last bits decide some levels.
    magnitudes = torch.linspace(0.0, 0.9, 31, device=strength.device).double()[
        strength.abs().long()
    ]
    return (1.0 + magnitudes.copysign(strength)).float()


def _torchvision_pixels(strength: Tensor, side: int) -> Tensor:
    """Return full pixels of `side`: up to 150 of 331; positive moves the content right or down."""
    return (strength * (150.0 / 331.0 * side / 30.0)).trunc()


_TORCHVISION: dict[str, Op] = {
    "identity": lambda x, s, _: x,
    "shear_x": lambda x, s, _: pixel_ops.shear_x(x, 0.01 * s, BLACK),
    "shear_y": lambda x, s, _: pixel_ops.shear_y(x, 0.01 * s, BLACK),
    "translate_x": lambda x, s, _: pixel_ops.translate_x(
        x, -_torchvision_pixels(s, x.shape[-1]), BLACK
    ),
    "translate_y": lambda x, s, _: pixel_ops.translate_y(
        x, -_torchvision_pixels(s, x.shape[-2]), BLACK
    ),
    "rotate": lambda x, s, _: pixel_ops.rotate(x, s, BLACK),
    "brightness": lambda x, s, _: pixel_ops.brightness(x, _torchvision_factor(s)),
    "color": lambda x, s, _: pixel_ops.saturation(x, _torchvision_factor(s)),
    "contrast": lambda x, s, _: pixel_ops.contrast(x, _torchvision_factor(s)),
    "sharpness": lambda x, s, _: pixel_ops.sharpness(x, _torchvision_factor(s)),
    "posterize": lambda x, s, _: pixel_ops.posterize(x, 8.0 - (s.abs() / 7.5).round()),
    "solarize": lambda x, s, _: pixel_ops.solarize(x, 255.0 - 8.5 * s.abs()),
    "auto_contrast": lambda x, s, _: pixel_ops.auto_contrast(x),
    "equalize": lambda x, s, _: pixel_ops.equalize(x),
}

# --- big_vision: strengths -20..20 ----------------------------------------------------------------


def _big_vision_factor(strength: Tensor) -> Tensor:
    return 0.18 * strength.abs() + 0.1


def _tf_grey(images: Tensor) -> Tensor:
    """Do as tf.image.rgb_to_grayscale of uint8: its weights, times 255.5, fraction cut off."""
    red, green, blue = (images / 255.0).split(1, 1)
    return ((0.2989 * red + 0.5870 * green + 0.1140 * blue) * 255.5).floor()


def _tf_contrast(images: Tensor, factor: Tensor) -> Tensor:
    # The source's mean is that of the histogram's 256 counts, not of the levels: a constant, 196
    # for 224 x 224 pixels.
    mean = float(min(images.shape[-2] * images.shape[-1] // 256, 255))
    return mean + factor * (images - mean)


def _tf_auto_contrast(images: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    scale = torch.full_like(high, 255.0) / (high - low).clamp(min=1.0)
    return torch.where(high > low, images * scale - low * scale, images)


def _tf_posterize(images: Tensor, strength: Tensor) -> Tensor:
    # Keeping 0 bits is a shift by 8, which TensorFlow makes one by 7.
    return pixel_ops.posterize(images, (0.4 * strength.abs()).floor().clamp(min=1.0))


def _tf_solarize(images: Tensor, strength: Tensor) -> Tensor:
    # The threshold is cast to uint8: 256, at strength 10, becomes 0, and all pixels are inverted.
    return pixel_ops.solarize(images, (25.6 * strength.abs()).floor().remainder(256.0))


def _cutout(images: Tensor, strength: Tensor, place: Tensor) -> Tensor:
    """Cover a square of up to 80 pixels (at strength 10) with grey, centred anywhere."""
    height, width = images.shape[-2:]
    half = (4.0 * strength.abs()).floor()
    x = (place[:, 0] * width).floor().view(-1, 1, 1, 1)
    y = (place[:, 1] * height).floor().view(-1, 1, 1, 1)
    in_square = pixel_ops.in_box(images, y - half, y + half, x - half, x + half)
    return torch.where(in_square, MIDDLE_GREY, images)


def _warped(images: Tensor, *matrix: Tensor | float) -> Tensor:
    return pixel_ops.affine_nearest(images, matrix, MIDDLE_GREY)


def _tf_rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate about the centre (tensorflow_addons/image/transform_ops.py)."""
    last_y, last_x = (side - 1 for side in images.shape[-2:])
    angle = degrees * (math.pi / 180.0)
    cos = angle.cos()
    sin = angle.sin()
    offset_x = (last_x - (cos * last_x - sin * last_y)) / 2
    offset_y = (last_y - (sin * last_x + cos * last_y)) / 2
    return _warped(images, cos, -sin, offset_x, sin, cos, offset_y)


_BIG_VISION: dict[str, Op] = {
    "auto_contrast": lambda x, s, _: _tf_auto_contrast(x),
    "equalize": lambda x, s, _: pixel_ops.equalize(x),
    "invert": lambda x, s, _: pixel_ops.invert(x),
    "rotate": lambda x, s, _: _tf_rotate(x, 3.0 * s),
    "posterize": lambda x, s, _: _tf_posterize(x, s),
    "solarize": lambda x, s, _: _tf_solarize(x, s),
    "color": lambda x, s, _: pixel_ops.blend(_tf_grey(x), x, _big_vision_factor(s)),
    "contrast": lambda x, s, _: _tf_contrast(x, _big_vision_factor(s)),
    "brightness": lambda x, s, _: pixel_ops.brightness(x, _big_vision_factor(s)),
    "sharpness": lambda x, s, _: pixel_ops.sharpness(x, _big_vision_factor(s), rounding=0.0),
    "shear_x": lambda x, s, _: _warped(x, 1.0, 0.3 * (s / 10.0), 0.0, 0.0, 1.0, 0.0),
    "shear_y": lambda x, s, _: _warped(x, 1.0, 0.0, 0.0, 0.3 * (s / 10.0), 1.0, 0.0),
    "translate_x": lambda x, s, _: _warped(x, 1.0, 0.0, 10.0 * s, 0.0, 1.0, 0.0),
    "translate_y": lambda x, s, _: _warped(x, 1.0, 0.0, 0.0, 0.0, 1.0, 10.0 * s),
    "cutout": _cutout,
    "solarize_add": lambda x, s, _: pixel_ops.solarize_add(x, (11.0 * s.abs()).floor()),
}

# --- DeiT III's 3-Augment (facebookresearch/deit:augment.py): strengths are radii in pixels -------

_THREE_AUGMENT: dict[str, Op] = {
    "grayscale": lambda x, s, _: pixel_ops.grayscale(x),
    "solarize": lambda x, s, _: pixel_ops.solarize(x, torch.full_like(s, 128.0)),
    "blur": lambda x, s, _: pixel_ops.gaussian_blur(x, s),
}

# --- colour jitter: strengths are factors, hue's are turns ----------------------------------------

_COLOR_JITTER: dict[str, Op] = {
    "brightness": lambda x, s, _: pixel_ops.brightness(x, s),
    "contrast": lambda x, s, _: pixel_ops.contrast(x, s),
    "saturation": lambda x, s, _: pixel_ops.saturation(x, s),
    "hue": lambda x, s, _: pixel_ops.hue(x, s),
}

_SETS = {
    "timm": _TIMM,
    "torchvision": _TORCHVISION,
    "big_vision": _BIG_VISION,
    "three_augment": _THREE_AUGMENT,
    "color_jitter": _COLOR_JITTER,
}
OPS: dict[str, tuple[Op, ...]] = {
    name: tuple(_SETS[name][op] for op in names) for name, names in OP_NAMES.items()
}
"""The functions behind `vit.data.augment.table.OP_NAMES`, by set and number."""
