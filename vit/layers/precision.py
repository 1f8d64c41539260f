"""Number formats of training: autocast, fp16's loss scale, and notes about emulated formats."""

from __future__ import annotations

import timeit
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP16_SCALE = 2.0**16
"""Start value, as in torch.amp.GradScaler."""
FP16_GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles, as in torch.amp.GradScaler."""
SLOW_PRECISION = 3.0
"""Factor over the time of fp32 above which a precision counts as emulated on a CPU."""
BF16_CAPABILITY = (8, 0)
"""NVIDIA's first compute capability with bf16 (Ampere). Older GPUs also have no attention kernel
for bf16 that avoids the N x N matrix."""


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

    Both numbers are () float32 tensors on `device`, so that an overflow needs no host-device sync.
    A checkpoint has both.
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


def precision_note(
    precision: str, device: torch.device, flag: str = "train.precision"
) -> str | None:
    """Return a note if `device` only emulates `precision` (fp32, bf16 or fp16), else None.

    On a CPU it measures a matrix product of a ViT-B's MLP, in a tenth of a second, because torch
    reports the instructions of a CPU, but not whether its kernels use them. `flag`: the setting's
    name in the note.
    """
    separator = " " if flag.startswith("--") else "="
    if device.type == "cuda":
        # AMD's compute capabilities have a different meaning.
        if precision != "bf16" or torch.version.hip is not None:
            return None
        capability = torch.cuda.get_device_capability(device)
        if capability >= BF16_CAPABILITY:
            return None
        major, minor = capability
        return (
            f"this GPU ({torch.cuda.get_device_name(device)}, compute capability {major}.{minor})"
            " has no instructions for bf16, which is emulated: many times slower, in more memory:"
            f" set {flag}{separator}fp16"
        )
    if device.type != "cpu" or precision not in AUTOCAST_DTYPE:
        return None
    factor = _matmul_s(AUTOCAST_DTYPE[precision]) / _matmul_s(torch.float32)
    if factor < SLOW_PRECISION:
        return None
    cpu = torch.backends.cpu.get_cpu_capability()
    return (
        f"this CPU ({cpu}) has no instructions for {precision}, which is emulated: matrix products"
        f" take about {factor:.0f} times as long as in fp32: set {flag}{separator}fp32"
    )


def _matmul_s(dtype: torch.dtype) -> float:
    """Return the time of 16 tokens in the first layer of ViT-B's MLP, the best of three runs."""
    tokens = torch.ones(16, 768, dtype=dtype)
    weight = torch.ones(768, 3072, dtype=dtype)
    return min(timeit.repeat(lambda: tokens @ weight, repeat=3, number=1))
