"""Models of timm as `timm/<name>`, without their published weights.

timm is an optional dependency, imported only when such a model is asked for. A timm model gets
`image_size` (height, width) and `in_chans` as attributes, as our own model has them: whoever needs
an input for it, such as `vit.model_summary.flops_per_image`, reads its shape there.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from vit.system.spelling import did_you_mean


def create_timm_model(
    name: str, image_size: int | tuple[int, int], num_classes: int, **fields: Any
) -> nn.Module:
    """Create timm's model `name` (without the `timm/`) for images of `image_size` pixels.

    Raises:
        ValueError: timm is not installed, does not know the name, or cannot make the model with
            these `fields`; those that the model does not have are named all at once.
    """
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            f"model timm/{name} needs timm, which is not installed: pip install timm"
        ) from error
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models())
        raise ValueError(f"timm {timm.__version__} has no model {name!r}{hint}")
    fields = {"num_classes": num_classes, "in_chans": 3, **fields}
    model: Any
    try:
        try:
            model = timm.create_model(name, img_size=image_size, **fields)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            # Convolutional networks take images of any size and have no such argument.
            model = timm.create_model(name, **fields)
    except (TypeError, RuntimeError, ValueError, AssertionError) as error:
        if unknown := _unknown_fields(name, fields):
            remedy = " ".join(f"model.{field}=null" for field in unknown)
            raise ValueError(
                f"timm's {name} has no {', '.join(unknown)}: set {remedy}, or leave them out of the"
                " config"
            ) from error
        raise ValueError(
            f"timm {timm.__version__} cannot make {name!r} with image_size={image_size} and"
            f" {fields}: {error}"
        ) from error
    model.image_size = height_width(image_size, "image_size")
    model.in_chans = fields["in_chans"]
    return model


def height_width(size: int | tuple[int, int], name: str) -> tuple[int, int]:
    """`size` in pixels as (height, width). Raises ValueError naming it `name`."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ValueError(
            f"{name} is {size!r}: expected a positive number of pixels, or (height, width)"
        )
    return pair


def _unknown_fields(name: str, fields: dict[str, Any]) -> list[str]:
    """Those of `fields` that the constructor does not take; Python names one per attempt."""
    import timm

    fields = dict(fields)
    unknown = list[str]()
    while True:
        try:
            with torch.device("meta"):
                timm.create_model(name, **fields)
            return sorted(unknown)
        except (TypeError, RuntimeError, ValueError, AssertionError) as error:
            found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if found is None or found[1] not in fields:
                return sorted(unknown)
            unknown.append(found[1])
            del fields[found[1]]
