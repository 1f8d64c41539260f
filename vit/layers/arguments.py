"""Check a model's arguments and inputs, and report all mistakes in one error."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

CHOICES = {
    "global_pool": ("token", "avg", "norm_avg", "map"),
    "pos_embed": ("learn", "sincos2d", "none"),
    "rope_type": (None, "axial", "dinov3"),
    "norm_layer": ("layernorm", "rmsnorm"),
    "mlp_layer": ("mlp", "mlp_tanh", "swiglu", "swiglu_packed"),
    "drop_path_schedule": ("linear", "constant"),
    "drop_path_form": ("mask", "subset"),
    "weight_init": (None, "timm", "jax", "mha"),
}
"""Maps arguments to their allowed values. Configs are checked earlier, but in Python code a
misspelled value would silently select a different layer."""


def height_width(size: int | tuple[int, int], name: str) -> tuple[int, int]:
    """Return `size` in pixels as (height, width). `name` is the argument's name in the error."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(n, int) and n > 0 for n in pair):
        raise ValueError(
            f"{name} is {size!r}: expected a positive number of pixels, or (height, width)"
        )
    return pair


def grid_size(image_size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """Return the number of rows and columns of patches. Raises ValueError if the patch size does
    not divide the image size."""
    problems = _size_problems(image_size, patch_size)
    if problems:
        raise ValueError("; ".join(problems))
    return image_size[0] // patch_size[0], image_size[1] // patch_size[1]


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if some of `arguments` contradict each other.

    arguments: all arguments of `vit.model.VisionTransformer`, keyed by name.
    """
    sizes = (height_width(arguments[name], name) for name in ("image_size", "patch_size"))
    problems = _size_problems(*sizes)
    problems += _head_problems(arguments)
    problems += [
        f"{name} is {arguments[name]!r}: expected {' or '.join(map(repr, choices))}"
        for name, choices in CHOICES.items()
        if arguments[name] not in choices
    ]
    if arguments["global_pool"] == "token" and not arguments["class_token"]:
        problems.append("global_pool 'token' needs class_token=True: set it, or use 'avg'")
    if arguments["dist_token"]:
        problems += _dist_token_problems(arguments)

    problems += [
        f"{name} is {arguments[name]}: expected 0 <= rate < 1"
        for name in ("drop_path_rate", "patch_drop_rate")
        if not 0.0 <= arguments[name] < 1.0
    ]

    width = int(arguments["embed_dim"] * arguments["mlp_ratio"])
    if arguments["mlp_layer"] == "swiglu_packed" and width % 2:
        problems.append(
            "mlp_layer 'swiglu_packed' splits its hidden layer into two halves: mlp_ratio"
            f" {arguments['mlp_ratio']} must give an even width, not {width}"
        )

    problems += _rope_problems(arguments)
    problems += _without_effect(arguments)
    if problems:
        raise ValueError("; ".join(problems))


def check_images(images: Tensor, in_chans: int, image_size: tuple[int, int]) -> None:
    """Raise ValueError if `images` do not have shape (B, C, H, W) with the given C, H and W."""
    expected = (in_chans, *image_size)
    if tuple(images.shape[1:]) != expected:
        raise ValueError(
            f"images are {tuple(images.shape)}, expected (batch, {', '.join(map(str, expected))}):"
            " resize the images, or build the model for that image_size and in_chans"
        )


def _size_problems(image_size: tuple[int, int], patch_size: tuple[int, int]) -> list[str]:
    """Return a message for each side that does not consist of whole patches."""
    sides = zip(("height", "width"), image_size, patch_size, strict=True)
    return [
        f"image {side} {size} is not a multiple of patch {side} {patch}: the nearest that work"
        f" are {' and '.join(str(n * patch) for n in (size // patch, size // patch + 1) if n)}"
        for side, size, patch in sides
        if size % patch
    ]


def _head_problems(arguments: Mapping[str, Any]) -> list[str]:
    """Return a message if the attention heads cannot divide `embed_dim`."""
    embed_dim = arguments["embed_dim"]
    num_heads = arguments["num_heads"]
    pools = arguments["global_pool"] == "map"
    needs_multiple = pools or arguments["head_dim"] is None
    if needs_multiple and embed_dim % num_heads:
        divisors = [n for n in range(1, embed_dim + 1) if embed_dim % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - num_heads))
        return [
            f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}: the nearest number"
            f" of heads is {nearest}" + ("" if pools else ", or set head_dim")
        ]
    return []


def _dist_token_problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message about each argument that contradicts `dist_token`."""
    subject = "dist_token, DeiT's second token,"
    if arguments["global_pool"] != "token":
        yield f"{subject} is used together with the class token: set global_pool 'token'"
    if arguments["representation_size"] is not None:
        yield f"{subject} has its own head without a hidden layer: set representation_size to null"
    if arguments["reg_tokens"] > 0:
        yield f"{subject} cannot be combined with reg_tokens: set one of them to null"
    if arguments["no_embed_class"]:
        yield f"{subject} always has a position: set no_embed_class to null"


def _without_effect(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message about each argument that has no effect."""
    if arguments["no_embed_class"]:
        if arguments["pos_embed"] == "none":
            yield (
                "no_embed_class has no effect without positions (pos_embed 'none'): set it to null"
            )
        if not arguments["class_token"] and not arguments["reg_tokens"]:
            yield "no_embed_class has no effect without class token and registers: set it to null"

    image_size = height_width(arguments["image_size"], "image_size")
    is_one_patch = image_size == height_width(arguments["patch_size"], "patch_size")
    rope_type = arguments["rope_type"]
    if rope_type is not None:
        head_dim = arguments["head_dim"] or arguments["embed_dim"] // arguments["num_heads"]
        if head_dim == 4 and arguments["rope_temperature"] is not None:
            yield (
                "rope_temperature has no effect with heads of 4 channels, which have only one"
                " frequency: set it to null"
            )
        if is_one_patch:
            yield f"rope_type {rope_type!r} has no effect on an image of one patch: set it to null"

    rate = arguments["patch_drop_rate"]
    if is_one_patch and rate > 0:
        yield f"patch_drop_rate {rate} has no effect on an image of one patch: set it to null"


def _rope_problems(arguments: Mapping[str, Any]) -> list[str]:
    """Return a message for each problem with the rotary arguments, which must not be set without
    `rope_type`."""
    rope_type = arguments["rope_type"]
    if rope_type is None:
        return [
            f"{name} has no effect without rope_type: set rope_type, or set it to null"
            for name in ("rope_temperature", "ref_feat_shape", "rope_reg_temperature")
            if arguments[name] is not None
        ]

    problems = []
    head_dim = arguments["head_dim"] or arguments["embed_dim"] // arguments["num_heads"]
    if head_dim % 4:
        problems.append(
            f"rope_type {rope_type!r} rotates pairs of channels by row and by column: head_dim"
            f" must be a multiple of 4, not {head_dim}"
        )

    if arguments["rope_reg_temperature"] is not None:
        side = math.isqrt(arguments["reg_tokens"])
        # A single register would be at the origin, where the rotation has no effect.
        is_square = side >= 2 and side**2 == arguments["reg_tokens"]
        if rope_type != "axial" or not is_square:
            problems.append(
                "rope_reg_temperature places registers on a square grid: set rope_type 'axial'"
                f" and reg_tokens 4, 9, 16 and so on, not {rope_type!r} and"
                f" {arguments['reg_tokens']}"
            )
    if rope_type == "dinov3" and arguments["ref_feat_shape"] is not None:
        problems.append("ref_feat_shape has no effect with rope_type 'dinov3': set it to null")
    return problems
