"""The encoder's blocks in their order, with the samples that each block computes, and the
activations that it keeps for the backward pass.

`vit.model.Block` is one block, and `vit.layers.drop_path` draws the samples.
`vit.training.compiling` sets which activations are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit.layers.drop_path import DropPath, choose_rows, drop_path_rates


class Blocks(nn.Sequential):
    """The encoder's blocks, one after the other: (B, N, D) -> (B, N, D).

    make_block: creates a block with the drop path of each of its two branches.
    """

    checkpoint_every = 0
    """Every `checkpoint_every`-th block keeps only its input, and the backward pass computes the
    rest again. 0: no block does."""

    def __init__(
        self,
        make_block: Callable[[nn.Module, nn.Module], nn.Module],
        depth: int,
        drop_path_rate: float,
        drop_path_schedule: str,
        drop_path_form: str,
    ):
        rates = drop_path_rates(drop_path_rate, depth, drop_path_schedule)
        has_subsets = drop_path_form == "subset"
        # The first block gets a DropPath although its rate is 0, because blocks of one structure
        # share one compiled graph.
        has_masks = drop_path_rate > 0 and not has_subsets

        def make_drop_path(rate: float) -> nn.Module:
            return DropPath(rate) if has_masks else nn.Identity()

        super().__init__(*(make_block(*(make_drop_path(rate) for _ in range(2))) for rate in rates))
        self.subset_rates = rates if drop_path_rate and has_subsets else None

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """rope: the table of `vit.layers.rope.RotaryEmbedding`, for all samples or for each."""
        rows: list[Tensor] = []
        if self.training and self.subset_rates:
            # Drawn outside of the blocks, so that they do not read the number of rows, for each of
            # which torch.compile would make a graph.
            both_branches = [rate for rate in self.subset_rates for _ in range(2)]
            rows = choose_rows(x.shape[0], both_branches, x.device)
        every = self.checkpoint_every if self.training and torch.is_grad_enabled() else 0
        for number, block in enumerate(self):
            block_rows = rows[2 * number : 2 * number + 2]
            block_rope = rope
            if rope is not None and block_rows and rope.shape[1] > 1:
                block_rope = rope.index_select(1, block_rows[0])  # samples that compute attention
            inputs = (x, block_rope, *block_rows)
            if every and number % every == 0:
                # `checkpoint` restores the generators' states, so dropout draws the same again.
                x = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x = block(*inputs)
        return x
