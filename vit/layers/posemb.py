"""Position embeddings: fixed 2-D sine-cosine, and resampling to a different grid."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def sincos2d_posemb(grid_size: tuple[int, int], dim: int, num_prefix_tokens: int) -> Tensor:
    """Return fixed 2-D sine-cosine positions: (1, P + h*w, dim) float32, 0 for prefix tokens.

    The channels are sin x, cos x, sin y and cos y, a quarter each. Frequencies fall from 1 to
    exactly 1/10,000, as in google-research/big_vision:big_vision/models/vit.py
    (`posemb_sincos_2d`). MoCo v3 (arXiv 2104.02057), which introduced these embeddings, stops one
    frequency step earlier. Raises ValueError if `dim` is not a multiple of 4, or is below 8.
    """
    if dim % 4 or dim < 8:
        raise ValueError(
            f"pos_embed 'sincos2d' needs an embed_dim that is a multiple of 4 and at least 8, not"
            f" {dim}"
        )

    # Compute in float64, and round once at the end.
    quarter = dim // 4
    frequencies = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
    rows, columns = (torch.arange(n, dtype=torch.float64) for n in grid_size)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    x = x.reshape(-1, 1) * frequencies
    y = y.reshape(-1, 1) * frequencies

    positions = torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), dim=1)
    zeros = positions.new_zeros(num_prefix_tokens, dim)
    return torch.cat((zeros, positions)).unsqueeze(0).float()


def resample_posemb(
    pos_embed: Tensor,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    num_prefix_tokens: int,
    interpolation: str = "bicubic",
    antialias: bool = True,
) -> Tensor:
    """Resample positions to a different grid (section 3.2): (1, P + h*w, D) -> (1, P + h'*w', D).

    The first P = `num_prefix_tokens` rows are copied, because they have no position in the image.
    The dtype is preserved. `interpolation` is "bicubic" or "bilinear". The defaults match timm's
    `resample_abs_pos_embed` (huggingface/pytorch-image-models:timm/layers/pos_embed.py).
    `antialias` affects only resampling to smaller grids. DeiT and MAE do not use antialiasing.

    Raises:
        ValueError: `pos_embed` does not have the size of `old_grid`.
    """
    length = num_prefix_tokens + math.prod(old_grid)
    if pos_embed.ndim != 3 or pos_embed.shape[:2] != (1, length):
        raise ValueError(
            f"pos_embed is {tuple(pos_embed.shape)}, expected (1, {length}, dim):"
            f" {num_prefix_tokens} prefix tokens and a grid of {old_grid[0]}x{old_grid[1]}"
        )
    if tuple(old_grid) == tuple(new_grid):
        return pos_embed

    prefix = pos_embed[:, :num_prefix_tokens]
    image = pos_embed[:, num_prefix_tokens:].float().unflatten(1, tuple(old_grid))
    # A scale factor could round to a different number of positions, so pass the size.
    image = F.interpolate(
        image.permute(0, 3, 1, 2),
        size=tuple(new_grid),
        mode=interpolation,
        align_corners=False,
        antialias=antialias,
    )

    positions = image.flatten(2).transpose(1, 2).to(pos_embed.dtype)
    return torch.cat((prefix, positions), dim=1)
