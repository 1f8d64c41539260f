"""Compute figures of a model, and draw them with `vit.extras.report.inside_plots`.

`launch/visualize.py` draws these figures for any weights and images. The report draws the same
figures for a run and its validation images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vit.extras.report import inside_plots
from vit.extras.report.attention import (
    attention_distance,
    attention_maps,
    attention_rollout,
    check_rollout,
    output_attention,
    patch_distances,
)
from vit.extras.report.components import filter_components, token_colors, token_features
from vit.extras.report.model_plots import plot_position_similarity
from vit.layers.parts import grid_size

Normalize = Callable[[Tensor], Tensor]
"""A function that converts (B, C, H, W) uint8 on the host to inputs on the model's device."""


class Images(NamedTuple):
    """The images that a figure shows, and their conversion to inputs of the model."""

    normalize: Normalize
    pixels: Tensor
    """(B, C, H, W) uint8."""
    names: Sequence[str]
    """The caption of each image."""


def patch_size_of(model: Any) -> tuple[int, int]:
    """Return (height, width) of a patch in pixels. Raises ValueError if there are no patches."""
    grid = grid_size(model)
    if grid is None:
        raise ValueError(f"{type(model).__name__} has no grid of patches")
    height, width = model.image_size
    return height // grid[0], width // grid[1]


def draw_filters(model: Any, picture: Path) -> str:
    """Draw the components of the patch embedding, and return the caption."""
    components, shares = filter_components(model, inside_plots.MAX_SHOWN)
    inside_plots.plot_filters(components, shares, picture)
    return (
        "Principal components of the patch embedding's filters, in descending order, with their"
        " shares of the variance (Dosovitskiy et al. 2021, Figure 7 left)."
    )


def draw_positions(model: Any, picture: Path) -> str:
    """Draw the similarity of position embeddings, and return the caption."""
    positions = getattr(model, "pos_embed", None)
    grid = grid_size(model)
    if not isinstance(positions, Tensor) or grid is None:
        raise ValueError(f"{type(model).__name__} has no position embeddings to compare")
    if positions.ndim != 3 or positions.shape[1] < math.prod(grid):
        raise ValueError(f"Position embeddings of shape {tuple(positions.shape)} are not a grid")
    plot_position_similarity(positions[0, -math.prod(grid) :], grid, picture)
    return "Cosine similarity of each position embedding with all others (Figure 7 center)."


def draw_distance(model: Any, images: Images, picture: Path) -> str:
    """Draw the mean attention distance of all heads over the images, and return the caption."""
    distances = mean_distances(model, images)
    grid = grid_size(model)
    assert grid is not None, "otherwise there are no distances"
    uniform_px = float(patch_distances(grid, patch_size_of(model)).mean())
    inside_plots.plot_distance(distances.numpy(), uniform_px, tuple(model.image_size), picture)
    return (
        "Mean distance between a patch and the patches that it attends to, over"
        f" {len(images.pixels)} images (Dosovitskiy et al. 2021, Figure 7 right). Heads with small"
        " distances act like convolutions."
    )


def mean_distances(model: Any, images: Images) -> Tensor:
    """Return `attention_distance` averaged over the images, (layers, heads) float32 on the CPU."""
    grid = grid_size(model)
    patch_size = patch_size_of(model)
    assert grid is not None, "otherwise there is no patch size"
    added = torch.zeros(())
    # Images are processed one by one, because ViT-H at 518 pixels needs 4 GB per image.
    for image in images.pixels.split(1):
        maps = attention_maps(model, images.normalize(image)).blocks
        added = added + attention_distance(maps, grid, patch_size, model.num_prefix_tokens).cpu()
    return added[0] / len(images.pixels)


def draw_tokens(model: Any, images: Images, picture: Path) -> str:
    """Draw the features of patches as colors, and return the caption."""
    grid = grid_size(model)
    if grid is None or not hasattr(model, "num_prefix_tokens"):
        raise ValueError(f"{type(model).__name__} has no grid of patches")
    parts = [token_features(model, images.normalize(part)) for part in images.pixels.split(8)]
    colors, shares = token_colors(torch.cat([part.cpu() for part in parts]), grid)
    inside_plots.plot_tokens(images.pixels, colors, shares.tolist(), images.names, picture)
    return (
        "The first three principal components of patch features after the last block, as red,"
        " green and blue. Equal colors mean similar features, across all images."
    )


def heads_and_rollout(model: Any, normalize: Normalize, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention maps, (layers, heads, h, w), and attention rollout, (h, w), on the CPU.

    The last layer may be a MAP head. image: (C, H, W) uint8. Raises ValueError if the model does
    not support attention rollout.
    """
    grid = check_rollout(model)
    maps = attention_maps(model, normalize(image[None]))
    assert maps.reading is not None, "check_rollout"
    heads = output_attention(maps.blocks, maps.reading, model.num_prefix_tokens)
    if model.global_pool == "map":  # a MAP head has as many heads as a block
        heads = torch.cat((heads, maps.reading[:, None, :, model.num_prefix_tokens :]), 1)
    rolled = attention_rollout(maps.blocks, maps.reading, model.num_prefix_tokens)
    return heads[0].unflatten(2, grid).cpu(), rolled[0].unflatten(0, grid).cpu()
