"""Compute queries, keys and the largest attention logits of a model.

Fused attention kernels never store the logits, so this module recomputes them from the input of
each layer. The report draws attention maps from the logits (`vit/extras/report/attention.py`), and
`log.norms_every_steps` records the largest logit.

    model, images -> input of each `Attention` -> queries, keys -> q k^T / sqrt(head_dim)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vit.model import Attention

PLAIN_ATTENTION = (Attention.__module__, "timm.layers.attention", "timm.models.vision_transformer")
"""Modules whose `Attention` class computes plain softmax(q k / sqrt(dim)): ours, and two in timm,
because timm has moved the class. Other attention classes in timm add position biases, rotate
queries and keys, or attend within windows."""


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the self-attention module of each block. Raises ValueError if a block has no plain
    self-attention."""
    attentions = [
        module
        for module in model.modules()
        if type(module).__name__ == "Attention" and type(module).__module__ in PLAIN_ATTENTION
    ]
    if not attentions or len(attentions) != len(getattr(model, "blocks", ())):
        raise ValueError(
            f"{type(model).__name__} does not use plain self-attention in each of its blocks"
        )
    return attentions


@contextmanager
def catching(
    attentions: list[nn.Module], catch: Callable[[Tensor, Tensor], object]
) -> Iterator[None]:
    """Call `catch` with the result of `queries_and_keys` whenever one of `attentions` runs.

    Run a compiled model eagerly inside this context.
    """

    def hook(attention: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        catch(*queries_and_keys(attention, *args, **options))

    handles = [
        attention.register_forward_pre_hook(hook, with_kwargs=True) for attention in attentions
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def queries_and_keys(attention: Any, x: Tensor, *args: object, **options: object) -> list[Tensor]:
    """Return the queries and keys of a layer for its input, (B, heads, N, head_dim) float32 each.

    A MAP head has a single query: (1, heads, 1, head_dim).
    """
    if hasattr(attention, "project"):  # attention of `vit.model`, with norms and rotation
        return [part.float() for part in attention.project(x, *args, **options)[:2]]
    if hasattr(attention, "kv"):  # timm's MAP head
        q = attention.q(attention.latent).unflatten(2, (attention.num_heads, -1)).transpose(1, 2)
        k = attention.kv(x).unflatten(2, (2, attention.num_heads, -1))[:, :, 0].transpose(1, 2)
        return [attention.q_norm(q).float(), attention.k_norm(k).float()]

    qkv = attention.qkv(x).unflatten(2, (3, attention.num_heads, -1)).float()
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)
    # In timm, query and key norms are optional.
    q = getattr(attention, "q_norm", nn.Identity())(q)
    k = getattr(attention, "k_norm", nn.Identity())(k)
    return [q, k]


def logits_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the logits before softmax, (B, heads, N, N) float32: q k^T / sqrt(head_dim)."""
    return queries * queries.shape[-1] ** -0.5 @ keys.transpose(-2, -1)


@torch.no_grad()
def largest_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return the largest logit of each block for each image, (blocks, B) float32.

    images: (B, C, H, W) float32, normalized. The maximum is taken over heads, queries and keys,
    after norms and rotation, and without dropout or drop path. Only the logits of one image and one
    block are in memory at a time. Returns a tensor of shape (0, B) if the model has no plain
    self-attention.
    """
    largest = list[Tensor]()

    def catch(queries: Tensor, keys: Tensor) -> None:
        with torch.autocast(images.device.type, enabled=False):
            each = zip(queries.split(1), keys.split(1), strict=True)
            largest.append(torch.stack([logits_of(q, k).amax() for q, k in each]))

    try:
        attentions = attention_modules(model)
    except ValueError:
        return torch.empty(0, len(images), device=images.device)
    was_training = model.training
    model.eval()
    try:
        with catching(attentions, catch):
            model(images)
    finally:
        model.train(was_training)
    return torch.stack(largest)
