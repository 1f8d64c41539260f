"""The result of a step on its way from the device to the host, and the limits of a step.

vit.step    sums by `Slot` over the ranks, norm, rows -> one vector, copied after the step
vit.hooks   reads it as `StepValues` when the next step is queued
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
    """Number of ranks that got a signal."""
    BAD_IMAGES = 3
    VERDICT = 4
    """0 if the update was made, else a sum of `NON_FINITE` and `SPIKE`. During the sum over the
    ranks it holds the norm of the gradient: the norm's last bit may differ between ranks of
    different hardware, but all ranks must decide alike."""
    RANK_REPORTS = 5
    """First number of rank 0's report; the reports of the other ranks follow. Each rank writes only
    its own, so the sum gathers all of them."""


class StepPhase(StrEnum):
    """The phases of a step, whose time `vit.extras.planner.benchmark` measures."""

    CHANGE = "change"
    """Augmentation of grey levels, before the step."""
    FINISH = "finish"
    """Augmentation of float32 inputs, and targets."""
    TEACHER = "teacher"
    """The forward pass of a teacher (`distill`)."""
    FORWARD = "forward"
    """The forward pass, with the loss."""
    BACKWARD = "backward"
    """The backward pass, with DDP's averaging of gradients."""
    UPDATE = "update"
    """Gradient norm, clipping, optimizer and average."""


READ_LATE = 2
"""Steps whose results are not on the host when a step is queued: this one and the previous one."""
NON_FINITE = 1
"""Bit of a verdict: the gradient was not finite."""
SPIKE = 2
"""Bit of a verdict: loss or gradient norm were above their limits."""


class Limits(NamedTuple):
    """Limits of a step; above either the update is skipped."""

    loss: float
    """Largest mean over the global batch."""
    grad_norm: float
    """Largest norm before clipping."""


class StepValues(NamedTuple):
    """The result of a step as numbers on the host."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Norm before clipping."""
    stop: float
    """Number of ranks that got a signal."""
    bad_images: int
    verdict: int
    """0 if the update was made; else a sum of `NON_FINITE` and `SPIKE`."""
    rank_reports: NDArray[np.float32]
    """(ranks, size) the argument `report` of each rank."""
    losses: NDArray[np.float32]
    """(rows,) loss of each row of this rank with its mixed and smoothed target; NaN for a row of
    weight 0."""
    margins: NDArray[np.float32]
    """(rows,) margin of each row of this rank (`vit.training.metrics.margins`)."""
    norms: NormsByName | None
    """Norms of each layer, at the steps of `log.norms_every_steps`."""


class StepResult:
    """The result of a step on its way to the host.

    sums: (5 + ranks * report_size,) float32 on the device, by `Slot`, summed over the ranks.
    grad_norm: () float32 on the device. rows: losses, margins and weights of this rank's rows, each
    in as many pieces as there are micro-batches. norms: None if the step does not measure them.
    """

    def __init__(
        self,
        sums: Tensor,
        grad_norm: Tensor,
        report_size: int = 1,
        rows: Sequence[Tensor] = (),
        norms: Measured | None = None,
    ):
        # One vector, so that the rows need no launch and no copy of their own.
        ends = [] if norms is None else [norms.values]
        values = torch.cat([sums, grad_norm[None], *rows, *ends])
        self._norms = norms
        self._num_rows_values = sum(map(len, rows))
        self._report_size = report_size
        self._num_shared = len(sums) + 1
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            # The copy and its event are queued directly after the step, so that `read` waits for
            # this step, not for the next one, which is then already queued.
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
        # An array, because each rank reads all reports in each step, and there may be thousands.
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
