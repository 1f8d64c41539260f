"""Compute attention maps, attention rollout and principal components of a ViT.

The sign of a component is arbitrary. The largest entry of each component is made positive, so the
same weights always give the same picture.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit.layers.image_model import ImageModel
from vit.layers.parts import grid_size
from vit.training.attention_logits import attention_modules, catching, logits_of


def check_rollout(model: ImageModel) -> tuple[int, int]:
    """Return the grid (h, w) of patches. Raises ValueError if rollout is not supported."""
    grid = grid_size(model)
    global_pool = getattr(model, "global_pool", "avg")
    if grid is None or not _is_read(model):
        raise ValueError(
            f"Attention rollout requires a grid of patches (this model has {grid}), and pooling by"
            f" class token, mean or attention (this model has {global_pool!r}): use another model"
        )
    attention_modules(model)
    return grid


def _is_read(model: ImageModel) -> bool:
    """Return whether `attention_maps` can compute the pooling weights of the head."""
    global_pool = getattr(model, "global_pool", "avg")
    if global_pool != "map":
        return global_pool in ("token", "avg", "norm_avg")
    pool: Any = getattr(model, "attn_pool", None)
    if type(pool).__name__ == "AttentionPoolLatent":  # timm's attention pooling has variants
        return pool.latent_len == 1 and pool.pos_embed is None
    return hasattr(pool, "project")


class AttentionMaps(NamedTuple):
    """The attention maps of a forward pass of B images. Each row of weights sums to 1."""

    blocks: list[Tensor]
    """The attention of each block, (B, heads, N, N) float32. Row i contains the weights of token
    i."""
    reading: Tensor | None
    """The head's pooling weights for the tokens of the last block, (B or 1, heads or 1, N) float32.
    Depending on the head, the weights are 1 for the class token, equal for all patches, or the
    attention of a MAP head's query. None for other heads."""
    logits: Tensor


@torch.no_grad()
def attention_maps(model: ImageModel, images: Tensor) -> AttentionMaps:
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
        attentions.append(pool)  # Pooling is the model's last attention call.
    with catching(attentions, catch):
        logits = model(images)
    blocks = maps[: len(getattr(model, "blocks", ()))]
    return AttentionMaps(blocks, _reading(model, blocks, maps[len(blocks) :]), logits)


def _reading(model: ImageModel, blocks: list[Tensor], pool: list[Tensor]) -> Tensor | None:
    """Return `AttentionMaps.reading`. pool: the map of a MAP head, (B, heads, 1, tokens)."""
    if not _is_read(model):
        return None

    num_tokens = blocks[0].shape[-1]
    if pool:
        weights = pool[0][:, :, 0]
        # Our MAP heads attend only to patches, but timm's MAP heads may attend to all tokens.
        return nn.functional.pad(weights, (num_tokens - weights.shape[-1], 0))

    # timm may include the class token and registers in the mean.
    averages_all = getattr(model, "pool_include_prefix", False)
    num_prefix_tokens = 0 if averages_all else model.num_prefix_tokens
    return even_reading(num_tokens, num_prefix_tokens, model.global_pool).to(blocks[0].device)


def even_reading(num_tokens: int, num_prefix_tokens: int, global_pool: str) -> Tensor:
    """Return pooling weights for the class token ("token"), or for the mean of patches.

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
    weighted by `reading`. If the head uses the class token, the result is the row of the class
    token.
    """
    read = reading.mean(1)
    layers = [torch.einsum("bi,bhij->bhj", read.expand(len(m), -1), m) for m in maps]
    return torch.stack(layers, 1)[..., num_prefix_tokens:]


def attention_distance(
    maps: list[Tensor], grid: tuple[int, int], patch_size: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Return the mean attention distance of each head, (B, layers, heads) float32, in pixels.

    The distances from each patch's center to the centers of the attended patches are weighted by
    the attention and averaged over all patches (Figure 7 right of Dosovitskiy et al. 2021, arXiv
    2010.11929, section 4.5). Prefix tokens have no position, so attention to them is omitted, and
    the remaining weights in each row are rescaled to sum to 1.

    Args:
        maps: (B, heads, N, N) for each block.
        grid: (h, w) patches of `patch_size`.
        patch_size: (height, width) in pixels.
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


def rollouts(model: ImageModel, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention rollout, (B, h, w) float32, and the logits of B inputs, on the CPU.

    inputs: (B, C, H, W) float, normalized. Raises ValueError if the model does not support rollout.
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
    2005.00928), the residual branch is half of each layer, A = 0.5 W + 0.5 I with rows that sum to
    1, and the matrices of all layers are multiplied. Heads are averaged, as for figure 6 of the ViT
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

    relevance = (reading.mean(1, keepdim=True) @ rollout)[:, 0, num_prefix_tokens:]
    return relevance / relevance.amax(1, keepdim=True).clamp(min=torch.finfo(relevance.dtype).tiny)


# --- principal components -------------------------------------------------------------------------


def principal_components(rows: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the first `num` principal components of `rows`, and their fractions of the variance.

    rows: (N, D) float. Returns orthonormal components, (k, D) float64, and their fractions, (k,)
    float64. The mean is subtracted first. k is less than `num` if `rows` has fewer rows or columns.
    """
    centered = rows.detach().cpu().double()
    centered = centered - centered.mean(0)
    _, values, components = torch.linalg.svd(centered, full_matrices=False)

    largest = components.abs().argmax(1, keepdim=True)
    components = components * components.gather(1, largest).sign()
    shares = values.square() / values.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    return components[:num], shares[:num]


def filter_components(model: ImageModel, num: int) -> tuple[Tensor, Tensor]:
    """Return the first principal components of the patch embedding's filters, and their shares of
    the variance.

    The components are computed as for Figure 7 (left) of Dosovitskiy et al. 2021 (arXiv
    2010.11929): the D filters are points in the space of a patch's pixels. Returns (k, C, h, w)
    float64 and (k,). Raises ValueError if the model does not embed patches with a single
    convolution.
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
def token_features(model: ImageModel, inputs: Tensor) -> Tensor:
    """Return the features of patches after the last block, (B, h*w, D) float32.

    inputs: (B, C, H, W) float, normalized.
    """
    return model.forward_features(inputs)[:, model.num_prefix_tokens :].float()


def token_colors(features: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the first three principal components of patch features as colors, and their shares of
    the variance.

    The picture follows Oquab et al. 2023 (DINOv2, arXiv 2304.07193, Figure 1). All images share the
    same components, so patches with similar colors have similar features, even in different images.

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
