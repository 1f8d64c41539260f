"""Identify published weights, and evaluate them with the published model and preprocessing.

1. Find the `KnownModel` of a file or folder, optionally by a given name      identify
2. Convert its settings to a config, so that the weights are evaluated like
   those of this project's runs                                  with_published_config
3. Print its published accuracy next to the measured one            describe_published

A model is identified by a name from the user, by the `config.json` next to Hugging Face weights, by
the name that the training program stored in the file (timm's `args.model`), or by the file name:

    vit_base_patch16_224.augreg_in1k.safetensors        timm's name and tag
    deit_base_patch16_224-b5f2ef4d.pth                  the authors' name
    vit_base_patch16_224.augreg_in1k/model.safetensors  a Hugging Face folder with config.json

This module downloads nothing. The settings of models that are missing from the table
(vit/weights/published_models.py) come from timm, if timm is installed.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import floordiv, mul
from pathlib import Path
from statistics import fmean
from typing import Any

from vit.config import io as config_io
from vit.config.schema import DataConfig
from vit.system.spelling import did_you_mean
from vit.weights.fields import TIMM_CONFIG, TIMM_OPTIONS, check_fields
from vit.weights.files import LoadedWeights, find_weights
from vit.weights.formats import PARTS_FILES
from vit.weights.layouts import family_of
from vit.weights.published_models import (
    BIG_VISION,
    IMAGENET,
    KNOWN,
    NO_NUMBER,
    VAL_IMAGES,
    KnownModel,
    own_model,
)
from vit.weights.save import HUB_FILES
from vit.weights.transformers_config import class_names_in, crop_pct_of, from_transformers

SEVERAL_TAGS = ("vit_", "deit3_")
"""The prefixes of names that are ambiguous without a tag, because several weights share a name."""


def identify(
    path: str | Path,
    name: str | None = None,
    arch: str = "",
    options: Mapping[str, Any] | None = None,
) -> KnownModel:
    """Return the published model whose weights are in the file or Hugging Face folder `path`.

    The first available source is used:
    1. `name`, a timm name with or without `timm/` or `hf_hub:timm/`. A name without a tag selects
       timm's default settings.
    2. `config.json` next to the file.
    3. `arch`, the name stored in the file, if it is a name of timm, MAE or torchvision. `options`,
       the command line stored in the file, overrides timm's settings.
    4. The name of the file or its folder.

    Raises:
        ValueError: no source identifies a single model. The message lists similar names and a
            remedy.
    """
    options = options or {}
    if name is not None:
        return _by_program(name, options) or _by_name(name, or_defaults=True)

    file = find_weights(path)
    settings = file.parent / "config.json"
    model = _by_settings(settings) if settings.is_file() else None
    if model is not None:
        return model

    overrides = {key: options[key] for key in TIMM_OPTIONS if key in options}
    model = _by_program(arch, options) or (_from_timm(arch, overrides) if overrides else None)
    with suppress(ValueError):  # `arch` may be another program's name or a Python class.
        model = model or _by_name(arch, or_defaults=True)
    if model is None:
        return _by_file_name(file)

    # The weights come from a different training run, so the published accuracy does not apply.
    return replace(model, top1=None, top5=None, source=NO_NUMBER if model.top1 else model.source)


_PROGRAM_NAMES = (
    r"(mae_(pretrain_)?)?vit_(?P<letter>b|l|h)(?P<ending>_|ase|arge|uge)(_patch)?(?P<patch>\d+)?"
)


def _by_program(name: str, options: Mapping[str, Any]) -> KnownModel | None:
    """Return the model that MAE, RETFound or torchvision calls `name`; None for other names.

    options: the program's command line. Sources: facebookresearch/mae:models_vit.py and
    util/datasets.py, rmaphoh/RETFound, pytorch/vision:references/classification/train.py.
    """
    name = {"RETFound_mae": "vit_large_patch16"}.get(name, name)
    match = re.fullmatch(_PROGRAM_NAMES, name)
    if match is None:
        return None

    default_patch = "14" if match["letter"] == "h" else "16"
    is_torchvision = match["ending"] == "_"  # vit_b_16, not vit_base_patch16
    side = options.get("val_crop_size" if is_torchvision else "input_size", 224)
    crop_pct = 224 / 256 if side <= 224 else 1.0
    if is_torchvision:
        crop_pct = crop_pct_of((side,) * 2, (options.get("val_resize_size", 256),) * 2)

    return KnownModel(
        name,
        {"name": f"vit_{match['letter']}{match['patch'] or default_patch}"},
        (side, side),
        *IMAGENET,
        crop_pct=crop_pct,
        interpolation=options.get("interpolation", "bilinear") if is_torchvision else "bicubic",
    )


def _by_name(full_name: str, or_defaults: bool = False) -> KnownModel:
    """Return the model `full_name`.

    or_defaults: if a name without a tag is shared by several weights, use timm's default settings.
    """
    name = re.sub(r"^(hf[-_]hub:)?(timm/)?", "", full_name)
    # Use the weights with exactly this name, or else those whose name differs only in a tag.
    rows = [row for row in (*KNOWN, *BIG_VISION) if row.name == name] or [
        row for row in KNOWN if row.name.partition(".")[0] == name
    ]
    is_unique = len(rows) == 1 and (rows[0].name == name or not name.startswith(SEVERAL_TAGS))
    if is_unique:
        return rows[0]

    model = _from_timm(name) if or_defaults else None
    if model is not None:
        tag = model.name.partition(".")[2]
        note = f"; {full_name} has no tag, so timm's default {tag} determines the settings"
        return replace(model, source=model.source + (note if tag and "." not in name else ""))

    if rows:
        tags = ", ".join(f"{row.name} ({row.top1:.1f} %)" for row in rows)
        raise ValueError(
            f"{full_name} is ambiguous, because several weights differ only in their tag: pass"
            f" --model with a tag, such as {tags}"
        )
    raise ValueError(
        f"{full_name} is in neither the table of vit/weights/published_models.py nor"
        f" {_timm_version()}{_nearest(name)}"
    )


def _by_settings(path: Path) -> KnownModel | None:
    """Return the model that a `config.json` describes; None if another program wrote the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: cannot be read ({error}): copy it again, or pass --model NAME"
        ) from None
    if not isinstance(content, dict) or not {"architecture", "architectures"} & content.keys():
        return None
    if "architecture" not in content:
        return from_transformers(content, path)

    architecture = content["architecture"]
    settings = content.get("pretrained_cfg") or content
    notes = check_fields({**content, **settings}, TIMM_CONFIG, path)
    made_with = content.get("model_args") or {}
    if content.get("global_pool") == "avg" and own_model(architecture):
        made_with = {"global_pool": "avg", **made_with}
    model = _from_settings(architecture, settings.get("tag"), settings, made_with, str(path))

    published = [
        row
        for row in KNOWN
        if replace(row, top1=None, top5=None, source=NO_NUMBER, files=()) == model
    ]
    if published and content.get("num_classes", 1000) == 1000:
        return published[0]

    # If the config sets sizes, the architecture's name does not identify the model.
    has_sizes = bool({"embed_dim", "depth"} & made_with.keys())
    return replace(
        model,
        name=str(path.parent) if has_sizes else model.name,
        apply_exif=content.get("apply_exif") is True,
        notes=tuple(notes),
    )


def _by_file_name(file: Path) -> KnownModel:
    """Return the model named by the file, or by the folder if the file name is generic."""
    for row in (*KNOWN, *BIG_VISION):
        if file.name in row.files:
            return row

    texts = [file.name]
    # The folder is the user's folder, or models--timm--NAME/snapshots/HASH in the hub's cache.
    if file.name in (*HUB_FILES, *PARTS_FILES):
        texts += [
            folder.name.removeprefix("models--timm--") for folder in file.absolute().parents[:3]
        ]

    for text in texts:
        model = _named_by(text)
        if model is not None:
            return model

    # Similar names would not help, because such models seldom have the same shapes.
    raise ValueError(
        f"{file}: neither its name nor a config.json next to it identifies the model: pass its timm"
        " name with --model NAME"
    )


def _named_by(text: str) -> KnownModel | None:
    """Return the model named by a file or folder name; None if the name has another form.

    A name that the table contains with its tag is tried first. The entire name is tried next, as a
    name in other programs or timm. A name from the table without its tag is tried last, because it
    may be ambiguous.
    """
    full_name = _longest_prefix(text, [row.name for row in KNOWN])
    if full_name:
        return _by_name(full_name)

    architectures = [row.name.partition(".")[0] for row in KNOWN]
    stem = re.sub(r"\.(safetensors|pth\.tar|pth|pt|bin)$", "", text)
    model = _by_program(stem, {})
    for name in (stem, stem.partition("-")[0]):
        if model is None and name not in architectures:
            model = _from_timm(name)
    if model is not None:
        return model

    architecture = _longest_prefix(text, architectures)
    return _by_name(architecture) if architecture else None


def _longest_prefix(text: str, names: Iterable[str]) -> str:
    """Return the longest of `names` that `text` begins with, at a word boundary; "" if none
    does."""
    return max(
        (name for name in names if re.match(re.escape(name) + r"(?![A-Za-z0-9_])", text)),
        key=len,
        default="",
    )


def _from_timm(name: str, options: Mapping[str, Any] | None = None) -> KnownModel | None:
    """Return timm's settings for `name`; None if timm does not know it or is not installed.

    options: options of timm's command line, which override its settings.
    """
    try:
        import timm

        settings = timm.get_pretrained_cfg(name)
    except (ImportError, RuntimeError):  # timm raises RuntimeError for an unknown tag.
        return None
    if settings is None:
        return None
    return _from_settings(
        settings.architecture or name,
        settings.tag,
        settings.to_dict() | (options or {}),
        (options or {}).get("model_kwargs", {}),
        _timm_version(),
    )


def _timm_version() -> str:
    try:
        import timm
    except ImportError:
        return "timm, which is not installed (pip install timm)"
    return f"timm {timm.__version__}"


# Maps timm's model arguments to fields of the `model` section, or to None if they are set
# elsewhere.
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
    "mlp_layer": "mlp_layer",
    "init_values": "init_values",
    "num_classes": None,
    "in_chans": None,
}


def in_our_terms(made_with: Mapping[str, Any]) -> dict[str, Any]:
    """Return timm's arguments for a plain ViT, with this project's names for pooling and
    activation.

    An argument that selects a different function keeps its name, so that it is refused.
    """
    pool, fc_norm, activation = map(made_with.get, ("global_pool", "fc_norm", "act_layer"))
    known = {
        "fc_norm": pool == "avg" or not fc_norm,
        "act_layer": activation in (None, "gelu", "gelu_tanh"),
    }
    ours = {key: value for key, value in made_with.items() if not known.get(key)}
    ours |= {"global_pool": "norm_avg"} if pool == "avg" and fc_norm is False else {}
    return ours | ({"mlp_layer": "mlp_tanh"} if activation == "gelu_tanh" else {})


def _from_settings(
    architecture: str,
    tag: str | None,
    settings: Mapping[str, Any],
    made_with: Mapping[str, Any],
    origin: str,
) -> KnownModel:
    """Return the model that timm's settings describe.

    Args:
        made_with: The arguments that override the defaults of `architecture`.
        origin: The source of the settings, for messages.
    """
    channels, height, width = settings.get("input_size") or (3, 224, 224)
    interpolation = settings.get("interpolation") or "bilinear"
    name = f"{architecture}.{tag}" if tag else architecture
    model = own_model(architecture)
    # timm's settings may repeat the architecture's default pooling. Only timm's own models have
    # other kinds of pooling, which they set themselves.
    supported_pooling: tuple[str, ...] = ("token", "avg")
    if model is None:
        model = {"name": f"timm/{architecture}"}
    else:
        made_with = in_our_terms(made_with)
        supported_pooling = ("avg", "norm_avg", "map")

    unknown = [key for key in made_with if key not in _MADE_WITH and not key.endswith("_rate")]
    problems = [f"its model was created with {', '.join(unknown)}"] if unknown else []
    if interpolation not in ("bilinear", "bicubic"):
        problems.append(f"it resizes with {interpolation!r}, not with bilinear or bicubic")
    if problems:
        raise ValueError(
            f"{name} ({origin}): {' and '.join(problems)}, which this project does not support"
        )

    fields = {
        ours: made_with[key]
        for key, ours in _MADE_WITH.items()
        if ours and made_with.get(key) is not None
    }
    size = fields.pop("image_size", (height, width))
    if fields.get("global_pool") not in supported_pooling:
        fields.pop("global_pool", None)
    model |= fields
    if channels != 3:
        model["in_chans"] = channels

    mode = settings.get("crop_mode") or "center"
    classifier = settings.get("classifier") or "head"
    source = NO_NUMBER
    if mode == "border":
        source += "; timm evaluates it with crop_mode='border', this project crops the center"
    return KnownModel(
        name,
        model,
        image_size=(size, size) if isinstance(size, int) else (size[0], size[1]),
        mean=tuple(settings.get("mean") or IMAGENET[0]),
        std=tuple(settings.get("std") or IMAGENET[1]),
        crop_pct=settings.get("crop_pct") or 0.875,
        interpolation=interpolation,
        crop_mode=mode if mode == "squash" else "center",
        source=source,
        head=classifier if isinstance(classifier, str) else classifier[0],
    )


def _nearest(name: str) -> str:
    """Return a suggestion of similar names in the table and in timm, or ""."""
    names = [row.name for row in KNOWN]
    with suppress(ImportError):
        import timm

        names += timm.list_models()
    return did_you_mean(name, (*names, *(full_name.partition(".")[0] for full_name in names)))


def to_config(
    model: KnownModel, data_root: str, val_split: str = "val", num_classes: int = 1000
) -> dict[str, Any]:
    """Return a complete config (`config_io.to_dict`) for `model`'s published accuracy.

    The config uses fp32, because rounding to bf16 changes the predictions for a few of 50,000
    images. It uses Pillow's resize, because the published accuracies were measured with it.
    """
    height, width = model.image_size
    size = height if height == width else [height, width]

    values = {
        "model": {**model.model, "image_size": size, "num_classes": num_classes or None},
        "data": {
            "root": data_root,
            "val_split": val_split,
            "mean": list(model.mean),
            "std": list(model.std),
            "interpolation": model.interpolation,
        },
        "eval": {
            "crop_pct": model.crop_pct,
            "crop_mode": model.crop_mode,
            "resizer": "pillow",
            "apply_exif": model.apply_exif or None,
        },
        "train": {"steps": 1, "precision": "fp32"},
    }
    return config_io.to_dict(config_io.from_dict(values, model.name))


def with_published_config(
    loaded: LoadedWeights, name: str | None, data_root: str | None, val_split: str = "val"
) -> tuple[LoadedWeights, KnownModel]:
    """Add a run's config to another program's weights. Return the weights and their model.

    The head has one row per class; without a head, `num_classes` is 0 (see `check_head`). A
    published accuracy applies only with 1,000 classes.

    Raises:
        ValueError: the model is not identified, or `data_root` is None.
    """
    family = family_of(loaded.weights)
    try:
        model = identify(loaded.path, name, loaded.arch, loaded.options)
    except ValueError:
        if not family:
            raise
        raise ValueError(_unsupported_family(loaded.path, family)) from None
    if data_root is None:
        raise ValueError(
            f"{loaded.path} is {model.name}, trained by another program: pass the shards to"
            " evaluate on with --data ROOT"
        )

    is_own = not model.model["name"].startswith("timm/")
    if is_own and "fc_norm.weight" in loaded.weights:
        model = replace(model, model={"global_pool": "avg", **model.model})
    head = loaded.weights.get(f"{model.head}.weight")
    is_unsupported = is_own and head is None and family
    if is_unsupported:
        raise ValueError(_unsupported_family(loaded.path, family))

    num_classes = 0 if head is None else head.shape[0]
    if model.not_softmax or num_classes == 1:
        reason = model.not_softmax or "its head has one output, whose softmax is always 100 %"
        raise ValueError(
            f"{loaded.path}: {reason}: use the model in its own program, or fine-tune it"
            " (init.checkpoint, init.reset_head)"
        )

    if name is None:
        model = _at_own_size(model, loaded)
    if loaded.source is not None and model.top1 is None:
        # The file is in a cache folder, so use the repository's name.
        model = replace(model, name=loaded.source["repository"])
    if num_classes != 1000 and model.top1 is not None:
        source = f"{NO_NUMBER} for {num_classes} classes" if num_classes else NO_NUMBER
        model = replace(model, top1=None, top5=None, source=source)

    names = class_names_in(loaded.path.with_name("config.json"), num_classes)
    evaluated = replace(
        loaded,
        config=to_config(model, data_root, val_split, num_classes),
        num_classes=num_classes,
        class_names=names if names and name is None else None,
        notes=(*loaded.notes, *model.notes),
    )
    return evaluated, model


def _at_own_size(model: KnownModel, loaded: LoadedWeights) -> KnownModel:
    """Return `model` with the image size of the positions in `loaded`, if a file states their grid.

    The published accuracy does not apply to another size.
    """
    if loaded.grid_size is None:
        return model

    patch = loaded.weights["patch_embed.proj.weight"].shape[2:]
    if loaded.grid_size == tuple(map(floordiv, model.image_size, patch)):
        return model
    height, width = map(mul, loaded.grid_size, patch)
    return replace(model, image_size=(height, width), top1=None, source=NO_NUMBER)


def normalization_notes(loaded: LoadedWeights, data: DataConfig, in_chans: int = 3) -> list[str]:
    """Return a note if `loaded` was trained with a mean or std that differs from that of `data`.

    in_chans: the number of channels of the new model's images. For gray images, the means over the
        colors are compared.
    """
    try:
        trained = loaded.config or to_config(
            identify(loaded.path, None, loaded.arch, loaded.options), data_root="."
        )
        theirs = config_io.from_dict(trained, str(loaded.path)).data
    except ValueError:  # The model is unknown, or only its evaluation is unsupported.
        return []

    mean, std = (
        [round(fmean(values), 4)] if in_chans == 1 else [*values]
        for values in (theirs.mean, theirs.std)
    )
    difference = max(_difference(mean, data.mean), _difference(std, data.std))
    if difference < 0.5 / 255:  # half a level of 8-bit colors
        return []

    return [
        f"the weights were trained with mean {mean} and std {std}, but this config has mean"
        f' {[*data.mean]} and std {[*data.std]}: set "data.mean={mean}" "data.std={std}"'
    ]


def _difference(theirs: list[float], ours: Sequence[float]) -> float:
    """Return the largest difference of a channel's two values. A single value applies to all
    channels."""
    pairs = zip(theirs * len(ours), [*ours] * len(theirs), strict=True)
    return max(abs(their_value - our_value) for their_value, our_value in pairs)


def _unsupported_family(path: Path, family: str) -> str:
    return (
        f"{path}: these are probably the weights of {family}, not of a supported ViT: use"
        " timm's copy of the model, https://huggingface.co/timm, and give its name with --model"
    )


def describe_published(
    model: KnownModel, num_images: int, size: tuple[int, int], num_classes: int, head_classes: int
) -> str:
    """Return a line to print below a result on `num_images`, with the published accuracy.

    Args:
        size: (height, width) at which the images were evaluated.
        num_classes: Number of classes in the data.
        head_classes: Number of rows of the model's head. Only the counts are compared, because
            these weights have no class names.
    """
    counts = (
        f"; the data have {num_classes} classes, but the model has {head_classes}: labels are"
        " compared by number"
        if num_classes != head_classes
        else ""
    )
    if model.top1 is None or model.top5 is None:
        return f"{model.name}: {model.source}{counts}"

    right1, right5 = (round(top / 100 * VAL_IMAGES) for top in (model.top1, model.top5))
    line = (
        f"{model.name}: top-1 {model.top1:.2f} % ({right1}), top-5 {model.top5:.2f} % ({right5})"
        f" (published, on the {VAL_IMAGES:,} of ILSVRC2012 val; here: {num_images:,} images)"
    )
    if size != model.image_size:
        line += (
            f"; published at {model.image_size[0]}x{model.image_size[1]}, here {size[0]}x{size[1]}"
        )
    return line + counts
