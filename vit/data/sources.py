"""Several splits as one to train on, and what an epoch draws from each. Free of torch.

The data's story: samples are numbered source after source; a number leads to its source and its
place there, which reads it. Labels are told by the class names of the split that the run is
evaluated on: a source with other names, or in another order, is mapped by name. Where one of the
two has no names labels are taken by number, which is told, and all sources with names must have the
same then.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.data.order import Share, shares_of
from vit.data.select import Chosen, Wanted, choose, labels_of
from vit.data.shards.index_file import first_samples
from vit.data.shards.split import Split
from vit.data.shards.tar import INDEX_DTYPE
from vit.system.files import ShardError

MOST_NAMED = 10


class TrainSet(NamedTuple):
    """What is trained on."""

    split: Any
    """`Split`, `Sources` or `vit.data.stream.Stream`."""
    num_draws: int
    """Images in an epoch, before those that fill no batch go."""
    shares: tuple[Share, ...] = ()
    """For `Order.shares`."""
    summary: tuple[str, ...] = ()
    """What was chosen, in lines; none where it is all of one split."""
    identity: str = ""
    """What a run that goes on must find the same, in words."""


def train_set_of(split: Split, wanted: Wanted) -> TrainSet:
    """The samples of one split that are `wanted`. Raises ShardError."""
    chosen = choose(split, wanted)
    if chosen.numbers is None:
        return TrainSet(
            split, split.num_samples, summary=(chosen.summary,) if chosen.summary else ()
        )
    share = Share(chosen.num_samples, chosen.num_samples, 0, chosen.numbers)
    return TrainSet(split, chosen.num_samples, (share,), (chosen.summary,), chosen.identity)


def train_set_of_sources(
    splits: Sequence[Split],
    wanted: Sequence[Wanted],
    weights: Sequence[float | None],
    classes_of: Split,
    block_samples: int | None,
) -> TrainSet:
    """The wanted samples of several splits, each with as many draws as its weight gives. Raises
    ShardError and ValueError.

    classes_of: the split that is evaluated on. block_samples: as `data.block_samples`.
    """
    chosen = [choose(*pair) for pair in zip(splits, wanted, strict=True)]
    draws = shares_of([each.num_samples for each in chosen], weights, block_samples)
    sources = Sources(splits, chosen, classes_of)
    shares = []
    told = []
    known = []
    for first, split, each, num_draws in zip(sources.firsts, splits, chosen, draws, strict=False):
        shares.append(Share(num_draws, each.num_samples, first, each.numbers))
        times = (
            f", {num_draws / each.num_samples:.3g} times each"
            if num_draws != each.num_samples
            else ""
        )
        part = f"{num_draws:,} images an epoch ({num_draws / sum(draws):.1%}{times})"
        told.append(f"{part} of {each.summary or _all_of(split)}{_by_number(split, classes_of)}")
        known.append(
            f"{num_draws:,} draws of {each.identity or f'all {each.num_samples:,} samples'}"
        )
    return TrainSet(sources, sum(draws), tuple(shares), tuple(told), "; ".join(known))


def _all_of(split: Split) -> str:
    return f"all {split.num_samples:,} samples of {split.root} {split.name!r}"


def _by_number(split: Split, classes_of: Split) -> str:
    if bool(split.class_names) == bool(classes_of.class_names):
        return ""
    nameless = split if classes_of.class_names else classes_of
    return (
        f"; its labels are taken by number, for {nameless.root} {nameless.name!r} names no classes"
    )


class Sources:
    """Splits that are read as one; see `Split` for what is not told here. May be forked and pickled
    as they are."""

    name = "sources"

    def __init__(self, splits: Sequence[Split], chosen: Sequence[Chosen], classes_of: Split):
        """Raises ShardError where a chosen sample's class is none of those of `classes_of`, or
        where that has no names and the sources' differ."""
        self.splits = list(splits)
        self.root = " + ".join(str(split.root) for split in splits)
        self.firsts = first_samples(split.num_samples for split in splits)
        self.num_samples = self.firsts[-1]
        self.filenames = [name for split in splits for name in split.filenames]
        self.class_names = classes_of.class_names
        if not self.class_names:
            _check_same_names(splits, classes_of)
        maps = [
            _map_labels(number, *pair, classes_of)
            for number, pair in enumerate(zip(splits, chosen, strict=True))
        ]
        self.num_classes = (
            classes_of.num_classes
            if self.class_names
            else max(split.num_classes for split in (*splits, classes_of))
        )
        self.index = _Rows(self.splits, maps, self.firsts)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def read_ahead_batches(self) -> int:
        """How many batches before it is needed a sample should be given to `prefetch`; 0: never."""
        return max(split.read_ahead_batches for split in self.splits)

    def identity(self) -> str:
        """A hash of which samples lie where in all sources."""
        return hashlib.sha256(
            " ".join(split.identity() for split in self.splits).encode()
        ).hexdigest()

    def prepare(self, num_processes: int) -> None:
        """As `Split.prepare`."""
        for split in self.splits:
            split.prepare(num_processes)

    def prefetch(self, samples: NDArray[np.int64]) -> None:
        """As `Split.prefetch`."""
        for split, own in self.divided(samples):
            split.prefetch(own)

    def divided(self, samples: NDArray[np.int64]) -> list[tuple[Split, NDArray[np.int64]]]:
        """As `Split.divided`."""
        return [(split, own) for split, own, _ in _divided(self.splits, self.firsts, samples)]

    def read(self, i: int) -> bytes:
        """As `Split.read`."""
        split, own = self._at(i)
        return split.read(own)

    def key(self, i: int) -> str:
        """As `Split.key`."""
        split, own = self._at(i)
        return split.key(own)

    def where(self, i: int) -> str:
        """As `Split.where`."""
        split, own = self._at(i)
        return split.where(own)

    def close(self) -> None:
        """As `Split.close`."""
        for split in self.splits:
            split.close()

    def _at(self, i: int) -> tuple[Split, int]:
        number = bisect.bisect_right(self.firsts, i) - 1
        return self.splits[number], i - self.firsts[number]


class _Rows:
    """The rows of several indexes by the sources' numbers, and whole columns; labels are mapped."""

    def __init__(
        self, splits: list[Split], maps: list[NDArray[np.int32] | None], firsts: list[int]
    ):
        self._splits = splits
        self._maps = maps
        self._firsts = firsts
        self.nbytes = sum(split.index.nbytes for split in splits)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, str):
            columns = [split.index[which] for split in self._splits]
            if which == "label":
                columns = [
                    column if of is None else of[column]
                    for column, of in zip(columns, self._maps, strict=True)
                ]
            return np.concatenate(columns)
        asked = np.atleast_1d(which)
        rows = np.zeros(asked.shape, INDEX_DTYPE)
        for number, (split, own, places) in enumerate(_divided(self._splits, self._firsts, asked)):
            for name in ("size", "offset", "label", "width", "height"):
                rows[name][places] = split.index[own][name]
            if (of := self._maps[number]) is not None:
                rows["label"][places] = of[rows["label"][places]]
        return rows if np.ndim(which) else rows[0]


def _divided(
    splits: list[Split], firsts: list[int], samples: NDArray[np.int64]
) -> Iterator[tuple[Split, NDArray[np.int64], NDArray[np.int64]]]:
    """Of each split its samples among `samples`, by its own numbers, and their places."""
    of = np.searchsorted(firsts, samples, side="right") - 1
    for number, split in enumerate(splits):
        places = np.flatnonzero(of == number)
        yield split, samples[places] - firsts[number], places


def _called(number: int, split: Split) -> str:
    return f"data.sources[{number}] ({split.root} {split.name!r})"


def _name_them(root: Any) -> str:
    return (
        f"move _info.json out of {root} and run `python -m data_prep.index {root} --classes"
        " names.txt`, a name in each line"
    )


def _check_same_names(splits: Sequence[Split], classes_of: Split) -> None:
    """Raises ShardError where a number means one class here and another there."""
    named = [(number, split) for number, split in enumerate(splits) if split.class_names]
    for number, split in named[1:]:
        first = named[0][1]
        names = named[0][1].class_names
        if split.class_names != names:
            pairs = enumerate(zip_longest(names, split.class_names))
            label, (one, other) = next((label, pair) for label, pair in pairs if pair[0] != pair[1])
            raise ShardError(
                f"{_called(number, split)}: label {label} is {other!r}, of"
                f" {_called(named[0][0], first)} it is {one!r}, and {classes_of.root}"
                f" {classes_of.name!r} has no names that say which is meant; name its classes:"
                f" {_name_them(classes_of.root)}"
            )


def _map_labels(
    number: int, split: Split, chosen: Chosen, classes_of: Split
) -> NDArray[np.int32] | None:
    """The label by `classes_of` of each label of `split`; None where they are the same."""
    names = classes_of.class_names
    called = _called(number, split)
    if not names or split.class_names == names:
        return None
    if not split.class_names:
        if split.num_classes > classes_of.num_classes:
            told = (
                f"{split.num_classes:,} classes without names, {classes_of.root} has"
                f" {classes_of.num_classes:,}"
            )
            raise ShardError(f"{called}: {told}; name its classes: {_name_them(split.root)}")
        return None
    of = {name: label for label, name in enumerate(names)}
    mapped = np.array([of.get(name, -1) for name in split.class_names], np.int32)
    missing = sorted(
        label
        for label in labels_of(
            split, range(split.num_samples) if chosen.numbers is None else chosen.numbers
        )
        if mapped[label] < 0
    )
    if missing:
        named = ", ".join(f"{split.class_names[label]!r}" for label in missing[:MOST_NAMED])
        more = ""
        how = f"its filter (label not in ({named}))"
        if len(missing) > MOST_NAMED:
            more = f" and {len(missing) - MOST_NAMED:,} more"
            how = "its exclude, a file with a line class=NAME for each"
        classes = (
            f"{len(missing):,} {'class' if len(missing) == 1 else 'classes'} that {classes_of.root}"
            f" {classes_of.name!r} lacks"
        )
        raise ShardError(
            f"{called}: {classes}: {named}{more}; leave them out with {how}, or evaluate on data"
            " that have them"
        )
    return mapped
