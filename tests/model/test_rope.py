"""Compare rotary position embeddings with the formulas in their papers, and test that attention
depends only on relative positions."""

from __future__ import annotations

import math

import pytest
import torch
from timm.layers import apply_rot_embed_cat
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingDinoV3
from torch import Tensor

from vit.layers.rope import RotaryEmbedding, rotate

HEAD_DIM = 16
GRIDS = [((14, 14), None), ((3, 5), None), ((3, 5), (4, 4)), ((24, 18), 14), ((1, 1), (2, 3))]


def create(rope_type: str, grid: tuple[int, int], **fields) -> RotaryEmbedding:
    """Create a rotary embedding. By default, it has no registers and uses the temperature of its
    source."""
    options = {"temperature": None, "reg_temperature": None, "ref_feat_shape": None}
    options |= {"class_tokens": 0, "reg_tokens": 0, **fields}
    return RotaryEmbedding(rope_type=rope_type, grid_size=grid, head_dim=HEAD_DIM, **options)


def queries(num_tokens: int) -> Tensor:
    return torch.randn(2, 3, num_tokens, HEAD_DIM, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("grid", "reference"), GRIDS)
@pytest.mark.parametrize("rope_type", ["axial", "dinov3"])
def test_rotated_queries_equal_timm(rope_type, grid, reference):
    """timm computes angles of up to 24 in float32, so its rounding errors reach 24 * 2**-24."""
    fields = {} if rope_type == "dinov3" else {"ref_feat_shape": reference}
    ours = create(rope_type, grid, class_tokens=1, **fields)
    if rope_type == "dinov3":
        theirs = RotaryEmbeddingDinoV3(HEAD_DIM, feat_shape=[*grid])
    else:
        side = [reference, reference] if isinstance(reference, int) else reference
        theirs = RotaryEmbeddingCat(
            HEAD_DIM, in_pixels=False, feat_shape=[*grid], ref_feat_shape=side
        )
    x = queries(1 + math.prod(grid))
    rotated = rotate(x, ours.table, rope_type)
    expected = apply_rot_embed_cat(x[:, :, 1:], theirs.get_embed(), half=rope_type == "dinov3")
    assert torch.equal(rotated[:, :, :1], x[:, :, :1]), "the class token must not be rotated"
    torch.testing.assert_close(rotated[:, :, 1:], expected, rtol=0, atol=2e-5)


def test_registers_of_vit5_rotate_as_a_separate_grid():
    """The formula rotates each pair (a, b) by the angle position * theta ** -(i / 4)."""
    ours = create("axial", (2, 3), class_tokens=1, reg_tokens=4, reg_temperature=100.0)
    x = queries(1 + 4 + 6)
    places = [((0, 0), 1.0)]
    places += [((row, column), 100.0) for row in range(2) for column in range(2)]
    places += [((row, column), 10_000.0) for row in range(2) for column in range(3)]
    expected = x.clone()
    for token, (place, theta) in enumerate(places):
        for pair in range(HEAD_DIM // 2):
            axis, number = divmod(pair, HEAD_DIM // 4)
            angle = place[axis] * theta ** -(number / (HEAD_DIM // 4))
            a, b = x[..., token, 2 * pair], x[..., token, 2 * pair + 1]
            expected[..., token, 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
            expected[..., token, 2 * pair + 1] = b * math.cos(angle) + a * math.sin(angle)
    torch.testing.assert_close(rotate(x, ours.table, "axial"), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rope_type", ["axial", "dinov3"])
def test_products_depend_only_on_distance_and_lengths_are_unchanged(rope_type):
    grid = (5, 7)
    q = queries(1).expand(-1, -1, 35, -1)
    k = queries(2)[:, :, 1:].expand(-1, -1, 35, -1)
    table = create(rope_type, grid).table
    turned = rotate(q, table, rope_type)
    products = turned @ rotate(k, table, rope_type).transpose(-2, -1)
    # The new shape is (B, heads, row, column, row, column).
    products = products.unflatten(3, grid).unflatten(2, grid)
    torch.testing.assert_close(products[..., 1:, 2:, 1:, 2:], products[..., :-1, :-2, :-1, :-2])
    assert not torch.allclose(products[..., 0, 0, 1, 0], products[..., 0, 0, 0, 1])
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))


def test_a_larger_image_follows_the_rule_of_the_source():
    small = create("axial", (4, 4)).table.unflatten(3, (4, 4))
    larger = create("axial", (8, 6)).table.unflatten(3, (8, 6))
    assert torch.equal(larger[:, :, :, :4, :4], small), (
        "positions must continue beyond the original grid"
    )
    spread = create("axial", (8, 8), ref_feat_shape=4).table.unflatten(3, (8, 8))
    assert torch.equal(spread[:, :, :, ::2, ::2], small), "8 positions must lie between 0 and 4"
    odd = create("dinov3", (3, 3)).table.unflatten(3, (3, 3))
    finer = create("dinov3", (9, 9)).table.unflatten(3, (9, 9))
    # Compare only the patches whose centers coincide.
    torch.testing.assert_close(finer[:, :, :, 1::3, 1::3], odd)
