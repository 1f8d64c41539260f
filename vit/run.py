"""The `Run` and its hooks: `vit.train` calls the methods of each `Hook` during training.

The hooks depend only on the config, so all ranks call the same hooks in the same order.
A hook overrides some of these methods:

    opened      before the model is created: reject a config that cannot work
    begin       when training begins, at the first step or after a checkpoint
    loss_limit  before a step
    queued      after a step was queued, while the device computes it
    read        one step later, when the step's numbers are on the host
    verify      before evaluating and saving, at the end of an epoch, and when the run stops
    evaluated   after an evaluation
    failed      when an error ends the run
    ended       on rank 0, when the run has ended

A hook must not read from the device, because training would wait for the read. `read` receives
numbers that are already on the host. `opened`, `begin`, `read` and `verify` may use collectives,
because all ranks call these methods at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from vit.checkpoint.saver import SavedBeside, Saver
from vit.checkpoint.state import RunState
from vit.config.schema import Config
from vit.data.batches import AugmentedBatches, Batch
from vit.distributed import flight_recorder
from vit.distributed.exit import Interrupted, StopSignals, leave_hung, problem_of
from vit.distributed.outcome import Outcome
from vit.distributed.process_group import World
from vit.distributed.watchdog import HangVerdict, Watch
from vit.evaluation.evaluate import Evaluator
from vit.loggers.record import Record, StartTimes
from vit.run_folder.place import Place
from vit.step import TrainStep
from vit.training.plan import Plan
from vit.training.run_data import Notes, RunData
from vit.training.step_result import StepValues


class Hook:
    """The base class of all hooks. Its methods do nothing."""

    saved: SavedBeside | None = None
    """Data to save with every checkpoint. Subclasses set this attribute in `opened` or earlier."""

    def opened(self, config: Config, world: World, data: RunData, place: Place) -> Notes:
        """Return notes and facts about the start of the run. An error in this method is raised on
        all ranks."""
        return Notes()

    def begin(self, run: Run) -> None:
        """Prepare to train from the step in `run.state`."""

    def loss_limit(self, step: int) -> float | None:
        """Return a limit that is the same on all ranks. The update at `step` is skipped if the mean
        loss of the global batch is above the limit."""
        return None

    def queued(self, batch: Batch) -> None:
        """Process the batch of the step that was just queued."""

    def read(self, step: int, values: StepValues) -> Exception | None:
        """Return None, or an error that ends training, which must be the same on all ranks."""
        return None

    def verify(self, is_end: bool) -> None:
        """Raise an error if the run must not be evaluated or saved.

        is_end: whether an epoch or attempt has ended. If so, a line is added to metrics.jsonl.
        """

    def evaluated(self, step: int, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return values to add to the line of metrics.jsonl, and a log line or "".

        values: the evaluation results, which are already part of the line.
        """
        return {}, ""

    def failed(self, run: Run, error: Exception) -> None:
        """Add notes to the `error` that ends the run."""

    def ended(self, run: Run, outcome: Outcome) -> None:
        """Do final work on rank 0, while metrics.jsonl is still open."""


@dataclass
class Run:
    """A run that is ready to train, from its first step or from a checkpoint."""

    config: Config
    world: World
    plan: Plan
    batches: AugmentedBatches
    evaluators: list[Evaluator]
    """One evaluator per split, beginning with `data.val_split`."""
    train_step: TrainStep
    state: RunState
    record: Record
    saver: Saver
    hooks: Sequence[Hook]
    """The hooks in calling order, which is the same on all ranks."""
    place: Place
    signals: StopSignals
    start_times: StartTimes
    watch: Watch = field(init=False)
    """The watchdog, which ends all ranks if one rank hangs during training."""

    def __post_init__(self) -> None:
        flight_recorder.write_to(self.folder)
        self.watch = Watch(self.world, self.config.run.hang_timeout_s, self._end_hung)

    @property
    def folder(self) -> Path:
        """The run folder on this machine."""
        return self.place.folder

    def models(self) -> dict[str, nn.Module]:
        """Return the model as "model" and, if the run has one, the EMA model as "ema"."""
        ema = self.train_step.ema
        return {"model": self.train_step.model} | ({} if ema is None else {"ema": ema.module})

    def loss_limit(self, step: int) -> float | None:
        """Return the loss limit for the update at `step`, from the first hook that sets a limit."""
        of_hooks = (hook.loss_limit(step) for hook in self.hooks)
        return next((limit for limit in of_hooks if limit is not None), None)

    def verify(self, is_end: bool) -> None:
        """Call `Hook.verify` of every hook."""
        for hook in self.hooks:
            hook.verify(is_end)

    def _end_hung(self, verdict: HangVerdict) -> None:
        """Record why the run hangs, and end the process. Called in the watchdog's thread."""
        self._record_error(verdict.message)
        leave_hung(verdict)

    def _record_error(self, reason: str) -> None:
        with suppress(ValueError):  # on a full disk, report only the first error
            self.record.write("end", self.state.step, outcome="error", reason=reason)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Wait for the last write, close metrics.jsonl, and release the run folder and the signal
        handlers."""
        self.watch.close()
        try:
            # A second Ctrl-C must end the process even if the writing thread never returns.
            is_second = isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted)
            self.saver.close(at_once=is_second)
            if isinstance(error, Exception):
                self._record_error(problem_of(error))
            elif error is not None:
                self._record_error(type(error).__name__)
        finally:
            for evaluator in self.evaluators:
                evaluator.close()
            self.place.leave(error)
            self.record.close()
            # Keep the signal handlers while other ranks run. Rank 0 may still be drawing the
            # report, and a signal must not kill the ranks that wait for rank 0.
            if error is not None or self.world.size == 1:
                self.signals.restore()
