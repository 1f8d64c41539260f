"""Compute and draw a model's figures: inputs, predictions, patches, filters, positions, attention,
distances, features.

`launch/visualize.py` draws these figures for any weights and images. The report draws the same
figures for a run and its validation images.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vit.extras.report.attention import (
    attention_distance,
    attention_maps,
    attention_rollout,
    check_rollout,
    filter_components,
    output_attention,
    patch_distances,
    token_colors,
    token_features,
)
from vit.extras.report.drawing import (
    BLUE,
    GAP_IN,
    GRAY,
    HEADING_IN,
    ORANGE,
    SMALL_PT,
    WIDTH_IN,
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
from vit.layers.image_model import ImageModel
from vit.layers.parts import grid_size
from vit.system.files import report_write_errors

MAX_SHOWN = 28
"""The maximum number of filters in a picture, as in Figure 7 (left) of the ViT paper."""
NUM_COLUMNS = 6
"""The number of pictures per row. With attention, each image has two pictures."""
MAX_LINES = 3
"""The maximum number of classes in the caption of an image."""
MAX_TILES = 14
"""The maximum number of rows and of columns of tiles in the picture of position embeddings."""
TILE_GAPS = 12
"""The longer side of a tile in the same picture, as a multiple of the gap between tiles."""
Normalize = Callable[[Tensor], Tensor]
"""A function that converts (B, C, H, W) uint8 on the host to inputs on the model's device."""


class Images(NamedTuple):
    """The images that a figure shows, and their conversion to inputs of the model."""

    normalize: Normalize
    pixels: Tensor
    """The images, (B, C, H, W) uint8."""
    names: Sequence[str]
    """The caption of each image."""
    on_image: Callable[[int], None] = lambda done: None
    """A function that is called with the number of images that the model has processed."""


def patch_size_of(model: ImageModel) -> tuple[int, int]:
    """Return (height, width) of a patch in pixels. Raises ValueError if there are no patches."""
    grid = grid_size(model)
    if grid is None:
        raise ValueError(f"{type(model).__name__} has no grid of patches")
    height, width = model.image_size
    return height // grid[0], width // grid[1]


def draw_filters(model: ImageModel, picture: Path) -> str:
    """Draw the components of the patch embedding, and return the caption."""
    components, shares = filter_components(model, MAX_SHOWN)
    # Gray is 0, and each component is scaled to its largest value.
    components = components[:MAX_SHOWN].float()
    largest = components.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-12)
    images = 0.5 + 0.5 * components / largest
    if images.shape[1] not in (1, 3):
        images = images.mean(1, keepdim=True)

    cells = [
        Cell(image, [f"{100 * share:.1f} %"])
        for image, share in zip(images, shares.tolist(), strict=True)
    ]
    total = 100 * float(shares[: len(cells)].sum())
    heading = f"Patch embedding: its first {len(cells)} components, {total:.0f} % of the variance"
    plot_cells(cells, 7, heading, picture)

    return (
        "Principal components of the patch embedding's filters, in descending order, with their"
        " shares of the variance (Dosovitskiy et al. 2021, Figure 7 left)."
    )


def draw_positions(model: ImageModel, picture: Path) -> str:
    """Draw the similarity of position embeddings, and return the caption."""
    positions = getattr(model, "pos_embed", None)
    grid = grid_size(model)
    if not isinstance(positions, Tensor) or grid is None:
        raise ValueError(f"{type(model).__name__} has no position embeddings to compare")
    if positions.ndim != 3 or positions.shape[1] < math.prod(grid):
        raise ValueError(f"Position embeddings of shape {tuple(positions.shape)} are not a grid")

    plot_position_similarity(positions[0, -math.prod(grid) :], grid, picture)
    kind = "learned" if isinstance(positions, nn.Parameter) else "fixed"
    return (
        f"Cosine similarity of each {kind} position embedding with all others, one small map for"
        f" each of the {grid[0]} × {grid[1]} positions (Dosovitskiy et al. 2021, Figure 7 center)."
    )


def draw_distance(model: ImageModel, images: Images, picture: Path) -> str:
    """Draw the mean attention distance of all heads over the images, and return the caption."""
    distances = mean_distances(model, images).numpy()
    grid = grid_size(model)
    assert grid is not None, "otherwise there are no distances"
    uniform_px = float(patch_distances(grid, patch_size_of(model)).mean())
    num_layers, num_heads = distances.shape

    with drawing(picture, 4.2, layout="constrained") as figure:
        add_title(figure, "Mean attention distance of each head")
        axes = figure.subplots()
        blocks = np.arange(1, num_layers + 1)
        for head in range(num_heads):
            label = "a head" if head == 0 else None
            axes.plot(blocks, distances[:, head], "o", color=BLUE, alpha=0.55, label=label)
        axes.plot(blocks, distances.mean(1), "-", color=ORANGE, label="mean of the heads")
        axes.axhline(uniform_px, ls="--", color=GRAY, label="equal attention to all patches")

        top_px = 1.08 * max(float(distances.max()), uniform_px)
        axes.set(xlabel="block", ylabel="mean attention distance (pixels)", ylim=(0, top_px))
        axes.set_xticks(blocks if num_layers <= 16 else blocks[:: num_layers // 8])
        axes.grid(True, axis="y")
        axes.legend(loc="best")
        size = f"images of {model.image_size[1]} × {model.image_size[0]} pixels"
        axes.set_title(size, size=SMALL_PT, weight="normal", color=GRAY, loc="right")

    return (
        "Mean distance between a patch and the patches that it attends to, over"
        f" {len(images.pixels)} images (Dosovitskiy et al. 2021, Figure 7 right). Heads with small"
        " distances act like convolutions."
    )


def mean_distances(model: ImageModel, images: Images) -> Tensor:
    """Return `attention_distance` averaged over the images, (layers, heads) float32 on the CPU."""
    grid = grid_size(model)
    patch_size = patch_size_of(model)
    assert grid is not None, "otherwise there is no patch size"

    added = torch.zeros(())
    # Images are processed one by one, because ViT-H at 518 pixels needs 4 GB per image.
    for done, image in enumerate(images.pixels.split(1), 1):
        maps = attention_maps(model, images.normalize(image)).blocks
        added = added + attention_distance(maps, grid, patch_size, model.num_prefix_tokens).cpu()
        images.on_image(done)
    return added[0] / len(images.pixels)


def draw_tokens(model: ImageModel, images: Images, picture: Path) -> str:
    """Draw the features of patches as colors, and return the caption."""
    grid = grid_size(model)
    if grid is None or not hasattr(model, "num_prefix_tokens"):
        raise ValueError(f"{type(model).__name__} has no grid of patches")

    parts = []
    for done, part in enumerate(images.pixels.split(8)):
        parts.append(token_features(model, images.normalize(part)).cpu())
        images.on_image(8 * done + len(part))

    colors, shares = token_colors(torch.cat(parts), grid)
    large = F.interpolate(colors, images.pixels.shape[2:], mode="nearest")
    cells = []
    for image, patches, caption in zip(images.pixels, large, images.names, strict=True):
        cells += [Cell(image, [caption]), Cell(patches, [])]

    total = 100 * sum(shares.tolist())
    plot_cells(
        cells,
        NUM_COLUMNS,
        heading=f"Features of patches: three components as red, green, blue ({total:.0f} %)",
        picture=picture,
    )
    return (
        "The first three principal components of patch features after the last block, as red,"
        " green and blue. Equal colors mean similar features, across all images."
    )


def heads_and_rollout(
    model: ImageModel, normalize: Normalize, image: Tensor
) -> tuple[Tensor, Tensor]:
    """Return attention maps, (layers, heads, h, w), and attention rollout, (h, w), on the CPU.

    The last layer may be a MAP head. image: (C, H, W) uint8. Raises ValueError if the model does
    not support attention rollout.
    """
    grid = check_rollout(model)
    maps = attention_maps(model, normalize(image[None]))
    assert maps.reading is not None, "check_rollout"

    heads = output_attention(maps.blocks, maps.reading, model.num_prefix_tokens)
    if model.global_pool == "map":  # A MAP head has as many heads as a block.
        heads = torch.cat((heads, maps.reading[:, None, :, model.num_prefix_tokens :]), 1)
    rolled = attention_rollout(maps.blocks, maps.reading, model.num_prefix_tokens)
    return heads[0].unflatten(2, grid).cpu(), rolled[0].unflatten(0, grid).cpu()


def plot_patches(image: Tensor, patch_size: tuple[int, int], picture: Path) -> Path:
    """Draw an image next to its numbered patches. Returns `picture`.

    Args:
        image: (1 or 3, H, W) uint8.
        patch_size: (height, width) in pixels.
    """
    pixels = to_pixels(image)
    rows, columns = pixels.shape[0] // patch_size[0], pixels.shape[1] // patch_size[1]
    width_in = (WIDTH_IN - 4 * GAP_IN) / 2
    height_in = width_in * pixels.shape[0] / pixels.shape[1]
    gap_in = 0.12 * width_in / columns
    patch_w = (width_in - gap_in * (columns - 1)) / columns
    patch_h = (height_in - gap_in * (rows - 1)) / rows

    with drawing(picture, HEADING_IN + height_in + 0.4) as figure:
        sheet = new_sheet(
            figure, f"{rows * columns} patches of {patch_size[1]} × {patch_size[0]} pixels"
        )
        place(sheet, pixels, at=(GAP_IN, HEADING_IN), size=(width_in, height_in))

        left = width_in + 3 * GAP_IN
        for y, x in np.ndindex(rows, columns):
            patch = pixels[
                y * patch_size[0] : (y + 1) * patch_size[0],
                x * patch_size[1] : (x + 1) * patch_size[1],
            ]
            at = left + x * (patch_w + gap_in), HEADING_IN + y * (patch_h + gap_in)
            place(sheet, patch, at=at, size=(patch_w, patch_h))
            if patch_w > 0.3:
                number = str(y * columns + x + 1)
                box = {"facecolor": "white", "alpha": 0.7, "pad": 1, "linewidth": 0}
                sheet.text(at[0] + 0.05, at[1] + 0.08, number, size=6, va="center", bbox=box)

        length = patch_size[0] * patch_size[1] * image.shape[0]
        note = (
            f"Each patch is one token: its {length:,} values are multiplied by one matrix."
            " Positions are numbered row by row."
        )
        y_in = HEADING_IN + height_in + 0.2
        sheet.text(GAP_IN, y_in, note, size=SMALL_PT, va="center", color=GRAY)
    return picture


def plot_heads(
    image: Tensor, heads: Tensor, rollout: Tensor, title: str, picture: Path, has_pool: bool = False
) -> Path:
    """Draw an image, its attention rollout, and the attention map of each layer and head.

    Args:
        image: (1 or 3, H, W) uint8.
        heads: (layers, heads, h, w) float.
        rollout: (h, w).
        has_pool: Whether the last layer is a MAP head.

    Each map is scaled to its highest value. Returns `picture`.
    """
    num_layers, num_heads = heads.shape[:2]
    # All lengths are in inches. Maps have the aspect ratio of the image, because patches may not be
    # square.
    aspect = image.shape[1] / image.shape[2]
    image_w, image_h = 1.6, 1.6 * aspect
    left = 0.75
    top = HEADING_IN + image_h + 0.45
    map_w = min((WIDTH_IN - left - 0.1) / num_heads, 1.2)
    map_h = map_w * aspect
    maps = heads.detach().float().cpu()
    maps = maps / maps.amax((2, 3), keepdim=True).clamp(min=1e-12)

    with drawing(picture, top + num_layers * map_h + 0.1) as figure:
        sheet = new_sheet(figure, title)
        place(sheet, to_pixels(image), at=(0.1, HEADING_IN), size=(image_w, image_h))
        over = to_pixels(overlaid(image[None], rollout[None])[0])
        place(sheet, over, at=(0.2 + image_w, HEADING_IN), size=(image_w, image_h))

        notes = [
            "Left: the model's input, and attention rollout over all blocks.",
            "Below: one row per block and one column per head.",
            "Yellow patches get the most attention, violet patches none.",
            "Each map is scaled to its highest value.",
        ]
        if has_pool:
            notes.insert(2, "The last row is the attention of the pool's query.")
        for number, note in enumerate(notes):
            x, y = 0.4 + 2 * image_w, 0.62 + 0.2 * number
            sheet.text(x, y, note, size=SMALL_PT, va="center", color=GRAY)

        for head in range(num_heads):
            x = left + (head + 0.5) * map_w
            sheet.text(x, top - 0.1, str(head + 1), size=SMALL_PT, ha="center", va="center")
        sheet.text(0.1, top - 0.1, "head", size=SMALL_PT, va="center")

        for layer in range(num_layers):
            y = top + (layer + 0.5) * map_h
            name = "pool" if has_pool and layer == num_layers - 1 else f"block {layer + 1}"
            # A name is at most as high as its row: an inch has 72 points.
            sheet.text(0.1, y, name, size=min(SMALL_PT, 72 * map_h), va="center")

        for layer, head in np.ndindex(num_layers, num_heads):
            # A map fills 0.94 of its cell, and the rest of the cell is the gap to the next map.
            sides = (left + head * map_w, left + (head + 0.94) * map_w)
            bottom = top + (layer + 0.94) * map_h
            sheet.imshow(
                maps[layer, head].numpy(),
                extent=(*sides, bottom, top + layer * map_h),
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

    Args:
        image: (1 or 3, H, W) uint8.
        heads: (layers, heads, h, w) float.

    Each picture has the size of the image in pixels, without margins.
    """
    from matplotlib.image import imsave

    written = [folder / f"input{suffix}"]
    with report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        imsave(written[0], to_pixels(image))
        for layer, head in np.ndindex(*heads.shape[:2]):
            over = overlaid(image[None], heads[layer, head][None])[0]
            path = folder / f"layer{layer + 1:02d}_head{head + 1:02d}{suffix}"
            imsave(path, to_pixels(over))
            written.append(path)
    return written


# --- inputs and predictions -----------------------------------------------------------------------


def plot_augmented(
    inputs: Tensor,
    targets: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    class_names: Sequence[str],
    picture: Path,
) -> Path:
    """Draw the model's training inputs with their classes or shares of classes.

    Args:
        inputs: (B, C, H, W) float, normalized by `mean` and `std`.
        targets: (B, classes) float, the shares of classes.

    Returns `picture`.
    """
    num_columns = min(6, max(3, len(inputs)))
    cells = [
        Cell(image, share_lines(target, class_names, cell_width_in(num_columns)))
        for image, target in zip(as_colors(inputs, mean, std), targets.cpu(), strict=True)
    ]

    height, width = inputs.shape[2:]
    return plot_cells(
        cells,
        num_columns,
        heading=f"Training inputs of the model, {width} × {height} pixels",
        picture=picture,
    )


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

    Args:
        images: (B, C, H, W) uint8.
        relevance: (B, h, w) float, scaled to [0, 1] in each image.
        labels: The correct class of each image.
        predictions: The predicted class of each image, or -1 if the logits were NaN.
        probabilities: The probabilities of the predicted classes.

    Returns `picture`.
    """
    # All lengths are in inches: the width of two images, the gap between pairs, the gap in a pair,
    # and the heights of the heading with its note, and of two lines of text.
    pair_w = 3.75
    gap = 0.3
    image_gap = 0.06
    header_h = 0.8
    text_h = 0.43
    image_w = (pair_w - image_gap) / 2
    image_h = image_w * images.shape[2] / images.shape[3]
    row_h = text_h + image_h + 0.25
    overlays = overlaid(images, relevance)

    with drawing(picture, header_h + row_h * math.ceil(len(images) / 2)) as figure:
        sheet = new_sheet(figure, "Attention rollout")
        note = (
            "Yellow patches have the most influence on the output, violet patches the least. Colors"
            " are scaled per image."
        )
        sheet.text(0.1, 0.52, note, size=SMALL_PT, va="center", color=GRAY)

        results = zip(labels, predictions, probabilities, strict=True)
        for number, (label, predicted, probability) in enumerate(results):
            row, column = divmod(number, 2)
            left, top = 0.1 + column * (pair_w + gap), header_h + row * row_h
            mark, color, weight = (
                ("✓", BLUE, "normal") if label == predicted else ("✗", ORANGE, "bold")
            )
            name = shorten(display_name(class_names, predicted), pair_w - 1.9, weight=weight)
            result = f"{name} ({100 * probability:.0f} %)" if predicted >= 0 else "NaN"
            true_name = shorten(display_name(class_names, label), pair_w - 0.5)
            sheet.text(left, top + 0.13, f"true: {true_name}")
            line = f"{mark} predicted: {result}"
            sheet.text(left, top + 0.33, line, color=color, weight=weight)

            size = (image_w, image_h)
            place(sheet, to_pixels(images[number]), at=(left, top + text_h), size=size)
            overlay = to_pixels(overlays[number])
            place(sheet, overlay, at=(left + image_w + image_gap, top + text_h), size=size)
    return picture


def overlaid(images: Tensor, relevance: Tensor) -> Tensor:
    """Return gray images overlaid with relevance as colors, (B, 3, H, W) float in [0, 1].

    Args:
        images: (B, 1 or 3, H, W) uint8.
        relevance: (B, h, w) float, scaled to [0, 1] in each image.

    Yellow is the highest value, violet is the lowest.
    """
    from matplotlib import colormaps

    values = relevance.detach().float().cpu()
    low, high = values.amin((1, 2), keepdim=True), values.amax((1, 2), keepdim=True)
    stretched = (values - low) / (high - low).clamp(min=1e-12)
    smooth = F.interpolate(stretched[:, None], images.shape[2:], mode="bicubic").clamp(0, 1)[:, 0]

    colors = torch.from_numpy(colormaps["viridis"](smooth.numpy())[..., :3]).permute(0, 3, 1, 2)
    gray = images.detach().cpu().float().mean(1, keepdim=True) / 255
    return (0.45 * gray + 0.55 * colors.float()).clamp(0, 1)


def plot_position_similarity(pos_embed: Tensor, grid: tuple[int, int], picture: Path) -> Path:
    """Draw the cosine similarity between each position embedding and all others.

    The picture follows Figure 7 (center) of the ViT paper, Dosovitskiy et al. 2021. It is a mosaic
    with a tile for each position, or for `MAX_TILES` x `MAX_TILES` evenly spaced positions. A tile
    is the map of the similarities between its position and all others.

    Args:
        pos_embed: (h*w, D) float, without prefix tokens.
        grid: (h, w).

    Returns `picture`.
    """
    height, width = grid
    rows, columns = (
        np.unique(np.linspace(0, n - 1, min(n, MAX_TILES)).round().astype(int)) for n in grid
    )
    unit = F.normalize(pos_embed.detach().float().cpu(), dim=1)
    similarity = unit.view(height, width, -1)[rows][:, columns] @ unit.T
    tiles = similarity.unflatten(2, grid).numpy()

    # Patches of small grids are drawn several pixels wide, because a gap is narrower than a patch.
    zoom = max(1, TILE_GAPS // max(grid))
    gap = max(1, zoom * max(grid) // TILE_GAPS)
    mosaic = _mosaic(tiles, zoom, gap)
    # The positions of the tiles' centers in the mosaic, in pixels.
    centers_y = np.arange(len(rows)) * (zoom * height + gap) + (zoom * height - 1) / 2
    centers_x = np.arange(len(columns)) * (zoom * width + gap) + (zoom * width - 1) / 2

    title = "Cosine similarity of position embeddings"
    if tiles.shape[:2] != grid:
        title += f" ({len(rows)} × {len(columns)} of {height} × {width} shown)"
    # The mosaic is up to 6.2 inches wide, and the title and the labels take an inch.
    height_in = 1.0 + 6.2 * min(max(len(mosaic) / mosaic.shape[1], 0.3), 1.5)
    with drawing(picture, height_in, layout="constrained") as figure:
        add_title(figure, title)
        axes = figure.subplots()
        drawn = axes.imshow(
            mosaic, cmap="viridis", vmin=float(tiles.min()), vmax=1.0, interpolation="nearest"
        )

        axes.set(xlabel="column of the patch", ylabel="row of the patch")
        axes.set_xticks(centers_x, [str(n + 1) for n in columns])
        axes.set_yticks(centers_y, [str(n + 1) for n in rows])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.colorbar(drawn, ax=axes, label="cosine similarity", shrink=0.8, aspect=30)
    return picture


def _mosaic(tiles: NDArray[np.float32], zoom: int, gap: int) -> NDArray[np.float64]:
    """Return `tiles`, (rows, columns, h, w), as one image with gaps of NaN between them.

    zoom: the side of a patch in pixels. gap: the width of a gap in pixels.
    """
    large = tiles.astype(np.float64).repeat(zoom, axis=2).repeat(zoom, axis=3)
    with_gaps = np.pad(large, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    rows, columns, height, width = with_gaps.shape
    mosaic = with_gaps.swapaxes(1, 2).reshape(rows * height, columns * width)
    return mosaic[:-gap, :-gap]  # without the gaps after the last tiles


def plot_predictions(
    images: Tensor,
    names: Sequence[str],
    classes: Sequence[Sequence[tuple[str, float]]],
    heading: str,
    picture: Path,
    overlays: Tensor | None = None,
) -> Path:
    """Draw images with their names and most likely classes. Returns `picture`.

    Args:
        images: (B, 1 or 3, H, W) uint8.
        names: B file names.
        classes: The classes and probabilities of each image, in descending order.
        overlays: (B, 3, H, W) in [0, 1], drawn next to the images.
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
