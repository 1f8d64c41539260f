"""Which files of a tar make a sample, and which of them are its image and its label. Free of torch.

The data's story: a member's name is cut into a key and a suffix, members of one key in a row make a
sample, and a layout says which suffix is the image and where the label stands: in a text member,
or in a field of a JSON member. Both readers, at random and streaming, take samples by it. Where
samples do not fit, what was found is told once, with the layout that would take it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from vit.data.shards.records import SIDECAR, check_types
from vit.system.files import ShardError, read_json

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
"""Suffixes that are taken for an image where none is named."""
KEY_AND_EXT = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
"""webdataset's own rule (tariterators.base_plus_ext): the suffix begins at the first dot after the
last slash."""
DOTTED_KEY_AND_EXT = re.compile(r"((?:.*/|)[^./][^/]*)[.]([^./]+)")
"""The suffix begins at the last dot."""
META = re.compile(r"__[^/]*__($|/)")
"""What webdataset passes over: its own notes."""
INTEGER = re.compile(r"-?[0-9]{1,9}")


class InvalidSample(ValueError):
    """A sample that a layout does not take; its text does not name the sample."""

    def __init__(self, kind: str, text: str):
        """kind: what is alike in samples that are told together."""
        super().__init__(text)
        self.kind = kind


class Names(NamedTuple):
    """How a user gives a layout: what stands in front of each value."""

    image: str
    label: str
    keys_with_dots: str
    class_names: str


FLAGS = Names("--image ", "--label ", "--keys-with-dots", "--classes names.txt")
SETTINGS = Names(
    "data.stream_image=",
    "data.stream_label=",
    "data.stream_keys_with_dots=true",
    "and class names in data.root's _info.json (python -m data_prep.index ROOT --classes"
    " names.txt)",
)


@dataclass(frozen=True)
class SampleLayout:
    """Where image and label of a sample are. The default is what `data_prep` and most tools write.

    image: suffix of the image's member, or several joined by `;` of which each sample has one;
    None: IMAGE_EXTENSIONS. label: suffix of a text member, or `<suffix>:<field>` of a JSON member,
    with dots for fields in fields. class_names: in the order of labels, for labels that are names.
    """

    image: str | None = None
    label: str = "cls"
    keys_with_dots: bool = False
    """A key ends at the last dot of the name, not at the first."""
    class_names: tuple[str, ...] = ()

    @classmethod
    def recorded(cls, options: Mapping[str, Any], class_names: Sequence[str]) -> SampleLayout:
        """The layout whose `options` were these. class_names: those of the data set."""
        own = {key: options[key] for key in ("image", "label", "keys_with_dots") if key in options}
        return cls(**own, class_names=tuple(class_names) if "class_names_sha256" in options else ())

    def options(self) -> dict[str, Any]:
        """JSON values to record: what differs from the default; of the class names their sha256."""
        plain = {field.name: field.default for field in fields(self)}
        options = {key: value for key, value in asdict(self).items() if value != plain[key]}
        if options.pop("class_names", None):
            listed = json.dumps(list(self.class_names)).encode()
            options["class_names_sha256"] = hashlib.sha256(listed).hexdigest()
        return options

    def problems(self, names: Names) -> list[str]:
        """What is wrong with the values themselves, called by `names`."""
        found = []
        values = [(names.image, suffix) for suffix in self.image_suffixes]
        for name, suffix in [*values, (names.label, self.label_suffix)]:
            if not suffix or "/" in suffix or suffix.startswith("."):
                found.append(
                    f"{name}{suffix}: expected what follows the key's dot, as jpg or json:label"
                )
            elif self.keys_with_dots and "." in suffix:
                last = suffix.rpartition(".")[2]
                found.append(
                    f"{name}{suffix}: with {names.keys_with_dots} a suffix has no dot, as {last}"
                )
        if self.label.endswith(":"):
            found.append(
                f"{names.label}{self.label}: no field behind the colon, expected json:label"
            )
        if self.image is not None and self.label in self.image_suffixes:
            found.append(f"{names.image}{self.image} and {names.label}{self.label}: two members")
        return found

    def told(self, names: Names) -> str:
        """The layout as a user gives it in a shell; "" for the default."""
        parts = [f"{names.image}{shlex.quote(self.image)}"] if self.image is not None else []
        parts += [f"{names.label}{shlex.quote(self.label)}"] if self.label != "cls" else []
        parts += [names.keys_with_dots] if self.keys_with_dots else []
        return " ".join(parts)

    @cached_property
    def image_suffixes(self) -> tuple[str, ...]:
        """Lower case; one of them is in each sample."""
        return IMAGE_EXTENSIONS if self.image is None else tuple(self.image.lower().split(";"))

    @cached_property
    def label_suffix(self) -> str:
        """Lower case."""
        return self.label.partition(":")[0].lower()

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.class_names)}

    def cut(self, name: str) -> tuple[str, str] | None:
        """(key, suffix in lower case) of a member; None for what belongs to no sample."""
        rule = DOTTED_KEY_AND_EXT if self.keys_with_dots else KEY_AND_EXT
        found = rule.fullmatch(name)
        return (found[1], found[2].lower()) if found and not META.match(name) else None

    def find(self, suffixes: Sequence[str]) -> str:
        """Of a sample's suffixes that of the image; the label's is there. Raises InvalidSample."""
        images = [suffix for suffix in suffixes if suffix in self.image_suffixes]
        has_label = self.label_suffix in suffixes
        is_twice = len(set(suffixes)) < len(suffixes)
        if len(images) == 1 and has_label and not is_twice:
            return images[0]
        members = printable(f"its members: {', '.join(suffixes)}")
        if is_twice:
            raise InvalidSample(
                "twice", f"has an extension twice, or two samples have this key ({members})"
            )
        problems = []
        if len(images) != 1:
            wanted = f"expected one of {', '.join(self.image_suffixes)}"
            problems.append(f"{len(images) or 'no'} images ({members}; {wanted})")
        if not has_label:
            more = "" if problems else f" ({members})"
            problems.append(f"no .{self.label_suffix} with the label{more}")
        raise InvalidSample("members", f"has {' and '.join(problems)}")

    def label_of(self, data: bytes) -> int:
        """The label in the label's member. Raises InvalidSample."""
        suffix, colon, field = self.label.partition(":")
        if not colon:
            value: Any = data.decode("utf-8-sig", "replace")
        else:
            try:
                content = json.loads(data)
            except ValueError as error:
                raise InvalidSample("JSON", f"has a .{suffix} that is no JSON ({error})") from error
            value = _look_up(content, field)
            if value is _ABSENT:
                there = ", ".join(name for name, _ in _leaves(content)) or repr(content)[:40]
                raise InvalidSample(
                    "field",
                    f"has no field {field!r} in its .{suffix} (there: {printable(there[:200])})",
                )
        number = _integer(value)
        if number is not None and number >= 0:
            return number
        text = value.strip() if isinstance(value, str) else repr(value)
        if isinstance(value, str) and text in self._numbers:
            return self._numbers[text]
        wanted = (
            f"one of the {len(self.class_names):,} class names"
            if self.class_names
            else "an integer"
            if number is None
            else "an integer from 0"
        )
        raise InvalidSample("label", f"has the label {text[:40]!r}; expected {wanted}")


_ABSENT = object()


def _look_up(content: Any, field: str) -> Any:
    """The value at `field`; a name with dots is tried as it stands, then as a path."""
    for name in (field, *(field[:at] for at, letter in enumerate(field) if letter == ".")):
        if isinstance(content, dict) and name in content:
            found = content[name]
        elif isinstance(content, list) and name.isdecimal() and int(name) < len(content):
            found = content[int(name)]
        else:
            continue
        return found if name == field else _look_up(found, field[len(name) + 1 :])
    return _ABSENT


def _leaves(content: Any, path: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    """(path, value) of the fields in a JSON object."""
    for name, value in content.items() if isinstance(content, dict) and depth else ():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.", depth - 1)
        else:
            yield f"{path}{name}", value


def _integer(value: Any) -> int | None:
    """A label that is a number, be it as text; 3.0 is one, as tables with gaps are exported so."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip() if isinstance(value, (int, str)) else ""
    return int(text) if INTEGER.fullmatch(text) else None


def recorded_layout(info: Mapping[str, Any], first_tar: Path | None = None) -> SampleLayout:
    """Where image and label of a sample are, as `data_prep.index` recorded it.

    It did in its `_info.json`; beside one of others, which it leaves alone, in the sidecar of
    `first_tar`.
    """
    options = info.get("options") if info.get("source") == "index" else None
    if options is None and first_tar is not None and "source" not in info:
        try:
            sidecar = read_json(first_tar.with_suffix(".json")) or {}
            check_types(sidecar, SIDECAR, first_tar.with_suffix(".json"))
            options = sidecar.get("members")
        except ShardError:  # whatever lies there is none of ours
            options = None
    return SampleLayout.recorded(options or {}, info.get("class_names") or [])


# ---- what was found in place of what is wanted ---------------------------------------------------

MOST_READ = 100
"""Samples whose small members are looked at to propose a layout."""
MOST_BYTES = 64 << 10
"""Of a member that may hold a label."""
LABEL_WORDS = ("cls", "label", "labels", "class", "target", "category", "index", "y", "id")
"""Names under which labels go, the likeliest first."""
OTHER_IMAGES = ("bmp", "gif", "tif", "tiff", "avif", "img", "image")
"""Suffixes of images that are taken if they are asked for."""


def describe(members: Sequence[tuple[str, bytes | None]], asked: SampleLayout, names: Names) -> str:
    """What these members are, and what should be given for them to be taken, if that can be told.

    members: (name, content) in the tar's order; None for what was not read.
    """
    samples = _grouped(members, asked)
    proposed = propose(members)
    counts = Counter(suffix for sample in samples for suffix in sample)
    parts = []
    for suffix, count in counts.most_common(6):
        contents = (sample.get(suffix) for sample in samples)
        first = next((content for content in contents if content is not None), b"")
        listed = ", ".join(name for name, _ in _leaves(_parsed(first)))
        shown = f", with fields {listed[:200]}" if listed else ""
        parts.append(f".{suffix} ({count:,}{shown})")
    more = f" and {len(counts) - 6:,} others" if len(counts) > 6 else ""
    example = ", ".join(name for name, _ in members[: min(len(samples[0]), 4)]) if samples else ""
    told = printable(f"Found {', '.join(parts)}{more}, as in {example}")
    if proposed is None and _image_in(samples):
        return (
            f"{told}: nothing there looks like a label. {names.label.strip(' =')} names a member"
            " that holds one, or a field of a JSON member (json:label). Images without labels, as"
            " img2dataset's with captions, can be sorted into class folders for `python -m"
            " data_prep.imagefolder`"
        )
    if proposed is None:
        return (
            f"{told}: nothing there looks like an image; {names.image.strip(' =')} names the member"
            " that holds it"
        )
    layout, needs_names = proposed
    if layout.told(names) == asked.told(names) and (asked.class_names or not needs_names):
        return told  # members are where they are looked for; what they hold is told before
    remedy = " ".join(
        filter(
            None,
            [
                layout.told(names),
                names.class_names if needs_names and not asked.class_names else "",
            ],
        )
    )
    return f"{told}: try {printable(remedy)}"


def propose(members: Sequence[tuple[str, bytes | None]]) -> tuple[SampleLayout, bool] | None:
    """A layout that takes all samples, as far as they were read; whether it needs class names."""
    possible = []
    for with_dots in (False, True):
        samples = _grouped(members, SampleLayout(keys_with_dots=with_dots))
        image = _image_in(samples)
        label = _label_in(samples)
        if image and label:
            layout = SampleLayout(image if image != "default" else None, label[0], with_dots)
            possible.append((layout, label[1]))
    plain = [found for found in possible if found[0].image is None and found[0].label == "cls"]
    return next(iter([*plain, *possible]), None)


def printable(text: str) -> str:
    """`text` with escapes for whatever could confuse a terminal: names come from foreign tars."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _grouped(
    members: Iterable[tuple[str, bytes | None]], layout: SampleLayout
) -> list[dict[str, bytes | None]]:
    samples: list[dict[str, bytes | None]] = []
    before = None
    for name, content in members:
        if (cut := layout.cut(name)) is None:
            continue
        key, suffix = cut
        if key != before:
            samples.append({})
        before = key
        samples[-1][suffix] = content
    return samples


def _image_in(samples: Sequence[Mapping[str, Any]]) -> str | None:
    """`image` of a layout that finds one in each sample, "default" for None; None: there is
    none."""
    if not samples:
        return None
    if all(sum(suffix in IMAGE_EXTENSIONS for suffix in sample) == 1 for sample in samples):
        return "default"
    common = set.intersection(*(set(sample) for sample in samples))
    for kinds in (IMAGE_EXTENSIONS, OTHER_IMAGES):
        either = {
            suffix for sample in samples for suffix in sample if suffix.rpartition(".")[2] in kinds
        }
        if common & either:
            return min(common & either, key=lambda suffix: (_rank_of_image(suffix), suffix))
        if either and all(sum(suffix in either for suffix in sample) == 1 for sample in samples):
            return ";".join(sorted(either)) if len(either) <= 4 else None
    return None


def _rank_of_image(suffix: str) -> int:
    stem, _, kind = suffix.rpartition(".")
    plain = 0 if stem in ("", "image", "img", "input", "photo", "rgb") else 10
    return plain + (IMAGE_EXTENSIONS.index(kind) if kind in IMAGE_EXTENSIONS else 5)


def _label_in(samples: Sequence[Mapping[str, bytes | None]]) -> tuple[str, bool] | None:
    """(`label` of a layout, whether its labels are names) that is in each sample, the likeliest."""
    if not samples:
        return None
    values: dict[str, list[Any]] = {}
    read = [sample for sample in samples if any(content is not None for content in sample.values())]
    for suffix in set.intersection(*(set(sample) for sample in samples)):
        contents = [sample[suffix] for sample in read]
        if not contents or any(content is None for content in contents):
            continue
        values[suffix] = [
            content.decode("utf-8", "replace").strip()
            for content in contents
            if content is not None
        ]
        parsed = [dict(_leaves(_parsed(content or b""))) for content in contents]
        for field in parsed[0]:
            if all(field in found for found in parsed):
                values[f"{suffix}:{field}"] = [found[field] for found in parsed]
    ranked = []
    for label, found in values.items():
        rank = _rank_of_label(label, found)
        if rank is not None:
            ranked.append((*rank, label))
    if not ranked:
        return None
    _, are_names, best = min(ranked)
    return best, are_names


def _rank_of_label(label: str, values: Sequence[Any]) -> tuple[int, bool] | None:
    """How likely these values are labels, 0 the likeliest, and whether as names; None: not at
    all."""
    words = re.split(r"[^a-z]+", label.lower())
    ranks = [LABEL_WORDS.index(word) for word in words if word in LABEL_WORDS]
    rank = min(ranks, default=len(LABEL_WORDS))
    distinct = len(set(map(str, values)))
    is_number = distinct == len(values) >= 3 and rank >= LABEL_WORDS.index("index")
    if is_number or (":" in label and not ranks):
        return None
    if all(_integer(value) is not None for value in values):
        return rank, False
    if not all(
        isinstance(value, str) and 0 < len(value) <= 60 and "\n" not in value for value in values
    ):
        return None
    is_caption = not 1 < distinct < len(values) or any(len(value.split()) > 3 for value in values)
    if "{" in values[0] or (not ranks and is_caption):
        return None
    return rank, True


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
