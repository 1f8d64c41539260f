"""Compare augmentation on the device with loops over samples, torchvision and timm.

All libraries receive the random numbers that our code draws.
"""

import numpy as np
import pytest
import scipy.stats
import torch
from augmenting import (
    CPU,
    DEIT3,
    POLICIES,
    changed,
    mixed_table,
    on_pixels,
    one_op,
    photographs,
    random_images,
    table_of,
)
from PIL import Image, ImageFilter
from timm.data import mixup as timm_mixup
from timm.data.mixup import Mixup
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from vit.config.schema import AugmentConfig
from vit.data.augment import pixel_ops
from vit.data.augment.apply import Augment
from vit.data.augment.draw import draw_crops, draw_mix, draw_table, sample_keys
from vit.data.augment.table import (
    BOTTOM,
    CUTMIX,
    FIRST_OP,
    FLIP,
    LAMBDA,
    LEFT,
    RIGHT,
    TOP,
    table_layout,
)

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
MIX_BOTH = AugmentConfig(mixup_alpha=0.8, cutmix_alpha=1.0, mix_prob=0.8)


# --- flips, normalization, the simple crop's margin -----------------------------------------------


def test_only_flipped_rows_are_mirrored():
    config = AugmentConfig()
    images = random_images(8, 3, 6, 7)
    table = table_of(config, 8)
    inputs, targets = on_pixels(config)(images, torch.arange(8), torch.from_numpy(table))
    assert 0 < table[:, FLIP].sum() < 8
    for row in range(8):
        expected = np.flip(images[row].numpy(), -1) if table[row, FLIP] else images[row].numpy()
        np.testing.assert_allclose(inputs[row], expected, atol=1e-3)
    np.testing.assert_array_equal(targets, np.eye(10)[:8])


@pytest.mark.parametrize(
    ("channels", "mean", "std"), [(3, MEAN, STD), (3, (0.5,), (0.25,)), (1, (0.13,), (0.3,))]
)
def test_normalization_equals_torchvision(channels, mean, std):
    images = random_images(2, channels, 5, 4)
    theirs = v2.Compose(
        [
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean * (channels // len(mean)), std * (channels // len(std))),
        ]
    )(images)
    ours = Augment(AugmentConfig(), 10, mean, std, CPU).normalize(images)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("crop", "padding_mode"), [("simple", "reflect"), ("padded", "constant")])
def test_simple_and_padded_crops_are_views_of_the_padded_image(crop, padding_mode):
    """The shorter side of the image equals the crop size, so the image is not resized. torchvision
    pads the image and crops it at the random position that our code draws."""
    config = AugmentConfig(crop=crop, hflip_prob=0.0)
    num = 60
    side = 32
    widths, heights = np.array([48, 32, 32] * (num // 3)), np.array([32, 40, 32] * (num // 3))
    keys = sample_keys(0, 0, np.arange(num))
    crops, table = (
        draw(config, keys, widths, heights, (side, side)) for draw in (draw_crops, draw_table)
    )
    shifts = table[:, table_layout(config).shift :][:, :2].astype(int)
    originals = [
        random_images(3, int(h), int(w), seed=i)
        for i, (w, h) in enumerate(zip(widths, heights, strict=True))
    ]
    windows = [
        original[:, top : top + side, left : left + side]
        for original, (left, top, _, _) in zip(originals, crops, strict=True)
    ]
    inputs, _ = on_pixels(config)(
        torch.stack(windows), torch.zeros(num, dtype=torch.int64), torch.from_numpy(table)
    )
    assert len(set(map(tuple, shifts.tolist()))) > 20
    for original, (left, top, _, _), (right, down), ours in zip(
        originals, crops.tolist(), shifts.tolist(), inputs, strict=True
    ):
        theirs = tv.crop(
            tv.pad(original, [4], padding_mode=padding_mode),
            top + down + 4,
            left + right + 4,
            side,
            side,
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["timm", "torchvision", "big_vision", "auto_augment", "jitter"])
def test_layers_are_applied_to_each_row_in_order_after_the_flip(name):
    config = AugmentConfig(
        **POLICIES[name].model_dump(
            include={"randaugment_layers", "randaugment_ops", "auto_augment", "color_jitter"}
        )
    )
    alone = config.model_copy(
        update={
            "randaugment_layers": min(config.randaugment_layers, 1),
            "color_jitter": config.color_jitter[:1] + (0,) * 3,
        }
    )
    images = np.concatenate([photographs()] * 4)
    table = table_of(config, 28, (40, 120))
    ours = changed(config, images, table)
    op_columns = table_layout(config).op_columns
    for row in range(28):
        expected = (
            images[row : row + 1, :, :, ::-1].copy() if table[row, FLIP] else images[row : row + 1]
        )
        for op_column in op_columns:
            op, *values = table[
                row,
                op_column.column : op_column.column
                + (4 if op_column.op_set == "big_vision" else 2),
            ]
            if op >= 0:
                expected = one_op(alone, expected, int(op), *map(float, values)).astype(np.uint8)
        np.testing.assert_array_equal(ours[row], expected[0])


def test_three_augment_equals_deit3_with_torchvision_and_pillow():
    """The reference is facebookresearch/deit:augment.py, applied to Pillow images with our random
    numbers: a flip, one of three operations, and color jitter in random order."""
    config = DEIT3.model_copy(update={"crop": "random_resized"})
    images = np.concatenate([photographs()] * 8)
    table = table_of(config, len(images), images.shape[2:])
    ours = changed(config, images, table)
    choices = [
        lambda picture, _: tv.to_grayscale(picture, 3),
        lambda picture, _: tv.solarize(picture, 128),
        lambda picture, radius: picture.filter(ImageFilter.GaussianBlur(radius)),
    ]
    jitter = [tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation]
    off = []
    for row, image in enumerate(images):
        picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
        picture = tv.horizontal_flip(picture) if table[row, FLIP] else picture
        picture = choices[int(table[row, FIRST_OP])](picture, float(table[row, FIRST_OP + 1]))
        for op, factor in table[row, FIRST_OP + 2 :].reshape(3, 2):
            picture = jitter[int(op)](picture, float(factor))
        off.append(np.abs(np.asarray(picture).transpose(2, 0, 1).astype(int) - ours[row]))
    assert np.max(off) <= 2, (
        "a blurred pixel may differ by one level, which later operations may double"
    )
    assert np.mean(np.array(off) > 0) < 1e-3


# --- random erasing -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
@pytest.mark.parametrize("channels", [1, 3])
def test_boxes_of_normalized_images_are_erased(mode, channels):
    config = AugmentConfig(erasing_prob=0.6, erasing_mode=mode, hflip_prob=0.0)
    augment = Augment(config, 10, (0.5,), (0.25,), CPU)
    images = random_images(40, channels, 32, 24)
    table = table_of(config, 40, (32, 24))
    inputs, _ = augment(images, torch.zeros(40, dtype=torch.int64), torch.from_numpy(table))
    clean = augment.normalize(images)
    assert 10 < (table[:, FIRST_OP + 1] > 0).sum() < 40
    noise = []
    for row in range(40):
        top, bottom, left, right = table[row, FIRST_OP : FIRST_OP + 4].astype(int)
        box = inputs[row, :, top:bottom, left:right]
        outside = torch.ones(32, 24, dtype=torch.bool)
        outside[top:bottom, left:right] = False
        assert torch.equal(inputs[row, :, outside], clean[row, :, outside])
        if mode == "const":
            assert (box == 0).all()
        elif mode == "rand":
            color = torch.from_numpy(table[row, FIRST_OP + 4 : FIRST_OP + 4 + channels])
            assert torch.equal(box, color[:, None, None].expand_as(box))
        else:
            noise.append(box.flatten())
    if noise:
        assert scipy.stats.kstest(torch.cat(noise), scipy.stats.norm.cdf).pvalue > 1e-3


def test_a_compiled_erasing_graph_computes_nothing_on_the_host():
    """If the compiled graph computed a table on the host, the GPU would wait in each step until the
    table has been copied."""
    operators = []

    def note(graph, inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    config = AugmentConfig(erasing_prob=1.0, erasing_mode="pixel", hflip_prob=0.0)
    augment = Augment(config, 5, (0.5,) * 3, (0.25,) * 3, torch.device("cpu"))
    inputs = (
        torch.zeros(4, 3, 16, 16, dtype=torch.uint8),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(4, augment.layout.width),
    )
    eager, _ = augment(*inputs)
    augment._finish = torch.compile(augment._finish_on_device, backend=note, dynamic=False)
    compiled, _ = augment(*inputs)
    torch._dynamo.reset()
    assert torch.equal(compiled, eager)
    assert any("index_select" in target for target in operators), (
        "the compiled graph must contain the lookup of quantiles"
    )
    assert not any("ndtri" in target for target in operators)


def test_noise_is_normal_and_depends_only_on_seed_and_position():
    seeds = torch.tensor([0, 1, 2, 2**24 - 1], dtype=torch.int32)
    quantiles = pixel_ops.normal_quantiles(seeds.device)
    noise = pixel_ops.noise(seeds, quantiles, 3, 64, 48)
    assert scipy.stats.kstest(noise.flatten(), scipy.stats.norm.cdf).pvalue > 1e-3
    assert torch.equal(pixel_ops.noise(seeds[2:3], quantiles, 3, 64, 48), noise[2:3])
    assert (torch.corrcoef(noise.flatten(1)) - torch.eye(4)).abs().max() < 0.05, (
        "the noise of consecutive seeds must be independent"
    )
    flat = noise.flatten(1)
    for apart in (1, 2, 48, 64 * 48):
        assert (
            abs(np.corrcoef(flat[:, apart:].flatten(), flat[:, :-apart].flatten())[0, 1]) < 0.03
        ), f"the noise of pixels {apart} apart is correlated"
    for row, seed in enumerate(seeds.tolist()):
        bits = np.array([_lowbias32(pair ^ _lowbias32(seed)) for pair in range(50)])
        halves = np.stack([bits % 2**16, bits >> 16], 1).flatten()
        np.testing.assert_allclose(
            flat[row, :100], scipy.stats.norm.ppf((halves + 0.5) / 2**16), atol=1e-5
        )


def _lowbias32(x: int) -> int:
    """Compute the published hash (Wellons 2018) with Python integers."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


# --- MixUp and CutMix -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        MIX_BOTH,
        AugmentConfig(mixup_alpha=0.2, mix_group_size=2),
        AugmentConfig(cutmix_alpha=1.0, mix_group_size=8),
        MIX_BOTH.model_copy(update={"mixup_mode": "pair", "mix_group_size": 8}),
        MIX_BOTH.model_copy(update={"mixup_mode": "elem"}),
        AugmentConfig(),
    ],
)
def test_mixing_equals_a_loop_over_samples(config):
    num = 64
    height = 24
    width = 20
    images = random_images(num, 3, height, width)
    labels = torch.arange(num) % 10
    table = mixed_table(config, num)
    inputs, targets = on_pixels(config)(images, labels, torch.from_numpy(table))

    flipped = [
        np.flip(image, -1) if flip else image
        for image, flip in zip(images.numpy().astype(float), table[:, FLIP], strict=True)
    ]
    for row in range(num):
        group = range(
            row // config.mix_group_size * config.mix_group_size,
            (row // config.mix_group_size + 1) * config.mix_group_size,
        )
        partner = (
            group[-1 - (row - group[0])]
            if config.mixup_mode == "pair"
            else row + 1
            if row + 1 in group
            else group[0]
        )
        lam = table[row, LAMBDA]
        top, bottom, left, right = table[row, [TOP, BOTTOM, LEFT, RIGHT]].astype(int)
        if table[row, CUTMIX]:
            expected = flipped[row].copy()
            expected[:, top:bottom, left:right] = flipped[partner][:, top:bottom, left:right]
            assert lam == pytest.approx(
                1 - (bottom - top) * (right - left) / (height * width), abs=1e-7
            )
        else:
            expected = lam * flipped[row] + (1 - lam) * flipped[partner]
        np.testing.assert_allclose(inputs[row], expected, atol=1e-3)
        one_hot = np.eye(10)
        np.testing.assert_allclose(
            targets[row],
            lam * one_hot[labels[row]] + (1 - lam) * one_hot[labels[partner]],
            atol=1e-6,
        )


def test_the_share_of_a_label_is_the_share_of_its_pixels():
    config = AugmentConfig(cutmix_alpha=1.0)
    black_and_white = torch.zeros(64, 3, 24, 20, dtype=torch.uint8)
    black_and_white[1::2] = 255
    labels = torch.arange(64) % 2
    inputs, targets = on_pixels(config)(
        black_and_white, labels, torch.from_numpy(mixed_table(config, 64))
    )
    np.testing.assert_allclose((inputs > 127).float().mean((1, 2, 3)), targets[:, 1], atol=1e-6)
    assert len(targets[:, 1].unique()) > 16


def test_an_unreadable_row_is_not_mixed_into_other_rows():
    config = MIX_BOTH.model_copy(update={"mix_prob": 1.0})
    bad = [3, 8, 21]
    images = random_images(32, 3, 24, 20)
    labels = torch.zeros(32, dtype=torch.int64)
    weights = np.ones(32, np.float32)
    weights[bad] = 0
    labels[bad] = 1
    table = table_of(config, 32)
    table[:, FLIP] = 0
    draw_mix(config, table, weights, 0, 0, 0, (24, 20), 0)
    inputs, targets = on_pixels(config)(images, labels, torch.from_numpy(table))
    assert targets[weights > 0, 1].sum() == 0
    # Rows 2, 11 and 20 would be mixed with the unreadable rows 3, 8 and 21, so they must not be
    # mixed at all.
    for row in (2, 11, 20):
        np.testing.assert_allclose(inputs[row], images[row], atol=1e-3)
    assert (table[:, LAMBDA] < 1).sum() >= 26


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixing_equals_timm_with_our_random_numbers(mode, kind, monkeypatch):
    """timm mixes row i with row B - 1 - i. In groups of two rows, our code mixes the same pairs, so
    each group is passed to timm as a batch with our random numbers."""
    size = 8 if mode == "pair" else 2
    config = AugmentConfig(
        mixup_alpha=0.8 * (kind == "mixup"),
        cutmix_alpha=1.0 * (kind == "cutmix"),
        mixup_mode=mode,
        mix_group_size=size,
    )
    images = random_images(32, 3, 24, 20)
    labels = torch.arange(32) % 10
    table = mixed_table(config, 32)
    table[:, FLIP] = 0
    inputs, targets = on_pixels(config)(images, labels, torch.from_numpy(table))
    theirs = Mixup(
        config.mixup_alpha, config.cutmix_alpha, mode=mode, label_smoothing=0.0, num_classes=10
    )
    for start in range(0, 32, size):
        rows = table[start : start + size]
        boxes = iter(
            [
                (tuple(row[[TOP, BOTTOM, LEFT, RIGHT]].astype(int)), float(row[LAMBDA]))
                for row in rows
            ]
        )
        monkeypatch.setattr(
            timm_mixup, "cutmix_bbox_and_lam", lambda *_, boxes=boxes, **__: next(boxes)
        )
        count = {"pair": size // 2, "elem": size, "batch": 1}[mode]
        # timm skips rows with a lambda of 1. For CutMix, timm recomputes lambda from the area of
        # the box.
        lambdas = (
            rows[:count, LAMBDA].copy() if kind == "mixup" else np.full(count, 0.5, np.float32)
        )
        monkeypatch.setattr(
            theirs, "_params_per_elem", lambda n, lam=lambdas: (lam, np.full(n, kind == "cutmix"))
        )
        monkeypatch.setattr(
            theirs, "_params_per_batch", lambda lam=lambdas: (float(lam[0]), kind == "cutmix")
        )
        mixed, soft = theirs(images[start : start + size].float(), labels[start : start + size])
        np.testing.assert_allclose(inputs[start : start + size], mixed, atol=1e-3)
        np.testing.assert_allclose(targets[start : start + size], soft, atol=1e-6)


# --- all steps together ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_a_micro_batch_is_augmented_as_a_part_of_the_batch(name):
    config = POLICIES[name]
    images = random_images(24, 3, 40, 36)
    labels = torch.arange(24) % 10
    table = torch.from_numpy(mixed_table(config, 24, (40, 36)))
    augment = Augment(config, 10, MEAN, STD, CPU)
    inputs, targets = augment(images, labels, table)
    parts = [
        augment(images[start : start + 8], labels[start : start + 8], table[start : start + 8])
        for start in (0, 8, 16)
    ]
    assert torch.equal(torch.cat([part for part, _ in parts]), inputs)
    assert torch.equal(torch.cat([part for _, part in parts]), targets)


@pytest.mark.parametrize("name", POLICIES)
def test_augmenting_does_not_change_its_arguments(name):
    images = torch.from_numpy(photographs()).repeat(8, 1, 1, 1)
    table = torch.from_numpy(mixed_table(POLICIES[name], 56, (40, 120)))
    images = images.contiguous(memory_format=torch.channels_last)
    before = images.clone(), table.clone()
    on_pixels(POLICIES[name])(images, torch.arange(56) % 10, table)
    assert torch.equal(images, before[0])
    assert torch.equal(table, before[1])


@pytest.mark.full
def test_compiled_augmentation_gives_the_same_results():
    config = POLICIES["timm"].model_copy(update={"erasing_prob": 0.7})
    images = random_images(8, 3, 40, 36)
    labels = torch.arange(8) % 10
    table = torch.from_numpy(mixed_table(config, 8, (40, 36)))
    plain, compiled = (
        Augment(config, 10, MEAN, STD, CPU, compiled=compiled)(images, labels, table)
        for compiled in (False, True)
    )
    torch.testing.assert_close(compiled[0], plain[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(compiled[1], plain[1], rtol=0, atol=1e-6)
