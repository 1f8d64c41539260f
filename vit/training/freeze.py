"""Parts of a model that training leaves as they are (`init.freeze`).

A frozen parameter asks for no gradient: the backward pass ends where the last of them is, and
optimizer, weight decay and average pass over it. What is frozen is always the beginning of the
network, so nothing behind it has to be passed through.

    config -> create_model -> freeze -> optimizer, average, DDP, planner: all ask `requires_grad`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vit.config.base import height_width
from vit.config.schema import Config
from vit.layers.image_sizes import take_sizes
from vit.layers.parts import head_prefixes
from vit.model import create_model

BEHIND_THE_BLOCKS = ("norm.", "fc_norm.", "attn_pool.")
"""How parameters between the last block and the head begin."""


def create_trained_model(config: Config, num_classes: int) -> Any:
    """Create the model of `config` with fresh weights, frozen as `init.freeze` says.

    It takes images of each size that training has. Raises ValueError as `create_model`,
    `take_sizes` and `freeze`.
    """
    model = create_model(config.model, num_classes=num_classes)
    take_sizes(model, (height_width(stage.image_size) for stage in config.schedule.image_sizes))
    freeze(model, config.init.freeze)
    return model


def freeze(model: nn.Module, which: str | int) -> None:
    """Freeze parameters of a model that is not wrapped or compiled yet.

    which: "none"; "backbone", all but the head; or a number k: all before the blocks, and the first
    k blocks. Raises ValueError for a model without blocks or with fewer, and for one whose batch
    norms would go on changing.
    """
    if which == "none":
        return
    trained = head_prefixes(model)
    if not isinstance(which, str):
        blocks: Any = getattr(model, "blocks", None)
        depth = len(blocks) if isinstance(blocks, nn.Sequential | nn.ModuleList) else 0
        if which > depth:
            has = f"the model has {depth}: give at most that" if depth else "the model has none"
            raise ValueError(f"init.freeze={which} blocks, but {has}, or backbone")
        later = (f"blocks.{number}." for number in range(which, depth))
        trained = (*trained, *BEHIND_THE_BLOCKS, *later)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"init.freeze={which} leaves nothing to train: set a smaller number")
    changing = [
        name
        for part, module in frozen_parts(model)
        for name, inner in module.named_modules(prefix=part)
        if isinstance(inner, _BatchNorm) and inner.track_running_stats
    ]
    if changing:
        raise ValueError(
            f"init.freeze={which}: {changing[0]} is a batch norm, whose statistics would change"
            " though its weights are frozen: set none, or take a model without batch norms"
        )


def frozen_parts(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of the largest parts of `model` that are entirely frozen."""
    for name, module in model.named_children():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            yield prefix + name, module
        else:
            yield from frozen_parts(module, f"{prefix}{name}.")
