"""Compare the numbers in a model's plots with brute-force computations and scikit-learn.

Computing these numbers must not change the model.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decoding import pixels, places
from matplotlib import colormaps
from PIL import Image
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch.utils._python_dispatch import TorchDispatchMode

from vit.config.io import load_config
from vit.extras.report import drawing as style
from vit.extras.report import model_figures
from vit.extras.report.attention import (
    attention_distance,
    attention_maps,
    even_reading,
    filter_components,
    output_attention,
    token_colors,
    token_features,
)
from vit.extras.report.drawing import drawing
from vit.extras.report.example_images import ExampleImages, samples_of_split
from vit.extras.report.model_comparison import Compared, _differing, compare
from vit.model import VisionTransformer, create_model
from vit.training.model_summary import count_parameters, flops_per_image
from vit.weights.files import LoadedWeights

SMALL = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}


def small_model(**fields) -> VisionTransformer:
    model = VisionTransformer((32, 24), **SMALL, **fields).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def some_images(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 24, generator=torch.Generator().manual_seed(1))


def some_maps(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 4, tokens, tokens, generator=generator).softmax(-1) for _ in range(3)]


# ---- attention -----------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """A dispatch mode that counts the operations that torch runs."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations_of(model: torch.nn.Module) -> Counter:
    with torch.no_grad(), Operations() as operations:
        model(some_images())
    return operations.counts


def test_recording_attention_does_not_change_later_forward_passes():
    model = small_model()
    before = operations_of(model)
    assert any("scaled_dot_product" in name for name in before)
    attention_maps(model, some_images())
    with pytest.raises(ValueError, match="expected"):
        attention_maps(model, torch.zeros(1, 3, 8, 8))
    assert operations_of(model) == before
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks


@pytest.mark.parametrize("num_prefix_tokens", [0, 1, 5])
def test_attention_distance_equals_a_loop_over_all_pairs(num_prefix_tokens):
    grid, patch_size = (3, 4), (8, 16)
    maps = some_maps(num_prefix_tokens + 12)
    distances = attention_distance(maps, grid, patch_size, num_prefix_tokens)
    assert distances.shape == (2, 3, 4)
    for image, layer, head in np.ndindex(2, 3, 4):
        weights = maps[layer][image, head, num_prefix_tokens:, num_prefix_tokens:].double().numpy()
        total = 0.0
        for query, key in np.ndindex(12, 12):
            down = 8 * (query // 4 - key // 4)
            across = 16 * (query % 4 - key % 4)
            total += weights[query, key] / weights[query].sum() * math.hypot(down, across)
        np.testing.assert_allclose(distances[image, layer, head], total / 12, rtol=1e-5)


def test_distances_are_averaged_over_images():
    model = small_model()
    images = some_images(3)
    shown = model_figures.Images(lambda part: part, images, [])
    distances = model_figures.mean_distances(model, shown)
    maps = attention_maps(model, images).blocks
    expected = attention_distance(maps, (4, 3), (8, 8), 1).mean(0)
    torch.testing.assert_close(distances, expected)


@pytest.mark.parametrize("global_pool", ["token", "avg", "map"])
def test_the_attention_of_the_output_equals_brute_force(global_pool):
    maps = some_maps(13)
    if global_pool == "map":
        reading = some_maps(13)[0][:, :, 3]
    else:
        reading = even_reading(13, 1, global_pool)
    attention = output_attention(maps, reading, 1)
    assert attention.shape == (2, 3, 4, 12)
    for image, layer, head, patch in np.ndindex(*attention.shape):
        rows = maps[layer][image, head]
        if global_pool == "map":
            of_query = [float(reading[image, :, query].mean()) for query in range(13)]
            expected = sum(of_query[query] * float(rows[query, patch + 1]) for query in range(13))
        else:
            queries = [0] if global_pool == "token" else range(1, 13)
            expected = np.mean([float(rows[query, patch + 1]) for query in queries])
        np.testing.assert_allclose(attention[image, layer, head, patch], expected, rtol=1e-5)


@pytest.mark.parametrize("registers", [0, 2])
def test_a_map_head_counts_as_one_more_layer(registers):
    model = VisionTransformer((32, 24), **SMALL, global_pool="map", reg_tokens=registers).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    image = torch.rand(3, 32, 24)
    heads, rolled = model_figures.heads_and_rollout(model, lambda pixels: pixels, image)
    assert heads.shape == (4, 4, 4, 3)
    assert rolled.shape == (4, 3)
    torch.testing.assert_close(heads[-1].sum((1, 2)), torch.ones(4))
    inputs = []
    with model.attn_pool.register_forward_pre_hook(lambda module, args: inputs.append(args[0])):
        model(image[None])
    q, k, _ = model.attn_pool.project(inputs[0])
    expected = torch.stack([(k[0, h] @ q[0, h, 0] / 8**0.5).softmax(0) for h in range(4)])
    torch.testing.assert_close(heads[-1].flatten(1), expected)


@pytest.mark.parametrize(("pos_embed", "kind"), [("learn", "learned"), ("sincos2d", "fixed")])
def test_the_caption_of_positions_states_their_kind_and_grid(pos_embed, kind, tmp_path):
    model = VisionTransformer((32, 24), **SMALL, pos_embed=pos_embed)
    caption = model_figures.draw_positions(model, tmp_path / "positions.png")
    assert f"each {kind} position embedding" in caption
    assert "each of the 4 × 3 positions (Dosovitskiy et al. 2021, Figure 7 center)" in caption


# ---- principal components ------------------------------------------------------------------------


def same_up_to_sign(components: np.ndarray, expected: np.ndarray, atol: float) -> None:
    signs = np.sign((components * expected).sum(1, keepdims=True))
    np.testing.assert_allclose(components, signs * expected, atol=atol)


@pytest.mark.parametrize("make", [small_model, lambda: TimmVisionTransformer((32, 24), **SMALL)])
def test_filters_equal_scikit_learns_components(make):
    from sklearn.decomposition import PCA

    model = make()
    filters, shares = filter_components(model, 28)
    assert filters.shape == (28, 3, 8, 8)
    expected = PCA(28, svd_solver="full").fit(
        model.patch_embed.proj.weight.detach().double().flatten(1).numpy()
    )
    same_up_to_sign(filters.flatten(1).numpy(), expected.components_, atol=1e-9)
    np.testing.assert_allclose(shares.numpy(), expected.explained_variance_ratio_, rtol=1e-9)
    assert (filters.flatten(1).max(1).values == filters.flatten(1).abs().max(1).values).all()


def test_token_colors_equal_scikit_learns_components_clipped_at_a_hundredth():
    from sklearn.decomposition import PCA

    features = token_features(small_model(), some_images(5))
    assert features.shape == (5, 12, 32)
    colors, shares = token_colors(features, (4, 3))
    assert colors.shape == (5, 3, 4, 3)
    rows = features.double().flatten(0, 1).numpy()
    expected = PCA(3, svd_solver="full").fit(rows)
    values = expected.transform(rows)
    low, high = np.quantile(values, [0.01, 0.99], axis=0)
    scaled = ((values - low) / (high - low)).clip(0, 1)
    components = colors.permute(0, 2, 3, 1).flatten(0, 2).numpy()
    for channel in range(3):
        # The sign of a principal component is arbitrary.
        mirrored = 1 - scaled[:, channel]
        assert min(
            np.abs(components[:, channel] - scaled[:, channel]).max(),
            np.abs(components[:, channel] - mirrored).max(),
        ) == pytest.approx(0, abs=1e-5)
    np.testing.assert_allclose(shares, expected.explained_variance_ratio_, rtol=1e-9)


def test_features_contain_only_the_patches():
    model = small_model()
    expected = model.forward_features(some_images())[:, 1:]
    torch.testing.assert_close(token_features(model, some_images()), expected)


# ---- costs of layers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("vit_s16", {"representation_size": 64, "init_values": 0.1, "qkv_bias": False}),
        ("vit_ti16", {"global_pool": "avg", "class_token": False, "pos_embed": "sincos2d"}),
        ("timm/vit_tiny_patch16_224", {"reg_tokens": 4}),
    ],
)
def test_layers_add_up_to_the_model(name, fields):
    layer_costs = pytest.importorskip("vit.extras.planner.by_layer").layer_costs
    with torch.device("meta"):
        model = create_model(name, **fields)
    rows = layer_costs(model)
    assert sum(row.parameters for row in rows) == count_parameters(model)
    assert sum(row.flops for row in rows) == flops_per_image(model)
    assert len([row for row in rows if row.name.startswith("blocks.")]) == 12
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.full
def test_the_memory_of_layers_equals_the_planners():
    memory_needs = pytest.importorskip("vit.extras.planner.by_layer").memory_needs
    step_memory = pytest.importorskip("vit.extras.planner.memory").step_memory
    settings = ["model.name=vit_ti16", "model.depth=2", "data.root=.", "train.precision=fp32"]
    config = load_config("configs/vit_b16.yaml", settings)
    needs = memory_needs(config, 10)
    model = create_model(config.model, num_classes=10)
    tensors = [*model.parameters(), *model.buffers()]
    assert needs.weights == sum(tensor.nbytes for tensor in tensors)
    # An MLP's hidden layer and its input are in memory at the same time.
    hidden_bytes = 4 * 197 * 768
    assert 2 * hidden_bytes <= needs.forward < 10 * hidden_bytes
    plan = SimpleNamespace(
        world_size=1, global_batch_size=200, micro_batch_size=200, rank_batch_size=200
    )
    larger = step_memory(config, plan, 10).total
    assert needs.per_image == pytest.approx(larger / 200, rel=0.2)
    assert needs.training < larger


# ---- pictures ------------------------------------------------------------------------------------


def test_pictures_of_patches_show_the_image(tmp_path):
    image = torch.zeros(3, 4, 6, dtype=torch.uint8)
    image[0] = torch.arange(24).view(4, 6) * 10
    image[2] = 200
    path = model_figures.plot_patches(image, (2, 3), tmp_path / "patches.png")
    shown = pixels(path)
    left, right = shown[:, :700], shown[:, 700:]
    for value in range(0, 240, 10):
        assert places(left, (value, 0, 200)).sum() > 1000
        assert places(right, (value, 0, 200)).sum() > 1000


def test_the_suffix_determines_the_format_of_a_picture(tmp_path):
    model = small_model()
    images = (some_images(3).clamp(-1, 1) * 127 + 128).to(torch.uint8)
    for suffix, magic in {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}.items():
        path = tmp_path / f"distance.{suffix}"
        shown = model_figures.Images(lambda part: part.float() / 255, images, [])
        model_figures.draw_distance(model, shown, path)
        assert path.read_bytes().startswith(magic)
    with (
        pytest.raises(ValueError, match="one of the suffixes png, pdf, svg"),
        drawing(tmp_path / "a.gif", 1),
    ):
        pass


def test_each_head_can_have_its_own_picture(tmp_path):
    image = torch.full((3, 32, 24), 100, dtype=torch.uint8)
    heads = torch.rand(2, 3, 4, 3)
    written = model_figures.save_heads(image, heads, tmp_path / "new")
    names = [f"layer{layer:02d}_head{head:02d}.png" for layer in (1, 2) for head in (1, 2, 3)]
    assert [path.name for path in written] == ["input.png", *names]
    from PIL import Image

    assert all(Image.open(path).size == (24, 32) for path in written)


# ---- comparison of two models --------------------------------------------------------------------


def test_images_that_only_one_model_classifies_right_are_sorted_by_the_others_confidence():
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    first = torch.tensor([0, 0, 0, 0, 1, 0])
    second = torch.tensor([0, 1, 1, 1, 1, 0])
    sure = torch.tensor([0.9, 0.5, 0.8, 0.7, 0.6, 0.5])
    comparison = Compared(labels, (first, second), (sure, sure), None)
    assert _differing(comparison) == [2, 1, 3]


def test_models_with_different_classes_are_not_compared():
    one = SimpleNamespace(class_names=("a", "b"), weights=SimpleNamespace(path="one"))
    other = SimpleNamespace(class_names=("a", "c"), weights=SimpleNamespace(path="other"))
    with pytest.raises(ValueError, match="one and other have different classes"):
        compare((one, other), ExampleImages([], []))
    with pytest.raises(ValueError, match="image files have no labels"):
        compare((one, one), ExampleImages([], []))


def test_letters_missing_in_the_font_are_reported_once(tmp_path, capsys, recwarn, monkeypatch):
    """matplotlib warns twice about each missing letter, and a class name may appear in a hundred
    plots."""
    monkeypatch.setattr(style, "_missing_letters", set())
    for name in ("a.png", "b.png"):
        with style.drawing(tmp_path / name, 1.0) as figure:
            style.new_sheet(figure, style.shorten("\ue123 \ue124", 3.0))
    assert capsys.readouterr().err.count("no installed font has \ue123 \ue124") == 1
    assert not recwarn.list


def test_maps_of_heads_have_the_shape_of_the_image(tmp_path):
    """With 8x16-pixel patches, the plot of a 4x3 grid must have the aspect ratio of a 32x48
    image."""
    image = torch.zeros(3, 32, 48, dtype=torch.uint8)
    heads = torch.rand(1, 1, 4, 3)
    model_figures.plot_heads(image, heads, heads[0, 0], "x", tmp_path / "x.png")
    drawn = np.array(Image.open(tmp_path / "x.png").convert("RGB")).astype(int)
    colors = (colormaps["viridis"]((heads[0, 0] / heads.max()).numpy())[..., :3] * 255).round()
    sizes = []
    for color in colors.reshape(-1, 3):
        at = np.argwhere(np.abs(drawn - color).max(2) <= 1)
        sizes.append(np.ptp(at, axis=0) + 1)
    height, width = np.median(sizes, axis=0)
    assert abs(width / height - 2) < 0.1


def test_weights_of_other_programs_have_no_images():
    """The weights of other programs have no config that names a dataset, and the current folder
    must not be used instead."""
    foreign = SimpleNamespace(weights=LoadedWeights(Path("w.pth"), {}), config=None)
    with pytest.raises(ValueError, match=r"w.pth was trained elsewhere, on unknown images.*--data"):
        samples_of_split(foreign, 4)
