"""What a model cannot be: everything wrong in its arguments at once, each with what would work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHOICES = {
    "global_pool": ("token", "avg"),
    "pos_embed": ("learn", "sincos2d"),
    "drop_path_schedule": ("linear", "constant"),
    "drop_path_form": ("mask", "subset"),
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


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ValueError for everything in `given` that does not fit together.

    given: the arguments of `vit.model.VisionTransformer` by name, all of them.
    """
    sizes = (height_width(given[name], name) for name in ("image_size", "patch_size"))
    problems = _size_problems(*sizes)
    problems += _head_problems(given["embed_dim"], given["num_heads"])
    problems += [
        f"{name} is {given[name]!r}: expected {' or '.join(map(repr, words))}"
        for name, words in CHOICES.items()
        if given[name] not in words
    ]
    if given["global_pool"] == "token" and not given["class_token"]:
        problems.append("global_pool 'token' needs class_token=True: set it, or use 'avg'")
    if not 0.0 <= given["drop_path_rate"] < 1.0:
        problems.append(f"drop_path_rate is {given['drop_path_rate']}: expected 0 <= rate < 1")
    if problems:
        raise ValueError("; ".join(problems))


def _size_problems(image_size: tuple[int, int], patch_size: tuple[int, int]) -> list[str]:
    sides = zip(("height", "width"), image_size, patch_size, strict=True)
    return [
        f"image {side} {size} is not a multiple of patch {side} {patch}: the nearest that work"
        f" are {' and '.join(str(n * patch) for n in (size // patch, size // patch + 1) if n)}"
        for side, size, patch in sides
        if size % patch
    ]


def _head_problems(embed_dim: int, num_heads: int) -> list[str]:
    if embed_dim % num_heads == 0:
        return []
    divisors = [n for n in range(1, embed_dim + 1) if embed_dim % n == 0]
    return [
        f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}: the nearest number of"
        f" heads is {min(divisors, key=lambda n: abs(n - num_heads))}"
    ]
