"""Compute attention maps and attention rollout of a ViT."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit.layers.attention_logits import attention_modules, catching, logits_of
from vit.layers.parts import grid_size


def check_rollout(model: nn.Module) -> tuple[int, int]:
    """Return the grid (h, w) of patches. Raises ValueError if rollout is not supported."""
    grid = grid_size(model)
    global_pool = getattr(model, "global_pool", "avg")
    if grid is None or not _is_read(model):
        raise ValueError(
            f"Attention rollout needs a grid of patches (this model has {grid}), and pooling by the"
            " class token, the mean of patches or attention (this model has"
            f" {global_pool!r}): use another model"
        )
    attention_modules(model)
    return grid


def _is_read(model: nn.Module) -> bool:
    """Return whether `attention_maps` can compute the pooling weights of the head."""
    global_pool = getattr(model, "global_pool", "avg")
    if global_pool != "map":
        return global_pool in ("token", "avg")
    pool: Any = getattr(model, "attn_pool", None)
    if type(pool).__name__ == "AttentionPoolLatent":  # timm's attention pooling has variants
        return pool.latent_len == 1 and pool.pos_embed is None
    return hasattr(pool, "project")


class AttentionMaps(NamedTuple):
    """The attention maps of a forward pass of B images. Each row of weights has the sum 1."""

    blocks: list[Tensor]
    """The attention of each block, (B, heads, N, N) float32. Row i has the weights of token i."""
    reading: Tensor | None
    """The head's pooling weights for the tokens of the last block, (B or 1, heads or 1, N) float32.
    The weights are 1 for the class token, equal for all patches, or the attention of a MAP head's
    query. None for other heads."""
    logits: Tensor


@torch.no_grad()
def attention_maps(model: nn.Module, images: Tensor) -> AttentionMaps:
    """Return the attention of each block and of the head.

    images: (B, C, H, W) float, normalized. ViT-B/16 at 224 pixels needs 22 MB per image. The model
    must be a VisionTransformer of this package or of timm. Raises ValueError if the model's blocks
    have a different kind of attention, or no attention.
    """
    maps = list[Tensor]()

    def catch(queries: Tensor, keys: Tensor) -> None:
        maps.append(logits_of(queries, keys).softmax(-1))

    attentions = attention_modules(model)
    pool = getattr(model, "attn_pool", None)
    if pool is not None and _is_read(model):
        attentions.append(pool)  # the model calls the pooling last
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
        # A MAP head attends only to patches, but timm's may attend to all tokens.
        return nn.functional.pad(weights, (num_tokens - weights.shape[-1], 0))
    # timm can include the class token and registers in the mean.
    averages_all = getattr(model, "pool_include_prefix", False)
    num_prefix_tokens = 0 if averages_all else model.num_prefix_tokens
    return even_reading(num_tokens, num_prefix_tokens, model.global_pool).to(blocks[0].device)


def even_reading(num_tokens: int, num_prefix_tokens: int, global_pool: str) -> Tensor:
    """Return pooling weights for the class token ("token") or for the mean of patches ("avg").

    The shape is (1, 1, N).
    """
    weights = torch.zeros(1, 1, num_tokens)
    if global_pool == "token":
        weights[..., 0] = 1.0
    else:
        weights[..., num_prefix_tokens:] = 1.0 / (num_tokens - num_prefix_tokens)
    return weights


def output_attention(maps: list[Tensor], reading: Tensor, num_prefix_tokens: int) -> Tensor:
    """Return the attention of the output to each patch, (B, layers, heads, h*w) float32.

    maps, reading: fields of `AttentionMaps`. The result is the mean over the rows of each map,
    weighted by `reading`. With a class token, it is the row of the class token.
    """
    read = reading.mean(1)
    layers = [torch.einsum("bi,bhij->bhj", read.expand(len(m), -1), m) for m in maps]
    return torch.stack(layers, 1)[..., num_prefix_tokens:]


def attention_distance(
    maps: list[Tensor], grid: tuple[int, int], patch_size: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Return the mean attention distance of each head, (B, layers, heads) float32, in pixels.

    Distances between the centers of a patch and of the patches that it attends to are weighted by
    the attention and averaged over all patches (Figure 7 right of Dosovitskiy et al. 2021, arXiv
    2010.11929, section 4.5). Attention to prefix tokens is omitted, because they have no position,
    and the remaining weights of a row are scaled to the sum 1.

    maps: (B, heads, N, N) for each block. grid: (h, w) patches of `patch_size` (height, width)
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
    """Return the distances between the centers of all patches, (h*w, h*w) float32, in pixels."""
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
    # Images are processed one by one, because ViT-H at 518 pixels needs 4 GB per image.
    for image in inputs.split(1):
        maps = attention_maps(model, image)
        assert maps.reading is not None, "check_rollout"
        rolled = attention_rollout(maps.blocks, maps.reading, model.num_prefix_tokens)
        relevance.append(rolled.unflatten(1, grid).cpu())
        logits.append(maps.logits.float().cpu())
    return torch.cat(relevance), torch.cat(logits)


def attention_rollout(maps: list[Tensor], reading: Tensor, num_prefix_tokens: int) -> Tensor:
    """Return the relevance of each input patch for the output, (B, h*w) float32, at most 1.

    maps, reading: fields of `AttentionMaps`. In attention rollout (Abnar & Zuidema 2020, arXiv
    2005.00928), the residual branch is half of each layer, A = 0.5 W + 0.5 I with rows of sum 1,
    and the matrices of all layers are multiplied. Heads are averaged, as for figure 6 of the ViT
    paper. The product is multiplied by the head's pooling weights: the row of the class token, the
    mean over the rows of patches, or their sum weighted by the query of a MAP head. The query has
    no residual branch, because it is equal for all images. If no patch reaches the class token, the
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
