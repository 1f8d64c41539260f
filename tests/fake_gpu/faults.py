"""Run a program with a planted fault: python faults.py FAULT PROGRAM ARGUMENTS ...

The tests in this folder must detect each fault, and name the place of the fault.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.checkpoint.saver import Saver
from vit.data.augment.apply import Augment
from vit.data.batches import Batch
from vit.model import Attention
from vit.step import TrainStep
from vit.training import objective
from vit.training.step_result import StepResult


def before(owner: Any, name: str, fault: Callable[..., object]) -> None:
    """Call `fault` before each call of `owner.name`, with the arguments of the call."""
    unchanged = getattr(owner, name)

    @wraps(unchanged)
    def changed(*arguments: Any, **options: Any) -> Any:
        fault(*arguments)
        return unchanged(*arguments, **options)

    setattr(owner, name, changed)


def read_a_value(logits: Tensor, *_: object) -> None:
    logits.sum().item()


def copy_pageable_memory(logits: Tensor, *_: object) -> None:
    torch.zeros(3).to(logits.device, non_blocking=True)


def use_a_tensor_of_the_host(logits: Tensor, *_: object) -> None:
    logits + torch.zeros(logits.shape)


def wait_for_the_device(*_: object) -> None:
    torch.cuda.synchronize()


def plant_an_early_read() -> None:
    """Read the result of each step as soon as the step is queued."""
    unchanged = TrainStep.__call__

    def queue_and_read(*arguments: Any) -> StepResult:
        result = unchanged(*arguments)
        result.read()
        return result

    TrainStep.__call__ = queue_and_read


def plant_another_layout() -> None:
    """Change the memory layout of the augmented batches in all steps but the first two."""
    unchanged = Augment.change_batch
    seen: list[Batch] = []

    def change_batch(augment: Augment, batch: Batch) -> Batch:
        seen.append(batch)
        changed = unchanged(augment, batch)
        if len(seen) <= 2:
            return changed
        return replace(changed, images=changed.images.contiguous(memory_format=torch.channels_last))

    Augment.change_batch = change_batch


def plant_a_copy() -> None:
    """Copy the queries, keys and values in each block."""
    unchanged = Attention.project

    def project(*arguments: Any) -> tuple[Tensor, ...]:
        return tuple(each.clone() for each in unchanged(*arguments))

    Attention.project = project


FAULTS: dict[str, Callable[[], None]] = {
    "a value that is read": lambda: before(objective, "margins", read_a_value),
    "a pageable copy": lambda: before(objective, "margins", copy_pageable_memory),
    "a tensor of the host": lambda: before(objective, "margins", use_a_tensor_of_the_host),
    "a save that waits": lambda: before(Saver, "save", wait_for_the_device),
    "a result that is read at once": plant_an_early_read,
    "another layout": plant_another_layout,
    "a copy in each block": plant_a_copy,
}


def main() -> None:
    fault, program, *arguments = sys.argv[1:]
    FAULTS[fault]()
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
