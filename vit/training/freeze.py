"""Freeze the first part of a model, so that training does not change it (`init.freeze`).

A frozen parameter requires no gradient, so optimizer, weight decay and EMA skip it. The backward
pass stops where the frozen part ends.

    config -> create_model -> freeze -> optimizer, EMA, DDP, planner (read `requires_grad`)
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vit.config.base import height_width
from vit.config.schema import Config
from vit.layers.image_model import ImageModel
from vit.layers.image_sizes import take_sizes
from vit.layers.parts import head_prefixes
from vit.model import create_model

BEHIND_THE_BLOCKS = ("norm.", "fc_norm.", "attn_pool.")
"""Name prefixes of the parameters between the last block and the head."""


def create_trained_model(config: Config, num_classes: int) -> ImageModel:
    """Create the model of `config` with new weights, and freeze the part given by `init.freeze`.

    The model accepts every image size in `schedule.image_sizes`. Raises the ValueErrors of
    `create_model`, `take_sizes` and `freeze`.
    """
    model = create_model(config.model, num_classes=num_classes)
    take_sizes(model, (height_width(stage.image_size) for stage in config.schedule.image_sizes))
    freeze(model, config.init.freeze)
    return model


def freeze(model: nn.Module, part: str | int) -> None:
    """Freeze parameters of a model that is not wrapped or compiled yet.

    part: "none"; "backbone" for everything but the head; or a number k for everything before the
    blocks and the first k blocks. Raises ValueError if the model has fewer than k blocks, or if the
    frozen part contains batch norms, because their statistics would still change.
    """
    if part == "none":
        return
    trained = head_prefixes(model)
    if not isinstance(part, str):
        blocks: Any = getattr(model, "blocks", None)
        depth = len(blocks) if isinstance(blocks, nn.Sequential | nn.ModuleList) else 0
        if part > depth:
            has = f"only {depth} blocks: set at most {depth}, or" if depth else "no blocks: set"
            raise ValueError(f"init.freeze={part}: the model has {has} backbone")
        later = (f"blocks.{number}." for number in range(part, depth))
        trained = (*trained, *BEHIND_THE_BLOCKS, *later)

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))

    for prefix, frozen in frozen_parts(model):
        for name, module in frozen.named_modules(prefix=prefix):
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                raise ValueError(
                    f"init.freeze={part}: {name} is a batch norm layer, whose statistics would"
                    " change even though its weights are frozen: set none, or use a model without"
                    " batch norm"
                )


def frozen_parts(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost submodules of `model` that are entirely frozen, with their names."""
    for name, module in model.named_children():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            yield prefix + name, module
        else:
            yield from frozen_parts(module, f"{prefix}{name}.")
