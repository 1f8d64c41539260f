"""Compile a model, or turn on activation checkpointing, without changing the results."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vit.config.schema import TrainConfig
from vit.distributed.exit import SIGNAL_S
from vit.distributed.process_group import World
from vit.layers.blocks import Blocks, Group
from vit.model import Block


def compile_blocks(
    model: nn.Module, backend: str | Callable[..., Any] = "inductor", mode: str | None = None
) -> None:
    """Compile `model.blocks` in place, or the whole model if it has no blocks.

    The blocks of `vit.model` are compiled in groups of up to four. All groups share one graph in
    training and one in evaluation, so compiling ViT-H takes about as long as compiling ViT-B.
    backend, mode: arguments for torch.compile.
    """
    blocks: Any = getattr(model, "blocks", [model])
    parts = list(blocks)
    size = _group_size(model) if isinstance(blocks, Blocks) else 1
    if size > 1:
        parts = [Group(parts[start : start + size]) for start in range(0, len(parts), size)]
        blocks.groups = parts

    # By default, torch switches to dynamic shapes when it sees a second size. A run has only a few
    # image sizes, each for several epochs, so one graph per size is faster.
    num_sizes = 1 + len(getattr(model, "other_sizes", ()))
    # By default, torch splits each graph at DDP bucket boundaries and optimizes the pieces
    # separately. With one graph per group of blocks, splitting is not needed: the all-reduce of one
    # group already overlaps with the backward pass of the next.
    torch._dynamo.config.optimize_ddp = False
    # In timm models, blocks with different drop path rates have one graph each. After 8 graphs (the
    # default limit), torch would run all other blocks uncompiled, even in evaluation.
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, 2 * len(parts) * num_sizes
    )

    for part in parts:
        part.compile(backend=backend, mode=mode, dynamic=False if num_sizes > 1 else None)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _group_size(model: Any) -> int:
    """Return how many blocks of a `VisionTransformer` become one graph: a divisor of its depth.

    Groups of three or four blocks remove most boundaries between graphs. With larger groups,
    compilation takes longer, and the all-reduce of the first group, which overlaps with no backward
    pass, has more gradients.
    """
    # A group calls the two parts of each block directly, so it would skip hooks and the `forward`
    # method of another class.
    if not all(type(block) is Block and not _has_hooks(block) for block in model.blocks):
        return 1

    # With checkpointing, a group would be checkpointed as a whole. With the form `subset`, each
    # group would need its own graph for its drop path rates.
    has_row_counts = len(set(model.drop_paths.rates)) > 1 and model.drop_paths.form == "subset"
    if model.blocks.checkpoint_every or has_row_counts:
        return 1

    return next(size for size in (3, 4, 2, 1) if len(model.blocks) % size == 0)


def compile_models(config: TrainConfig, models: Sequence[nn.Module], world: World) -> str:
    """Compile `models` if `train.compile` is on, either on all ranks or on none.

    Returns the reason if compilation is on but does not work, else "". Raises ValueError if eager
    kernels would change the result (`train.exact_over_ranks`).
    """
    if not config.compile:
        return ""

    why_eager = why_not_compiled(world.device)
    if world.any_rank(bool(why_eager)):
        why_eager = why_eager or "torch.compile failed on another host of this run"
        with world.fail_together():
            if config.exact_over_ranks:
                raise ValueError(
                    "train.exact_over_ranks: torch.compile does not work on this host"
                    f" ({why_eager}), and eager kernels give different bits: install the missing"
                    " tools, or set train.compile=false from the first step"
                )
        return why_eager

    mode = config.compile if isinstance(config.compile, str) else None
    for model in models:
        compile_blocks(model, mode=mode)
    return ""


@functools.cache
def why_not_compiled(device: torch.device) -> str:
    """Return why torch.compile does not work on this host for `device`, or "" if it works.

    The check compiles a small function. The seconds that the check takes are saved in the first
    real compilation. Searching for the tools is not enough, because an installed C++ compiler still
    fails if Python's headers are missing.
    """
    constant = time.time_ns()  # a new constant, so that no cache contains the result

    def line(x: Tensor) -> Tensor:
        return x.sin() * constant

    try:
        torch.compile(line)(torch.ones(8, device=device))
    except Exception as error:  # from Dynamo, compilers, Triton, drivers or disks
        time.sleep(SIGNAL_S)  # A signal to all processes may have ended the compiler.
        return str(error).strip().splitlines()[0].rstrip(".")
    return ""


def checkpoint_activations(model: nn.Module, blocks_setting: str | int) -> None:
    """Make blocks of `model` store only their inputs, and recompute activations in the backward
    pass.

    blocks_setting: `train.activation_checkpointing`. Call this function before `compile_blocks`.
    Raises ValueError for timm models that do not support the setting.
    """
    if blocks_setting == "none":
        return
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, Blocks):
        blocks.checkpoint_every = 1 if isinstance(blocks_setting, str) else blocks_setting
        return

    if blocks_setting != "block":
        raise ValueError(
            f"train.activation_checkpointing={blocks_setting}: timm models can checkpoint only all"
            " blocks or none: set block or none"
        )

    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError):
        raise ValueError(
            f"train.activation_checkpointing=block: timm's {type(model).__name__} does not support"
            " it: set none, and lower data.micro_batch_size"
        ) from None
