"""Fit the position embeddings of a weights file to a model's grid and prefix tokens.

1. Decide which grid a file's positions have, and whether they include
   positions of prefix tokens                                                  `readings`
2. Add prefix tokens' positions to these tokens if the model has no positions
   for them, and resample the patches' positions to the model's grid           `fit_positions`
"""

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from vit.layers.posemb import resample_posemb
from vit.system.files import WeightsError

PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")


class PositionReading(NamedTuple):
    """A possible meaning of a number of positions."""

    grid: tuple[int, int]
    """The (h, w) of the patches."""
    num_prefix: int
    """The number of positions of prefix tokens, which precede those of the patches."""

    def __str__(self) -> str:
        prefix = f" and {self.num_prefix} for prefix tokens" if self.num_prefix else ""
        return f"{self.grid[0]}x{self.grid[1]}{prefix}"


def readings(
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    model_grid: tuple[int, int],
    stated: tuple[int, int] | None,
) -> list[PositionReading]:
    """List the possible meanings of the source's positions, the most likely first; [] if none fits.

    If the file states a grid, no other grid is possible. Otherwise, as in timm, the model's own
    number of prefix tokens with positions comes before those of other models (DeiT III's tokens
    have no positions). The model's own grid comes before a square, which most published weights
    have.

    Args:
        source, target: State dicts of the file and the model, with `pos_embed`.
        model_grid: (h, w) of the model's patches.
        stated: (h, w) that the file or its config states, or None.
    """
    length = source["pos_embed"].shape[1]
    own = target["pos_embed"].shape[1] - math.prod(model_grid)
    tokens = {} if own else _prefix_tokens(source, target)
    # In DINOv2's own files, registers have no positions, but the class token has one.
    prefixes = (own, *reversed(_last_positions(tokens).values()), 0)

    found: list[PositionReading] = []
    for prefix in prefixes:
        side = math.isqrt(max(length - prefix, 1))
        grids = [model_grid, (side, side)] if stated is None else [stated]
        found += [PositionReading(grid, prefix) for grid in grids]

    return [
        each for each in dict.fromkeys(found) if math.prod(each.grid) + each.num_prefix == length
    ]


def fit_positions(
    source: dict[str, Tensor],
    target: Mapping[str, Tensor],
    new_grid: tuple[int, int] | None,
    grid: tuple[int, int] | None,
) -> list[str]:
    """Replace `source["pos_embed"]`, (1, n, D), by positions for the model, and list adaptations.

    Positions of the same number and grid are copied. If only the source has positions for prefix
    tokens, they are added to these tokens; if only the model has them, they are zero.

    Args:
        source, target: State dicts of the file and the model.
        new_grid, grid: (h, w) of the model's patches and of the source's positions; None if
            unknown.

    Raises:
        WeightsError: the source's number of positions does not fit a grid.
    """
    positions = source["pos_embed"]
    shape = target["pos_embed"].shape
    fits = positions.ndim == 3 and positions.shape[0] == 1 and positions.shape[2] == shape[2]
    if new_grid is None or not fits:
        return []  # `load_weights` reports the different shapes.

    num_own = shape[1] - math.prod(new_grid)
    tokens = _prefix_tokens(source, target)
    possible = readings(source, target, new_grid, grid)
    if not possible and _tokens_differ(source, target):
        return []  # `load_weights` reports the tokens.
    if not possible:
        raise WeightsError(_unfit(positions.shape[1], grid))

    (old_grid, num_prefix), *others = possible
    ambiguity = (
        f"nothing states the grid of the source's {positions.shape[1]} positions: read as"
        f" {possible[0]}, but {' or '.join(map(str, others))} also fits; {_STATE_SIZE}"
    )
    notes = [ambiguity] if others else []

    if num_prefix > num_own:
        for name, last_position in _last_positions(tokens).items():
            if last_position <= num_prefix:
                of_token, positions = positions.tensor_split([tokens[name].shape[1]], dim=1)
                source[name] = tokens[name] + of_token.to(tokens[name].dtype)
        notes.append(
            f"the model has no positions for the {_prefix(num_prefix)}: added the source's to the"
            " tokens"
        )
    elif num_prefix < num_own:
        positions = torch.cat((positions.new_zeros(1, num_own, shape[2]), positions), dim=1)
        notes.append(f"the source has no positions for the {_prefix(num_own)}: zeros are used")

    if old_grid != tuple(new_grid):
        notes.append(
            f"positions resampled from {old_grid[0]}x{old_grid[1]} to {new_grid[0]}x{new_grid[1]}"
            " (bicubic, antialiased)"
        )
    source["pos_embed"] = resample_posemb(positions, old_grid, new_grid, num_own)
    return notes


def _prefix_tokens(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the source's class token and registers, (1, n, D) each, in the model's dtype."""
    tokens = {
        name: source[name].to(target[name].dtype)
        for name in ("cls_token", "reg_token")
        if name in source and name in target
    }
    shape = (1, source["pos_embed"].shape[-1])
    return {name: token for name, token in tokens.items() if token.shape[::2] == shape}


def _last_positions(tokens: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of tokens up to and including each of `tokens`, (1, n, D) each."""
    return dict(zip(tokens, accumulate(token.shape[1] for token in tokens.values()), strict=True))


def _tokens_differ(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> bool:
    """Return whether the source and the model have different numbers of prefix tokens."""
    theirs = {name: source[name].shape for name in PREFIX_TOKENS if name in source}
    ours = {name: target[name].shape for name in PREFIX_TOKENS if name in target}
    return theirs != ours


def _prefix(num_tokens: int) -> str:
    return "class token" if num_tokens == 1 else f"{num_tokens} prefix tokens"


_STATE_SIZE = (
    'to state the grid, put a config.json with {"image_size": [HEIGHT, WIDTH]} next to the weights'
)


def _unfit(length: int, grid: tuple[int, int] | None) -> str:
    """Return the message for a number of positions that fits no grid."""
    stated = "" if grid is None else f"a grid of {grid[0]}x{grid[1]}"
    return (
        f"the source's pos_embed has {length} positions, which do not form"
        f" {stated or 'a square grid'} with or without those of prefix tokens:"
        f" {'state the grid of its own images' if stated else _STATE_SIZE}"
    )
