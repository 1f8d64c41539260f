"""Augmentation: draws against torchvision, timm and the papers' distributions; pixels against Pillow and per-sample loops."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import auto_augment as timm_ops
from timm.data.mixup import cutmix_bbox_and_lam
from torchvision.transforms import RandomResizedCrop, v2

from vit.config import AugmentConfig
from vit.data.augment import (
    BOTTOM,
    CUTMIX,
    FIRST_OP,
    FLIP,
    LAMBDA,
    LEFT,
    OPS,
    RIGHT,
    TOP,
    Augment,
    draw_crops,
    draw_mix,
    draw_table,
    sample_keys,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MIX_BOTH = AugmentConfig(mixup_alpha=0.8, cutmix_alpha=1.0, mix_prob=0.8)


def keys_of(num: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return sample_keys(seed, epoch, np.arange(num))


def on_pixels(config: AugmentConfig) -> Augment:
    """An `Augment` of ten classes that returns grey levels: its normalisation does nothing."""
    return Augment(config, 10, (0.0,) * 3, (1 / 255,) * 3, torch.device("cpu"))


def random_images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def mixed_table(config: AugmentConfig, num: int, size: tuple[int, int] = (24, 20), seed: int = 0) -> np.ndarray:
    table = draw_table(config, keys_of(num))
    draw_mix(config, table, np.ones(num, np.float32), seed, 0, 0, size)
    return table


# --- crops --------------------------------------------------------------------------------------------------------------------------------


def test_a_sample_draws_the_same_in_any_batch_and_anew_in_each_epoch():
    config, ids, sizes = AugmentConfig(randaugment_layers=2), np.array([5, 900, 17, 3, 900]), np.full(5, 300)
    keys = sample_keys(1, 2, ids)
    crops, table = draw_crops(config, keys, sizes, sizes), draw_table(config, keys)
    for subset in ([4, 2, 0], [1]):
        alone = sample_keys(1, 2, ids[subset])
        np.testing.assert_array_equal(draw_crops(config, alone, sizes[subset], sizes[subset]), crops[subset])
        np.testing.assert_array_equal(draw_table(config, alone), table[subset])
    axes = [(seed, epoch, sample, copy) for seed in (0, 1) for epoch in (0, 1) for sample in (0, 1) for copy in (0, 1)]
    assert len({int(sample_keys(seed, epoch, np.array(sample), copy)) for seed, epoch, sample, copy in axes}) == 16


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 2000)), min_size=1, max_size=20),
    st.integers(0, 2**63 - 1),
    st.sampled_from([0.08, 0.35, 1.0]),
)
def test_crops_lie_inside_the_image(sizes, seed, low):
    widths, heights = np.array(sizes).T
    left, top, width, height = draw_crops(AugmentConfig(crop_scale=(low, 1.0)), keys_of(len(sizes), seed), widths, heights).T
    assert (width > 0).all()
    assert (height > 0).all()
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (left + width <= widths).all()
    assert (top + height <= heights).all()


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (400, 400), (900, 300), (8, 6)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.35, 0.6)])
def test_crops_are_distributed_as_torchvisions(width, height, scale):
    num, ratio = 4000, (3 / 4, 4 / 3)
    ours = draw_crops(AugmentConfig(crop_scale=scale, crop_ratio=ratio), keys_of(num), np.full(num, width), np.full(num, height))
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(num)])[:, [1, 0, 3, 2]]
    for name, a, b in (
        ("left", ours[:, 0], theirs[:, 0]),
        ("top", ours[:, 1], theirs[:, 1]),
        *(
            (name, measure(ours[:, 2], ours[:, 3]), measure(theirs[:, 2], theirs[:, 3]))
            for name, measure in (("width", lambda w, h: w), ("height", lambda w, h: h), ("area", np.multiply), ("aspect", np.divide))
        ),
    ):
        assert scipy.stats.ks_2samp(a, b).pvalue > 1e-3, f"{name}: mean {a.mean():.3f}, torchvision's {b.mean():.3f}"


def test_areas_and_aspects_stay_in_their_ranges():
    num, side = 5000, 1000
    _, _, width, height = draw_crops(
        AugmentConfig(crop_scale=(0.2, 0.5), crop_ratio=(0.8, 1.5)), keys_of(num), np.full(num, side), np.full(num, side)
    ).T
    area, aspect, rounding = width * height / side**2, width / height, 0.003
    assert 0.2 - rounding < area.min() < 0.201 < 0.499 < area.max() < 0.5 + rounding
    assert 0.8 - rounding < aspect.min() < 0.81 < 1.48 < aspect.max() < 1.5 + 2 * rounding
    assert abs(area.mean() - 0.35) < 0.005
    assert abs(np.log(aspect).mean() - np.log(0.8 * 1.5) / 2) < 0.01


@pytest.mark.parametrize(("width", "height"), [(1000, 11), (11, 1000), (997, 20), (31, 1001)])
def test_where_no_try_fits_the_crop_is_torchvisions_largest_centred_one(width, height):
    crop = draw_crops(AugmentConfig(), keys_of(1), np.array([width]), np.array([height]))[0]
    top, left, crop_height, crop_width = RandomResizedCrop.get_params(torch.empty(1, height, width), [0.08, 1.0], [3 / 4, 4 / 3])
    assert crop.tolist() == [left, top, crop_width, crop_height]


# --- flips and normalisation --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prob", [0.0, 0.3, 1.0])
def test_images_flip_with_their_probability(prob):
    flips = draw_table(AugmentConfig(hflip_prob=prob), keys_of(10_000))[:, FLIP]
    assert set(flips) <= {0.0, 1.0}
    assert abs(flips.mean() - prob) < 4 * np.sqrt(prob * (1 - prob) / 10_000) + 1e-9


def test_flipped_rows_are_mirrored_and_the_others_are_not():
    config = AugmentConfig()
    images, table = random_images(8, 3, 6, 7), draw_table(config, keys_of(8))
    inputs, targets = on_pixels(config)(images, torch.arange(8), torch.from_numpy(table))
    assert 0 < table[:, FLIP].sum() < 8
    for row in range(8):
        expected = np.flip(images[row].numpy(), -1) if table[row, FLIP] else images[row].numpy()
        np.testing.assert_allclose(inputs[row], expected, atol=1e-3)
    np.testing.assert_array_equal(targets, np.eye(10)[:8])


@pytest.mark.parametrize(("channels", "mean", "std"), [(3, MEAN, STD), (3, (0.5,), (0.25,)), (1, (0.13,), (0.3,))])
def test_normalize_is_torchvisions(channels, mean, std):
    images = random_images(2, channels, 5, 4)
    theirs = v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean * (channels // len(mean)), std * (channels // len(std)))]
    )(images)
    ours = Augment(AugmentConfig(), 10, mean, std, torch.device("cpu")).normalize(images)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


# --- MixUp and CutMix ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [MIX_BOTH, AugmentConfig(mixup_alpha=0.2, mix_group_size=2), AugmentConfig(cutmix_alpha=1.0, mix_group_size=8), AugmentConfig()],
)
def test_mixing_is_the_loop_over_samples(config):
    num, height, width = 64, 24, 20
    images, labels, table = random_images(num, 3, height, width), torch.arange(num) % 10, mixed_table(config, num)
    inputs, targets = on_pixels(config)(images, labels, torch.from_numpy(table))

    flipped = [np.flip(image, -1) if flip else image for image, flip in zip(images.numpy().astype(float), table[:, FLIP], strict=True)]
    for row in range(num):
        group = range(row // config.mix_group_size * config.mix_group_size, (row // config.mix_group_size + 1) * config.mix_group_size)
        partner = row + 1 if row + 1 in group else group[0]
        lam, (top, bottom, left, right) = table[row, LAMBDA], table[row, [TOP, BOTTOM, LEFT, RIGHT]].astype(int)
        if table[row, CUTMIX]:
            expected = flipped[row].copy()
            expected[:, top:bottom, left:right] = flipped[partner][:, top:bottom, left:right]
            assert lam == pytest.approx(1 - (bottom - top) * (right - left) / (height * width), abs=1e-7)
        else:
            expected = lam * flipped[row] + (1 - lam) * flipped[partner]
        np.testing.assert_allclose(inputs[row], expected, atol=1e-3)
        one_hot = np.eye(10)
        np.testing.assert_allclose(targets[row], lam * one_hot[labels[row]] + (1 - lam) * one_hot[labels[partner]], atol=1e-6)


def test_the_share_of_a_label_is_the_share_of_its_pixels():
    config = AugmentConfig(cutmix_alpha=1.0)
    black_and_white = torch.zeros(64, 3, 24, 20, dtype=torch.uint8)
    black_and_white[1::2] = 255
    labels = torch.arange(64) % 2
    inputs, targets = on_pixels(config)(black_and_white, labels, torch.from_numpy(mixed_table(config, 64)))
    np.testing.assert_allclose((inputs > 127).float().mean((1, 2, 3)), targets[:, 1], atol=1e-6)
    assert len(targets[:, 1].unique()) > 16


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 2.0])
def test_mixup_lambda_is_beta_distributed(alpha):
    lambdas = mixed_table(AugmentConfig(mixup_alpha=alpha, mix_group_size=2), 8000)[::2, LAMBDA]
    assert scipy.stats.kstest(lambdas, scipy.stats.beta(alpha, alpha).cdf).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_cutmix_boxes_are_distributed_as_timms(alpha):
    num, (height, width) = 4000, (32, 48)
    table = mixed_table(AugmentConfig(cutmix_alpha=alpha, mix_group_size=2), 2 * num, (height, width))[::2]
    np.random.seed(0)  # timm draws from numpy's global generator
    theirs = [cutmix_bbox_and_lam((1, 3, height, width), np.random.beta(alpha, alpha)) for _ in range(num)]
    assert scipy.stats.ks_2samp(table[:, LAMBDA], [lam for _, lam in theirs]).pvalue > 1e-3
    for column, (name, values) in zip(
        (TOP, BOTTOM, LEFT, RIGHT), zip("tblr", zip(*(box for box, _ in theirs), strict=True), strict=True), strict=True
    ):
        assert scipy.stats.ks_2samp(table[:, column], values).pvalue > 1e-3, name


def test_a_box_that_the_border_does_not_cut_has_the_aspect_of_the_image():
    top, bottom, left, right = mixed_table(AugmentConfig(cutmix_alpha=1.0), 4000, (64, 64))[:, [TOP, BOTTOM, LEFT, RIGHT]].T
    inside = (top > 0) & (left > 0) & (bottom < 64) & (right < 64)
    np.testing.assert_array_equal((bottom - top)[inside], (right - left)[inside])
    assert ((bottom - top)[inside] % 2 == 0).all()
    assert inside.sum() > 400


def test_groups_are_mixed_and_switched_with_their_probabilities():
    config = AugmentConfig(mixup_alpha=0.8, cutmix_alpha=1.0, mix_prob=0.6, cutmix_switch_prob=0.3, mix_group_size=2)
    table = mixed_table(config, 20_000)[::2]
    mixup, cutmix = (table[:, LAMBDA] < 1) & (table[:, CUTMIX] == 0), table[:, CUTMIX] == 1
    assert abs(mixup.mean() - 0.6 * 0.7) < 0.02
    assert abs(cutmix.mean() - 0.6 * 0.3) < 0.02


@settings(deadline=None)
@given(st.integers(0, 2**40), st.sampled_from([4, 8, 12, 16, 24, 48]), st.lists(st.integers(0, 47), max_size=4), st.sampled_from([2, 4]))
def test_mixing_does_not_depend_on_how_the_batch_is_split(position, micro_batch, bad_rows, group_size):
    config = MIX_BOTH.model_copy(update={"mix_group_size": group_size})
    weights, keys = np.ones(48, np.float32), keys_of(48)
    weights[bad_rows] = 0
    whole = draw_table(config, keys)
    draw_mix(config, whole, weights, 3, position, 0, (24, 20))
    for start in range(0, 48, micro_batch):
        rows = slice(start, start + micro_batch)
        part = draw_table(config, keys[rows])
        draw_mix(config, part, weights[rows], 3, position, start, (24, 20))
        np.testing.assert_array_equal(part, whole[rows])


def test_groups_share_a_lambda_and_groups_and_batches_differ():
    config, tables = AugmentConfig(mixup_alpha=0.8), []
    for position in (0, 1):
        tables.append(draw_table(config, keys_of(40)))
        draw_mix(config, tables[-1], np.ones(40, np.float32), 0, position, 0, (24, 20))
    lambdas = np.concatenate(tables)[:, LAMBDA].reshape(20, 4)
    np.testing.assert_array_equal(lambdas, lambdas[:, :1].repeat(4, 1))
    assert len(np.unique(lambdas)) == 20


def test_a_row_that_could_not_be_read_is_nobodys_partner():
    config, bad = MIX_BOTH.model_copy(update={"mix_prob": 1.0}), [3, 8, 21]
    images, labels, weights = random_images(32, 3, 24, 20), torch.zeros(32, dtype=torch.int64), np.ones(32, np.float32)
    weights[bad], labels[bad] = 0, 1
    table = draw_table(config, keys_of(32))
    table[:, FLIP] = 0
    draw_mix(config, table, weights, 0, 0, 0, (24, 20))
    inputs, targets = on_pixels(config)(images, labels, torch.from_numpy(table))
    assert targets[weights > 0, 1].sum() == 0
    for row in (2, 11, 20):  # the rows that would have mixed with rows 3, 8 and 21; groups have four rows
        np.testing.assert_allclose(inputs[row], images[row], atol=1e-3)
    assert (table[:, LAMBDA] < 1).sum() >= 26


# --- RandAugment --------------------------------------------------------------------------------------------------------------------------


def photographs() -> np.ndarray:
    """(7, 3, 40, 120): waves and edges, low contrast, dark, bright, noise, one flat channel, one flat image."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:40, :120]
    waves = np.stack([np.sin(x / 9 + k) + np.cos(y / 7 - k) for k in range(3)]) * 50 + 128
    edges = waves.copy()
    edges[:, 10:25, 12:30] += 70
    flat_channel = edges.copy()
    flat_channel[1] = 77
    images = [
        edges,
        waves / 5 + 90,
        waves / 3,
        waves / 3 + 170,
        generator.integers(0, 256, waves.shape),
        flat_channel,
        np.full(waves.shape, 60.0),
    ]
    return np.clip(np.stack(images), 0, 255).astype(np.uint8)


def randaugmented(images: np.ndarray, op: int, strength: float) -> np.ndarray:
    config = AugmentConfig(randaugment_layers=1)
    table = draw_table(config, keys_of(len(images)))
    table[:, FLIP], table[:, FIRST_OP], table[:, FIRST_OP + 1] = 0, op, strength
    inputs, _ = on_pixels(config)(torch.from_numpy(images), torch.zeros(len(images), dtype=torch.int64), torch.from_numpy(table))
    return inputs.numpy().round().astype(int)


def by_timm(images: np.ndarray, name: str, strength: float, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """timm's operation at a signed level: its own coin for the sign is taken out."""
    monkeypatch.setattr(timm_ops, "_randomly_negate", lambda level: level)
    to_argument = timm_ops.LEVEL_TO_ARG[name]
    signed = strength if name in SIGNED else abs(strength)
    arguments = to_argument(signed, {}) if to_argument else ()
    if name == "PosterizeIncreasing" and arguments == (0,):  # no bit is left; Pillow 13 refuses what earlier ones made black
        return np.zeros(images.shape, int)
    options = {"resample": Image.Resampling.BILINEAR, "fillcolor": (124, 116, 104)}
    pictures = (Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))) for image in images)
    return np.stack(
        [np.asarray(timm_ops.NAME_TO_OP[name](picture, *arguments, **options)).transpose(2, 0, 1) for picture in pictures]
    ).astype(int)


TIMM_NAMES = timm_ops._RAND_INCREASING_TRANSFORMS
EXACT = {"Equalize", "Invert", "PosterizeIncreasing", "SolarizeIncreasing", "SolarizeAdd"}
SIGNED = set(TIMM_NAMES) - EXACT - {"AutoContrast"}


def test_operations_are_timms_increasing_ones_in_its_order():
    ours = [op.__name__.replace("_", "") for op in OPS]
    assert ours == [name.lower().removesuffix("increasing").removesuffix("rel") for name in TIMM_NAMES]


@pytest.mark.parametrize("strength", [0.0, 2.5, 3.7, 5.0, 9.0, 9.63, 10.0, -2.5, -9.0, -10.0])
@pytest.mark.parametrize("op", range(len(OPS)), ids=TIMM_NAMES)
def test_operations_are_timms(op, strength, monkeypatch):
    images, name = photographs(), TIMM_NAMES[op]
    difference = np.abs(randaugmented(images, op, strength) - by_timm(images, name, strength, monkeypatch))
    assert difference.max() <= (0 if name in EXACT else 1), f"largest difference in each image: {difference.max((1, 2, 3))}"


def test_operations_are_drawn_as_timm_draws_them():
    config = AugmentConfig(randaugment_layers=2, randaugment_magnitude=5.0, randaugment_magnitude_std=0.5)
    table = draw_table(config, keys_of(20_000))
    for ops, strengths in ((table[:, FIRST_OP], table[:, FIRST_OP + 1]), (table[:, FIRST_OP + 2], table[:, FIRST_OP + 3])):
        assert abs((ops < 0).mean() - 0.5) < 0.015, "timm's operations run with probability .5"
        assert scipy.stats.chisquare(np.bincount(ops[ops >= 0].astype(int), minlength=len(OPS))).pvalue > 1e-3
        assert scipy.stats.kstest(np.abs(strengths), scipy.stats.norm(5.0, 0.5).cdf).pvalue > 1e-3
        assert abs((strengths < 0).mean() - 0.5) < 0.015
    assert abs(np.corrcoef(table[:, FIRST_OP], table[:, FIRST_OP + 2])[0, 1]) < 0.03


@pytest.mark.parametrize(("magnitude", "limit"), [(9.9, 10.0), (0.1, 0.0)])
def test_strengths_are_clipped_to_timms_scale(magnitude, limit):
    config = AugmentConfig(randaugment_layers=1, randaugment_magnitude=magnitude, randaugment_magnitude_std=0.2)
    strengths = np.abs(draw_table(config, keys_of(4000))[:, FIRST_OP + 1])
    assert ((strengths >= 0) & (strengths <= 10)).all()
    assert abs((strengths == limit).mean() - scipy.stats.norm.sf(0.5)) < 0.03, (
        "what lies beyond the end of the scale, half a deviation away, stays at the end"
    )


def test_layers_follow_one_another_after_the_flip_each_row_on_its_own():
    config = AugmentConfig(randaugment_layers=2, randaugment_magnitude=6.0)
    images, table = np.concatenate([photographs()] * 8), draw_table(config, keys_of(56))
    inputs, _ = on_pixels(config)(torch.from_numpy(images), torch.zeros(56, dtype=torch.int64), torch.from_numpy(table))
    assert (table[:, FIRST_OP] >= 0).sum() > 20
    for row in range(56):
        expected = images[row : row + 1, :, :, ::-1].copy() if table[row, FLIP] else images[row : row + 1]
        for op, strength in table[row, FIRST_OP:].reshape(2, 2):
            if op >= 0:
                expected = randaugmented(expected, int(op), float(strength)).astype(np.uint8)
        np.testing.assert_allclose(inputs[row], expected[0], atol=1e-3)


def test_augmenting_leaves_its_arguments_alone():
    config = AugmentConfig(randaugment_layers=2, mixup_alpha=0.8, cutmix_alpha=1.0)
    images, table = torch.from_numpy(photographs()).repeat(8, 1, 1, 1), torch.from_numpy(mixed_table(config, 56, (40, 120)))
    before = images.clone(), table.clone()
    on_pixels(config)(images, torch.arange(56) % 10, table)
    assert torch.equal(images, before[0])
    assert torch.equal(table, before[1])
