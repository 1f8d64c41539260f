"""The state of a run: the part of a checkpoint that is not tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from vit.config.base import VAL
from vit.training.plan import Plan


def rank(top1: float, loss: float | None) -> tuple[float, float]:
    """Return a key that is larger for the better of two results, by accuracy and then by loss."""
    return top1, -loss if loss is not None and math.isfinite(loss) else -math.inf


@dataclass
class RunState:
    """Counters and facts of a run. Its fields are keys of `checkpoint.json`."""

    step: int = 0
    """Global batches attempted, which is also the position in the data."""
    updates_skipped: int = 0
    """Number of skipped updates in the complete run."""
    updates_skipped_in_a_row: int = 0
    """Number of skipped updates since the last good update."""
    rewinds: int = 0
    """Number of times that the run went back to a checkpoint (`vit.hooks.guard`)."""
    passed_over: list[list[int]] = field(default_factory=list)
    """Ranges of batches that are not trained on: first step, and the step after the last."""
    recent: list[list[float]] = field(default_factory=list)
    """Step, loss and gradient norm of the newest steps, from which spike limits are computed."""
    interval_losses: list[float] = field(default_factory=list)
    """Losses of the steps since the last line of metrics; the next line has their mean."""
    checked_step: int = 0
    """First batch whose checksum is not yet in the record."""
    sample_checksum: int = 0
    """Checksum of the samples from `checked_step` on (`vit.hooks.order_check`)."""
    bad_images: int = 0
    """Training images that could not be decoded and were ignored."""
    evaluated_step: int = -1
    """The step of the newest evaluation."""
    best_top1: float = -1.0
    """Best top-1 accuracy so far, in percent."""
    best_loss: float | None = None
    """The loss of that evaluation; None if it was not finite, or in old checkpoints."""
    best_set: str = VAL
    """The set of that evaluation: `eval.best_by`."""
    restarts: int = 0
    """Number of times that the run was resumed."""
    elapsed_s: float = 0.0
    """Time spent on the run in all attempts, including evaluation and saving."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Values that must be the same after a resume: the data's fingerprint, the model's classes."""

    def is_passed_over(self, step: int) -> bool:
        """Return whether the batch of `step` is not trained on."""
        return any(first <= step < stop for first, stop in self.passed_over)

    def num_passed_over(self, step: int) -> int:
        """Return how many batches before `step` are not trained on."""
        ranges = (range(first, min(stop, step)) for first, stop in self.passed_over)
        return len(set().union(*ranges))

    def is_evaluation_due(self, plan: Plan) -> bool:
        """Return whether an evaluation at this step is planned and was not made yet."""
        return plan.evaluates_at(self.step) and self.evaluated_step < self.step

    def is_finished(self, plan: Plan) -> bool:
        """Return whether nothing is left to train and to evaluate."""
        return self.step == plan.total_steps and not self.is_evaluation_due(plan)

    def is_over(self, plan: Plan) -> bool:
        """Return whether nothing is left to do, also if `step` is past the plan's end."""
        return self.step > plan.total_steps or self.is_finished(plan)

    def take_best(self, best_set: str, *results: tuple[float, float]) -> bool:
        """Keep the best of `results`, pairs of top-1 and loss; return whether it is a new best.

        If accuracies are equal the smaller loss is better, because few images give few different
        accuracies. A best result on a different set is not comparable, and is dropped.
        """
        if best_set != self.best_set:
            self.best_set = best_set
            self.best_top1 = -1.0
            self.best_loss = None
        top1, loss = max(results, key=lambda pair: rank(*pair))
        if rank(top1, loss) <= rank(self.best_top1, self.best_loss):
            return False
        self.best_top1 = top1
        self.best_loss = loss if math.isfinite(loss) else None
        return True
