"""Test that erasing and mixing match timm's distributions and do not depend on the micro-batch
size."""

import random

import numpy as np
import pytest
import scipy.stats
import torch
from augmenting import mixed_table, table_of
from hypothesis import given
from hypothesis import strategies as st
from timm.data.mixup import cutmix_bbox_and_lam
from timm.data.random_erasing import RandomErasing

from vit.config.schema import AugmentConfig
from vit.data.augment.draw import draw_mix, partners
from vit.data.augment.table import BOTTOM, CUTMIX, FIRST_OP, LAMBDA, LEFT, RIGHT, TOP

MIX_BOTH = AugmentConfig(mixup_alpha=0.8, cutmix_alpha=1.0, mix_prob=0.8)


# --- random erasing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "area", "ratio"),
    [((32, 48), (0.02, 1 / 3), (0.3, 1 / 0.3)), ((40, 16), (0.3, 0.9), (0.2, 2.0))],
)
def test_boxes_are_erased_as_in_timm(size, area, ratio):
    """With the second set of parameters, timm often fails to find a valid box in ten attempts."""
    num = 6000
    prob = 0.7
    config = AugmentConfig(
        erasing_prob=prob, erasing_area=area, erasing_aspect=ratio, erasing_mode="const"
    )
    boxes = table_of(config, num, size)[:, FIRST_OP:]
    eraser = RandomErasing(prob, *area, *ratio, mode="const", device="cpu")
    # timm uses Python's global random number generator.
    random.seed(0)
    theirs = []
    for image in eraser(torch.ones(num, 1, *size)):
        rows, columns = (torch.nonzero(image[0].amin(axis) == 0)[:, 0].tolist() for axis in (1, 0))
        theirs.append(
            [rows[0], rows[-1] + 1, columns[0], columns[-1] + 1] if rows else [0, 0, 0, 0]
        )
    theirs = np.array(theirs)
    ours_erased = boxes[:, 1] > 0
    theirs_erased = theirs[:, 1] > 0
    assert abs(ours_erased.mean() - theirs_erased.mean()) < 0.03
    for column, name in enumerate(("top", "bottom", "left", "right")):
        assert (
            scipy.stats.ks_2samp(boxes[ours_erased, column], theirs[theirs_erased, column]).pvalue
            > 1e-3
        ), name


def test_the_fill_is_a_normal_color_a_seed_or_nothing():
    assert (
        table_of(AugmentConfig(erasing_prob=1.0, erasing_mode="const"), 4).shape[1] == FIRST_OP + 4
    )
    colors = table_of(AugmentConfig(erasing_prob=1.0, erasing_mode="rand"), 6000)[:, FIRST_OP + 4 :]
    assert colors.shape[1] == 3
    assert all(
        scipy.stats.kstest(channel, scipy.stats.norm.cdf).pvalue > 1e-3 for channel in colors.T
    )
    seeds = table_of(AugmentConfig(erasing_prob=1.0, erasing_mode="pixel"), 6000)[:, FIRST_OP + 4 :]
    assert seeds.shape[1] == 1
    assert (seeds % 1 == 0).all()
    assert len(np.unique(seeds)) > 5990


# --- mixing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 2.0])
def test_mixup_lambda_is_beta_distributed(alpha):
    lambdas = mixed_table(AugmentConfig(mixup_alpha=alpha, mix_group_size=2), 8000)[::2, LAMBDA]
    assert scipy.stats.kstest(lambdas, scipy.stats.beta(alpha, alpha).cdf).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_cutmix_boxes_are_distributed_as_in_timm(alpha):
    num = 4000
    height, width = (32, 48)
    table = mixed_table(
        AugmentConfig(cutmix_alpha=alpha, mix_group_size=2), 2 * num, (height, width)
    )[::2]
    # timm uses numpy's global random number generator.
    np.random.seed(0)
    theirs = [
        cutmix_bbox_and_lam((1, 3, height, width), np.random.beta(alpha, alpha)) for _ in range(num)
    ]
    assert scipy.stats.ks_2samp(table[:, LAMBDA], [lam for _, lam in theirs]).pvalue > 1e-3
    for column, (name, values) in zip(
        (TOP, BOTTOM, LEFT, RIGHT),
        zip("tblr", zip(*(box for box, _ in theirs), strict=True), strict=True),
        strict=True,
    ):
        assert scipy.stats.ks_2samp(table[:, column], values).pvalue > 1e-3, name


def test_a_box_inside_the_image_has_the_aspect_ratio_of_the_image():
    top, bottom, left, right = mixed_table(AugmentConfig(cutmix_alpha=1.0), 4000, (64, 64))[
        :, [TOP, BOTTOM, LEFT, RIGHT]
    ].T
    inside = (top > 0) & (left > 0) & (bottom < 64) & (right < 64)
    np.testing.assert_array_equal((bottom - top)[inside], (right - left)[inside])
    assert ((bottom - top)[inside] % 2 == 0).all()
    assert inside.sum() > 400


def test_groups_are_mixed_and_switched_to_cutmix_with_their_probabilities():
    config = AugmentConfig(
        mixup_alpha=0.8, cutmix_alpha=1.0, mix_prob=0.6, cutmix_switch_prob=0.3, mix_group_size=2
    )
    table = mixed_table(config, 20_000)[::2]
    mixup = (table[:, LAMBDA] < 1) & (table[:, CUTMIX] == 0)
    cutmix = table[:, CUTMIX] == 1
    assert abs(mixup.mean() - 0.6 * 0.7) < 0.02
    assert abs(cutmix.mean() - 0.6 * 0.3) < 0.02


@given(
    st.integers(0, 2**40),
    st.sampled_from([4, 8, 12, 16, 24, 48]),
    st.lists(st.integers(0, 47), max_size=4),
    st.sampled_from([2, 4]),
    st.sampled_from(["batch", "pair", "elem"]),
)
def test_mixing_does_not_depend_on_how_the_batch_is_split(
    position, micro_batch, bad_rows, group_size, mode
):
    config = MIX_BOTH.model_copy(update={"mix_group_size": group_size, "mixup_mode": mode})
    weights = np.ones(48, np.float32)
    weights[bad_rows] = 0
    whole = table_of(config, 48)
    draw_mix(config, whole, weights, 3, position, 0, (24, 20), 0)
    for start in range(0, 48, micro_batch):
        rows = slice(start, start + micro_batch)
        part = table_of(config, micro_batch, first=start)
        draw_mix(config, part, weights[rows], 3, position, start, (24, 20), 0)
        np.testing.assert_array_equal(part, whole[rows])


def test_groups_share_a_lambda_and_groups_and_batches_differ():
    config = AugmentConfig(mixup_alpha=0.8)
    tables = []
    for position in (0, 1):
        tables.append(table_of(config, 40))
        draw_mix(config, tables[-1], np.ones(40, np.float32), 0, position, 0, (24, 20), 0)
    lambdas = np.concatenate(tables)[:, LAMBDA].reshape(20, 4)
    np.testing.assert_array_equal(lambdas, lambdas[:, :1].repeat(4, 1))
    assert len(np.unique(lambdas)) == 20


def test_the_mode_determines_which_rows_share_a_lambda():
    shared = {}
    for mode in ("batch", "pair", "elem"):
        config = AugmentConfig(mixup_alpha=0.8, mixup_mode=mode)
        table = mixed_table(config, 400)[:, LAMBDA]
        shared[mode] = len(np.unique(table))
        partner = partners(config, 400)
        assert (partner // 4 == np.arange(400) // 4).all(), (
            "a row mixes with a row outside its group"
        )
        assert (partner != np.arange(400)).all()
        assert sorted(partner) == list(range(400))
        if mode == "pair":
            np.testing.assert_array_equal(partner[partner], np.arange(400))
            np.testing.assert_array_equal(table[partner], table)
    assert shared == {"batch": 100, "pair": 200, "elem": 400}


def test_all_modes_mix_with_the_same_probabilities():
    for mode in ("pair", "elem"):
        config = AugmentConfig(
            mixup_alpha=0.8, cutmix_alpha=1.0, mix_prob=0.6, cutmix_switch_prob=0.3, mixup_mode=mode
        )
        table = mixed_table(config, 20_000)
        rows = partners(config, 20_000) > np.arange(20_000) if mode == "pair" else slice(None)
        mixup = (table[rows, LAMBDA] < 1) & (table[rows, CUTMIX] == 0)
        cutmix = table[rows, CUTMIX] == 1
        assert abs(mixup.mean() - 0.6 * 0.7) < 0.02
        assert abs(cutmix.mean() - 0.6 * 0.3) < 0.02
        assert (
            scipy.stats.kstest(table[rows, LAMBDA][mixup], scipy.stats.beta(0.8, 0.8).cdf).pvalue
            > 1e-3
        )
