"""Optimizers over two parameter groups, with weight decay and without.

The step sets the learning rate of both from `vit.optim.schedule` before each update. The optimizers
are torch's fused ones, which skip an update on the device when `found_inf` is set: a gradient that
is not finite costs no host-device sync.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor, nn

from vit.config.optim_section import AdamWConfig, OptimConfig, SgdConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups of the trainable parameters: weights of linear maps, and all others.

    The others, which are not decayed, are those of up to one dimension (biases, norms, scales) and
    those that the model's `no_weight_decay()` names (positions, class token).
    """
    exempt: set[str] = set(getattr(model, "no_weight_decay", set)())
    decayed: list[Tensor] = []
    not_decayed: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim <= 1 or name in exempt:
            not_decayed.append(parameter)
        else:
            decayed.append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]


def create_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Create the optimizer of `config` over the parameters of a plain model (no DDP wrapper)."""
    groups = parameter_groups(model, config.weight_decay)
    optimizer: torch.optim.Optimizer
    if isinstance(config, AdamWConfig):
        optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
    elif isinstance(config, SgdConfig):
        optimizer = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True
        )
    else:
        assert_never(config)
    # TrainStep sets `found_inf` on the device and calls step() without reading it back. torch's
    # fused optimizers skip the update then, and mark themselves by this attribute, which GradScaler
    # reads too. Any other optimizer would apply the NaN to the weights.
    skips = getattr(optimizer, "_step_supports_amp_scaling", False)
    assert skips, f"{type(optimizer).__name__} does not skip its update when found_inf is set"
    _allocate_state(optimizer)
    return optimizer


def state_bytes(config: OptimConfig, model: nn.Module) -> list[int]:
    """Bytes of each tensor that the optimizer of `config` would keep for `model`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if isinstance(config, AdamWConfig):  # two moments, and a count of updates in float32
        return [size for p in parameters for size in (p.nbytes, p.nbytes, 4)]
    if isinstance(config, SgdConfig):
        return [p.nbytes for p in parameters] if config.momentum else []
    assert_never(config)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, which is one: groups differ in weight decay only."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimizer's state, all zeros, before the first update.

    A checkpoint can then be read into it. And fused SGD allocates its momentum uninitialised, so
    that a skipped first update would leave garbage in it.
    """
    # torch allocates in step(): make one with zero gradients and learning rate 0, and undo its
    # effects on the state. An optimizer whose state does not start at 0, such as a copy of the
    # weights, needs its own start values here.
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
