"""Evaluate on all sets during training, record the results, and choose the best weights."""

from functools import partial
from typing import Any

import numpy as np

from vit.config.base import VAL
from vit.data.shards.split import Split
from vit.evaluation.evaluate import Evaluation, save_predictions
from vit.monitor import Monitor
from vit.run import Run
from vit.system.meter import Meter

CHECK_STOP_EVERY_BATCHES = 8
"""The number of batches between checks for signals. Each check is a collective."""


class _Interrupted(Exception):
    """The error that all ranks raise at the same batch if a signal interrupts an evaluation."""


def evaluate(run: Run, monitor: Monitor) -> set[str]:
    """Evaluate the model and its EMA, and record the results.

    Returns the names under which to save the weights: "last", and "best" if the result is the best
    of the run. If a signal interrupts the evaluation, `monitor.stop` is set and nothing is
    recorded, because the resumed run evaluates again.
    """
    state = run.state
    run.watch.mark(state.step, "evaluating")
    try:
        results = _evaluate_all(run)
    except _Interrupted:
        monitor.stop = True
        return set()
    _record_results(run, results)

    state.evaluated_step = state.step
    best_by = run.config.eval.best_by
    choosing = [result.accuracy for result in results[best_by].values()]
    is_best = state.take_best(best_by, *((each.top1, each.loss) for each in choosing))

    with run.world.fail_together():
        if run.world.is_main:
            # Save the predictions of the EMA if it exists, because users usually use the EMA
            # weights.
            preferred = results[VAL].get("ema", results[VAL]["model"])
            save_predictions(run.folder, preferred, run.evaluators[0].split, state.step)
    return {"last", "best"} if is_best else {"last"}


def _evaluate_all(run: Run) -> dict[str, dict[str, Evaluation]]:
    """Evaluate all models, and return set -> model -> result. Raises `_Interrupted`."""
    live_line = partial(run.record.progress, run.state.step) if run.record.is_live else None
    results: dict[str, dict[str, Evaluation]] = {}
    for number, evaluator in enumerate(run.evaluators):
        num_images = evaluator.split.num_samples
        names = f" {', '.join(each.name for each in evaluator.sets)}" if number else ""
        meter = Meter(
            f"evaluating{names}", num_images, "images", shown=run.world.is_main, into=live_line
        )

        def on_batch(
            done: int, total: int, meter: Meter = meter, num_images: int = num_images
        ) -> None:
            meter.update(num_images * done // total)
            run.watch.mark(run.state.step, "evaluating")
            due = done % CHECK_STOP_EVERY_BATCHES == 0
            if due and run.world.any_rank(bool(run.signals.received)):
                raise _Interrupted

        try:
            results |= evaluator.evaluate(run.models(), on_batch)
        finally:
            # Only the first evaluator keeps its idle workers for the next evaluation, because the
            # workers of all evaluators would take too much memory.
            if number:
                evaluator.close()
    return results


def _record_results(run: Run, results: dict[str, dict[str, Evaluation]]) -> None:
    """Write the results and the hooks' values to metrics.jsonl, and log them."""
    step = run.state.step
    values: dict[str, Any] = {}
    for set_name, by_model in results.items():
        prefix = "" if set_name == VAL else f"{set_name}/"
        for name, result in by_model.items():
            suffix = "" if name == "model" else f"_{name}"
            values |= {
                prefix + key + suffix: number for key, number in result.accuracy.to_dict().items()
            }

    lines = []
    for hook in run.hooks:
        added, line = hook.evaluated(step, values)
        values |= added
        if line:
            lines.append(line)

    times = [evaluator.took for evaluator in run.evaluators if evaluator.took is not None]
    seconds = sum(took.seconds for took in times)
    run.record.write(
        "eval",
        step,
        **values,
        images_per_s=sum(evaluator.split.num_samples for evaluator in run.evaluators) / seconds,
        seconds=seconds,
        data_wait_s=sum(took.data_wait_s for took in times),
    )
    _log_results(run, results, lines)


def _log_results(
    run: Run, results: dict[str, dict[str, Evaluation]], lines_of_hooks: list[str]
) -> None:
    """Log a line for each set, and a note if the finished model has learned nothing."""
    for evaluator in run.evaluators:
        for scored in evaluator.sets:
            parts = [
                f"{'' if name == 'model' else name + ' '}{result.accuracy}"
                for name, result in results[scored.name].items()
            ]
            set_text = "" if scored.name == VAL else f"{scored.name}: "
            run.record.log(
                f"step {run.state.step}: {set_text}{'; '.join(parts)} on {scored.where()}"
            )
            if scored.name == VAL:
                for line in lines_of_hooks:
                    run.record.log(line)

    if run.state.step == run.plan.total_steps:
        best = max(result.accuracy.top1 for result in results[VAL].values())
        if note := _constant_note(run.evaluators[0].split, best, run.config.init.checkpoint):
            run.record.log(note)


def _constant_note(split: Split, top1: float, first_weights: str | None) -> str:
    """Return a note if always predicting the largest class in `split` is at least as accurate as
    `top1` percent, else "". first_weights: the run's `init.checkpoint`."""
    counts = np.bincount(split.index["label"])
    share = 100 * counts.max() / split.num_samples
    if top1 > share + 1e-9:
        return ""

    remedy = (
        "use a smaller learning rate (optim.lr), which changes the weights less"
        if first_weights
        else "start from trained weights (init.checkpoint)"
    )
    name = split.class_names[counts.argmax()] if split.class_names else counts.argmax()
    return (
        f"note: {top1:.2f} % top-1 is not more than the {share:.2f} % of always answering the"
        f" largest class, {name}: the model has learned nothing useful; train longer"
        f" (train.epochs), or {remedy}"
    )
