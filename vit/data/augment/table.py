"""The augmentation table: what each column of a batch's table (B, K) means.

`vit.data.augment.draw` writes it on the host, `vit.data.augment.apply` reads it on the device. Its
columns follow from the config: a flip, how to mix, then operation by operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vit.config.schema import AugmentConfig

# Columns that every table has; `table_layout` gives those that follow. LAMBDA is the weight of the
# row's own image and label (MixUp), TOP to RIGHT the box that CutMix takes from its partner.
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
"""The sets of operations. Order and length are the source's, and part of the random stream, so none
is added to:
RandAugment's of timm/data/auto_augment.py (`_RAND_INCREASING_TRANSFORMS`, `_RAND_TRANSFORMS`),
torchvision/transforms/autoaugment.py and big_vision/pp/autoaugment.py; AutoAugment's of both, and
TrivialAugment's; DeiT III's 3-Augment; torchvision's colour jitter."""
AUTO_AUGMENT_SETS: dict[str, tuple[str, ...]] = {
    "ta_wide": ("ta_wide",),
    **dict.fromkeys(("imagenet", "cifar10", "svhn"), ("torchvision_auto",) * 2),
    **dict.fromkeys(("original", "originalr", "v0", "v0r"), ("timm_auto",) * 2),
}
"""`augment.auto_augment` -> the sets of its operations, one after the other."""
_WITHOUT_STRENGTH = {
    "three_augment": ("grayscale", "solarize"),
    "randaugment": ("identity", "auto_contrast", "equalize", "invert"),
}


@dataclass(frozen=True)
class OpColumn:
    """One operation per sample: its number in `OP_NAMES[op_set]`, -1 for none, and its strength.

    The number is in `column`, the strength in the next one. big_vision's operations have two more,
    the place of its cutout: uniform numbers in [0, 1) for x and y.
    """

    op_set: str
    column: int


@dataclass(frozen=True)
class TableLayout:
    """The columns that depend on the config; None: not drawn."""

    op_columns: tuple[OpColumn, ...]
    """In the order in which they are applied: RandAugment's or AutoAugment's, 3-Augment's, colour
    jitter's."""
    shift: int | None
    """Two columns: pixels by which the view is beyond the image's left (negative) or right border,
    and beyond its upper (negative) or lower one."""
    erase: int | None
    """Four columns: top, bottom, left, right of the erased box, which is empty at 0; then
    `num_noise` more."""
    num_noise: int
    """3: a colour; 1: an integer below 2**24 that seeds the noise of all pixels."""
    width: int
    """K."""


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
    """Name what a row (K,) does to its image, mixing apart: "flip", "rotate -8.7", "erase"."""
    layout = table_layout(config)
    found = []
    if layout.shift is not None and row[layout.shift : layout.shift + 2].any():
        found.append("shift {:+.0f} {:+.0f}".format(*row[layout.shift : layout.shift + 2]))
    if row[FLIP]:
        found.append("flip")
    for op_column in layout.op_columns:
        op, strength = row[op_column.column : op_column.column + 2]
        if op < 0:
            continue
        name = OP_NAMES[op_column.op_set][int(op)]
        without = _WITHOUT_STRENGTH.get(op_column.op_set, _WITHOUT_STRENGTH["randaugment"])
        found.append(name if name in without else f"{name} {strength + 0.0:.2g}")  # no -0
    if layout.erase is not None and row[layout.erase + 1] > row[layout.erase]:
        found.append("erase")
    return found
