"""Fit a patch embedding to other patch sizes and to gray images, as timm does.

1. Resample the filters so that resized patches keep their embeddings (FlexiViT, arXiv 2212.08013,
   section 3.3; timm's `resample_patch_embed`).
2. Sum the filters of the color channels, so that a gray image has the embedding of the color image
   with three identical channels (timm's `adapt_input_conv`).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def fit_patches(source: dict[str, Tensor], target: Mapping[str, Tensor], model: Any) -> list[str]:
    """Replace the patch embedding in `source`, (D, C, h, w), by one for `model`, and list changes.

    source, target: state dicts of the file and of `model`. The first convolution of a timm model
    without patches is only fitted to gray images. Other differences remain.
    """
    first = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv") or "patch_embed.proj"
    name = f"{first}.weight"
    if [weights[name].ndim for weights in (source, target) if name in weights] != [4, 4]:
        return []

    weight = source[name]
    old = list(weight.shape[2:])
    channels, *new = target[name].shape[1:]
    notes = []
    if old != new and first == "patch_embed.proj":
        # Multiply by the pseudo-inverse of the image resize, so that a token stays the same if the
        # image is enlarged with its patches (FlexiViT, arXiv 2212.08013).
        resize = F.interpolate(
            torch.eye(old[0] * old[1]).unflatten(1, (1, *old)),  # one image for each pixel
            new,
            mode="bicubic",
            antialias=True,
        ).flatten(1)
        weight = (weight.float().flatten(2) @ torch.linalg.pinv(resize.T)).unflatten(2, new)
        notes.append(f"patches resampled from {old[0]}x{old[1]} to {new[0]}x{new[1]} (FlexiViT)")

    if (weight.shape[1], channels) == (3, 1):
        weight = weight.float().sum(1, keepdim=True)
        notes.append("the filters of the three colors are added for gray images")
    source[name] = weight.to(source[name].dtype)
    return notes
