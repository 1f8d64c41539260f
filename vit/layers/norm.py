"""Norms over the channels of a token, and learned factors of channels, by timm's names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

NormOf = Callable[[int], nn.Module]
"""Creates a norm over a number of channels."""
EPS = 1e-6
"""The paper's epsilon, which is Flax's default; torch's is 1e-5."""


class RMSNorm(nn.RMSNorm):
    """(..., D) -> (..., D), divided by the root of the mean square, without a mean or a bias.

    Zhang & Sennrich 2019, arXiv 1910.07467.
    """

    def forward(self, x: Tensor) -> Tensor:
        # In the weight's dtype, as autocast does for LayerNorm: torch has no kernel for bf16 with
        # fp32 weights, and would warn at each call.
        return super().forward(x.to(self.weight.dtype))


NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": RMSNorm}
"""`norm_layer` -> its class."""


def create_norm(norm_layer: str, dim: int) -> nn.Module:
    """Create the norm of that name over `dim` channels; all models use the same epsilon."""
    return NORMS[norm_layer](dim, eps=EPS)


class LayerScale(nn.Module):
    """(B, N, D) -> (B, N, D), each channel times its factor (CaiT, arXiv 2103.17239, equation 4).

    init_values: the factors at the start.
    """

    def __init__(self, dim: int, init_values: float):
        super().__init__()
        self.init_values = init_values
        self.gamma = nn.Parameter(torch.empty(dim))

    def reset_parameters(self) -> None:
        """Fill the factors, also after `to_empty`."""
        nn.init.constant_(self.gamma, self.init_values)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma
