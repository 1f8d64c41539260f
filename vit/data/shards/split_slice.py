"""A slice of a split, such as `train[:99%]` for training and `train[99%:]` for evaluation.

TensorFlow Datasets and Hugging Face use the same notation. Samples are ordered by a hash of their
numbers, not by storage, so a 1 % slice contains about 1 % of each class even if shards are sorted
by class. Adjacent slices do not overlap and do not omit samples. A `SplitSlice` is used like any
other split. Its samples are numbered from 0.
"""

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.data.shards.split import Split
from vit.system.files import ShardError
from vit.system.hashing import are_ranked, fold, fold_numbers

_PART = 1
"""A constant to hash after the sample numbers. `data.fraction` hashes its seed before the numbers,
so no `subset_seed` gives the same order."""
_PERCENT = r"\d+(?:\.\d+)?"
_NAME = re.compile(
    rf"(?P<split>[^\[\]]+)\[(?:(?P<start>{_PERCENT})%)?:(?:(?P<stop>{_PERCENT})%)?\]"
)


class PartName(NamedTuple):
    """The parsed name of a split or of a slice."""

    split: str
    """The name of the split."""
    start: float | None
    """The start of the slice in percent, from 0 to 100; None for the whole split."""
    stop: float
    """The end of the slice in percent."""


def parse_name(name: str) -> PartName:
    """Parse a name such as `train`, `train[:99%]` or `train[10%:20%]`.

    Raises ShardError if the brackets contain anything else.
    """
    if not name.endswith("]"):
        return PartName(name, None, 100.0)

    match = _NAME.fullmatch(name)
    if match is not None:
        start, stop = float(match["start"] or 0), float(match["stop"] or 100)
        if start < stop <= 100:
            return PartName(match["split"], start, stop)
    raise ShardError(
        f"split {name!r}: expected a slice such as train[:99%], train[99%:] or train[10%:20%],"
        " with the smaller percentage first"
    )


def part_size(name: str, total: int) -> int:
    """Return how many of the `total` samples in the split are in the slice `name`."""
    _, start, stop = parse_name(name)
    first, end = _between(start or 0.0, stop, total)
    return end - first


def _between(start: float, stop: float, total: int) -> tuple[int, int]:
    return round(total * start / 100), round(total * stop / 100)


class SplitSlice(Split):
    """The samples of a split between two percentages. A slice takes 1 to 8 bytes per sample in each
    process."""

    def __init__(self, whole: Split, name: str):
        """Select the samples. name: see `parse_name`. Raises ShardError if the slice is empty."""
        _, start, stop = parse_name(name)
        assert start is not None, f"{name} is a whole split"
        total = whole.num_samples
        first, end = _between(start, stop, total)
        if first == end:
            raise ShardError(f"{whole.root} {name!r}: this slice of {total:,} samples is empty")

        all_numbers = np.arange(total, dtype=np.min_scalar_type(total))
        keys = fold_numbers(lambda numbers: fold(numbers, _PART), all_numbers)
        self.whole = whole
        self.numbers: NDArray[np.integer] = all_numbers[are_ranked(keys, first, end)]
        """(num_samples,) sample numbers in `whole`, ascending."""

        super().__init__(
            whole.root,
            name,
            whole.filenames,
            lengths=whole.lengths,
            index=_PartRows(whole, self.numbers),
            num_classes=whole.num_classes,
            class_names=whole.class_names,
            tars=whole.tars,
            apply_exif=whole.apply_exif,
        )

    def read(self, i: int) -> bytes:
        return self.whole.read(int(self.numbers[i]))

    def where(self, i: int) -> str:
        return self.whole.where(int(self.numbers[i]))

    def key(self, i: int) -> str:
        return self.whole.key(int(self.numbers[i]))

    def key_in(self, name: str) -> str:
        return self.whole.key_in(name)

    def prefetch(self, samples: NDArray[np.int64]) -> None:
        self.whole.prefetch(self._in_whole(samples))

    def divided(self, samples: NDArray[np.int64]) -> list[tuple[Split, NDArray[np.int64]]]:
        """See `Split.divided`; the only source is the whole split."""
        return self.whole.divided(self._in_whole(samples))

    def _in_whole(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.numbers[samples].astype(np.int64)


class _PartRows:
    def __init__(self, whole: Split, numbers: NDArray[np.integer]):
        self._whole = whole
        self._numbers = numbers
        self.dtype = whole.index.dtype
        self.nbytes = len(numbers) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, key: Any) -> Any:
        """Return the rows at an index, slice or array, or a copy of the column with the given
        name."""
        if isinstance(key, str):
            return self._whole.index[key][self._numbers]
        return self._whole.index[self._numbers[key]]
