"""The section `optim` of the config: one class of settings for each optimizer, chosen by `name`.

`vit.optim.optimizer` makes them, and `vit.optim.groups` divides the parameters.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from vit.config.base import Rate, Section


class AdamWConfig(Section):
    """AdamW (Loshchilov & Hutter 2019) with the decay multiplied by the learning rate."""

    name: Literal["adamw"] = "adamw"
    """The optimizer."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate; nothing scales it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """Decay of weight matrices; biases, norms, positions and class token have none."""
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global norm of the gradient; `None`: no clipping."""


class SgdConfig(Section):
    """SGD with momentum; the decay is added to the gradient (L2)."""

    name: Literal["sgd"]
    """The optimizer."""
    lr: Annotated[float, Field(gt=0)] = 1e-2
    """Peak learning rate; nothing scales it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 decay of weight matrices; biases, norms, positions and class token have none."""
    momentum: Rate = 0.9
    """Decay rate of the momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global norm of the gradient; `None`: no clipping."""


def optimizer_name(value: Any) -> str:
    """Which optimizer the section `optim` is about: given as a dictionary or as a section."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return name if isinstance(name, str) else "adamw"


OptimConfig = Annotated[
    Annotated[AdamWConfig, Tag("adamw")] | Annotated[SgdConfig, Tag("sgd")],
    Discriminator(optimizer_name),
]
