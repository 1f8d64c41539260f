"""Join several splits into one training split, each with its own number of draws per epoch.

Samples are numbered source by source, so a number identifies both a source and a sample in it.
Labels are numbered as in the evaluation split. If a source's class names differ from those of the
evaluation split, or are in another order, its labels are mapped by name. If the source or the
evaluation split has no names, labels are used unchanged and a note is logged. In that case, all
sources with names must have the same names.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.config.base import Selection
from vit.data.changes import HOLE, NO_CHANGES, Changes
from vit.data.order import Share, shares_of
from vit.data.select import Chosen, choose, count_labels
from vit.data.shards.index_file import first_samples
from vit.data.shards.split import Split
from vit.data.shards.tar import INDEX_DTYPE
from vit.system.files import ShardError
from vit.system.spelling import few


class TrainSet(NamedTuple):
    """The training samples of a run, with the number of draws from each source."""

    split: Any
    """A `Split`, a `Sources`, or an object from another reader."""
    num_draws: int
    """The number of images drawn per epoch, including those that do not fill a batch."""
    shares: tuple[Share, ...] = ()
    """The shares to pass to `Order`."""
    summary: tuple[str, ...] = ()
    """The lines that describe the selection; () for one complete split."""
    identity: str = ""
    """A fingerprint of the selection, which must not change when a run is resumed."""
    changes: Changes = NO_CHANGES
    """The samples that are excluded or relabeled, but keep their positions in the order."""


def train_set_of(split: Split, selection: Selection) -> TrainSet:
    """Return the samples of one split that match `selection`. Raises ShardError."""
    chosen = choose(split, selection)
    share = Share(chosen.num_samples, chosen.num_samples, 0, chosen.numbers)
    return TrainSet(
        split,
        chosen.num_samples,
        () if chosen.numbers is None else (share,),
        (chosen.summary,) if chosen.summary else (),
        chosen.identity,
        chosen.changes,
    )


def train_set_of_sources(
    splits: Sequence[Split],
    selections: Sequence[Selection],
    weights: Sequence[float | None],
    classes_of: Split,
    block_samples: int | None,
) -> TrainSet:
    """Return the selected samples of several splits, drawn in proportion to `weights`.

    Args:
        classes_of: The evaluation split, which defines the labels.
        block_samples: See `order.block_samples`.

    Raises ShardError and ValueError.
    """
    chosen = [
        choose(split, selection, f"data.sources[{number}].")
        for number, (split, selection) in enumerate(zip(splits, selections, strict=True))
    ]
    draws = shares_of([each.num_samples for each in chosen], weights, block_samples)
    sources = Sources(splits, chosen, classes_of)

    shares = []
    summary = []
    identities = []
    for first, split, each, num_draws in zip(
        sources.firsts[:-1], splits, chosen, draws, strict=True
    ):
        shares.append(Share(num_draws, each.num_samples, first, each.numbers))
        summary.append(_describe_draws(split, each, num_draws, sum(draws), classes_of))
        identities.append(
            f"{num_draws:,} draws of {each.identity or f'all {each.num_samples:,} samples'}"
        )

    return TrainSet(
        sources, sum(draws), tuple(shares), tuple(summary), "; ".join(identities), sources.changes
    )


def _describe_draws(
    split: Split, chosen: Chosen, num_draws: int, total: int, classes_of: Split
) -> str:
    """Describe the source `split`, from which `num_draws` of `total` images per epoch come."""
    share = num_draws / chosen.num_samples
    times = "" if share == 1 else f", {share:.3g} times each"
    whole = f"all {chosen.num_samples:,} samples of {split.root} {split.name!r}"
    text = (
        f"{num_draws:,} images per epoch ({num_draws / total:.1%}{times}) of"
        f" {chosen.summary or whole}"
    )
    if bool(split.class_names) == bool(classes_of.class_names):
        return text

    nameless = split if classes_of.class_names else classes_of
    return (
        f"{text}; its labels are mapped by number, because {nameless.root} {nameless.name!r} has no"
        " class names"
    )


def images_by_class(train_set: TrainSet, num_classes: int) -> NDArray[np.float64]:
    """Return the number of images of each class in an epoch, (num_classes,).

    With weighted sources, these are averages over epochs and may be fractional.
    """
    changes = train_set.changes
    labels = train_set.split.index["label"].copy()
    labels[changes.numbers] = changes.labels

    counts = np.zeros(num_classes)
    for share in train_set.shares or (Share(train_set.num_draws, train_set.num_draws),):
        numbers: range | NDArray[np.integer] = (
            range(share.first, share.first + share.num_samples)
            if share.chosen is None
            else share.first + share.chosen.astype(np.int64)
        )
        if len(changes.holes):
            numbers = np.setdiff1d(numbers, changes.holes)
        counts += count_labels(labels, numbers, num_classes) * (share.num_draws / share.num_samples)
    return counts


def content_sha256(split: Split | Sources) -> str:
    """Return a hash of the checksums and labels of all images; "" if a source has no checksums."""
    digest = hashlib.sha256()
    for source in split.splits:
        for column in ("crc32c", "label"):
            digest.update(source.index[column].tobytes())
    return digest.hexdigest()


class Sources:
    """Several splits that can be read like one `Split`. The object can be forked and pickled."""

    name = "sources"

    def __init__(self, splits: Sequence[Split], chosen: Sequence[Chosen], classes_of: Split):
        """Join `splits`. classes_of: the evaluation split.

        Raises ShardError if `classes_of` lacks the class of a selected sample, or if it has no
        class names and the sources have different ones.
        """
        self.splits = list(splits)
        self.root = " + ".join(str(split.root) for split in splits)
        self.firsts = first_samples(split.num_samples for split in splits)
        self.num_samples = self.firsts[-1]
        self.filenames = [name for split in splits for name in split.filenames]

        self.class_names = classes_of.class_names
        self.num_classes = classes_of.num_classes
        if not self.class_names:
            _check_same_names(splits, classes_of)
            self.num_classes = max(split.num_classes for split in (*splits, classes_of))

        maps = [
            _map_labels(number, *pair, classes_of)
            for number, pair in enumerate(zip(splits, chosen, strict=True))
        ]
        self.index = _Rows(self.splits, maps, self.firsts)

        new_labels = dict[int, int]()
        for first, each, label_map in zip(self.firsts[:-1], chosen, maps, strict=True):
            changes = each.changes
            mapped = np.where(changes.labels == HOLE, HOLE, label_map[changes.labels])
            new_labels |= zip((changes.numbers + first).tolist(), mapped.tolist(), strict=True)
        self.changes = Changes.of(new_labels)
        """The changed samples of all sources, with labels of the evaluation split."""

    def __len__(self) -> int:
        return self.num_samples

    @property
    def read_ahead_batches(self) -> int:
        """How many batches early to prefetch a sample; 0 if early prefetching is not needed."""
        return max(split.read_ahead_batches for split in self.splits)

    def identity(self) -> str:
        """Return a hash of the identities of all sources."""
        identities = " ".join(split.identity() for split in self.splits)
        return hashlib.sha256(identities.encode()).hexdigest()

    def prepare(self, num_processes: int) -> None:
        """See `Split.prepare`."""
        for split in self.splits:
            split.prepare(num_processes)

    def prefetch(self, samples: NDArray[np.int64]) -> None:
        """See `Split.prefetch`."""
        for split, numbers in self.divided(samples):
            split.prefetch(numbers)

    def divided(self, samples: NDArray[np.int64]) -> list[tuple[Split, NDArray[np.int64]]]:
        """See `Split.divided`."""
        divided = _divided(self.splits, self.firsts, samples)
        return [pair for split, numbers, _ in divided for pair in split.divided(numbers)]

    def read(self, i: int) -> bytes:
        """See `Split.read`."""
        split, number = self._of_source(i)
        return split.read(number)

    def key(self, i: int) -> str:
        """See `Split.key`."""
        split, number = self._of_source(i)
        return split.key(number)

    def where(self, i: int) -> str:
        """See `Split.where`."""
        split, number = self._of_source(i)
        return split.where(number)

    def close(self) -> None:
        """See `Split.close`."""
        for split in self.splits:
            split.close()

    def _of_source(self, i: int) -> tuple[Split, int]:
        number = bisect.bisect_right(self.firsts, i) - 1
        return self.splits[number], i - self.firsts[number]


class _Rows:
    """The joined indexes of all sources, with mapped labels, accessible by row or column."""

    def __init__(self, splits: list[Split], maps: list[NDArray[np.int32]], firsts: list[int]):
        self._splits = splits
        self._maps = maps
        self._firsts = firsts
        self.nbytes = sum(split.index.nbytes for split in splits)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            columns = [split.index[key] for split in self._splits]
            if key == "label":
                columns = [map_[column] for map_, column in zip(self._maps, columns, strict=True)]
            return np.concatenate(columns)

        samples = np.atleast_1d(key)
        rows = np.zeros(samples.shape, INDEX_DTYPE)
        for number, (split, numbers, places) in enumerate(
            _divided(self._splits, self._firsts, samples)
        ):
            split_rows = split.index[numbers]
            for name in ("size", "offset", "label", "width", "height"):
                rows[name][places] = split_rows[name]
            rows["label"][places] = self._maps[number][rows["label"][places]]
        return rows if np.ndim(key) else rows[0]


def _divided(
    splits: list[Split], firsts: list[int], samples: NDArray[np.int64]
) -> Iterator[tuple[Split, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield each split with the numbers of its samples and their positions in `samples`."""
    split_numbers = np.searchsorted(firsts, samples, side="right") - 1
    for number, split in enumerate(splits):
        places = np.flatnonzero(split_numbers == number)
        yield split, samples[places] - firsts[number], places


def _describe(number: int, split: Split) -> str:
    return f"data.sources[{number}] ({split.root} {split.name!r})"


def _how_to_name(root: object) -> str:
    return (
        f"name its classes: move _info.json out of {root} and run `python -m data_prep.index"
        f" {root} --classes names.txt`, with one name per line"
    )


def _check_same_names(splits: Sequence[Split], classes_of: Split) -> None:
    named = [(number, split) for number, split in enumerate(splits) if split.class_names]
    for (first_number, first), (number, split) in pairwise(named):
        for label, (one, other) in enumerate(zip_longest(first.class_names, split.class_names)):
            if one != other:
                raise ShardError(
                    f"{_describe(number, split)}: label {label} means {other!r}, but {one!r} in"
                    f" {_describe(first_number, first)}, and {classes_of.root} {classes_of.name!r}"
                    f" has no class names to settle which is right; {_how_to_name(classes_of.root)}"
                )


def _map_labels(number: int, split: Split, chosen: Chosen, classes_of: Split) -> NDArray[np.int32]:
    """Return the label in `classes_of` for each label of `split`, or -1 if the class is missing."""
    names = classes_of.class_names
    lacks_names = bool(names) and not split.class_names
    if lacks_names and split.num_classes > classes_of.num_classes:
        raise ShardError(
            f"{_describe(number, split)}: has {split.num_classes:,} classes without names, but"
            f" {classes_of.root} has {classes_of.num_classes:,}; {_how_to_name(split.root)}"
        )
    keeps_labels = not names or lacks_names or split.class_names == names
    if keeps_labels:
        return np.arange(split.num_classes, dtype=np.int32)

    label_of = {name: label for label, name in enumerate(names)}
    label_map = np.array([label_of.get(name, -1) for name in split.class_names], np.int32)
    used = chosen.used
    numbers = range(split.num_samples) if used is None else used
    counts = count_labels(split.index["label"], numbers, split.num_classes)
    counts[chosen.changes.labels[chosen.changes.labels != HOLE]] += 1
    missing = np.flatnonzero((counts > 0) & (label_map < 0)).tolist()
    if not missing:
        return label_map

    named = few([repr(split.class_names[label]) for label in missing])
    raise ShardError(
        f"{_describe(number, split)}: has classes that {classes_of.root} {classes_of.name!r} lacks:"
        f" {named}; list them in its exclude file, one class=NAME per line, or evaluate on data"
        " that contain them"
    )
