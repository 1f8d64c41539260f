"""Training precision: autocast, the fp16 loss scale, and a warning about emulated formats."""

import timeit
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

AUTOCAST_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP16_SCALE = 2.0**16
"""The initial loss scale, as in torch.amp.GradScaler."""
FP16_GROWTH_STEPS = 2000
"""The loss scale doubles after this many steps without overflow, as in torch.amp.GradScaler."""
SLOW_PRECISION = 3.0
"""On a CPU, a precision that is more than this many times slower than fp32 counts as emulated."""
BF16_CAPABILITY = (8, 0)
"""The first compute capability of NVIDIA GPUs with bf16 (Ampere). Older GPUs also have no bf16
attention kernel that avoids the N x N matrix."""


def has_bf16(device: torch.device) -> bool:
    """Return whether `device` trains faster in bf16 than in fp32, judged only by its description.

    CPUs with AVX-512's bf16 instructions, which all CPUs with AMX have, train faster in bf16
    (docs/experiments/step.md). Other CPUs emulate bf16, or were not measured.
    """
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    # Compute capabilities of AMD GPUs have a different meaning.
    return device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return the autocast context for `precision` (fp32, bf16 or fp16) on `device`."""
    assert precision != "auto", "the caller chooses a precision for its device"
    dtype = AUTOCAST_DTYPE.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which autocast is off on `device`."""
    # The meta device has no autocast.
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def branch_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's output for `x`, which is autocast's dtype if autocast is
    on."""
    kind = x.device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else x.dtype


def weight_dtype(*modules: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter in `modules`.

    A layer that replaces another one may have no `weight`: an identity, several layers, an adapter.
    Weights of quantized layers are not parameters.
    """
    parameters = (weight for module in modules for weight in module.parameters())
    return next(weight.dtype for weight in parameters if weight.is_floating_point())


class LossScale:
    """A dynamic loss scale (Micikevicius et al. 2018, section 3.2). Without fp16, the scale is
    always 1.

    The scale and the step counter are () float32 tensors on `device`, so that an overflow needs no
    host-device sync. Checkpoints store both tensors.
    """

    def __init__(self, precision: str, device: torch.device):
        self.is_dynamic = precision == "fp16"
        self.value = torch.tensor(FP16_SCALE if self.is_dynamic else 1.0, device=device)
        self.steps_since_overflow = torch.tensor(0.0, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Halve the scale if `found_inf` is 1, and double it after 2,000 steps without overflow."""
        if not self.is_dynamic:
            return
        # A branch on `found_inf` would wait for the device, so use arithmetic instead of `if`.
        self.steps_since_overflow.add_(1).mul_(1 - found_inf)
        grow = (self.steps_since_overflow >= FP16_GROWTH_STEPS).float()
        self.value.mul_(1 - 0.5 * found_inf).mul_(1 + grow)
        self.steps_since_overflow.mul_(1 - grow)


def precision_note(
    precision: str, device: torch.device, flag: str = "train.precision"
) -> str | None:
    """Return a warning if `device` only emulates `precision` (fp32, bf16 or fp16), else None.

    On a CPU, the function times a matrix product of ViT-B's MLP for a tenth of a second, because
    torch reports the CPU's instructions but not whether its kernels use them. `flag`: the name of
    the setting in the warning.
    """
    separator = " " if flag.startswith("--") else "="
    if device.type == "cuda":
        if precision != "bf16" or has_bf16(device):
            return None
        major, minor = torch.cuda.get_device_capability(device)
        return (
            f"this GPU ({torch.cuda.get_device_name(device)}, compute capability {major}.{minor})"
            " has no bf16 instructions, so bf16 is emulated, which is many times slower and uses"
            f" more memory: set {flag}{separator}fp16"
        )

    if device.type != "cpu" or precision not in AUTOCAST_DTYPE:
        return None
    factor = _matmul_s(AUTOCAST_DTYPE[precision]) / _matmul_s(torch.float32)
    if factor < SLOW_PRECISION:
        return None

    return (
        f"this CPU ({torch.backends.cpu.get_cpu_capability()}) has no {precision} instructions, so"
        f" {precision} is emulated: matrix products take about {factor:.0f} times as long as in"
        f" fp32: set {flag}{separator}fp32"
    )


def _matmul_s(dtype: torch.dtype) -> float:
    """Return the time for 16 tokens in the first layer of ViT-B's MLP, as the fastest of three
    runs."""
    tokens = torch.ones(16, 768, dtype=dtype)
    weight = torch.ones(768, 3072, dtype=dtype)
    return min(timeit.repeat(lambda: tokens @ weight, repeat=3, number=1))
