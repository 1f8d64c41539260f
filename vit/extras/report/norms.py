"""Plot the norms that `log.norms_every_steps` records, by depth and step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vit.optim.norms import GRADIENT, LARGEST_LOGIT, RATIO, WEIGHT
from vit.system.drawing import GREY, SMALL_PT, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

USUAL_RATIO = 1e-3
"""The usual ratio of the norms of update and weights (karpathy/cs231n, neural-networks-3, "Ratio of
weights:updates")."""
PANELS = {
    GRADIENT: "Gradient, before clipping",
    WEIGHT: "Weights, relative to the first",
    RATIO: "Update / weights",
    LARGEST_LOGIT: "Largest attention logit",
}
MAX_LABELS = 9


def plot_norms(lines: list[dict[str, Any]], picture: Path) -> Path:
    """Plot gradients, weights, updates and attention logits by depth and step. Returns `picture`.

    lines: the `norms` lines of metrics.jsonl. A column extends from the previous measurement to its
    own step. Values that are not finite are gray. Raises ValueError if `lines` is empty.
    """
    if not lines:
        raise ValueError("No norms were measured: set log.norms_every_steps")
    layers = list(lines[-1][WEIGHT])
    edges = np.array([0, *(line["step"] for line in lines)])
    height_in = 2 * max(2.6, 0.9 + 0.11 * len(layers))
    with drawing(picture, height_in, layout="constrained") as figure:
        for axes, (key, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
            rows = [layer for layer in layers if key != LARGEST_LOGIT or _has(lines, layer)]
            read = [[line.get(key, {}).get(layer) for line in lines] for layer in rows]
            values = np.array(read, dtype=float).reshape(len(rows), len(lines))
            if key == WEIGHT:
                # Absolute norms depend on the size of a layer, so they are divided by the first
                # value.
                values = values / np.where(values[:, :1] > 0, values[:, :1], np.nan)
            axes.set_title(title)
            if rows:
                _draw(figure, axes, key=key, layers=rows, edges=edges, values=values)
            else:
                note = "unknown for this\ntype of attention"
                axes.text(0.5, 0.5, note, ha="center", color=GREY, transform=axes.transAxes)
    return picture


def _has(lines: list[dict[str, Any]], layer: str) -> bool:
    return any(layer in line.get(LARGEST_LOGIT, {}) for line in lines)


def _draw(
    figure: Figure,
    axes: Axes,
    key: str,
    layers: list[str],
    edges: NDArray[np.int64],
    values: NDArray[np.float64],
) -> None:
    """Plot `values` (layers, steps) with the first layer at the bottom. Gray marks values <= 0."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    shown = np.ma.masked_where(~(values > 0), values)  # also NaN
    low, high = (shown.min(), shown.max()) if shown.count() else (1.0, 1.0)
    spans_decades = high > 10 * low
    colors = "viridis"
    if key == RATIO:
        spans_decades = True
        low, high = USUAL_RATIO / 1e2, USUAL_RATIO * 1e2
        colors = "RdBu_r"  # white is the usual ratio
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
