"""Which members of a tar make a sample, and which of them are its image and its label.

A member's name is cut into a key and a suffix; consecutive members with one key make a sample. A
layout says which suffix is the image and where the label is: in a text member, or in a field of a
JSON member. Reading at random and streaming share it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from vit.config.sample_layout import (
    IMAGE_EXTENSIONS,
    NO_LABEL,
    Names,
    image_suffixes,
    layout_problems,
)
from vit.data.shards.info_file import SIDECAR, check_types
from vit.system.files import ShardError, read_json

MORE_IMAGES = (*IMAGE_EXTENSIONS, "bmp", "gif", "tif", "tiff", "avif")
"""Suffixes of what may be the image, if a layout names it."""
LABEL_WORDS = {"cls", "label", "class", "y"}
"""Names of members and of fields that hold a label."""
MAX_LABEL_BYTES = 64 << 10
"""Read of a member in search of a label."""
KEY_AND_EXT = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
"""webdataset's rule (tariterators.base_plus_ext): the suffix begins at the first dot after the last
slash."""
DOTTED_KEY_AND_EXT = re.compile(r"((?:.*/|)[^./][^/]*)[.]([^./]+)")
"""The suffix begins at the last dot."""
META = re.compile(r"__[^/]*__($|/)")
"""webdataset's own metadata, which belong to no sample."""
INTEGER = re.compile(r"-?[0-9]{1,9}")


class InvalidSample(ValueError):
    """A sample that does not fit a layout; the text does not name the sample."""


FLAGS = Names("--image ", "--label ", "--keys-with-dots", "--classes names.txt")


@dataclass(frozen=True)
class SampleLayout:
    """Where image and label of a sample are; the default is what most tools write.

    image: suffix of the image, or several joined by `;` of which each sample has one; None: one of
        IMAGE_EXTENSIONS.
    label: suffix of a text member, or `<suffix>:<field>` of a JSON member, with dots for nested
        fields, or NO_LABEL.
    keys_with_dots: a key ends at the last dot of the name instead of the first.
    class_names: for labels that are names, in the order of labels.
    """

    image: str | None = None
    label: str = "cls"
    keys_with_dots: bool = False
    class_names: tuple[str, ...] = ()

    @classmethod
    def recorded(cls, options: Mapping[str, Any], class_names: Sequence[str]) -> SampleLayout:
        """Return the layout with these `options()`. class_names: those of the data set."""
        own = {key: options[key] for key in ("image", "label", "keys_with_dots") if key in options}
        return cls(**own, class_names=tuple(class_names) if "class_names_sha256" in options else ())

    def options(self) -> dict[str, Any]:
        """Return the values that differ from the default, for JSON; class names as their sha256."""
        defaults = {field.name: field.default for field in fields(self)}
        options = {key: value for key, value in asdict(self).items() if value != defaults[key]}
        if options.pop("class_names", None):
            listed = json.dumps(list(self.class_names)).encode()
            options["class_names_sha256"] = hashlib.sha256(listed).hexdigest()
        return options

    def problems(self, names: Names) -> list[str]:
        """Return what is wrong with the values themselves."""
        return layout_problems(self.image, self.label, self.keys_with_dots, names)

    @cached_property
    def image_suffixes(self) -> tuple[str, ...]:
        """In lower case; each sample has one of them."""
        return image_suffixes(self.image)

    @cached_property
    def label_suffix(self) -> str:
        """In lower case."""
        return self.label.partition(":")[0].lower()

    @cached_property
    def _labels(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.class_names)}

    def cut(self, name: str) -> tuple[str, str] | None:
        """Return (key, lower-case suffix) of a member; None if it belongs to no sample."""
        rule = DOTTED_KEY_AND_EXT if self.keys_with_dots else KEY_AND_EXT
        found = rule.fullmatch(name)
        return (found[1], found[2].lower()) if found and not META.match(name) else None

    def find(self, suffixes: Sequence[str]) -> str:
        """Return the suffix of the image among a sample's suffixes.

        Raises InvalidSample, also if the label is missing.
        """
        images = [suffix for suffix in suffixes if suffix in self.image_suffixes]
        has_label = self.label == NO_LABEL or self.label_suffix in suffixes
        is_unique = len(set(suffixes)) == len(suffixes)
        if len(images) == 1 and has_label and is_unique:
            return images[0]
        members = printable(f"its members: {', '.join(suffixes)}")
        if not is_unique:
            raise InvalidSample(f"has an extension twice, or two samples have this key ({members})")
        problems = []
        if len(images) != 1:
            expected = f"expected one of {', '.join(self.image_suffixes)}"
            problems.append(f"{len(images) or 'no'} images ({members}; {expected})")
        if not has_label:
            detail = "" if problems else f" ({members})"
            problems.append(f"no .{self.label_suffix} with the label{detail}")
        raise InvalidSample(f"has {' and '.join(problems)}")

    def label_of(self, data: bytes) -> int:
        """Return the label in the content of its member. Raises InvalidSample."""
        suffix, colon, field = self.label.partition(":")
        value: Any
        if colon:
            value = _json_field(data, suffix, field)
        else:
            value = data.decode("utf-8-sig", "replace")
        number = as_integer(value)
        if number is not None and number >= 0:
            return number
        text = value.strip() if isinstance(value, str) else repr(value)
        if isinstance(value, str) and text in self._labels:
            return self._labels[text]
        expected = "an integer" if number is None else "an integer from 0"
        if self.class_names:
            expected = f"one of the {len(self.class_names):,} class names"
        raise InvalidSample(f"has the label {text[:40]!r}; expected {expected}")


def recorded_layout(info: Mapping[str, Any], first_tar: Path | None = None) -> SampleLayout:
    """Return where image and label of a sample are, as `data_prep.index` has recorded it.

    It and the writers record the layout in their own `_info.json`; it does so in the sidecar of
    `first_tar` next to another program's `_info.json`, which it does not change.
    """
    options = info.get("options") if "source" in info else None
    if options is None and first_tar is not None and "source" not in info:
        path = first_tar.with_suffix(".json")
        try:
            sidecar = read_json(path) or {}
            check_types(sidecar, SIDECAR, path)
            options = sidecar.get("members")
        except ShardError:  # a file of another program
            options = None
    return SampleLayout.recorded(options or {}, info.get("class_names") or [])


def remedy(members: Mapping[str, bytes], asked: SampleLayout, names: Names) -> str:
    """Return what to do about a sample that does not fit, as the end of a sentence.

    members: the sample's, by suffix. With one image and one possible label the options are told
    that would take them: of members and fields named in LABEL_WORDS, else of integers and classes.
    """
    told = ""
    values: dict[str, Any] = {}
    images = [suffix for suffix in members if suffix.rpartition(".")[2] in MORE_IMAGES]
    for suffix in (suffix for suffix in members if suffix not in images):
        content = _parsed(members[suffix][:MAX_LABEL_BYTES])
        if isinstance(content, dict) and content:
            told += f"; its .{suffix} has the fields {printable(', '.join(content)[:200])}"
            values |= {f"{suffix}:{field}": value for field, value in content.items()}
        else:
            values[suffix] = members[suffix][:MAX_LABEL_BYTES].decode("utf-8-sig", "replace")
    known = {
        label
        for label, value in values.items()
        if as_integer(value) is not None or str(value).strip() in asked.class_names
    }
    texts = {label for label, value in values.items() if isinstance(value, str) and value.strip()}
    named = {label for label in values if LABEL_WORDS & set(re.split("[.:]", label))}
    labels = named & (known | texts) or known
    if len(images) == len(members) == 1 and names is FLAGS:
        return f"; if no sample has a label, try {names.label}{NO_LABEL}"
    if len(images) == len(labels) == 1:
        [image] = images
        [label] = labels
        start = image[: image.rfind(".") + 1]
        has_dots = start != "" and label.startswith(start)  # a.1.jpg, a.1.cls
        found = [text.removeprefix(start if has_dots else "") for text in (image, label)]
        options = [
            f"{names.image}{shlex.quote(found[0])}" * (found[0] not in asked.image_suffixes),
            f"{names.label}{shlex.quote(found[1])}" * (found[1] != asked.label),
            names.keys_with_dots * has_dots,
            names.class_names * (label not in known and not asked.class_names),
        ]
        if any(options):
            return f"{told}; try {printable(' '.join(filter(None, options)))}"
    return (
        f"{told}. Mend such samples, move the shard away, or describe others by"
        f" {names.image}SUFFIX, {names.label}SUFFIX or SUFFIX:FIELD (of JSON),"
        f" {names.keys_with_dots}, and labels that are names by {names.class_names}"
    )


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


# ---- values in members ---------------------------------------------------------------------------

_ABSENT = object()


def _json_field(data: bytes, suffix: str, field: str) -> Any:
    """Return a field of a JSON member. Raises InvalidSample."""
    try:
        content = json.loads(data)
    except ValueError as error:
        raise InvalidSample(f"has a .{suffix} that is no JSON ({error})") from error
    value = _look_up(content, field)
    if value is _ABSENT:
        found = ", ".join(content) if isinstance(content, dict) else repr(content)
        raise InvalidSample(
            f"has no field {field!r} in its .{suffix} (there: {printable(found[:200])})"
        )
    return value


def _look_up(content: Any, field: str) -> Any:
    """Return the value at `field`; a name with dots is tried as it is, then as a path."""
    for name in (field, *(field[:at] for at, letter in enumerate(field) if letter == ".")):
        if isinstance(content, dict) and name in content:
            found = content[name]
        elif isinstance(content, list) and name.isdecimal() and int(name) < len(content):
            found = content[int(name)]
        else:
            continue
        return found if name == field else _look_up(found, field[len(name) + 1 :])
    return _ABSENT


def as_integer(value: Any) -> int | None:
    """Return a label that is a number or its text; tables with gaps are exported with 3.0 for 3."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    text = str(value).strip()
    return int(text) if INTEGER.fullmatch(text) else None


def printable(text: str) -> str:
    """Escape what could confuse a terminal: names come from other people's tars."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
