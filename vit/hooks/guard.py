"""What keeps a bad update from the weights, and what is done about it.

    read       loss and gradient norm of each step, one step late (vit.hooks.monitor)
    limits     of a step, from those up to the second before it: known when it is queued, on any
               rank, after any restart
    judged     on the device, before the update, from sums over the ranks (vit.step)
    done       the update is left out; once the host reads that, with the next step queued, the run
               goes on, stops, or goes back to its newest checkpoint

A run that goes back does again what came before the bad batch, and passes over the batches around
it: their steps count, like those of updates that were left out, so that order, rates, epochs and
seeds stay functions of the step. `RunState.passed_over` has them; it is written into the checkpoint
before anything is done again, so that a kill changes nothing.

Passing over follows PaLM (arXiv 2204.02311, 5.1: back to a checkpoint about 100 steps before the
spike, past 200 to 500 batches); leaving out by the last 128 steps follows allenai/OLMo-core's
SkipStepOptimizer, whose limit is 6 standard deviations above the mean. Median and median distance
stand for them here: a spike in the window does not raise the limit for the next one.
"""

from __future__ import annotations

import math
import statistics
from contextlib import suppress
from dataclasses import asdict, replace
from shlex import quote
from typing import Any

import numpy as np
import torch

from vit.checkpoint import checkpoint as checkpoints
from vit.checkpoint.resume import restart_best
from vit.checkpoint.state import RunState
from vit.config.schema import Config
from vit.data.batches import AugmentedBatches
from vit.distributed.process_group import World
from vit.loggers.record import Record
from vit.run import GoBack, Hook, Run
from vit.run_folder import CHECKPOINTS
from vit.system.files import ShardError
from vit.training.step_result import NON_FINITE, READ_LATE, Limits, StepValues

NORMAL_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median distance from the median."""
DONE = {"skip": "update skipped", "stop": "the run stops", "rewind": "the run goes back"}
"""What is said of each action."""
NAMED_SAMPLES = 8
"""Of the largest losses in a batch, by which the record names it."""


class Rewind(GoBack):
    """The run goes back to its newest checkpoint, and skips the batches around a step."""

    def __init__(self, step: int, found: dict[str, Any]):
        """step: counted from 0. found: what the record is told of it."""
        super().__init__(f"step {step + 1}: {found['reason']}")
        self.step = step
        self.found = found

    def state_from(self, saved: RunState, given_up: RunState, skip_steps: int) -> RunState:
        """Return the state to go on with: that of the checkpoint, which passes over the batches
        around this step.

        given_up: the state of now, whose counts and facts of the whole run go on: the checkpoint's
        may be of before `train.exact_over_ranks` was switched on.
        """
        window = [max(self.step - skip_steps, saved.step), self.step + skip_steps + 1]
        return replace(
            saved,
            passed_over=[*saved.passed_over, window],
            rewinds=given_up.rewinds + 1,
            restarts=given_up.restarts,
            facts=given_up.facts,
            elapsed_s=given_up.elapsed_s,
        )

    def apply(self, run: Run) -> None:
        """Load the newest checkpoint; every rank calls it."""
        skip_steps = run.config.guard.rewind_skip_steps

        def note() -> tuple[str, dict[str, Any]]:
            newest = checkpoints.newest_checkpoint(run.folder, verify=True)
            assert newest is not None, "a run that may go back saves its start"
            folder, info = newest
            state = self.state_from(checkpoints.state_of(info), run.state, skip_steps)
            # Before anything is done again: a kill from here on changes nothing.
            checkpoints.update_info(folder, asdict(state))
            run.place.push()
            return folder.name, asdict(state)

        name, values = run.world.broadcast_from_main(note)
        run.state = RunState(**values)
        checkpoints.load_checkpoint(run.folder / CHECKPOINTS / name, run.train_step)
        restart_best(run.folder, run.state, run.world)
        first, stop = run.state.passed_over[-1]
        stop = min(stop, run.plan.total_steps)
        run.record.go_back(
            run.state.step,
            f"back at step {run.state.step} after {self} (rewind {run.state.rewinds} of"
            f" {run.config.guard.max_rewinds}): steps {first + 1} to {stop} will be passed over"
            f"{', the rest of the run' if stop == run.plan.total_steps else ''}",
            at_step=self.step + 1,
            first_passed_over=first + 1,
            last_passed_over=stop,
            rewinds=run.state.rewinds,
            **self.found,
        )


class Guard:
    """Sets the limits of each step, and decides what follows when an update was left out."""

    def __init__(
        self,
        config: Config,
        state: RunState,
        world: World,
        record: Record,
        batches: AugmentedBatches | None = None,
    ):
        """batches: what is trained on; its samples are named if they are known."""
        self._settings = config.guard
        self._most_in_a_row = config.train.max_skipped_steps
        self._scales_loss = config.train.precision == "fp16"
        self._run_dir = config.run.dir
        self._state = state
        self._world = world
        self._record = record
        self._batches = batches if batches is not None and batches.exact else None

    def limits(self, step: int) -> Limits | None:
        """Return the limits of `step`, None where there are none."""
        settings = self._settings
        if settings.on_spike == "none":
            return None
        known = [
            pair
            for number, *pair in self._state.recent
            # The loss jumps where images change their size (`schedule.image_sizes`).
            if number <= step - READ_LATE and self._size(int(number)) == self._size(step)
        ]
        known = known[-settings.window_steps :]
        if len(known) < settings.window_steps:
            return None
        losses, norms = zip(*known, strict=True)
        of = settings.spike_of
        return Limits(
            limit_of(losses, settings.spike_sigmas) if of != "grad_norm" else math.inf,
            limit_of(norms, settings.spike_sigmas) if of != "loss" else math.inf,
        )

    def _size(self, step: int) -> tuple[int, int] | None:
        """Return (height, width) of the images of `step`, None where nothing is said of them."""
        if self._batches is None or not self._batches.image_format.stages:
            return None
        epoch = step // self._batches.order.steps_per_epoch
        return self._batches.image_format.in_epoch(epoch).size

    def judge(self, step: int, values: StepValues) -> Exception | None:
        """Count and record what became of `step`; return what ends the training, or None.

        Every rank calls it, for the same steps.
        """
        state = self._state
        limits = self.limits(step)
        if self._settings.on_spike != "none":
            if math.isfinite(values.loss) and math.isfinite(values.grad_norm):
                state.recent.append([step, values.loss, values.grad_norm])
            del state.recent[: -self._settings.window_steps - 1]
        if not values.verdict:
            state.updates_skipped_in_a_row = 0
            return None
        state.updates_skipped += 1
        state.updates_skipped_in_a_row += 1
        not_finite = bool(values.verdict & NON_FINITE)
        found: dict[str, Any] = {"loss": values.loss, "grad_norm": values.grad_norm}
        if not_finite and self._scales_loss and math.isfinite(values.loss):
            reason = "fp16 overflow, update skipped"
            self._record.write("fault", step + 1, reason=reason, action="skip", **found)
            return self._too_many(step, values)
        key = "on_nonfinite" if not_finite else "on_spike"
        action = getattr(self._settings, key)
        reason = _reason(values, limits)
        if limits is not None:
            found |= {"loss_limit": limits.loss, "grad_norm_limit": limits.grad_norm}
        found |= {"action": action, "samples": self._largest_losses(step, values)}
        self._record.write("fault", step + 1, reason=f"{reason}, {DONE[action]}", **found)
        self._record.say(
            f"step {step + 1}: {reason}, {DONE[action]} ({_numbers(values, limits)});"
            f" {self._replay(step)} shows its batch"
        )
        if action == "skip":
            return self._too_many(step, values)
        if action == "rewind" and state.rewinds < self._settings.max_rewinds:
            return Rewind(step, {"reason": reason, **found})
        if action == "rewind":
            why = f"after {state.rewinds} rewinds (guard.max_rewinds)"
            remedy = "raise guard.rewind_skip_steps"
            if not not_finite:
                remedy += " or guard.spike_sigmas"
        else:
            why = f"and guard.{key}=stop"
            remedy = f"continue with guard.{key}=skip or rewind"
        return ValueError(
            f"step {step + 1}: {reason} ({_numbers(values, limits)}), {why}: see its batch with"
            f" {self._replay(step)}; lower optim.lr, lengthen the warm-up, or {remedy}; the last"
            " checkpoint is from before"
        )

    def _too_many(self, step: int, values: StepValues) -> ValueError | None:
        count = self._state.updates_skipped_in_a_row
        if count < self._most_in_a_row:
            return None
        what = f"{count} updates in a row were left out, this one as a spike"
        remedy = "Lower optim.lr, lengthen the warm-up, or raise guard.spike_sigmas"
        if values.verdict & NON_FINITE:
            what = f"the gradient was not finite {count} times in a row"
            remedy = "Lower optim.lr or lengthen the warm-up"
            if self._scales_loss:
                remedy = "Lower optim.lr, lengthen the warm-up, or use train.precision=bf16"
        return ValueError(
            f"step {step + 1}: {what} (loss {values.loss:.4g}): training has diverged. {remedy};"
            " the last checkpoint is from before"
        )

    def _replay(self, step: int) -> str:
        return f"python launch/replay.py {quote(str(self._run_dir))} --step {step + 1}"

    def _largest_losses(self, step: int, values: StepValues) -> list[tuple[str, float | None]]:
        """Return keys and losses of the rows with the largest losses, of all ranks, not finite ones
        first; [] where the samples are not known."""
        if self._batches is None:
            return []
        # Ranks may have unequal shares (`train.exact_over_ranks`).
        first = self._batches.first_row
        losses = torch.zeros(self._batches.order.global_batch_size, device=self._world.device)
        own = torch.from_numpy(values.losses).to(self._world.device)
        losses[first : first + len(own)] = own
        found = self._world.sum_(losses).cpu().numpy()
        if not self._record.is_main:
            return []
        largest = np.argsort(-np.nan_to_num(found, nan=np.inf), kind="stable")[:NAMED_SAMPLES]
        samples = self._batches.order.rows(step, 0, len(found))[largest]
        named = []
        with suppress(ShardError):  # keys are in the shards, which may be away: not worth a run
            for sample, loss in zip(samples.tolist(), found[largest].tolist(), strict=True):
                named.append((self._batches.split.key(sample), _finite(loss)))
        return named


class GuardHook(Hook):
    """Skips updates that would harm, and stops or goes back after them (`guard`)."""

    def __init__(self, config: Config):
        self.saves_start = config.guard.rewinds()

    def begin(self, run: Run) -> None:
        """See `Hook`."""
        self._guard = Guard(run.config, run.state, run.world, run.record, run.batches)

    def limits(self, step: int) -> Limits | None:
        """See `Hook`."""
        return self._guard.limits(step)

    def read(self, step: int, values: StepValues) -> Exception | None:
        """See `Hook`."""
        return self._guard.judge(step, values)


def limit_of(values: tuple[float, ...], sigmas: float) -> float:
    """Return the median of `values` and `sigmas` of their standard deviations, robustly estimated.

    Where half of them are equal nothing is known of how they vary: infinite.
    """
    median = statistics.median(values)
    distance = statistics.median(abs(value - median) for value in values)
    return median + sigmas * NORMAL_SIGMA * distance if distance else math.inf


def _reason(values: StepValues, limits: Limits | None) -> str:
    if values.verdict & NON_FINITE or limits is None:
        return "gradient not finite"
    names = []
    if values.loss > limits.loss:
        names.append("loss")
    if values.grad_norm > limits.grad_norm:
        names.append("gradient norm")
    # The device compares in float32: a value at its limit may be on its other side here.
    return f"{' and '.join(names) or 'loss or gradient norm'} above the limit"


def _numbers(values: StepValues, limits: Limits | None) -> str:
    """Return "loss 7.21, limit 3.02; gradient norm 14.2, limit 5.1"."""
    found = {"loss": values.loss, "gradient norm": values.grad_norm}
    most = (math.inf, math.inf) if limits is None else limits
    return "; ".join(
        f"{name} {value:.4g}" + (f", limit {limit:.4g}" if math.isfinite(limit) else "")
        for (name, value), limit in zip(found.items(), most, strict=True)
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
