"""timm's LAMB with its step counter on the device.

timm counts steps on the host, where it is unknown whether the previous update was skipped.
"""

from typing import Any

import timm.optim
import torch
from timm.optim.lamb import lamb


class Lamb(timm.optim.Lamb):
    """LAMB without gradient clipping, because the training step clips the gradients."""

    @torch.no_grad()
    def step(self, closure: object = None) -> Any:
        """Update the parameters. The optimizer state must already exist."""
        assert closure is None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue

            states = [self.state[p] for p in parameters]
            counts = [state["step"] for state in states]
            torch._foreach_add_(counts, 1)
            beta1, beta2 = group["betas"]

            # float32 would keep only four digits of 1 - 0.999, so use float64.
            count = counts[0].double()
            lamb(
                parameters,
                [p.grad for p in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                beta3=1 - beta1,
                bias_correction1=(1 - beta1**count).float(),
                bias_correction2=(1 - beta2**count).float(),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled_decay=False,
                max_lr=None,
                trust_clip=False,
                always_adapt=False,
                caution=False,
            )
