"""Samples that keep their place in all batches, but are not trained on or have another label.

`data.exclude` and `data.relabel` change only the named samples. Every other row of every batch,
including its crop and its random numbers, is the same as in a run without these settings. A run
with these settings and a run without them therefore differ in nothing else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HOLE = -1
"""The label of an excluded sample, which keeps its position in the order but has no weight."""


@dataclass(frozen=True)
class Changes:
    """New labels for some samples. `HOLE` excludes a sample."""

    numbers: NDArray[np.int64]
    """(n,) sample numbers in ascending order."""
    labels: NDArray[np.int64]
    """(n,) new labels."""

    @staticmethod
    def of(labels: dict[int, int]) -> Changes:
        """Create the changes from a dict of sample numbers and new labels."""
        numbers = np.array(sorted(labels), np.int64)
        return Changes(numbers, np.array([labels[number] for number in numbers.tolist()], np.int64))

    @property
    def holes(self) -> NDArray[np.int64]:
        """The numbers of the excluded samples."""
        return self.numbers[self.labels == HOLE]

    def changed(self, ids: NDArray[np.int64], labels: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return the labels of the samples `ids`, whose labels in the index are `labels`."""
        if not len(self.numbers):
            return labels
        places = np.searchsorted(self.numbers, ids) % len(self.numbers)
        return np.where(self.numbers[places] == ids, self.labels[places], labels)

    def identity(self) -> str:
        """Return a fingerprint of the changes, of which there must be at least one."""
        content = np.stack([self.numbers, self.labels]).astype("<i8").tobytes()
        return f"{len(self.numbers):,} changed ({hashlib.sha256(content).hexdigest()[:16]})"


NO_CHANGES = Changes.of({})
