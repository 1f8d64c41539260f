"""Compile a model, or keep fewer activations: choices that change no number of a step."""

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

    Our blocks share one graph in training and one in evaluation, so compiling takes as long for H
    as for B. `backend`: any of torch.compile's.
    """
    blocks = list(getattr(model, "blocks", [model]))
    # By default torch makes one graph for all sizes once it has seen two. Images of a run have few
    # sizes, each for epochs, and a graph for each is faster.
    num_sizes = 1 + len(getattr(model, "other_sizes", ()))
    # Otherwise each graph is cut where a bucket of DDP ends, and its pieces are fused separately.
    # The borders of blocks already let the all-reduce of one overlap with the backward pass of the
    # next.
    torch._dynamo.config.optimize_ddp = False
    # Blocks of timm have a graph each where their drop path rates differ. After 8 graphs (the
    # default limit) torch would run the others uncompiled, and those of evaluation too.
    limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks) * num_sizes)
    torch._dynamo.config.recompile_limit = limit
    for block in blocks:
        block.compile(backend=backend, dynamic=False if num_sizes > 1 else None)


def compile_models(config: TrainConfig, models: Sequence[nn.Module], world: World) -> str:
    """Compile `models` if `config` wants it, on all ranks or on none.

    Returns why none is compiled although it is wanted, or "". Raises ValueError where eager kernels
    would give other bits (`train.exact_over_ranks`).
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
    """Return why torch.compile does not work on this host for `device`, "" if it does.

    Compiles a line to find out, in seconds, most of which any first compilation takes. Asking for
    its parts would not do: a C++ compiler without Python's headers is as good as none.
    """
    constant = time.time_ns()  # no cache has it

    def line(x: Tensor) -> Tensor:
        return x.sin() * constant

    try:
        torch.compile(line)(torch.ones(8, device=device))
    except Exception as error:  # of Dynamo, compilers, Triton, drivers, disks: all end here
        return str(error).strip().splitlines()[0].rstrip(".")
    return ""


def checkpoint_activations(model: nn.Module, which: str | int) -> None:
    """Let blocks of `model` keep only their inputs for the backward pass, which computes the rest.

    which: `train.activation_checkpointing`. Call it before or after `compile_blocks`. Raises
    ValueError for a model of timm that cannot do it so.
    """
    if which == "none":
        return
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, Blocks):
        blocks.checkpoint_every = 1 if isinstance(which, str) else which
        return
    if which != "block":
        raise ValueError(
            f"train.activation_checkpointing={which}: models of timm know all blocks or none: set"
            " block or none"
        )
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError):
        raise ValueError(
            f"train.activation_checkpointing=block: timm's {type(model).__name__} cannot do that:"
            " set none, and lower data.micro_batch_size"
        ) from None
