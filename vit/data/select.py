"""Which samples of a split are trained on: excluded keys and classes, a filter over the index, a
share or so many of each class. No torch.

The data's story: rows of the index pass in pieces; what is excluded or does not pass the filter
goes; of the rest those with the smallest hash of (subset seed, sample number) are taken, of all or
of each class, so that a smaller subset is a part of a larger one. What is left are the numbers of
samples in ascending order, so that neighbours in the shards stay neighbours; shards and index stay
as they are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.data.order import fold
from vit.data.row_filter import RowFilter
from vit.data.shards.split import Split
from vit.data.storage.cached_tars import CachedTars
from vit.data.storage.remote import RemoteFolder
from vit.system.files import ShardError

PIECE = 1 << 20
"""Rows that are looked at at once."""
MOST_NAMED = 3


@dataclass(frozen=True)
class Wanted:
    """What is asked for; the fields are those of `vit.sections.Selection`, `name` is what the settings
    are called in errors ("data.")."""

    name: str = "data."
    exclude: str | None = None
    filter: str | None = None
    fraction: float | None = None
    fraction_of: str = "all"
    samples_per_class: int | None = None
    subset_seed: int = 0


@dataclass(frozen=True)
class Chosen:
    """Samples of a split."""

    num_samples: int
    numbers: NDArray[np.integer] | None = field(repr=False, compare=False)
    """(num_samples,) ascending; None: all of the split."""
    summary: str
    """In words: how many of how many, and what the others were left out by; "" where nothing was
    asked for."""
    identity: str
    """Number and hash of `numbers`; "" where all are taken."""


def choose(split: Split, wanted: Wanted) -> Chosen:
    """The samples of `split` that are `wanted`. Raises ShardError if nothing is left, and for what
    the settings name and is not there."""
    total = split.num_samples
    if wanted == Wanted(wanted.name):
        return Chosen(total, None, "", "")
    is_left = np.ones(total, np.bool_)
    parts: list[str] = []

    def leave_out(keep: NDArray[np.bool_], start: int) -> int:
        part = is_left[start : start + len(keep)]
        gone = int((part & ~keep).sum())
        part &= keep
        return gone

    if wanted.exclude is not None:
        excluded = read_exclude(Path(wanted.exclude), split, wanted.name)
        keys = _numbers_of_keys(split, set(excluded.keys)) if excluded.keys else {}
        before = int(is_left.sum())
        is_left[[number for numbers in keys.values() for number in numbers]] = False
        if excluded.labels:
            for start in range(0, total, PIECE):
                leave_out(
                    ~np.isin(split.index["label"][start : start + PIECE], list(excluded.labels)),
                    start,
                )
        missing = [key for key in excluded.keys if key not in keys]
        if (
            missing
            and len(missing) == len(excluded.keys)
            and not excluded.labels
            and not excluded.is_quarantine
        ):
            raise ShardError(
                f"{wanted.name}exclude={wanted.exclude}: none of its {len(missing):,} keys is in"
                f" {_name(split)}, {_some(missing)}; expected keys as {split.key(0)!r} is one: no"
                " shard's name, no extension"
            )
        absent = (
            f" ({len(missing):,} of its keys {'is' if len(missing) == 1 else 'are'} not there:"
            f" {_some(missing)})"
            if missing
            else ""
        )
        parts.append(f"{before - int(is_left.sum()):,} by {wanted.name}exclude{absent}")
    if wanted.filter is not None:
        row_filter = RowFilter(wanted.filter)
        gone = 0
        for start in range(0, total, PIECE):
            try:
                gone += leave_out(
                    row_filter(split.index[start : start + PIECE], split.class_names), start
                )
            except ValueError as error:
                raise ShardError(f"{wanted.name}filter: {error}") from None
        parts.append(f"{gone:,} by {wanted.name}filter")
    numbers = np.flatnonzero(is_left)
    if wanted.fraction is not None or wanted.samples_per_class is not None:
        before = len(numbers)
        numbers = _subset(numbers, split.index["label"], wanted)
        how = (
            f"fraction={wanted.fraction:g}"
            if wanted.fraction is not None
            else f"samples_per_class={wanted.samples_per_class}"
        )
        parts.append(f"{before - len(numbers):,} by {wanted.name}{how}")
    told = (
        f"{len(numbers):,} of {total:,} samples of {_name(split)}: left out are {', '.join(parts)}"
    )
    if not len(numbers):
        raise ShardError(f"{told}; nothing is left to train on")
    if len(numbers) == total:
        return Chosen(total, None, told, "")
    if lost := len(labels_of(split, range(total))) - len(labels_of(split, numbers)):
        told += f"; {lost:,} {'class has' if lost == 1 else 'classes have'} no image left"
    if total <= np.iinfo(np.uint32).max:
        numbers = numbers.astype(np.uint32)
    digest = hashlib.sha256(np.ascontiguousarray(numbers, "<i8").tobytes()).hexdigest()[:16]
    return Chosen(len(numbers), numbers, told, f"{len(numbers):,} of {total:,} samples ({digest})")


def labels_of(split: Split, numbers: Sequence[int] | NDArray[np.integer]) -> set[int]:
    """The labels of the samples `numbers`."""
    found: set[int] = set()
    for start in range(0, len(numbers), PIECE):
        piece = numbers[start : start + PIECE]
        rows = slice(piece.start, piece.stop) if isinstance(piece, range) else piece
        found |= set(np.unique(split.index["label"][rows]).tolist())
    return found


def _subset(
    numbers: NDArray[np.int64], labels: NDArray[np.integer], wanted: Wanted
) -> NDArray[np.int64]:
    """Of the samples `numbers` those with the smallest hashes."""
    by_hash = numbers[np.argsort(fold(wanted.subset_seed, numbers), kind="stable")]
    if wanted.fraction is not None and wanted.fraction_of == "all":
        return np.sort(by_hash[: max(round(wanted.fraction * len(numbers)), 1)])
    of_class = labels[by_hash]
    by_class = np.argsort(of_class, kind="stable")
    _, firsts, counts = np.unique(of_class[by_class], return_index=True, return_counts=True)
    if wanted.samples_per_class is not None:
        kept = np.minimum(counts, wanted.samples_per_class)
    else:
        kept = np.maximum(np.round((wanted.fraction or 1) * counts).astype(np.int64), 1)
    place = np.arange(len(numbers)) - np.repeat(firsts, counts)
    return np.sort(by_hash[by_class[place < np.repeat(kept, counts)]])


# ---- what a file excludes ------------------------------------------------------------------------


class Excluded(NamedTuple):
    """What a file names."""

    keys: list[str]
    labels: set[int]
    is_quarantine: bool
    """Whether it lists samples that data_prep left out, so that none of them need be there."""


def read_exclude(path: Path, split: Split, name: str = "data.") -> Excluded:
    """What the file `path` excludes of `split`. Raises ShardError listing the lines that cannot be
    read."""
    try:
        lines = path.read_text("utf-8-sig", "surrogateescape").splitlines()
    except OSError as error:
        raise ShardError(f"{name}exclude={path}: cannot be read ({error.strerror})") from None
    is_quarantine = path.suffix == ".jsonl"
    keys = dict[str, None]()
    labels = set[int]()
    problems = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        try:
            if not text or text.startswith("#"):
                continue
            if is_quarantine:
                entry = json.loads(text)
                if entry.get("split", split.name) == split.name:
                    keys[str(entry["key"])] = None
            elif text.startswith("label="):
                labels.add(range(split.num_classes).index(int(text.removeprefix("label="))))
            elif text.startswith("class="):
                labels.add(split.class_names.index(text.removeprefix("class=")))
            else:
                keys[text] = None
        except (ValueError, KeyError, AttributeError):
            problems.append(f"line {number} is {text[:60]!r}")
    if problems:
        expected = (
            "an object with `key`"
            if is_quarantine
            else (
                f"a key, label=NUMBER (0 to {split.num_classes - 1}) or class=NAME of a class that"
                " is there"
            )
        )
        raise ShardError(
            f"{name}exclude={path}: expected {expected} in each line; {_some(problems)}"
        )
    return Excluded(list(keys), labels, is_quarantine)


def _numbers_of_keys(split: Split, keys: set[str]) -> dict[str, list[int]]:
    """The samples of each key; keys that are not there are not in it. Names come from `.idx` beside
    a tar, else from its headers."""
    written: dict[str, list[str]] = {}  # as `.idx` has them
    for key in keys:
        written.setdefault(re.sub(r"\s", "_", key), []).append(key)
    places: dict[str, list[int]] = {}
    first = 0
    for shard, length in enumerate(split.lengths):
        for number, key in enumerate(_keys_of_shard(split, shard, first, length), first):
            if key in written:
                places.setdefault(key, []).append(number)
        first += length
    found: dict[str, list[int]] = {}
    for key, numbers in places.items():
        if len(numbers) == len(written[key]) == 1:
            found[written[key][0]] = numbers
            continue
        for number in numbers:  # `a b` and `a_b` look alike
            if (exact := split.key(number)) in keys:
                found.setdefault(exact, []).append(number)
    return found


def _keys_of_shard(split: Split, shard: int, first: int, length: int) -> Iterator[str]:
    """The key of each sample of a shard, blanks as `_`."""
    name = split.filenames[shard].removesuffix(".tar") + ".idx"
    try:
        if (
            isinstance(split.tars, CachedTars)
            and isinstance(split.tars.folder, RemoteFolder)
            and not isinstance(split.root, Path)
        ):
            version = split.tars.folder.stat(name)
            content = split.tars.folder.read(name, 0, version.size, version)
        else:
            content = (Path(split.root) / name).read_bytes()
        lines = content.decode("utf-8", "surrogateescape").splitlines()[1:]
    except OSError:
        lines = []
    rows = split.index[first : first + length]
    for place, row in enumerate(zip(rows["offset"].tolist(), rows["size"].tolist(), strict=True)):
        fields = lines[place].split(" ") if len(lines) == length else []
        members = zip(fields[1::4], fields[2::4], fields[3::4], strict=False)
        named = next(
            (name for offset, size, name in members if (offset, size) == tuple(map(str, row))), None
        )
        if named is not None:
            yield split.key_in(named)
        else:  # somebody's without one, or of another tar
            yield re.sub(r"\s", "_", split.key(first + place))


def _name(split: Split) -> str:
    return f"{split.root} {split.name!r}"


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:MOST_NAMED]) + (
        f" and {len(items) - MOST_NAMED:,} more" if len(items) > MOST_NAMED else ""
    )
