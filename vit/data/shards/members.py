"""Group the members of a tar into samples, and find the image and label of each sample.

A member's name consists of a key and a suffix. Consecutive members with the same key form a sample.
A layout specifies the image suffix and the source of the label, which is a text member or a field
of a JSON member. Random access and streaming use the same layouts.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from vit.config.sample_layout import IMAGE_EXTENSIONS, NO_LABEL, SETTINGS, Names, image_suffixes
from vit.data.shards.info_file import SIDECAR, check_types
from vit.system.files import ShardError, read_json
from vit.system.redact import escape_to_one_line
from vit.system.spelling import few

MORE_IMAGES = (*IMAGE_EXTENSIONS, "bmp", "gif", "tif", "tiff", "avif")
"""The suffixes that a layout may specify for the image."""
LABEL_WORDS = {"cls", "label", "class", "y"}
"""Common names of members and fields that contain a label."""
MAX_LABEL_BYTES = 64 << 10
"""The maximum number of bytes of a member to search for a label."""

KEY_AND_EXT = re.compile(r"(?P<key>(?:.*/|)[^.]+)[.](?P<ext>[^/]*)")
"""webdataset's rule for suffixes (tariterators.base_plus_ext), which begin at the first dot after
the last slash."""
DOTTED_KEY_AND_EXT = re.compile(r"(?P<key>(?:.*/|)[^./][^/]*)[.](?P<ext>[^./]+)")
"""The rule for keys that contain dots: the suffix begins at the last dot."""
META = re.compile(r"__[^/]*__($|/)")
"""Names of webdataset's metadata members, which do not belong to a sample."""
INTEGER = re.compile(r"-?[0-9]{1,9}")


class InvalidSample(ValueError):
    """The error for a sample that does not match the layout. The message lacks the sample's
    name."""


FLAGS = Names("--image ", "--label ", "--keys-with-dots", "--classes names.txt")


@dataclass(frozen=True)
class SampleLayout:
    """The members that contain the image and label of a sample. The defaults match most tools."""

    image: str | None = None
    """The suffix of the image, or several suffixes joined by `;`. Each sample has exactly one of
    them. None means IMAGE_EXTENSIONS."""
    label: str = "cls"
    """The suffix of a text member, or `<suffix>:<field>` of a JSON member (with dots for nested
    fields), or NO_LABEL."""
    keys_with_dots: bool = False
    """Whether a key ends at the last dot of the name instead of the first."""
    class_names: tuple[str, ...] = ()
    """The names of the classes in label order, if labels are names."""

    @classmethod
    def recorded(cls, options: Mapping[str, Any], class_names: Sequence[str]) -> Self:
        """Return the layout with these `options()`. class_names: the data set's class names."""
        values = {
            key: options[key] for key in ("image", "label", "keys_with_dots") if key in options
        }
        names = tuple(class_names) if "class_names_sha256" in options else ()
        return cls(**values, class_names=names)

    def options(self) -> dict[str, Any]:
        """Return the non-default values for JSON, with the sha256 of the class names in place of
        the names."""
        defaults = {field.name: field.default for field in fields(self)}
        options = {key: value for key, value in asdict(self).items() if value != defaults[key]}
        if options.pop("class_names", None):
            listed = json.dumps(list(self.class_names)).encode()
            options["class_names_sha256"] = hashlib.sha256(listed).hexdigest()
        return options

    @cached_property
    def image_suffixes(self) -> tuple[str, ...]:
        """The lowercase suffixes of images. Each sample has exactly one of them."""
        return image_suffixes(self.image)

    @cached_property
    def label_suffix(self) -> str:
        """The lowercase suffix of the member that contains the label."""
        return self.label.partition(":")[0].lower()

    @cached_property
    def _labels(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.class_names)}

    def cut(self, name: str) -> tuple[str, str] | None:
        """Return (key, lowercase suffix) of a member, or None if it does not belong to a sample."""
        rule = DOTTED_KEY_AND_EXT if self.keys_with_dots else KEY_AND_EXT
        match = rule.fullmatch(name)
        return (match["key"], match["ext"].lower()) if match and not META.match(name) else None

    def find(self, suffixes: Sequence[str]) -> str:
        """Return the image suffix from the suffixes of a sample.

        Raises InvalidSample if image or label is missing or ambiguous.
        """
        images = [suffix for suffix in suffixes if suffix in self.image_suffixes]
        has_label = self.label == NO_LABEL or self.label_suffix in suffixes
        is_unique = len(set(suffixes)) == len(suffixes)
        is_valid = len(images) == 1 and has_label and is_unique
        if is_valid:
            return images[0]

        members = escape_to_one_line(f"its members: {few(suffixes, 8)}")
        if not is_unique:
            raise InvalidSample(
                "has two members with the same extension, or shares its key with another sample"
                f" ({members})"
            )

        problems = []
        if len(images) != 1:
            problems.append(
                f"{len(images) or 'no'} images ({members}; expected one of"
                f" {', '.join(self.image_suffixes)})"
            )
        if not has_label:
            detail = "" if problems else f" ({members})"
            problems.append(f"no .{self.label_suffix} with the label{detail}")
        raise InvalidSample(f"has {' and '.join(problems)}")

    def label_of(self, data: bytes) -> int:
        """Return the label from the content of a label member. Raises InvalidSample."""
        suffix, colon, field = self.label.partition(":")
        plain = data.decode("utf-8-sig", "replace")
        value: object = _json_field(data, suffix, field) if colon else plain
        number = as_integer(value)
        if number is not None and number >= 0:
            return number

        if isinstance(value, list):
            raise InvalidSample(
                f"has several labels ({str(value)[:40]}); vitline trains with one class per image"
            )

        text = value.strip() if isinstance(value, str) else repr(value)
        if isinstance(value, str) and text in self._labels:
            return self._labels[text]

        if self.class_names:
            expected = f"one of the {len(self.class_names):,} class names"
        else:
            expected = "an integer" if number is None else "an integer from 0"
        raise InvalidSample(f"has the label {text[:40]!r}; expected {expected}")


def recorded_layout(info: Mapping[str, Any], first_tar: Path | None = None) -> SampleLayout:
    """Return the layout that `data_prep.index` has recorded.

    The layout is recorded in `_info.json`, or in the sidecar of `first_tar` if another program
    wrote `_info.json`.
    """
    options = None
    if "source" in info:
        options = info.get("options")
    elif first_tar is not None:
        path = first_tar.with_suffix(".json")
        with suppress(ShardError):  # written by another program
            sidecar = read_json(path) or {}
            check_types(sidecar, SIDECAR, path)
            options = sidecar.get("members")
    return SampleLayout.recorded(options or {}, info.get("class_names") or [])


def remedy(members: Mapping[str, bytes], layout: SampleLayout, names: Names) -> str:
    """Return advice about a sample that does not match a layout, worded to complete a sentence.

    members: maps suffixes to the content of the sample's members. If there is one image and one
    possible label, the advice lists the options that would accept them.
    """
    fields_note = ""
    values: dict[str, Any] = {}
    images = [suffix for suffix in members if suffix.rpartition(".")[2] in MORE_IMAGES]
    for suffix, data in members.items():
        if suffix in images:
            continue
        content = _parsed(data[:MAX_LABEL_BYTES])
        if isinstance(content, dict) and content:
            field_names = escape_to_one_line(", ".join(content)[:200])
            fields_note += f"; its .{suffix} has the fields {field_names}"
            values |= {f"{suffix}:{field}": value for field, value in content.items()}
        else:
            values[suffix] = data[:MAX_LABEL_BYTES].decode("utf-8-sig", "replace")

    labels, valid_labels = _possible_labels(values, layout.class_names)
    if len(images) == len(members) == 1 and names is FLAGS:
        return (
            "; if folders or tars are named after their classes, write shards with `python -m"
            f" data_prep.imagefolder`; if no sample has a label, try {names.label}{NO_LABEL}"
        )

    if len(images) == len(labels) == 1:
        [label] = labels
        options = _options_for(images[0], label, label in valid_labels, layout, names)
        if options:
            return f"{fields_note}; try {escape_to_one_line(' '.join(options))}"

    if len(images) > 1 and all("." in suffix for suffix in members):
        return f"; their names contain dots: try {names.keys_with_dots}"
    return (
        f"{fields_note}. Repair such samples, move the shard away, or describe other layouts with"
        f" {names.image}SUFFIX, {names.label}SUFFIX or SUFFIX:FIELD (of JSON),"
        f" {names.keys_with_dots}, and labels that are names with {names.class_names}"
    )


def _possible_labels(
    values: Mapping[str, Any], class_names: Sequence[str]
) -> tuple[set[str], set[str]]:
    """Return which of `values` may be the label, and which are valid labels.

    A valid label is an integer or a class name. Possible labels are members and fields named in
    LABEL_WORDS or, if there are none, all valid labels.
    """
    valid_labels = {
        label
        for label, value in values.items()
        if as_integer(value) is not None or str(value).strip() in class_names
    }
    nonempty = {
        label for label, value in values.items() if isinstance(value, str) and value.strip()
    }
    named = {label for label in values if LABEL_WORDS & set(re.split("[.:]", label))}
    return named & (valid_labels | nonempty) or valid_labels, valid_labels


def _options_for(
    image: str, label: str, is_valid_label: bool, layout: SampleLayout, names: Names
) -> list[str]:
    """Return the options that make `layout` accept the suffixes `image` and `label`."""
    prefix = image[: image.rfind(".") + 1]
    has_dots = prefix != "" and label.startswith(prefix)  # for example a.1.jpg, a.1.cls
    if has_dots:
        image, label = image.removeprefix(prefix), label.removeprefix(prefix)
        if names is SETTINGS:
            return [names.keys_with_dots]

    options = []
    if image not in layout.image_suffixes:
        options.append(f"{names.image}{shlex.quote(image)}")
    if label != layout.label:
        options.append(f"{names.label}{shlex.quote(label)}")
    if has_dots:
        options.append(names.keys_with_dots)
    if not is_valid_label and not layout.class_names:
        options.append(names.class_names)
    return options


def _parsed(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


# ---- values in members ---------------------------------------------------------------------------

_ABSENT = object()


def _json_field(data: bytes, suffix: str, field: str) -> object:
    """Return the value of a JSON field, such as `label` or `annotation.label`."""
    try:
        content = json.loads(data)
    except ValueError as error:
        raise InvalidSample(f"has a .{suffix} that is not valid JSON ({error})") from error

    # First try a name with dots as a single name, then as a path.
    is_name = isinstance(content, dict) and field in content
    path = [field] if is_name else field.split(".")
    value = content
    for name in path:
        value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
    if value is _ABSENT:
        fields_text = ", ".join(content) if isinstance(content, dict) else repr(content)
        raise InvalidSample(
            f"has no field {field!r} in its .{suffix} (its fields:"
            f" {escape_to_one_line(fields_text[:200])})"
        )
    return value


def as_integer(value: object) -> int | None:
    """Return the label if it is an integer or the text of an integer, else None.

    Accepts 3.0, because tables with missing values are often exported with 3.0 instead of 3.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    text = str(value).strip()
    return int(text) if INTEGER.fullmatch(text) else None
