"""Normalization layers and LayerScale, with timm's names."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

NormOf = Callable[[int], nn.Module]
"""A function that creates a norm layer for the given number of channels."""
EPS = 1e-6
"""The epsilon of the ViT paper, which is Flax's default. torch's default is 1e-5."""


class RMSNorm(nn.RMSNorm):
    """RMSNorm: divides (..., D) by its root mean square over D, without mean or bias.

    From Zhang & Sennrich 2019, arXiv 1910.07467.
    """

    def forward(self, x: Tensor) -> Tensor:
        # Convert to the weight's dtype, as autocast does for LayerNorm. torch has no kernel for
        # bf16 inputs with fp32 weights, and would warn at each call.
        return super().forward(x.to(self.weight.dtype))


NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": RMSNorm}
"""Maps each value of `norm_layer` to its class."""


def create_norm(norm_layer: str, dim: int) -> nn.Module:
    """Create a norm over `dim` channels. All models use the same epsilon."""
    return NORMS[norm_layer](dim, eps=EPS)


class LayerScale(nn.Module):
    """LayerScale: a learned factor for each channel (CaiT, arXiv 2103.17239, equation 4).

    init_values: the initial value of all factors.
    """

    def __init__(self, dim: int, init_values: float):
        super().__init__()
        self.init_values = init_values
        self.gamma = nn.Parameter(torch.empty(dim))

    def reset_parameters(self) -> None:
        """Set all factors to their initial value."""
        nn.init.constant_(self.gamma, self.init_values)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma
