"""Initial weights as their sources draw them, where that is not what `vit.model` does by itself;
and none at all, for a model whose weights a checkpoint has."""

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
"""Functions of torch.nn.init that draw; what they call of each other is drawn once."""


@contextmanager
def undrawn() -> Iterator[None]:
    """Leave parameters that are created meanwhile without values: they wait for a checkpoint's.

    Buffers get theirs, since those outside the state dict are in no checkpoint. Of B the draws take
    a second of a core, of H seven.
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
    """Draw `weight`, (out, in, ...), from a normal distribution of variance 1 / fan-in, cut at two
    standard deviations, as Flax does (`lecun_normal`)."""
    # Cut at two standard deviations, it has 0.8796 of its original one. Flax divides by that, torch
    # does not.
    std = math.sqrt(1.0 / weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def draw_as(
    source: str | None, model: nn.Module, patches: nn.Conv2d, heads: Iterable[nn.Linear]
) -> None:
    """Draw what `source` ("timm", "jax") draws otherwise than `vit.model` does by itself (None)."""
    if source == "timm":
        _draw_as_timm(patches, heads)
    elif source == "jax":
        _draw_as_jax(model, heads)


def _draw_as_timm(patches: nn.Conv2d, heads: Iterable[nn.Linear]) -> None:
    """Draw what timm, DeiT and DeiT III draw in another way than `vit.model` does by itself.

    Patches: torch's convolution, uniform with a deviation of 1 / sqrt(3 fan-in), bias included;
    heads: normal, 0.02 (timm:timm/models/vision_transformer.py, `init_weights_vit_timm`;
    facebookresearch/deit:models_v2.py, `_init_weights`).
    """
    patches.reset_parameters()
    for head in heads:
        nn.init.trunc_normal_(head.weight, std=0.02)


def _draw_as_jax(model: nn.Module, heads: Iterable[nn.Linear]) -> None:
    """Draw the linear maps of `model` but its `heads` as Flax does for the ViT paper's code.

    Xavier's uniform rule, queries, keys and values each by itself; biases of MLPs normal, 1e-6
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
