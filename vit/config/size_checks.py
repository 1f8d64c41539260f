"""What cannot be in `schedule.image_sizes`: a rule is its message and whether it holds, as in
`vit.config.checks`, which asks for them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vit.config.base import height_width

if TYPE_CHECKING:
    from vit.config.schema import Config


def image_size_rules(config: Config) -> dict[str, bool]:
    """Return what is wrong, in dotted keys and with a remedy -> whether it is."""
    stages = config.schedule.image_sizes
    model = config.model
    epochs = config.train.epochs
    name = re.fullmatch(r"vit_.+?([1-9]\d*)", model.name)
    rules = {
        f"schedule.image_sizes needs a model that resamples its positions; model.name={model.name}"
        " is one of timm's: remove it, or take one of ours, such as vit_s16": (
            bool(stages) and model.name.startswith("timm/")
        )
    }
    patch = height_width(model.patch_size or (int(name[1]) if name else 1))
    following = [*(stage.image_size for stage in stages[1:]), model.image_size]
    before = 0
    for number, (stage, after) in enumerate(zip(stages, following, strict=False)):
        size = height_width(stage.image_size)
        key = f"schedule.image_sizes[{number}]"
        around = [_multiple(size, patch, more) for more in (0, 1)]
        near = " and ".join(_side(each) for each in around if all(each))
        rules |= {
            f"{key}.image_size={_side(size)} is not a multiple of the patch, {_side(patch)}: the"
            f" nearest that work are {near}": any(
                side % of_patch for side, of_patch in zip(size, patch, strict=True)
            ),
            f"{key}.until_epoch={stage.until_epoch} is not after {before}, where the one before"
            " it ends: put them in order": stage.until_epoch <= before,
            f"{key}.until_epoch={stage.until_epoch} is not before the end of the run,"
            f" train.epochs={epochs}: the last epochs have model.image_size": (
                epochs is not None and stage.until_epoch >= epochs
            ),
            f"{key}.image_size={_side(size)} is also that of the epochs behind it: join them": (
                size == height_width(after)
            ),
        }
        before = max(before, stage.until_epoch)
    return rules


def _multiple(size: tuple[int, int], patch: tuple[int, int], more: int) -> tuple[int, int]:
    """Return the largest size of whole patches within `size`; with more=1 the smallest around."""
    height, width = (
        (side + more * (of_patch - 1)) // of_patch * of_patch
        for side, of_patch in zip(size, patch, strict=True)
    )
    return height, width


def _side(size: tuple[int, int]) -> str:
    return str(size[0]) if size[0] == size[1] else f"[{size[0]}, {size[1]}]"
