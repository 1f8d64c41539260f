"""Compare the accuracy of a run with a published curve while it trains."""

from __future__ import annotations

from shlex import quote
from typing import Any

from vit.checkpoint.place import Place
from vit.config.schema import Config
from vit.distributed.process_group import World
from vit.extras.recipes.difference import deviations
from vit.extras.recipes.reference import Comparison, create_comparison
from vit.run import Hook, Run
from vit.training.notes import Notes
from vit.training.run_data import RunData


class ReferenceCurve(Hook):
    """Records the curve of `eval.reference`, and what each evaluation is beside it."""

    _comparison: Comparison
    _is_recorded = False

    def opened(self, config: Config, world: World, data: RunData, place: Place) -> Notes:
        """See `Hook`; raises as `create_comparison`."""
        with world.fail_together():
            self._comparison = create_comparison(config, data.plan, data.sets[0][0].split)
        return Notes()

    def begin(self, run: Run) -> None:
        """Record and show the curve once, with the settings that differ from its recipe; not for a
        run that is finished."""
        if self._is_recorded or not run.world.is_main or run.state.is_finished(run.plan):
            return
        self._is_recorded = True
        comparison = self._comparison
        header = comparison.reference.header
        unlike = [] if comparison.refusal else self._unlike(run)
        run.record.write(
            "reference",
            run.state.step,
            name=comparison.reference.name,
            title=header.title,
            source=header.source,
            note=header.note,
            weights=header.weights,
            refused=comparison.refusal,
            length=comparison.length_note,
            recipe=header.recipe,
            unlike=unlike,
            curves=comparison.curves(),
        )
        if comparison.refusal:  # a trial, or own data: the record and the report have the reason
            return
        what = "the averaged weights" if header.weights == "ema" else "the weights"
        run.record.say(f"reference: {header.title}: top-1 of {what} ({header.source})")
        if comparison.length_note:
            run.record.say(f"reference: {comparison.length_note}")
        if unlike:
            run.record.say(
                f"reference: other than its recipe: {'; '.join(unlike)} (python"
                f" launch/recipe.py diff {header.recipe} {quote(str(run.folder))} says what they"
                " do)"
            )

    def _unlike(self, run: Run) -> list[str]:
        """Return the settings, and the number of images, that differ from the recipe."""
        header = self._comparison.reference.header
        unlike = deviations(run.config, header.recipe, header.settings)
        num_images = run.plan.steps_per_epoch * run.plan.global_batch_size
        num_images += run.plan.dropped_per_epoch
        if header.train_images not in (None, num_images):
            unlike.append(f"images to train on {header.train_images:,} -> {num_images:,}")
        return unlike

    def evaluated(self, step: int, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """See `Hook`."""
        return self._comparison.values(step, values), self._comparison.line(step, values)
