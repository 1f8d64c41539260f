"""Optimizers over proper parameter groups.

The data's story: every trainable parameter of the model falls into exactly one of two groups, with
weight decay and without; the step sets the groups' learning rate from `vit.schedule` before each
update. Both optimizers are torch's fused ones: they skip an update on the device when `found_inf`
is set, so a non-finite gradient costs no wait.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vit.config import AdamWConfig, SgdConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups of `model`'s trainable parameters: decayed matrices, and biases, norms, scales (up
    to one dimension) and what the model's `no_weight_decay()` names (positions, class token), which
    are not decayed."""
    exempt: set[str] = set(getattr(model, "no_weight_decay", set)())
    decayed: list[Tensor] = []
    free: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (free if parameter.ndim <= 1 or name in exempt else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


def create_optimizer(model: nn.Module, config: AdamWConfig | SgdConfig) -> torch.optim.Optimizer:
    """The optimizer of `config` over `model`'s parameters, not wrapped, not compiled."""
    groups = parameter_groups(model, config.weight_decay)
    optimizer: torch.optim.Optimizer
    if isinstance(config, AdamWConfig):
        optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
    else:
        optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True
        )
    _allocate_state(optimizer)
    return optimizer


def state_bytes(config: AdamWConfig | SgdConfig, model: nn.Module) -> list[int]:
    """Bytes of each tensor that the optimizer of `config` keeps for `model`, without making it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if isinstance(config, AdamWConfig):  # two moments, and a count of updates in float32
        return [size for p in parameters for size in (p.nbytes, p.nbytes, 4)]
    return [p.nbytes for p in parameters] if config.momentum else []


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state exist, at zero, before the first update.

    A checkpoint can then be read into it; and fused SGD, which allocates its momentum
    uninitialised, may skip its first update. An update with zero gradients and learning rate 0 does
    it by torch's own code; its effects are undone here.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    set_lr(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
