"""Read the model, preprocessing and class names that transformers stores next to weights.

`config.json` describes the network, and `preprocessor_config.json` the preprocessing.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from vit.layers.norm import EPS
from vit.system.files import WeightsError
from vit.weights.fields import IMAGE_PROCESSOR, VIT_CONFIG, check_fields
from vit.weights.published_models import HALF, KnownModel

_SIZES = {(192, 12): "ti", (384, 12): "s", (768, 12): "b", (1024, 24): "l", (1280, 32): "h"}
"""Maps (hidden_size, num_hidden_layers) to the letter of the size."""
_RESAMPLE = {2: "bilinear", 3: "bicubic"}
"""Maps Pillow's resampling constants to interpolation methods."""

_VIT: dict[str, Any] = {
    "size": 224,
    "resample": 2,
    "default_to_square": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": HALF[0],
    "image_std": HALF[1],
}
_CLIP = {
    **_VIT,
    "default_to_square": False,
    "resample": 3,
    "do_center_crop": True,
    "crop_size": 224,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": _VIT,
    "DeiT": {**_VIT, "size": 256, "resample": 3, "do_center_crop": True, "crop_size": 224},
    "CLIP": _CLIP,
    "Bit": _CLIP,
    "Siglip": {**_VIT, "resample": 3},
}
"""Maps transformers' image processors to the values of fields that are missing in a file."""

MODEL_TYPES = ("vit", "vit_mae")
ODD_MARGINS = (
    "transformers crops one pixel further up or left than this project if half of the margin is"
    " 1.5, 3.5 and so on"
)
TANH = ("gelu_pytorch_tanh", "gelu_new")
"""Values of `hidden_act` for the tanh approximation of GELU."""
MAX_NORM_EPS = 1e-5
"""The largest accepted norm epsilon (transformers' default: 1e-12). Up to this value, outputs
differ only slightly from those of this project's model."""


def from_transformers(config: dict[str, Any], path: Path) -> KnownModel:
    """Return the model that `config`, the content of `path`, describes.

    Raises ValueError if the model is not a ViT, or if its preprocessing is unsupported.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"{path} describes a {kind!r} model of Hugging Face's transformers"
            f" ({config.get('architectures')}), expected 'vit' or 'vit_mae': use"
            " timm's copy of the model, https://huggingface.co/timm"
        )

    try:
        width, depth = config["hidden_size"], config["num_hidden_layers"]
        size = _pair(config["image_size"])
        patch = _pair(config["patch_size"])
        model: dict[str, Any] = {
            "name": f"vit_{_SIZES.get((width, depth), 'b')}{patch[0]}",
            "patch_size": list(patch),
            "embed_dim": width,
            "depth": depth,
            "num_heads": config["num_attention_heads"],
            "mlp_ratio": config["intermediate_size"] / width,
            "in_chans": config.get("num_channels", 3),
            "qkv_bias": config.get("qkv_bias", True),
        }
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: {error!r} is missing or wrong: copy it again") from None

    if config.get("hidden_act") in TANH:
        model["mlp_layer"] = "mlp_tanh"
    problem = config.get("problem_type")
    not_softmax = (
        f"its config.json has problem_type {problem!r}, but this project classifies with a softmax,"
        " for one label per image"
        if problem not in (None, "single_label_classification")
        else ""
    )

    view = _view(path.with_name("preprocessor_config.json"), size)
    return KnownModel(path.parent.absolute().name, model, size, not_softmax=not_softmax, **view)


def _view(path: Path, size: tuple[int, int]) -> dict[str, Any]:
    """Return the preprocessing fields of `KnownModel`. Without a file, use ViT's defaults.

    size: (height, width) of the model's images. Raises ValueError if this project cannot preprocess
    images in the same way.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        content = {"size": {"height": size[0], "width": size[1]}}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}): copy it again") from None

    try:
        notes = check_fields(content, IMAGE_PROCESSOR, path)
        content = _with_defaults(content, path)
        crop = _resize_and_crop(content, size, path)
        normalization = _normalization(content)
        interpolation = _RESAMPLE[content["resample"]]
    except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{path}: a setting has the wrong type ({error}): copy the file again"
        ) from None

    if crop["crop_mode"] == "center":
        notes = [*notes, ODD_MARGINS]
    return {
        **normalization,
        **crop,
        "interpolation": interpolation,
        "apply_exif": content.get("apply_exif") is True,
        "notes": tuple(notes),
    }


def _with_defaults(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return `content`, with missing fields set to the defaults of its image processor."""
    kind = content.get("image_processor_type", content.get("feature_extractor_type", "ViT"))
    kind = re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", kind)
    content = {**_DEFAULTS.get(kind, {"default_to_square": True}), **content}

    lacking = [name for name in _VIT if name not in content]
    if lacking:
        raise ValueError(
            f"{path}: {', '.join(lacking)} missing, and the defaults of {kind!r} are unknown:"
            f" add these fields, or use the processor of {' or '.join(_DEFAULTS)}"
        )
    return content


def _resize_and_crop(content: dict[str, Any], size: tuple[int, int], path: Path) -> dict[str, Any]:
    """Return `crop_mode` and `crop_pct`, with which this project produces images of `size`.

    transformers resizes the shortest edge and then crops the center ("center"), or resizes both
    sides, with or without a crop ("squash").
    """
    resize = content["size"]
    if isinstance(resize, int):  # older files
        keys = ("height", "width") if content["default_to_square"] else ("shortest_edge",)
        resize = dict.fromkeys(keys, resize)
    shortest = resize.get("shortest_edge") if len(resize) == 1 else None
    if shortest is None and not {"height", "width"} <= resize.keys():
        raise ValueError(
            f"{path}: size {resize}: expected height and width, or only shortest_edge: use the"
            " model in transformers"
        )

    has_crop = content.get("do_center_crop") is True
    resized = _height_width(shortest or resize)
    cropped = _height_width(content["crop_size"]) if has_crop else resized
    crop_pct = crop_pct_of(size, resized)
    # This project resizes to the model's size / crop_pct, and always crops to the model's size.
    our_resized = tuple(int(side / crop_pct) for side in size)
    is_supported = (cropped, our_resized) == (size, resized) and (has_crop or not shortest)
    if not is_supported:
        crop = f"a center crop of {content['crop_size']}" if has_crop else "no center crop"
        raise ValueError(
            f"{path}: size {content['size']} and {crop} do not give images of"
            f" {size[0]}x{size[1]}, the model's size, by a resize and a center crop that this"
            " project supports: use the model in transformers"
        )

    return {"crop_mode": "center" if shortest else "squash", "crop_pct": crop_pct}


def _normalization(content: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return `mean` and `std` in terms of x / 255, for pixels x in [0, 255].

    transformers computes (x * rescale_factor - image_mean) / image_std.
    """
    scale = 255 * (content["rescale_factor"] if content["do_rescale"] else 1)
    mean, std = content["image_mean"], content["image_std"]
    if not content["do_normalize"]:
        mean, std = (0.0,) * len(mean), (1.0,) * len(mean)
    return {
        "mean": tuple(float(value) / scale for value in mean),
        "std": tuple(float(value) / scale for value in std),
    }


def _height_width(size: object) -> tuple[int, int]:
    return _pair([size["height"], size["width"]] if isinstance(size, dict) else size)


def crop_pct_of(size: tuple[int, int], cover: tuple[int, int]) -> float:
    """Return timm's crop_pct for which `size` / crop_pct, truncated, equals `cover`."""
    crop_pct = min(*(side / covered for side, covered in zip(size, cover, strict=True)), 1.0)
    while crop_pct < 1.0 and any(int(s / crop_pct) < c for s, c in zip(size, cover, strict=True)):
        crop_pct = math.nextafter(crop_pct, 0)
    return crop_pct


def network_notes(path: Path) -> list[str]:
    """Return notes on the fields of transformers' `config.json` that describe the network.

    Raises WeightsError if the network computes a different function than this project's model, for
    example because its norm epsilon exceeds `MAX_NORM_EPS`.
    """
    content = object_in(path)
    if content.get("model_type") not in MODEL_TYPES:
        return []

    notes = check_fields(content, VIT_CONFIG, path)
    eps = content.get("layer_norm_eps", 1e-12)
    if eps == EPS:
        return notes

    text = f"its norms use epsilon {eps:g} (layer_norm_eps), this project's {EPS:g}"
    if eps > MAX_NORM_EPS:
        raise WeightsError(
            f"{path}: {text}, so outputs would differ: use the model in transformers"
        )
    return [*notes, f"{text}: the last digits of logits differ"]


def object_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing or contains anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def class_names_in(path: Path, num_classes: int) -> list[str]:
    """Return the class names in timm's or transformers' `config.json`; [] if there are none."""
    content = object_in(path)
    by_number = content.get("id2label") or {}
    names = content.get("label_names", [by_number.get(str(n)) for n in range(num_classes)])
    if not isinstance(names, list) or len(names) != num_classes:
        return []

    # transformers writes these placeholders if the classes have no names.
    unnamed = [f"LABEL_{n}" for n in range(num_classes)]
    return names if names != unnamed and all(isinstance(name, str) for name in names) else []


def _pair(size: object) -> tuple[int, int]:
    """Return (height, width) for a side or a pair. Raises TypeError for any other value."""
    sides = [size, size] if isinstance(size, int) else size
    if not isinstance(sides, list) or [type(side) for side in sides] != [int, int]:
        raise TypeError(f"a size of {size!r}")
    return sides[0], sides[1]
