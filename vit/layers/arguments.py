"""What a model cannot be or take: all that is wrong at once, each with what would work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

CHOICES = {
    "global_pool": ("token", "avg", "map"),
    "pos_embed": ("learn", "sincos2d", "none"),
    "rope_type": (None, "axial", "dinov3"),
    "norm_layer": ("layernorm", "rmsnorm"),
    "mlp_layer": ("mlp", "swiglu", "swiglu_packed"),
    "drop_path_schedule": ("linear", "constant"),
    "drop_path_form": ("mask", "subset"),
    "weight_init": (None, "timm", "jax"),
}
"""Arguments that are one of some words. A config has been checked for them; in code a wrong word
would mean another part than the one that was meant."""


def height_width(size: int | tuple[int, int], name: str) -> tuple[int, int]:
    """`size` in pixels as (height, width). Raises ValueError naming it `name`."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ValueError(
            f"{name} is {size!r}: expected a positive number of pixels, or (height, width)"
        )
    return pair


def grid_size(image_size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of patches. Raises ValueError for patches that leave a rest."""
    if problems := _size_problems(image_size, patch_size):
        raise ValueError("; ".join(problems))
    return image_size[0] // patch_size[0], image_size[1] // patch_size[1]


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ValueError for everything in `given` that does not fit together.

    given: the arguments of `vit.model.VisionTransformer` by name, all of them.
    """
    sizes = (height_width(given[name], name) for name in ("image_size", "patch_size"))
    problems = _size_problems(*sizes)
    problems += _head_problems(given)
    problems += [
        f"{name} is {given[name]!r}: expected {' or '.join(map(repr, words))}"
        for name, words in CHOICES.items()
        if given[name] not in words
    ]
    if given["global_pool"] == "token" and not given["class_token"]:
        problems.append("global_pool 'token' needs class_token=True: set it, or use 'avg'")
    if given["dist_token"]:
        problems += [
            f"dist_token, DeiT's second token, {why}"
            for why, holds in {
                "is read beside the class token: set global_pool 'token'": (
                    given["global_pool"] != "token"
                ),
                "has a head of its own, without representation_size: remove that": (
                    given["representation_size"] is not None
                ),
                "and reg_tokens are of different models: remove one of them": (
                    given["reg_tokens"] > 0
                ),
                "has a position: remove no_embed_class": given["no_embed_class"],
            }.items()
            if holds
        ]
    problems += [
        f"{name} is {given[name]}: expected 0 <= rate < 1"
        for name in ("drop_path_rate", "patch_drop_rate")
        if not 0.0 <= given[name] < 1.0
    ]
    width = int(given["embed_dim"] * given["mlp_ratio"])
    if given["mlp_layer"] == "swiglu_packed" and width % 2:
        problems.append(
            f"mlp_layer 'swiglu_packed' is gate and hidden layer in one: mlp_ratio"
            f" {given['mlp_ratio']} needs an even width, not {width}"
        )
    problems += _rope_problems(given)
    problems += [problem for problem, holds in _without_effect(given).items() if holds]
    if problems:
        raise ValueError("; ".join(problems))


def check_images(images: Tensor, in_chans: int, image_size: tuple[int, int]) -> None:
    """Raise ValueError if `images` are not (B, C, H, W) with these C, H and W."""
    expected = (in_chans, *image_size)
    if tuple(images.shape[1:]) != expected:
        raise ValueError(
            f"images are {tuple(images.shape)}, expected (batch, {', '.join(map(str, expected))}):"
            " resize them, or build the model for that image_size and in_chans"
            " (vit.weights.files resamples the positions)"
        )


def _size_problems(image_size: tuple[int, int], patch_size: tuple[int, int]) -> list[str]:
    sides = zip(("height", "width"), image_size, patch_size, strict=True)
    return [
        f"image {side} {size} is not a multiple of patch {side} {patch}: the nearest that work"
        f" are {' and '.join(str(n * patch) for n in (size // patch, size // patch + 1) if n)}"
        for side, size, patch in sides
        if size % patch
    ]


def _head_problems(given: Mapping[str, Any]) -> list[str]:
    embed_dim = given["embed_dim"]
    num_heads = given["num_heads"]
    pools = given["global_pool"] == "map"
    if embed_dim % num_heads and (pools or given["head_dim"] is None):
        divisors = [n for n in range(1, embed_dim + 1) if embed_dim % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - num_heads))
        return [
            f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}: the nearest number"
            f" of heads is {nearest}" + ("" if pools else ", or give head_dim")
        ]
    return []


def _without_effect(given: Mapping[str, Any]) -> dict[str, bool]:
    """Arguments that change nothing beside the others, and whether they are given."""
    has_prefix = given["class_token"] or given["reg_tokens"]
    sizes = zip(*(height_width(given[n], n) for n in ("image_size", "patch_size")), strict=True)
    is_one_patch = all(size == patch for size, patch in sizes)
    head_dim = given["head_dim"] or given["embed_dim"] // given["num_heads"]
    return {
        "no_embed_class has no effect without positions (pos_embed 'none'): remove it": (
            given["no_embed_class"] and given["pos_embed"] == "none"
        ),
        "no_embed_class has no effect without class token and registers: remove it": (
            given["no_embed_class"] and not has_prefix
        ),
        "rope_temperature has no effect with heads of 4 channels, which have one frequency: remove"
        " it": given["rope_type"] is not None
        and given["rope_temperature"] is not None
        and head_dim == 4,
        f"rope_type {given['rope_type']!r} has no effect on an image of one patch: remove it": (
            is_one_patch and given["rope_type"] is not None
        ),
        f"patch_drop_rate {given['patch_drop_rate']} has no effect on an image of one patch: remove"
        " it": is_one_patch and given["patch_drop_rate"] > 0,
    }


def _rope_problems(given: Mapping[str, Any]) -> list[str]:
    """What is wrong with rotary positions, or with their settings without them."""
    needs_rope = ("rope_temperature", "ref_feat_shape", "rope_reg_temperature")
    rope_type = given["rope_type"]
    if rope_type is None:
        return [
            f"{name} has no effect without rope_type: give one, or remove it"
            for name in needs_rope
            if given[name] is not None
        ]
    problems = []
    head_dim = given["head_dim"] or given["embed_dim"] // given["num_heads"]
    if head_dim % 4:
        problems.append(
            f"rope_type {rope_type!r} turns pairs of channels by row and by column: a head has"
            f" {head_dim}, it needs a multiple of 4"
        )
    if given["rope_reg_temperature"] is not None:
        side = math.isqrt(given["reg_tokens"])
        if rope_type != "axial" or side < 2 or side**2 != given["reg_tokens"]:
            # The place of a single register is the origin, where nothing turns.
            problems.append(
                "rope_reg_temperature turns registers as places of a square: it needs rope_type"
                f" 'axial' and reg_tokens 4, 9, 16 and so on, not {rope_type!r} and"
                f" {given['reg_tokens']}"
            )
    if rope_type == "dinov3" and given["ref_feat_shape"] is not None:
        problems.append("ref_feat_shape has no effect with rope_type 'dinov3': remove it")
    return problems
