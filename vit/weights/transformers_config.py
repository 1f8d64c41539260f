"""What Hugging Face's transformers writes beside weights, read: model, view, class names.

`config.json` has the network, `preprocessor_config.json` how an image becomes its input.
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
"""(hidden_size, num_hidden_layers) of the sizes that have a name."""
_RESAMPLE = {2: "bilinear", 3: "bicubic"}
"""Pillow's numbers."""
MAX_NORM_EPS = 1e-5
"""Norms with up to this epsilon give nearly the output of ours; the default of transformers is
1e-12."""


def from_transformers(config: dict[str, Any], path: Path) -> KnownModel:
    """The model that `config`, the content of `path`, describes.

    Raises ValueError for a model other than ViT, and for a view that this project cannot do.
    """
    kind = config.get("model_type")
    if kind not in ("vit", "vit_mae"):
        raise ValueError(
            f"{path} is of a {kind!r} of Hugging Face's transformers"
            f" ({config.get('architectures')}), of which only 'vit' and 'vit_mae' are read: use"
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
        raise ValueError(f"{path}: hidden_act is {config['hidden_act']!r}, this project has gelu")
    view = _view(path.with_name("preprocessor_config.json"), size)
    name = path.parent.absolute().name
    return KnownModel(name, model, size, **view)


def _view(path: Path, size: tuple[int, int]) -> dict[str, Any]:
    """Fields of `KnownModel` for the preprocessing; transformers' defaults without the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        content = {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}): copy it again") from None
    try:
        resample = content.get("resample", 2)
        if resample not in _RESAMPLE:
            raise ValueError(f"{path}: resample is {resample}, here are {_RESAMPLE}")
        wanted = content.get("size") or {}
        if not isinstance(wanted, dict):
            wanted = {}  # older files have the side, which the model has, too
        shortest = wanted.get("shortest_edge")
        cuts = content.get("do_center_crop") and {"height", "width"} <= {*wanted}
        sides = (wanted["height"], wanted["width"]) if cuts else size
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
            f"{path}: a setting is of the wrong kind ({error}): copy it again"
        ) from None


def _crop_pct(size: tuple[int, int], cover: tuple[int, int]) -> float:
    """timm's number by which `size`, divided and cut off, gives `cover`; (height, width) each."""
    crop_pct = min(*(side / covered for side, covered in zip(size, cover, strict=True)), 1.0)
    while crop_pct < 1.0 and any(int(s / crop_pct) < c for s, c in zip(size, cover, strict=True)):
        crop_pct = math.nextafter(crop_pct, 0)
    return crop_pct


def norm_notes(path: Path) -> list[str]:
    """Return a note if the `config.json` of transformers' ViT gives its norms another epsilon.

    Raises WeightsError for one above `MAX_NORM_EPS`: the model here would give other answers.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not content["model_type"].startswith("vit"):
            return []
        eps = float(content.get("layer_norm_eps", 1e-12))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []  # no such file, or another program's
    if eps == EPS:
        return []
    text = f"its norms have epsilon {eps:g} (layer_norm_eps), here {EPS:g}"
    if eps > MAX_NORM_EPS:
        raise WeightsError(
            f"{path}: {text}, so the answers would be others: use the model in transformers"
        )
    return [f"{text}: the last digits of logits differ"]


def class_names_in(path: Path, num_classes: int) -> list[str]:
    """The class names in a `config.json`, timm's or transformers'; [] if it has none."""
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
    # What transformers writes where nobody has named them.
    unnamed = [f"LABEL_{n}" for n in range(num_classes)]
    return names if names != unnamed and all(isinstance(name, str) for name in names) else []


def _pair(size: Any) -> tuple[int, int]:
    """A side, or height and width. Raises TypeError for anything else."""
    sides = [size, size] if isinstance(size, int) else size
    if not (isinstance(sides, list) and len(sides) == 2 and all(type(n) is int for n in sides)):
        raise TypeError(f"a size of {size!r}")
    return sides[0], sides[1]
