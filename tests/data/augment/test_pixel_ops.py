"""Compare each operation of each policy with a reference implementation at all strengths.

The references are the installed versions of timm, torchvision and Pillow, and stored results of
big_vision.

Pixel values are compared as integers. Our bilinear warp computes in float32, and Pillow's in
double, so results may differ by one level. At the image border, our warp uses the fill color for a
few pixels that Pillow treats as part of the image. All other operations must match exactly.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from augmenting import at_strengths, one_op, photographs
from PIL import Image, ImageFilter
from timm.data import auto_augment as timm_ops
from torchvision.transforms import InterpolationMode, autoaugment
from torchvision.transforms.v2 import functional as tv

from vit.config.schema import AugmentConfig
from vit.data.augment.table import OP_NAMES

WARPS = {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"}


def pictures(images: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))) for image in images]


def levels(pictures: list[Image.Image]) -> np.ndarray:
    return np.stack([np.asarray(picture).transpose(2, 0, 1) for picture in pictures]).astype(int)


def assert_equal_levels(
    ours: np.ndarray,
    theirs: np.ndarray,
    largest: int = 0,
    share: float = 0.0,
    on_border: float = 0.0,
) -> None:
    """Assert that at most a fraction `share` of all pixel values differ. In each image, at most a
    fraction `on_border` may differ by more than `largest`."""
    difference = np.abs(ours - theirs)
    further = (difference > largest).mean((1, 2, 3))
    assert further.max() <= on_border, (
        f"differences above {largest}: {further}, up to {difference.max((1, 2, 3))}"
    )
    assert (difference > 0).mean() <= share, f"{(difference > 0).mean():.2%} of the levels differ"


# --- RandAugment, AutoAugment, TrivialAugment -----------------------------------------------------

TIMM_NAMES = timm_ops._RAND_INCREASING_TRANSFORMS
UNSIGNED = ("AutoContrast", "Equalize", "Invert", "Posterize", "Solarize")
ENHANCE = ("Color", "Contrast", "Brightness", "Sharpness")
"""The timm operations that have an increasing variant and a plain variant. The strengths of the
plain variant range from 0.1 to 1.9."""


def by_timm(
    images: np.ndarray, name: str, strength: float, monkeypatch: pytest.MonkeyPatch
) -> np.ndarray:
    monkeypatch.setattr(timm_ops, "_randomly_negate", lambda level: level)
    to_argument = timm_ops.LEVEL_TO_ARG[name]
    is_signed = not name.startswith(UNSIGNED) and name not in ENHANCE
    signed = strength if is_signed else abs(strength)
    arguments = to_argument(signed, {}) if to_argument else ()
    # Pillow 13 raises an error when posterizing to 0 bits. Earlier versions return a black image.
    if name.startswith("Posterize") and arguments == (0,):
        return np.zeros(images.shape, int)
    options = {"resample": Image.Resampling.BILINEAR, "fillcolor": (124, 116, 104)}
    return levels(
        [timm_ops.NAME_TO_OP[name](picture, *arguments, **options) for picture in pictures(images)]
    )


def test_policies_have_the_operations_of_their_sources_in_order():
    ours = [name.replace("_", "") for name in OP_NAMES["timm"]]
    assert ours == [
        name.lower().removesuffix("increasing").removesuffix("rel") for name in TIMM_NAMES
    ]
    assert [name.lower() for name in timm_ops._RAND_TRANSFORMS] == [
        f"{name.replace('_', '')}{'rel' * name.startswith('translate')}"
        for name in OP_NAMES["timm_inc0"]
    ]
    for op_set, theirs in TORCHVISION_SPACES.items():
        assert [name.replace("_", "") for name in OP_NAMES[op_set]] == [
            name.lower() for name in theirs(SMALL)
        ]


# The timm operations to test, as (policy, index, timm's name).
TIMM_OPS = [("timm", op, name) for op, name in enumerate(TIMM_NAMES)]
TIMM_OPS += [
    ("timm_inc0", op, name)
    for op, name in enumerate(timm_ops._RAND_TRANSFORMS)
    if name not in TIMM_NAMES
]
TIMM_OPS += [
    ("timm_auto", OP_NAMES["timm_auto"].index(ours), name)
    for ours, name in (
        ("posterize", "Posterize"),
        ("posterize_increasing", "PosterizeIncreasing"),
        ("posterize_original", "PosterizeOriginal"),
        ("contrast", "Contrast"),
    )
]
TIMM_CONFIGS = {
    "timm": AugmentConfig(randaugment_layers=1),
    "timm_inc0": AugmentConfig(randaugment_layers=1, randaugment_ops="timm_inc0"),
    "timm_auto": AugmentConfig(auto_augment="original"),
}


@pytest.mark.parametrize(("op_set", "op", "name"), TIMM_OPS)
def test_operations_equal_timm(op_set, op, name, monkeypatch):
    images = photographs()
    strengths = (0.0, 2.5, 3.703125, 5.0, 9.0, 9.625, 10.0, -2.5, -9.0, -10.0)
    is_warp = OP_NAMES[op_set][op] in WARPS
    for strength, ours in zip(
        strengths, at_strengths(TIMM_CONFIGS[op_set], images, op, strengths), strict=True
    ):
        assert_equal_levels(
            ours,
            by_timm(images, name, strength, monkeypatch),
            largest=int(is_warp),
            share=0.03 * is_warp,
        )


SMALL = (40, 120)
TORCHVISION_SPACES = {
    "torchvision": partial(autoaugment.RandAugment()._augmentation_space, 31),
    "torchvision_auto": partial(autoaugment.AutoAugment()._augmentation_space, 10),
    "ta_wide": lambda size: autoaugment.TrivialAugmentWide()._augmentation_space(31),
}


def by_torchvision(images: np.ndarray, op_set: str, op: int, strength: int) -> np.ndarray:
    """Apply a torchvision operation. `strength` is a signed index into the operation's
    magnitudes."""
    name, (magnitudes, is_signed) = list(TORCHVISION_SPACES[op_set](SMALL).items())[op]
    magnitude = float(magnitudes[abs(strength)]) if magnitudes.ndim else 0.0
    signed = -magnitude if is_signed and strength < 0 else magnitude
    options = {"interpolation": InterpolationMode.BILINEAR, "fill": None}
    return levels(
        [autoaugment._apply_op(picture, name, signed, **options) for picture in pictures(images)]
    )


@pytest.mark.parametrize("op", range(14))
@pytest.mark.parametrize(("op_set", "largest"), [("torchvision_auto", 9), ("ta_wide", 30)])
def test_operations_of_policies_equal_torchvision(op_set, largest, op):
    """One of the two images is noise, in which up to two sevenths of the pixel values may
    differ."""
    images = photographs()[[0, 4]]
    is_warp = OP_NAMES[op_set][op] in WARPS
    config = AugmentConfig(auto_augment="ta_wide" if op_set == "ta_wide" else "imagenet")
    strengths = tuple(range(-largest, largest + 1))
    for strength, ours in zip(strengths, at_strengths(config, images, op, strengths), strict=True):
        theirs = by_torchvision(images, op_set, op, strength)
        assert_equal_levels(
            ours, theirs, largest=int(is_warp), share=0.14 * is_warp, on_border=6e-3 * is_warp
        )


@pytest.mark.parametrize("op", range(14), ids=OP_NAMES["torchvision"])
def test_operations_equal_torchvision(op):
    images = photographs()
    is_warp = OP_NAMES["torchvision"][op] in WARPS
    config = AugmentConfig(randaugment_layers=1, randaugment_ops="torchvision")
    strengths = tuple(range(-30, 31))
    for strength, ours in zip(strengths, at_strengths(config, images, op, strengths), strict=True):
        theirs = by_torchvision(images, "torchvision", op, strength)
        assert_equal_levels(
            ours, theirs, largest=int(is_warp), share=0.04 * is_warp, on_border=6e-3 * is_warp
        )


BIG_VISION_CONFIG = AugmentConfig(randaugment_layers=1, randaugment_ops="big_vision")
BIG_VISION = np.load(Path(__file__).parent / "golden_big_vision.npz")


@pytest.mark.parametrize("op", range(16), ids=OP_NAMES["big_vision"])
def test_operations_equal_big_vision(op):
    """The stored results come from
    google-research/big_vision@538b8a80:big_vision/pp/autoaugment.py, run on two images with
    TensorFlow 2.21. tensorflow_addons does not support TensorFlow 2.21, so
    tf.raw_ops.ImageProjectiveTransformV3 replaces it. The cutout box is centered at 80 % of the
    width and 30 % of the height. TensorFlow sums numbers in a different order, so one pixel value
    in a hundred may differ by one, or by two for sharpness."""
    name = OP_NAMES["big_vision"][op].replace("_", "")
    is_summed = OP_NAMES["big_vision"][op] in ("color", "sharpness")
    cases = [case for case in BIG_VISION.files if case.split()[0].lower() == name]
    assert cases
    for case in cases:
        ours = one_op(
            BIG_VISION_CONFIG,
            BIG_VISION["images"].transpose(0, 3, 1, 2).copy(),
            op,
            float(case.split()[1]),
            0.8,
            0.3,
        )
        assert_equal_levels(
            ours,
            BIG_VISION[case].transpose(0, 3, 1, 2).astype(int),
            largest=2 * is_summed,
            share=0.011 * is_summed,
        )


# --- 3-Augment and color jitter ------------------------------------------------------------------

THREE = AugmentConfig(auto_augment="three_augment")
RADII = [
    0.1,
    0.4,
    0.81,
    1.13,
    1.4142,
    1.4143,
    1.77,
    1.99,
    *np.random.default_rng(0).uniform(0.1, 2.0, 12).round(4).tolist(),
]


def test_blur_equals_pillow():
    for radius, ours in zip(RADII, at_strengths(THREE, photographs(), 2, RADII), strict=True):
        theirs = levels(
            [
                picture.filter(ImageFilter.GaussianBlur(radius))
                for picture in pictures(photographs())
            ]
        )
        assert_equal_levels(ours, theirs, largest=1, share=1e-3)


@pytest.mark.parametrize("radius", [1.0, 1.5, 2.0])
def test_blur_differs_only_if_a_sum_is_between_two_levels(radius):
    theirs = levels(
        [picture.filter(ImageFilter.GaussianBlur(radius)) for picture in pictures(photographs())]
    )
    assert_equal_levels(one_op(THREE, photographs(), 2, radius), theirs, largest=3, share=0.15)


def test_gray_and_solarize_equal_pillow():
    images = photographs()
    assert_equal_levels(
        one_op(THREE, images, 0, 0.7),
        levels([tv.to_grayscale(picture, 3) for picture in pictures(images)]),
    )
    assert_equal_levels(
        one_op(THREE, images, 1, 0.7),
        levels([tv.solarize(picture, 128) for picture in pictures(images)]),
    )


@pytest.mark.parametrize(
    ("op", "name"), [(0, "adjust_brightness"), (1, "adjust_contrast"), (2, "adjust_saturation")]
)
def test_jitter_equals_torchvision_on_pillow_images(op, name):
    factors = (0.0, 0.13, 0.7, 1.0, 1.29, 2.0)
    jitter = AugmentConfig(color_jitter=(0.3, 0.0, 0.0, 0.0))
    for factor, ours in zip(factors, at_strengths(jitter, photographs(), op, factors), strict=True):
        theirs = levels(
            [
                getattr(tv, name)(picture, float(np.float32(factor)))
                for picture in pictures(photographs())
            ]
        )
        assert_equal_levels(ours, theirs)


def test_hue_equals_torchvision_on_tensors():
    """The comparison uses tensors, because torchvision's hue adjustment for Pillow images has only
    256 hues, which causes differences of several levels."""
    turns = (-0.5, -0.21, -0.03, 0.0, 0.1, 0.37, 0.5)
    jitter = AugmentConfig(color_jitter=(0.0, 0.0, 0.0, 0.3))
    for turn, ours in zip(turns, at_strengths(jitter, photographs(), 3, turns), strict=True):
        theirs = (
            torch.stack([tv.adjust_hue(image, turn) for image in torch.from_numpy(photographs())])
            .numpy()
            .astype(int)
        )
        assert_equal_levels(ours, theirs, largest=1, share=1e-3)


@pytest.mark.parametrize(("op", "name"), [(0, "adjust_brightness"), (1, "adjust_contrast")])
def test_gray_images_are_jittered_in_brightness_and_contrast(op, name):
    images = photographs()[:, :1]
    theirs = np.stack(
        [np.asarray(getattr(tv, name)(Image.fromarray(image[0]), 0.7))[None] for image in images]
    ).astype(int)
    assert_equal_levels(
        one_op(AugmentConfig(color_jitter=(0.3, 0.0, 0.0, 0.0)), images, op, 0.7), theirs
    )
