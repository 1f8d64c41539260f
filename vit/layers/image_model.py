"""The attributes that every model has, ours or timm's."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class ImageModel(nn.Module):
    """An image classifier: (B, in_chans, H, W) -> (B, num_classes).

    `VisionTransformer` is a subclass. A timm model gets `image_size` and `in_chans` from
    `vit.layers.timm_model`, and is not a subclass but only declared as an `ImageModel`.
    """

    image_size: tuple[int, int]
    """The height and width of images in pixels."""
    in_chans: int
    """The number of channels of images."""
    num_prefix_tokens: int
    """The number of tokens before the patch tokens, in Vision Transformers only."""
    blocks: Any
    """The blocks in order, in Vision Transformers only."""
    patch_embed: Any
    """The first layer, in Vision Transformers only."""
    pos_embed: Tensor | None
    """The learned position embedding, in Vision Transformers only."""
    global_pool: str
    """How tokens become one vector (timm's `global_pool`), in Vision Transformers only."""
    forward_features: Callable[[Tensor], Tensor]
    """Returns the tokens after the last block and its norm, (B, N, D)."""
    get_classifier: Callable[[], nn.Module]
    """Returns the head, in timm models only."""
