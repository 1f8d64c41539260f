"""Define the table of published models: settings, accuracy and file names of their weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from vit.layers.presets import SIZES

Channels = tuple[float, float, float]
IMAGENET: tuple[Channels, Channels] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF: tuple[Channels, Channels] = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
TIMM = "huggingface/pytorch-image-models@4e5207c7:results/results-imagenet.csv"
TORCHVISION = "pytorch/vision@f1228151:torchvision/models/vision_transformer.py"
MAE = "facebookresearch/mae@efb2a806:FINETUNE.md"
VAL_IMAGES = 50_000
"""The number of ILSVRC2012 validation images, on which all accuracies in `KNOWN` were measured."""
NO_NUMBER = "no published accuracy known"


@dataclass(frozen=True)
class KnownModel:
    """The model, preprocessing and accuracy of published weights."""

    name: str
    """timm's name with its tag, or the authors' name if timm does not have the model."""
    model: dict[str, Any]
    """The config's `model` section without image size and classes. Its name is `timm/<name>` if
    this project has no equivalent model."""
    image_size: tuple[int, int]
    """Height and width in pixels."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """`mean` and `std` per channel, for images scaled to [0, 1]."""
    crop_pct: float
    """Side of the center crop over the shorter side of the resized image."""
    interpolation: str = "bicubic"
    crop_mode: str = "center"
    """timm's crop mode: `center`, or `squash`, which changes the aspect ratio."""
    apply_exif: bool = False
    """Whether images are rotated by their EXIF orientation. Only this project's exports set it."""
    top1: float | None = None
    top5: float | None = None
    """`top1` and `top5` in percent of the 50,000 images of ILSVRC2012 val; None if unknown."""
    source: str = NO_NUMBER
    """The publication of `top1` and `top5`, or the reason why they are missing."""
    files: tuple[str, ...] = ()
    """The file names under which the authors distribute the weights."""
    head: str = "head"
    """The name of the classifier layer, whose weight has a row per class."""


def own_model(architecture: str) -> dict[str, Any] | None:
    """Return a `model` section for a model that computes the same as timm's `architecture`.

    Returns None if this project has no such model. architecture: timm's name without a tag.
    """
    match = re.fullmatch(
        r"(vit|deit|deit3)_(tiny|small|medium|base|large|huge)(_distilled)?_patch(\d+)_\d+(_miil)?",
        architecture,
    )
    if match is None or (match[2] == "medium" and match[1] != "deit3"):
        return None
    fields: dict[str, Any] = {"name": f"vit_{SIZES.get(match[2], 's')}{match[4]}"}
    if match[3]:
        fields["dist_token"] = True
    if match[2] == "medium":
        fields |= {"embed_dim": 512, "num_heads": 8}
    if match[1] == "deit3":
        fields["init_values"] = 1e-6  # any value, because the weights overwrite it
    if match[5]:
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
    numbers: dict[str, Any] = {"top1": top1, "top5": top5, "source": TIMM}
    return KnownModel(name, model, (size, size), *channels, crop_pct, files=files, **numbers)


def _mae(size: str, model: str, top1: float, top5: float) -> KnownModel:
    # MAE's util/datasets.py: ImageNet's mean and deviation, bicubic, 224 of 256. Its models_vit.py:
    # the mean of the patches, then a norm.
    name = f"mae_finetuned_vit_{size}"
    section = {"name": model, "global_pool": "avg"}
    numbers: dict[str, Any] = {"top1": top1, "top5": top5, "source": MAE}
    files = (f"{name}.pth",)
    return KnownModel(name, section, (224, 224), *IMAGENET, 224 / 256, files=files, **numbers)


def _torchvision(
    file: str,
    model: str,
    size: int,
    resize: int,
    top1: float,
    top5: float,
    interpolation: str = "bilinear",
) -> KnownModel:
    # torchvision's presets.py: ImageNet's mean and deviation, the shorter side resized to `resize`.
    mean, std = IMAGENET
    return KnownModel(
        f"torchvision_{file.partition('-')[0]}",
        {"name": model},
        image_size=(size, size),
        mean=mean,
        std=std,
        crop_pct=size / resize,
        interpolation=interpolation,
        top1=top1,
        top5=top5,
        source=TORCHVISION,
        files=(file,),
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
        file="jx_vit_base_p16_384-83fb41ba.pth",
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
        file="deit_tiny_patch16_224-a1311bcf.pth",
    ),
    _row(
        "deit_small_patch16_224.fb_in1k",
        IMAGENET,
        0.9,
        79.856,
        95.056,
        file="deit_small_patch16_224-cd65a155.pth",
    ),
    _row(
        "deit_base_patch16_224.fb_in1k",
        IMAGENET,
        0.9,
        81.980,
        95.740,
        file="deit_base_patch16_224-b5f2ef4d.pth",
    ),
    _row(
        "deit_base_patch16_384.fb_in1k",
        IMAGENET,
        1.0,
        83.108,
        96.376,
        file="deit_base_patch16_384-8de9b5d1.pth",
    ),
    _row(
        "deit_tiny_distilled_patch16_224.fb_in1k",
        IMAGENET,
        0.9,
        74.538,
        91.898,
        file="deit_tiny_distilled_patch16_224-b40b3cf7.pth",
    ),
    _row(
        "deit_small_distilled_patch16_224.fb_in1k",
        IMAGENET,
        0.9,
        81.204,
        95.378,
        file="deit_small_distilled_patch16_224-649709d9.pth",
    ),
    _row(
        "deit_base_distilled_patch16_224.fb_in1k",
        IMAGENET,
        0.9,
        83.384,
        96.492,
        file="deit_base_distilled_patch16_224-df68dfff.pth",
    ),
    _row(
        "deit_base_distilled_patch16_384.fb_in1k",
        IMAGENET,
        1.0,
        85.438,
        97.332,
        file="deit_base_distilled_patch16_384-d0272ac0.pth",
    ),
    _row(
        "deit3_small_patch16_224.fb_in1k",
        IMAGENET,
        0.9,
        81.382,
        95.454,
        file="deit_3_small_224_1k.pth",
    ),
    _row(
        "deit3_base_patch16_224.fb_in1k",
        IMAGENET,
        0.9,
        83.800,
        96.584,
        file="deit_3_base_224_1k.pth",
    ),
    _row(
        "deit3_base_patch16_384.fb_in1k",
        IMAGENET,
        1.0,
        85.088,
        97.252,
        file="deit_3_base_384_1k.pth",
    ),
    _row(
        "deit3_large_patch16_224.fb_in1k",
        IMAGENET,
        0.9,
        84.772,
        97.048,
        file="deit_3_large_224_1k.pth",
    ),
    _row(
        "deit3_large_patch16_384.fb_in1k",
        IMAGENET,
        1.0,
        85.820,
        97.602,
        file="deit_3_large_384_1k.pth",
    ),
    _row(
        "deit3_huge_patch14_224.fb_in1k",
        IMAGENET,
        0.9,
        85.204,
        97.364,
        file="deit_3_huge_224_1k.pth",
    ),
    _row(
        "deit3_huge_patch14_224.fb_in22k_ft_in1k",
        IMAGENET,
        1.0,
        87.180,
        98.264,
        file="deit_3_huge_224_21k_v1.pth",
    ),
    _mae("base", "vit_b16", 83.664, 96.530),
    _mae("large", "vit_l16", 85.952, 97.570),
    _mae("huge", "vit_h14", 86.928, 98.088),
    _torchvision("vit_b_16-c867db91.pth", "vit_b16", 224, 256, 81.072, 95.318),
    _torchvision("vit_b_32-d86f8d99.pth", "vit_b32", 224, 256, 75.912, 92.466),
    _torchvision("vit_l_16-852ce7e3.pth", "vit_l16", 224, 242, 79.662, 94.638),
    _torchvision("vit_l_32-c7638314.pth", "vit_l32", 224, 256, 76.972, 93.070),
    _torchvision("vit_b_16_swag-9ac1b537.pth", "vit_b16", 384, 384, 85.304, 97.650, "bicubic"),
    _torchvision("vit_b_16_lc_swag-4e70ced5.pth", "vit_b16", 224, 224, 81.886, 96.180, "bicubic"),
    _torchvision("vit_l_16_swag-4f3808c9.pth", "vit_l16", 512, 512, 88.064, 98.512, "bicubic"),
    _torchvision("vit_l_16_lc_swag-4d563306.pth", "vit_l16", 224, 224, 85.146, 97.422, "bicubic"),
    _torchvision("vit_h_14_swag-80465313.pth", "vit_h14", 518, 518, 88.552, 98.694, "bicubic"),
    _torchvision("vit_h_14_lc_swag-c1eb923e.pth", "vit_h14", 224, 224, 85.708, 97.730, "bicubic"),
)
