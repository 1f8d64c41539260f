"""LayerScale: a learned factor per channel of a residual branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
