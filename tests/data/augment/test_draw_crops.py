"""Test that crops have the same distribution as torchvision's crops."""

import numpy as np
import pytest
import scipy.stats
import torch
from augmenting import keys_of
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

from vit.config.schema import AugmentConfig
from vit.data.augment.draw import draw_crops, draw_table, sample_keys
from vit.data.augment.table import table_layout

SIZE = (24, 20)


EVERYTHING = AugmentConfig(
    randaugment_layers=2,
    randaugment_ops="big_vision",
    magnitude_std=None,
    color_jitter=(0.3, 0.3, 0.3, 0.1),
    crop="simple",
    erasing_prob=0.5,
    mixup_alpha=0.8,
    cutmix_alpha=1.0,
)


def crops_of(config, keys, widths, heights, size=SIZE):
    return draw_crops(config, keys, widths, heights, size)


# --- crops ----------------------------------------------------------------------------------------


def test_the_crop_of_a_sample_depends_on_the_epoch_but_not_on_the_batch():
    ids = np.array([5, 900, 17, 3, 900])
    sizes = np.array([300, 200, 40, 41, 200])
    for config in (
        EVERYTHING,
        AugmentConfig(randaugment_layers=2),
        AugmentConfig(auto_augment="three_augment", erasing_prob=1.0, erasing_mode="rand"),
    ):
        keys = sample_keys(1, 2, ids)
        crops, table = (
            draw(config, keys, sizes, sizes + 50, SIZE) for draw in (draw_crops, draw_table)
        )
        for subset in ([4, 2, 0], [1]):
            alone = config, sample_keys(1, 2, ids[subset]), sizes[subset], sizes[subset] + 50, SIZE
            np.testing.assert_array_equal(draw_crops(*alone), crops[subset])
            np.testing.assert_array_equal(draw_table(*alone), table[subset])
    axes = [
        (seed, epoch, sample, copy)
        for seed in (0, 1)
        for epoch in (0, 1)
        for sample in (0, 1)
        for copy in (0, 1)
    ]
    assert (
        len(
            {
                int(sample_keys(seed, epoch, np.array(sample), copy))
                for seed, epoch, sample, copy in axes
            }
        )
        == 16
    )


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 2000)), min_size=1, max_size=20),
    st.integers(0, 2**63 - 1),
    st.sampled_from([0.08, 0.35, 1.0]),
)
def test_crops_are_inside_the_image(sizes, seed, low):
    widths, heights = np.array(sizes).T
    left, top, width, height = crops_of(
        AugmentConfig(crop_scale=(low, 1.0)), keys_of(len(sizes), seed), widths, heights
    ).T
    assert (width > 0).all()
    assert (height > 0).all()
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (left + width <= widths).all()
    assert (top + height <= heights).all()


@pytest.mark.parametrize(
    ("width", "height"), [(500, 375), (375, 500), (400, 400), (900, 300), (8, 6)]
)
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.35, 0.6)])
def test_crops_are_distributed_as_in_torchvision(width, height, scale):
    num = 4000
    ratio = (3 / 4, 4 / 3)
    ours = crops_of(
        AugmentConfig(crop_scale=scale, crop_ratio=ratio),
        keys_of(num),
        np.full(num, width),
        np.full(num, height),
    )
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(num)]
    )[:, [1, 0, 3, 2]]
    for name, a, b in (
        ("left", ours[:, 0], theirs[:, 0]),
        ("top", ours[:, 1], theirs[:, 1]),
        *(
            (name, measure(ours[:, 2], ours[:, 3]), measure(theirs[:, 2], theirs[:, 3]))
            for name, measure in (
                ("width", lambda w, h: w),
                ("height", lambda w, h: h),
                ("area", np.multiply),
                ("aspect", np.divide),
            )
        ),
    ):
        assert scipy.stats.ks_2samp(a, b).pvalue > 1e-3, (
            f"{name}: mean {a.mean():.3f}, torchvision's {b.mean():.3f}"
        )


def test_areas_and_aspect_ratios_stay_in_range():
    num = 5000
    side = 1000
    _, _, width, height = crops_of(
        AugmentConfig(crop_scale=(0.2, 0.5), crop_ratio=(0.8, 1.5)),
        keys_of(num),
        np.full(num, side),
        np.full(num, side),
    ).T
    area = width * height / side**2
    aspect = width / height
    rounding = 0.003
    assert 0.2 - rounding < area.min() < 0.201 < 0.499 < area.max() < 0.5 + rounding
    assert 0.8 - rounding < aspect.min() < 0.81 < 1.48 < aspect.max() < 1.5 + 2 * rounding
    assert abs(area.mean() - 0.35) < 0.005
    assert abs(np.log(aspect).mean() - np.log(0.8 * 1.5) / 2) < 0.01


@pytest.mark.parametrize(("width", "height"), [(1000, 11), (11, 1000), (997, 20), (31, 1001)])
def test_if_no_attempt_fits_the_crop_is_the_largest_centered_one_as_in_torchvision(width, height):
    crop = crops_of(AugmentConfig(), keys_of(1), np.array([width]), np.array([height]))[0]
    top, left, crop_height, crop_width = RandomResizedCrop.get_params(
        torch.empty(1, height, width), [0.08, 1.0], [3 / 4, 4 / 3]
    )
    assert crop.tolist() == [left, top, crop_width, crop_height]


# --- simple crop ----------------------------------------------------------------------------------


@given(
    st.integers(1, 1500),
    st.integers(1, 1500),
    st.sampled_from([(24, 20), (16, 16), (224, 224)]),
    st.integers(0, 2**40),
)
def test_simple_crops_are_the_largest_windows_with_the_aspect_ratio_of_the_view(
    width, height, size, seed
):
    config = AugmentConfig(crop="simple")
    view_h, view_w = size
    left, top, crop_w, crop_h = draw_crops(
        config, keys_of(1, seed), np.array([width]), np.array([height]), size
    )[0]
    assert left >= 0
    assert top >= 0
    assert left + crop_w <= width
    assert top + crop_h <= height
    scale = min(width / view_w, height / view_h)
    assert crop_w == pytest.approx(scale * view_w, abs=1)
    assert crop_h == pytest.approx(scale * view_h, abs=1)


@pytest.mark.parametrize(("width", "height"), [(320, 200), (200, 320), (200, 200)])
def test_simple_crops_are_distributed_like_a_padded_random_crop(width, height):
    """The shorter side of the image equals the crop size, so the image is not resized. The crop
    positions must have the distribution of torchvision's RandomCrop(200, padding=4)."""
    num = 20_000
    config = AugmentConfig(crop="simple")
    size = (200, 200)
    sizes = np.full(num, width), np.full(num, height)
    crops = draw_crops(config, keys_of(num), *sizes, size)
    table = draw_table(config, keys_of(num), *sizes, size)
    shift = table_layout(config).shift
    assert (crops[:, 2:] == 200).all()
    for axis, side in ((0, width), (1, height)):
        place = crops[:, axis] + table[:, shift + axis]
        assert (
            scipy.stats.chisquare(
                np.bincount((place + 4).astype(int), minlength=side - 200 + 9)
            ).pvalue
            > 1e-3
        )
        assert place.min() == -4
        assert place.max() == side - 200 + 4
        beyond = table[:, shift + axis] != 0
        assert set(crops[beyond, axis]) <= {0, side - 200}, (
            "a view that is larger than the image must start at the image's border"
        )
