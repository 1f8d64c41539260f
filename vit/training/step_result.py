"""What a step did, on its way from the device to the host, and what it was told: limits.

vit.step    sums by `Slot` over the ranks, norm, rows -> one vector, copied behind the step
vit.hooks   reads it as `StepValues` once the next step is queued
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
    """Number of ranks that were asked to stop."""
    BAD_IMAGES = 3
    VERDICT = 4
    """What became of the update: 0, or a sum of `NON_FINITE` and `SPIKE`. While it is summed, the
    norm of the gradient: ranks of different hardware may differ in its last bit, and must not
    differ in what they do."""
    RANK_REPORTS = 5
    """First number of rank 0's report; the reports of the other ranks follow. Each rank adds to its
    own only, so the sum gathers them."""


class StepPhase(StrEnum):
    """Where the time of a step goes, for `vit.extras.planner.benchmark`."""

    CHANGE = "change"
    """Augmentation of grey levels, ahead of the step."""
    FINISH = "finish"
    """Augmentation of float32 inputs, and targets."""
    TEACHER = "teacher"
    """The forward pass of a teacher (`distill`)."""
    FORWARD = "forward"
    """With the loss."""
    BACKWARD = "backward"
    """With DDP's averaging of gradients."""
    UPDATE = "update"
    """Gradient norm, clipping, optimizer and average."""


READ_LATE = 2
"""Steps that are not read yet when a step is queued: itself and the one before."""
NON_FINITE = 1
"""Of a verdict: the gradient was not finite."""
SPIKE = 2
"""Of a verdict: loss or gradient norm were above their limits."""


class Limits(NamedTuple):
    """Above either an update is skipped."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Before clipping."""


class StepValues(NamedTuple):
    """What a step did, as numbers on the host."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Before clipping."""
    stop: float
    """Number of ranks that were asked to stop."""
    bad_images: int
    verdict: int
    """0 if the update was made; else a sum of `NON_FINITE` and `SPIKE`."""
    rank_reports: NDArray[np.float32]
    """(ranks, size) the argument `report` of each rank's call."""
    losses: NDArray[np.float32]
    """(rows,) loss of each row of this rank, of the target that it was trained on: mixed and
    smoothed; NaN for a row of weight 0."""
    margins: NDArray[np.float32]
    """(rows,) how far the logit of its own label is above all others
    (`vit.training.metrics.margins`)."""
    norms: NormsByName | None
    """At the steps of `log.norms_every_steps`."""


class StepResult:
    """What a step did, on its way to the host.

    sums: (5 + ranks * report_size,) float32 on the device, by `Slot`, summed over the ranks.
    grad_norm: () float32 on the device. rows: losses, margins and weights of this rank's rows, each
    in as many pieces as there are micro-batches. norms: of a step at which they are measured.
    """

    def __init__(
        self,
        sums: Tensor,
        grad_norm: Tensor,
        report_size: int = 1,
        rows: Sequence[Tensor] = (),
        norms: Measured | None = None,
    ):
        # One vector, so that the rows cost neither a launch nor a copy of their own.
        ends = [] if norms is None else [norms.values]
        values = torch.cat([sums, grad_norm[None], *rows, *ends])
        self._norms = norms
        self._num_rows_values = sum(map(len, rows))
        self._report_size = report_size
        self._num_shared = len(sums) + 1
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            # The copy is queued right behind the step, with an event: `read` then waits for this
            # step, and not for the next one, which is queued by that time.
            pinned = torch.empty(values.shape, pin_memory=True)
            self._values = pinned.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> StepValues:
        """Return the numbers, after waiting for the device to finish this step."""
        if self._event is not None:
            self._event.synchronize()  # the only wait for the device, one step late
        shared = self._values[: self._num_shared]
        sums = shared[: Slot.RANK_REPORTS].tolist()
        of_rows, of_norms = self._values[self._num_shared :].tensor_split([self._num_rows_values])
        losses, row_margins, weights = of_rows.numpy().reshape(3, -1)
        # As an array: each rank reads all reports in each step, and there may be thousands.
        reports = shared[Slot.RANK_REPORTS : -1].numpy().reshape(-1, self._report_size)
        return StepValues(
            loss=sums[Slot.LOSS_SUM] / max(sums[Slot.ROW_WEIGHTS], 1.0),
            grad_norm=shared[-1].item(),
            stop=sums[Slot.STOP],
            bad_images=int(sums[Slot.BAD_IMAGES]),
            verdict=int(sums[Slot.VERDICT]),
            rank_reports=reports,
            losses=np.where(weights > 0, losses, np.float32(np.nan)),
            margins=np.where(weights > 0, row_margins, np.float32(np.nan)),
            norms=None if self._norms is None else self._norms.named(of_norms.tolist()),
        )
