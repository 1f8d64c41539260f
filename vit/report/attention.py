"""Attention maps of a ViT, and attention rollout: which patches the output gathers from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the attention of every block, one (B, heads, N, N) float32 each.

    images: (B, C, H, W) float, normalised. Row i of a map is where token i looks; its sum is 1.
    The model is run in evaluation mode and full precision; ViT-B/16 at 224 pixels takes 22 MB per
    image. Works for our VisionTransformer and timm's.

    Raises ValueError for a model without such blocks, or whose attention is more than softmax(q k /
    sqrt(dim)).
    """
    blocks = getattr(model, "blocks", None)
    attentions = list[Any]()
    if isinstance(blocks, nn.Sequential | nn.ModuleList):
        attentions = [getattr(block, "attn", None) for block in blocks]
    if not attentions or not all(_is_plain(attention) for attention in attentions):
        raise ValueError(
            f"{type(model).__name__} has no plain self-attention in its blocks"
            " (blocks[i].attn.qkv): no attention maps"
        )
    maps = list[Tensor]()

    def catch(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The fused kernels never hold these weights, so they are computed again from the input.
        tokens, *others = (*args, *kwargs.values())
        if tokens.ndim != 3 or any(other is not None and other is not False for other in others):
            raise ValueError(
                f"{type(model).__name__} masks, rotates or divides its attention: no attention maps"
            )
        qkv = attention.qkv(tokens).unflatten(2, (3, attention.num_heads, -1))
        q, k, _ = qkv.permute(2, 0, 3, 1, 4)
        q = getattr(attention, "q_norm", nn.Identity())(q).float()
        k = getattr(attention, "k_norm", nn.Identity())(k).float()
        maps.append((q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1))

    was_training = model.training
    model.eval()
    handles = [
        attention.register_forward_pre_hook(catch, with_kwargs=True) for attention in attentions
    ]
    try:
        with torch.autocast(images.device.type, enabled=False):
            model(images)
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return maps


def _is_plain(attention: Any) -> bool:
    """Whether queries and keys alone decide where it looks.

    A relative position bias, for example, would be a further parameter or buffer.
    """
    if not isinstance(getattr(attention, "qkv", None), nn.Linear):
        return False
    if not isinstance(getattr(attention, "num_heads", None), int):
        return False
    names = [*dict(attention.named_parameters()), *dict(attention.named_buffers())]
    parts = {name.partition(".")[0] for name in names}
    return parts <= {"qkv", "q_norm", "k_norm", "norm", "gate", "proj"}


def attention_rollout(maps: list[Tensor], num_prefix_tokens: int, global_pool: str) -> Tensor:
    """Return how much each patch of the input reaches the output: (B, h*w) float32, at most 1.

    maps: (B, heads, N, N) for each block. Attention rollout, Abnar & Zuidema 2020 (arXiv
    2005.00928): the residual branch counts as half of each layer, A = 0.5 W + 0.5 I with rows of
    sum 1, and layers multiply; heads are averaged, as for figure 6 of the ViT paper. Read from the
    class token's row, the first (`global_pool` "token"), or as the mean over the patches' rows
    ("avg"). An image of which nothing reaches the class token gets zeros.

    Raises ValueError for any other `global_pool`, or "token" without prefix tokens.
    """
    if global_pool not in ("token", "avg") or (global_pool == "token" and num_prefix_tokens == 0):
        raise ValueError(
            f"global_pool {global_pool!r} with {num_prefix_tokens} prefix tokens: expected 'avg',"
            " or 'token' with a class token"
        )
    identity = torch.eye(maps[0].shape[-1], device=maps[0].device)
    rollout = identity
    for attention in maps:
        layer = 0.5 * attention.float().mean(1) + 0.5 * identity
        rollout = layer / layer.sum(-1, keepdim=True) @ rollout
    rows = rollout[:, 0] if global_pool == "token" else rollout[:, num_prefix_tokens:].mean(1)
    relevance = rows[:, num_prefix_tokens:]
    return relevance / relevance.amax(1, keepdim=True).clamp(min=torch.finfo(relevance.dtype).tiny)
