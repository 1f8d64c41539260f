"""Compute gradients whose bits do not depend on the number of ranks: `train.exact_over_ranks`.

A leaf is a micro-batch at a fixed position in the global batch. Any rank can compute it with the
same kernels and shapes. `Leaves` removes all other dependence on the rank: random numbers depend on
the sample (vit/distributed/exact/by_sample.py) or on the leaf, and gradients and losses are added
along a tree over all leaves (vit/distributed/exact/tree_sum.py).
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from vit.distributed.exact.by_sample import draw_by_sample
from vit.distributed.exact.tree_sum import TreeSum, tree_sum
from vit.distributed.process_group import World, kernels_of
from vit.system.hashing import fold

_SEED_LEAF = 0x0D1
_SEED_SAMPLE = 0x0D2


def same_kernels(world: World) -> str:
    """Fix the number of threads, and describe everything that affects the bits of a sum.

    Raises ValueError if OMP_NUM_THREADS is not a number, or if this rank's description differs from
    rank 0's.
    """
    if world.device.type != "cuda":
        # A matrix product is split over threads, so its bits depend on the number of threads.
        # torchrun starts each rank with one thread, but a process without torchrun would use all
        # cores.
        with world.fail_together():
            torch.set_num_threads(_num_threads())

    own = kernels_of(world.device)
    expected = world.broadcast_from_main(lambda: own)
    with world.fail_together():
        if own != expected:
            raise ValueError(
                f"train.exact_over_ranks: {socket.gethostname()} computes with {own}, but rank 0"
                f" computes with {expected}: use identical hosts with the same OMP_NUM_THREADS"
            )
    return own


def check_leaves(model: nn.Module) -> None:
    """Raise ValueError if a forward pass would change the model, and therefore the next pass's
    result."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise ValueError(
                f"train.exact_over_ranks: {name} ({type(module).__name__}) keeps running"
                " statistics, which depend on the order of images on a rank: use a model without"
                " such norms, or set train.exact_over_ranks=false"
            )


def _num_threads() -> int:
    """Return OMP_NUM_THREADS, or 1 if it is unset."""
    variable = os.environ.get("OMP_NUM_THREADS", "1")
    if not variable.isdecimal() or not int(variable):
        raise ValueError(
            f"train.exact_over_ranks: OMP_NUM_THREADS={variable!r}, expected a number of threads:"
            " unset it to use one thread"
        )
    return int(variable)


class Leaves:
    """The leaves of a rank, in row order: an implementation of `vit.training.reduce.Reduce`.

    This class replaces `model`'s dropout modules. It also reduces the gradients, so DDP must not
    wrap the model.
    """

    def __init__(
        self, model: nn.Module, num_leaves: int, rows_per_leaf: int, world: World, seed: int
    ):
        self.module = model
        self.world = world
        # All ranks have the same gradient norm. Averaging it would round it, so use one rank's
        # norm.
        self.norm_ranks = 1
        self.num_leaves = num_leaves
        self.num_rows = num_leaves * rows_per_leaf
        self._rows_per_leaf = rows_per_leaf
        self._seed = seed
        self._seed_of_samples = int(fold(seed, _SEED_SAMPLE))

        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        self.gradients = TreeSum([*trained], num_leaves, world)
        self._keys = draw_by_sample(model, rows_per_leaf, world.device)
        self._sums = torch.zeros(2, num_leaves, device=world.device)

        # Even with the same seed, initial weights may differ between hosts with different library
        # versions.
        world.broadcast_([*model.parameters(), *model.buffers()])

    def divisor(self, num_rows: int) -> int:
        """Return the number of rows in the global batch, because gradients are summed over all
        ranks."""
        return self.num_rows

    def first_row(self, num_rows: int) -> int:
        """Return the index of this rank's first row in the global batch."""
        return self.gradients.leaves.start * self._rows_per_leaf

    @contextmanager
    def micro_batch(self, step: int, row: int, is_last: bool) -> Iterator[None]:
        """Return a context for the forward and backward pass of the leaf that begins at `row`."""
        leaf = self._number(row)
        self._keys.set(self._seed_of_samples, step, leaf * self._rows_per_leaf)
        torch.manual_seed(int(fold(self._seed, leaf, step, _SEED_LEAF) >> 1))
        with self.gradients.leaf():
            yield

    def _number(self, row: int) -> int:
        return self.gradients.leaves.start + row // self._rows_per_leaf

    def add(self, row: int, loss_sum: Tensor, row_weights: Tensor) -> None:
        """Store the sums of the losses and of the row weights of one leaf."""
        leaf = self._number(row)
        self._sums[0, leaf].copy_(loss_sum)
        self._sums[1, leaf].copy_(row_weights)

    def finish(self) -> None:
        """Set each parameter's `grad` to the sum of its gradients over the leaves of all ranks."""
        self.gradients.finish()

    def sum_(self, values: Tensor) -> Tensor:
        """Sum `values` over the ranks in place, and set the first two values to the batch's loss
        and weight.

        values: (n,) float32; all but the first two are integers, or zero on all ranks but one.
        """
        # A leaf's sums are zero on all ranks but one, so adding them in any order is exact.
        summed = self.world.sum_(torch.cat([values, self._sums.flatten()]))
        values.copy_(summed[: len(values)])
        values[:2] = tree_sum(summed[len(values) :].view(2, -1).T)
        self._sums.zero_()
        return values

    def keeps_gradients(self, num_passes: int) -> bool:
        """Return False, because each leaf has separate gradients."""
        return False

    def prepare(self, rows: object, losses: Callable[..., Tensor], num_passes: int) -> None:
        """Do nothing, because all steps use the same tree."""
