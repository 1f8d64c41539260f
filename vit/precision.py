"""Number formats of training: autocast, and the loss scale that fp16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP16_SCALE = 2.0**16
"""Start value, as in torch.amp.GradScaler."""
FP16_GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles, as in torch.amp.GradScaler."""


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return the context in which `precision` (fp32, bf16 or fp16) is used on `device`."""
    if precision not in AUTOCAST_DTYPE:
        return nullcontext()
    return torch.autocast(device.type, AUTOCAST_DTYPE[precision])


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which autocast is off on `device`."""
    if device.type == "meta":  # has no autocast
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class LossScale:
    """Dynamic loss scale (Micikevicius et al. 2018, section 3.2); constant 1 except for fp16.

    Both numbers are () float32 tensors on `device`, so that following an overflow needs no
    host-device sync. A checkpoint holds them.
    """

    def __init__(self, precision: str, device: torch.device):
        self.is_dynamic = precision == "fp16"
        self.value = torch.tensor(FP16_SCALE if self.is_dynamic else 1.0, device=device)
        self.steps_since_overflow = torch.tensor(0.0, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Halve the scale if `found_inf` is 1, double it after 2,000 steps in which it was 0."""
        if not self.is_dynamic:
            return
        # Arithmetic in place of `if`: a branch on `found_inf` would wait for the device.
        self.steps_since_overflow.add_(1).mul_(1 - found_inf)
        grow = (self.steps_since_overflow >= FP16_GROWTH_STEPS).float()
        self.value.mul_(1 - 0.5 * found_inf).mul_(1 + grow)
        self.steps_since_overflow.mul_(1 - grow)
