"""Images that are in the data twice, by the checksums of the index, compared byte by byte; also
those that are evaluated on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vit.data.overlap import image_keys
from vit.data.shards.index_file import has_checksums
from vit.data.shards.split import Split
from vit.data.sources import Sources


@dataclass(frozen=True)
class Duplicates:
    """Images whose bytes are equal."""

    groups: list[list[int]]
    """Training samples, two or more in each; groups with different labels come first."""
    also_evaluated: list[tuple[int, int]]
    """Training sample and validation sample, one pair for each training sample."""


def find_duplicates(split: Split | Sources, val_split: Split) -> Duplicates:
    """Find equal images in training data, and between these and what is evaluated on.

    Candidates have equal checksums and sizes in the index; their bytes are compared. Without
    checksums, as in indexes of earlier versions, nothing is found. Raises ShardError.
    """
    if not all(has_checksums(each.index) for each in [*split.splits, val_split]):
        return Duplicates([], [])
    train = _names(split)
    evaluated = _names(val_split)
    labels = split.index["label"]
    order = np.argsort(train, kind="stable")
    groups = []
    for members in np.split(order, np.flatnonzero(np.diff(train[order])) + 1):
        if len(members) > 1:
            by_bytes: dict[bytes, list[int]] = {}
            for sample in members.tolist():
                by_bytes.setdefault(split.read(sample), []).append(sample)
            groups += [same for same in by_bytes.values() if len(same) > 1]
    groups.sort(key=lambda same: (len(set(labels[same].tolist())) == 1, same))
    val_order = np.argsort(evaluated, kind="stable")
    places = np.searchsorted(evaluated[val_order], train)
    found = val_order[np.minimum(places, len(evaluated) - 1)]
    pairs = [
        (sample, int(found[sample]))
        for sample in np.flatnonzero(evaluated[found] == train).tolist()
        if split.read(sample) == val_split.read(int(found[sample]))
    ]
    return Duplicates(groups, pairs)


def _names(split: Split | Sources) -> NDArray[np.uint64]:
    """Return checksum and size of each image as one number, (N,)."""
    return np.concatenate([image_keys(each.index) for each in split.splits])
