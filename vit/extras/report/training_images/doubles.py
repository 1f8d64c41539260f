"""Find images that are in the training data twice, or also in the evaluation data.

Candidates have equal checksums in the index; their bytes are compared.
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
    """The images with equal bytes."""

    groups: list[list[int]]
    """The groups of two or more equal training samples; groups with different labels come first."""
    also_evaluated: list[tuple[int, int]]
    """The pairs of a training sample and an equal validation sample, one per training sample."""


def find_duplicates(split: Split | Sources, val_split: Split) -> Duplicates:
    """Find equal images in the training data, and between training and evaluation data.

    Candidates have equal checksums and sizes in the index; their bytes are compared. Returns no
    images for an index without checksums, of an earlier version. Raises ShardError.
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
    val_samples = val_order[np.minimum(places, len(evaluated) - 1)]
    pairs = [
        (sample, int(val_samples[sample]))
        for sample in np.flatnonzero(evaluated[val_samples] == train).tolist()
        if split.read(sample) == val_split.read(int(val_samples[sample]))
    ]
    return Duplicates(groups, pairs)


def _names(split: Split | Sources) -> NDArray[np.uint64]:
    """Return checksum and size of each image as one number, (N,)."""
    return np.concatenate([image_keys(each.index) for each in split.splits])
