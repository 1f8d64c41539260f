"""The exponential moving average (EMA) of the weights.

The training step updates the EMA after each update of the model. The EMA is evaluated like the
model and saved in `weights/*_ema.safetensors`. `Ema` refers to the model's parameter objects, which
DDP and torch.compile keep. FSDP2's `fully_shard` replaces these objects, so an EMA created before
that call would never change.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from vit.config.schema import EmaConfig


def create_average(model: nn.Module, config: EmaConfig, steps_per_epoch: int) -> Ema | None:
    """Return a new EMA of `model`, which must not be wrapped or compiled yet, or None if
    `ema.decay` is off."""
    if config.decay is None:
        return None
    return Ema(
        model,
        config.decay,
        config.warmup,
        every_steps=config.every_steps,
        after_steps=round((config.after_epochs or 0) * steps_per_epoch),
        steps_per_epoch=steps_per_epoch,
    )


class Ema:
    """An EMA of the weights of `model`, stored as the fp32 copy `module`.

    `decay` is applied at each update, as in DeiT and timm. With `warmup`, the decay starts lower.
    With `True`, it grows as in TensorFlow's ExponentialMovingAverage with `num_updates`; with a
    number, which is a power, as in timm's ModelEmaV3 (timm/utils/model_ema.py, get_decay). The EMA
    is updated at every `every_steps`-th step of an epoch. Until `after_steps`, the EMA is a copy of
    the weights (pytorch/vision:references/classification/train.py; timm's update_after_step).
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        warmup: bool | float = False,
        *,
        every_steps: int = 1,
        after_steps: int = 0,
        steps_per_epoch: int = 1,
    ):
        self.decay = decay
        self.warmup = warmup
        self.every_steps = every_steps
        self.after_steps = after_steps
        self.steps_per_epoch = steps_per_epoch

        # The copies still require gradients, like the model's parameters, because torch.compile
        # would make another graph for copies that do not. `update` and evaluations run without
        # gradients.
        self.module = copy.deepcopy(model).float().eval()

        # A frozen parameter never changes, so its copy is already its average.
        pairs = zip(self.module.parameters(), model.parameters(), strict=True)
        trained = [pair for pair in pairs if pair[1].requires_grad]
        self._averaged: list[Tensor] = [averaged for averaged, _ in trained]
        self._followed = [followed for _, followed in trained]

        # Buffers outside the state dict are constants, such as drop path rates.
        changing = self.module.state_dict().keys()
        followed = dict(model.named_buffers())
        self._buffers = [
            (buffer, followed[name])
            for name, buffer in self.module.named_buffers()
            if name in changing
        ]

    def decay_at(self, step: int) -> float:
        """Return the decay at `step`. With warmup: min(decay, (1 + t) / (10 + t)), t = step + 1.

        This warmup reaches a decay of 0.9999 only after 89,989 steps. With a power p as warmup, the
        decay is timm's: min(decay, 1 - (1 + t)^-p), t = steps since `after_steps`.
        """
        # At the first update after `after_steps`, the EMA contains older weights, so copy the
        # model's weights then too.
        if self.after_steps and step - self.every_steps < self.after_steps:
            return 0.0
        if not self.warmup:
            return self.decay
        if self.warmup is True:
            return min(self.decay, (2.0 + step) / (11.0 + step))
        passed = step - self.after_steps
        return min(self.decay, 1.0 - (1.0 + passed) ** -self.warmup)

    def first_share(self, total_steps: int) -> float:
        """Return the share of the initial weights in the EMA after `total_steps`.

        The share is 0 if the EMA has a warmup, or while it is a copy of the weights.
        """
        num_steps = total_steps - self.after_steps
        return (
            0.0 if self.warmup or num_steps <= 0 else self.decay ** (num_steps / self.every_steps)
        )

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the EMA after the model's update at `step`, if an EMA update is due."""
        if self.every_steps > 1 and step % self.steps_per_epoch % self.every_steps:
            return

        # Launch a few kernels in total, not one for each of about 150 parameters.
        torch._foreach_lerp_(
            self._averaged,
            [parameter.detach() for parameter in self._followed],
            1.0 - self.decay_at(step),
        )
        for averaged, value in self._buffers:
            averaged.copy_(value)
