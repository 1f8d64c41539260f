"""Combine the gradients and statistics of all ranks, for `vit.step`.

`DataParallel` averages gradients with DDP, or does nothing on a single rank.
`vit.distributed.exact.leaves.Leaves` sums gradients along a tree, which gives bitwise identical
results on any number of ranks.
"""

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
    """The interface for summing gradients. All ranks must make the same calls."""

    world: World
    module: nn.Module
    """The module for forward passes: the model, or the model wrapped by DDP."""
    norm_ranks: int
    """The number of ranks, counted from rank 0, that add their gradient norm to the sums of a
    step."""

    def divisor(self, num_rows: int) -> int:
        """Return the number by which a rank with `num_rows` rows divides its summed loss."""

    def first_row(self, num_rows: int) -> int:
        """Return the index of this rank's first row in the global batch."""

    def micro_batch(self, step: int, row: int, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for processing the micro-batch that starts at `row`."""

    def add(self, row: int, loss_sum: Tensor, row_weights: Tensor) -> None:
        """Add the summed loss and the summed row weights of a micro-batch."""

    def finish(self) -> None:
        """Write the global batch's gradient to each parameter's `grad`."""

    def sum_(self, values: Tensor) -> Tensor:
        """Sum the numbers of a step (`Slot`) over the ranks, in place."""

    def keeps_gradients(self, num_passes: int) -> bool:
        """Return whether gradients stay allocated between steps of `num_passes` micro-batches."""

    def prepare(self, rows: Batch, losses: Callable[[Batch], Tensor], num_passes: int) -> None:
        """Run a warm-up pass before the first step of a process, if needed."""


class DataParallel:
    """Averages gradients with DDP. Does nothing on a single rank."""

    def __init__(self, model: nn.Module, world: World, module: nn.Module | None = None):
        """module: `model` wrapped by `vit.distributed.process_group.wrap`; None on a single
        rank."""
        self.model = model
        self.world = world
        self.module = module or model
        self.norm_ranks = world.size

    def divisor(self, num_rows: int) -> int:
        """Return `num_rows`, because all ranks have the same number of rows and DDP averages their
        means."""
        return num_rows

    def first_row(self, num_rows: int) -> int:
        """See `Reduce`."""
        return self.world.rank * num_rows

    def micro_batch(self, step: int, row: int, is_last: bool) -> AbstractContextManager[None]:
        """Return a context in which DDP averages gradients only after the last micro-batch."""
        return nullcontext() if is_last else no_sync(self.module)

    def add(self, row: int, loss_sum: Tensor, row_weights: Tensor) -> None:
        """Do nothing, because the sums of the step already include these numbers."""

    def finish(self) -> None:
        """Do nothing, because the last backward pass has averaged the gradients."""

    def sum_(self, values: Tensor) -> Tensor:
        """See `Reduce`."""
        return self.world.sum_(values)

    def keeps_gradients(self, num_passes: int) -> bool:
        """Return whether DDP accumulates the gradients of several passes.

        If so, gradients stay allocated in DDP's buckets and are set to zero. Otherwise the passes
        under `no_sync` would allocate a second set of gradients (2.5 GB for ViT-H), which the last
        pass copies into the buckets. With a single pass, setting gradients to zero would only cost
        time.
        """
        return self.module is not self.model and num_passes > 1

    def prepare(self, rows: Batch, losses: Callable[[Batch], Tensor], num_passes: int) -> None:
        """Make DDP build its final bucket layout.

        DDP reorders its buckets after the first synchronized backward pass. With 3 or more ranks, a
        different layout changes the order of summation, so a resumed run would differ in the last
        bit. A warm-up pass records the order of gradients, and the next forward pass rebuilds the
        buckets.
        """
        if self.module is self.model:
            return
        size: Any = self.model.image_size
        if tuple(rows.images.shape[2:]) != size:
            # The order of gradients determines the bucket layout, and resampled positions would
            # change this order. A run that resumes after the stages of `schedule.image_sizes` does
            # not resample positions, so always use the model's own size.
            rows = replace(rows, images=rows.images.new_zeros((*rows.images.shape[:2], *size)))

        # The warm-up passes change the running statistics of batch norms in timm models, so restore
        # the buffers afterwards.
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
    """Wrap `model` in DDP.

    is_filled_later: whether a checkpoint will replace the weights on each rank.
    """
    in_bf16 = config.train.reduce_dtype == "bf16"
    return DataParallel(model, world, wrap(model, world, not is_filled_later, in_bf16))
