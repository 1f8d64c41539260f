"""Attention maps of a ViT, and attention rollout: which patches the output gathers from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vit.weights.files import grid_size

PLAIN_ATTENTION = ("vit.model", "timm.layers.attention", "timm.models.vision_transformer")
"""Modules whose class `Attention` is softmax(q k / sqrt(dim)) and nothing else: ours, and timm's,
which has moved. Its other kinds add position biases, rotate queries and keys, or look at windows of
the image."""


def check_rollout(model: nn.Module) -> tuple[int, int]:
    """Return the grid (h, w) of patches; ValueError if `attention_rollout` means nothing here."""
    grid = grid_size(model)
    global_pool = getattr(model, "global_pool", "avg")
    if grid is None or global_pool not in ("token", "avg"):
        raise ValueError(
            f"Attention rollout needs a grid of patches (here {grid}), and a head that reads their"
            f" mean or the class token (here {global_pool!r})"
        )
    attention_modules(model)
    return grid


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the self-attention of each block; ValueError if one has another kind, or none."""
    found = [
        module
        for module in model.modules()
        if type(module).__name__ == "Attention" and type(module).__module__ in PLAIN_ATTENTION
    ]
    if not found or len(found) != len(getattr(model, "blocks", ())):
        raise ValueError(
            f"{type(model).__name__} has no plain self-attention in each of its blocks"
        )
    return found


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the attention of every block, one (B, heads, N, N) float32 each, and the logits.

    images: (B, C, H, W) float, normalised. Row i of a map is where token i looks; its sum is 1.
    ViT-B/16 at 224 pixels takes 22 MB per image. Works for our VisionTransformer and timm's. Raises
    ValueError for a model whose blocks have another kind of attention, or none.
    """
    maps = list[Tensor]()

    def catch(attention: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        # The fused kernels never hold these weights, so they are computed again from the input.
        q, k = _queries_and_keys(attention, *args, **options)
        maps.append((q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1))

    handles = [
        attention.register_forward_pre_hook(catch, with_kwargs=True)
        for attention in attention_modules(model)
    ]
    try:
        logits = model(images)
    finally:
        for handle in handles:
            handle.remove()
    return maps, logits


def _queries_and_keys(attention: Any, x: Tensor, *args: Any, **options: Any) -> list[Tensor]:
    """Return queries and keys of a layer for its input, (B, heads, N, head_dim) float32 each."""
    if hasattr(attention, "project"):  # ours: with all that its forward pass does to them
        return [part.float() for part in attention.project(x, *args, **options)[:2]]
    qkv = attention.qkv(x).unflatten(2, (3, attention.num_heads, -1)).float()
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)
    # timm's option; normalised queries are scaled as all others are
    q = getattr(attention, "q_norm", nn.Identity())(q)
    k = getattr(attention, "k_norm", nn.Identity())(k)
    return [q, k]


def output_attention(maps: list[Tensor], num_prefix_tokens: int, global_pool: str) -> Tensor:
    """Return where the output looks in each layer and head: (B, layers, heads, h*w) float32.

    maps: (B, heads, N, N) for each block. Of the class token ("token") its own row; without one
    ("avg") the mean over the patches' rows: how much attention a patch gets.
    """
    layers = []
    for attention in maps:
        if global_pool == "token":
            rows = attention[:, :, 0]
        else:
            rows = attention[:, :, num_prefix_tokens:].mean(2)
        layers.append(rows[:, :, num_prefix_tokens:])
    return torch.stack(layers, 1)


def attention_distance(
    maps: list[Tensor], grid: tuple[int, int], patch_size: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Return how far away the heads look: (B, layers, heads) float32, in pixels.

    The distance between a patch and those it attends to, from centre to centre, weighted by the
    attention, as a mean over all patches: Figure 7 (right) of Dosovitskiy et al. 2021 (arXiv
    2010.11929, section 4.5). Attention to prefix tokens, which are nowhere, is left out, and the
    rest of a row counts as 1.

    maps: (B, heads, N, N) for each block; grid: (h, w) patches of `patch_size` (height, width)
    pixels.
    """
    distances = patch_distances(grid, patch_size)
    layers = []
    for attention in maps:
        weights = attention[:, :, num_prefix_tokens:, num_prefix_tokens:]
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        layers.append((weights * distances.to(weights.device)).sum(-1).mean(-1))
    return torch.stack(layers, 1)


def patch_distances(grid: tuple[int, int], patch_size: tuple[int, int]) -> Tensor:
    """Return the distances between the centres of all patches: (h*w, h*w) float32, in pixels."""
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    places = torch.stack((rows * patch_size[0], columns * patch_size[1]), -1).flatten(0, 1).double()
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist").float()


def attention_rollout(maps: list[Tensor], num_prefix_tokens: int, global_pool: str) -> Tensor:
    """Return how much each patch of the input reaches the output: (B, h*w) float32, at most 1.

    maps: (B, heads, N, N) for each block. Attention rollout, Abnar & Zuidema 2020 (arXiv
    2005.00928): the residual branch counts as half of each layer, A = 0.5 W + 0.5 I with rows of
    sum 1, and layers multiply; heads are averaged, as for figure 6 of the ViT paper. Read from the
    class token's row, the first (`global_pool` "token"), or as the mean over the patches' rows
    ("avg"). An image of which nothing reaches the class token gets zeros.
    """
    identity = torch.eye(maps[0].shape[-1], device=maps[0].device)
    rollout = identity
    for attention in maps:
        layer = 0.5 * attention.float().mean(1) + 0.5 * identity
        rollout = layer / layer.sum(-1, keepdim=True) @ rollout
    rows = rollout[:, 0] if global_pool == "token" else rollout[:, num_prefix_tokens:].mean(1)
    relevance = rows[:, num_prefix_tokens:]
    return relevance / relevance.amax(1, keepdim=True).clamp(min=torch.finfo(relevance.dtype).tiny)
