"""Draws of initial weights that torch does not have."""

from __future__ import annotations

import math

from torch import Tensor, nn


def lecun_normal_(weight: Tensor) -> None:
    """Draw `weight`, (out, in, ...), from a normal distribution of variance 1 / fan-in, cut at two
    standard deviations, as Flax does (`lecun_normal`)."""
    # Cut at two standard deviations, it has 0.8796 of its original one. Flax divides by that, torch
    # does not.
    std = math.sqrt(1.0 / weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
