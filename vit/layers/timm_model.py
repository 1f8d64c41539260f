"""Create models of timm as `timm/<name>`, without their published weights.

timm is an optional dependency, imported only for such a model. A timm model gets the attributes
`image_size` (height, width) and `in_chans` of `VisionTransformer`, because callers such as
`vit.training.model_summary.flops_per_image` read the shape of inputs from them.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from vit.layers.arguments import height_width
from vit.system.spelling import did_you_mean


def create_timm_model(
    name: str, image_size: int | tuple[int, int] = 224, num_classes: int = 1000, **fields: Any
) -> nn.Module:
    """Create timm's model `name` (without the `timm/`) for images of `image_size` pixels.

    Raises:
        ValueError: timm is not installed, does not know the name, or cannot make the model with
            these `fields`. All fields that the model lacks are named at once.
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
    fields = {"img_size": image_size, "num_classes": num_classes, "in_chans": 3, **fields}
    unknown = list[str]()
    model: Any = None
    while model is None:
        try:
            model = timm.create_model(name, **fields)
        except (TypeError, RuntimeError, ValueError, AssertionError) as error:
            # Python names only one unknown argument per attempt, timm's MetaFormer names all.
            named = str(error).partition("unexpected keyword argument")[2]
            refused = [field for field in re.findall(r"'(\w+)'", named) if field in fields]
            if not refused:
                if {*unknown} - {"img_size"}:
                    break  # report unknown fields first: this error may follow from them
                raise ValueError(
                    f"timm {timm.__version__} cannot make {name!r} with {fields}: {error}"
                ) from error
            for field in refused:
                del fields[field]
            unknown += refused
    # Convolutional networks take images of any size and have no such argument.
    if lacking := sorted({*unknown} - {"img_size"}):
        remedy = " ".join(f"model.{field}=null" for field in lacking)
        raise ValueError(
            f"timm's {name} has no {', '.join(lacking)}: set {remedy}, or leave them out of the"
            " config"
        )
    model.image_size = height_width(image_size, "image_size")
    model.in_chans = fields["in_chans"]
    return model
