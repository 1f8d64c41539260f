"""Create timm models from `timm/<name>`, without pretrained weights.

timm is an optional dependency that is imported only for these models. Each model gets the
attributes `image_size` (height, width) and `in_chans`, because callers such as
`vit.training.model_summary.flops_per_image` read the input shape from them.
"""

import re
from typing import Any

from vit.layers.arguments import height_width
from vit.layers.image_model import ImageModel
from vit.system.spelling import did_you_mean


def create_timm_model(
    name: str, image_size: int | tuple[int, int] = 224, num_classes: int = 1000, **fields: Any
) -> ImageModel:
    """Create the timm model `name` (without `timm/`) for images of `image_size` pixels.

    Raises:
        ValueError: timm is not installed, does not know the name, or rejects some `fields`. The
            error lists all rejected fields.
    """
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            f"model timm/{name} needs timm, which is not installed: pip install timm"
        ) from error

    if not timm.is_model(name):
        raise ValueError(
            f"timm {timm.__version__} has no model {name!r}{did_you_mean(name, timm.list_models())}"
        )

    fields = {"img_size": image_size, "num_classes": num_classes, "in_chans": 3, **fields}
    model, unknown = _create_without_unknown(name, fields)
    if unknown:
        remedy = " ".join(f"model.{field}=null" for field in unknown)
        raise ValueError(
            f"timm's {name} has no {', '.join(unknown)}: set {remedy}, or remove these settings"
            " from the config"
        )

    model.image_size = height_width(image_size, "image_size")
    model.in_chans = fields["in_chans"]
    return model


def _create_without_unknown(name: str, fields: dict[str, Any]) -> tuple[Any, list[str]]:
    """Create the model without the `fields` that it does not know. Return the model and the names
    of these fields.

    Convolutional networks accept any image size and have no `img_size`, so this field is not
    listed. The model is None if its creation failed even without these fields, perhaps because
    other fields are missing.
    """
    import timm

    unknown: set[str] = set()
    while True:
        try:
            return timm.create_model(name, **fields), sorted(unknown - {"img_size"})
        except (TypeError, RuntimeError, ValueError, AssertionError) as error:
            # Python names one unknown argument per attempt, but timm's MetaFormer names all of
            # them.
            named = str(error).partition("unexpected keyword argument")[2]
            refused = {field for field in re.findall(r"'(\w+)'", named) if field in fields}
            if not refused and unknown - {"img_size"}:
                return None, sorted(unknown - {"img_size"})
            if not refused:
                raise ValueError(
                    f"timm {timm.__version__} cannot create {name!r} with {fields}: {error}"
                ) from error

        unknown |= refused
        fields = {field: value for field, value in fields.items() if field not in refused}
