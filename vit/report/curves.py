"""Curves of a run: loss, accuracy, learning rate and throughput over the steps.

The lines of a `metrics.jsonl` that count are sorted by kind, averaged where there are more than a
picture can show, and drawn as four panels: together as a PNG, or each as SVG for a page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vit.report.history import History, read_history
from vit.report.style import BLUE, GREEN, GREY, ORANGE, drawing, report_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _read_curves(metrics: Path) -> History:
    """Read a record; each train line gets `data_wait_percent` if the record has its parts.

    That is the share of the interval before it that was spent waiting for data.
    """
    history = read_history(metrics)
    if not history.lines:
        raise ValueError("Nothing is in the record yet")
    for line, _, spent_s in history.intervals():
        line["data_wait_percent"] = min(100.0 * line["data_wait_s"] / spent_s, 100.0)
    return history


def _points(lines: list[dict[str, Any]], name: str, at_most: int = 500) -> NDArray[np.float64]:
    """Return steps and values of `name`, (2, n), NaN for null.

    Neighbours are averaged down to `at_most` points: more would draw black bands of noise.
    """
    points = [
        (line["step"], math.nan if line[name] is None else line[name])
        for line in lines
        if name in line
    ]
    edges = np.arange(0, len(points), -(-len(points) // at_most) or 1)
    if not len(points):
        return np.empty((2, 0))
    return (np.add.reduceat(points, edges) / np.diff([*edges, len(points)])[:, None]).T


def _line(
    axes: Axes,
    lines: list[dict[str, Any]],
    name: str,
    style: str,
    color: str,
    label: str | None = None,
) -> None:
    steps, values = _points(lines, name)
    if len(steps):
        dot = "." if style == "-" and len(steps) < 20 else ""  # a single point has no line
        axes.plot(steps, values, dot + style, color=color, markersize=4, label=label)


def _draw_loss(axes: Axes, history: History) -> None:
    evals = history.of_kind("eval")
    steps = [line["step"] for line in history.of_kind("fault")]
    _line(axes, history.of_kind("train"), "loss", "-", BLUE, "training, augmented")
    _line(axes, evals, "loss", "o-", ORANGE, "validation")
    _line(axes, evals, "loss_ema", "s--", GREEN, "averaged weights")
    axes.set(title="Cross-entropy", ylim=(0, None))
    if steps:
        axes.plot(
            steps,
            [0.03] * len(steps),
            "x",
            color="black",
            markersize=6,
            label=f"{len(steps):,} updates skipped",
            transform=axes.get_xaxis_transform(),
        )


def _draw_accuracy(axes: Axes, history: History) -> None:
    evals = history.of_kind("eval")
    _line(axes, evals, "top1", "o-", ORANGE, "weights")
    _line(axes, evals, "top1_ema", "s--", GREEN, "averaged weights")
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, 0), min(top, 100))
    for line in axes.get_lines():
        line.set_clip_on(False)  # a marker at 100 stays complete
    values = [
        value
        for line in evals
        for key in ("top1", "top1_ema")
        if (value := line.get(key)) is not None
    ]
    if values:
        axes.set(
            title=f"Top-1 accuracy: best {max(values):.2f} %",
            ylabel=f"% of {evals[-1]['num_images']:,} images",
        )
    else:
        axes.set(title="Top-1 accuracy", ylabel="%", ylim=(0, 100))
        axes.text(0.5, 0.5, "not evaluated yet", ha="center", color=GREY, transform=axes.transAxes)


def _draw_learning_rate(axes: Axes, history: History) -> None:
    _line(axes, history.of_kind("train"), "lr", "-", BLUE)
    axes.set(title="Learning rate", ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _draw_throughput(axes: Axes, history: History) -> None:
    train = history.of_kind("train")
    _line(axes, train, "images_per_s", "-", BLUE)
    axes.set(title="Throughput", ylabel="images / s", ylim=(0, 1.1 * axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    steps, percent = _points(train, "data_wait_percent")
    if len(steps):
        share = axes.twinx()
        share.fill_between(steps, percent, color=ORANGE, alpha=0.4, linewidth=0)
        share.set(ylim=(0, 100), ylabel="% of time waiting for data")
        share.spines["right"].set_visible(True)
        share.tick_params(axis="y", colors=ORANGE)
        share.yaxis.label.set_color(ORANGE)


PANELS: dict[str, Callable[[Axes, History], None]] = {
    "loss": _draw_loss,
    "accuracy": _draw_accuracy,
    "learning_rate": _draw_learning_rate,
    "throughput": _draw_throughput,
}


def _draw_panel(axes: Axes, history: History, name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    PANELS[name](axes, history)
    resumed = [line["step"] for line in history.of_kind("start") if line.get("restarts")]
    for i, step in enumerate(resumed):
        axes.axvline(
            step, color=GREY, linestyle=":", linewidth=1.5, label="resumed" if i == 0 else None
        )
    if resumed or len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend()
    axes.grid(True)
    axes.set_xlim(0, 1.02 * max(line["step"] for line in history.lines) or 1)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    epochs = [
        line["step"] / line["epoch"] for line in history.of_kind("train") if line.get("epoch")
    ]
    axes.set_xlabel(f"step ({epochs[-1]:,.0f} an epoch)" if epochs else "step")


def plot_curves(metrics: Path, picture: Path) -> Path:
    """Draw loss, accuracy, learning rate and throughput over the steps of a `metrics.jsonl`.
    Returns `picture`.

    Dotted lines are restarts, crosses updates that were skipped; more than 500 points are averaged
    with their neighbours.
    """
    history = _read_curves(metrics)
    with drawing(picture, 6.2, layout="constrained") as figure:
        for axes, name in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
            _draw_panel(axes, history, name)
    return picture


def curve_panels(metrics: Path) -> dict[str, str]:
    """Return the panels of `plot_curves` by name, as SVG elements for one HTML page.

    CSS can scale them; letters are outlines; ids begin with the panel's name; there is no style
    sheet inside, as it would affect the rest of the page.
    """
    history = _read_curves(metrics)
    panels = dict[str, str]()
    with report_style():
        from matplotlib.figure import Figure

        for name in PANELS:
            figure = Figure((5.0, 3.2), layout="constrained")
            written = StringIO()
            _draw_panel(figure.subplots(), history, name)
            figure.savefig(
                written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
            )
            panels[name] = _inline(written.getvalue(), name, figure.axes[0].get_title(loc="left"))
    return panels


def _inline(document: str, name: str, title: str) -> str:
    """Return the <svg> element of matplotlib's document, for an HTML page with several."""
    body = re.sub(
        r"<(metadata|style)\b.*?</\1>\s*",
        "",
        document[document.index("<svg") :].strip(),
        flags=re.DOTALL,
    )
    root, rest = re.sub(r'(\bid="|\bhref="#|url\(#)', rf"\g<1>{name}-", body).split(">", 1)
    root = re.sub(r'\s(?:width|height)="[^"]*"', "", root)
    # what matplotlib's style sheet sets for every element
    return (
        f'{root} role="img" aria-label="{title}" style="stroke-linejoin: round; stroke-linecap:'
        f' butt">{rest}'
    )
