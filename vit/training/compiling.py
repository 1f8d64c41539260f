"""Compile a model, or keep fewer activations; neither changes the result of a step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vit.config.schema import TrainConfig
from vit.distributed.process_group import World
from vit.layers.blocks import Blocks


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each of `model.blocks` in place, or the whole model if it has no blocks.

    The blocks of `vit.model` share one graph in training and one in evaluation, so compiling H
    takes as long as compiling B. `backend`: any of torch.compile's.
    """
    blocks = list(getattr(model, "blocks", [model]))
    # By default torch makes one graph for all sizes when it sees a second size. The images of a run
    # have few sizes, each for several epochs, so a graph for each size is faster.
    num_sizes = 1 + len(getattr(model, "other_sizes", ()))
    # By default each graph is cut at the end of a DDP bucket, and its pieces are fused separately.
    # That is not needed: with a graph for each block, the all-reduce of one block already overlaps
    # with the backward pass of the next.
    torch._dynamo.config.optimize_ddp = False
    # Blocks of timm with different drop path rates have a graph each. After 8 graphs (the default
    # limit) torch would run all further blocks uncompiled, also in evaluation.
    limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks) * num_sizes)
    torch._dynamo.config.recompile_limit = limit
    for block in blocks:
        block.compile(backend=backend, dynamic=False if num_sizes > 1 else None)


def compile_models(config: TrainConfig, models: Sequence[nn.Module], world: World) -> str:
    """Compile `models` if `train.compile` is on, on all ranks or on none.

    Returns the reason if compilation is on but does not work, or "". Raises ValueError if eager
    kernels would change the bits (`train.exact_over_ranks`).
    """
    if not config.compile:
        return ""
    why_eager = why_not_compiled(world.device)
    if world.any_rank(bool(why_eager)):
        why_eager = why_eager or "not on another host of this run"
        with world.fail_together():
            if config.exact_over_ranks:
                raise ValueError(
                    f"train.exact_over_ranks: torch.compile does not work here ({why_eager}), and"
                    " other kernels give other bits: install what it needs, or set"
                    " train.compile=false from the first step on"
                )
        return why_eager
    for model in models:
        compile_blocks(model)
    return ""


@functools.cache
def why_not_compiled(device: torch.device) -> str:
    """Return why torch.compile does not work on this host for `device`, or "" if it does.

    It compiles a line, which takes seconds; the first compilation would take most of them anyway.
    Checking for the tools would not be enough: a C++ compiler does not work without Python's
    headers.
    """
    constant = time.time_ns()  # a new number, so that no cache has the result

    def line(x: Tensor) -> Tensor:
        return x.sin() * constant

    try:
        torch.compile(line)(torch.ones(8, device=device))
    except Exception as error:  # from Dynamo, compilers, Triton, drivers or disks
        return str(error).strip().splitlines()[0].rstrip(".")
    return ""


def checkpoint_activations(model: nn.Module, blocks_setting: str | int) -> None:
    """Let blocks of `model` keep only their inputs; the backward pass recomputes the rest.

    blocks_setting: `train.activation_checkpointing`. Call it before or after `compile_blocks`.
    Raises ValueError for a model of timm that does not support the setting.
    """
    if blocks_setting == "none":
        return
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, Blocks):
        blocks.checkpoint_every = 1 if isinstance(blocks_setting, str) else blocks_setting
        return
    if blocks_setting != "block":
        raise ValueError(
            f"train.activation_checkpointing={blocks_setting}: models of timm know all blocks or"
            " none: set block or none"
        )
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError):
        raise ValueError(
            f"train.activation_checkpointing=block: timm's {type(model).__name__} cannot do that:"
            " set none, and lower data.micro_batch_size"
        ) from None
