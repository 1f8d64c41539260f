"""Run launch/train.py, and write the inputs of the model to the folder $DUMPED_STEPS.

Each rank writes a separate file for each step, such as `step_00007_rank_1.pt`. The file contains
inputs, targets, losses, margins and labels.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.data.batches import Batch
from vit.step import TrainStep


@contextmanager
def dumping(folder: Path) -> Iterator[None]:
    """Write the inputs of each step in this process to `folder` until the context ends."""
    plain: dict[str, Callable[..., Any]] = {
        name: getattr(TrainStep, name) for name in ("_losses", "_queue")
    }
    tensors_of_passes: list[dict[str, Tensor]] = []

    def losses(step: TrainStep, batch: Batch) -> tuple[Tensor, Tensor]:
        losses_and_margins = plain["_losses"](step, batch)
        inputs, targets = step.augment.finish(batch.images, batch.labels, batch.table)
        tensors_of_passes.append(
            {
                "inputs": inputs,
                "targets": targets,
                "labels": batch.labels.clone(),
                "losses": losses_and_margins[0].detach().clone(),
                "margins": losses_and_margins[1].detach().clone(),
            }
        )
        return losses_and_margins

    def queue(step: TrainStep, batch: Batch, number: int, *arguments: Any) -> Any:
        # Discard the tensors of forward passes that only set up DDP's gradient buckets.
        tensors_of_passes.clear()
        result = plain["_queue"](step, batch, number, *arguments)
        tensors = {
            name: torch.cat([each[name] for each in tensors_of_passes])
            for name in tensors_of_passes[0]
        }
        torch.save(tensors, folder / f"step_{number + 1:05d}_rank_{step.world.rank}.pt")
        return result

    TrainStep._losses = losses
    TrainStep._queue = queue
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(TrainStep, name, function)


def dumped(folder: Path, step: int) -> dict[str, Tensor]:
    """Return the dumped tensors of `step` from all ranks, in the order of the global batch."""
    ranks = sorted(folder.glob(f"step_{step:05d}_rank_*.pt"))
    parts = [torch.load(path) for path in ranks]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


if __name__ == "__main__":
    launch = Path(__file__).parents[3] / "launch"
    sys.path.insert(0, str(launch))
    with dumping(Path(os.environ["DUMPED_STEPS"])):
        runpy.run_path(str(launch / "train.py"), run_name="__main__")
