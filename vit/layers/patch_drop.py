"""Patch dropout: in training, each image keeps a random part of its patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PatchDropout(nn.Module):
    """Leaves out patches, and their rotary positions: (B, N, D) -> (B, P + kept, D).

    Each image keeps its P prefix tokens and (1 - rate) of its patches, at least one, drawn by
    itself; attention costs less by the square (Liu et al. 2022, arXiv 2208.07220; timm's
    `PatchDropout`). Nothing is scaled up: tokens are attended to, not summed. Does nothing in
    evaluation.
    """

    def __init__(self, rate: float, num_prefix_tokens: int):
        super().__init__()
        self.rate = rate
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if not self.training:
            return x, rope
        first = self.num_prefix_tokens
        batch_size, num_tokens, _ = x.shape
        num_patches = num_tokens - first
        num_kept = max(int(num_patches * (1.0 - self.rate)), 1)
        order = torch.rand(batch_size, num_patches, device=x.device).argsort(dim=1)
        # Blocks do not mind the order of tokens, so it stays as drawn; only the prefix is in place.
        prefix = torch.arange(first, device=x.device).expand(batch_size, -1)
        kept = torch.cat((prefix, order[:, :num_kept] + first), dim=1)
        x = x.gather(1, kept.unsqueeze(2).expand(-1, -1, x.shape[2]))
        # (2, 1, 1, N, head_dim) -> (2, B, 1, P + kept, head_dim)
        return x, rope if rope is None else rope[:, 0, 0, kept].unsqueeze(2)
