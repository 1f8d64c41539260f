"""Select the training samples of a split with exclusion lists and a random subset.

The index is read in chunks of rows. If many samples are excluded, they are removed. Otherwise, they
keep their positions in the order (`vit.data.changes`). A subset consists of the samples with the
smallest hash of (subset seed, sample number), among all samples or per class. A larger subset
therefore contains every smaller one. Sample numbers are sorted, so that neighbors in the shards
stay neighbors.
"""

import csv
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vit.config.base import Selection
from vit.data.changes import HOLE, NO_CHANGES, Changes
from vit.data.shards.index_file import first_samples
from vit.data.shards.split import Split
from vit.data.shards.split_slice import SplitSlice
from vit.data.shards.tar import idx_name
from vit.system.files import ShardError
from vit.system.hashing import are_ranked, fold, fold_numbers
from vit.system.spelling import few

CHUNK_ROWS = 1 << 20
"""The number of index rows that are in memory at the same time."""
HOLES_AT_MOST = 0.05
"""The largest fraction of samples that can be excluded but keep their positions. Each such sample
wastes the computation for one row. If the fraction is larger, the excluded samples are removed,
which changes all batches."""
QUARANTINE = ".jsonl"
"""The suffix of data_prep's list of skipped samples. The split may lack these samples."""


@dataclass(frozen=True)
class Chosen:
    """The selected samples of a split."""

    num_samples: int
    """The number of samples with a place in the order."""
    numbers: NDArray[np.integer] | None = field(repr=False, compare=False)
    """(num_samples,) sample numbers in ascending order; None if all samples have a place."""
    summary: str
    """The counts of selected and excluded samples as text; "" if there was no selection."""
    identity: str
    """The length and a hash of `numbers` and `changes`; "" if all samples are selected."""
    changes: Changes = NO_CHANGES

    @property
    def used(self) -> NDArray[np.integer] | None:
        """The numbers of the samples that are trained on; None if all samples are."""
        holes = self.changes.holes
        if not len(holes):
            return self.numbers
        numbers = np.arange(self.num_samples) if self.numbers is None else self.numbers
        return np.setdiff1d(numbers, holes)


def choose(split: Split, selection: Selection, name: str = "data.") -> Chosen:
    """Return the samples of `split` that match `selection`.

    name: prefix of the setting names in messages. Raises ShardError if no sample remains, or if a
    setting names keys or classes that do not exist.
    """
    total = split.num_samples
    if all(getattr(selection, key) == value for key, value in Selection()):
        return Chosen(total, None, "", "")

    has_place = np.ones(total, np.bool_)
    is_excluded = np.zeros(total, np.bool_)
    exclusions: list[str] = []
    if selection.exclude is not None:
        note = _exclude(Path(selection.exclude), split, is_excluded, name)
        num_excluded = int(is_excluded.sum())
        keep_places = num_excluded <= HOLES_AT_MOST * total
        if not keep_places:
            has_place = ~is_excluded
        effect = "rows without weight" if keep_places else "which changes all batches"
        exclusions.append(f"{num_excluded:,} by {name}exclude ({effect}{note})")

    numbers = np.flatnonzero(has_place).astype(np.min_scalar_type(total))
    labels = split.index["label"]
    has_subset = selection.fraction is not None or selection.samples_per_class is not None
    if has_subset and len(numbers):
        num_before = len(numbers)
        numbers = _subset(numbers, labels, selection)
        setting = (
            f"samples_per_class={selection.samples_per_class}"
            if selection.fraction is None
            else f"fraction={selection.fraction:g}"
        )
        exclusions.append(f"{num_before - len(numbers):,} by {name}{setting}")

    new_labels = dict.fromkeys(numbers[is_excluded[numbers]].tolist(), HOLE)
    used = numbers[~is_excluded[numbers]]
    summary = f"{len(used):,} of {total:,} samples of {_name(split)}"
    if exclusions:
        summary += f"; excluded: {', '.join(exclusions)}"
    if not len(used):
        raise ShardError(f"{summary}; no sample is left for training")

    if selection.relabel is not None:
        relabeled, note = _read_relabel(Path(selection.relabel), split, name)
        new_labels = relabeled | new_labels
        summary += f"; {len(relabeled):,} relabeled by {name}relabel{note}"
    changes = Changes.of(new_labels)
    if len(used) < total:
        summary += _describe_lost_classes(labels, used, split.num_classes)
    identity = _identity(numbers, total, changes)
    chosen_numbers = None if len(numbers) == total else numbers
    return Chosen(len(numbers), chosen_numbers, summary, identity, changes)


def _describe_lost_classes(
    labels: NDArray[np.integer], used: NDArray[np.integer], max_classes: int
) -> str:
    """Return a note about the classes without any sample in `used`, or "" if there are none."""
    num_classes, num_left = (
        np.count_nonzero(count_labels(labels, samples, max_classes))
        for samples in (range(len(labels)), used)
    )
    num_lost = num_classes - num_left
    return f"; no image is left in {num_lost:,} of {num_classes:,} classes" if num_lost else ""


def _identity(numbers: NDArray[np.integer], total: int, changes: Changes) -> str:
    """Return `Chosen.identity` for these `numbers` of `total` samples."""
    note = f", {changes.identity()}" if len(changes.numbers) else ""
    if len(numbers) == total:
        return f"{total:,} samples{note}" if note else ""
    digest = hashlib.sha256(np.ascontiguousarray(numbers, "<i8").tobytes()).hexdigest()[:16]
    return f"{len(numbers):,} of {total:,} samples ({digest}){note}"


def _exclude(path: Path, split: Split, is_excluded: NDArray[np.bool_], name: str) -> str:
    """Set `is_excluded` for the samples with the listed keys and labels. Return a note."""
    keys, labels = _read_exclude(path, split, name)
    # data_prep does not write the samples in its own list of skipped samples, so allow missing
    # keys in that list.
    may_lack = bool(labels) or path.suffix == QUARANTINE
    numbers, note = _find_keys(keys, split, f"{name}exclude={path}", may_lack)

    for samples in numbers.values():
        is_excluded[samples] = True
    if labels:
        for start in range(0, split.num_samples, CHUNK_ROWS):
            chunk = split.index[start : start + CHUNK_ROWS]["label"]
            is_excluded[start : start + CHUNK_ROWS] |= np.isin(chunk, list(labels))
    return note


def _find_keys(
    keys: list[str], split: Split, setting: str, may_lack_all: bool
) -> tuple[dict[str, list[int]], str]:
    """Return the sample numbers of `keys`, and a note about keys that do not exist.

    Raises ShardError if none of the keys exists, because the list was then made for another data
    set.
    """
    numbers = _numbers_of_keys(split, keys) if keys else {}
    missing = [key for key in keys if key not in numbers]
    if not missing:
        return numbers, ""
    if not numbers and not may_lack_all:
        raise ShardError(
            f"{setting}: none of its {len(missing):,} keys is in {_name(split)}"
            f" ({few(missing, 3)}); expected keys such as {split.key(0)!r}, without the shard name"
            " and extension"
        )
    return numbers, f"; {len(missing):,} of its keys do not exist: {few(missing, 3)}"


def count_labels(
    labels: NDArray[np.integer], numbers: range | NDArray[np.integer], num_classes: int
) -> NDArray[np.int64]:
    """Return the number of samples in each class among the samples `numbers`, (num_classes,)."""
    counts = np.zeros(num_classes, np.int64)
    for start in range(0, len(numbers), CHUNK_ROWS):
        chunk = numbers[start : start + CHUNK_ROWS]
        rows = slice(chunk.start, chunk.stop) if isinstance(chunk, range) else chunk
        counts += np.bincount(labels[rows], minlength=num_classes)
    return counts


def _subset(
    numbers: NDArray[np.integer], labels: NDArray[np.integer], selection: Selection
) -> NDArray[np.integer]:
    """Return those of the samples `numbers` that are in the random subset, in ascending order."""
    keys = fold_numbers(partial(fold, selection.subset_seed), numbers)
    if selection.fraction is not None and selection.fraction_of == "all":
        return numbers[are_ranked(keys, 0, max(round(selection.fraction * len(numbers)), 1))]

    own_labels = labels[numbers]
    by_class = np.argsort(own_labels, kind="stable")
    # Split where the label changes, so that each part contains the samples of one class.
    class_starts = np.flatnonzero(np.diff(own_labels[by_class])) + 1
    taken = []
    for members in np.split(by_class, class_starts):
        if selection.fraction is not None:
            count = max(round(selection.fraction * len(members)), 1)
        else:
            count = min(selection.samples_per_class or len(members), len(members))
        taken.append(members[are_ranked(keys[members], 0, count)])
    return numbers[np.sort(np.concatenate(taken))]


# --- files of samples to exclude or relabel -------------------------------------------------------


def _read_exclude(path: Path, split: Split, name: str) -> tuple[list[str], set[int]]:
    """Return the keys and labels that the file `path` excludes from `split`.

    Raises ShardError, which lists the invalid lines.
    """
    keys = dict[str, None]()
    labels = set[int]()
    problems = []
    for number, text in _lines(path, f"{name}exclude"):
        try:
            if path.suffix == QUARANTINE:
                entry = json.loads(text)
                if entry.get("split", split.name) == split.name:
                    keys[str(entry["key"])] = None
            elif text.startswith(("label=", "class=")):
                labels.add(_label_of(text, split))
            else:
                keys[text] = None
        except (ValueError, KeyError, AttributeError):
            problems.append(f"line {number} is {text[:60]!r}")

    if problems:
        raise ShardError(
            f"{name}exclude={path}: each line must be a key, label=NUMBER (0 to"
            f" {split.num_classes - 1}) or class=NAME (an existing class), or in a {QUARANTINE}"
            f" file an object with `key`; {few(problems, 3)}"
        )
    return list(keys), labels


def _read_relabel(path: Path, split: Split, name: str) -> tuple[dict[int, int], str]:
    """Return the new label of each sample in the file `path`, and a note about missing keys.

    Raises ShardError, which lists the invalid lines.
    """
    labels = dict[str, int]()
    problems = []
    for number, text in _lines(path, f"{name}relabel"):
        try:
            key, word = next(csv.reader([text]))
            labels[key.strip()] = _label_of(word.strip(), split)
        except ValueError:
            problems.append(f"line {number} is {text[:60]!r}")

    if problems:
        raise ShardError(
            f"{name}relabel={path}: each line must be a key, a comma, and label=NUMBER (0 to"
            f" {split.num_classes - 1}) or class=NAME (an existing class); {few(problems, 3)}"
        )

    numbers, note = _find_keys(list(labels), split, f"{name}relabel={path}", may_lack_all=False)
    return {sample: labels[key] for key, samples in numbers.items() for sample in samples}, note


def _lines(path: Path, setting: str) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line that is neither empty nor a comment."""
    try:
        lines = path.read_text("utf-8-sig", "surrogateescape").splitlines()
    except OSError as error:
        raise ShardError(f"{setting}={path}: cannot be read ({error.strerror})") from None

    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not text.startswith("#"):
            yield number, text


def _label_of(text: str, split: Split) -> int:
    """Parse label=NUMBER or class=NAME. Raises ValueError for anything else."""
    kind, _, value = text.partition("=")
    if kind == "label":
        return range(split.num_classes).index(int(value))
    if kind == "class":
        return split.class_names.index(value)
    raise ValueError(text)


def _numbers_of_keys(split: Split, keys: list[str]) -> dict[str, list[int]]:
    """Map each existing key to its sample numbers."""
    num_keys = Counter(idx_name(key) for key in keys)
    numbers = defaultdict[str, list[int]](list)
    for number, name in enumerate(_idx_names(split)):
        if name in num_keys:
            numbers[name].append(number)

    numbers_of_key: dict[str, list[int]] = {}
    for key in keys:
        name = idx_name(key)
        candidates = numbers.get(name, [])
        # `.idx` files replace spaces, so `a b` and `a_b` have the same name there. For such
        # duplicates, compare the keys in the tar headers, each of which costs a read.
        if len(candidates) > 1 or num_keys[name] > 1:
            candidates = [number for number in candidates if split.key(number) == key]
        if candidates:
            numbers_of_key[key] = candidates
    return numbers_of_key


def _idx_names(split: Split) -> Iterator[str]:
    """Yield the `idx_name` of each sample.

    Names are read from the `.idx` file next to the tar if it matches the index, and otherwise from
    the tar headers, which takes one read per sample.
    """
    if isinstance(split, SplitSlice):
        names = list(_idx_names(split.whole))
        yield from (names[number] for number in split.numbers)
        return

    firsts = first_samples(split.lengths)
    for filename, (first, stop) in zip(split.filenames, pairwise(firsts), strict=True):
        lines = _idx_lines(split, filename.removesuffix(".tar") + ".idx")
        if len(lines) != stop - first:
            lines = [""] * (stop - first)

        # Reading a field of one row in a structured array takes a microsecond, so convert to lists.
        offsets, sizes = (split.index[name][first:stop].tolist() for name in ("offset", "size"))
        for number, line in enumerate(lines):
            # A line lists suffix, offset, size and name of each member.
            fields = line.split(" ")
            image = [str(offsets[number]), str(sizes[number])]
            members = zip(fields[1::4], fields[2::4], fields[3::4], strict=False)
            names = [name for *offset_and_size, name in members if offset_and_size == image]
            yield split.key_in(names[0]) if names else idx_name(split.key(first + number))


def _idx_lines(split: Split, name: str) -> list[str]:
    """Return the lines of an `.idx` file after its header, or [] if it cannot be read."""
    store = None if isinstance(split.root, Path) else split.tars.store
    try:
        if store is not None:
            version = store.stat(name)
            content = store.read(name, 0, version.size, version)
        else:
            content = (Path(split.root) / name).read_bytes()
    except OSError:
        return []
    return content.decode("utf-8", "surrogateescape").splitlines()[1:]


def _name(split: Split) -> str:
    return f"{split.root} {split.name!r}"
