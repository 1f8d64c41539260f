"""Exponential moving average of the weights.

The data's story: after each update the step lets the average follow the model; evaluation and
`weights/*_ema.safetensors` read it. It works on parameter objects, not on names, so wrapping and
compiling the model cannot hide them from it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Ema:
    """A copy of `model`, in fp32, that follows it. `module` is the copy.

    `decay` is that of each update, as in DeiT and timm; with `warmup` an average over the whole run
    while it is young (TensorFlow's ExponentialMovingAverage with `num_updates`).
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool = False):
        self.decay = decay
        self.warmup = warmup
        self.module = copy.deepcopy(model).float().eval().requires_grad_(False)
        self._averaged: list[Tensor] = list(self.module.parameters())
        self._followed = list(model.parameters())
        changing = self.module.state_dict().keys()  # the others are constants, as drop path's rates
        here, there = dict(self.module.named_buffers()), dict(model.named_buffers())
        self._buffers = [(here[name], there[name]) for name in here if name in changing]

    def decay_at(self, step: int) -> float:
        """Decay of the update at `step`; in the warm-up min(decay, (1 + t) / (10 + t)), t = step +
        1.

        The warm-up is long: it needs 89,989 steps to come to a decay of .9999.
        """
        return min(self.decay, (2.0 + step) / (11.0 + step)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the model after the update at `step`."""
        followed = [parameter.detach() for parameter in self._followed]
        torch._foreach_lerp_(self._averaged, followed, 1.0 - self.decay_at(step))
        for averaged, value in self._buffers:
            averaged.copy_(value)
