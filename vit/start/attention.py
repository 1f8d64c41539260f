"""Choose the kernel that computes attention in this process (`train.attention`)."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit.config.schema import TrainConfig
from vit.layers.precision import AUTOCAST_DTYPE, has_bf16
from vit.model import Attention

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PROBED_TOKENS = 64


def choose_attention(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Make torch use only the kernel that `train.attention` names, or any kernel if it is `auto`.
    With `auto`, training on a CPU with bf16 instructions computes attention without a fused kernel.

    Call this before compiled graphs are traced, because each graph keeps its kernel. Raises
    ValueError if `model` has no attention, or if the kernel fails in a forward and backward pass
    with heads like those of `model`.
    """
    kernel = config.attention.removesuffix("3")
    if kernel != "auto":
        _check(model, config, kernel, device)

    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.trains_unfused = _trains_faster_unfused(layer, config, device)

    # Despite their names, these flags also apply to CPUs.
    torch.backends.cuda.enable_flash_sdp(kernel in ("auto", "flash"))
    torch.backends.cuda.enable_cudnn_sdp(kernel in ("auto", "cudnn"))
    torch.backends.cuda.enable_mem_efficient_sdp(kernel in ("auto", "efficient"))
    torch.backends.cuda.enable_math_sdp(kernel in ("auto", "math"))


def attention_kernel(model: nn.Module, config: TrainConfig, device: torch.device) -> str | None:
    """Return the name of the kernel that computes attention, or None if `model` has no attention.

    Kernels differ in speed and rounding, and `auto` may choose another one in the next version of
    torch. The name is `unfused` if training uses plain matrix products.
    """
    layers = [each for each in model.modules() if hasattr(each, "qkv")]
    if not layers or config.attention == "flash3":
        return config.attention if layers else None
    if getattr(layers[0], "trains_unfused", False):
        return "unfused"

    q, dropout = _probe(layers[0], config.precision, device)
    backend = torch._fused_sdp_choice(q, q, q, None, dropout, False)
    return {each.value: name for name, each in KERNELS.items()}[backend]


def _trains_faster_unfused(layer: Attention, config: TrainConfig, device: torch.device) -> bool:
    """Return whether `layer` trains faster with plain matrix products than with torch's fused
    kernel, whose backward pass takes 2 to 10 times as long in bf16 on a CPU
    (docs/experiments/step.md).

    CPUs that emulate bf16 are faster with the fused kernel. With dropout, torch does not use it.
    """
    is_bf16_cpu = config.precision == "bf16" and device.type == "cpu" and has_bf16(device)
    return config.attention == "auto" and is_bf16_cpu and not layer.attn_drop


def _check(model: nn.Module, config: TrainConfig, kernel: str, device: torch.device) -> None:
    """Raise ValueError if the model or this device cannot use `train.attention`."""
    layers = [each for each in model.modules() if hasattr(each, "qkv")]
    if not layers:
        raise ValueError(
            f"train.attention={config.attention} has no effect on {type(model).__name__}, which has"
            " no attention: set auto"
        )

    reason = ""  # why flash3 cannot be activated
    if config.attention == "flash3":
        try:
            torch_attention.activate_flash_attention_impl("FA3")
        except (AttributeError, ImportError, RuntimeError) as error:
            reason = f" ({error}: install FlashAttention 3 and the newest torch)"

    if not reason:
        if _works(kernel, layers[0], config.precision, device):
            return
        if config.attention == "flash3":
            torch_attention.restore_flash_attention_impl()

    working = [name for name in KERNELS if _works(name, layers[0], config.precision, device)]
    raise ValueError(
        f"train.attention={config.attention} does not work in {config.precision} on this"
        f" {device.type}{reason}: use auto or {', '.join(working)}"
    )


def _works(kernel: str, layer: Any, precision: str, device: torch.device) -> bool:
    """Return whether `kernel` succeeds in a forward and backward pass with heads like `layer`'s."""
    q, dropout = _probe(layer, precision, device)
    try:
        with sdpa_kernel(KERNELS[kernel]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about each reason for a failure
            F.scaled_dot_product_attention(q, q, q, dropout_p=dropout).sum().backward()
    except RuntimeError:
        return False
    return True


def _probe(layer: Any, precision: str, device: torch.device) -> tuple[torch.Tensor, float]:
    """Return a query tensor for `layer`'s heads, (1, heads, tokens, head_dim), and the dropout
    rate."""
    head_dim = layer.qkv.out_features // (3 * layer.num_heads)
    dropout = getattr(layer.attn_drop, "p", layer.attn_drop)  # a module in timm
    dtype = AUTOCAST_DTYPE.get(precision, torch.float32)
    shape = (1, layer.num_heads, PROBED_TOKENS, head_dim)
    return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True), dropout
