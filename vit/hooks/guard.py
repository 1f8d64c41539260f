"""Detect loss spikes and non-finite gradients, and skip the update or stop the run.

1. `GuardHook.loss_limit` computes a limit for the loss from steps up to two before the current
   step. The results of these steps are known before the step is queued, so all ranks and resumed
   runs use the same limit.
2. The device skips the update if the loss exceeds the limit. `vit.step` bases this decision on sums
   over all ranks.
3. One step later, the host reads the decision. `GuardHook.read` then continues or stops the run.

Skipped updates still count as steps, so the sample order, the learning rate, epochs and seeds
remain functions of the step.

Skipping updates follows allenai/OLMo-core's SkipStepOptimizer, whose limit is 6 standard deviations
above the mean of the last 128 steps. This module uses the median and the median absolute deviation
instead, because a spike among the last steps does not raise them.
"""

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from shlex import quote
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vit.config.schema import Config
from vit.run import Hook, Run
from vit.system.files import ShardError
from vit.training.step_result import NON_FINITE, READ_LATE, StepValues

NORMAL_SIGMA = 1.4826
"""The standard deviation of a normal distribution divided by its median absolute deviation."""
DONE = {"skip": "update skipped", "stop": "the run stops"}
"""Maps each action to its text in messages and metrics.jsonl."""
NAMED_SAMPLES = 8
"""The number of samples with the largest losses that metrics.jsonl lists for a bad batch."""


class GuardHook(Hook):
    """Skips bad updates, and then continues or stops the run (`guard`)."""

    def __init__(self, config: Config):
        self._settings = config.guard

    def begin(self, run: Run) -> None:
        """See `Hook`."""
        self._run = run
        self._scales_loss = run.config.train.precision == "fp16"

    def loss_limit(self, step: int) -> float | None:
        """Return the loss limit at `step`, or None if there is no limit or too few steps have
        finished."""
        settings = self._settings
        if settings.on_spike == "none":
            return None

        losses = [
            loss
            for number, loss in self._run.state.recent
            # Use only steps with the current image size, because the loss jumps when the size
            # changes (`schedule.image_sizes`).
            if number <= step - READ_LATE and self._size(int(number)) == self._size(step)
        ]
        losses = losses[-settings.window_steps :]
        if len(losses) < settings.window_steps:
            return None
        return limit_of(losses, settings.spike_sigmas)

    def _size(self, step: int) -> tuple[int, int] | None:
        """Return the (height, width) of the images at `step`, or None if the size never changes."""
        batches = self._run.batches
        if not batches.exact or not batches.image_format.stages:
            return None
        return batches.image_format.in_epoch(step // batches.order.steps_per_epoch).size

    def read(self, step: int, values: StepValues) -> Exception | None:
        """Count and record a skipped update. Return an error that ends training, or None.

        All ranks must call this for the same steps.
        """
        state = self._run.state
        loss_limit = self.loss_limit(step)
        if self._settings.on_spike != "none":
            if math.isfinite(values.loss) and math.isfinite(values.grad_norm):
                state.recent.append([step, values.loss])
            del state.recent[: -self._settings.window_steps - 1]

        if not values.verdict:
            state.updates_skipped_in_a_row = 0
            return None

        state.updates_skipped += 1
        state.updates_skipped_in_a_row += 1
        # In fp16, the loss scale grows until gradients overflow, which is not a fault of the batch.
        not_finite = bool(values.verdict & NON_FINITE)
        is_overflow = not_finite and self._scales_loss and math.isfinite(values.loss)
        if is_overflow:
            self._run.record.write(
                "fault",
                step + 1,
                reason="fp16 overflow, update skipped",
                action="skip",
                loss=values.loss,
                grad_norm=values.grad_norm,
            )
            return self._divergence_error(step, values)

        return self._report_bad_batch(step, values, loss_limit)

    def _report_bad_batch(
        self, step: int, values: StepValues, loss_limit: float | None
    ) -> ValueError | None:
        """Record and log a bad batch. Return an error if it ends training, else None."""
        if values.verdict & NON_FINITE:
            key = "on_nonfinite"
            reason = "gradient not finite"
        else:
            key = "on_spike"
            reason = "loss above the limit"
        action = getattr(self._settings, key)

        details: dict[str, Any] = {"loss": values.loss, "grad_norm": values.grad_norm}
        if loss_limit is not None:
            details["loss_limit"] = loss_limit
        details |= {"action": action, "samples": self._largest_losses(step, values)}
        self._run.record.write("fault", step + 1, reason=f"{reason}, {DONE[action]}", **details)

        numbers = _numbers(values, loss_limit)
        self._run.record.log(
            f"step {step + 1}: {reason}, {DONE[action]} ({numbers});"
            f" {self._replay(step)} shows this batch"
        )

        if action == "skip":
            return self._divergence_error(step, values)
        return ValueError(
            f"step {step + 1}: {reason} ({numbers}), and guard.{key}=stop: look at the batch"
            f" with {self._replay(step)}; lower optim.lr, lengthen the warm-up, or continue with"
            f" guard.{key}=skip; the last checkpoint was saved before this step"
        )

    def _divergence_error(self, step: int, values: StepValues) -> ValueError | None:
        """Return an error if `guard.max_skips` updates in a row were skipped, else None."""
        count = self._run.state.updates_skipped_in_a_row
        if count < self._settings.max_skips:
            return None

        if not values.verdict & NON_FINITE:
            problem = f"{count} updates in a row were skipped, the last because of a spike"
            remedy = "Lower optim.lr, lengthen the warm-up, or raise guard.spike_sigmas"
        elif self._scales_loss:
            problem = f"the gradient was not finite {count} times in a row"
            remedy = "Lower optim.lr, lengthen the warm-up, or use train.precision=bf16"
        else:
            problem = f"the gradient was not finite {count} times in a row"
            remedy = "Lower optim.lr or lengthen the warm-up"

        return ValueError(
            f"step {step + 1}: {problem} (loss {values.loss:.4g};"
            f" guard.max_skips={self._settings.max_skips}): training has diverged. {remedy}; the"
            " last checkpoint was saved before this step"
        )

    def _replay(self, step: int) -> str:
        return f"python launch/replay.py {quote(str(self._run.config.run.dir))} --step {step + 1}"

    def _largest_losses(self, step: int, values: StepValues) -> list[tuple[str, float | None]]:
        """Return the samples with the largest losses on all ranks, as keys and losses, non-finite
        losses first. Returns [] if the samples are unknown, and on all ranks but 0."""
        batches = self._run.batches
        if not batches.exact:
            return []

        batch_losses = self._losses_of_all_ranks(values.losses)
        if not self._run.record.is_main:
            return []

        by_loss = np.argsort(-np.nan_to_num(batch_losses, nan=np.inf), kind="stable")
        largest = by_loss[:NAMED_SAMPLES]
        samples = batches.order.rows(step, 0, len(batch_losses))[largest]

        named = []
        # Keys are read from the shards. If reading fails, the run continues without the keys.
        with suppress(ShardError):
            for sample, loss in zip(samples.tolist(), batch_losses[largest].tolist(), strict=True):
                named.append((batches.split.key(sample), _finite(loss)))
        return named

    def _losses_of_all_ranks(self, own: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the losses of the global batch. All ranks must call this with their `own`."""
        # Ranks may have different numbers of rows (`train.exact_over_ranks`), so sum the rows over
        # the ranks instead of gathering them.
        world, batches = self._run.world, self._run.batches
        losses = torch.zeros(batches.order.global_batch_size, device=world.device)
        rows = slice(batches.first_row, batches.first_row + len(own))
        losses[rows] = torch.from_numpy(own).to(world.device)
        return world.sum_(losses).cpu().numpy()


def limit_of(values: Sequence[float], sigmas: float) -> float:
    """Return the median of `values` plus `sigmas` standard deviations.

    The deviation is estimated from the median absolute deviation. The limit is infinite if half of
    the values are identical, because the estimate would be 0.
    """
    median = statistics.median(values)
    distance = statistics.median(abs(value - median) for value in values)
    return median + sigmas * NORMAL_SIGMA * distance if distance else math.inf


def _numbers(values: StepValues, loss_limit: float | None) -> str:
    """Return text such as "loss 7.21, limit 3.02; gradient norm 14.2"."""
    has_limit = loss_limit is not None and math.isfinite(loss_limit)
    limit = f", limit {loss_limit:.4g}" if has_limit else ""
    return f"loss {values.loss:.4g}{limit}; gradient norm {values.grad_norm:.4g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
