"""Compare each evaluation of a run with a published accuracy curve.

`configs/reference/<name>.csv` contains the published numbers. The header states the source, the
recipe and the training length:

    file -> `Reference`: values over the completed share of the schedule
    this run's plan and validation set -> `Comparison`: whether the run can be compared
    an evaluation -> its difference, for metrics.jsonl and the log

A run is compared only if it uses the same validation set, and is as long as the recipe or the
published run. Values are compared at the same fraction of both schedules, which is the same epoch
unless the published run was longer than the recipe. Values between two published points are
interpolated. Evaluations before the first point or after the last point are not compared.
"""

import csv
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from vit.config.base import Positive, Section
from vit.config.io import recipes_folder
from vit.config.schema import Config
from vit.data.shards.split import Split
from vit.distributed.process_group import World
from vit.extras.recipes.difference import deviations, read_recipe
from vit.feature import Parts
from vit.run import Hook, Run
from vit.run_folder.place import Place
from vit.training.plan import Plan
from vit.training.run_data import Notes, RunData

SUFFIX = ".csv"
METRICS = ("top1", "top5", "loss")
"""The metric columns of a curve. Accuracies are in percent."""
SAME_LENGTH = 0.005
"""The maximum relative difference between lengths that count as equal. Lengths are rounded to whole
steps."""


class Header(Section):
    """The header of a curve's file, which has lines of the form `# key: value`."""

    title: str
    """A description of the network, the recipe and the training length."""
    source: str
    """The repository, commit and file from which the numbers were taken."""
    note: str = ""
    """Further information about the published run."""
    recipe: str
    """The name of this project's config for the same recipe."""
    settings: dict[str, Any] = Field(default={})
    """The settings of the published run that differ from `recipe`."""
    epochs: float | None = None
    """The length of the schedule. Set either `epochs` (with a column `epoch`) or `steps` (with a
    column `step`)."""
    steps: Positive | None = None
    images: Positive
    """The number of images in the validation set."""
    classes: Positive
    train_images: Positive | None = None
    """The number of training images per epoch, or `None` if unknown."""
    weights: Literal["model", "ema"] = "model"
    """The evaluated weights: the model's weights or their moving average."""


class Value(NamedTuple):
    """A metric at one point of the schedule, over all runs of the reference."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Reference:
    """A published curve of one or several runs of a recipe."""

    name: str
    header: Header
    length: float
    """The length of the schedule in `unit`s, which are epochs or steps."""
    unit: Literal["epoch", "step"]
    runs: tuple[dict[str, NDArray[np.float64]], ...]
    """The columns of each run, of shape (n,): the ascending `share`, and each metric."""

    @property
    def first(self) -> float:
        """The fraction of the schedule at the first point that all runs have."""
        return max(float(run["share"][0]) for run in self.runs)

    @property
    def last(self) -> float:
        """The fraction of the schedule at the last point that all runs have."""
        return min(float(run["share"][-1]) for run in self.runs)

    def at(self, share: float) -> dict[str, Value]:
        """Return the metrics at `share` of the schedule, or {} outside the published range."""
        # Rounding can move the fraction slightly out of the range.
        if not self.first - 1e-9 <= share <= self.last + 1e-9:
            return {}

        metrics = {}
        for name in self.runs[0].keys() - {"share"}:
            values = [float(np.interp(share, run["share"], run[name])) for run in self.runs]
            metrics[name] = Value(sum(values) / len(values), min(values), max(values))
        return metrics

    def moment(self, share: float) -> str:
        """Format `share` of the schedule in the reference's unit, such as `epoch 96`."""
        place = round(share * self.length, 1 if self.unit == "epoch" else 0)
        return f"{self.unit} {place:,.6g}" if place < 1e6 else f"{self.unit} {place:,.0f}"


def read_reference(name: str) -> Reference:
    """Read the curve `name` from `configs/reference`, or from a path that ends in .csv.

    Raises ValueError if the file cannot be read or has an invalid format.
    """
    folder = recipes_folder() / "reference"
    path = Path(name) if name.endswith(SUFFIX) else folder / f"{name}{SUFFIX}"
    setting = f"eval.reference={name}"
    label = setting if name.endswith(SUFFIX) else f"{setting}: {path}"

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        curves = folder.rglob(f"*{SUFFIX}")
        names = sorted(curve.relative_to(folder).with_suffix("").as_posix() for curve in curves)
        nearest = difflib.get_close_matches(name, names, n=3, cutoff=0)
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(
            f"{setting}: {path} cannot be read ({reason}); the nearest of the {len(names)} curves"
            f" in configs/reference are {', '.join(nearest)}; use null for none"
        ) from None

    head = [line for line in lines if line.startswith("#")]
    header = _read_header(head, label)
    unit: Literal["epoch", "step"] = "epoch" if header.steps is None else "step"
    length = float(header.epochs or header.steps or 0)
    rows = list(csv.DictReader(lines[len(head) :]))
    runs = _read_runs(rows, unit, length, label, len(head))
    return Reference(name.removesuffix(SUFFIX), header, length, unit, runs)


def _read_header(head: list[str], label: str) -> Header:
    """Return the header in the lines `head`. Raises ValueError if it is missing or invalid.

    label: the file's name in errors.
    """
    if not head:
        raise ValueError(
            f"{label}: the header is missing: start the file with '# title: ...', '# source: ...',"
            " '# recipe: ...', '# epochs: ...', '# images: ...', '# classes: ...'"
        )

    try:
        content = yaml.safe_load("\n".join(line.removeprefix("#").strip() for line in head))
        header = Header.model_validate_json(json.dumps(content))
    except (yaml.YAMLError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{label}: the header must have lines of the form '# key: value': {reason}"
        ) from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"{label}: header: {'; '.join(problems)}") from None

    if (header.epochs is None) == (header.steps is None):
        raise ValueError(f"{label}: the header needs either `epochs` or `steps`: add one of them")
    return header


def _read_runs(
    rows: list[dict[str, str]], unit: str, length: float, label: str, num_before: int
) -> tuple[dict[str, NDArray[np.float64]], ...]:
    """Return the columns of each run, with the share of the training in place of `unit`.

    Args:
        rows: The rows of the CSV by column name.
        unit: The column that counts the progress, `epoch` or `step`.
        length: The length of the whole training in this unit.
        label: The file's name in errors.
        num_before: The number of lines before the column names.

    Raises ValueError if a column, a number or the order of the rows is wrong.
    """
    if not rows:
        raise ValueError(
            f"{label}: no data rows follow the header: add the column names '{unit},top1', then one"
            " row for each point"
        )

    names = [key for key in rows[0] if key not in (unit, "run")]
    has_required = {unit, "top1"} <= rows[0].keys()
    if not has_required or {*names} - {*METRICS}:
        raise ValueError(
            f"{label}: expected the columns {unit} and top1, and optionally run, top5 and loss"
        )

    points: dict[str, list[list[float]]] = {}
    for number, row in enumerate(rows, num_before + 2):  # after the line of the column names
        try:
            values = [float(row[key]) for key in (unit, *names)]
        except (TypeError, ValueError):
            values = [math.nan]
        if not np.isfinite(values).all():
            raise ValueError(f"{label}: line {number}: expected a number in every column")
        points.setdefault(row.get("run", ""), []).append(values)

    runs = []
    for run, rows_of_run in points.items():
        place, *columns = np.array(rows_of_run).T
        metrics = dict(zip(names, columns, strict=True))
        percent = [metrics[name] for name in names if name in ("top1", "top5")]
        if np.min(percent) < 0 or np.max(percent) > 100:
            raise ValueError(f"{label}: top1 and top5 must be percentages between 0 and 100")
        if place.min() < 0 or place.max() > length:
            raise ValueError(f"{label}: the {unit}s must be between 0 and {length:g}")
        if (np.diff(place) <= 0).any():
            of_run = f" of run {run}" if run else ""
            raise ValueError(f"{label}: the {unit}s{of_run} must ascend")

        runs.append({"share": place / length, **metrics})
    return tuple(runs)


# ---- comparison with a run -----------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The comparison of a run with a reference."""

    reference: Reference
    plan: Plan
    refusal: str
    """The reason why the run cannot be compared, or "" if it can."""
    is_of_other_data: bool = False
    """Whether the run cannot be compared because it uses another validation set. The curve is then
    not part of the record."""

    @property
    def length_note(self) -> str:
        """A note if the run and the reference differ in length, else ""."""
        steps_per_unit = self.plan.steps_per_epoch if self.reference.unit == "epoch" else 1
        ours = self.plan.total_steps / steps_per_unit
        theirs = self.reference.length
        if _is_same(ours, theirs):
            return ""

        return (
            f"this run has {ours:,.6g} {self.reference.unit}s, the reference {theirs:,.6g}: values"
            " are compared at the same share of both"
        )

    def values(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return fields for metrics.jsonl at `step`: `top1_reference`, `top1_minus_reference`, ...

        metrics: the results on the validation set, with the suffix `_ema` for averaged weights.
        """
        fields = {}
        for name, value in self.reference.at(step / self.plan.total_steps).items():
            fields[f"{name}_reference"] = value.mean
            fields[f"{name}_minus_reference"] = metrics[name + self._suffix] - value.mean
        return fields

    def line(self, step: int, metrics: Mapping[str, Any]) -> str:
        """Return a line with the run's and the published accuracy."""
        share = step / self.plan.total_steps
        top1 = metrics["top1" + self._suffix]
        prefix = "averaged weights " if self._suffix else ""
        text = f"epoch {step / self.plan.steps_per_epoch:.4g}: {prefix}{top1:.2f} %"

        value = self.reference.at(share).get("top1")
        if value is None:
            edge = f"begins at {self.reference.moment(self.reference.first)}"
            if share > self.reference.first:
                edge = f"ends at {self.reference.moment(self.reference.last)}"
            return f"{text} (the reference {edge})"

        moment = f" at its {self.reference.moment(share)}:" if self.length_note else ""
        num_runs = len(self.reference.runs)
        spread = f", {num_runs} runs {value.low:.2f} to {value.high:.2f}" if num_runs > 1 else ""
        return f"{text} (reference{moment} {value.mean:.2f} %{spread}, {top1 - value.mean:+z.2f})"

    def curves(self) -> list[dict[str, list[float]]]:
        """Return the points of each published run: metrics, and `step` in steps of this run."""
        return [
            {
                "step": (run["share"] * self.plan.total_steps).round(1).tolist(),
                **{name: values.tolist() for name, values in run.items() if name != "share"},
            }
            for run in self.reference.runs
        ]

    @property
    def _suffix(self) -> str:
        return "_ema" if self.reference.header.weights == "ema" else ""


def _is_same(length: float, other: float) -> bool:
    return abs(length - other) <= SAME_LENGTH * other


def create_comparison(config: Config, plan: Plan, val_split: Split) -> Comparison:
    """Return the comparison of a run with `eval.reference`.

    Raises ValueError if the reference or its recipe cannot be read.
    """
    assert config.eval.reference is not None, "the hook is created only with a reference"
    reference = read_reference(config.eval.reference)
    header = reference.header
    recipe = _read_recipe(header, f"eval.reference={config.eval.reference}").train
    recipe_steps = recipe.steps or (recipe.epochs or 0) * plan.steps_per_epoch
    curve_steps = reference.length * (plan.steps_per_epoch if reference.unit == "epoch" else 1)

    refusal = ""
    ours = (val_split.num_samples, val_split.num_classes)
    is_of_other_data = ours != (header.images, header.classes)
    if is_of_other_data:
        refusal = (
            f"its validation set has {header.images:,} images of {header.classes:,} classes, that"
            f" of this run {val_split.num_samples:,} of {val_split.num_classes:,}"
        )
    elif not any(_is_same(plan.total_steps, steps) for steps in (recipe_steps, curve_steps)):
        refusal = f"its recipe has {recipe_steps:,.0f} steps, this run {plan.total_steps:,}"
    elif header.weights == "ema" and config.ema.decay is None:
        refusal = "its weights are averaged, and this run does not average weights (ema.decay)"

    return Comparison(reference, plan, refusal, is_of_other_data)


def _read_recipe(header: Header, label: str) -> Config:
    """Return the recipe of a curve, without the overrides in the header.

    Raises ValueError if the recipe or the overrides are invalid.
    """
    path = Path(header.recipe)
    overrides = [f"{key}={json.dumps(value)}" for key, value in header.settings.items()]
    try:
        read_recipe(path, overrides)
        return read_recipe(path)
    except ValueError as error:
        raise ValueError(f"{label}: header: recipe: {error}") from None


def parts(config: Config) -> Parts:
    """Return the parts of a run that is compared with a published curve."""
    return Parts(hooks=(ReferenceCurve(),))


class ReferenceCurve(Hook):
    """A hook that compares each evaluation with the `eval.reference` curve."""

    _comparison: Comparison
    _is_recorded = False

    def opened(self, config: Config, world: World, data: RunData, place: Place) -> Notes:
        """Read the reference. Raises ValueError if the reference or its recipe cannot be read."""
        with world.fail_together():
            self._comparison = create_comparison(config, data.plan, data.sets[0][0].split)
        if not self._comparison.is_of_other_data:
            return Notes()

        self._is_recorded = True
        return Notes(
            lines=(
                f"note: eval.reference={config.eval.reference} is not compared:"
                f" {self._comparison.refusal}",
            )
        )

    def begin(self, run: Run) -> None:
        """Log the published curve and its differences from this run, unless the run is finished."""
        is_due = run.world.is_main and not run.state.is_finished(run.plan)
        if self._is_recorded or not is_due:
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
            curves=[] if comparison.refusal else comparison.curves(),
        )
        if comparison.refusal:
            # Short runs often cannot be compared, so the reason is shown in the report.
            return

        weights = "the averaged weights" if header.weights == "ema" else "the weights"
        run.record.log(f"reference: {header.title}: top-1 of {weights} ({header.source})")
        if comparison.length_note:
            run.record.log(f"reference: {comparison.length_note}")
        if unlike:
            run.record.log(
                f"reference: differs from its recipe: {'; '.join(unlike)} (for the effects: python"
                f" launch/recipe.py diff {header.recipe} {quote(str(run.folder))})"
            )

    def _unlike(self, run: Run) -> list[str]:
        """Return the settings, and possibly the number of images, that differ from the recipe."""
        header = self._comparison.reference.header
        unlike = deviations(run.config, header.recipe, header.settings)
        num_images = (
            run.plan.steps_per_epoch * run.plan.global_batch_size + run.plan.dropped_per_epoch
        )
        if header.train_images not in (None, num_images):
            unlike.append(f"training images {header.train_images:,} -> {num_images:,}")
        return unlike

    def evaluated(self, step: int, values: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """See `Hook`."""
        if self._comparison.refusal:
            return {}, ""
        return self._comparison.values(step, values), self._comparison.line(step, values)
