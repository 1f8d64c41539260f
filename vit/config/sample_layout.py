"""The user's settings for the image and label members of a tar: their names, and their mistakes.

`vit.data.shards.members` applies them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
"""Suffixes of images, if a layout names none."""


NO_LABEL = "none"
"""In place of a label's suffix: the samples have no labels, and the index has -1."""


class Names(NamedTuple):
    """The text that a user writes before each value of a layout."""

    image: str
    label: str
    keys_with_dots: str
    class_names: str


SETTINGS = Names(
    "data.stream_image=",
    "data.stream_label=",
    "data.stream_keys_with_dots=true",
    "the _info.json of data.root (python -m data_prep.index ROOT --classes names.txt)",
)


def image_suffixes(image: str | None) -> tuple[str, ...]:
    """Return the suffixes that `image` names (one, or several joined by `;`), in lower case."""
    return IMAGE_EXTENSIONS if image is None else tuple(image.lower().split(";"))


def layout_problems(image: str | None, label: str, keys_with_dots: bool, names: Names) -> list[str]:
    """Return a message for each wrong value of a `SampleLayout`. names: those of the user."""
    images = image_suffixes(image)
    suffix = "[^./:]+" if keys_with_dots else "[^./:][^/:]*"
    values = [(names.image, text, suffix) for text in images]
    values.append((names.label, label, f"{suffix}(:.+)?"))
    problems = [
        f"{name}{text}: expected what follows the key's"
        f" {'last ' if keys_with_dots else ''}dot, as jpg or json:label"
        for name, text, rule in values
        if not re.fullmatch(rule, text)
    ]
    if names is SETTINGS and label == NO_LABEL:
        problems.append(f"{names.label}{label}: expected a member, as a model learns from labels")
    if image is not None and label in images:
        problems.append(f"{names.image}{image} and {names.label}{label}: two members")
    return problems
