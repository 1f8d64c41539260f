"""Initialize weights by the rules of timm, JAX or torch, or skip the initialization of a model
that is loaded from a checkpoint."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_DRAWS = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
)
"""The functions in torch.nn.init that draw random numbers."""


@contextmanager
def undrawn() -> Iterator[None]:
    """Skip the initialization of parameters inside this context, because a checkpoint will fill
    them.

    Buffers are still initialized, because some are not in the checkpoint. Initializing the
    parameters takes one second on one core for ViT-B and seven seconds for ViT-H.
    """

    def skipping_parameters(draw: Any) -> Any:
        def draw_unless_parameter(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
            return tensor if isinstance(tensor, nn.Parameter) else draw(tensor, *args, **kwargs)

        return draw_unless_parameter

    draws = {name: getattr(nn.init, name) for name in _DRAWS}
    for name, draw in draws.items():
        setattr(nn.init, name, skipping_parameters(draw))

    try:
        yield
    finally:
        for name, draw in draws.items():
            setattr(nn.init, name, draw)


def lecun_normal_(weight: Tensor) -> None:
    """Draw `weight`, (out, in, ...), from a normal distribution with variance 1 / fan-in, truncated
    at two standard deviations (Flax's `lecun_normal`)."""
    # Truncation multiplies the standard deviation by 0.8796. Flax corrects for this factor, but
    # torch does not.
    std = math.sqrt(1.0 / weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def draw_as(
    source: str | None, model: nn.Module, patches: nn.Conv2d, heads: Iterable[nn.Linear]
) -> None:
    """Reinitialize the weights for which `source` (a value of `weight_init`) has its own rule."""
    if source == "timm":
        _draw_as_timm(patches, heads)
    elif source == "jax":
        _draw_as_jax(model, heads)
    elif source == "mha":
        _draw_as_timm(patches, heads)
        _draw_as_multihead_attention(model)


def _draw_as_timm(patches: nn.Conv2d, heads: Iterable[nn.Linear]) -> None:
    """Initialize patch embedding and heads as timm, DeiT and DeiT III do.

    The patch embedding uses torch's default for convolutions: uniform, std 1 / sqrt(3 fan-in), bias
    included. The heads use a normal distribution, std 0.02 (timm:timm/models/vision_transformer.py,
    `init_weights_vit_timm`; facebookresearch/deit:models_v2.py, `_init_weights`).
    """
    patches.reset_parameters()
    for head in heads:
        nn.init.trunc_normal_(head.weight, std=0.02)


def _draw_as_jax(model: nn.Module, heads: Iterable[nn.Linear]) -> None:
    """Initialize all linear layers of `model` except `heads` as the ViT paper's Flax code does.

    The rule is Xavier uniform, separately for queries, keys and values, and LeCun normal for the
    pre-logits layer. MLP biases are normal, std 1e-6
    (google-research/vision_transformer:vit_jax/models_vit.py; big_vision:models/vit.py).
    """
    are_heads = set(heads)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module in are_heads:
            continue

        num_maps = {"qkv": 3, "kv": 2}.get(name.rpartition(".")[2], 1)
        for weight in module.weight.chunk(num_maps):
            draw = lecun_normal_ if name == "pre_logits.fc" else nn.init.xavier_uniform_
            draw(weight)
        if ".mlp." in name:
            nn.init.normal_(module.bias, std=1e-6)


def _draw_as_multihead_attention(model: nn.Module) -> None:
    """Initialize queries, keys and values of `model` as torch.nn.MultiheadAttention does.

    The rule is Xavier uniform over their joint matrix, (3 embed_dim, embed_dim). A model that draws
    its nn.Linear layers with std 0.02 leaves this matrix unchanged, because it is a parameter
    without an nn.Linear (pytorch/pytorch:torch/nn/modules/activation.py, `_reset_parameters`).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(".qkv"):
            nn.init.xavier_uniform_(module.weight)
