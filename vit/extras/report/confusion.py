"""Compute and plot the confusion matrix of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vit.extras.report.drawing import (
    HEADING_IN,
    ORANGE,
    SMALL_PT,
    add_title,
    display_name,
    drawing,
    new_sheet,
    place,
    shorten,
    to_pixels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_CELLS = 350
"""The maximum number of cells per side, because cells smaller than a pixel would be invisible."""
NUM_EXAMPLES = 6
"""The maximum number of images for each of the most frequent mistakes."""


def confusion_matrix(labels: NDArray, predictions: NDArray, num_classes: int) -> NDArray[np.int64]:
    """Count images by true class (rows) and predicted class (columns), (C, C) int64.

    labels, predictions: (N,) integers. Images with a prediction of -1, whose logits were NaN, are
    not counted.
    """
    seen = predictions >= 0
    cells = labels[seen].astype(np.int64) * num_classes + predictions[seen]
    return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def most_confused(matrix: NDArray[np.int64], num: int = 10) -> list[tuple[int, int, int, int]]:
    """Return the `num` most frequent mistakes: (true, predicted, images, images of the true class).

    Mistakes are sorted by the number of images, then by their share of the class, then by class
    number.
    """
    totals = matrix.sum(1)
    pairs = [
        (int(t), int(p), int(matrix[t, p]), int(totals[t]))
        for t, p in np.argwhere(matrix > 0)
        if t != p
    ]
    return sorted(pairs, key=lambda pair: (-pair[2], pair[3], pair[0], pair[1]))[:num]


def plot_confusion(matrix: NDArray[np.int64], class_names: Sequence[str], picture: Path) -> Path:
    """Plot a confusion matrix (C, C) with true classes in rows. Returns `picture`.

    Up to 20 classes are drawn with counts and names, correct predictions in blue and mistakes in
    orange. For more classes, only mistakes are drawn, as an image with a logarithmic scale.
    Neighboring classes are merged into at most `MOST_CELLS` cells per side.
    """
    is_small = len(matrix) <= 20
    with drawing(picture, 7.6 if is_small else 6.9, layout="constrained") as figure:
        num = int(matrix.sum())
        right = int(matrix.trace())
        add_title(figure, f"Confusion: {num - right:,} mistakes on {num:,} images")

        axes = figure.subplots()
        axes.set(xlabel="predicted class", ylabel="true class")
        if is_small:
            _draw_counts(axes, matrix, [display_name(class_names, c) for c in range(len(matrix))])
        else:
            _draw_mistakes(axes, matrix)
    return picture


def _draw_counts(axes: Axes, matrix: NDArray[np.int64], names: list[str]) -> None:
    """Draw all counts as numbers. The color of a cell shows the count's share of the true class."""
    from matplotlib import colormaps

    num_classes = len(matrix)
    cell_in = 5.8 / num_classes
    share = matrix / matrix.sum(1, keepdims=True).clip(1)
    right = np.eye(num_classes, dtype=bool)
    largest = share[~right].max(initial=1e-12)

    colors = np.where(
        right[..., None],
        colormaps["Blues"](0.85 * share),
        colormaps["Oranges"](0.12 + 0.6 * share / largest),
    )[..., :3]
    colors[matrix == 0] = 1.0
    axes.imshow((255 * colors).astype(np.uint8))

    # Choose the font size such that the longest number fits in a cell.
    size = min(11.0, cell_in * 72 / (0.66 * len(str(matrix.max())) + 0.2))
    for t, p in np.argwhere(matrix > 0).tolist():
        # The weights of ITU-R BT.601 for the brightness of a color.
        is_dark = colors[t, p] @ (0.299, 0.587, 0.114) < 0.55
        axes.text(
            p,
            t,
            str(matrix[t, p]),
            ha="center",
            va="center",
            size=size,
            color="white" if is_dark else "black",
        )

    is_upright = all(shorten(name, cell_in - 0.05, SMALL_PT) == name for name in names)
    shortened = [shorten(name, 1.3, SMALL_PT) for name in names]
    axes.set_xticks(range(num_classes), shortened, rotation=0 if is_upright else 90, size=SMALL_PT)
    axes.set_yticks(range(num_classes), shortened, size=SMALL_PT)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(np.arange(num_classes + 1) - 0.5, minor=True)
    axes.grid(True, which="minor", color="#dddddd", alpha=1.0, linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _draw_mistakes(axes: Axes, matrix: NDArray[np.int64]) -> None:
    """Draw only the mistakes, colored by their share of the images with this true class."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator, NullFormatter

    merged = math.ceil(len(matrix) / MOST_CELLS)
    percent = _mistakes_percent(matrix, merged)
    lowest = percent[percent > 0].min(initial=100.0)
    side = len(percent) * merged

    drawn = axes.imshow(
        np.ma.masked_equal(percent, 0),
        cmap=colormaps["inferno"].with_extremes(bad="black"),
        # The darkest colors are invisible on black, so the scale begins below the lowest value.
        norm=LogNorm(lowest / 3, max(percent.max(), 3 * lowest)),
        extent=(0, side, side, 0),
        interpolation="nearest",
    )

    bar = axes.figure.colorbar(
        drawn, ax=axes, shrink=0.8, aspect=30, ticks=LogLocator(subs=(1, 2, 3, 5)), format="{x:g}"
    )
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.set_label("mistakes, % of the images in the row")
    bar.ax.set_ylim(lowest / 1.1)
    if merged > 1:
        axes.set(xlabel=f"predicted class (a cell: {merged} × {merged} classes)")


def _mistakes_percent(matrix: NDArray[np.int64], merged: int) -> NDArray[np.float64]:
    """Return the mistakes in each cell, in percent of the images in its row.

    A cell contains `merged` neighboring classes in both directions.
    """
    edges = np.arange(0, len(matrix), merged)
    mistakes = matrix.copy()
    np.fill_diagonal(mistakes, 0)

    # `reduceat` adds up what lies between the edges.
    rows = np.add.reduceat(mistakes, edges, axis=0)
    cells = np.add.reduceat(rows, edges, axis=1)
    num_images = np.add.reduceat(matrix.sum(1), edges)
    return 100.0 * cells / num_images.clip(1)[:, None]


def plot_most_confused(
    pairs: list[tuple[int, int, int, int]],
    examples: list[list[Tensor]],
    class_names: Sequence[str],
    picture: Path,
) -> Path:
    """Plot a row for each mistake in `most_confused`, with a bar for its count and up to 6 images.

    examples: a possibly empty list of images, (1 or 3, H, W) uint8, for each pair. Returns
    `picture`.
    """
    row_in = 0.92
    text_in = 2.75
    thumb_in = 0.78

    with drawing(picture, HEADING_IN + row_in * len(pairs)) as figure:
        sheet = new_sheet(figure, "Most frequent mistakes: true → predicted")
        for i, (true, predicted, count, total) in enumerate(pairs):
            top_in = HEADING_IN + i * row_in
            lines = {
                display_name(class_names, true): "bold",
                f"→ {display_name(class_names, predicted)}": "bold",
                f"{count:,} of {total:,} ({100 * count / total:.1f} %)": "normal",
            }
            for j, (line, weight) in enumerate(lines.items()):
                shown = shorten(line, text_in, weight=weight)
                sheet.text(0.1, top_in + 0.14 + 0.2 * j, shown, weight=weight)

            # The first mistake is the most frequent, so its bar is as wide as the text.
            bar_in = text_in * count / pairs[0][2]
            sheet.barh(top_in + 0.7, width=bar_in, height=0.1, left=0.1, color=ORANGE)
            for j, image in enumerate(examples[i][:NUM_EXAMPLES]):
                left_in = text_in + 0.25 + j * (thumb_in + 0.06)
                # The part of a square that the image leaves free is gray.
                sheet.barh(
                    top_in + thumb_in / 2, thumb_in, thumb_in, left_in, color="#eeeeee", zorder=-1
                )
                place(sheet, to_pixels(image), at=(left_in, top_in), size=(thumb_in, thumb_in))
    return picture
