"""Bring the ranks to one gradient and one set of numbers: the seam `Reduce` of `vit.step`.

`DataParallel` averages gradients by DDP, or does nothing in a world of one rank.
`vit.distributed.exact.leaves.Leaves` adds them along a tree, with the same bits on any number of
ranks. A step calls either without knowing which.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vit.config.schema import Config
from vit.data.batches import Batch
from vit.distributed.process_group import World, no_sync, wrap
from vit.training.plan import Plan


class Reduce(Protocol):
    """The calls that differ between ways to sum gradients; every rank makes the same ones."""

    world: World
    module: nn.Module
    """The module that inputs go through: the model, or the model under DDP."""
    norm_ranks: int
    """The first so many ranks add their gradient norm to the sums of a step."""

    def divisor(self, num_rows: int) -> int:
        """Return the divisor of losses on a rank with `num_rows` rows."""

    def first_row(self, num_rows: int) -> int:
        """Return the row of the global batch at which this rank's rows begin."""

    def micro_batch(self, step: int, row: int, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of the micro-batch that begins at `row`."""

    def add(self, row: int, loss_sum: Tensor, row_weights: Tensor) -> None:
        """Take the loss of that micro-batch, summed over its rows, and the sum of their weights."""

    def finish(self) -> None:
        """Leave the gradient of the global batch in `grad`."""

    def sum_(self, values: Tensor) -> Tensor:
        """Sum the numbers of a step (`Slot`) over the ranks, in place."""

    def keeps_gradients(self, num_passes: int) -> bool:
        """Return whether gradients stay allocated between steps of `num_passes` micro-batches."""

    def prepare(self, rows: Batch, losses: Callable[[Batch], Tensor], num_passes: int) -> None:
        """Settle, before the first step of a process, what its first pass would settle."""


class DataParallel:
    """DDP averages the gradients; in a world of one rank nothing is done."""

    def __init__(self, model: nn.Module, world: World, module: nn.Module | None = None):
        """module: `model` under DDP (`vit.distributed.process_group.wrap`); None in a world of one
        rank."""
        self.model = model
        self.world = world
        self.module = module or model
        self.norm_ranks = world.size

    def divisor(self, num_rows: int) -> int:
        """Return `num_rows`: DDP averages the means of ranks that have as many rows."""
        return num_rows

    def first_row(self, num_rows: int) -> int:
        """See `Reduce`."""
        return self.world.rank * num_rows

    def micro_batch(self, step: int, row: int, is_last: bool) -> AbstractContextManager[None]:
        """Return a context in which DDP averages gradients only behind the last micro-batch."""
        return nullcontext() if is_last else no_sync(self.module)

    def add(self, row: int, loss_sum: Tensor, row_weights: Tensor) -> None:
        """Do nothing: the sums of the step hold these numbers."""

    def finish(self) -> None:
        """Do nothing: the last backward pass has averaged the gradients."""

    def sum_(self, values: Tensor) -> Tensor:
        """See `Reduce`."""
        return self.world.sum_(values)

    def keeps_gradients(self, num_passes: int) -> bool:
        """Return whether several passes add up under DDP.

        Zeros then stay in DDP's buckets. Without them the passes under `no_sync` would allocate a
        second set (2.5 GB for H), which the last pass copies into the buckets. For a single pass
        the fill is not worth its time.
        """
        return self.module is not self.model and num_passes > 1

    def prepare(self, rows: Batch, losses: Callable[[Batch], Tensor], num_passes: int) -> None:
        """Bring DDP's buckets into their final layout.

        DDP re-orders its buckets after the first synchronised backward pass, and from 3 ranks on
        a different layout sums in a different order: a resumed run would differ in the last bit
        from one that was not interrupted. A throw-away pass shows DDP the order, and the next
        forward pass lays the buckets out.
        """
        if self.module is self.model:
            return
        size: Any = self.model.image_size
        if tuple(rows.images.shape[2:]) != size:
            # Gradients of resampled positions come at another time, and a run that resumes behind
            # its stages has none: all attempts take the layout of the model's own size.
            rows = replace(rows, images=rows.images.new_zeros((*rows.images.shape[:2], *size)))
        # Batch norms of timm models would keep the passes in their running statistics.
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        losses(rows).sum().backward()
        if self.keeps_gradients(num_passes):
            losses(rows).sum().backward()  # zeros are to stay in the new buckets
        else:
            with no_sync(self.module):
                losses(rows)
        with torch.no_grad():
            for buffer, value in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(value)


def data_parallel(
    model: nn.Module, config: Config, plan: Plan, world: World, is_filled_later: bool
) -> Reduce:
    """Wrap `model` for DDP.

    is_filled_later: a checkpoint will replace the weights on each rank. Raises ValueError where
    `config` wants another sum, which `vit.extras.compose` chooses.
    """
    if config.train.exact_over_ranks:
        raise ValueError("train.exact_over_ranks: build the run by vit.extras.compose.build_run")
    return DataParallel(model, world, wrap(model, world, sync=not is_filled_later))
