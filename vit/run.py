"""A run, and the moments at which its hooks act: the seam `Hook` of `vit.train`.

`vit.build.build` makes the run, with a list of hooks from the config alone: all ranks have the same
ones in the same order. A hook overrides the moments that it needs:

    opened      data and plan are there, the model is not: refuse what cannot work
    begin       training begins, or begins again after it went back to a checkpoint
    limits      before a step
    queued      behind a step, while the device computes
    read        one step late, when the step's numbers are on the host
    skipped     in place of a step that is not trained on
    verify      before anything is evaluated or saved, at an epoch's end and at a stop
    evaluated   behind an evaluation
    failed      an error ends the run
    ended       the run has ended, on rank 0

A hook never reads the device: `read` gets what the step has brought to the host. Collectives are
allowed in `opened`, `begin`, `read` and `verify`, which all ranks call at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from vit.checkpoint.saver import SavedBeside, Saver
from vit.checkpoint.state import RunState
from vit.config.schema import Config
from vit.data.batches import AugmentedBatches, Batch
from vit.distributed.exit import StopSignals, leave_hung, problem_of
from vit.distributed.outcome import Outcome
from vit.distributed.process_group import World
from vit.distributed.watchdog import Verdict, Watch
from vit.evaluation.evaluate import Evaluator
from vit.loggers.record import Record, StartTimes
from vit.run_folder import Place, open_folder
from vit.step import TrainStep
from vit.training.objective import Objective, supervised
from vit.training.plan import Plan
from vit.training.reduce import Reduce, data_parallel
from vit.training.run_data import Notes, RunData
from vit.training.step_result import Limits, StepValues


class GoBack(Exception):
    """The run goes back to its newest checkpoint; raised on all ranks behind the same step."""

    def apply(self, run: Run) -> None:
        """Bring `run` to the state from which training begins again."""
        raise NotImplementedError


class Hook:
    """Does nothing at any moment."""

    saves_start = False
    """Whether the state before the first step is saved."""
    saved: SavedBeside | None = None
    """What each save writes beside the state, from `opened` on."""

    def opened(self, config: Config, world: World, data: RunData, place: Place) -> Notes:
        """Return what the start of the run gets. Raises ValueError, together on all ranks."""
        return Notes()

    def begin(self, run: Run) -> None:
        """Take the run, whose state is that of the next step."""

    def limits(self, step: int) -> Limits | None:
        """Return the limits above which the update at `step` is skipped; the same on all ranks."""
        return None

    def queued(self, batch: Batch) -> None:
        """Take the batch of the step that was queued."""

    def read(self, step: int, values: StepValues) -> Exception | None:
        """Return what ends the training behind `step`, or a `GoBack`: the same on all ranks."""
        return None

    def skipped(self, step: int) -> None:
        """Take a step that is not trained on."""

    def verify(self, is_end: bool) -> None:
        """Raise an error if nothing may be evaluated or saved.

        is_end: of an epoch or an attempt, which gets a line of the record.
        """

    def evaluated(self, step: int, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return values to add to the line of the record, and a line for people or "".

        values: the results in that line.
        """
        return {}, ""

    def failed(self, run: Run, error: Exception) -> None:
        """Add notes to `error`."""

    def ended(self, run: Run, outcome: Outcome) -> None:
        """Finish on rank 0; the record is still open."""


@dataclass
class Run:
    """A run that is ready to be trained, from its first step or from a checkpoint."""

    config: Config
    world: World
    plan: Plan
    batches: AugmentedBatches
    evaluators: list[Evaluator]
    """One for each split; the first for `data.val_split`."""
    train_step: TrainStep
    state: RunState
    record: Record
    saver: Saver
    hooks: Sequence[Hook]
    """The same on all ranks, in the order in which they are called."""
    place: Place
    signals: StopSignals
    start_times: StartTimes
    is_prepared: bool = False
    """Whether this process has done what comes before its first step."""
    watch: Watch = field(init=False)
    """Ends all ranks once one keeps the others waiting; begins with the training."""

    def __post_init__(self) -> None:
        self.watch = Watch(self.world, self.config.run.hang_timeout_s, self._end_hung)

    @property
    def folder(self) -> Path:
        """The run folder on this machine."""
        return self.place.folder

    def models(self) -> dict[str, nn.Module]:
        """Return the model, and its moving average if there is one, by name: model and ema."""
        ema = self.train_step.ema
        return {"model": self.train_step.model} | ({} if ema is None else {"ema": ema.module})

    def limits(self, step: int) -> Limits | None:
        """Return the limits of the first hook that has limits for the update at `step`."""
        of_hooks = (hook.limits(step) for hook in self.hooks)
        return next((limits for limits in of_hooks if limits is not None), None)

    def verify(self, is_end: bool) -> None:
        """Call `Hook.verify` of all hooks."""
        for hook in self.hooks:
            hook.verify(is_end)

    def _end_hung(self, verdict: Verdict) -> None:
        """Record why the run ends, and end it, from the thread of the watch."""
        self._record_error(verdict.message)
        leave_hung(verdict)

    def _record_error(self, reason: str) -> None:
        with suppress(ValueError):  # a full disk: the first error is the one to report
            self.record.write("end", self.state.step, outcome="error", reason=reason)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """End writing, close the record, and give back the terminal, the folder and the signals."""
        self.watch.close()
        try:
            # A second Ctrl-C: what the thread waits for may never come.
            self.saver.close(at_once=isinstance(error, KeyboardInterrupt))
            if isinstance(error, Exception):
                self._record_error(problem_of(error))
            elif error is not None:
                self._record_error(type(error).__name__)
        finally:
            for evaluator in self.evaluators:
                evaluator.close()
            self.place.leave(error)
            self.record.close()
            # Each of several ranks waits for the others, as for rank 0, which draws the report; a
            # signal to a finished run must not end it by one of those that wait.
            if error is not None or self.world.size == 1:
                self.signals.restore()


def no_weights(model: nn.Module, config: Config, data: RunData, world: World) -> dict[str, Any]:
    """Leave the weights of `model` as they were drawn, and return no facts.

    Raises ValueError for a config that starts from a file, which `vit.extras.compose` reads.
    """
    if config.init.checkpoint is not None:
        raise ValueError("init.checkpoint: build the run by vit.extras.compose.build_run")
    return {}


@dataclass(frozen=True)
class Parts:
    """What a run consists of beside the core; by default that of a plain run."""

    hooks: tuple[Hook, ...] = ()
    """The same on all ranks, in the order in which they are called."""
    open_place: Callable[[Config, World], Place] = open_folder
    create_objective: Callable[..., Objective] = supervised
    create_reduce: Callable[..., Reduce] = data_parallel
    load_weights: Callable[[nn.Module, Config, RunData, World], dict[str, Any]] = no_weights
    """Fills a new model from a file, and returns facts about its weights."""
