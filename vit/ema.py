"""Exponential moving average of the weights.

The data's story: after each update the step lets the average follow the model; evaluation and `weights/*_ema.safetensors` read it. It
works on parameter objects, not on names, so wrapping and compiling the model cannot hide them from it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Ema:
    """A copy of `model`, in fp32, that follows it. `module` is the copy."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.module = copy.deepcopy(model).float().eval().requires_grad_(False)
        self._averaged: list[Tensor] = list(self.module.parameters())
        self._followed = list(model.parameters())
        self._buffers = list(zip(self.module.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the model after the update at `step`, with decay min(decay, (1 + t) / (10 + t)), t = step + 1: an average over the
        whole run while it is young (TensorFlow's ExponentialMovingAverage, `num_updates`)."""
        decay = min(self.decay, (2.0 + step) / (11.0 + step))
        torch._foreach_lerp_(self._averaged, [p.detach() for p in self._followed], 1.0 - decay)
        for averaged, followed in self._buffers:
            averaged.copy_(followed)
