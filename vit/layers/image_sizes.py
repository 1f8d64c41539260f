"""Let a model accept images of several sizes in training (`schedule.image_sizes`).

A model stores position embeddings for one image size, which its checkpoints and evaluations use.
For every other size, the embeddings are resampled in each forward pass, so that gradients reach the
stored weights. Rotary embeddings have a table for each size. The result is the same as that of a
model built for the other size, because `vit.weights.files` resamples in the same way.

    positions of the model's grid -> `AtSize.positions` -> positions of the images' grid
                                     `AtSize.rope`      -> the rotary table of that grid
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vit.layers.arguments import grid_size
from vit.layers.posemb import resample_posemb
from vit.layers.rope import RotaryEmbedding


class AtSize(nn.Module):
    """The positions for images whose grid differs from the model's.

    Args:
        grid, model_grid: (h, w) in patches.
        rope: The model's rotary embedding.
    """

    rows: Tensor
    columns: Tensor

    def __init__(
        self, grid: tuple[int, int], model_grid: tuple[int, int], rope: RotaryEmbedding | None
    ):
        super().__init__()
        self.model_grid = model_grid
        self.rope = None if rope is None else rope.at(grid)

        # The backward pass of torch's resize is not deterministic on GPUs, so resample with matrix
        # products. The filter is separable, so one matrix per axis is enough. The sizes determine
        # the matrices, so they are not in the state dict.
        for name, new, old in zip(("rows", "columns"), grid, model_grid, strict=True):
            self.register_buffer(name, torch.empty(new, old), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the matrices, for example after `to_empty`."""
        for matrix in (self.rows, self.columns):
            new, old = matrix.shape
            matrix.copy_(resample_posemb(torch.eye(old)[None], (old, 1), (new, 1), 0)[0])

    def positions(self, pos_embed: Tensor) -> Tensor:
        """Resample positions to this grid: (1, P + h*w, D) -> (1, P + h'*w', D) float32.

        The result is the same as that of `vit.layers.posemb.resample_posemb` except for rounding.
        Call this method without autocast.
        """
        num_patches = self.rows.shape[1] * self.columns.shape[1]
        prefix = pos_embed[0, : pos_embed.shape[1] - num_patches]
        image = pos_embed[0, -num_patches:].unflatten(0, self.model_grid)
        image = torch.einsum("yh,hwd->ywd", self.rows, image)
        image = torch.einsum("xw,ywd->yxd", self.columns, image)
        return torch.cat((prefix, image.flatten(0, 1))).unsqueeze(0)


class OtherSizes(nn.ModuleDict):
    """An `AtSize` for each additional image size. The key is "HEIGHTxWIDTH" in pixels."""

    def find(self, images: Tensor) -> AtSize | None:
        """Return the positions for `images`, (B, C, H, W), or None if their size was not added."""
        return getattr(self, _name(images.shape[2], images.shape[3]), None)

    def add(self, image_size: tuple[int, int], at_size: AtSize) -> None:
        """Add the positions for images of `image_size` = (height, width)."""
        self[_name(*image_size)] = at_size


def take_sizes(model: Any, image_sizes: Iterable[tuple[int, int]]) -> None:
    """Let `model` also accept images of these sizes, (height, width). Its weights do not change.

    model: a `VisionTransformer` that is not wrapped or compiled yet. Raises ValueError for timm
    models, and for sizes that are not a multiple of the patch size.
    """
    for image_size in image_sizes:
        if image_size == model.image_size:
            continue
        if not hasattr(model, "other_sizes"):
            raise ValueError(
                f"schedule.image_sizes: timm's {type(model).__name__} accepts only images of"
                f" {model.image_size[0]}x{model.image_size[1]}: set schedule.image_sizes=[], or"
                " use a model of this project, such as vit_s16"
            )

        grid = grid_size(image_size, model.patch_size)
        model.other_sizes.add(image_size, AtSize(grid, model.grid_size, model.rope))


def _name(height: int, width: int) -> str:
    return f"{height}x{width}"
