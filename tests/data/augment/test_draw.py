"""Compare augmentation parameters with golden values, and with the distributions in torchvision,
timm and the papers."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from augmenting import table_of
from pydantic import ValidationError
from timm.data import auto_augment as timm_ops
from torchvision.transforms import ColorJitter, autoaugment

from vit.config.io import load_config
from vit.config.schema import AugmentConfig, Config
from vit.data.augment.draw import draw_crops, draw_mix, draw_table, sample_keys
from vit.data.augment.table import (
    AUTO_AUGMENT_SETS,
    FIRST_OP,
    FLIP,
    OP_NAMES,
    describe,
    table_layout,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "name", json.loads((Path(__file__).parent / "golden_draws.json").read_text())
)
def test_random_numbers_of_a_recipe_equal_the_golden_values(name):
    """If this test fails, existing seeds no longer reproduce their runs. Do not update the golden
    file. Instead, draw the random numbers of a new augmentation from a separate stream."""
    golden = json.loads((Path(__file__).parent / "golden_draws.json").read_text())[name]
    recipe, *settings = name.split()
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", settings)
    ids = np.array([0, 1, 7, 1_000_000, 2**40, 5, 6, 3])
    widths, heights = (
        np.array([500, 375, 8, 900, 33, 400, 1000, 48]),
        np.array([375, 500, 6, 300, 1000, 400, 11, 48]),
    )
    keys = sample_keys(7, 3, ids, 0)
    size = (config.model.image_size,) * 2
    table = draw_table(config.augment, keys, widths, heights, size)
    draw_mix(config.augment, table, np.ones(8, np.float32), 7, 11, 16, size, 0)
    assert draw_crops(config.augment, keys, widths, heights, size).tolist() == golden["crops"]
    np.testing.assert_allclose(table, golden["table"], rtol=2e-6)


# --- flips, operations ----------------------------------------------------------------------------


@pytest.mark.parametrize("prob", [0.0, 0.3, 1.0])
def test_images_flip_with_their_probability(prob):
    flips = table_of(AugmentConfig(hflip_prob=prob), 10_000)[:, FLIP]
    assert set(flips) <= {0.0, 1.0}
    assert abs(flips.mean() - prob) < 4 * np.sqrt(prob * (1 - prob) / 10_000) + 1e-9


def test_operations_are_drawn_as_in_timm():
    config = AugmentConfig(randaugment_layers=2, randaugment_magnitude=5.0, magnitude_std=0.5)
    table = table_of(config, 20_000)
    for ops, strengths in (
        (table[:, FIRST_OP], table[:, FIRST_OP + 1]),
        (table[:, FIRST_OP + 2], table[:, FIRST_OP + 3]),
    ):
        assert abs((ops < 0).mean() - 0.5) < 0.015, "timm applies an operation with probability 0.5"
        assert (
            scipy.stats.chisquare(
                np.bincount(ops[ops >= 0].astype(int), minlength=len(OP_NAMES["timm"]))
            ).pvalue
            > 1e-3
        )
        assert scipy.stats.kstest(np.abs(strengths), scipy.stats.norm(5.0, 0.5).cdf).pvalue > 1e-3
        assert abs((strengths < 0).mean() - 0.5) < 0.015
    assert abs(np.corrcoef(table[:, FIRST_OP], table[:, FIRST_OP + 2])[0, 1]) < 0.03


@pytest.mark.parametrize(("magnitude", "limit"), [(9.9, 10.0), (0.1, 0.0)])
def test_strengths_are_clipped_to_the_scale_of_timm(magnitude, limit):
    config = AugmentConfig(randaugment_layers=1, randaugment_magnitude=magnitude, magnitude_std=0.2)
    strengths = np.abs(table_of(config, 4000)[:, FIRST_OP + 1])
    assert ((strengths >= 0) & (strengths <= 10)).all()
    assert abs((strengths == limit).mean() - scipy.stats.norm.sf(0.5)) < 0.03, (
        "strengths beyond the scale must be clipped to its maximum"
    )


def test_the_sets_of_other_programs_always_apply_an_operation_at_the_set_strength():
    for ops, magnitude in (("torchvision", 9.0), ("big_vision", 15.0)):
        config = AugmentConfig(
            randaugment_layers=1, randaugment_ops=ops, randaugment_magnitude=magnitude
        )
        table = table_of(config, 20_000)
        numbers = table[:, FIRST_OP]
        strengths = table[:, FIRST_OP + 1]
        assert (
            scipy.stats.chisquare(
                np.bincount(numbers.astype(int), minlength=len(OP_NAMES[ops]))
            ).pvalue
            > 1e-3
        )
        assert set(strengths) == {-magnitude, magnitude}
        assert abs((strengths < 0).mean() - 0.5) < 0.015
    for column in (2, 3):
        assert (
            scipy.stats.kstest(table[:, FIRST_OP + column], scipy.stats.uniform.cdf).pvalue > 1e-3
        ), "the cutout's position is not uniformly distributed"


def expected_pairs(name: str) -> dict[tuple[str, float, str, float], float]:
    """Compute the probability and strengths of each pair of operations from the policy's source
    code. An empty name means that an operation is not applied."""
    if name in ("imagenet", "cifar10", "svhn"):
        auto = autoaugment.AutoAugment(autoaugment.AutoAugmentPolicy(name))
        pairs = auto.policies
    else:
        policy = timm_ops.auto_augment_policy(name)
        pairs = [
            [(op.name, op.prob, op.magnitude if op.level_fn else None) for op in pair]
            for pair in policy
        ]
    shares: Counter[tuple[str, float, str, float]] = Counter()
    for pair in pairs:
        for does in itertools.product((True, False), repeat=2):
            share = 1 / len(pairs)
            operations: list[str | float] = []
            for (op, prob, strength), is_done in zip(pair, does, strict=True):
                share *= prob if is_done else 1 - prob
                operations += (
                    [op.lower().removesuffix("rel"), strength or 0.0] if is_done else ["", 0.0]
                )
            shares[tuple(operations)] += share
    return {key: share for key, share in shares.items() if share > 0}


@pytest.mark.parametrize("name", sorted(AUTO_AUGMENT_SETS.keys() - {"ta_wide", "three_augment"}))
def test_policies_are_drawn_as_often_as_in_their_source(name):
    num = 20_000
    config = AugmentConfig(auto_augment=name)
    table = table_of(config, num)
    names = OP_NAMES[table_layout(config).op_columns[0].op_set]
    ours: Counter[tuple[str, float, str, float]] = Counter()
    for first, one, second, two in table[:, FIRST_OP : FIRST_OP + 4].tolist():
        operations = [names[int(op)].replace("_", "") if op >= 0 else "" for op in (first, second)]
        strengths = [abs(s) if op >= 0 else 0.0 for op, s in ((first, one), (second, two))]
        ours[operations[0], strengths[0], operations[1], strengths[1]] += 1
    theirs = expected_pairs(name)
    assert set(ours) <= set(theirs)
    counts = [ours[key] for key in theirs]
    assert scipy.stats.chisquare(counts, np.array(list(theirs.values())) * num).pvalue > 1e-3
    for column in (FIRST_OP + 1, FIRST_OP + 3):
        moved = table[:, column][table[:, column] != 0]
        assert abs((moved < 0).mean() - 0.5) < 0.02


def test_strengths_of_timm_policies_vary_around_those_in_the_table():
    exact = table_of(AugmentConfig(auto_augment="v0"), 20_000)
    config = AugmentConfig(auto_augment="v0", magnitude_std=0.5)
    varied = table_of(config, 20_000)
    for column in (FIRST_OP, FIRST_OP + 2):
        assert np.array_equal(exact[:, column], varied[:, column]), (
            "the policy has different operations than its source"
        )
        own = np.abs(exact[:, column + 1])
        off = np.abs(varied[:, column + 1]) - own
        inside = (own > 2) & (own < 8)
        assert scipy.stats.kstest(off[inside], scipy.stats.norm(0, 0.5).cdf).pvalue > 1e-3
    assert np.abs(varied[:, FIRST_OP + 1]).max() == 10, "a strength exceeds timm's scale"


def test_trivial_augment_draws_one_operation_at_any_strength():
    table = table_of(AugmentConfig(auto_augment="ta_wide"), 20_000)
    assert table.shape[1] == FIRST_OP + 2
    ops, strengths = table[:, FIRST_OP], table[:, FIRST_OP + 1]
    for drawn, num in ((ops, 14), (np.abs(strengths), 31)):
        assert scipy.stats.chisquare(np.bincount(drawn.astype(int), minlength=num)).pvalue > 1e-3
    assert abs((strengths[strengths != 0] < 0).mean() - 0.5) < 0.015
    assert abs(np.corrcoef(ops, strengths)[0, 1]) < 0.03


def test_three_augment_draws_one_of_three_and_a_radius():
    table = table_of(AugmentConfig(auto_augment="three_augment"), 20_000)
    assert table.shape[1] == FIRST_OP + 2
    assert (
        scipy.stats.chisquare(np.bincount(table[:, FIRST_OP].astype(int), minlength=3)).pvalue
        > 1e-3
    )
    assert (
        scipy.stats.kstest(table[:, FIRST_OP + 1], scipy.stats.uniform(0.1, 1.9).cdf).pvalue > 1e-3
    )


def test_jitter_is_drawn_as_in_torchvision():
    amounts = (0.3, 0.4, 1.0, 0.1)
    num = 6000
    table = table_of(AugmentConfig(color_jitter=amounts), num)[:, FIRST_OP:].reshape(num, 4, 2)
    ops = table[:, :, 0].astype(int)
    factors = table[:, :, 1]
    orders, counts = np.unique(ops, axis=0, return_counts=True)
    assert len(orders) == 24, "one order of the four operations never occurs"
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    jitter = ColorJitter(*amounts)
    torch.manual_seed(0)
    theirs = np.array(
        [
            ColorJitter.get_params(
                jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue
            )[1:]
            for _ in range(num)
        ]
    )
    for op, name in enumerate(OP_NAMES["color_jitter"]):
        assert scipy.stats.ks_2samp(factors[ops == op], theirs[:, op]).pvalue > 1e-3, name
    by_op = np.take_along_axis(factors, np.argsort(ops, 1), 1)
    assert np.abs(np.corrcoef(by_op.T) - np.eye(4)).max() < 0.05, "two factors are correlated"


def test_jitter_without_strength_needs_no_column():
    table = table_of(AugmentConfig(color_jitter=(0.3, 0.0, 0.2, 0.0)), 50)
    assert table.shape[1] == FIRST_OP + 4
    assert {tuple(row) for row in np.sort(table[:, [FIRST_OP, FIRST_OP + 2]], 1)} == {(0, 2)}


# --- contradictory settings -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("augment", "in_chans", "message"),
    [
        (
            {"randaugment_layers": 2, "auto_augment": "ta_wide"},
            3,
            "augment.auto_augment=ta_wide replaces RandAugment: set augment.randaugment_",
        ),
        (
            {"auto_augment": "ta_wide"},
            1,
            "augment.auto_augment needs color images (model.in_chans=3): set"
            " augment.auto_augment=null",
        ),
        (
            {"randaugment_layers": 2},
            1,
            "augment.randaugment_layers needs color images (model.in_chans=3): set"
            " augment.randaugment_layers=0",
        ),
        (
            {"color_jitter": (0.1, 0.1, 0.0, 0.1)},
            1,
            "augment.color_jitter needs color images (model.in_chans=3): set its third and fourth",
        ),
        (
            {"erasing_area": (0.5, 0.1)},
            3,
            "augment.erasing_area is [0.5, 0.1]: the first must not exceed the second",
        ),
        (
            {"erasing_aspect": (2.0, 0.5)},
            3,
            "augment.erasing_aspect is [2.0, 0.5]: the first must not exceed the second",
        ),
        (
            {"randaugment_magnitude": 15.0},
            3,
            (
                "augment.randaugment_magnitude=15 is outside the scale of"
                " augment.randaugment_ops=timm: use 0 to 10"
            ),
        ),
        (
            {"randaugment_ops": "big_vision", "randaugment_magnitude": 21.0},
            3,
            "randaugment_ops=big_vision: use 0 to 20",
        ),
        (
            {"randaugment_ops": "torchvision", "randaugment_magnitude": 9.5},
            3,
            "torchvision's scale has the integers from 0 to 30",
        ),
        (
            {"randaugment_ops": "timm_inc0", "randaugment_magnitude": 11.0},
            3,
            "augment.randaugment_ops=timm_inc0: use 0 to 10",
        ),
        (
            {"mixup_mode": "pair", "mix_group_size": 3},
            3,
            "augment.mix_group_size=3 is odd, but augment.mixup_mode=pair needs pairs: use an",
        ),
    ],
)
def test_contradictory_settings_are_reported_with_the_remedy(augment, in_chans, message):
    sections = {
        "data": {"root": "data", "mean": (0.5,), "std": (0.5,)},
        "train": {"steps": 1},
        "model": {"in_chans": in_chans},
    }
    with pytest.raises(ValidationError) as caught:
        Config(**sections, augment=augment)
    assert message in str(caught.value)


def test_augmentation_of_a_row_is_described_in_words():
    config = AugmentConfig(
        crop="simple",
        auto_augment="three_augment",
        color_jitter=(0.3, 0.0, 0.0, 0.0),
        erasing_prob=1.0,
    )
    row = table_of(config, 1)[0]
    layout = table_layout(config)
    row[FLIP] = 1
    row[FIRST_OP : FIRST_OP + 4] = (2, 1.25, 0, 0.9)
    row[layout.shift : layout.shift + 2] = (-3, 0)
    assert describe(config, row) == ["shift -3 +0", "flip", "blur 1.2", "brightness 0.9", "erase"]
    row[FLIP] = 0
    row[FIRST_OP] = 1
    row[layout.shift] = 0
    row[layout.erase : layout.erase + 2] = 5
    assert describe(config, row) == ["solarize", "brightness 0.9"]
