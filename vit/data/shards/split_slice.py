"""A part of a split, as `train[:99%]` to train on and `train[99%:]` to evaluate on.

The notation is that of TensorFlow Datasets and Hugging Face's. Samples are counted in the order of
a hash of their numbers, not as they are stored: a hundredth of shards that are sorted by class is a
hundredth of each class. Parts that meet at a percentage have no sample in common and leave none
out. `SplitSlice` is a split like any other, with numbers of its own from 0.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.data.shards.split import Split
from vit.system.files import ShardError
from vit.system.hashing import are_ranked, fold, fold_numbers

_PART = 1
"""Folded behind the samples' numbers. `data.fraction` draws by its seed in front of them, so that
no `subset_seed` gives the order of parts."""
_PERCENT = r"\d+(?:\.\d+)?"
_NAME = re.compile(
    rf"(?P<split>[^\[\]]+)\[(?:(?P<start>{_PERCENT})%)?:(?:(?P<stop>{_PERCENT})%)?\]"
)


class PartName(NamedTuple):
    """The name of a part, or of a split."""

    split: str
    """In which it is."""
    start: float | None
    """Per cent of the samples, from 0 to 100; None: the whole split."""
    stop: float


def parse_name(name: str) -> PartName:
    """Return what `train`, `train[:99%]` or `train[10%:20%]` names.

    Raises ShardError for brackets with anything else.
    """
    if not name.endswith("]"):
        return PartName(name, None, 100.0)
    found = _NAME.fullmatch(name)
    if found is not None:
        start = float(found["start"] or 0)
        stop = float(found["stop"] or 100)
        if start < stop <= 100:
            return PartName(found["split"], start, stop)
    raise ShardError(
        f"split {name!r}: expected a part as train[:99%], train[99%:] or train[10%:20%], from less"
        " to more"
    )


def part_size(name: str, total: int) -> int:
    """Return how many of the `total` samples of its split `name` has."""
    _, start, stop = parse_name(name)
    first, end = _between(start or 0.0, stop, total)
    return end - first


def _between(start: float, stop: float, total: int) -> tuple[int, int]:
    return round(total * start / 100), round(total * stop / 100)


class SplitSlice(Split):
    """The samples of a split between two percentages; 1 to 8 bytes a sample in each process."""

    def __init__(self, whole: Split, name: str):
        """name: as `parse_name` reads it, with percentages. Raises ShardError if it is empty."""
        _, start, stop = parse_name(name)
        assert start is not None, f"{name} is a whole split"
        total = whole.num_samples
        first, end = _between(start, stop, total)
        if first == end:
            raise ShardError(f"{whole.root} {name!r}: of {total:,} samples, that is none")
        all_numbers = np.arange(total, dtype=np.min_scalar_type(total))
        keys = fold_numbers(lambda numbers: fold(numbers, _PART), all_numbers)
        self.whole = whole
        self.numbers: NDArray[np.integer] = all_numbers[are_ranked(keys, first, end)]
        """(num_samples,) their numbers in `whole`, ascending."""
        super().__init__(
            whole.root,
            name,
            whole.filenames,
            whole.lengths,
            _PartRows(whole, self.numbers),
            whole.num_classes,
            whole.class_names,
            whole.tars,
            apply_exif=whole.apply_exif,
        )

    def read(self, i: int) -> bytes:
        """As `Split.read`."""
        return self.whole.read(int(self.numbers[i]))

    def where(self, i: int) -> str:
        """As `Split.where`."""
        return self.whole.where(int(self.numbers[i]))

    def key(self, i: int) -> str:
        """As `Split.key`."""
        return self.whole.key(int(self.numbers[i]))

    def key_in(self, name: str) -> str:
        """As `Split.key_in`."""
        return self.whole.key_in(name)

    def prefetch(self, samples: NDArray[np.int64]) -> None:
        """As `Split.prefetch`."""
        self.whole.prefetch(self._in_whole(samples))

    def divided(self, samples: NDArray[np.int64]) -> list[tuple[Split, NDArray[np.int64]]]:
        """As `Split.divided`: the whole split, with its own numbers."""
        return self.whole.divided(self._in_whole(samples))

    def _in_whole(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.numbers[samples].astype(np.int64)


class _PartRows:
    """The rows of a part, read from the index of the whole split by their numbers."""

    def __init__(self, whole: Split, numbers: NDArray[np.integer]):
        self._whole = whole
        self._numbers = numbers
        self.dtype = whole.index.dtype
        self.nbytes = len(numbers) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, which: Any) -> Any:
        """Return the rows of a number, a slice or an array; a column, of all rows, is a copy."""
        if isinstance(which, str):
            return self._whole.index[which][self._numbers]
        return self._whole.index[self._numbers[which]]
