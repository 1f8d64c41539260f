"""Evaluate published weights as they were published: which model, which view, which accuracy.

1. A file or folder, and a name if the user gave one, lead to a `KnownModel`   identify
2. Its settings become a config, under which the weights are evaluated like
   those of our own runs                                         with_published_config
3. Its published accuracy is printed next to the measured one       describe_published

A model is known by its name, by the `config.json` that Hugging Face keeps next to weights, by what
the program that trained it keeps inside (timm's `args.model`), or by the name of the file:

    vit_base_patch16_224.augreg_in1k.safetensors        timm's name and tag
    deit_base_patch16_224-b5f2ef4d.pth                  the authors' name
    vit_base_patch16_224.augreg_in1k/model.safetensors  a folder of Hugging Face's, config.json

Nothing is downloaded. timm, if installed, knows the settings of models that are not in the table
(vit/weights/published_models.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vit.config import io as config_io
from vit.system.spelling import did_you_mean
from vit.weights.files import LoadedWeights, find_weights
from vit.weights.formats import PARTS_FILES
from vit.weights.layouts import family_of
from vit.weights.published_models import (
    IMAGENET,
    KNOWN,
    NO_NUMBER,
    VAL_IMAGES,
    KnownModel,
    own_model,
)
from vit.weights.save import HUB_FILES
from vit.weights.transformers_config import class_names_in, from_transformers

SEVERAL_TAGS = ("vit_", "deit3_")
"""Beginnings of names that mean several weights if they have no tag."""


def identify(path: str | Path, name: str | None = None, arch: str = "") -> KnownModel:
    """Which model's weights the file or Hugging Face folder `path` holds.

    By `name` if given: timm's, with or without `timm/` or `hf_hub:timm/`; without a tag it means
    timm's default settings. Else by `config.json` next to the file. Else by `arch`, the name inside
    of the file, if it is one of these names. Else by the name of the file or its folder.

    Raises:
        ValueError: none of these leads to one model; with what was found, what to give, and the
            nearest names.
    """
    if name is not None:
        return _by_name(name, or_defaults=True)
    file = find_weights(path)
    settings = file.parent / "config.json"
    if settings.is_file() and (found := _by_settings(settings)):
        return found
    with suppress(ValueError):  # another program's name, or that of a class
        found = _by_name(arch, or_defaults=True)
        # Somebody trained it: what is published for the name is not about these weights.
        source = NO_NUMBER if found.top1 else found.source
        return replace(found, top1=None, top5=None, source=source)
    return _by_file_name(file)


def _by_name(given: str, or_defaults: bool = False) -> KnownModel:
    """The model `given`.

    `or_defaults`: a name without a tag that several weights share means timm's default settings.
    """
    name = re.sub(r"^(hf[-_]hub:)?(timm/)?", "", given)
    rows = [row for row in KNOWN if row.name == name] or [
        row for row in KNOWN if row.name.partition(".")[0] == name
    ]
    if len(rows) == 1 and (rows[0].name == name or not name.startswith(SEVERAL_TAGS)):
        return rows[0]
    if rows and or_defaults and (found := _from_timm(name)):
        return _of_default_tag(found, given)
    if rows:
        tags = ", ".join(f"{row.name} ({row.top1:.1f} %)" for row in rows)
        raise ValueError(
            f"{given} names several weights, which differ only in their tag: give --model with one,"
            f" such as {tags}"
        )
    if (found := _from_timm(name)) is None:
        raise ValueError(
            f"{given} is in neither the table of vit/weights/published_models.py nor"
            f" {_timm_version()}{_nearest(name)}"
        )
    return _of_default_tag(found, given) if or_defaults else found


def _of_default_tag(found: KnownModel, given: str) -> KnownModel:
    """`found`, with a note in its source if `given` had no tag and timm chose its default."""
    tag = found.name.partition(".")[2]
    default = f"; {given} has no tag, so the settings are those of timm's default, {tag}"
    return replace(found, source=found.source + (default if tag and "." not in given else ""))


def _by_settings(path: Path) -> KnownModel | None:
    """The model that timm's `config.json` describes; None for another file of that name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: cannot be read ({error}): copy it again, or give --model NAME"
        ) from None
    if not isinstance(content, dict) or not {"architecture", "architectures"} & content.keys():
        return None
    if "architecture" not in content:
        return from_transformers(content, path)
    architecture = content["architecture"]
    settings = content.get("pretrained_cfg") or content
    made_with = content.get("model_args") or {}
    if content.get("global_pool") == "avg" and own_model(architecture):
        made_with = {"global_pool": "avg", **made_with}
    found = _from_settings(architecture, settings.get("tag"), settings, made_with, str(path))
    row = next((row for row in KNOWN if row.name == found.name), None)
    if (
        row
        and content.get("num_classes", 1000) == 1000
        and replace(row, top1=None, top5=None, source=NO_NUMBER, files=()) == found
    ):
        return row
    found = replace(found, apply_exif=content.get("apply_exif") is True)
    if {"embed_dim", "depth"} & made_with.keys():  # any name of timm's that takes them is stated
        return replace(found, name=str(path.parent))
    return found


def _by_file_name(file: Path) -> KnownModel:
    """The model by the name of the file, or of the folder of a file with Hugging Face's name."""
    for row in KNOWN:
        if file.name in row.files:
            return row
    texts = [file.name]
    # Their folder was filled by hand, or is models--timm--NAME/snapshots/HASH of the hub's cache.
    if file.name in (*HUB_FILES, *PARTS_FILES):
        texts += [
            folder.name.removeprefix("models--timm--") for folder in file.absolute().parents[:3]
        ]
    architectures = [row.name.partition(".")[0] for row in KNOWN]
    for text in texts:
        if full := _longest_prefix(text, [row.name for row in KNOWN]):
            return _by_name(full)
        stem = re.sub(r"\.(safetensors|pth\.tar|pth|pt|bin)$", "", text)
        for name in (stem, stem.partition("-")[0]):
            if name not in architectures and (found := _from_timm(name)):
                return found
        if architecture := _longest_prefix(text, architectures):
            return _by_name(architecture)
    # No proposal: names that look like that of a file are seldom of a model with its shapes.
    raise ValueError(
        f"{file}: neither its name nor a config.json next to it says which model it is: give"
        " --model NAME, a name of timm's"
    )


def _longest_prefix(text: str, names: Iterable[str]) -> str:
    """The longest of `names` that begins `text` and ends with a word."""
    return max(
        (name for name in names if re.match(re.escape(name) + r"(?![A-Za-z0-9_])", text)),
        key=len,
        default="",
    )


def _from_timm(name: str) -> KnownModel | None:
    """The model `name` as timm describes it; None if timm does not know it or is not installed."""
    try:
        import timm

        settings = timm.get_pretrained_cfg(name)
    except (ImportError, RuntimeError):  # RuntimeError: an unknown tag
        return None
    if settings is None:
        return None
    return _from_settings(
        settings.architecture or name, settings.tag, settings.to_dict(), {}, _timm_version()
    )


def _timm_version() -> str:
    try:
        import timm
    except ImportError:
        return "timm, which is not installed (pip install timm)"
    return f"timm {timm.__version__}"


# timm's arguments of a model as fields of our `model` section; None: known from elsewhere.
_MADE_WITH = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "embed_dim": "embed_dim",
    "depth": "depth",
    "num_heads": "num_heads",
    "mlp_ratio": "mlp_ratio",
    "qkv_bias": "qkv_bias",
    "qk_norm": "qk_norm",
    "norm_layer": "norm_layer",
    "class_token": "class_token",
    "reg_tokens": "reg_tokens",
    "no_embed_class": "no_embed_class",
    "pos_embed": "pos_embed",
    "global_pool": "global_pool",
    "init_values": "init_values",
    "num_classes": None,
    "in_chans": None,
}


def _from_settings(
    architecture: str,
    tag: str | None,
    settings: Mapping[str, Any],
    made_with: Mapping[str, Any],
    origin: str,
) -> KnownModel:
    """A model as timm's settings describe it; `origin` says where they are, for messages."""
    channels, height, width = settings.get("input_size") or (3, 224, 224)
    interpolation = settings.get("interpolation") or "bilinear"
    name = f"{architecture}.{tag}" if tag else architecture
    model = own_model(architecture) or {"name": f"timm/{architecture}"}
    unknown = [key for key in made_with if key not in _MADE_WITH and not key.endswith("_rate")]
    problems = [f"its model was made with {', '.join(unknown)}"] if unknown else []
    if interpolation not in ("bilinear", "bicubic"):
        problems.append(f"it resizes with {interpolation!r}, not with bilinear or bicubic")
    if problems:
        raise ValueError(
            f"{name} ({origin}): {' and '.join(problems)}, which this project cannot do"
        )
    given = {
        ours: made_with[key]
        for key, ours in _MADE_WITH.items()
        if ours and made_with.get(key) is not None
    }
    size = given.pop("image_size", (height, width))
    # timm also states what an architecture has anyway. Pooling that only a timm model has is left
    # to timm.
    if given.get("global_pool") not in (
        ("avg", "map") if own_model(architecture) else ("token", "avg")
    ):
        given.pop("global_pool", None)
    model |= given | ({"in_chans": channels} if channels != 3 else {})
    mode = settings.get("crop_mode") or "center"
    classifier = settings.get("classifier") or "head"
    border = f"; timm evaluates it with crop_mode={mode!r}, here the centre is cropped"
    return KnownModel(
        name,
        model,
        image_size=(size, size) if isinstance(size, int) else (size[0], size[1]),
        mean=tuple(settings.get("mean") or IMAGENET[0]),
        std=tuple(settings.get("std") or IMAGENET[1]),
        crop_pct=settings.get("crop_pct") or 0.875,
        interpolation=interpolation,
        crop_mode=mode if mode == "squash" else "center",
        source=NO_NUMBER + (border if mode == "border" else ""),
        head=classifier if isinstance(classifier, str) else classifier[0],
    )


def _nearest(name: str) -> str:
    names = [row.name for row in KNOWN]
    with suppress(ImportError):
        import timm

        names += timm.list_models()
    return did_you_mean(name, (*names, *(known.partition(".")[0] for known in names)))


def to_config(
    known: KnownModel, data_root: str, val_split: str = "val", num_classes: int = 1000
) -> dict[str, Any]:
    """A complete config (`config_io.to_dict`) that evaluates `known` as its published number was.

    In fp32, as the rounding of bf16 moves a few of 50,000 images; and with Pillow's resize, with
    which these numbers were measured. `train` is only there because every config has it.
    """
    height, width = known.image_size
    size = height if height == width else [height, width]
    values = {
        "model": {**known.model, "image_size": size, "num_classes": num_classes},
        "data": {
            "root": data_root,
            "val_split": val_split,
            "mean": list(known.mean),
            "std": list(known.std),
            "interpolation": known.interpolation,
        },
        "eval": {
            "crop_pct": known.crop_pct,
            "crop_mode": known.crop_mode,
            "resizer": "pillow",
            "apply_exif": known.apply_exif or None,
        },
        "train": {"steps": 1, "precision": "fp32"},
    }
    return config_io.to_dict(config_io.from_dict(values, known.name))


def with_published_config(
    loaded: LoadedWeights, name: str | None, data_root: str | None, val_split: str = "val"
) -> tuple[LoadedWeights, KnownModel]:
    """Weights of another program as if a run of ours had left them, and which model they are.

    The head's rows are the classes; a published number counts for 1,000 classes only.

    Raises:
        ValueError: as `identify`; no data named; weights without a head.
    """
    family = family_of(loaded.weights)
    try:
        known = identify(loaded.path, name, loaded.arch)
    except ValueError:
        if not family:
            raise
        raise ValueError(_of_another(loaded.path, family)) from None
    if data_root is None:
        raise ValueError(
            f"{loaded.path} is {known.name}, trained elsewhere: name the folder of shards to"
            " evaluate it on with --data ROOT"
        )
    head = loaded.weights.get(f"{known.head}.weight")
    if head is None and family and not known.model["name"].startswith("timm/"):
        raise ValueError(_of_another(loaded.path, family))
    if head is None:
        raise ValueError(
            f"{loaded.path} has no {known.head}.weight, so no classes: as {known.name} there is"
            " nothing to evaluate; fine-tune it first (init.checkpoint, init.reset_head), or give"
            " --model NAME if it is another model"
        )
    num_classes = head.shape[0]
    if loaded.source is not None and known.top1 is None:
        known = replace(known, name=loaded.source["repository"])  # not its folder in the cache
    settings = loaded.path.parent / "config.json"
    names = class_names_in(settings, num_classes) if name is None else []
    if num_classes != 1000 and known.top1 is not None:
        known = replace(
            known, top1=None, top5=None, source=f"{NO_NUMBER} for {num_classes} classes"
        )
    config = to_config(known, data_root, val_split, num_classes)
    class_names = names or None
    return replace(loaded, config=config, num_classes=num_classes, class_names=class_names), known


def _of_another(path: Path, family: str) -> str:
    return (
        f"{path}: its weights have the names of {family}, not of a ViT that is read here: take"
        " timm's copy of the model, https://huggingface.co/timm, and give its name with --model"
    )


def describe_published(
    known: KnownModel, num_images: int, size: tuple[int, int], num_classes: int, head_classes: int
) -> str:
    """A line with the published accuracy, for below a result on `num_images` images.

    Args:
        size: (height, width) at which the images were evaluated.
        num_classes: classes of the data.
        head_classes: rows of the model's head. Weights of other programs have no class names, so
            that only counts can be compared.
    """
    counts = ""
    if num_classes != head_classes:
        differ = f"the data have {num_classes} classes, the model {head_classes}"
        counts = f"; {differ}: labels are compared by number"
    if known.top1 is None or known.top5 is None:
        return f"{known.name}: {known.source}{counts}"
    right1, right5 = (round(top / 100 * VAL_IMAGES) for top in (known.top1, known.top5))
    line = (
        f"{known.name}: top-1 {known.top1:.2f} % ({right1}), top-5 {known.top5:.2f} % ({right5})"
        f" (published, on the {VAL_IMAGES:,} of ILSVRC2012 val; here: {num_images:,} images)"
    )
    if size != known.image_size:
        line += (
            f"; published at {known.image_size[0]}x{known.image_size[1]}, here {size[0]}x{size[1]}"
        )
    return line + counts
