"""Compute principal components of the patch embedding's filters and of the features of patches.

The sign of a component is arbitrary. The largest entry of each is made positive, so that the same
weights always give the same picture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def principal_components(rows: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the first `num` principal components of `rows` and their shares of the variance.

    rows: (N, D) float; their mean is subtracted first. Returns (k, D) float64, orthonormal, and
    (k,) float64; the shares of all components add up to 1. k is `num`, or less if rows or columns
    are fewer.
    """
    centred = rows.detach().cpu().double()
    centred = centred - centred.mean(0)
    _, values, components = torch.linalg.svd(centred, full_matrices=False)
    largest = components.abs().argmax(1, keepdim=True)
    components = components * components.gather(1, largest).sign()
    shares = values.square() / values.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    return components[:num], shares[:num]


def filter_components(model: nn.Module, num: int) -> tuple[Tensor, Tensor]:
    """Return the first components of the patch embedding's filters, and their shares.

    As in Figure 7 (left) of Dosovitskiy et al. 2021 (arXiv 2010.11929): the D filters are points in
    the space of a patch's pixels, and the components span their responses. Returns (k, C, h, w)
    float64 and (k,). Raises ValueError for a model that does not embed patches by one convolution
    or linear map.
    """
    embed: Any = getattr(model, "patch_embed", None)
    weight = getattr(getattr(embed, "proj", None), "weight", None)
    if weight is None or weight.ndim != 4:
        raise ValueError(
            f"{type(model).__name__} does not embed patches by one convolution: it has no filters"
            " to show"
        )
    components, shares = principal_components(weight.flatten(1), num)
    return components.view(-1, *weight.shape[1:]), shares


@torch.no_grad()
def token_features(model: Any, inputs: Tensor) -> Tensor:
    """Return the patches' features behind the last block: (B, h*w, D) float32.

    inputs: (B, C, H, W) float, normalized.
    """
    return model.forward_features(inputs)[:, model.num_prefix_tokens :].float()


def token_colors(features: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the first three components of patches' features as colours, and their shares.

    As in Oquab et al. 2023 (DINOv2, arXiv 2304.07193, Figure 1). All images share one set of
    components, so patches of one colour have similar features, also in different images.

    features: (B, h*w, D). Returns (B, 3, h, w) float in [0, 1], with the outer hundredth at each
    end clipped, and (3,) float64.
    """
    rows = features.detach().cpu().double().flatten(0, 1)
    components, shares = principal_components(rows, 3)
    values = (rows - rows.mean(0)) @ components.T
    low, high = (torch.quantile(values, at, dim=0) for at in (0.01, 0.99))
    colors = ((values - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    missing = 3 - colors.shape[1]
    colors = torch.nn.functional.pad(colors, (0, missing))
    shares = torch.nn.functional.pad(shares, (0, missing))
    return colors.view(len(features), *grid, 3).permute(0, 3, 1, 2).float(), shares
