"""The augmentation operations of each set: four variants of RandAugment, two of AutoAugment,
TrivialAugment, 3-Augment and color jitter.

The augmentation table (`vit.data.augment.draw`) contains the index of an operation and its strength
on the scale of its set. On the host, this module converts both, with the formulas of the set's
source, to inputs for the device: a `Kind`, and a lookup table or a few parameters.

Sources:
timm/data/auto_augment.py, bilinear. "Increasing" operations (`rand-m9-mstd0.5-inc1`) have a
stronger effect at a larger strength, others at a smaller one.
torchvision/transforms/autoaugment.py on Pillow images, bilinear as in torchvision's reference
scripts, black outside the image.
big_vision/pp/autoaugment.py of google-research/big_vision (nearest pixel, gray outside the image),
including quirks of TensorFlow, which comments explain.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import vit.data.augment.pixel_ops as pixel_ops
from vit.data.augment.kinds import Kind
from vit.data.augment.table import OP_NAMES

Size = tuple[int, int]
"""(height, width) of the images in pixels."""


class Drawn(NamedTuple):
    """The random numbers for one operation on n images of `size`."""

    strength: Tensor
    """The strengths of the operation, (n, 1) float32."""
    place: Tensor
    """(n, 2) float32 in [0, 1): the relative x and y position of the cutout; zeros for sets without
    cutout."""
    size: Size


class Op(NamedTuple):
    """An operation: its kind and a function that computes its parameters.

    For `Kind.TABLE`, `numbers` returns lookup tables (n, 256) with levels 0..255. For other kinds,
    it returns the parameters listed in `Kind`, each (n, 1) or one number for all images.
    """

    kind: Kind
    numbers: Callable[[Drawn], Tensor | Sequence[Tensor | float]]


NONE = Op(Kind.NONE, lambda drawn: ())
AUTO_CONTRAST = Op(Kind.AUTO_CONTRAST, lambda drawn: ())
EQUALIZE = Op(Kind.EQUALIZE, lambda drawn: ())

MEAN_COLOR = (124.0, 116.0, 104.0)
"""The fill color of timm's warps (`img_mean`), which is ImageNet's mean color for all data sets."""
BLACK = (0.0, 0.0, 0.0)
MIDDLE_GRAY = (128.0, 128.0, 128.0)


def _by_table(levels: Callable[[Tensor, Tensor], Tensor]) -> Op:
    return Op(Kind.TABLE, lambda drawn: levels(pixel_ops.LEVELS, drawn.strength))


def _by_factor(kind: Kind, factor: Callable[[Tensor], Tensor]) -> Op:
    return Op(kind, lambda drawn: (factor(drawn.strength),))


# --- matrices (a to f) of `pixel_ops.affine`: content turns counterclockwise, moves left and up ---

Matrix = tuple[Tensor | float, ...]


def _warp(fill: Sequence[float], matrix: Callable[[Tensor, Size], Matrix]) -> Op:
    return Op(Kind.WARP, lambda drawn: (*matrix(drawn.strength, drawn.size), *fill))


def _turned(degrees: Tensor) -> Matrix:
    """Return the matrix that rotates the content counterclockwise about the center."""
    angle = degrees * (math.pi / 180.0)
    return angle.cos(), -angle.sin(), 0.0, angle.sin(), angle.cos(), 0.0


def _sheared_x(shear: Tensor, size: Size) -> Matrix:
    """Return the matrix that moves row y, counted from the top, left by `shear` * y pixels."""
    return 1.0, shear, shear * (size[0] / 2), 0.0, 1.0, 0.0


def _sheared_y(shear: Tensor, size: Size) -> Matrix:
    """Return the matrix that moves column x, counted from the left, up by `shear` * x pixels."""
    return 1.0, 0.0, 0.0, shear, 1.0, shear * (size[1] / 2)


def _moved(left: Tensor | float, up: Tensor | float) -> Matrix:
    return 1.0, 0.0, left, 0.0, 1.0, up


# --- timm: strengths -10..10 ----------------------------------------------------------------------


def _timm_factor(strength: Tensor) -> Tensor:
    # A rounding difference can change a level, so use double precision, as the source does.
    return (1.0 + strength.double() / 10.0 * 0.9).clamp(min=0.1).float()


_TIMM: dict[str, Op] = {
    "auto_contrast": AUTO_CONTRAST,
    "equalize": EQUALIZE,
    "invert": _by_table(lambda x, s: pixel_ops.invert(x).expand(len(s), -1)),
    "rotate": _warp(MEAN_COLOR, lambda s, size: _turned(3.0 * s)),
    "posterize": _by_table(lambda x, s: pixel_ops.posterize(x, 4.0 - (0.4 * s.abs()).floor())),
    "solarize": _by_table(lambda x, s: pixel_ops.solarize(x, 256.0 - (25.6 * s.abs()).floor())),
    "solarize_add": _by_table(lambda x, s: pixel_ops.solarize_add(x, (11.0 * s.abs()).floor())),
    "color": _by_factor(Kind.SATURATION, _timm_factor),
    "contrast": _by_factor(Kind.CONTRAST, _timm_factor),
    "brightness": _by_table(lambda x, s: x * _timm_factor(s)),
    "sharpness": _by_factor(Kind.SHARPNESS, _timm_factor),
    "shear_x": _warp(MEAN_COLOR, lambda s, size: _sheared_x(0.03 * s, size)),
    "shear_y": _warp(MEAN_COLOR, lambda s, size: _sheared_y(0.03 * s, size)),
    "translate_x": _warp(MEAN_COLOR, lambda s, size: _moved(0.045 * s * size[1], 0.0)),
    "translate_y": _warp(MEAN_COLOR, lambda s, size: _moved(0.0, 0.045 * s * size[0])),
}


def _timm_unsigned_factor(strength: Tensor) -> Tensor:
    return (strength.abs().double() / 10.0 * 1.8 + 0.1).float()


_TIMM_INC0: dict[str, Op] = {
    **_TIMM,
    "posterize": _by_table(lambda x, s: pixel_ops.posterize(x, (0.4 * s.abs()).floor())),
    "solarize": _by_table(lambda x, s: pixel_ops.solarize(x, (25.6 * s.abs()).floor())),
    "color": _by_factor(Kind.SATURATION, _timm_unsigned_factor),
    "contrast": _by_factor(Kind.CONTRAST, _timm_unsigned_factor),
    "brightness": _by_table(lambda x, s: x * _timm_unsigned_factor(s)),
    "sharpness": _by_factor(Kind.SHARPNESS, _timm_unsigned_factor),
}
_TIMM_AUTO: dict[str, Op] = {
    **_TIMM_INC0,
    "posterize_increasing": _TIMM["posterize"],
    "posterize_original": _by_table(
        lambda x, s: pixel_ops.posterize(x, 4.0 + (0.4 * s.abs()).floor())
    ),
}

# --- torchvision: strengths are numbers of magnitudes, -30..30, AutoAugment's -9..9 ---------------


def _magnitude_of(strength: Tensor, largest: float, num: int) -> Tensor:
    """Return the source's float32 magnitude as float64. Rounding differently could change a
    level."""
    magnitudes = torch.linspace(0.0, largest, num).double()
    return magnitudes[strength.abs().long()].copysign(strength)


def _torchvision(
    shear: Callable[[Tensor], Tensor],
    pixels: Callable[[Tensor, int], Tensor],
    degrees: Callable[[Tensor], Tensor],
    change: Callable[[Tensor], Tensor],
    bits: Callable[[Tensor], Tensor],
    threshold: Callable[[Tensor], Tensor],
) -> dict[str, Op]:
    """Return torchvision's version of each operation. The given functions convert the strength to
    torchvision's scale.

    Args:
        pixels: Converts strength and side length to whole pixels. Positive values move the content
            right or down.
        change: Converts strength to a factor minus 1, in double precision.
    """

    def factor(strength: Tensor) -> Tensor:
        return (1.0 + change(strength)).float()

    return {
        "identity": NONE,
        "shear_x": _warp(BLACK, lambda s, size: _sheared_x(shear(s), size)),
        "shear_y": _warp(BLACK, lambda s, size: _sheared_y(shear(s), size)),
        "translate_x": _warp(BLACK, lambda s, size: _moved(-pixels(s, size[1]), 0.0)),
        "translate_y": _warp(BLACK, lambda s, size: _moved(0.0, -pixels(s, size[0]))),
        "rotate": _warp(BLACK, lambda s, size: _turned(degrees(s))),
        "brightness": _by_table(lambda x, s: x * factor(s)),
        "color": _by_factor(Kind.SATURATION, factor),
        "contrast": _by_factor(Kind.CONTRAST, factor),
        "sharpness": _by_factor(Kind.SHARPNESS, factor),
        "posterize": _by_table(lambda x, s: pixel_ops.posterize(x, bits(s.abs()))),
        "solarize": _by_table(lambda x, s: pixel_ops.solarize(x, threshold(s.abs()))),
        "auto_contrast": AUTO_CONTRAST,
        "equalize": EQUALIZE,
        "invert": _TIMM["invert"],
    }


_LONGEST_MOVE = 150.0 / 331.0
"""The longest translation in RandAugment and AutoAugment, as a fraction of the image side."""
_TORCHVISION = _torchvision(
    shear=lambda s: 0.01 * s,
    pixels=lambda s, side: (s * (_LONGEST_MOVE * side / 30.0)).trunc(),
    degrees=lambda s: s,
    change=lambda s: _magnitude_of(s, 0.9, 31),
    bits=lambda s: 8.0 - (s / 7.5).round(),
    threshold=lambda s: 255.0 - 8.5 * s,
)
_TORCHVISION_AUTO = _torchvision(
    shear=lambda s: _magnitude_of(s, 0.3, 10),
    pixels=lambda s, side: _magnitude_of(s, _LONGEST_MOVE * side, 10).trunc(),
    degrees=lambda s: _magnitude_of(s, 30.0, 10),
    change=lambda s: _magnitude_of(s, 0.9, 10),
    bits=lambda s: 8.0 - (s / 2.25).round(),
    threshold=lambda s: torch.linspace(255.0, 0.0, 10)[s.long()],
)
_TA_WIDE = _torchvision(
    shear=lambda s: _magnitude_of(s, 0.99, 31),
    pixels=lambda s, side: _magnitude_of(s, 32.0, 31).trunc(),
    degrees=lambda s: _magnitude_of(s, 135.0, 31),
    change=lambda s: _magnitude_of(s, 0.99, 31),
    bits=lambda s: 8.0 - (s / 5.0).round(),
    threshold=lambda s: 255.0 - 8.5 * s,
)

# --- big_vision: strengths -20..20 ----------------------------------------------------------------


def _big_vision_factor(strength: Tensor) -> Tensor:
    return 0.18 * strength.abs() + 0.1


def _tf_contrast(drawn: Drawn) -> Tensor:
    # The source averages the 256 histogram counts instead of the levels, so the mean is a constant:
    # 196 for 224 x 224 pixels.
    mean = float(min(math.prod(drawn.size) // 256, 255))
    return mean + _big_vision_factor(drawn.strength) * (pixel_ops.LEVELS - mean)


def _cutout(drawn: Drawn) -> tuple[Tensor, ...]:
    """Return the top, bottom, left and right of a square of up to 80 pixels (at strength 10)."""
    height, width = drawn.size
    half = (4.0 * drawn.strength.abs()).floor()
    x, y = (drawn.place[:, :1] * width).floor(), (drawn.place[:, 1:] * height).floor()
    return y - half, y + half, x - half, x + half


def _tf_turned(degrees: Tensor, size: Size) -> Matrix:
    """Return the rotation matrix of tensorflow_addons/image/transform_ops.py."""
    last_y, last_x = (side - 1 for side in size)
    angle = degrees * (math.pi / 180.0)
    cos, sin = angle.cos(), angle.sin()
    offset_x = (last_x - (cos * last_x - sin * last_y)) / 2
    offset_y = (last_y - (sin * last_x + cos * last_y)) / 2
    return cos, -sin, offset_x, sin, cos, offset_y


def _tf_warp(matrix: Callable[[Tensor, Size], Matrix]) -> Op:
    return _warp(MIDDLE_GRAY, matrix)._replace(kind=Kind.TF_WARP)


_BIG_VISION: dict[str, Op] = {
    "auto_contrast": Op(Kind.TF_AUTO_CONTRAST, lambda drawn: ()),
    "equalize": EQUALIZE,
    "invert": _TIMM["invert"],
    "rotate": _tf_warp(lambda s, size: _tf_turned(3.0 * s, size)),
    # Keep at least 1 bit: TensorFlow turns the shift by 8, needed for 0 bits, into a shift by 7.
    "posterize": _by_table(
        lambda x, s: pixel_ops.posterize(x, (0.4 * s.abs()).floor().clamp(min=1.0))
    ),
    # The source casts the threshold to uint8. At strength 10, the threshold 256 therefore
    # becomes 0, so all pixels are inverted.
    "solarize": _by_table(
        lambda x, s: pixel_ops.solarize(x, (25.6 * s.abs()).floor().remainder(256.0))
    ),
    "color": _by_factor(Kind.TF_SATURATION, _big_vision_factor),
    "contrast": Op(Kind.TABLE, _tf_contrast),
    "brightness": _by_table(lambda x, s: x * _big_vision_factor(s)),
    "sharpness": _by_factor(Kind.TF_SHARPNESS, _big_vision_factor),
    "shear_x": _tf_warp(lambda s, size: (1.0, 0.3 * (s / 10.0), 0.0, 0.0, 1.0, 0.0)),
    "shear_y": _tf_warp(lambda s, size: (1.0, 0.0, 0.0, 0.3 * (s / 10.0), 1.0, 0.0)),
    "translate_x": _tf_warp(lambda s, size: _moved(10.0 * s, 0.0)),
    "translate_y": _tf_warp(lambda s, size: _moved(0.0, 10.0 * s)),
    "cutout": Op(Kind.CUTOUT, _cutout),
    "solarize_add": _TIMM["solarize_add"],
}

# --- DeiT III's 3-Augment (facebookresearch/deit:augment.py): strengths are radii in pixels -------

_THREE_AUGMENT: dict[str, Op] = {
    "grayscale": _by_factor(Kind.SATURATION, torch.zeros_like),
    "solarize": _by_table(lambda x, s: pixel_ops.solarize(x, torch.full_like(s, 128.0))),
    "blur": Op(Kind.BLUR, lambda drawn: pixel_ops.box_weights(drawn.strength)),
}

# --- color jitter: strengths are factors or, for hue, turns of the color wheel --------------------

_COLOR_JITTER: dict[str, Op] = {
    "brightness": _by_table(lambda x, s: x * s),
    "contrast": _by_factor(Kind.CONTRAST, lambda s: s),
    "saturation": _by_factor(Kind.SATURATION, lambda s: s),
    "hue": _by_factor(Kind.HUE, lambda s: s),
}

_SETS = {
    "timm": _TIMM,
    "timm_inc0": _TIMM_INC0,
    "timm_auto": _TIMM_AUTO,
    "torchvision_auto": _TORCHVISION_AUTO,
    "ta_wide": _TA_WIDE,
    "torchvision": _TORCHVISION,
    "big_vision": _BIG_VISION,
    "three_augment": _THREE_AUGMENT,
    "color_jitter": _COLOR_JITTER,
}
OPS: dict[str, tuple[Op, ...]] = {
    "flip": (NONE, Op(Kind.FLIP, lambda drawn: ())),
    **{name: tuple(_SETS[name][op] for op in names) for name, names in OP_NAMES.items()},
}
"""Maps each set of `vit.data.augment.table.OP_NAMES` to its operations, plus the flip."""
