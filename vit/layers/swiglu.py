"""Gated MLPs: SwiGLU (Shazeer 2020, arXiv 2002.05202) in timm's two weight layouts."""

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """A hidden layer multiplied by its gate, applied to each token: (B, N, D) -> (B, N, D).

    EVA-02 and DINOv3 H+ use this layer, which is the same as timm's `SwiGLU`. To match the
    parameter count of an MLP, set `hidden_dim` to two thirds of the MLP's hidden width.
    """

    def __init__(self, dim: int, hidden_dim: int, drop: float):
        super().__init__()
        self.fc1_g = nn.Linear(dim, hidden_dim)
        self.fc1_x = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop1 = nn.Dropout(drop)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(F.silu(self.fc1_g(x)) * self.fc1_x(x))
        return self.drop2(self.fc2(x))


class SwiGLUPacked(nn.Module):
    """SwiGLU that computes gate and hidden layer in one product, each half of `hidden_dim` wide.

    DINOv2 g uses this layer, which is the same as timm's `SwiGLUPacked`. `hidden_dim` must be even.
    """

    def __init__(self, dim: int, hidden_dim: int, drop: float):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim // 2, dim)
        self.drop1 = nn.Dropout(drop)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        gate, hidden = self.fc1(x).chunk(2, dim=-1)
        x = self.drop1(F.silu(gate) * hidden)
        return self.drop2(self.fc2(x))
