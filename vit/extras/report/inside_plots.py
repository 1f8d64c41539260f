"""Plot patches, filters, attention heads, attention distances and features of a model.

All functions take arrays, which `vit.extras.report.model_figures` computes from a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vit.extras.report.model_plots import overlaid
from vit.system.drawing import (
    BLUE,
    GAP_IN,
    GREY,
    ORANGE,
    SMALL_PT,
    WIDTH_IN,
    Cell,
    add_title,
    drawing,
    new_sheet,
    place,
    plot_cells,
    to_pixels,
)
from vit.system.files import told

MAX_SHOWN = 28
"""The largest number of filters in a picture, as in the paper's figure."""


def plot_patches(image: Tensor, patch_size: tuple[int, int], picture: Path) -> Path:
    """Draw an image next to its numbered patches. Returns `picture`.

    image: (1 or 3, H, W) uint8. patch_size: (height, width) in pixels.
    """
    pixels = to_pixels(image)
    rows, columns = pixels.shape[0] // patch_size[0], pixels.shape[1] // patch_size[1]
    side = (WIDTH_IN - 4 * GAP_IN) / 2
    tall = side * pixels.shape[0] / pixels.shape[1]
    gap = 0.12 * side / columns
    patch_w, patch_h = (side - gap * (columns - 1)) / columns, (tall - gap * (rows - 1)) / rows
    with drawing(picture, 0.5 + tall + 0.4) as figure:
        heading = f"{rows * columns} patches of {patch_size[1]} × {patch_size[0]} pixels"
        sheet = new_sheet(figure, heading)
        place(sheet, pixels, GAP_IN, 0.5, side, tall)
        left = side + 3 * GAP_IN
        for y, x in np.ndindex(rows, columns):
            patch = pixels[
                y * patch_size[0] : (y + 1) * patch_size[0],
                x * patch_size[1] : (x + 1) * patch_size[1],
            ]
            at = left + x * (patch_w + gap), 0.5 + y * (patch_h + gap)
            place(sheet, patch, *at, patch_w, patch_h)
            if patch_w > 0.3:
                number = str(y * columns + x + 1)
                box = {"facecolor": "white", "alpha": 0.7, "pad": 1, "linewidth": 0}
                sheet.text(at[0] + 0.05, at[1] + 0.08, number, size=6, va="center", bbox=box)
        below = 0.5 + tall + 0.2
        length = patch_size[0] * patch_size[1] * image.shape[0]
        note = (
            f"Each patch is one token: its {length:,} values are multiplied by one matrix."
            " Positions are numbered row by row."
        )
        sheet.text(GAP_IN, below, note, size=SMALL_PT, va="center", color=GREY)
    return picture


def plot_filters(components: Tensor, shares: Tensor, picture: Path) -> Path:
    """Draw the principal components of the patch embedding. Returns `picture`.

    components: (k, C, h, w) float. shares: (k,), of the variance. Gray is 0, and each component is
    scaled to its largest value.
    """
    components = components[:MAX_SHOWN].float()
    largest = components.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-12)
    images = 0.5 + 0.5 * components / largest
    if images.shape[1] not in (1, 3):
        images = images.mean(1, keepdim=True)
    cells = [
        Cell(image, [f"{100 * share:.1f} %"])
        for image, share in zip(images, shares.tolist(), strict=False)
    ]
    total = 100 * float(shares[: len(cells)].sum())
    heading = f"Patch embedding: its first {len(cells)} components, {total:.0f} % of the variance"
    return plot_cells(cells, 7, heading, picture)


def plot_heads(
    image: Tensor, heads: Tensor, rollout: Tensor, title: str, picture: Path, has_pool: bool = False
) -> Path:
    """Draw an image, its attention rollout, and the attention map of each layer and head.

    image: (1 or 3, H, W) uint8. heads: (layers, heads, h, w) float. rollout: (h, w). has_pool:
    whether the last layer is a MAP head. Each map is scaled to its highest value. Returns
    `picture`.
    """
    num_layers, num_heads = heads.shape[:2]
    # Also that of each map, because patches need not be square.
    aspect = image.shape[1] / image.shape[2]
    image_in = 1.6
    tall = image_in * aspect
    top = 0.5 + tall + 0.45
    left = 0.75
    cell = min((WIDTH_IN - left - 0.1) / num_heads, 1.2)
    row = cell * aspect
    values = heads.detach().float().cpu()
    values = values / values.amax((2, 3), keepdim=True).clamp(min=1e-12)
    with drawing(picture, top + num_layers * row + 0.1) as figure:
        sheet = new_sheet(figure, title)
        place(sheet, to_pixels(image), 0.1, 0.5, image_in, tall)
        over = overlaid(image[None], rollout[None])[0]
        place(sheet, to_pixels(over), 0.2 + image_in, 0.5, image_in, tall)
        notes = (
            "Left: the model's input, and attention rollout over all blocks.",
            "Below: one row per block and one column per head.",
            *(["The last row is the attention of the pool's query."] if has_pool else []),
            "Yellow patches get the most attention, violet patches none.",
            "Each map is scaled to its highest value.",
        )
        for number, note in enumerate(notes):
            x, y = 0.4 + 2 * image_in, 0.62 + 0.2 * number
            sheet.text(x, y, note, size=SMALL_PT, va="center", color=GREY)
        for head in range(num_heads):
            x = left + (head + 0.5) * cell
            sheet.text(x, top - 0.1, str(head + 1), size=SMALL_PT, ha="center", va="center")
        sheet.text(0.1, top - 0.1, "head", size=SMALL_PT, va="center")
        for layer in range(num_layers):
            y = top + (layer + 0.5) * row
            name = "pool" if has_pool and layer == num_layers - 1 else f"block {layer + 1}"
            sheet.text(0.1, y, name, size=min(SMALL_PT, 72 * row), va="center")
            for head in range(num_heads):
                extent = (left + head * cell, left + (head + 0.94) * cell)
                bottom = top + (layer + 0.94) * row
                sheet.imshow(
                    values[layer, head].numpy(),
                    extent=(*extent, bottom, top + layer * row),
                    aspect="auto",
                    cmap="viridis",
                    vmin=0,
                    vmax=1,
                    interpolation="nearest",
                )
        sheet.set(xlim=(0, WIDTH_IN), ylim=(figure.get_size_inches()[1], 0))
    return picture


def save_heads(image: Tensor, heads: Tensor, folder: Path, suffix: str = ".png") -> list[Path]:
    """Write pictures of the input and of each attention map to `folder`, and return their paths.

    image: (1 or 3, H, W) uint8. heads: (layers, heads, h, w) float. Each picture has the size of
    the image in pixels, without margins.
    """
    from matplotlib.image import imsave

    written = [folder / f"input{suffix}"]
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        imsave(written[0], to_pixels(image))
        for layer, head in np.ndindex(*heads.shape[:2]):
            over = overlaid(image[None], heads[layer, head][None])[0]
            path = folder / f"layer{layer + 1:02d}_head{head + 1:02d}{suffix}"
            imsave(path, to_pixels(over))
            written.append(path)
    return written


def plot_distance(
    distances: NDArray[np.float32], uniform_px: float, image_size: tuple[int, int], picture: Path
) -> Path:
    """Plot the mean attention distance of each head over depth. Returns `picture`.

    distances: (layers, heads) in pixels. uniform_px: the distance with equal attention to all
    patches. image_size: (height, width) in pixels.
    """
    num_layers, num_heads = distances.shape
    with drawing(picture, 4.2, layout="constrained") as figure:
        add_title(figure, "Mean attention distance of each head")
        axes = figure.subplots()
        blocks = np.arange(1, num_layers + 1)
        for head in range(num_heads):
            label = "a head" if head == 0 else None
            axes.plot(blocks, distances[:, head], "o", color=BLUE, alpha=0.55, label=label)
        axes.plot(blocks, distances.mean(1), "-", color=ORANGE, label="mean of the heads")
        axes.axhline(uniform_px, ls="--", color=GREY, label="equal attention to all patches")
        axes.set(xlabel="block", ylabel="mean attention distance (pixels)")
        axes.set_ylim(0, 1.08 * max(float(distances.max()), uniform_px))
        axes.set_xticks(blocks if num_layers <= 16 else blocks[:: num_layers // 8])
        axes.grid(True, axis="y")
        axes.legend(loc="best")
        size = f"images of {image_size[1]} × {image_size[0]} pixels"
        axes.set_title(size, size=SMALL_PT, weight="normal", color=GREY, loc="right")
    return picture


def plot_tokens(
    images: Tensor, colors: Tensor, shares: Sequence[float], captions: Sequence[str], picture: Path
) -> Path:
    """Draw images next to the features of their patches as colors. Returns `picture`.

    images: (B, 1 or 3, H, W) uint8. colors: (B, 3, h, w) in [0, 1]. shares: of the variance.
    """
    size = images.shape[2:]
    large = torch.nn.functional.interpolate(colors, size, mode="nearest")
    cells = []
    for image, patches, caption in zip(images, large, captions, strict=True):
        cells += [Cell(image, [caption]), Cell(patches, [])]
    total = 100 * sum(shares)
    heading = f"Features of patches: three components as red, green, blue ({total:.0f} %)"
    return plot_cells(cells, 6, heading, picture)
