"""Attention maps of a ViT, and attention rollout: the patches from which the output gathers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit.layers.attention_logits import attention_modules, catching, logits_of
from vit.layers.parts import grid_size


def check_rollout(model: nn.Module) -> tuple[int, int]:
    """Return the grid (h, w) of patches. Raises ValueError for other models."""
    grid = grid_size(model)
    global_pool = getattr(model, "global_pool", "avg")
    if grid is None or not _is_read(model):
        raise ValueError(
            f"Attention rollout needs a grid of patches (here {grid}), and a head that reads the"
            " class token, the patches' mean or what a query finds in them (here"
            f" {global_pool!r})"
        )
    attention_modules(model)
    return grid


def _is_read(model: nn.Module) -> bool:
    """Return whether `attention_maps` can compute the weights with which the head reads tokens."""
    global_pool = getattr(model, "global_pool", "avg")
    if global_pool != "map":
        return global_pool in ("token", "avg")
    pool: Any = getattr(model, "attn_pool", None)
    if type(pool).__name__ == "AttentionPoolLatent":  # timm's pool, which also has other forms
        return pool.latent_len == 1 and pool.pos_embed is None
    return hasattr(pool, "project")


class AttentionMaps(NamedTuple):
    """The attention in one forward pass of B images; each row of weights has the sum 1."""

    blocks: list[Tensor]
    """The attention of every block, (B, heads, N, N) float32; row i has the weights of token i."""
    reading: Tensor | None
    """The weights with which the head reads the tokens of the last block, (B or 1, heads or 1, N)
    float32: 1 for the class token; equal for all patches; or the attention of a MAP head's query.
    None for a head that reads something else."""
    logits: Tensor


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> AttentionMaps:
    """Return the attention of every block and of the head.

    images: (B, C, H, W) float, normalized. ViT-B/16 at 224 pixels takes 22 MB per image. Works for
    VisionTransformer of this package and of timm. Raises ValueError for a model whose blocks have
    another kind of attention, or none.
    """
    maps = list[Tensor]()

    def catch(queries: Tensor, keys: Tensor) -> None:
        maps.append(logits_of(queries, keys).softmax(-1))

    attentions = attention_modules(model)
    pool = getattr(model, "attn_pool", None)
    if pool is not None and _is_read(model):
        attentions.append(pool)  # last, because the model calls it last
    with catching(attentions, catch):
        logits = model(images)
    blocks = maps[: len(getattr(model, "blocks", ()))]
    return AttentionMaps(blocks, _reading(model, blocks, maps[len(blocks) :]), logits)


def _reading(model: Any, blocks: list[Tensor], pool: list[Tensor]) -> Tensor | None:
    """Return `AttentionMaps.reading`. pool: the map of a MAP head, (B, heads, 1, tokens)."""
    if not _is_read(model):
        return None
    num_tokens = blocks[0].shape[-1]
    if pool:
        weights = pool[0][:, :, 0]
        # A MAP head reads only the patches; timm's may read all tokens.
        return nn.functional.pad(weights, (num_tokens - weights.shape[-1], 0))
    # An option of timm includes class token and registers in the mean.
    averages_all = getattr(model, "pool_include_prefix", False)
    num_prefix_tokens = 0 if averages_all else model.num_prefix_tokens
    return even_reading(num_tokens, num_prefix_tokens, model.global_pool).to(blocks[0].device)


def even_reading(num_tokens: int, num_prefix_tokens: int, global_pool: str) -> Tensor:
    """Return the weights of the class token ("token") or of each patch ("avg"): (1, 1, N)."""
    weights = torch.zeros(1, 1, num_tokens)
    if global_pool == "token":
        weights[..., 0] = 1.0
    else:
        weights[..., num_prefix_tokens:] = 1.0 / (num_tokens - num_prefix_tokens)
    return weights


def output_attention(maps: list[Tensor], reading: Tensor, num_prefix_tokens: int) -> Tensor:
    """Return the patches' attention from the output, (B, layers, heads, h*w) float32.

    maps, reading: fields of `AttentionMaps`. The result is the mean over the rows of each map,
    weighted by `reading`: the class token's row, or the attention that a patch gets from all.
    """
    read = reading.mean(1)
    layers = [torch.einsum("bi,bhij->bhj", read.expand(len(m), -1), m) for m in maps]
    return torch.stack(layers, 1)[..., num_prefix_tokens:]


def attention_distance(
    maps: list[Tensor], grid: tuple[int, int], patch_size: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Return the mean attention distance of the heads, (B, layers, heads) float32, in pixels.

    The distance between the centres of a patch and of the patches that it attends to, weighted by
    the attention, as a mean over all patches: Figure 7 (right) of Dosovitskiy et al. 2021 (arXiv
    2010.11929, section 4.5). Attention to prefix tokens is omitted, because they have no place, and
    the rest of a row is scaled to 1.

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


def rollouts(model: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention rollout, (B, h, w) float32, and the logits of B inputs, on the CPU.

    inputs: (B, C, H, W) float, normalized. Raises ValueError for a model without a rollout.
    """
    grid = check_rollout(model)
    relevance = []
    logits = []
    # One image at a time, because a ViT-H at 518 pixels has 4 GB of attention per image.
    for image in inputs.split(1):
        maps = attention_maps(model, image)
        assert maps.reading is not None, "check_rollout"
        rolled = attention_rollout(maps.blocks, maps.reading, model.num_prefix_tokens)
        relevance.append(rolled.unflatten(1, grid).cpu())
        logits.append(maps.logits.float().cpu())
    return torch.cat(relevance), torch.cat(logits)


def attention_rollout(maps: list[Tensor], reading: Tensor, num_prefix_tokens: int) -> Tensor:
    """Return the share of each input patch in the output, (B, h*w) float32, at most 1.

    maps, reading: fields of `AttentionMaps`. Attention rollout, Abnar & Zuidema 2020 (arXiv
    2005.00928): the residual branch counts as half of each layer, A = 0.5 W + 0.5 I with rows of
    sum 1, and layers multiply; heads are averaged, as for figure 6 of the ViT paper. The head's
    reading is an additional factor in front: the row of the class token, the mean over the rows of
    patches, or their sum weighted by the query of a MAP head. That query has no residual branch,
    because it is the same for all images. If nothing of an image reaches the class token, the
    result is 0.
    """
    identity = torch.eye(maps[0].shape[-1], device=maps[0].device)
    rollout = identity
    for attention in maps:
        layer = 0.5 * attention.float().mean(1) + 0.5 * identity
        rollout = layer / layer.sum(-1, keepdim=True) @ rollout
    rows = (reading.mean(1, keepdim=True) @ rollout)[:, 0]
    relevance = rows[:, num_prefix_tokens:]
    return relevance / relevance.amax(1, keepdim=True).clamp(min=torch.finfo(relevance.dtype).tiny)
