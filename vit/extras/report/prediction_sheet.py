"""Draw a sheet of images with the model's predictions and attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from vit.system.drawing import SMALL_PT, Cell, cell_width_in, plot_cells, shorten

NUM_COLUMNS = 6
"""The number of pictures per row. With attention, each image has two pictures."""
MAX_LINES = 3
"""The largest number of classes in the caption of an image."""


def plot_predictions(
    images: Tensor,
    names: Sequence[str],
    classes: Sequence[Sequence[tuple[str, float]]],
    heading: str,
    picture: Path,
    overlays: Tensor | None = None,
) -> Path:
    """Draw images with their names and most likely classes. Returns `picture`.

    images: (B, 1 or 3, H, W) uint8. names: B file names. classes: the classes and probabilities of
    each image, in descending order. overlays: (B, 3, H, W) in [0, 1], drawn next to the images.
    """
    num_columns = min(NUM_COLUMNS, max(3, len(images) * (1 if overlays is None else 2)))
    side = cell_width_in(num_columns)
    cells = []
    for number, (name, likeliest) in enumerate(zip(names, classes, strict=True)):
        caption = [shorten(name, side, SMALL_PT)]
        for class_name, probability in likeliest[:MAX_LINES]:
            share = f": {100 * probability:.0f} %"
            caption.append(shorten(class_name, side - 0.45, SMALL_PT) + share)
        cells.append(Cell(images[number], caption))
        if overlays is not None:
            cells.append(Cell(overlays[number], []))
    return plot_cells(cells, num_columns, heading, picture)
