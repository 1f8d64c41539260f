"""The state of a run: everything in a checkpoint except tensors."""

import math
from dataclasses import dataclass, field
from typing import Any

from vit.config.base import VAL
from vit.training.plan import Plan


def rank(top1: float, loss: float | None) -> tuple[float, float]:
    """Return a sort key that is larger for better results, by accuracy and then by loss."""
    return top1, -loss if loss is not None and math.isfinite(loss) else -math.inf


@dataclass
class RunState:
    """Counters and facts of a run, stored in `checkpoint.json` under the fields' names."""

    step: int = 0
    """The number of finished steps, which is also the position in the data."""
    updates_skipped: int = 0
    """The number of skipped updates in the whole run."""
    updates_skipped_in_a_row: int = 0
    """The number of skipped updates since the last successful update."""
    recent: list[list[float]] = field(default_factory=list)
    """The step and loss of recent steps, from which the limit for spikes is computed."""
    interval_losses: list[float] = field(default_factory=list)
    """The losses of all steps since the last line of metrics. The next line contains their mean."""
    checked_step: int = 0
    """The step of the first batch whose checksum is not yet in metrics.jsonl."""
    sample_checksum: int = 0
    """The checksum of the samples from `checked_step` on (`vit.hooks.order_check`)."""
    bad_images: int = 0
    """The number of training images that were ignored because they could not be decoded."""
    evaluated_step: int = -1
    """The step of the newest evaluation."""
    best_top1: float = -1.0
    """The best top-1 accuracy so far, in percent."""
    best_loss: float | None = None
    """The loss of the best evaluation; None if it was not finite, or in old checkpoints."""
    best_set: str = VAL
    """The set on which the best evaluation was chosen: `eval.best_by`."""
    restarts: int = 0
    """The number of times the run was resumed."""
    elapsed_s: float = 0.0
    """The time spent on the run over all attempts, including evaluation and saving."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Values that must match when the run resumes: the hash of the data, the model's classes."""

    def is_evaluation_due(self, plan: Plan) -> bool:
        """Return whether an evaluation at this step is planned but not done yet."""
        return plan.evaluates_at(self.step) and self.evaluated_step < self.step

    def is_finished(self, plan: Plan) -> bool:
        """Return whether nothing is left to train or evaluate."""
        return self.step == plan.total_steps and not self.is_evaluation_due(plan)

    def is_over(self, plan: Plan) -> bool:
        """Return whether nothing is left to do, even if `step` is past the end of the plan."""
        return self.step > plan.total_steps or self.is_finished(plan)

    def take_best(self, best_set: str, *results: tuple[float, float]) -> bool:
        """Store the best of `results`, pairs of top-1 and loss, and return whether it is a new
        best.

        Results on small sets often have the same accuracy. In that case, the result with the
        smaller loss is better. An old best result on a different set is not comparable, so it is
        dropped.
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
