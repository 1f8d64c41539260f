"""Compute principal components of the patch embedding's filters and of patch features.

The sign of a component is arbitrary. The largest entry of each component is made positive, so the
same weights always give the same picture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def principal_components(rows: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the first `num` principal components of `rows`, and their shares of the variance.

    rows: (N, D) float. Returns orthonormal components, (k, D) float64, and their shares, (k,)
    float64. The mean is subtracted first. k is less than `num` if `rows` has fewer rows or columns.
    """
    centred = rows.detach().cpu().double()
    centred = centred - centred.mean(0)
    _, values, components = torch.linalg.svd(centred, full_matrices=False)
    largest = components.abs().argmax(1, keepdim=True)
    components = components * components.gather(1, largest).sign()
    shares = values.square() / values.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    return components[:num], shares[:num]


def filter_components(model: nn.Module, num: int) -> tuple[Tensor, Tensor]:
    """Return the first principal components of the patch embedding's filters, and their shares.

    The components are those of Figure 7 (left) of Dosovitskiy et al. 2021 (arXiv 2010.11929), in
    which the D filters are points in the space of a patch's pixels. Returns (k, C, h, w) float64
    and (k,). Raises ValueError if the model does not embed patches with a single convolution.
    """
    embed: Any = getattr(model, "patch_embed", None)
    weight = getattr(getattr(embed, "proj", None), "weight", None)
    if weight is None or weight.ndim != 4:
        raise ValueError(
            f"{type(model).__name__} has no filters to show, because it does not embed patches with"
            " a single convolution"
        )
    components, shares = principal_components(weight.flatten(1), num)
    return components.view(-1, *weight.shape[1:]), shares


@torch.no_grad()
def token_features(model: Any, inputs: Tensor) -> Tensor:
    """Return the features of patches after the last block, (B, h*w, D) float32.

    inputs: (B, C, H, W) float, normalized.
    """
    return model.forward_features(inputs)[:, model.num_prefix_tokens :].float()


def token_colors(features: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the first three principal components of patch features as colors, and their shares.

    The picture is that of Oquab et al. 2023 (DINOv2, arXiv 2304.07193, Figure 1). All images share
    the same components, so patches with similar colors have similar features, even in different
    images.

    features: (B, h*w, D). Returns colors, (B, 3, h, w) float in [0, 1], and shares, (3,) float64.
    Values outside the 1st to 99th percentile are clipped.
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
