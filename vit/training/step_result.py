"""Copy the result of a step from the device to the host.

vit.step    sums by `Slot` over all ranks, norm, rows -> one vector, copied after the step
vit.hooks   read it as `StepValues` when the next step is queued
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from vit.optim.norms import Measured, NormsByName


class Slot(IntEnum):
    """Positions in the vector that a step sums over the ranks."""

    LOSS_SUM = 0
    ROW_WEIGHTS = 1
    STOP = 2
    """The number of ranks that received a signal."""
    BAD_IMAGES = 3
    VERDICT = 4
    """0 if the update was made, else a sum of `NON_FINITE` and `SPIKE`. Before the sum over ranks,
    this position contains the gradient norm. The norm's last bit may differ between ranks with
    different hardware, but the sum is the same on all ranks, so they make the same decision."""
    RANK_REPORTS = 5
    """The start of rank 0's report, followed by the reports of other ranks. Each rank writes only
    its own numbers, so the sum gathers all reports."""


class StepPhase(StrEnum):
    """The phases of a step that `vit.extras.planner.benchmark` times."""

    CHANGE = "change"
    """The augmentation of uint8 pixels, before the step."""
    FINISH = "finish"
    """The augmentation of float32 inputs, and the targets."""
    TEACHER = "teacher"
    """The forward pass of a teacher (`distill`)."""
    FORWARD = "forward"
    """The forward pass, including the loss."""
    BACKWARD = "backward"
    """The backward pass, including DDP's averaging of gradients."""
    UPDATE = "update"
    """Gradient norm, clipping, optimizer and EMA."""


READ_LATE = 2
"""The number of steps with unknown results when the host queues a step: this step and the
previous one."""
NON_FINITE = 1
"""The verdict bit for a non-finite gradient."""
SPIKE = 2
"""The verdict bit for a loss above its limit."""


class StepValues(NamedTuple):
    """The result of a step, as numbers on the host."""

    loss: float
    """The mean loss over the global batch."""
    grad_norm: float
    """The gradient norm before clipping."""
    stop: float
    """The number of ranks that received a signal."""
    bad_images: int
    verdict: int
    """0 if the update was made, else a sum of `NON_FINITE` and `SPIKE`."""
    rank_reports: NDArray[np.float32]
    """The `report` arguments of all ranks, (ranks, size)."""
    losses: NDArray[np.float32]
    """The loss of each row of this rank with its mixed and smoothed target, (rows,). NaN for a row
    of weight 0."""
    margins: NDArray[np.float32]
    """The margin of each row of this rank (`vit.training.metrics.margins`), (rows,)."""
    norms: NormsByName | None
    """The norms of each layer, at the steps of `log.norms_every_steps`."""


class StepResult:
    """The result of a step, which is copied to the host.

    Args:
        sums: (5 + ranks * report_size,) float32 on the device, by `Slot`, summed over the ranks.
        grad_norm: () float32 on the device.
        rows: The losses, margins and weights of this rank's rows, with one tensor per micro-batch.
        norms: None if the step did not measure them.
    """

    def __init__(
        self,
        sums: Tensor,
        grad_norm: Tensor,
        report_size: int = 1,
        rows: Sequence[Tensor] = (),
        norms: Measured | None = None,
    ):
        """Queue the copy to the host. `read` waits for it."""
        self._num_shared = len(sums) + 1
        self._num_row_values = sum(map(len, rows))
        self._report_size = report_size
        self._norms = norms

        # Copy a single vector, so that the rows need no kernel launch or copy of their own.
        norm_values = [] if norms is None else [norms.values]
        self._values, self._event = _queue_copy(
            torch.cat([sums, grad_norm[None], *rows, *norm_values])
        )

    def read(self) -> StepValues:
        """Wait until the device has finished this step, and return its numbers."""
        if self._event is not None:
            self._event.synchronize()  # the only wait for the device, one step late
        shared = self._values[: self._num_shared]
        sums = shared[: Slot.RANK_REPORTS].tolist()
        of_rows, of_norms = self._values[self._num_shared :].tensor_split([self._num_row_values])
        losses, row_margins, weights = of_rows.numpy().reshape(3, -1)

        return StepValues(
            loss=sums[Slot.LOSS_SUM] / max(sums[Slot.ROW_WEIGHTS], 1.0),
            grad_norm=shared[-1].item(),
            stop=sums[Slot.STOP],
            bad_images=int(sums[Slot.BAD_IMAGES]),
            verdict=int(sums[Slot.VERDICT]),
            # Each rank reads all reports, possibly thousands, in each step, so use an array.
            rank_reports=shared[Slot.RANK_REPORTS : -1].numpy().reshape(-1, self._report_size),
            losses=np.where(weights > 0, losses, np.float32(np.nan)),
            margins=np.where(weights > 0, row_margins, np.float32(np.nan)),
            norms=None if self._norms is None else self._norms.named(of_norms.tolist()),
        )


def _queue_copy(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Queue a copy of `values` to the host, and return the copy and the event of its completion.

    Values on the CPU are returned as they are, without an event.
    """
    if values.device.type != "cuda":
        return values, None

    # Queue the copy and its event directly after the step, so that `read` waits only for this step
    # and not for the next one.
    copied = torch.empty(values.shape, pin_memory=True).copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return copied, event
