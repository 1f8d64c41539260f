"""Draw initial weights as timm or JAX do where they differ from `vit.model`; or skip the draws for
a model whose weights come from a checkpoint."""

from __future__ import annotations

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
"""Functions of torch.nn.init that draw, or call each other to draw."""


@contextmanager
def undrawn() -> Iterator[None]:
    """Skip the draws of parameters that are created in the block; a checkpoint will fill them.

    Buffers are drawn, because those outside the state dict are not in a checkpoint. The draws take
    a second on one core for B, and seven for H.
    """

    def instead_of(draw: Any) -> Any:
        def leave(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if isinstance(tensor, nn.Parameter):
                return tensor
            return draw(tensor, *args, **kwargs)

        return leave

    before = {name: getattr(nn.init, name) for name in _DRAWS}
    for name, draw in before.items():
        setattr(nn.init, name, instead_of(draw))
    try:
        yield
    finally:
        for name, draw in before.items():
            setattr(nn.init, name, draw)


def lecun_normal_(weight: Tensor) -> None:
    """Draw `weight`, (out, in, ...), from a normal distribution of variance 1 / fan-in, truncated
    at two standard deviations, as Flax does (`lecun_normal`)."""
    # Truncation leaves 0.8796 of the standard deviation. Flax divides by that, torch does not.
    std = math.sqrt(1.0 / weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def draw_as(
    source: str | None, model: nn.Module, patches: nn.Conv2d, heads: Iterable[nn.Linear]
) -> None:
    """Draw the weights again that `source` ("timm", "jax"; None: none) draws in its own way."""
    if source == "timm":
        _draw_as_timm(patches, heads)
    elif source == "jax":
        _draw_as_jax(model, heads)


def _draw_as_timm(patches: nn.Conv2d, heads: Iterable[nn.Linear]) -> None:
    """Draw patches and heads as timm, DeiT and DeiT III do.

    Patches: torch's convolution, uniform with a deviation of 1 / sqrt(3 fan-in), bias included;
    heads: normal, 0.02 (timm:timm/models/vision_transformer.py, `init_weights_vit_timm`;
    facebookresearch/deit:models_v2.py, `_init_weights`).
    """
    patches.reset_parameters()
    for head in heads:
        nn.init.trunc_normal_(head.weight, std=0.02)


def _draw_as_jax(model: nn.Module, heads: Iterable[nn.Linear]) -> None:
    """Draw all linear maps of `model` except `heads` as Flax does in the ViT paper's code.

    Xavier's uniform rule, separately for queries, keys and values; biases of MLPs normal, 1e-6
    (google-research/vision_transformer:vit_jax/models_vit.py; big_vision:models/vit.py).
    """
    are_heads = set(heads)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module in are_heads:
            continue
        num_maps = {"qkv": 3, "kv": 2}.get(name.rpartition(".")[2], 1)
        for weight in module.weight.chunk(num_maps):
            nn.init.xavier_uniform_(weight)
        if ".mlp." in name:
            nn.init.normal_(module.bias, std=1e-6)
