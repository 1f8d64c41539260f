"""The policies of AutoAugment (Cubuk et al. 2019), each with 25 pairs of operations.

Each operation has a probability and a strength. `vit.data.augment.draw` draws one pair per image.
torchvision (transforms/autoaugment.py, `_get_policies`) and timm (data/auto_augment.py,
`auto_augment_policy_*`) use the same pairs for ImageNet but different strength scales
(`vit.data.augment.dialects`). timm has three versions of "posterize".
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.data.augment.table import AUTO_AUGMENT_SETS, OP_NAMES

# Each line is a pair of operations. An operation has a probability and possibly a strength.
_IMAGENET = """
posterize .4 8, rotate .6 9
solarize .6 5, auto_contrast .6
equalize .8, equalize .6
posterize .6 7, posterize .6 6
equalize .4, solarize .2 4
equalize .4, rotate .8 8
solarize .6 3, equalize .6
posterize .8 5, equalize 1
rotate .2 3, solarize .6 8
equalize .6, posterize .4 6
rotate .8 8, color .4 0
rotate .4 9, equalize .6
equalize 0, equalize .8
invert .6, equalize 1
color .6 4, contrast 1 8
rotate .8 8, color 1 2
color .8 8, solarize .8 7
sharpness .4 7, invert .6
shear_x .6 5, equalize 1
color .4 0, equalize .6
equalize .4, solarize .2 4
solarize .6 5, auto_contrast .6
invert .6, equalize 1
color .6 4, contrast 1 8
equalize .8, equalize .6
"""
_CIFAR10 = """
invert .1, contrast .2 6
rotate .7 2, translate_x .3 9
sharpness .8 1, sharpness .9 3
shear_y .5 8, translate_y .7 9
auto_contrast .5, equalize .9
shear_y .2 7, posterize .3 7
color .4 3, brightness .6 7
sharpness .3 9, brightness .7 9
equalize .6, equalize .5
contrast .6 7, sharpness .6 5
color .7 7, translate_x .5 8
equalize .3, auto_contrast .4
translate_y .4 3, sharpness .2 6
brightness .9 6, color .2 8
solarize .5 2, invert 0
equalize .2, auto_contrast .6
equalize .2, equalize .6
color .9 9, equalize .6
auto_contrast .8, solarize .2 8
brightness .1 3, color .7 0
solarize .4 5, auto_contrast .9
translate_y .9 9, translate_y .7 9
auto_contrast .9, solarize .8 3
equalize .8, invert .1
translate_y .7 9, auto_contrast .9
"""
_SVHN = """
shear_x .9 4, invert .2
shear_y .9 8, invert .7
equalize .6, solarize .6 6
invert .9, equalize .6
equalize .6, rotate .9 3
shear_x .9 4, auto_contrast .8
shear_y .9 8, invert .4
shear_y .9 5, solarize .2 6
invert .9, auto_contrast .8
equalize .6, rotate .9 3
shear_x .9 4, solarize .3 3
shear_y .8 8, invert .7
equalize .9, translate_y .6 6
invert .9, equalize .6
contrast .3 3, rotate .8 4
invert .8, translate_y 0 2
shear_y .7 6, solarize .4 8
invert .6, rotate .8 4
shear_y .3 7, translate_x .9 3
shear_x .1 6, invert .6
solarize .7 2, translate_y .6 7
shear_y .8 4, invert .8
shear_x .7 9, translate_y .8 3
shear_y .8 5, auto_contrast .7
shear_x .7 2, invert .1
"""
_V0 = """
equalize .8, shear_y .8 4
color .4 9, equalize .6
color .4 1, rotate .6 8
solarize .8 3, equalize .4
solarize .4 2, solarize .6 2
color .2 0, equalize .8
equalize .4, solarize_add .8 3
shear_x .2 9, rotate .6 8
color .6 1, equalize 1
invert .4, rotate .6 0
equalize 1, shear_y .6 3
color .4 7, equalize .6
posterize .4 6, auto_contrast .4
solarize .6 8, color .6 9
solarize .2 4, rotate .8 9
rotate 1 7, translate_y .8 9
shear_x 0 0, solarize .8 4
shear_y .8 0, color .6 4
color 1 0, rotate .6 2
equalize .8, equalize 0
equalize 1, auto_contrast .6
shear_y .4 7, solarize_add .6 7
posterize .8 2, solarize .6 10
solarize .6 8, equalize .6
color .8 6, rotate .4 5
"""
_PAIRS = {
    "imagenet": _IMAGENET,
    "cifar10": _CIFAR10,
    "svhn": _SVHN,
    "original": _IMAGENET.replace("posterize", "posterize_original"),
    "originalr": _IMAGENET.replace("posterize", "posterize_increasing"),
    "v0": _V0,
    "v0r": _V0.replace("posterize", "posterize_increasing"),
}


class SubPolicies(NamedTuple):
    """The pairs of operations in a policy, as arrays of shape (25, 2)."""

    ops: NDArray[np.int64]
    """Indices of the operations in `OP_NAMES` for the policy's operation set."""
    probs: NDArray[np.float64]
    strengths: NDArray[np.float64]
    """Strengths of the operations; 0 for operations without a strength."""


@lru_cache
def sub_policies(name: str) -> SubPolicies:
    """Return the pairs of operations for `name`, a value of `augment.auto_augment` except
    `ta_wide` and `three_augment`."""
    op_names = OP_NAMES[AUTO_AUGMENT_SETS[name][0]]
    rows = []
    for line in _PAIRS[name].strip().splitlines():
        for text in line.split(", "):
            op, prob, *strength = text.split()
            rows.append((op_names.index(op), float(prob), float(strength[0]) if strength else 0.0))

    # The axes are pair, operation of the pair, and field of the operation.
    ops, probs, strengths = np.array(rows).reshape(-1, 2, 3).transpose(2, 0, 1)
    return SubPolicies(ops.astype(np.int64), probs, strengths)
