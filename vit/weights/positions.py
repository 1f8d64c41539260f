"""Fit the position embeddings of a weights file to a model's grid and prefix tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vit.layers.posemb import resample_posemb
from vit.system.files import WeightsError


def fit_posemb(
    source: Tensor, target: Tensor, new_grid: tuple[int, int] | None, grid: tuple[int, int] | None
) -> tuple[Tensor, list[str]]:
    """Resample `source` (1, n, D) to the positions of `target`. Return it and a note per
    adaptation.

    new_grid, grid: (h, w) of the model's patches and of the source's positions; None if unknown.
    Raises WeightsError if the source's number of positions does not fit a grid.
    """
    fits = source.ndim == 3 and source.shape[0] == 1 and source.shape[2] == target.shape[2]
    if new_grid is None or not fits:
        return source, []  # `load_weights` reports the different shapes.
    num_prefix_tokens = target.shape[1] - math.prod(new_grid)
    length = source.shape[1]
    # The source may have positions for its prefix tokens (ViT, DeiT) or not (DeiT III). If `grid`
    # is None, try a square before the model's grid: 256 positions may be 8x32 or 16x16, and
    # published weights use squares.
    lengths = (length - num_prefix_tokens, length)
    squares = [(math.isqrt(number), math.isqrt(number)) for number in lengths if number > 0]
    candidates = [*squares, new_grid] if grid is None else [grid]
    fitting = [hw for hw in candidates if math.prod(hw) in lengths]
    if not fitting:
        assumed = "a square grid" if grid is None else f"a grid of {grid[0]}x{grid[1]}"
        raise WeightsError(
            f"the source's pos_embed has {length} positions, which do not form {assumed} with or"
            f" without {num_prefix_tokens} for prefix tokens: give its grid (height, width)"
        )
    old_grid = fitting[0]
    notes = []
    if num_prefix_tokens and math.prod(old_grid) == length:
        prefix = source.new_zeros(1, num_prefix_tokens, source.shape[2])
        source = torch.cat((prefix, source), dim=1)
        missing = "class token" if num_prefix_tokens == 1 else f"{num_prefix_tokens} prefix tokens"
        notes.append(f"the source has no positions for the {missing}: zeros are used")
    if old_grid != tuple(new_grid):
        notes.append(
            f"positions resampled from {old_grid[0]}x{old_grid[1]} to {new_grid[0]}x{new_grid[1]}"
            " (bicubic, antialiased)"
        )
    return resample_posemb(source, old_grid, new_grid, num_prefix_tokens), notes
