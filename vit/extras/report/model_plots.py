"""Draw augmented inputs, predictions, attention rollout and position embedding similarities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit.system.drawing import (
    BLUE,
    GREY,
    ORANGE,
    SMALL_PT,
    Cell,
    add_title,
    as_colors,
    cell_width_in,
    display_name,
    drawing,
    new_sheet,
    place,
    plot_cells,
    share_lines,
    shorten,
    to_pixels,
)

NUM_COLUMNS = 6
"""The number of pictures per row. With attention, each image has two pictures."""
MAX_LINES = 3
"""The maximum number of classes in the caption of an image."""


def plot_augmented(
    inputs: Tensor,
    targets: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    class_names: Sequence[str],
    picture: Path,
) -> Path:
    """Draw the model's training inputs with their classes or shares of classes.

    inputs: (B, C, H, W) float, normalized by `mean` and `std`. targets: (B, classes) float, the
    shares of classes. Returns `picture`.
    """
    num_columns = min(6, max(3, len(inputs)))
    side = cell_width_in(num_columns)
    cells = [
        Cell(image, share_lines(target, class_names, side))
        for image, target in zip(as_colors(inputs, mean, std), targets.cpu(), strict=True)
    ]
    height, width = inputs.shape[2:]
    heading = f"Training inputs of the model, {width} × {height} pixels"
    return plot_cells(cells, num_columns, heading, picture)


def plot_attention(
    images: Tensor,
    relevance: Tensor,
    labels: Sequence[int],
    predictions: Sequence[int],
    probabilities: Sequence[float],
    class_names: Sequence[str],
    picture: Path,
) -> Path:
    """Draw each image next to the relevance of its patches, with its class and the prediction.

    images: (B, C, H, W) uint8. relevance: (B, h, w) float, scaled to [0, 1] in each image. labels,
    predictions: B classes, or -1 if the logits were NaN. probabilities: the probabilities of the
    predicted classes. Returns `picture`.
    """
    # The width of two images, the gap between pairs and the height of two lines of text, in inches.
    pair = 3.75
    gap = 0.3
    head = 0.43
    side = (pair - 0.06) / 2
    tall = side * images.shape[2] / images.shape[3]
    row = head + tall + 0.25
    overlays = overlaid(images, relevance)
    with drawing(picture, 0.8 + row * math.ceil(len(images) / 2)) as figure:
        sheet = new_sheet(figure, "Attention rollout")
        note = (
            "Yellow patches have the most influence on the output, violet patches the least. Colors"
            " are scaled per image."
        )
        sheet.text(0.1, 0.52, note, size=SMALL_PT, va="center", color=GREY)
        for i, (label, predicted, probability) in enumerate(
            zip(labels, predictions, probabilities, strict=True)
        ):
            left, top = 0.1 + i % 2 * (pair + gap), 0.8 + i // 2 * row
            mark, color, weight = (
                ("✓", BLUE, "normal") if label == predicted else ("✗", ORANGE, "bold")
            )
            name = (
                shorten(display_name(class_names, predicted), pair - 1.9, weight=weight)
                + f" ({100 * probability:.0f} %)"
            )
            sheet.text(
                left, top + 0.13, "true: " + shorten(display_name(class_names, label), pair - 0.5)
            )
            taken_for = f"{mark} predicted: {name if predicted >= 0 else 'NaN'}"
            sheet.text(left, top + 0.33, taken_for, color=color, weight=weight)
            place(sheet, to_pixels(images[i]), at=(left, top + head), size=(side, tall))
            right = left + side + 0.06
            place(sheet, to_pixels(overlays[i]), at=(right, top + head), size=(side, tall))
    return picture


def overlaid(images: Tensor, relevance: Tensor) -> Tensor:
    """Return gray images overlaid with relevance as colors, (B, 3, H, W) float in [0, 1].

    images: (B, 1 or 3, H, W) uint8. relevance: (B, h, w) float, scaled to [0, 1] in each image.
    Yellow is the highest value, violet is the lowest.
    """
    from matplotlib import colormaps

    values = relevance.detach().float().cpu()
    low, high = values.amin((1, 2), keepdim=True), values.amax((1, 2), keepdim=True)
    stretched = (values - low) / (high - low).clamp(min=1e-12)
    smooth = F.interpolate(stretched[:, None], images.shape[2:], mode="bicubic").clamp(0, 1)[:, 0]
    colors = torch.from_numpy(colormaps["viridis"](smooth.numpy())[..., :3]).permute(0, 3, 1, 2)
    grey = images.detach().cpu().float().mean(1, keepdim=True) / 255
    return (0.45 * grey + 0.55 * colors.float()).clamp(0, 1)


def plot_position_similarity(pos_embed: Tensor, grid: tuple[int, int], picture: Path) -> Path:
    """Draw the cosine similarity between each position embedding and all others.

    The picture follows Figure 7 (center) of the ViT paper, Dosovitskiy et al. 2021.

    pos_embed: (h*w, D) float, without prefix tokens. grid: (h, w). Draws a tile for each position,
    or for 14 x 14 evenly spaced positions. Returns `picture`.
    """
    height, width = grid
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, 14)).round().astype(int)) for n in grid)
    unit = F.normalize(pos_embed.detach().float().cpu(), dim=1)
    tiles = (
        (unit.view(height, width, -1)[rows][:, columns] @ unit.T)
        .view(len(rows), len(columns), height, width)
        .numpy()
    )
    # Patches are drawn several pixels wide, because the gaps are narrower than a patch.
    zoom = max(1, 12 // max(grid))
    gap = max(1, zoom * max(grid) // 12)
    tall = zoom * height + gap
    wide = zoom * width + gap
    mosaic = np.full((len(rows) * tall - gap, len(columns) * wide - gap), np.nan)
    for y, x in np.ndindex(len(rows), len(columns)):
        mosaic[y * tall : (y + 1) * tall - gap, x * wide : (x + 1) * wide - gap] = (
            tiles[y, x].repeat(zoom, 0).repeat(zoom, 1)
        )
    shown = (
        ""
        if tiles.shape[:2] == grid
        else f" ({len(rows)} × {len(columns)} of {height} × {width} shown)"
    )
    with drawing(
        picture, 1.0 + 6.2 * min(max(len(mosaic) / mosaic.shape[1], 0.3), 1.5), layout="constrained"
    ) as figure:
        add_title(figure, f"Cosine similarity of position embeddings{shown}")
        axes = figure.subplots()
        drawn = axes.imshow(
            mosaic, cmap="viridis", vmin=float(tiles.min()), vmax=1.0, interpolation="nearest"
        )
        axes.set(xlabel="column of the patch", ylabel="row of the patch")
        axes.set_xticks(
            [i * wide + (wide - gap - 1) / 2 for i in range(len(columns))],
            [str(n + 1) for n in columns],
        )
        axes.set_yticks(
            [i * tall + (tall - gap - 1) / 2 for i in range(len(rows))], [str(n + 1) for n in rows]
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.colorbar(drawn, ax=axes, label="cosine similarity", shrink=0.8, aspect=30)
    return picture


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
