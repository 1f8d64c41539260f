"""The columns of a batch's augmentation table (B, K).

`vit.data.augment.draw` writes the table on the host, `vit.data.augment.apply` reads it on the
device. The columns follow from the config: flip, mixing, then operation by operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vit.config.schema import AugmentConfig

# The first columns, which every table has; `table_layout` has the others. LAMBDA is the weight of
# the row's own image and label (MixUp). TOP to RIGHT is the box that CutMix takes from the partner.
FLIP, LAMBDA, CUTMIX, TOP, BOTTOM, LEFT, RIGHT, FIRST_OP = range(8)

_TIMM = (
    "auto_contrast",
    "equalize",
    "invert",
    "rotate",
    "posterize",
    "solarize",
    "solarize_add",
    "color",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
_TORCHVISION = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "auto_contrast",
    "equalize",
)
OP_NAMES: dict[str, tuple[str, ...]] = {
    "timm": _TIMM,
    "timm_inc0": _TIMM,
    "timm_auto": (*_TIMM, "posterize_increasing", "posterize_original"),
    "torchvision": _TORCHVISION,
    "torchvision_auto": (*_TORCHVISION[1:], "invert"),
    "ta_wide": _TORCHVISION,
    "big_vision": (
        "auto_contrast",
        "equalize",
        "invert",
        "rotate",
        "posterize",
        "solarize",
        "color",
        "contrast",
        "brightness",
        "sharpness",
        "shear_x",
        "shear_y",
        "translate_x",
        "translate_y",
        "cutout",
        "solarize_add",
    ),
    "three_augment": ("grayscale", "solarize", "blur"),
    "color_jitter": ("brightness", "contrast", "saturation", "hue"),
}
"""The sets of operations. Their order and length are those of the source, and part of the random
stream, so sets never change. RandAugment: timm/data/auto_augment.py (`_RAND_INCREASING_TRANSFORMS`,
`_RAND_TRANSFORMS`), torchvision/transforms/autoaugment.py, big_vision/pp/autoaugment.py.
AutoAugment and TrivialAugment: timm and torchvision. 3-Augment: DeiT III. Colour jitter:
torchvision."""
AUTO_AUGMENT_SETS: dict[str, tuple[str, ...]] = {
    "ta_wide": ("ta_wide",),
    **dict.fromkeys(("imagenet", "cifar10", "svhn"), ("torchvision_auto",) * 2),
    **dict.fromkeys(("original", "originalr", "v0", "v0r"), ("timm_auto",) * 2),
}
"""The sets of each value of `augment.auto_augment`, in the order of application."""
_WITHOUT_STRENGTH = {
    "three_augment": ("grayscale", "solarize"),
    "randaugment": ("identity", "auto_contrast", "equalize", "invert"),
}


@dataclass(frozen=True)
class OpColumn:
    """The columns of one operation per sample.

    `column` has the number in `OP_NAMES[op_set]` (-1: no operation), the next column the strength.
    big_vision's operations have two more columns, the place of the cutout: uniform numbers in
    [0, 1) for x and y.
    """

    op_set: str
    column: int


@dataclass(frozen=True)
class TableLayout:
    """The columns that depend on the config; None: not drawn."""

    op_columns: tuple[OpColumn, ...]
    """The operations in the order of application: RandAugment or AutoAugment, 3-Augment, colour
    jitter."""
    shift: int | None
    """The first of two columns: the pixels by which the view is beyond the left (negative) or right
    border of the image, and beyond its upper (negative) or lower border."""
    erase: int | None
    """The first of four columns, top, bottom, left, right of the erased box (all 0: no box), and of
    `num_noise` more."""
    num_noise: int
    """The columns of the fill. 3: a colour; 1: an integer below 2**24 that seeds the noise."""
    width: int
    """The number of columns, K."""


def table_layout(config: AugmentConfig) -> TableLayout:
    """Return the columns that `draw_table` writes and `vit.data.augment.apply.Augment` reads."""
    op_sets: list[str] = [config.randaugment_ops] * config.randaugment_layers
    if config.auto_augment is not None:
        op_sets += AUTO_AUGMENT_SETS[config.auto_augment]
    if config.three_augment:
        op_sets.append("three_augment")
    op_sets += ["color_jitter" for amount in config.color_jitter if amount > 0]
    op_columns = []
    column = FIRST_OP
    for op_set in op_sets:
        op_columns.append(OpColumn(op_set, column))
        column += 4 if op_set == "big_vision" else 2
    shift = None
    if config.crop == "simple":
        shift = column
        column += 2
    erase = None
    num_noise = {"const": 0, "rand": 3, "pixel": 1}[config.erasing_mode]
    if config.erasing_prob > 0:
        erase = column
        column += 4 + num_noise
    return TableLayout(tuple(op_columns), shift, erase, num_noise, column)


def describe(config: AugmentConfig, row: NDArray[np.float32]) -> list[str]:
    """List the operations of a row (K,) except mixing: "flip", "rotate -8.7", "erase"."""
    layout = table_layout(config)
    operations = []
    if layout.shift is not None and row[layout.shift : layout.shift + 2].any():
        operations.append("shift {:+.0f} {:+.0f}".format(*row[layout.shift : layout.shift + 2]))
    if row[FLIP]:
        operations.append("flip")
    for op_column in layout.op_columns:
        op, strength = row[op_column.column : op_column.column + 2]
        if op < 0:
            continue
        name = OP_NAMES[op_column.op_set][int(op)]
        without = _WITHOUT_STRENGTH.get(op_column.op_set, _WITHOUT_STRENGTH["randaugment"])
        operations.append(name if name in without else f"{name} {strength + 0.0:.2g}")  # no -0
    if layout.erase is not None and row[layout.erase + 1] > row[layout.erase]:
        operations.append("erase")
    return operations
