"""The sequence of encoder blocks, with optional activation checkpointing and groups for
compilation.

`vit.model.Block` is one block. `vit.layers.drop_path` chooses the samples that each block computes,
and `vit.start.compiling` creates the groups, or turns activation checkpointing on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vit.layers.precision import AUTOCAST_DTYPE

Kept = tuple[Tensor, Tensor] | tuple[None, None]
"""The samples that keep each of a block's two branches (`vit.layers.drop_path.add_branch`)."""


class Group(nn.Module):
    """Successive blocks that are compiled as one graph.

    The sum at the end of a block and the norm at the start of the next block then become one
    kernel.
    """

    def __init__(self, blocks: Sequence[Any]):
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)

    def forward(
        self, x: Tensor, rope: Tensor | None, kept: Sequence[Kept]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the tokens after the last block, (B, N, D), and the tokens between the
        branches."""
        between = []
        for block, (attn_kept, mlp_kept) in zip(self.blocks, kept, strict=True):
            x = block.add_attn(x, rope, attn_kept)
            between.append(x.detach())
            x = block.add_mlp(x, mlp_kept)
            between.append(x.detach())

        # No caller uses the tokens between the branches. Because they are results, they are stored,
        # and the backward pass reads them. Otherwise the compiler would store each norm's fp32
        # values for the backward pass, which are as large as the tokens.
        return x, between[:-1] if torch.is_grad_enabled() else []


class Blocks(nn.Sequential):
    """The encoder blocks in order: (B, N, D) -> (B, N, D)."""

    checkpoint_every = 0
    """Every n-th block is checkpointed; 0 turns checkpointing off. A checkpointed block stores only
    its input, and the backward pass recomputes its activations."""
    residual_dtype: torch.dtype | None = None
    """The dtype of the tokens between blocks; None keeps the dtype of the first block's input."""
    groups: Sequence[Group] = ()
    """All blocks in groups. Without groups, each block is called by itself."""

    def forward(self, x: Tensor, rope: Tensor | None = None, kept: Sequence[Tensor] = ()) -> Tensor:
        """Run all blocks.

        The result has the dtype of `x`, because the last norm and the head compute in fp32.

        Args:
            rope: The table of `vit.layers.rope.RotaryEmbedding`.
            kept: The samples that keep each branch, from `vit.layers.drop_path.DropPaths`.
        """
        dtype = x.dtype
        x = x.to(self.residual_dtype or dtype)
        pairs: list[Kept] = list(zip(kept[::2], kept[1::2], strict=True))
        pairs = pairs or [(None, None)] * len(self)

        for group in self.groups:
            x, _ = group(x, rope, pairs[: len(group.blocks)])
            pairs = pairs[len(group.blocks) :]
        if self.groups:
            return x.to(dtype)

        every = self.checkpoint_every if self.training and torch.is_grad_enabled() else 0
        for number, (block, pair) in enumerate(zip(self, pairs, strict=True)):
            if every and number % every == 0:
                # `checkpoint` restores the random state, so dropout draws the same masks again.
                x = checkpoint(block, x, rope, pair, use_reentrant=False)
            else:
                x = block(x, rope, pair)
        return x.to(dtype)


def set_residual_dtype(model: nn.Module, name: str) -> None:
    """Make the blocks of `model` keep their tokens in the dtype `name` (`train.residual_dtype`).

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
