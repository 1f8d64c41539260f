"""Fill models with random weights, so that tests notice missing parts, and compute the relative
difference between two results."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill all weights with values other than 0 and 1. With zeros and ones, a missing bias, scale
    or head would go unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = (
                1.0
                if name in ("pos_embed", "cls_token", "reg_token")
                else parameter[0].numel() ** -0.5
                if parameter.ndim > 1
                else 0.1
            )
            parameter.normal_(
                1.0 if "norm" in name and name.endswith("weight") else 0.0, std, generator=generator
            )
    return model.eval()


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
