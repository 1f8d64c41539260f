"""The MAP head: a learned query attends to all patches and replaces the class token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.layers.norm import NormOf


class AttentionPool(nn.Module):
    """Multihead attention pooling: (B, h*w, D) -> (B, D).

    From Zhai et al. 2022 (arXiv 2106.04560, section 3.2) and the Set Transformer (arXiv
    1810.00825); google-research/big_vision:big_vision/models/vit.py (`MAPHead`). Weight names match
    timm's `AttentionPoolLatent`.

    mlp: the MLP after the attention, (B, D) -> (B, D).
    """

    def __init__(self, dim: int, num_heads: int, mlp: nn.Module, norm: NormOf):
        super().__init__()
        self.num_heads = num_heads
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = norm(dim)
        self.mlp = mlp

    def reset_parameters(self) -> None:
        """Initialize the query: normal, std 1 / sqrt(dim), truncated at two stds, as in timm."""
        std = self.latent.shape[2] ** -0.5
        nn.init.trunc_normal_(self.latent, std=std, a=-2 * std, b=2 * std)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query, (1, heads, 1, head_dim), and keys and values, (B, heads, h*w,
        head_dim)."""
        q = self.q(self.latent).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        q = q.expand(x.shape[0], -1, -1, -1)
        x = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return (x + self.mlp(self.norm(x)))[:, 0]
