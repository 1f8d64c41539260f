"""Combine the gradients and the numbers of all ranks: `vit.step` calls a `Reduce`.

`DataParallel` averages gradients by DDP, or does nothing in a world of one rank.
`vit.distributed.exact.leaves.Leaves` adds them along a tree, with the same bits on any number of
ranks. The step is the same for both.
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
    """Number of ranks, the first ones, that add their gradient norm to the sums of a step."""

    def divisor(self, num_rows: int) -> int:
        """Return the divisor of losses on a rank with `num_rows` rows."""

    def first_row(self, num_rows: int) -> int:
        """Return the row of the global batch at which this rank's rows begin."""

    def micro_batch(self, step: int, row: int, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of the micro-batch that begins at `row`."""

    def add(self, row: int, loss_sum: Tensor, row_weights: Tensor) -> None:
        """Add the loss of a micro-batch, summed over its rows, and the sum of their weights."""

    def finish(self) -> None:
        """Leave the gradient of the global batch in `grad`."""

    def sum_(self, values: Tensor) -> Tensor:
        """Sum the numbers of a step (`Slot`) over the ranks, in place."""

    def keeps_gradients(self, num_passes: int) -> bool:
        """Return whether gradients stay allocated between steps of `num_passes` micro-batches."""

    def prepare(self, rows: Batch, losses: Callable[[Batch], Tensor], num_passes: int) -> None:
        """Run a throw-away pass before the first step of a process, if one is needed."""


class DataParallel:
    """Averages the gradients by DDP; does nothing in a world of one rank."""

    def __init__(self, model: nn.Module, world: World, module: nn.Module | None = None):
        """module: `model` under DDP (`vit.distributed.process_group.wrap`); None in a world of one
        rank."""
        self.model = model
        self.world = world
        self.module = module or model
        self.norm_ranks = world.size

    def divisor(self, num_rows: int) -> int:
        """Return `num_rows`, because DDP averages the means of ranks with equally many rows."""
        return num_rows

    def first_row(self, num_rows: int) -> int:
        """See `Reduce`."""
        return self.world.rank * num_rows

    def micro_batch(self, step: int, row: int, is_last: bool) -> AbstractContextManager[None]:
        """Return a context in which DDP averages gradients only after the last micro-batch."""
        return nullcontext() if is_last else no_sync(self.module)

    def add(self, row: int, loss_sum: Tensor, row_weights: Tensor) -> None:
        """Do nothing, because the sums of the step have these numbers."""

    def finish(self) -> None:
        """Do nothing, because the last backward pass has averaged the gradients."""

    def sum_(self, values: Tensor) -> Tensor:
        """See `Reduce`."""
        return self.world.sum_(values)

    def keeps_gradients(self, num_passes: int) -> bool:
        """Return whether the gradients of several passes add up under DDP.

        Gradients then stay allocated in DDP's buckets, as zeros. Otherwise the passes under
        `no_sync` would allocate a second set (2.5 GB for H), which the last pass copies into the
        buckets. For a single pass filling with zeros would only cost time.
        """
        return self.module is not self.model and num_passes > 1

    def prepare(self, rows: Batch, losses: Callable[[Batch], Tensor], num_passes: int) -> None:
        """Bring DDP's buckets into their final layout.

        DDP reorders its buckets after the first synchronised backward pass. With 3 or more ranks a
        different layout sums in a different order, so a resumed run would differ in the last bit
        from an uninterrupted one. A throw-away pass shows DDP the order, and the next forward pass
        rebuilds the buckets.
        """
        if self.module is self.model:
            return
        size: Any = self.model.image_size
        if tuple(rows.images.shape[2:]) != size:
            # The layout depends on the order of gradients, and resampled positions change that
            # order. An attempt that resumes after the stages does not resample, so all attempts use
            # the layout of the model's own size.
            rows = replace(rows, images=rows.images.new_zeros((*rows.images.shape[:2], *size)))
        # Batch norms of timm models change their running statistics in these passes, so restore the
        # buffers at the end.
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        losses(rows).sum().backward()
        if self.keeps_gradients(num_passes):
            losses(rows).sum().backward()  # allocates gradients in the new buckets
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

    is_filled_later: a checkpoint will replace the weights on each rank. Raises ValueError for
    `train.exact_over_ranks`, whose sum only `vit.extras.compose` chooses.
    """
    if config.train.exact_over_ranks:
        raise ValueError("train.exact_over_ranks: build the run by vit.extras.compose.build_run")
    return DataParallel(model, world, wrap(model, world, sync=not is_filled_later))
