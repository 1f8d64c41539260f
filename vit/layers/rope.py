"""Rotary position embeddings (RoPE): rotate queries and keys by their row and column.

This extends Su et al. 2021 (arXiv 2104.09864) to two axes: half of a head's channel pairs rotate
with the row, half with the column, each pair at its own frequency. The product of a rotated query
and a rotated key depends only on their relative position. Rotary embeddings have no weights, so a
model can accept other image sizes. The coordinates depend on `rope_type`:

axial   Rows and columns count from 0. Frequencies fall from 1 to nearly 1 / 10,000. Neighboring
        channels are a pair. Larger images have larger coordinates (ViT-5: wangf3014/ViT-5:rope.py).
        With `ref_feat_shape`, coordinates are scaled to that grid (EVA-02, arXiv 2303.11331; timm's
        `RotaryEmbeddingCat`,
        huggingface/pytorch-image-models:timm/layers/pos_embed_sincos.py).
dinov3  The centers of patches are in [-1, 1] for any image size. Frequencies fall from 2 pi to
        nearly 2 pi / 100. Channels half a head apart are a pair (DINOv3, arXiv 2508.10104;
        facebookresearch/dinov3:dinov3/layers/rope_position_encoding.py).

    sizes -> `RotaryEmbedding.table` -> `rotate` in each block's attention
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

TEMPERATURES = {"axial": 10_000.0, "dinov3": 100.0}
"""The default `rope_temperature` for each `rope_type`."""


class RotaryEmbedding(nn.Module):
    """The cosines and sines for one image size, (2, 1, 1, N, head_dim) float32.

    Prefix tokens are not rotated. With `reg_temperature`, registers are rotated as if they were on
    a square grid (ViT-5). The sines include the sign that `rotate` needs.

    Args:
        temperature: None for the default of `rope_type`.
        reg_temperature: None if registers are not rotated.
        ref_feat_shape, grid_size: (h, w) in patches.
        rope_type: "axial" or "dinov3".
        class_tokens, reg_tokens: The numbers of prefix tokens, in this order.
    """

    table: Tensor

    def __init__(
        self,
        temperature: float | None,
        reg_temperature: float | None,
        ref_feat_shape: int | tuple[int, int] | None,
        rope_type: str,
        grid_size: tuple[int, int],
        head_dim: int,
        class_tokens: int,
        reg_tokens: int,
    ):
        super().__init__()
        self.temperature = temperature or TEMPERATURES[rope_type]
        self.reg_temperature = reg_temperature
        if isinstance(ref_feat_shape, int):
            ref_feat_shape = (ref_feat_shape, ref_feat_shape)
        self.ref_feat_shape = ref_feat_shape
        self.rope_type = rope_type
        self.grid_size = grid_size
        self.prefix = (class_tokens, reg_tokens)
        self.num_fixed = class_tokens if reg_temperature else class_tokens + reg_tokens
        self.reg_grid = (math.isqrt(reg_tokens),) * 2

        num_tokens = class_tokens + reg_tokens + math.prod(grid_size)
        # A buffer moves to the device with the model. The image size determines the table, so it is
        # not in the state dict, as in timm.
        self.register_buffer("table", torch.empty(2, 1, 1, num_tokens, head_dim), persistent=False)
        self.reset_parameters()

    def at(self, grid_size: tuple[int, int]) -> RotaryEmbedding:
        """Return the embedding for images with this grid, as `rope_type` defines it."""
        class_tokens, reg_tokens = self.prefix
        return RotaryEmbedding(
            self.temperature,
            self.reg_temperature,
            self.ref_feat_shape,
            self.rope_type,
            grid_size=grid_size,
            head_dim=self.table.shape[-1],
            class_tokens=class_tokens,
            reg_tokens=reg_tokens,
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the table, for example after `to_empty`."""
        head_dim = self.table.shape[-1]
        angles = [torch.zeros(self.num_fixed, head_dim // 2, dtype=torch.float64)]
        if self.reg_temperature:
            places = _grid_places(self.reg_grid, self.reg_grid)
            angles.append(_angles(places, self.reg_temperature, head_dim))

        if self.rope_type == "axial":
            places = _grid_places(self.grid_size, self.ref_feat_shape or self.grid_size)
        else:
            places = 2 * math.pi * _centers(self.grid_size)
        angles.append(_angles(places, self.temperature, head_dim))

        angle = torch.cat(angles)
        cos = angle.cos()
        sin = angle.sin()
        if self.rope_type == "axial":  # channels 2i and 2i + 1 are a pair
            cos = cos.repeat_interleave(2, dim=1)
            sin = torch.stack((-sin, sin), dim=2).flatten(1)
        else:  # channels i and i + head_dim / 2 are a pair
            cos = cos.tile(1, 2)
            sin = torch.cat((-sin, sin), dim=1)
        self.table.copy_(torch.stack((cos, sin)).view(self.table.shape))


def rotate(x: Tensor, table: Tensor, rope_type: str) -> Tensor:
    """Rotate each channel pair of queries or keys `x`, (B, heads, N, head_dim), by its angle.

    table: the table of `RotaryEmbedding`, (2, 1 or B, 1, N, head_dim) float32. Returns float32.
    """
    cos, sin = table
    if rope_type == "axial":
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = x.roll(x.shape[-1] // 2, dims=-1)
    return x * cos + partner * sin


def _grid_places(grid_size: tuple[int, int], ref_feat_shape: tuple[int, int]) -> Tensor:
    """Return the row and column of each patch, (h*w, 2) float64, scaled to `ref_feat_shape`."""
    axes = [
        torch.arange(size, dtype=torch.float64) * reference / size
        for size, reference in zip(grid_size, ref_feat_shape, strict=True)
    ]
    return torch.cartesian_prod(*axes)


def _centers(grid_size: tuple[int, int]) -> Tensor:
    """Return the row and column of each patch's center in [-1, 1]: (h*w, 2) float64."""
    axes = [(torch.arange(size, dtype=torch.float64) * 2 + 1) / size - 1 for size in grid_size]
    return torch.cartesian_prod(*axes)


def _angles(places: Tensor, temperature: float, head_dim: int) -> Tensor:
    """Return `places`, (n, 2), times each frequency: (n, head_dim / 2) float64, rows first."""
    num = head_dim // 4
    frequencies = temperature ** (-torch.arange(num, dtype=torch.float64) / num)
    return (places.unsqueeze(2) * frequencies).flatten(1)
