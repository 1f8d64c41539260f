"""Plot the curves of a run: loss, accuracy, learning rate and throughput over steps.

One picture contains all four panels. Long curves are smoothed by averaging neighboring points.
Other pictures show the loss and accuracy of several runs over epochs, and the norms of a run by
depth and step (`log.norms_every_steps`).

Training accuracy is computed from the recorded margins of augmented images
(`vit.hooks.sample_losses`). Mixed inputs do not have a single correct class, so epochs with mixing
have no training accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vit.config.io import load_config
from vit.config.schema import AugmentConfig
from vit.data.augment.draw import mixes
from vit.extras.report.drawing import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    SMALL_PT,
    WIDTH_IN,
    drawing,
)
from vit.extras.report.history import History, read_history, set_names
from vit.hooks.sample_losses import epoch_files, read_epoch
from vit.optim.norms import GRADIENT, LARGEST_LOGIT, RATIO, WEIGHT
from vit.run_folder.paths import CONFIG_FILE, METRICS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PLAIN_LOSS = "cross-entropy"
MOST_INSIDE = 4
"""The maximum number of legend entries inside the axes. A longer legend is placed below the
axes."""
USUAL_RATIO = 1e-3
"""The usual ratio of the update norm to the weight norm (karpathy/cs231n, neural-networks-3, "Ratio
of weights:updates")."""
NORM_PANELS = {
    GRADIENT: "Gradient, before clipping",
    WEIGHT: "Weights, relative to the first",
    RATIO: "Update / weights",
    LARGEST_LOGIT: "Largest attention logit",
}
MAX_LABELS = 9
SET_LINES = (
    (PURPLE, "^-."),
    (SKY, "v-."),
    (GRAY, "D-."),
    (PURPLE, "^:"),
    (SKY, "v:"),
    (GRAY, "D:"),
)
"""The colors and line styles for the accuracies of further evaluation sets."""


def _read_curves(metrics: Path) -> History:
    """Read metrics.jsonl, and add `data_wait_percent` to train lines if it is known.

    The value is the percentage of time since the previous line that was spent waiting for data.
    """
    history = read_history(metrics)
    if not history.lines:
        raise ValueError("metrics.jsonl is still empty")

    for line, _, spent_s in history.intervals():
        line["data_wait_percent"] = min(100.0 * line["data_wait_s"] / spent_s, 100.0)

    with suppress(ValueError):  # the config is missing or from a different version
        config = load_config(metrics.parent / CONFIG_FILE)
        name = "BCE" if config.loss.name == "bce" else PLAIN_LOSS
        history.training_loss = name if config.distill.teacher is None else f"{name} + teacher"
        _add_training_accuracy(metrics.parent, history, config.augment)
    return history


def _add_training_accuracy(run_dir: Path, history: History, augment: AugmentConfig) -> None:
    """Add `top1` to train lines, in percent of the images since the previous line.

    The accuracy is unknown without log.sample_losses, and in epochs with mixing.
    """
    plan = history.plan
    mixed: float = 0
    if mixes(augment):
        mixed = math.inf if augment.mixup_off_epoch is None else augment.mixup_off_epoch
    files = {epoch: path for epoch, path in epoch_files(run_dir).items() if epoch > mixed}
    if not files or not plan:
        return

    # The numbers of correct and of recorded images in each step, from step 1 on.
    per_epoch = plan["steps_per_epoch"]
    right = np.zeros(max(files) * per_epoch + 1)
    seen = np.zeros_like(right)
    for epoch, path in files.items():
        try:
            margins = read_epoch(path, per_epoch, plan["global_batch_size"])[:, 1]
        except ValueError:
            continue
        steps = slice((epoch - 1) * per_epoch + 1, epoch * per_epoch + 1)
        right[steps] = (margins > 0).sum(1)
        seen[steps] = (~np.isnan(margins)).sum(1)

    previous_step = 0
    for line in history.of_kind("train"):
        steps = slice(previous_step + 1, line["step"] + 1)
        previous_step = line["step"]
        num_seen = seen[steps].sum()
        if num_seen:
            line["top1"] = 100.0 * float(right[steps].sum() / num_seen)


def _points(lines: list[dict[str, Any]], name: str, at_most: int = 500) -> NDArray[np.float64]:
    """Return the steps and values of `name`, (2, n). Null becomes NaN.

    Neighboring points are averaged so that at most `at_most` remain, because more points would look
    like noise.
    """
    points = [
        (line["step"], math.nan if line[name] is None else line[name])
        for line in lines
        if name in line
    ]
    if not points:
        return np.empty((2, 0))

    # `reduceat` adds up the points between the edges.
    edges = np.arange(0, len(points), math.ceil(len(points) / at_most))
    return (np.add.reduceat(points, edges) / np.diff([*edges, len(points)])[:, None]).T


def _line(axes: Axes, lines: list[dict[str, Any]], name: str, *, style: str, **look: Any) -> None:
    """Plot `name` against the step.

    Args:
        style: The format string for matplotlib's `plot`.
        look: Further arguments of `plot`.
    """
    steps, values = _points(lines, name)
    if len(steps):
        # A line through a single point is invisible.
        dot = "." if style == "-" and len(steps) < 20 else ""
        axes.plot(steps, values, dot + style, markersize=4, **look)


def _draw_three(axes: Axes, history: History, name: str, *, training: str, validation: str) -> None:
    """Plot `name` for training, evaluations, averaged weights and the published curve.

    training, validation: the labels of the training and evaluation curves.
    """
    evals = history.of_kind("eval")
    _draw_reference(axes, history, name)
    _line(axes, history.of_kind("train"), name, style="-", color=BLUE, label=training)
    _line(axes, evals, name, style="o-", color=ORANGE, label=validation)
    _line(axes, evals, f"{name}_ema", style="s--", color=GREEN, label="averaged weights")


def _draw_reference(axes: Axes, history: History, name: str) -> None:
    """Plot the published curve of `name`, up to the run's last step."""
    last_step = max(line["step"] for line in history.lines)
    label: str | None = "reference"
    for line in history.of_kind("reference")[-1:]:
        for curve in line["curves"]:
            steps = np.array(curve["step"])
            reached = steps <= last_step
            if name not in curve or not reached.any():
                continue

            values = np.array(curve[name])[reached]
            axes.plot(steps[reached], values, "-", color=GRAY, alpha=0.4, linewidth=4, label=label)
            label = None


def _draw_faults(axes: Axes, history: History) -> None:
    """Draw crosses at skipped updates."""
    steps = [line["step"] for line in history.of_kind("fault")]
    if steps:
        axes.plot(
            steps,
            [0.03] * len(steps),  # just above the bottom of the axes
            "x",
            color="black",
            label=f"{len(steps):,} updates skipped",
            markersize=6,
            transform=axes.get_xaxis_transform(),
        )


def _draw_loss(axes: Axes, history: History) -> None:
    is_plain = history.training_loss == PLAIN_LOSS
    training = "training, augmented" if is_plain else f"training: {history.training_loss}"
    validation = "validation" if is_plain else "validation: cross-entropy"
    _draw_three(axes, history, "loss", training=training, validation=validation)
    axes.set(title="Cross-entropy" if is_plain else "Loss", ylim=(0, None))
    _draw_faults(axes, history)


def _draw_accuracy(axes: Axes, history: History) -> None:
    """Plot the top-1 accuracy in training and on all sets, with the best result in the title."""
    evals = history.of_kind("eval")
    _draw_three(axes, history, "top1", training="training, augmented", validation="validation")

    names = set_names(history)
    for name, (color, style) in zip(names, cycle(SET_LINES), strict=False):
        # Draw one line per set, for the averaged weights if they exist.
        averaged = any(f"{name}/top1_ema" in line for line in evals)
        key = f"{name}/top1{'_ema' if averaged else ''}"
        _line(axes, evals, key, style=style, color=color, label=name)

    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, 0), min(top, 100))
    for line in axes.get_lines():
        line.set_clip_on(False)  # Without clipping, a marker at 100 is completely visible.

    results = [line.get("top1") for line in evals] + [line.get("top1_ema") for line in evals]
    best = max((top1 for top1 in results if top1 is not None), default=None)
    if best is None:
        axes.set(title="Top-1 accuracy", ylabel="%", ylim=(0, 100))
        axes.text(0.5, 0.5, "not evaluated yet", ha="center", color=GRAY, transform=axes.transAxes)
    else:
        images = "images" if names else f"{evals[-1]['num_images']:,} images"
        axes.set(title=f"Top-1 accuracy: best {best:.2f} %", ylabel=f"% of {images}")


def _draw_learning_rate(axes: Axes, history: History) -> None:
    train = history.of_kind("train")
    _line(axes, train, "lr", style="-", color=BLUE)
    axes.set(title="Learning rate", ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

    if any("weight_decay" in line for line in train):  # recorded only if it changes
        axes.set_title("Learning rate and weight decay")
        decay = _right_axis(axes, "weight decay (dashed)")
        _line(decay, train, "weight_decay", style="--", color=ORANGE)
        decay.set_ylim(0, None)


def _draw_throughput(axes: Axes, history: History) -> None:
    train = history.of_kind("train")
    _line(axes, train, "images_per_s", style="-", color=BLUE)
    axes.set(title="Throughput", ylabel="images / s", ylim=(0, 1.1 * axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")

    steps, percent = _points(train, "data_wait_percent")
    if len(steps):
        share = _right_axis(axes, "% of time waiting for data")
        share.fill_between(steps, percent, color=ORANGE, alpha=0.4, linewidth=0)
        share.set_ylim(0, 100)


def _right_axis(axes: Axes, label: str) -> Axes:
    right = axes.twinx()
    right.set_ylabel(label, color=ORANGE)
    right.spines["right"].set_visible(True)
    right.tick_params(axis="y", colors=ORANGE)
    return right


PANELS: dict[str, Callable[[Axes, History], None]] = {
    "loss": _draw_loss,
    "accuracy": _draw_accuracy,
    "learning_rate": _draw_learning_rate,
    "throughput": _draw_throughput,
}


def _draw_panel(axes: Axes, history: History, name: str) -> None:
    """Draw a panel with marks where the run resumed or changed its image size."""
    from matplotlib.ticker import MaxNLocator

    PANELS[name](axes, history)
    resumed = [line["step"] for line in history.of_kind("start") if line.get("restarts")]
    for n, step in enumerate(resumed):
        label = None if n else "resumed"  # one entry in the legend
        axes.axvline(step, color=GRAY, linestyle=":", linewidth=1.5, label=label)

    for step, size in history.image_sizes():
        axes.axvline(step, color=GRAY, linewidth=0.8)
        axes.text(
            step,
            0.02,
            f" {size} px",
            color=GRAY,
            fontsize=SMALL_PT,
            transform=axes.get_xaxis_transform(),
        )

    num_names = len(axes.get_legend_handles_labels()[0])
    if num_names > MOST_INSIDE:
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            borderaxespad=4.5,  # the height of both axis labels, in font sizes
            ncols=2,
            fontsize=SMALL_PT,
        )
    elif resumed or num_names > 1:
        axes.legend()

    per_epoch = history.steps_per_epoch
    axes.set(
        xlabel=f"step ({per_epoch:,.0f} an epoch)" if per_epoch else "step",
        xlim=(0, 1.02 * max(line["step"] for line in history.lines) or 1),
    )
    axes.grid(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")


def plot_curves(metrics: Path, picture: Path) -> Path:
    """Plot loss, accuracy, learning rate and throughput over the steps of a `metrics.jsonl`.

    Dotted lines mark restarts, gray lines mark changes in image size, and crosses mark skipped
    updates. Curves with more than 500 points are averaged. Returns `picture`.
    """
    history = _read_curves(metrics)
    with drawing(picture, 6.2, layout="constrained") as figure:
        for axes, name in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
            _draw_panel(axes, history, name)
    return picture


def plot_panels(metrics: Path, folder: Path) -> list[Path]:
    """Plot each panel of `plot_curves` as an SVG file in `folder`. Returns the files."""
    history = _read_curves(metrics)
    pictures = [folder / f"{name}.svg" for name in PANELS]
    for picture in pictures:
        with drawing(picture, 3.1, width_in=WIDTH_IN / 2, layout="constrained") as figure:
            _draw_panel(figure.subplots(), history, picture.stem)
    return pictures


# --- several runs over their epochs ---------------------------------------------------------------


def plot_learning_curves(
    run_dirs: Sequence[Path], picture: Path, smooth_epochs: float | None = None
) -> Path:
    """Plot the loss and top-1 accuracy of several runs over epochs. Returns `picture`.

    Training curves are smoothed over `smooth_epochs`, and recorded values are shown in a lighter
    color. None means one epoch, or a twentieth of a run that is shorter than 20 epochs. 0 disables
    smoothing. Evaluations are shown as points, and use the averaged weights if they exist. Runs are
    named after their folders, or by full path if several folders have the same name. Raises
    ValueError for a folder without metrics.jsonl.
    """
    from matplotlib.ticker import MaxNLocator

    names = [run_dir.resolve().name for run_dir in run_dirs]
    histories = []
    for run_dir, name in zip(run_dirs, names, strict=True):
        metrics = run_dir / METRICS_FILE
        if not metrics.is_file():
            raise ValueError(
                f"{run_dir}: contains no {METRICS_FILE}: pass a run folder, such as runs/demo"
            )
        shown = name if names.count(name) == 1 else str(run_dir)
        histories.append((shown, _read_curves(metrics)))

    with drawing(picture, 3.6, layout="constrained") as figure:
        loss, accuracy = figure.subplots(1, 2)
        for axes, key in ((loss, "loss"), (accuracy, "top1")):
            for number, (name, history) in enumerate(histories):
                _draw_run(axes, history, key, smooth_epochs, color=f"C{number}", name=name)
            axes.set(xlabel="epoch", xlim=(0, None))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.grid(True)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=SMALL_PT)

        losses = {history.training_loss for _, history in histories}
        loss.set(title="Cross-entropy" if losses <= {PLAIN_LOSS} else "Loss", ylim=(0, None))
        accuracy.set(title="Top-1 accuracy, %", ylim=(None, 100))
    return picture


def _draw_run(
    axes: Axes, history: History, key: str, smooth_epochs: float | None, *, color: str, name: str
) -> None:
    """Plot the training and validation curves of one run over epochs. Arguments: see
    `plot_learning_curves`."""
    per_epoch = history.steps_per_epoch or 1
    steps, values = _points(history.of_kind("train"), key)
    if len(steps):
        epochs = steps / per_epoch
        width = min(1.0, epochs[-1] / 20) if smooth_epochs is None else smooth_epochs
        if width:
            axes.plot(epochs, values, "-", color=color, alpha=0.25, linewidth=0.8)
        loss = history.training_loss if key == "loss" else PLAIN_LOSS
        label = f"{name}: training, {'augmented' if loss == PLAIN_LOSS else loss}"
        axes.plot(epochs, smoothed(epochs, values, width), ":", color=color, label=label)

    evals = history.of_kind("eval")
    averaged = f"{key}_ema" if any(f"{key}_ema" in line for line in evals) else key
    steps, values = _points(evals, averaged)
    if len(steps):
        label = f"{name}: validation"
        axes.plot(steps / per_epoch, values, "o-", color=color, markersize=4, label=label)


def smoothed(x: NDArray[np.float64], y: NDArray[np.float64], width: float) -> NDArray[np.float64]:
    """Return the mean of `y` within `width` / 2 of each `x` (ascending), ignoring NaN.

    The window is narrower at both ends, so it stays centered and does not shift the curve.
    """
    half = np.minimum(width / 2, np.minimum(x - x[0], x[-1] - x)) * (1 + 1e-9)
    first = np.searchsorted(x, x - half, "left")
    last = np.searchsorted(x, x + half, "right")

    is_number = ~np.isnan(y)
    sums, counts = (np.cumsum([0.0, *v]) for v in (np.where(is_number, y, 0), is_number))
    with np.errstate(invalid="ignore"):
        return (sums[last] - sums[first]) / (counts[last] - counts[first])


# --- norms ----------------------------------------------------------------------------------------


def plot_norms(lines: list[dict[str, Any]], picture: Path) -> Path:
    """Plot gradients, weights, updates and attention logits by depth and step. Returns `picture`.

    lines: the `norms` lines of metrics.jsonl. Each column extends from the previous measurement to
    its own step. Non-finite values are gray. Raises ValueError if `lines` is empty.
    """
    if not lines:
        raise ValueError("No norms were measured: set log.norms_every_steps")

    layers = list(lines[-1][WEIGHT])
    edges = np.array([0, *(line["step"] for line in lines)])
    height_in = 2 * max(2.6, 0.9 + 0.11 * len(layers))
    with drawing(picture, height_in, layout="constrained") as figure:
        for axes, (key, title) in zip(figure.subplots(2, 2).flat, NORM_PANELS.items(), strict=True):
            rows = [layer for layer in layers if key != LARGEST_LOGIT or _has_logits(lines, layer)]
            read = [[line.get(key, {}).get(layer) for line in lines] for layer in rows]
            values = np.array(read, dtype=float).reshape(len(rows), len(lines))
            if key == WEIGHT:
                # Absolute norms depend on the size of a layer, so divide each norm by the layer's
                # first value.
                values = values / np.where(values[:, :1] > 0, values[:, :1], np.nan)

            axes.set_title(title)
            if rows:
                _draw_norms(figure, axes, key=key, layers=rows, edges=edges, values=values)
            else:
                axes.text(
                    0.5,
                    0.5,
                    "unknown for this\ntype of attention",
                    ha="center",
                    color=GRAY,
                    transform=axes.transAxes,
                )
    return picture


def _has_logits(lines: list[dict[str, Any]], layer: str) -> bool:
    return any(layer in line.get(LARGEST_LOGIT, {}) for line in lines)


def _draw_norms(
    figure: Figure,
    axes: Axes,
    key: str,
    layers: list[str],
    edges: NDArray[np.int64],
    values: NDArray[np.float64],
) -> None:
    """Plot `values` (layers, steps) with the first layer at the bottom. Values <= 0 are gray."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    shown = np.ma.masked_where(~(values > 0), values)  # also masks NaN
    if key == RATIO:
        low, high = USUAL_RATIO / 1e2, USUAL_RATIO * 1e2
        spans_decades = True
        colors = "RdBu_r"  # white is the usual ratio
    else:
        low, high = (shown.min(), shown.max()) if shown.count() else (1.0, 1.0)
        spans_decades = high > 10 * low
        colors = "viridis"

    norm: Normalize = LogNorm(low, high) if spans_decades else Normalize(low, high)
    axes.set_facecolor("#bbbbbb")
    mesh = axes.pcolormesh(
        edges, np.arange(len(layers) + 1), shown, norm=norm, cmap=colors, rasterized=True
    )

    subs = (1.0,) if high > 100 * low else (1.0, 2.0, 5.0)
    ticks = LogLocator(subs=subs, numticks=6) if spans_decades else MaxNLocator(4)
    bar = figure.colorbar(mesh, ax=axes, ticks=ticks, extend="both" if key == RATIO else "neither")
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bar.ax.tick_params(labelsize=SMALL_PT)

    every = math.ceil(len(layers) / MAX_LABELS)
    places = [n for n in range(len(layers)) if n % every == 0 or n == len(layers) - 1]
    if len(places) > 1 and places[-1] - places[-2] < every / 2:
        del places[-2]
    axes.set_yticks([n + 0.5 for n in places], [layers[n] for n in places], size=SMALL_PT)
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    axes.set_xlabel("step")
