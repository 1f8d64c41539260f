"""Describe the members of a tar whose samples do not fit, and propose a layout that would fit.

`data_prep.index` and the streaming reader add the result to their errors, so that a user of another
program's shards sees which options to give.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vit.data.shards.members import (
    IMAGE_EXTENSIONS,
    Names,
    SampleLayout,
    as_integer,
    json_fields,
    printable,
)

MAX_SAMPLES = 100
"""Samples whose small members are read for a proposal."""
MAX_LABEL_BYTES = 64 << 10
"""Larger members are not read: they cannot be labels."""
MAX_LISTED = 6
LABEL_WORDS = ("cls", "label", "labels", "class", "target", "category", "index", "y", "id")
"""Usual names of labels, the likeliest first."""
IMAGE_WORDS = ("", "image", "img", "input", "photo", "rgb")
"""Usual names of images, before another dot and the format."""
OTHER_IMAGES = ("bmp", "gif", "tif", "tiff", "avif", "img", "image")
"""Suffixes of images that are used only if a user names them."""
Sample = dict[str, bytes | None]
"""The members of a sample by suffix: the content, None if it was not read."""


def describe(members: Sequence[tuple[str, bytes | None]], asked: SampleLayout, names: Names) -> str:
    """Describe members that do not fit the layout `asked`, and propose options that would fit.

    members: (name, content) in the tar's order; None for content that was not read.
    """
    samples = _grouped(members, asked)
    counts = Counter(suffix for sample in samples for suffix in sample)
    parts = []
    for suffix, count in counts.most_common(MAX_LISTED):
        contents = [sample[suffix] for sample in samples if sample.get(suffix) is not None]
        listed = (
            ", ".join(name for name, _ in json_fields(_parsed(contents[0]))) if contents else ""
        )
        fields = f", with fields {listed[:200]}" if listed else ""
        parts.append(f".{suffix} ({count:,}{fields})")
    found = f"Found {', '.join(parts)}"
    if len(counts) > MAX_LISTED:
        found += f" and {len(counts) - MAX_LISTED:,} others"
    example = ", ".join(name for name, _ in members[: min(len(samples[0]), 4)]) if samples else ""
    found = printable(f"{found}, as in {example}")
    proposed = propose(members)
    if proposed is None and _find_image(samples):
        return (
            f"{found}: nothing there looks like a label. {names.label.strip(' =')} names a member"
            " that holds one, or a field of a JSON member (json:label). Images without labels, as"
            " img2dataset's with captions, can be sorted into class folders for `python -m"
            " data_prep.imagefolder`"
        )
    if proposed is None:
        return (
            f"{found}: nothing there looks like an image; {names.image.strip(' =')} names the"
            " member that holds it"
        )
    layout, needs_names = proposed
    options = [layout.as_options(names)]
    if needs_names and not asked.class_names:
        options.append(names.class_names)
    elif options == [asked.as_options(names)]:
        # The members are where they are looked for: their content was the problem, reported before.
        return found
    return f"{found}: try {printable(' '.join(filter(None, options)))}"


def propose(members: Sequence[tuple[str, bytes | None]]) -> tuple[SampleLayout, bool] | None:
    """Return a layout that fits all samples, and whether its labels are names; else None."""
    possible = []
    for keys_with_dots in (False, True):
        samples = _grouped(members, SampleLayout(keys_with_dots=keys_with_dots))
        image = _find_image(samples)
        label = _find_label(samples)
        if image and label:
            layout = SampleLayout(image if image != "default" else None, label[0], keys_with_dots)
            possible.append((layout, label[1]))
    usual = [found for found in possible if found[0].image is None and found[0].label == "cls"]
    return next(iter([*usual, *possible]), None)


def _grouped(members: Iterable[tuple[str, bytes | None]], layout: SampleLayout) -> list[Sample]:
    samples: list[Sample] = []
    key_before = None
    for name, content in members:
        if (cut := layout.cut(name)) is None:
            continue
        key, suffix = cut
        if key != key_before:
            samples.append({})
            key_before = key
        samples[-1][suffix] = content
    return samples


def _find_image(samples: Sequence[Mapping[str, Any]]) -> str | None:
    """Return `image` of a layout that finds one in each sample, "default" for None; else None."""
    if not samples:
        return None
    if all(sum(suffix in IMAGE_EXTENSIONS for suffix in sample) == 1 for sample in samples):
        return "default"
    common = set.intersection(*(set(sample) for sample in samples))
    for kinds in (IMAGE_EXTENSIONS, OTHER_IMAGES):
        suffixes = {suffix for sample in samples for suffix in sample}
        images = {suffix for suffix in suffixes if suffix.rpartition(".")[2] in kinds}
        if common & images:
            return min(common & images, key=lambda suffix: (_image_rank(suffix), suffix))
        if images and all(len(images & sample.keys()) == 1 for sample in samples):
            return ";".join(sorted(images)) if len(images) <= 4 else None
    return None


def _image_rank(suffix: str) -> int:
    """Return how likely a suffix is the image, 0 the likeliest."""
    stem, _, kind = suffix.rpartition(".")
    rank = IMAGE_EXTENSIONS.index(kind) if kind in IMAGE_EXTENSIONS else 5
    return rank if stem in IMAGE_WORDS else rank + 10


def _find_label(samples: Sequence[Sample]) -> tuple[str, bool] | None:
    """Return the likeliest `label` of a layout that is in each sample, and whether it is a name."""
    read = [sample for sample in samples if any(content is not None for content in sample.values())]
    if not read:
        return None
    ranked = []
    for suffix in set.intersection(*(set(sample) for sample in samples)):
        contents = [content for sample in read if (content := sample[suffix]) is not None]
        if len(contents) < len(read):
            continue
        values: dict[str, list[Any]] = {
            suffix: [content.decode("utf-8", "replace").strip() for content in contents]
        }
        parsed = [dict(json_fields(_parsed(content))) for content in contents]
        for field in parsed[0]:
            if all(field in fields for fields in parsed):
                values[f"{suffix}:{field}"] = [fields[field] for fields in parsed]
        for label, found in values.items():
            if (rank := _label_rank(label, found)) is not None:
                ranked.append((*rank, label))
    if not ranked:
        return None
    _, are_names, best = min(ranked)
    return best, are_names


def _label_rank(label: str, values: Sequence[Any]) -> tuple[int, bool] | None:
    """Return how likely values are labels, 0 the likeliest, and whether they are names.

    None: they are not labels.
    """
    words = re.split(r"[^a-z]+", label.lower())
    ranks = [LABEL_WORDS.index(word) for word in words if word in LABEL_WORDS]
    rank = min(ranks, default=len(LABEL_WORDS))
    num_distinct = len(set(map(str, values)))
    is_serial = num_distinct == len(values) >= 3 and rank >= LABEL_WORDS.index("index")
    if is_serial or (":" in label and not ranks):
        return None
    if all(as_integer(value) is not None for value in values):
        return rank, False
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= 60 or "\n" in value:
            return None
    is_caption = num_distinct in (1, len(values)) or any(len(text.split()) > 3 for text in values)
    if "{" in values[0] or (not ranks and is_caption):
        return None
    return rank, True


def _parsed(content: bytes | None) -> Any:
    try:
        return json.loads(content or b"")
    except ValueError:
        return None
