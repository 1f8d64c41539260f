"""Where a run stands: the part of a checkpoint that is not tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from vit.config.base import VAL
from vit.training.plan import Plan


def rank(top1: float, loss: float | None) -> tuple[float, float]:
    """Return what is larger for the better of two results, by accuracy and then by loss."""
    return top1, -loss if loss is not None and math.isfinite(loss) else -math.inf


@dataclass
class RunState:
    """Counters and facts of a run. Its fields are keys of `checkpoint.json`."""

    step: int = 0
    """Global batches attempted, which is also the position in the data."""
    updates_skipped: int = 0
    """Updates that were left out, over the complete run."""
    updates_skipped_in_a_row: int = 0
    """The same, since the last good one."""
    rewinds: int = 0
    """How often the run went back to a checkpoint (`vit.hooks.guard`)."""
    passed_over: list[list[int]] = field(default_factory=list)
    """First step and the one behind the last, of each row of batches that are not trained on."""
    recent: list[list[float]] = field(default_factory=list)
    """Step, loss and gradient norm of the newest steps, where spikes are looked for."""
    interval_losses: list[float] = field(default_factory=list)
    """Losses of the steps since the last line of metrics, whose mean the next line has."""
    checked_step: int = 0
    """First batch that no line about checked samples covers yet."""
    sample_checksum: int = 0
    """Of the samples from there on (`vit.hooks.order_check`)."""
    bad_images: int = 0
    """Training images that could not be decoded and were ignored."""
    evaluated_step: int = -1
    """The step of the newest evaluation."""
    best_top1: float = -1.0
    """Best top-1 accuracy so far, in percent."""
    best_loss: float | None = None
    """The loss with it; None where it was not finite, or before this was recorded."""
    best_set: str = VAL
    """The set that it was reached on: `eval.best_by`."""
    restarts: int = 0
    """How often the run was resumed."""
    elapsed_s: float = 0.0
    """Time spent on the run over all restarts, evaluation and saving included."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What must be the same after a resume: the data's fingerprint, the model's classes."""

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
        """Return whether nothing is left, or the run is to end before where it has come to."""
        return self.step > plan.total_steps or self.is_finished(plan)

    def take_best(self, best_set: str, *results: tuple[float, float]) -> bool:
        """Keep the best of `results`, pairs of top-1 and loss; return whether it is a new best.

        Of equal accuracies the smaller loss is better: few images give few different accuracies.
        What was best on another set than `best_set` is not comparable, and does not count.
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
