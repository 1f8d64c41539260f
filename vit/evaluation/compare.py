"""Evaluate weights files on all sets of a config, and compare several files image by image.

Each file is loaded into a model and evaluated by an `Evaluator`. With several files, a table shows
the paired difference between each file and the first.
"""

import math
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, NamedTuple, TextIO

from torch import Tensor, nn

from vit.config.base import VAL
from vit.config.schema import Config
from vit.data.augment.apply import create_augment
from vit.data.eval_sets import EvalSet, ModelClasses, open_sets
from vit.data.image_format import ImageFormat
from vit.data.open_data import open_split
from vit.data.shards.split import Split
from vit.distributed.process_group import World
from vit.evaluation.evaluate import Evaluation, Evaluator
from vit.layers.blocks import set_residual_dtype
from vit.layers.precision import precision_note
from vit.model import create_model
from vit.system.meter import Meter
from vit.training.metrics import (
    ECE_BINS,
    TOP5_CLASSES,
    Accuracy,
    PairedDifference,
    interval95,
    paired_difference,
)
from vit.training.run_data import choose_settings
from vit.weights.class_names import class_mismatch, namings_of, select_classes
from vit.weights.files import LoadedWeights, load_weights


class Result(NamedTuple):
    """The evaluation of one weights file. It is the same on all ranks."""

    as_json: dict[str, Any]
    """The object that `launch/eval.py --json` prints."""
    sets: dict[str, tuple[EvalSet, Evaluation]]
    """Each set with its result, keyed by the set's name, `data.val_split` first."""

    @property
    def evaluation(self) -> Evaluation:
        """The result on `data.val_split`."""
        return self.sets[VAL][1]


def evaluate_weights(
    loaded: LoadedWeights, config: Config, world: World, out: TextIO, selected: bool = False
) -> Result:
    """Evaluate `loaded` on the validation split and `eval.sets` of `config`, and print the results
    to `out`.

    The image size in `config` may differ from the weights' image size. Position embeddings are then
    resampled. selected: whether to use only the logits of the data's classes, matched by name.
    Raises ValueError if the data have more classes than the weights, or classes that cannot be
    matched. Raises the errors of `open_sets`.
    """
    config = choose_settings(config, world)
    split = open_split(config, config.data.val_split, world)
    with world.fail_together():
        if selected:
            loaded = select_classes(loaded, split.class_names)
        classes = _classes_of(loaded, split, config)

    groups = open_sets(config, split, classes, world)
    with world.fail_together():
        model = create_model(config.model, num_classes=classes.num_classes)
        notes = load_weights(model, loaded.weights, loaded.grid_size)
    # DDP is not needed, because each rank evaluates its own images, and only the counts are summed.
    model.to(world.device)
    slow = precision_note(config.train.precision, world.device, "--precision")
    if world.is_main and slow:
        print(f"note: {slow}", file=sys.stderr)

    by_set = _evaluate_all(model, groups, config, classes.num_classes, world)
    with world.fail_together():
        _check_finite(by_set, loaded, config.train.precision)

    # Labels are compared by number, so the accuracy on data with different classes would look
    # valid.
    mismatch = class_mismatch(loaded, split.class_names, split.num_classes)
    if world.is_main:
        if mismatch:
            print(f"note: {mismatch}", file=out)
        kind = f" ({loaded.which()})" if loaded.which() else ""
        heading = (
            f"{loaded.path}{kind} on {split.root} {split.name!r}: {split.num_samples} images at"
            f" {config.model.size_text()}"
        )
        print("\n  ".join([heading, *_report(loaded, notes, by_set)]), file=out)

    return Result(_summary(by_set, mismatch), by_set)


def _classes_of(loaded: LoadedWeights, split: Split, config: Config) -> ModelClasses:
    """Return the weights' classes. Raises ValueError if the data have more classes.

    A label that exceeds the number of outputs has no logit. The data may have fewer classes than
    the weights, because they may be the first of the classes on which the weights were trained.
    `class_mismatch` compares the names.
    """
    assert loaded.num_classes is not None, "weights with a config have it"
    if loaded.num_classes < split.num_classes:
        raise ValueError(
            f"{split.root}: has {split.num_classes} classes, but {loaded.path} has"
            f" {loaded.num_classes}: use data with the same classes"
        )
    namings = namings_of(loaded, loaded.num_classes) if config.eval.sets else {}
    return ModelClasses(loaded.num_classes, namings)


def _summary(by_set: dict[str, tuple[EvalSet, Evaluation]], mismatch: str) -> dict[str, Any]:
    """Return the object for `--json`: the result on `data.val_split`, with the other sets' results
    in `sets`.

    mismatch: the result of `class_mismatch`.
    """
    further_sets = dict(by_set)
    scored, evaluation = further_sets.pop(VAL)

    summary: dict[str, Any] = {
        "num_images": scored.split.num_samples,
        **_as_json(evaluation.accuracy),
    }
    if mismatch:
        summary["note"] = mismatch

    if further_sets:
        summary["sets"] = {
            name: {**_as_json(evaluation.accuracy), "num_skipped": scored.num_skipped}
            for name, (scored, evaluation) in further_sets.items()
        }
    return summary


def _report(
    loaded: LoadedWeights, adaptations: list[str], by_set: dict[str, tuple[EvalSet, Evaluation]]
) -> list[str]:
    """Return the lines that describe the weights and the results on all sets."""
    is_foreign = bool(loaded.notes) or loaded.class_names is None
    lines = loaded.report(adaptations) if is_foreign else [*adaptations]
    for name, (scored, evaluation) in by_set.items():
        accuracy = evaluation.accuracy
        if name == VAL:
            lines += [str(accuracy), _calibration(accuracy)]
        else:
            lines += [
                f"{name}: {scored.where()} of {scored.split.root}",
                f"  {accuracy}; {_calibration(accuracy)}",
            ]
    return lines


def _evaluate_all(
    model: nn.Module,
    groups: Sequence[tuple[EvalSet, ...]],
    config: Config,
    num_classes: int,
    world: World,
) -> dict[str, tuple[EvalSet, Evaluation]]:
    """Return the set and the result for each set name, in the order of the config."""
    set_residual_dtype(model, config.train.residual_dtype)
    by_set: dict[str, tuple[EvalSet, Evaluation]] = {}
    for sets in groups:
        evaluator = Evaluator(
            sets,
            ImageFormat.from_config(config.model, config.data),
            create_augment(config.augment, config.data, num_classes, world.device),
            world,
            config.eval,
            precision=config.train.precision,
            num_workers=config.loader.num_workers,
            stall_timeout_s=config.loader.stall_timeout_s,
        )
        num_images = evaluator.split.num_samples
        names = "" if sets is groups[0] else f" {', '.join(each.name for each in sets)}"
        text = f"evaluating{names} at {config.model.size_text()}"
        with closing(evaluator), Meter(text, num_images, "images", shown=world.is_main) as meter:

            def on_batch(
                done: int, total: int, meter: Meter = meter, num_images: int = num_images
            ) -> None:
                meter.update(num_images * done // total)

            results = evaluator.evaluate({"model": model}, on_batch)
        by_set |= {each.name: (each, results[each.name]["model"]) for each in sets}

    return {name: by_set[name] for name in (VAL, *config.eval.sets) if name in by_set}


def _check_finite(
    by_set: dict[str, tuple[EvalSet, Evaluation]], loaded: LoadedWeights, precision: str
) -> None:
    """Raise ValueError if a loss is NaN, which means that a logit was NaN or infinite."""
    bad = [name for name, (_, each) in by_set.items() if not math.isfinite(each.accuracy.loss)]
    if bad:
        finer = "pass --precision fp32, or " if precision != "fp32" else ""
        raise ValueError(
            f"{loaded.path}: logits on {', '.join(bad)} are NaN or infinite in {precision}, so the"
            f" accuracy is meaningless: {finer}use other weights"
        )


def _as_json(accuracy: Accuracy) -> dict[str, Any]:
    low, high = interval95(accuracy.correct_top1, accuracy.num_images)
    return {**accuracy.to_dict(), "top1_low": low, "top1_high": high}


def _calibration(accuracy: Accuracy) -> str:
    return f"calibration error (ECE, {ECE_BINS} bins) {accuracy.ece:.2f} points"


# --- several --------------------------------------------------------------------------------------


def _rights(result: Result) -> dict[str, Tensor]:
    """Return a dict from each set's name to whether each image was classified correctly,
    (num_images,) bool."""
    return {
        name: scored.is_right(evaluation.predictions)
        for name, (scored, evaluation) in result.sets.items()
    }


def _differences(first: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, PairedDifference]:
    """Return the paired difference on each set that is in both `first` and `other` (see
    `_rights`)."""
    return {name: paired_difference(first[name], other[name]) for name in first if name in other}


def compare(names: Sequence[str], results: Sequence[Result], out: TextIO) -> dict[str, Any]:
    """Print a table of all results by set, and return the object for `--json`.

    names: the name of each weights file. The table contains the sets that all results have.
    """
    first, *later = map(_rights, results)
    differences = [_differences(first, rights) for rights in later]
    has_top5 = any(
        each.accuracy.num_classes >= TOP5_CLASSES for _, each in results[0].sets.values()
    )

    rows = [("set", "weights", "images", "top-1 %", "top-5 %", "loss", "ECE", "to the first, 95 %")]
    for name in results[0].sets:
        if not all(name in result.sets for result in results):
            continue
        for number, (weights_name, result) in enumerate(zip(names, results, strict=True)):
            values = result.sets[name][1].accuracy.to_dict()
            rows.append(
                (
                    name if number == 0 else "",
                    weights_name,
                    f"{values['num_images']}",
                    f"{values['top1']:.2f}",
                    f"{values['top5']:.2f}" if has_top5 else "-",
                    f"{values['loss']:.4f}",
                    f"{values['ece']:.2f}",
                    _short(differences[number - 1][name]) if number else "",
                )
            )

    _print_table(rows, out)
    return {
        "checkpoints": [
            {"checkpoint": name, **result.as_json}
            for name, result in zip(names, results, strict=True)
        ],
        "difference": [
            {name: asdict(value) for name, value in each.items()} for each in differences
        ],
    }


def _print_table(rows: Sequence[tuple[str, ...]], out: TextIO) -> None:
    """Print rows in aligned columns: the set, the weights, right-aligned numbers and a
    difference."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for set_name, weights_name, *numbers, difference in rows:
        cells = [f"{set_name:<{widths[0]}}", f"{weights_name:<{widths[1]}}"]
        cells += [f"{text:>{width}}" for text, width in zip(numbers, widths[2:-1], strict=True)]
        print("  ".join([*cells, difference]).rstrip(), file=out)


def _short(difference: PairedDifference) -> str:
    return (
        f"{difference.points:+z.2f} ({difference.low:+z.2f} to {difference.high:+z.2f}):"
        f" {difference.only_second} fixed, {difference.only_first} broken"
    )
