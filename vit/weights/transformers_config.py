"""Read the model, preprocessing and class names that transformers stores next to weights.

`config.json` describes the network, and `preprocessor_config.json` the preprocessing.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from vit.layers.norm import EPS
from vit.system.files import WeightsError
from vit.weights.published_models import HALF, KnownModel

_SIZES = {(192, 12): "ti", (384, 12): "s", (768, 12): "b", (1024, 24): "l", (1280, 32): "h"}
"""Maps (hidden_size, num_hidden_layers) to the letter of the size."""
_RESAMPLE = {2: "bilinear", 3: "bicubic"}
"""Maps Pillow's resampling constants to interpolation methods."""
MAX_NORM_EPS = 1e-5
"""The largest accepted norm epsilon (transformers' default: 1e-12). Up to this value, outputs
differ only slightly from those of this project's model."""


def from_transformers(config: dict[str, Any], path: Path) -> KnownModel:
    """Return the model that `config`, the content of `path`, describes.

    Raises ValueError if the model is not a ViT, or if its preprocessing is unsupported.
    """
    kind = config.get("model_type")
    if kind not in ("vit", "vit_mae"):
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
    if config.get("hidden_act", "gelu") != "gelu":
        raise ValueError(f"{path}: hidden_act is {config['hidden_act']!r}, expected 'gelu'")
    view = _view(path.with_name("preprocessor_config.json"), size)
    name = path.parent.absolute().name
    return KnownModel(name, model, size, **view)


def _view(path: Path, size: tuple[int, int]) -> dict[str, Any]:
    """Return the preprocessing fields of `KnownModel`. Without a file, use transformers'
    defaults."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        content = {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}): copy it again") from None
    try:
        resample = content.get("resample", 2)
        if resample not in _RESAMPLE:
            raise ValueError(f"{path}: resample is {resample}, expected one of {_RESAMPLE}")
        resize = content.get("size") or {}
        if not isinstance(resize, dict):
            resize = {}  # Older files contain only the side, which is also in config.json.
        shortest = resize.get("shortest_edge")
        cuts = content.get("do_center_crop") and {"height", "width"} <= {*resize}
        sides = (resize["height"], resize["width"]) if cuts else size
        return {
            "mean": tuple(map(float, content.get("image_mean", HALF[0]))),
            "std": tuple(map(float, content.get("image_std", HALF[1]))),
            "interpolation": _RESAMPLE[resample],
            "crop_mode": "center" if shortest else "squash",
            "apply_exif": content.get("apply_exif") is True,
            "crop_pct": _crop_pct(size, (shortest, shortest) if shortest else sides),
        }
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{path}: a setting has the wrong type ({error}): copy the file again"
        ) from None


def _crop_pct(size: tuple[int, int], cover: tuple[int, int]) -> float:
    """Return timm's crop_pct for which `size` / crop_pct, truncated, equals `cover`."""
    crop_pct = min(*(side / covered for side, covered in zip(size, cover, strict=True)), 1.0)
    while crop_pct < 1.0 and any(int(s / crop_pct) < c for s, c in zip(size, cover, strict=True)):
        crop_pct = math.nextafter(crop_pct, 0)
    return crop_pct


def norm_notes(path: Path) -> list[str]:
    """Return a note if the norm epsilon in transformers' `config.json` differs from this project's.

    Raises WeightsError if the epsilon exceeds `MAX_NORM_EPS`, because outputs would then differ too
    much.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not content["model_type"].startswith("vit"):
            return []
        eps = float(content.get("layer_norm_eps", 1e-12))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []  # no file, or another program's file
    if eps == EPS:
        return []
    text = f"its norms use epsilon {eps:g} (layer_norm_eps), this project's {EPS:g}"
    if eps > MAX_NORM_EPS:
        raise WeightsError(
            f"{path}: {text}, so outputs would differ: use the model in transformers"
        )
    return [f"{text}: the last digits of logits differ"]


def class_names_in(path: Path, num_classes: int) -> list[str]:
    """Return the class names in timm's or transformers' `config.json`; [] if there are none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    names = content.get("label_names") if isinstance(content, dict) else None
    if names is None and isinstance(content, dict):
        by_number = content.get("id2label") or {}
        names = [by_number.get(str(n)) for n in range(num_classes)]
    if not isinstance(names, list) or len(names) != num_classes:
        return []
    # transformers writes these placeholders if the classes have no names.
    unnamed = [f"LABEL_{n}" for n in range(num_classes)]
    return names if names != unnamed and all(isinstance(name, str) for name in names) else []


def _pair(size: Any) -> tuple[int, int]:
    """Return (height, width) for a side or a pair. Raises TypeError for any other value."""
    sides = [size, size] if isinstance(size, int) else size
    if not (isinstance(sides, list) and len(sides) == 2 and all(type(n) is int for n in sides)):
        raise TypeError(f"a size of {size!r}")
    return sides[0], sides[1]
