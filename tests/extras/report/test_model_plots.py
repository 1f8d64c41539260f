"""Test that the numbers in a run's plots are visible and match independent implementations."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from decoding import pixels, places
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from matplotlib import colormaps
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from scipy import ndimage
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import ParallelThingsBlock
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from timm.utils.attention_extract import AttentionExtract
from torch import nn

from vit.extras.report import model_figures
from vit.extras.report.attention import attention_maps, attention_rollout, even_reading, rollouts
from vit.extras.report.confusion import (
    confusion_matrix,
    most_confused,
    plot_confusion,
    plot_most_confused,
)
from vit.extras.report.drawing import BLUE, ORANGE, share_lines, shorten
from vit.model import VisionTransformer

SMALL = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
NAMES = [f"the class of number {i}, which has a long name" for i in range(1000)]


def randomised(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def images(batch: int = 2, channels: int = 3, size: tuple[int, int] = (32, 24)) -> torch.Tensor:
    return torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(1))


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"class_token": False, "global_pool": "avg"},
        {"qkv_bias": False},
        {"qk_norm": True, "reg_tokens": 4},
    ],
    ids=str,
)
def test_attention_of_our_model_equals_timms_explicit_softmax(fields):
    ours = randomised(VisionTransformer((32, 24), **SMALL, **fields)).eval()
    theirs = TimmVisionTransformer((32, 24), **SMALL, **fields)
    theirs.load_state_dict(ours.state_dict())
    for block in theirs.blocks:
        block.attn.fused_attn = False
    expected = AttentionExtract(theirs, names=["blocks.*.attn.attn_drop"], method="hook")(images())
    maps, _, logits = attention_maps(ours, images())
    torch.testing.assert_close(logits, theirs.eval()(images()))
    assert len(maps) == len(expected) == 3
    for one, other in zip(maps, expected.values(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "fields",
    [{}, {"qk_norm": True, "reg_tokens": 4}, {"global_pool": "avg", "class_token": False}],
    ids=str,
)
def test_attention_of_timm_models_equals_their_explicit_softmax(fields):
    theirs = randomised(TimmVisionTransformer((32, 24), **SMALL, **fields)).eval()
    maps, _, logits = attention_maps(theirs, images())
    for block in theirs.blocks:
        block.attn.fused_attn = False
    expected = AttentionExtract(theirs, names=["blocks.*.attn.attn_drop"], method="hook")(images())
    for one, other in zip(maps, expected.values(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(logits, theirs(images()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: timm.create_model("test_resnet"),
        # The blocks of EfficientNet are not transformer blocks.
        lambda: timm.create_model("test_efficientnet"),
        lambda: Beit((32, 24), use_rel_pos_bias=True, **SMALL),
        lambda: Eva(
            (32, 24),
            use_abs_pos_emb=False,
            use_rot_pos_emb=True,
            qkv_fused=True,
            qkv_bias=False,
            **SMALL,
        ),
        lambda: TimmVisionTransformer((32, 24), attn_layer="diff", **SMALL),
        lambda: TimmVisionTransformer((32, 24), block_fn=ParallelThingsBlock, **SMALL),
        lambda: nn.Linear(2, 2),
    ],
)
def test_models_with_other_kinds_of_attention_are_refused(make):
    model = make()
    with pytest.raises(ValueError, match="does not use plain self-attention in each of its blocks"):
        attention_maps(model, images())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "fields", [{}, {"qk_norm": True, "rope_type": "axial", "norm_layer": "rmsnorm"}], ids=str
)
def test_attention_times_values_equals_the_output_of_the_module(fields):
    model = randomised(
        VisionTransformer((32, 24), attn_drop_rate=0.5, drop_path_rate=0.5, **SMALL, **fields)
    ).eval()
    seen = []
    for block in model.blocks:
        block.attn.register_forward_hook(
            lambda module, inputs, output: seen.append((module, inputs[0], output))
        )
    maps = attention_maps(model, images()).blocks
    assert all(map.dtype == torch.float32 and map.shape == (2, 4, 13, 13) for map in maps)
    assert not any(block.attn._forward_pre_hooks for block in model.blocks)
    for weights, (module, tokens, output) in zip(maps, seen, strict=True):
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 13))
        values = module.qkv(tokens).view(2, 13, 3, 4, 8)[:, :, 2].transpose(1, 2)
        torch.testing.assert_close(
            module.proj((weights @ values).transpose(1, 2).flatten(2)), output, rtol=1e-4, atol=1e-5
        )


def random_maps(num_layers: int, batch: int, heads: int, tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        (4 * torch.randn(batch, heads, tokens, tokens, generator=generator)).softmax(-1)
        for _ in range(num_layers)
    ]


@pytest.mark.parametrize(
    ("num_prefix_tokens", "global_pool"),
    [(1, "token"), (5, "token"), (0, "avg"), (1, "avg"), (0, "map"), (2, "map")],
)
def test_rollout_equals_a_sum_over_all_paths(num_prefix_tokens, global_pool):
    """The expected result is a brute-force sum over all paths from the head's tokens to an input
    token, with one token per layer."""
    tokens = num_prefix_tokens + 3
    maps = random_maps(3, 2, 2, num_prefix_tokens + 3)
    query = random_maps(4, 2, 2, tokens)[3][:, :, 0]
    query[..., :num_prefix_tokens] = 0.0
    query = query / query.sum(-1, keepdim=True)
    reading = (
        query if global_pool == "map" else even_reading(tokens, num_prefix_tokens, global_pool)
    )
    rollout = attention_rollout(maps, reading, num_prefix_tokens)
    for image in range(2):
        first, second, third = (
            0.5 * map[image].double().numpy().mean(0) + 0.5 * np.eye(tokens) for map in maps
        )
        reach = np.zeros((tokens, tokens))
        for end, b, a, begin in np.ndindex(*(tokens,) * 4):
            reach[end, begin] += third[end, b] * second[b, a] * first[a, begin]
        if global_pool == "map":
            read = np.zeros(tokens)
            for head, end in np.ndindex(2, tokens):
                read += 0.5 * float(query[image, head, end]) * reach[end]
        else:
            read = reach[0] if global_pool == "token" else reach[num_prefix_tokens:].mean(0)
        expected = read[num_prefix_tokens:] / read[num_prefix_tokens:].max()
        np.testing.assert_allclose(rollout[image].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"global_pool": "map"},
        {"global_pool": "map", "class_token": False, "reg_tokens": 2},
        {"global_pool": "avg", "reg_tokens": 1},
        {},
    ],
    ids=str,
)
def test_rollout_of_our_model_equals_timms(fields):
    """For a model with an attention pooling (MAP) head, the attention is compared with timm's
    explicit softmax."""
    ours = randomised(VisionTransformer((32, 24), **SMALL, **fields)).eval()
    theirs = TimmVisionTransformer((32, 24), **SMALL, **fields).eval()
    theirs.load_state_dict(ours.state_dict())
    relevance, logits = rollouts(ours, images())
    torch.testing.assert_close(rollouts(theirs, images())[0], relevance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, theirs(images()))
    _, reading, _ = attention_maps(ours, images())
    torch.testing.assert_close(reading.sum(-1), torch.ones(reading.shape[:2]))
    if "map" in fields.values():
        seen = []
        theirs.attn_pool.fused_attn = False
        softmax = torch.Tensor.softmax
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.Tensor,
                "softmax",
                lambda *args, **kw: seen.append(softmax(*args, **kw)) or seen[-1],
            )
            theirs(images())
        torch.testing.assert_close(reading[..., ours.num_prefix_tokens :], seen[-1][:, :, 0])
        assert not reading[..., : ours.num_prefix_tokens].any()


def one_hot_rows(*targets: int) -> torch.Tensor:
    return torch.eye(len(targets))[list(targets)][None, None]


def test_rollout_of_handmade_attention_has_the_known_values():
    identity = one_hot_rows(0, 1, 2, 3)

    def rollout(maps: list[torch.Tensor], num_prefix_tokens: int, global_pool: str) -> torch.Tensor:
        reading = even_reading(maps[0].shape[-1], num_prefix_tokens, global_pool)
        return attention_rollout(maps, reading, num_prefix_tokens)

    assert rollout([identity] * 3, 0, "avg").tolist() == [[1, 1, 1, 1]], (
        "if every token attends only to itself, all count equally"
    )
    assert rollout([identity] * 3, 1, "token").tolist() == [[0, 0, 0]], (
        "no patch must reach the class token"
    )
    assert rollout([one_hot_rows(2, 2, 2, 2)], 1, "token").tolist() == [[0, 1, 0]]
    # In the correct layer order, patch 1 flows into patch 2, and then patch 2 flows into the class
    # token. In reverse order, patch 1 does not reach the class token.
    into_patch = one_hot_rows(0, 1, 1, 3)
    into_class = one_hot_rows(2, 1, 2, 3)
    assert rollout([into_patch, into_class], 1, "token").tolist() == [[1, 1, 0]]
    assert rollout([into_class, into_patch], 1, "token").tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_attention_picture_shows_the_attended_region(tmp_path, channels):
    black = torch.zeros(2, channels, 64, 32, dtype=torch.uint8)
    relevance = torch.tensor([[[1.0, 0.0]], [[1.0, 1.0]]]).repeat(1, 4, 1)

    def draw(predictions: list[int], names: list[str]) -> np.ndarray:
        arguments = (black, relevance, [3, 7], predictions, [0.5, 0.25])
        return pixels(
            model_figures.plot_attention(*arguments, names, tmp_path / "new" / "folder" / "a.png")
        )

    right = draw([3, 7], NAMES)
    violet, yellow = (
        places(right, tuple(0.55 * 255 * np.array(colormaps["viridis"](x)[:3]))) for x in (0.0, 1.0)
    )
    assert yellow.sum() > 5000 < violet.sum()
    middle = violet[:, :700].nonzero()[1].min()
    assert 300 < yellow.nonzero()[1].min() < middle - 100, (
        "the region must be marked in the overlay"
    )
    assert yellow.nonzero()[1].max() < middle, (
        "only the left half of the first image may receive attention"
    )
    assert places(right, BLUE).sum() > 50
    assert not places(right, ORANGE).any()
    for wrong in (draw([3, 8], NAMES), draw([-1, 7], []), draw([3, 999], NAMES[:5])):
        assert places(wrong, ORANGE).sum() > 50 < places(wrong, BLUE).sum()


@pytest.mark.parametrize(
    ("grid", "tiles"), [((4, 4), 16), ((14, 14), 196), ((27, 27), 196), ((16, 3), 42), ((2, 3), 6)]
)
def test_the_position_picture_marks_each_position_in_its_tile(tmp_path, grid, tiles):
    shown = pixels(
        model_figures.plot_position_similarity(
            torch.eye(grid[0] * grid[1]), grid, tmp_path / "p.png"
        )
    )
    violet, yellow = (
        places(shown, tuple(255 * np.array(colormaps["viridis"](x)[:3]))) for x in (0.0, 1.0)
    )
    sizes = [
        (y.stop - y.start, x.stop - x.start)
        for y, x in ndimage.find_objects(ndimage.label(yellow)[0])
    ]
    # Exclude the color bar, whose bright end is wider than a patch.
    patches = [size for size in sizes if size[1] <= 2 * size[0]]
    assert len(patches) == tiles, "each tile must have one bright patch"
    all_y, all_x = (violet | yellow).nonzero()
    y, x = yellow.nonzero()
    corners = (y.min(), x.min(), y.max())
    assert corners == (all_y.min(), all_x.min(), all_y.max()), (
        "the corner's patch must be in the corner of its tile"
    )


# --- mistakes of the model ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:A single label was found")
@given(st.integers(1, 12), st.data())
@settings(max_examples=50)
def test_the_confusion_matrix_equals_scikit_learns(num_classes, data):
    labels, predictions = (
        data.draw(
            st_numpy.arrays(np.int64, 40, elements=st.integers(low, num_classes - 1)), label=name
        )
        for name, low in (("labels", 0), ("predictions", -1))
    )
    matrix = confusion_matrix(labels, predictions, num_classes)
    seen = predictions >= 0
    assert matrix.dtype == np.int64
    assert matrix.sum() == seen.sum(), "an image without a prediction must not count"
    # scikit-learn rejects empty input.
    if seen.any():
        from sklearn import metrics as sklearn_metrics

        expected = sklearn_metrics.confusion_matrix(
            labels[seen], predictions[seen], labels=np.arange(num_classes)
        )
        np.testing.assert_array_equal(matrix, expected)


@given(
    st_numpy.arrays(np.int64, st.integers(1, 7).map(lambda n: (n, n)), elements=st.integers(0, 4)),
    st.integers(0, 12),
)
@settings(max_examples=100)
def test_the_most_confused_pairs_equal_brute_force(matrix, num):
    pairs = most_confused(matrix, num)
    left = {}
    for true in range(len(matrix)):
        for predicted in range(len(matrix)):
            if true != predicted and matrix[true][predicted] > 0:
                left[true, predicted] = (
                    matrix[true][predicted],
                    matrix[true][predicted] / sum(matrix[true]),
                )
    assert len(pairs) == min(num, len(left))
    for true, predicted, count, total in pairs:
        best = max(left.values())
        assert left[true, predicted] == best == (count, count / total)
        assert (true, predicted) == min(pair for pair, value in left.items() if value == best)
        del left[true, predicted]
    assert all(type(number) is int for pair in pairs for number in pair), (
        "JSON cannot contain numpy numbers"
    )


@pytest.mark.parametrize("num_classes", [3, 20, 21, 1000])
def test_confusion_pictures_show_the_places_of_mistakes(tmp_path, num_classes):
    """The test moves a mistake from near the diagonal to the left edge of the plot. Only the row of
    the true class may change."""
    true = int(0.9 * num_classes)
    far = int(0.1 * num_classes)
    near = int(0.9 * num_classes) - 1

    def draw(predicted: int) -> np.ndarray:
        matrix = 50 * np.eye(num_classes, dtype=np.int64)
        matrix[true, predicted] = 3
        return pixels(plot_confusion(matrix, NAMES[:num_classes], tmp_path / "c.png"))

    rows = (draw(far) != draw(near)).any(2)[:, :450].nonzero()[0]
    assert len(rows) > 4, "the mark must be visible"
    assert rows.min() > 700, "true classes are rows, predicted classes are columns"


@pytest.mark.parametrize("num_classes", [1, 3, 30])
def test_confusion_pictures_of_perfect_and_empty_results_are_drawn(tmp_path, num_classes):
    perfect = 5 * np.eye(num_classes, dtype=np.int64)
    shown = [
        pixels(plot_confusion(matrix, [], tmp_path / "c.png")) for matrix in (perfect, 0 * perfect)
    ]
    assert (shown[0] != shown[1]).any()


def test_the_picture_of_confused_pairs_shows_examples(tmp_path):
    red = torch.zeros(3, 40, 20, dtype=torch.uint8)
    gray = torch.full((1, 20, 40), 77, dtype=torch.uint8)
    red[0] = 201
    pairs = [(10, 999, 4, 50), (1, 0, 2, 50)]
    shown = pixels(plot_most_confused(pairs, [[red] * 9, [gray]], NAMES, tmp_path / "m.png"))
    assert ndimage.label(places(shown, (201, 0, 0)))[1] == 6, "at most six examples may be shown"
    assert ndimage.label(places(shown, (77, 77, 77), 0))[1] >= 1
    bars, num_bars = ndimage.label(ndimage.binary_opening(places(shown, ORANGE), np.ones((9, 9))))
    widths = [place[1].stop - place[1].start for place in ndimage.find_objects(bars)]
    assert num_bars == 2
    assert widths[0] == pytest.approx(2 * widths[1], abs=3)


# --- augmented inputs -----------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_augmented_inputs_are_shown_in_their_own_colors(tmp_path, channels):
    mean, std = (0.4, 0.5, 0.6)[:channels], (0.2, 0.25, 0.3)[:channels]
    colors = torch.tensor([[200, 100, 50], [20, 120, 220]])[:, :channels] / 255
    inputs = ((colors - torch.tensor(mean)) / torch.tensor(std))[..., None, None].expand(
        -1, -1, 24, 48
    )
    # Values brighter than white must be clipped to white.
    inputs = torch.cat((inputs, 100 * torch.ones(1, channels, 24, 48)))
    targets = torch.eye(1000)[[0, 1, 2]]
    shown = pixels(
        model_figures.plot_augmented(inputs, targets, mean, std, NAMES, tmp_path / "a.png")
    )
    for color in (colors * 255).tolist():
        assert places(shown, tuple(color * (3 // channels))).sum() > 10_000
    mixed = pixels(
        model_figures.plot_augmented(
            inputs, targets.roll(1, 0).lerp(targets, 0.72), mean, std, NAMES, tmp_path / "m.png"
        )
    )
    assert mixed.shape[0] > shown.shape[0], "a second line must name the other class"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ([0, 1, 0], ["dog"]),
        ([0.72, 0.28, 0], ["cat .72", "dog .28"]),
        ([0.1, 0.3, 0.6], ["class 2 .60", "dog .30"]),
        ([0.002, 0.998, 0], ["dog"]),
        ([0.6, 0, 0], ["cat"]),
        ([1.0], ["cat"]),
    ],
)
def test_shares_of_mixed_targets_are_printed(target, expected):
    assert share_lines(torch.tensor(target, dtype=torch.float32), ["cat", "dog"], 2.0) == expected


@given(
    st.text(st.characters(max_codepoint=0x24F, exclude_categories=["C"]), min_size=1, max_size=60),
    st.floats(0.5, 3.0),
)
@settings(max_examples=100)
def test_long_names_are_shortened_to_the_available_width(text, width_in):
    def width(text: str) -> float:
        return (
            text_to_path.get_text_width_height_descent(
                text, FontProperties(family="DejaVu Sans", size=10.5), False
            )[0]
            / 72
        )

    shown = shorten(text, width_in)
    assert width(shown) <= width_in
    if width(text) <= width_in:
        assert shown == text
    else:
        begin, end = shown.split("…", 1) if text.count("…") == 0 else (shown[0], "")
        assert text.startswith(begin)
        assert text.endswith(end)
