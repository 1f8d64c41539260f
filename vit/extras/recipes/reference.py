"""A published curve of accuracy, which a run is held against from its first evaluation on.

`configs/reference/<name>.csv` has the numbers that a source states, and in its header where they
are from, which recipe they are of, and how long that was trained:

    file -> `Reference`: values over the share of the schedule that is done
    this run's plan and validation set -> `Comparison`: whether the two can be compared
    an evaluation -> its difference, for the record, and a line for people

Only a run of the curve's recipe is compared: over the same validation set, and as long as the
recipe or the curve. Both are compared at the same share of their schedules, which is the same epoch
unless the curve's own run was longer than the recipe. Between two published points the value is
interpolated; before the first and after the last there is none.
"""

from __future__ import annotations

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
from vit.config.io import load_config, recipes_folder
from vit.config.schema import Config
from vit.data.shards.split import Split
from vit.distributed.process_group import World
from vit.extras.recipes.difference import deviations
from vit.run import Hook, Run
from vit.run_folder import CONFIG_FILE, Place
from vit.training.plan import Plan
from vit.training.run_data import Notes, RunData

SUFFIX = ".csv"
METRICS = ("top1", "top5", "loss")
"""Columns that a curve can have: the first two in percent."""
SAME_LENGTH = 0.005
"""Share by which two lengths may differ and still be called the same: a last step more or less."""


class Header(Section):
    """What the first lines of a curve's file say, as `# key: value`."""

    title: str
    """Network, recipe and length, for people."""
    source: str
    """Repository, commit and place of the numbers."""
    note: str = ""
    """What else the source says, or does not say."""
    recipe: str
    """Our config that it is of, by name."""
    settings: dict[str, Any] = Field(default={})
    """Settings that were other there than in `recipe`."""
    epochs: float | None = None
    """Length of its schedule; this, with a column `epoch`, or `steps`, with a column `step`."""
    steps: Positive | None = None
    images: Positive
    """Of the set that it was evaluated on."""
    classes: Positive
    train_images: Positive | None = None
    """Of an epoch; `None`: not known."""
    weights: Literal["model", "ema"] = "model"
    """What was evaluated: the weights, or their moving average."""


class Value(NamedTuple):
    """A metric of the reference at one moment, over its runs."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Reference:
    """A curve of one or of several runs of a recipe."""

    name: str
    header: Header
    length: float
    """In epochs, or in steps."""
    unit: Literal["epoch", "step"]
    runs: tuple[dict[str, NDArray[np.float64]], ...]
    """Of each run: `share`, ascending, (n,), and each metric, (n,)."""

    @property
    def first(self) -> float:
        """Share of the schedule of the first point that all runs have."""
        return max(float(run["share"][0]) for run in self.runs)

    @property
    def last(self) -> float:
        """Share of the schedule of the last point that all runs have."""
        return min(float(run["share"][-1]) for run in self.runs)

    def at(self, share: float) -> dict[str, Value]:
        """Return the metrics at `share` of the schedule; {} where nothing is published."""
        # The share is a quotient of steps: it may miss a published end by a rounding.
        if not self.first - 1e-9 <= share <= self.last + 1e-9:
            return {}
        found = {}
        for name in self.runs[0].keys() - {"share"}:
            values = [float(np.interp(share, run["share"], run[name])) for run in self.runs]
            found[name] = Value(sum(values) / len(values), min(values), max(values))
        return found

    def moment(self, share: float) -> str:
        """Name `share` of its schedule by its own count, as `epoch 96`."""
        place = round(share * self.length, 1 if self.unit == "epoch" else 0)
        return f"{self.unit} {place:,.6g}" if place < 1e6 else f"{self.unit} {place:,.0f}"


def read_reference(name: str) -> Reference:
    """Read the curve `name`: of `configs/reference`, or a path that ends with .csv.

    Raises ValueError if it is not there, or not what the header of this module says.
    """
    folder = recipes_folder() / "reference"
    path = Path(name) if name.endswith(SUFFIX) else folder / f"{name}{SUFFIX}"
    where = f"eval.reference={name}"
    about = where if name.endswith(SUFFIX) else f"{where}: {path}"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        curves = folder.rglob(f"*{SUFFIX}")
        names = sorted(curve.relative_to(folder).with_suffix("").as_posix() for curve in curves)
        nearest = difflib.get_close_matches(name, names, n=3, cutoff=0)
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ValueError(
            f"{where}: {path} cannot be read ({reason}); of the {len(names)} curves of"
            f" configs/reference, nearest: {', '.join(nearest)}; null for none"
        ) from None
    head = [line for line in lines if line.startswith("#")]
    header = _read_header(head, about)
    unit: Literal["epoch", "step"] = "epoch" if header.steps is None else "step"
    length = float(header.epochs or header.steps or 0)
    rows = list(csv.DictReader(lines[len(head) :]))
    runs = _read_runs(rows, unit, length, about, len(head))
    return Reference(name.removesuffix(SUFFIX), header, length, unit, runs)


def _read_header(head: list[str], where: str) -> Header:
    if not head:
        raise ValueError(
            f"{where}: its first lines are no header: '# title: ...', '# source: ...',"
            " '# recipe: ...', '# epochs: ...', '# images: ...', '# classes: ...'"
        )
    try:
        content = yaml.safe_load("\n".join(line.removeprefix("#").strip() for line in head))
        header = Header.model_validate_json(json.dumps(content))
    except (yaml.YAMLError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: its header is not '# key: value' lines: {reason}") from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"{where}: header: {'; '.join(problems)}") from None
    if (header.epochs is None) == (header.steps is None):
        raise ValueError(f"{where}: header: give the length as `epochs` or as `steps`")
    return header


def _read_runs(
    rows: list[dict[str, str]], unit: str, length: float, where: str, num_before: int
) -> tuple[dict[str, NDArray[np.float64]], ...]:
    """Return each run's columns, with `share` in place of its unit."""
    if not rows:
        raise ValueError(
            f"{where}: no row of numbers behind the header: expected '{unit},top1' and, below it,"
            " the numbers"
        )
    names = [key for key in rows[0] if key not in (unit, "run")]
    if unit not in rows[0] or "top1" not in names or {*names} - {*METRICS}:
        raise ValueError(
            f"{where}: expected the columns {unit} and top1, and no others than run, top5 and loss"
        )
    points: dict[str, list[list[float]]] = {}
    for number, row in enumerate(rows, num_before + 2):
        try:
            values = [float(row[key]) for key in (unit, *names)]
        except (TypeError, ValueError):
            values = [math.nan]
        if not np.isfinite(values).all():
            raise ValueError(f"{where}: line {number}: expected a number in each column")
        points.setdefault(row.get("run", ""), []).append(values)
    runs = []
    for run, found in points.items():
        columns = np.array(found).T
        place = columns[0]
        percent = columns[[at for at, key in enumerate((unit, *names)) if key in ("top1", "top5")]]
        if percent.min() < 0 or percent.max() > 100:
            raise ValueError(f"{where}: top1 and top5 are percentages, between 0 and 100")
        if place.min() < 0 or place.max() > length:
            raise ValueError(f"{where}: its {unit}s must be between 0 and {length:g}")
        if (np.diff(place) <= 0).any():
            of_run = f" of run {run}" if run else ""
            raise ValueError(f"{where}: the {unit}s{of_run} must ascend")
        runs.append({"share": place / length, **dict(zip(names, columns[1:], strict=True))})
    return tuple(runs)


# --- beside a run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A run beside a reference."""

    reference: Reference
    plan: Plan
    refusal: str
    """Why the two cannot be compared; "" if they can."""

    @property
    def length_note(self) -> str:
        """What follows from another length than the reference's; "" for the same."""
        ours = float(self.plan.total_steps)
        if self.reference.unit == "epoch":
            ours = self.plan.total_steps / self.plan.steps_per_epoch
        theirs = self.reference.length
        if _is_same(ours, theirs):
            return ""
        return (
            f"{ours:,.6g} {self.reference.unit}s here, {theirs:,.6g} there: compared at the same"
            " share of both"
        )

    def values(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return what the record gets at `step`: `top1_reference`, `top1_minus_reference`, ...

        metrics: of this run's validation set, with `_ema` for averaged weights.
        """
        if self.refusal:
            return {}
        found = {}
        for name, value in self.reference.at(step / self.plan.total_steps).items():
            found[f"{name}_reference"] = value.mean
            found[f"{name}_minus_reference"] = metrics[name + self._suffix] - value.mean
        return found

    def line(self, step: int, metrics: Mapping[str, Any]) -> str:
        """Return the accuracy at `step` beside the reference's in a line; "" if not compared."""
        if self.refusal:
            return ""
        share = step / self.plan.total_steps
        top1 = metrics["top1" + self._suffix]
        of = "averaged weights " if self._suffix else ""
        text = f"epoch {step / self.plan.steps_per_epoch:.4g}: {of}{top1:.2f} %"
        value = self.reference.at(share).get("top1")
        if value is None:
            edge = f"begins at {self.reference.moment(self.reference.first)}"
            if share > self.reference.first:
                edge = f"ends at {self.reference.moment(self.reference.last)}"
            return f"{text} (the reference {edge})"
        where = f" at its {self.reference.moment(share)}:" if self.length_note else ""
        spread = ""
        if (num_runs := len(self.reference.runs)) > 1:
            spread = f", {num_runs} runs {value.low:.2f} to {value.high:.2f}"
        return f"{text} (reference{where} {value.mean:.2f} %{spread}, {top1 - value.mean:+z.2f})"

    def curves(self) -> list[dict[str, list[float]]]:
        """Return each run's points over the steps of this run: `step`, and each metric."""
        if self.refusal:
            return []
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
    """Return the comparison of a run of `config` with `eval.reference`.

    Raises ValueError as `read_reference`, and if its recipe cannot be read.
    """
    assert config.eval.reference is not None, "the caller checks"
    reference = read_reference(config.eval.reference)
    header = reference.header
    recipe = _read_recipe(header, f"eval.reference={config.eval.reference}").train
    per_epoch = plan.steps_per_epoch
    recipe_steps = recipe.steps or (recipe.epochs or 0) * per_epoch
    curve_steps = reference.length * (per_epoch if reference.unit == "epoch" else 1)
    refusal = ""
    if (val_split.num_samples, val_split.num_classes) != (header.images, header.classes):
        refusal = (
            f"it is of {header.images:,} images of {header.classes:,} classes, the validation split"
            f" has {val_split.num_samples:,} of {val_split.num_classes:,}"
        )
    elif not any(_is_same(plan.total_steps, steps) for steps in (recipe_steps, curve_steps)):
        refusal = f"its recipe has {recipe_steps:,.0f} steps, this run {plan.total_steps:,}"
    elif header.weights == "ema" and config.train.ema_decay is None:
        refusal = "it is of averaged weights, this run has none (train.ema_decay)"
    return Comparison(reference, plan, refusal)


def _read_recipe(header: Header, where: str) -> Config:
    """Return the recipe of a curve, without the settings of the curve.

    Raises ValueError if the recipe or these settings cannot be read, before anything is trained.
    """
    recipe = Path(header.recipe)
    path = recipe / CONFIG_FILE if recipe.is_dir() else recipe
    overrides = [f"{key}={json.dumps(value)}" for key, value in header.settings.items()]
    try:
        load_config(path, overrides, used_here=False)
        return load_config(path, used_here=False)
    except ValueError as error:
        raise ValueError(f"{where}: header: recipe: {error}") from None


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
