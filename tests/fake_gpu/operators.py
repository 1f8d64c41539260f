"""Replace each operator that calls cuDNN with a function that only allocates the operator's
results.

cuDNN's libraries take 600 MB, and their interface uses graphs, so they are not simulated. The
results have the shapes and strides that torch's operators return
(aten/src/ATen/native/native_functions.yaml and cudnn/ in torch).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_library: torch.library.Library | None = None


def register() -> None:
    """Replace the operators in this process until the process ends."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for name, function in (
        ("cudnn_convolution", convolution),
        ("convolution_backward", convolution_backward),
        ("_scaled_dot_product_cudnn_attention", attention),
        ("_scaled_dot_product_cudnn_attention_backward", attention_backward),
    ):
        _library.impl(name, function, "CUDA", allow_override=True)


def convolution(
    images: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    *_: object,
) -> Tensor:
    sizes = [
        (length + 2 * pad - step * (width - 1) - 1) // by + 1
        for length, pad, step, width, by in zip(
            images.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
        )
    ]
    return images.new_empty(len(images), len(weight), *sizes)


def convolution_backward(
    gradient: Tensor,
    images: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    return (
        torch.empty_like(images) if output_mask[0] else None,
        torch.empty_like(weight) if output_mask[1] else None,
        gradient.sum((0, *range(2, gradient.ndim))) if output_mask[2] else None,
    )


def attention(query: Tensor, key: Tensor, *_: object, **__: object) -> tuple[Any, ...]:
    log_sums = query.new_empty(*query.shape[:3], 1, dtype=torch.float32)
    seed = query.new_empty((), dtype=torch.int64)
    lengths = (query.shape[2], key.shape[2])
    return torch.empty_like(query), log_sums, None, None, *lengths, seed, seed.clone(), None


def attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
