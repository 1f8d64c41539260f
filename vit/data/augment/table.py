"""The columns of a batch's augmentation table (B, K).

The table contains the augmentation parameters of each row. `vit.data.augment.draw` writes it on the
host, and `vit.data.augment.apply` reads it. The config determines the columns: flip, mixing, then
the operations in order.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vit.config.schema import AugmentConfig

# Every table begins with these columns; `table_layout` returns the others. LAMBDA is the weight of
# the row's own image and label (MixUp). TOP to RIGHT are the box that CutMix copies from the
# partner.
FLIP, LAMBDA, CUTMIX, TOP, BOTTOM, LEFT, RIGHT, FIRST_OP = range(8)
NO_OP = -1
"""The index that stands for no operation."""

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
"""The operation sets, whose order and length are those of their sources. A set must never change,
because that would change the random numbers. Sources of RandAugment: timm/data/auto_augment.py
(`_RAND_INCREASING_TRANSFORMS`, `_RAND_TRANSFORMS`), torchvision/transforms/autoaugment.py,
big_vision/pp/autoaugment.py. AutoAugment and TrivialAugment: timm and torchvision. 3-Augment: DeiT
III. Color jitter: torchvision."""

AUTO_AUGMENT_SETS: dict[str, tuple[str, ...]] = {
    "ta_wide": ("ta_wide",),
    "three_augment": ("three_augment",),
    **dict.fromkeys(("imagenet", "cifar10", "svhn"), ("torchvision_auto",) * 2),
    **dict.fromkeys(("original", "originalr", "v0", "v0r"), ("timm_auto",) * 2),
}
"""Maps each value of `augment.auto_augment` to its operation sets, in the order of application."""

_WITHOUT_STRENGTH = {
    "three_augment": ("grayscale", "solarize"),
    "randaugment": ("identity", "auto_contrast", "equalize", "invert"),
}


@dataclass(frozen=True)
class OpColumn:
    """The table columns that describe one operation per sample.

    `column` contains the index of the operation in `OP_NAMES[op_set]`, or NO_OP, and the next
    column its strength. Operations of big_vision have two more columns for the relative x and y
    position of the cutout, uniform in [0, 1).
    """

    op_set: str
    column: int


@dataclass(frozen=True)
class TableLayout:
    """The columns that depend on the config; None for columns that the table lacks."""

    op_columns: tuple[OpColumn, ...]
    """The columns of the operations in the order of application: RandAugment or its replacement,
    color jitter."""
    shift: int | None
    """The first of two columns, for x and y: the number of pixels by which the view extends beyond
    the image. Negative values mean the left or upper border."""
    erase: int | None
    """The first of four columns with the box to erase: top, bottom, left, right (all 0 if none).
    `num_noise` more columns follow."""
    num_noise: int
    """The number of columns for the fill of the erased box: 3 for a color, 1 for an integer below
    2**24 that seeds the noise."""
    width: int
    """The number of columns (K)."""


def table_layout(config: AugmentConfig) -> TableLayout:
    """Return the columns that `draw_table` writes and `vit.data.augment.apply.Augment` reads."""
    op_sets: list[str] = [config.randaugment_ops] * config.randaugment_layers
    if config.auto_augment is not None:
        op_sets += AUTO_AUGMENT_SETS[config.auto_augment]
    op_sets += ["color_jitter" for amount in config.color_jitter if amount > 0]

    op_columns = []
    column = FIRST_OP
    for op_set in op_sets:
        op_columns.append(OpColumn(op_set, column))
        column += 4 if op_set == "big_vision" else 2

    shift = None
    if config.crop != "random_resized":
        shift = column
        column += 2

    erase = None
    num_noise = {"const": 0, "rand": 3, "pixel": 1}[config.erasing_mode]
    if config.erasing_prob > 0:
        erase = column
        column += 4 + num_noise
    return TableLayout(tuple(op_columns), shift, erase, num_noise, column)


def describe(config: AugmentConfig, row: NDArray[np.float32]) -> list[str]:
    """Return a row's operations (K,) as text, except mixing: "flip", "rotate -8.7", "erase"."""
    layout = table_layout(config)
    operations = []
    if layout.shift is not None and row[layout.shift : layout.shift + 2].any():
        operations.append("shift {:+.0f} {:+.0f}".format(*row[layout.shift : layout.shift + 2]))
    if row[FLIP]:
        operations.append("flip")

    for op_column in layout.op_columns:
        op, strength = row[op_column.column : op_column.column + 2]
        if op == NO_OP:
            continue
        name = OP_NAMES[op_column.op_set][int(op)]
        no_strength = _WITHOUT_STRENGTH.get(op_column.op_set, _WITHOUT_STRENGTH["randaugment"])
        # Adding 0.0 turns -0.0 into 0.0.
        operations.append(name if name in no_strength else f"{name} {strength + 0.0:.2g}")

    if layout.erase is not None and row[layout.erase + 1] > row[layout.erase]:
        operations.append("erase")
    return operations
