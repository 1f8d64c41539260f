"""Fit the position embeddings of a weights file to a model's grid and prefix tokens.

If only the source has positions for the class token and registers, these positions are added to the
tokens. The positions of the grid are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from vit.layers.posemb import resample_posemb
from vit.system.files import WeightsError


def fold_prefix_positions(
    source: dict[str, Tensor],
    target: Mapping[str, Tensor],
    new_grid: tuple[int, int] | None,
    grid: tuple[int, int] | None,
) -> list[str]:
    """Add the class token's and registers' positions to these tokens if the model lacks positions.

    Returns a note if `source` was changed. source, target: state dicts of file and model. new_grid,
    grid: (h, w) of the model's patches and of the source's positions, or None if unknown.
    """
    positions = source["pos_embed"]
    names = [name for name in ("cls_token", "reg_token") if name in source and name in target]
    tokens = {name: source[name].to(target[name].dtype) for name in names}
    widths = {(value.ndim, value.shape[0], value.shape[-1]) for value in tokens.values()}
    if (
        new_grid is None
        or math.prod(new_grid) != target["pos_embed"].shape[1]
        or widths != {(positions.ndim, 1, positions.shape[-1])}
    ):
        return []
    num_tokens = sum(value.shape[1] for value in tokens.values())
    length = positions.shape[1]
    # As in `fit_posemb`, try the caller's grid, then a square, then the model's grid.
    squares = [(math.isqrt(n),) * 2 for n in (length, length - num_tokens) if n > 0]
    candidates = [*squares, new_grid] if grid is None else [grid]
    lengths = [math.prod(hw) for hw in candidates if math.prod(hw) in (length, length - num_tokens)]
    if not lengths or lengths[0] == length:
        return []
    first = 0
    for name, token in tokens.items():
        token_positions = positions[:, first : first + token.shape[1]]
        source[name] = token + token_positions.to(token.dtype)
        first += token.shape[1]
    source["pos_embed"] = positions[:, num_tokens:]
    prefix = "class token" if num_tokens == 1 else f"{num_tokens} prefix tokens"
    return [f"the model has no positions for the {prefix}: added the source's to the tokens"]


def fit_posemb(
    source: Tensor, target: Tensor, new_grid: tuple[int, int] | None, grid: tuple[int, int] | None
) -> tuple[Tensor, list[str]]:
    """Resample `source` (1, n, D) to the positions of `target`, and return the result with a note
    per adaptation.

    new_grid, grid: (h, w) of the model's patches and of the source's positions; None if unknown.
    Raises WeightsError if the source's number of positions does not fit a grid.
    """
    fits = source.ndim == 3 and source.shape[0] == 1 and source.shape[2] == target.shape[2]
    if new_grid is None or not fits:
        return source, []  # `load_weights` reports the different shapes.
    num_prefix_tokens = target.shape[1] - math.prod(new_grid)
    length = source.shape[1]
    length_of_grid = max(length - num_prefix_tokens, 0)
    # The source may have positions for its prefix tokens (ViT, DeiT) or not (DeiT III). If `grid`
    # is None, try a square before the model's grid: 256 positions may be 8x32 or 16x16, and
    # published weights use squares.
    squares = [(math.isqrt(number),) * 2 for number in (length_of_grid, length)]
    candidates = [*squares, new_grid] if grid is None else [grid]
    fitting = [hw for hw in candidates if math.prod(hw) in (length_of_grid, length)]
    if not fitting:
        assumed = "a square grid" if grid is None else f"a grid of {grid[0]}x{grid[1]}"
        raise WeightsError(
            f"the source's pos_embed has {length} positions, which do not form {assumed} with or"
            f" without {num_prefix_tokens} for prefix tokens: pass its grid (height, width)"
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
