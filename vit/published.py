"""Published models: whose weights a file holds, how they want to see images, and the accuracy to
expect of them.

The data's story: a file, with a name where a person gave one, becomes a `KnownModel` by that name,
by the `config.json` that Hugging Face keeps beside weights, or by the name of the file
(`identify`). Its settings become a config (`to_config`), and the weights with that config are what
a run of ours leaves behind (`adopt`), so that they are evaluated on the same way. The published
accuracy then stands beside the measured one (`published`). Nothing is downloaded. timm, where it is
installed, knows the settings of the models that are not in the table.

    vit_base_patch16_224.augreg_in1k.safetensors             a file by its name, with timm's tag: several weights share the name before it
    deit_base_patch16_224-b5f2ef4d.pth                       a file under its author's name
    vit_base_patch16_224.augreg_in1k/model.safetensors       a folder as Hugging Face hands it out, with its config.json
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vit import config_io
from vit.weights import HUB_FILES, LoadedWeights, find_weights

Channels = tuple[float, float, float]
IMAGENET: tuple[Channels, Channels] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF: tuple[Channels, Channels] = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
TIMM = "huggingface/pytorch-image-models@4e5207c7:results/results-imagenet.csv"
MAE = "facebookresearch/mae@efb2a806:FINETUNE.md"
VAL_IMAGES = 50_000
"""Images of the ILSVRC2012 validation split, on which every published number here was measured."""
NO_NUMBER = "no published number at hand"


@dataclass(frozen=True)
class KnownModel:
    """Published weights: the model that they fit, its view of an image, and its accuracy."""

    name: str
    """timm's name with its tag, or the authors' where timm has none."""
    model: dict[str, Any]
    """The config's `model` section without image size and classes; `timm/<name>` where our own
    model computes something else."""
    image_size: tuple[int, int]
    """Height and width in pixels."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Per channel, of images scaled to [0, 1]."""
    crop_pct: float
    """Side of the centre crop over the shorter side of the resized image."""
    interpolation: str = "bicubic"
    crop_mode: str = "center"
    """As timm's: `center`, or `squash`, which does not keep the aspect."""
    top1: float | None = None
    top5: float | None = None
    """Percent of the 50,000 images of ILSVRC2012 val; None: no published number at hand."""
    source: str = NO_NUMBER
    """Where the two numbers stand, or why there are none."""
    files: tuple[str, ...] = ()
    """Names of files under which the authors hand the weights out."""
    head: str = "head"
    """Name of the layer whose weight has a row for each class."""


SIZES = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h"}


def own_model(architecture: str) -> dict[str, Any] | None:
    """The `model` section with which our own model computes what timm's `architecture` (no tag)
    does; None where it does not."""
    match = re.fullmatch(
        r"(vit|deit|deit3)_(tiny|small|medium|base|large|huge)_patch(\d+)_\d+(_miil)?", architecture
    )
    if match is None or (match[2] == "medium" and match[1] != "deit3"):
        return None
    fields: dict[str, Any] = {"name": f"vit_{SIZES.get(match[2], 's')}{match[3]}"}
    if match[2] == "medium":
        fields |= {"embed_dim": 512, "num_heads": 8}
    if match[1] == "deit3":
        fields["init_values"] = 1e-6  # any: the weights bring their own
    if match[4]:
        fields["qkv_bias"] = False
    return fields


def _row(
    name: str,
    channels: tuple[Channels, Channels],
    crop_pct: float,
    top1: float,
    top5: float,
    file: str = "",
) -> KnownModel:
    architecture = name.partition(".")[0]
    model = own_model(architecture)
    size = int(re.findall(r"\d+", architecture)[-1])
    assert model is not None, name
    files = (file,) if file else ()
    return KnownModel(
        name,
        model,
        (size, size),
        *channels,
        crop_pct,
        top1=top1,
        top5=top5,
        source=TIMM,
        files=files,
    )


def _mae(size: str, model: str, top1: float, top5: float) -> KnownModel:
    """util/datasets.py there: ImageNet's mean and deviation, bicubic, 224 of 256; models_vit.py:
    the mean of the patches, then a norm."""
    name = f"mae_finetuned_vit_{size}"
    section = {"name": model, "global_pool": "avg"}
    return KnownModel(
        name,
        section,
        (224, 224),
        *IMAGENET,
        224 / 256,
        top1=top1,
        top5=top5,
        source=MAE,
        files=(f"{name}.pth",),
    )


KNOWN: tuple[KnownModel, ...] = (
    _row("vit_tiny_patch16_224.augreg_in21k_ft_in1k", HALF, 0.9, 75.452, 92.858),
    _row("vit_small_patch16_224.augreg_in1k", HALF, 0.9, 78.842, 94.280),
    _row("vit_small_patch16_224.augreg_in21k_ft_in1k", HALF, 0.9, 81.402, 96.150),
    _row("vit_small_patch16_384.augreg_in1k", HALF, 1.0, 81.130, 95.590),
    _row("vit_base_patch32_224.augreg_in1k", HALF, 0.9, 74.908, 91.770),
    _row("vit_base_patch16_224.augreg_in1k", HALF, 0.9, 79.154, 94.108),
    _row("vit_base_patch16_224.augreg_in21k_ft_in1k", HALF, 0.9, 84.534, 97.300),
    _row("vit_base_patch16_224.augreg2_in21k_ft_in1k", HALF, 0.9, 85.108, 97.530),
    _row("vit_base_patch16_384.augreg_in1k", HALF, 1.0, 81.102, 95.334),
    _row(
        "vit_base_patch16_384.orig_in21k_ft_in1k",
        HALF,
        1.0,
        84.212,
        97.210,
        "jx_vit_base_p16_384-83fb41ba.pth",
    ),
    _row("vit_base_patch16_384.augreg_in21k_ft_in1k", HALF, 1.0, 86.010, 97.998),
    _row("vit_large_patch16_224.augreg_in21k_ft_in1k", HALF, 0.9, 85.856, 97.822),
    _row("vit_large_patch16_384.augreg_in21k_ft_in1k", HALF, 1.0, 87.096, 98.302),
    _row(
        "deit_tiny_patch16_224.fb_in1k",
        IMAGENET,
        0.9,
        72.190,
        91.100,
        "deit_tiny_patch16_224-a1311bcf.pth",
    ),
    _row(
        "deit_small_patch16_224.fb_in1k",
        IMAGENET,
        0.9,
        79.856,
        95.056,
        "deit_small_patch16_224-cd65a155.pth",
    ),
    _row(
        "deit_base_patch16_224.fb_in1k",
        IMAGENET,
        0.9,
        81.980,
        95.740,
        "deit_base_patch16_224-b5f2ef4d.pth",
    ),
    _row(
        "deit_base_patch16_384.fb_in1k",
        IMAGENET,
        1.0,
        83.108,
        96.376,
        "deit_base_patch16_384-8de9b5d1.pth",
    ),
    _row(
        "deit3_small_patch16_224.fb_in1k", IMAGENET, 0.9, 81.382, 95.454, "deit_3_small_224_1k.pth"
    ),
    _row("deit3_base_patch16_224.fb_in1k", IMAGENET, 0.9, 83.800, 96.584, "deit_3_base_224_1k.pth"),
    _row("deit3_base_patch16_384.fb_in1k", IMAGENET, 1.0, 85.088, 97.252, "deit_3_base_384_1k.pth"),
    _row(
        "deit3_large_patch16_224.fb_in1k", IMAGENET, 0.9, 84.772, 97.048, "deit_3_large_224_1k.pth"
    ),
    _row(
        "deit3_large_patch16_384.fb_in1k", IMAGENET, 1.0, 85.820, 97.602, "deit_3_large_384_1k.pth"
    ),
    _row("deit3_huge_patch14_224.fb_in1k", IMAGENET, 0.9, 85.204, 97.364, "deit_3_huge_224_1k.pth"),
    _row(
        "deit3_huge_patch14_224.fb_in22k_ft_in1k",
        IMAGENET,
        1.0,
        87.180,
        98.264,
        "deit_3_huge_224_21k_v1.pth",
    ),
    _mae("base", "vit_b16", 83.664, 96.530),
    _mae("large", "vit_l16", 85.952, 97.570),
    _mae("huge", "vit_h14", 86.928, 98.088),
)
SEVERAL_TAGS = ("vit_", "deit3_")
"""How names begin that mean several weights as long as they have no tag."""


# --- which model it is ----------------------------------------------------------------------------


def identify(path: str | Path, name: str | None = None) -> KnownModel:
    """Whose weights the file or Hugging Face folder `path` holds.

    By `name` if one is given: timm's, with or without `timm/` before it; without its tag it means
    timm's default settings. Else by `config.json` beside the file. Else by the file's name, or its
    folder's.

    Raises: ValueError: none of these leads to a model, or to several; says what was found, what to
        give, and the nearest names.
    """
    if name is not None:
        return _by_name(name, or_defaults=True)
    file = find_weights(path)
    settings = file.parent / "config.json"
    return (_by_settings(settings) if settings.is_file() else None) or _by_file_name(file)


def _by_name(given: str, or_defaults: bool = False) -> KnownModel:
    """`or_defaults`: a name without a tag that several weights share means timm's default settings,
    as it does in timm."""
    name = given.removeprefix("timm/")
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
            f"{given} names several weights, which only a tag tells apart: give --model with one,"
            f" such as {tags}"
        )
    found = _from_timm(name)
    if found is None:
        raise ValueError(
            f"{given} is in neither the table of vit/published.py nor"
            f" {_timm_version()}{_nearest(name)}"
        )
    return _of_default_tag(found, given) if or_defaults else found


def _of_default_tag(found: KnownModel, given: str) -> KnownModel:
    """`found`, saying that its settings are timm's default ones where `given` named no tag and timm
    chose one."""
    tag = found.name.removeprefix(given.removeprefix("timm/"))
    if not tag.startswith("."):
        return found
    default = f"{given} has no tag, so the settings are those of timm's default, {tag[1:]}"
    return replace(found, source=f"{found.source}; {default}")


def _by_settings(path: Path) -> KnownModel | None:
    """The model that a `config.json` of timm's describes; None for a file of that name that is
    something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: cannot be read ({error}): copy it again, or give --model NAME"
        ) from None
    if not isinstance(content, dict) or not {"architecture", "architectures"} & content.keys():
        return None
    if "architecture" not in content:
        raise ValueError(
            f"{path} is of Hugging Face's transformers ({content['architectures']}), whose weights"
            " have other names: use timm's copy of the model, https://huggingface.co/timm"
        )
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
    return found


def _by_file_name(file: Path) -> KnownModel:
    """By the name of the file, or of the folder of one that is called as all of Hugging Face's."""
    for row in KNOWN:
        if file.name in row.files:
            return row
    texts = [file.name]
    # a folder that was filled by hand, or models--timm--NAME/snapshots/HASH of the hub's cache
    if file.name in HUB_FILES:
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
    raise ValueError(
        f"{file}: neither its name nor a config.json beside it says which model it is: give --model"
        f" NAME, a name of timm's{_nearest(file.stem)}"
    )


def _longest_prefix(text: str, names: Iterable[str]) -> str:
    """The longest of `names` with which `text` begins and where a word ends."""
    return max(
        (name for name in names if re.match(re.escape(name) + r"(?![A-Za-z0-9_])", text)),
        key=len,
        default="",
    )


def _from_timm(name: str) -> KnownModel | None:
    """The model `name` as timm describes it; None where timm does not know it, or is not
    installed."""
    try:
        import timm

        settings = timm.get_pretrained_cfg(name)
    except (ImportError, RuntimeError):  # the latter for a tag that there is not
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


# What timm may say a model was made with, in our words. Classes and channels are known otherwise,
# rates of dropout without effect here.
_MADE_WITH = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "embed_dim": "embed_dim",
    "depth": "depth",
    "num_heads": "num_heads",
    "mlp_ratio": "mlp_ratio",
    "qkv_bias": "qkv_bias",
    "class_token": "class_token",
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
    """A model as timm's own settings describe it; `origin` says where they stand, for messages."""
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
    # timm also states what an architecture has anyway; where a guest's pooling has a name of its
    # own, it is left to timm.
    if given.get("global_pool") not in (("avg",) if own_model(architecture) else ("token", "avg")):
        given.pop("global_pool", None)
    model |= given | ({"in_chans": channels} if channels != 3 else {})
    mode = settings.get("crop_mode") or "center"
    classifier = settings.get("classifier") or "head"
    return KnownModel(
        name,
        model,
        (size, size) if isinstance(size, int) else (size[0], size[1]),
        tuple(settings.get("mean") or IMAGENET[0]),
        tuple(settings.get("std") or IMAGENET[1]),
        settings.get("crop_pct") or 0.875,
        interpolation,
        mode if mode == "squash" else "center",
        source=(
            NO_NUMBER
            if mode != "border"
            else (
                f"{NO_NUMBER}; timm evaluates it with crop_mode={mode!r}, here the centre is"
                " cropped"
            )
        ),
        head=classifier if isinstance(classifier, str) else classifier[0],
    )


def _nearest(name: str) -> str:
    names = [row.name for row in KNOWN]
    try:
        import timm

        names += timm.list_models()
    except ImportError:
        pass
    found = difflib.get_close_matches(
        name,
        dict.fromkeys((*names, *(known.partition(".")[0] for known in names))),
        n=3,
        cutoff=0.6,
    )
    return f"; nearest: {', '.join(found)}" if found else f", such as {KNOWN[5].name}"


# --- evaluating it --------------------------------------------------------------------------------


def to_config(
    known: KnownModel, data_root: str, val_split: str = "val", num_classes: int = 1000
) -> dict[str, Any]:
    """A complete config, as `config_io.to_dict` makes them, under which `known` is evaluated as it
    was where its number comes from.

    fp32: the rounding of bf16 moves a few of 50,000 images. Pillow's resize, with which these
    numbers were measured: an image is then the same to the pixel. `train` is there because a config
    has it.
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
        "eval": {"crop_pct": known.crop_pct, "crop_mode": known.crop_mode, "resizer": "pillow"},
        "train": {"steps": 1, "precision": "fp32"},
    }
    return config_io.to_dict(config_io.from_dict(values, known.name))


def adopt(
    trained: LoadedWeights, name: str | None, data_root: str | None, val_split: str = "val"
) -> tuple[LoadedWeights, KnownModel]:
    """Weights that came without a config of ours, with one: `trained` as a run of ours would have
    left it, and the model it is.

    The classes are the head's rows; the published number stands for 1,000 of them only.

    Raises:
        ValueError: as `identify`; no data named; weights without a head.
    """
    known = identify(trained.path, name)
    if data_root is None:
        raise ValueError(
            f"{trained.path} is {known.name}, trained elsewhere: name the folder of shards to"
            " evaluate it on with --data ROOT"
        )
    head = trained.weights.get(f"{known.head}.weight")
    if head is None:
        raise ValueError(
            f"{trained.path} has no {known.head}.weight, so no classes: as {known.name} there is"
            " nothing to evaluate; fine-tune it first (init.checkpoint, init.reset_head), or give"
            " --model NAME if it is another model"
        )
    num_classes = head.shape[0]
    if num_classes != 1000 and known.top1 is not None:
        known = replace(
            known, top1=None, top5=None, source=f"{NO_NUMBER} for {num_classes} classes"
        )
    config = to_config(known, data_root, val_split, num_classes)
    return replace(trained, config=config, num_classes=num_classes), known


def published(
    known: KnownModel, num_images: int, size: tuple[int, int], num_classes: int, head_classes: int
) -> str:
    """A line to stand below a result on `num_images` images of `num_classes` classes, seen at
    `size` (height, width).

    head_classes: rows of the model's head. Weights of others have no names of classes, so that only
    counts can be compared.
    """
    others = (
        f"the data have {num_classes} classes, the model {head_classes}: labels are compared by"
        " number"
    )
    counts = f"; {others}" if num_classes != head_classes else ""
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
