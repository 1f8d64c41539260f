"""Define and check the settings that name the image and label members in a tar.

`vit.data.shards.members` applies these settings.
"""

import re
from typing import NamedTuple

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
"""The image suffixes that are accepted if a layout does not set any."""


NO_LABEL = "none"
"""The label suffix for samples without labels. The index then stores label -1."""


class Names(NamedTuple):
    """The prefixes, such as flags, that messages print before the values of a layout."""

    image: str
    label: str
    keys_with_dots: str
    class_names: str


SETTINGS = Names(
    "stream.image=",
    "stream.label=",
    "an index for keys with dots (python -m data_prep.index ROOT --keys-with-dots)",
    "the _info.json of data.root (python -m data_prep.index ROOT --classes names.txt)",
)


def image_suffixes(image: str | None) -> tuple[str, ...]:
    """Return the suffixes in `image` (one, or several joined by `;`) in lower case."""
    return IMAGE_EXTENSIONS if image is None else tuple(image.lower().split(";"))


def layout_problems(image: str | None, label: str, keys_with_dots: bool, names: Names) -> list[str]:
    """Return a message for each invalid value of a `SampleLayout`. names: prefixes for messages."""
    images = image_suffixes(image)
    suffix = "[^./:]+" if keys_with_dots else "[^./:][^/:]*"
    values = [(names.image, text, suffix) for text in images]
    values.append((names.label, label, f"{suffix}(:.+)?"))

    problems = [
        f"{name}{text}: expected the text after the key's"
        f" {'last ' if keys_with_dots else ''}dot, such as jpg or json:label"
        for name, text, rule in values
        if not re.fullmatch(rule, text)
    ]

    if names is SETTINGS and label == NO_LABEL:
        problems.append(f"{names.label}{label}: training needs labels: give the label's member")
    if image is not None and label in images:
        problems.append(f"{names.image}{image} and {names.label}{label}: use two different members")
    return problems
