"""The sequence of encoder blocks, with stochastic depth and activation checkpointing.

`vit.model.Block` is one block. `vit.layers.drop_path` chooses the samples that each block computes,
and `vit.training.compiling` turns activation checkpointing on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit.layers.drop_path import DropPath, choose_rows, drop_path_rates
from vit.layers.precision import AUTOCAST_DTYPE


class Blocks(nn.Sequential):
    """The encoder blocks in order: (B, N, D) -> (B, N, D).

    make_block: creates a block from the drop path modules of its two branches.
    """

    checkpoint_every = 0
    """Every n-th block is checkpointed; 0 turns checkpointing off. A checkpointed block stores only
    its input, and the backward pass recomputes its activations."""
    residual_dtype: torch.dtype | None = None
    """The dtype of the tokens between blocks; None keeps that of the first block's input."""

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
        # Blocks with the same structure share one compiled graph, so even the first block, whose
        # rate is 0, gets a DropPath.
        has_masks = drop_path_rate > 0 and not has_subsets

        def make_drop_path(rate: float) -> nn.Module:
            return DropPath(rate) if has_masks else nn.Identity()

        super().__init__(*(make_block(*(make_drop_path(rate) for _ in range(2))) for rate in rates))
        self.subset_rates = rates if drop_path_rate and has_subsets else None

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        """Run all blocks. rope: the table of `vit.layers.rope.RotaryEmbedding`.

        The result has the dtype of `x`, because the last norm and the head compute in fp32.
        """
        dtype = x.dtype
        x = x.to(self.residual_dtype or dtype)
        rows: list[Tensor] = []
        if self.training and self.subset_rates:
            # Draw rows outside the blocks. Inside a block, torch.compile would make a graph for
            # each number of rows.
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
                # `checkpoint` restores the random state, so dropout draws the same masks again.
                x = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x = block(*inputs)
        return x.to(dtype)


def set_residual_dtype(model: nn.Module, name: str) -> None:
    """Make the blocks of `model` keep their tokens in `train.residual_dtype` = `name`.

    Forward passes then need autocast to bf16, because weights stay in fp32. Raises ValueError for
    timm models.
    """
    if name == "fp32":
        return
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, Blocks):
        raise ValueError(
            f"train.residual_dtype={name} does not work with timm's {type(model).__name__}: set"
            " fp32, or use a model of this project, such as vit_s16"
        )
    blocks.residual_dtype = AUTOCAST_DTYPE[name]
