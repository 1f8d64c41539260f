"""The encoder's blocks in their order: which samples each one computes, and what it keeps for the
backward pass.

`vit.model.Block` is one block; `vit.layers.drop_path` draws the samples; `vit.step` sets what is
kept.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit.layers.drop_path import choose_rows


class Blocks(nn.Sequential):
    """The encoder's blocks, one after the other: (B, N, D) -> (B, N, D).

    subset_rates: of each block, if drop path has the form "subset".
    """

    checkpoint_every = 0
    """Every so many blocks, one keeps only its input for the backward pass, which computes the rest
    again. 0: none does."""

    def __init__(self, blocks: Iterable[nn.Module], subset_rates: list[float] | None):
        super().__init__(*blocks)
        self.subset_rates = subset_rates

    def forward(self, x: Tensor) -> Tensor:
        rows: list[Tensor] = []
        if self.training and self.subset_rates:
            # Drawn here, and not in the blocks: so they do not read the number of rows, which
            # torch.compile would make a graph for each of.
            both_branches = [rate for rate in self.subset_rates for _ in range(2)]
            rows = choose_rows(x.shape[0], both_branches, x.device)
        every = self.checkpoint_every if self.training and torch.is_grad_enabled() else 0
        for number, block in enumerate(self):
            inputs = (x, *rows[2 * number : 2 * number + 2])
            if every and number % every == 0:
                # A second pass draws what the first one drew: it restores the generators' states.
                x = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x = block(*inputs)
        return x
