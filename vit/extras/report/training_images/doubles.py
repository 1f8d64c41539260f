"""Find duplicate training images, and training images that are also validation images.

Images with equal checksums in the index are compared byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vit.data.overlap import image_keys
from vit.data.shards.split import Split
from vit.data.sources import Sources


@dataclass(frozen=True)
class Duplicates:
    """The images with identical bytes."""

    groups: list[list[int]]
    """The groups of identical training samples. Groups with different labels come first."""
    also_evaluated: list[tuple[int, int]]
    """The pairs of a training sample and an identical validation sample, one per training
    sample."""


def find_duplicates(split: Split | Sources, val_split: Split) -> Duplicates:
    """Find identical images in the training data, and between training and validation data.

    Images with equal checksums and sizes in the index are compared byte by byte. Raises
    ShardError if an image cannot be read.
    """
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
    """Combine the checksum and the size of each image into one number, (N,)."""
    return np.concatenate([image_keys(each.index) for each in split.splits])
