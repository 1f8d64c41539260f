"""List published models with the settings, accuracy and file names of their weights."""

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
"""The size of the ILSVRC2012 validation set, on which all accuracies in `KNOWN` were measured."""
NO_NUMBER = "no published accuracy known"


@dataclass(frozen=True)
class KnownModel:
    """Published weights: their model, preprocessing and accuracy."""

    name: str
    """timm's name with its tag, or the authors' name if timm lacks the model."""
    model: dict[str, Any]
    """The config's `model` section without image size and classes. Its name is `timm/<name>` if
    this project has no equivalent model."""

    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """`mean` and `std` per channel, for images scaled to [0, 1]."""
    crop_pct: float
    """The ratio of the center crop's side to the shorter side of the resized image."""
    interpolation: str = "bicubic"
    crop_mode: str = "center"
    """timm's crop mode: `center`, or `squash`, which changes the aspect ratio."""
    apply_exif: bool = False
    """Whether to rotate images by their EXIF orientation. Only this project's exports set it."""

    top1: float | None = None
    top5: float | None = None
    """`top1` and `top5` in percent on the 50,000 ILSVRC2012 validation images; None if unknown."""
    source: str = NO_NUMBER
    """The publication that reports `top1` and `top5`, or the reason why they are missing."""

    files: tuple[str, ...] = ()
    head: str = "head"
    """The name of the classifier layer, whose weight has one row per class."""
    not_softmax: str = ""
    """The reason why a softmax over the logits would be wrong, or ""."""
    notes: tuple[str, ...] = ()
    """One sentence for each field of the program's config that is not used."""


def own_model(architecture: str) -> dict[str, Any] | None:
    """Return a `model` section that computes the same function as timm's `architecture`.

    Returns None if this project has no such model. architecture: timm's name without a tag.
    """
    match = re.fullmatch(
        r"(?P<family>vit|deit|deit3)_(?P<size>tiny|small|medium|base|large|huge)"
        r"(?P<distilled>_distilled)?_patch(?P<patch>\d+)_\d+(?P<miil>_miil)?",
        architecture,
    )
    if match is None or architecture.startswith(("vit_medium", "deit_medium")):
        return None

    fields: dict[str, Any] = {"name": f"vit_{SIZES.get(match['size'], 's')}{match['patch']}"}
    if match["distilled"]:
        fields["dist_token"] = True
    if match["size"] == "medium":
        fields |= {"embed_dim": 512, "num_heads": 8}
    if match["family"] == "deit3":
        fields["init_values"] = 1e-6  # Any value works, because the weights overwrite it.
    if match["miil"]:
        fields["qkv_bias"] = False
    return fields


# The columns are name, crop_pct, top-1, top-5, and the authors' file, where `*` stands for the name
# without its tag.
_TIMM_ROWS = """
vit_tiny_patch16_224.augreg_in21k_ft_in1k  0.9 75.452 92.858
vit_small_patch16_224.augreg_in1k          0.9 78.842 94.280
vit_small_patch16_224.augreg_in21k_ft_in1k 0.9 81.402 96.150
vit_small_patch16_384.augreg_in1k          1.0 81.130 95.590
vit_base_patch32_224.augreg_in1k           0.9 74.908 91.770
vit_base_patch16_224.augreg_in1k           0.9 79.154 94.108
vit_base_patch16_224.augreg_in21k_ft_in1k  0.9 84.534 97.300
vit_base_patch16_224.augreg2_in21k_ft_in1k 0.9 85.108 97.530
vit_base_patch16_384.augreg_in1k           1.0 81.102 95.334
vit_base_patch16_384.orig_in21k_ft_in1k    1.0 84.212 97.210 jx_vit_base_p16_384-83fb41ba.pth
vit_base_patch16_384.augreg_in21k_ft_in1k  1.0 86.010 97.998
vit_large_patch16_224.augreg_in21k_ft_in1k 0.9 85.856 97.822
vit_large_patch16_384.augreg_in21k_ft_in1k 1.0 87.096 98.302
deit_tiny_patch16_224.fb_in1k              0.9 72.190 91.100 *-a1311bcf.pth
deit_small_patch16_224.fb_in1k             0.9 79.856 95.056 *-cd65a155.pth
deit_base_patch16_224.fb_in1k              0.9 81.980 95.740 *-b5f2ef4d.pth
deit_base_patch16_384.fb_in1k              1.0 83.108 96.376 *-8de9b5d1.pth
deit_tiny_distilled_patch16_224.fb_in1k    0.9 74.538 91.898 *-b40b3cf7.pth
deit_small_distilled_patch16_224.fb_in1k   0.9 81.204 95.378 *-649709d9.pth
deit_base_distilled_patch16_224.fb_in1k    0.9 83.384 96.492 *-df68dfff.pth
deit_base_distilled_patch16_384.fb_in1k    1.0 85.438 97.332 *-d0272ac0.pth
deit3_small_patch16_224.fb_in1k            0.9 81.382 95.454 deit_3_small_224_1k.pth
deit3_base_patch16_224.fb_in1k             0.9 83.800 96.584 deit_3_base_224_1k.pth
deit3_base_patch16_384.fb_in1k             1.0 85.088 97.252 deit_3_base_384_1k.pth
deit3_large_patch16_224.fb_in1k            0.9 84.772 97.048 deit_3_large_224_1k.pth
deit3_large_patch16_384.fb_in1k            1.0 85.820 97.602 deit_3_large_384_1k.pth
deit3_huge_patch14_224.fb_in1k             0.9 85.204 97.364 deit_3_huge_224_1k.pth
deit3_huge_patch14_224.fb_in22k_ft_in1k    1.0 87.180 98.264 deit_3_huge_224_21k_v1.pth
"""

# The columns are file, model, input side, resized side, interpolation, top-1 and top-5. MAE's
# util/datasets.py and torchvision's presets.py use ImageNet's mean and standard deviation. MAE's
# models_vit.py averages the patches before the norm.
_OTHER_ROWS = """
mae_finetuned_vit_base.pth     vit_b16 224 256 bicubic  83.664 96.530
mae_finetuned_vit_large.pth    vit_l16 224 256 bicubic  85.952 97.570
mae_finetuned_vit_huge.pth     vit_h14 224 256 bicubic  86.928 98.088
vit_b_16-c867db91.pth          vit_b16 224 256 bilinear 81.072 95.318
vit_b_32-d86f8d99.pth          vit_b32 224 256 bilinear 75.912 92.466
vit_l_16-852ce7e3.pth          vit_l16 224 242 bilinear 79.662 94.638
vit_l_32-c7638314.pth          vit_l32 224 256 bilinear 76.972 93.070
vit_b_16_swag-9ac1b537.pth     vit_b16 384 384 bicubic  85.304 97.650
vit_b_16_lc_swag-4e70ced5.pth  vit_b16 224 224 bicubic  81.886 96.180
vit_l_16_swag-4f3808c9.pth     vit_l16 512 512 bicubic  88.064 98.512
vit_l_16_lc_swag-4d563306.pth  vit_l16 224 224 bicubic  85.146 97.422
vit_h_14_swag-80465313.pth     vit_h14 518 518 bicubic  88.552 98.694
vit_h_14_lc_swag-c1eb923e.pth  vit_h14 224 224 bicubic  85.708 97.730
"""


BIG_VISION = tuple(
    KnownModel(
        f"vit_s16_i1k_{epochs}ep",
        {
            "name": "vit_s16",
            "mlp_layer": "mlp_tanh",
            "class_token": False,
            "global_pool": "norm_avg",
            "pos_embed": "sincos2d",
            "representation_size": 384,
        },
        (224, 224),
        *HALF,
        crop_pct=224 / 256,
        interpolation="bilinear",
        source=f"published: {top1} % top-1 (arXiv 2205.01580)",
        files=(f"vit_s16_i1k_{epochs}ep.npz",),
    )
    for epochs, top1 in ((90, 76.5), (150, 78.5), (300, 80.0))
)
"""big_vision's weights of configs/vit_s16_i1k.py (big_vision/models/vit.py, VANITY_NAMES). Their
accuracies are not published as counts of images."""


def _read_timm_row(row: str) -> KnownModel:
    """Read a row of timm's models: name, crop_pct, top-1, top-5 and file names."""
    name, crop_pct, top1, top5, *files = row.split()
    architecture = name.partition(".")[0]
    side = int(architecture.rpartition("_")[2])

    return KnownModel(
        name,
        own_model(architecture) or {},
        (side, side),
        *(HALF if name.startswith("vit_") else IMAGENET),
        crop_pct=float(crop_pct),
        top1=float(top1),
        top5=float(top5),
        source=TIMM,
        files=tuple(file.replace("*", architecture) for file in files),
    )


def _read_other_row(row: str) -> KnownModel:
    """Read a row of MAE's or torchvision's models, which have one file each."""
    file, model, side, resized, interpolation, top1, top5 = row.split()
    is_mae = file.startswith("mae_")
    stem = file.removesuffix(".pth").partition("-")[0]

    return KnownModel(
        stem if is_mae else f"torchvision_{stem}",
        {"name": model, "global_pool": "avg"} if is_mae else {"name": model},
        (int(side), int(side)),
        *IMAGENET,
        crop_pct=int(side) / int(resized),
        interpolation=interpolation,
        top1=float(top1),
        top5=float(top5),
        source=MAE if is_mae else TORCHVISION,
        files=(file,),
    )


KNOWN: tuple[KnownModel, ...] = (
    *map(_read_timm_row, _TIMM_ROWS.strip().splitlines()),
    *map(_read_other_row, _OTHER_ROWS.strip().splitlines()),
)
