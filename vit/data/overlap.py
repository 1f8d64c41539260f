"""Find images that are used for both training and evaluation.

Samples from the same index are compared by number, even if they are in two slices of a split.
Images from different indexes are compared by checksum and size, which finds copies in another
folder without reading the images.
"""

from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vit.data.select import CHUNK_ROWS
from vit.data.shards.index_file import first_samples
from vit.data.shards.split import Split
from vit.data.shards.split_slice import parse_name
from vit.data.sources import TrainSet


def find_trained(train_set: TrainSet, split: Split) -> list[NDArray[np.bool_]]:
    """Return a mask (n,) for each source, which marks the images of `split` that are selected from
    that source."""
    return [_same_numbers(source, chosen, split) for source, chosen in _sources(train_set)]


def count_equal(train_set: TrainSet, split: Split) -> int:
    """Return the number of images in `split` that are training samples or copies of them."""
    is_equal = np.zeros(split.num_samples, np.bool_)
    for source, chosen in _sources(train_set):
        is_equal |= _same_numbers(source, chosen, split)
        is_equal |= _same_checksums(source, chosen, split)
    return int(is_equal.sum())


def image_keys(index: np.ndarray) -> NDArray[np.uint64]:
    """Return one number per image, (n,), that combines its checksum and size.

    index: An array (n,) of INDEX_DTYPE, or an object that provides the same columns.
    """
    return index["crc32c"].astype(np.uint64) << np.uint64(32) | index["size"].astype(np.uint64)


def _sources(train_set: TrainSet) -> list[tuple[Split, NDArray[np.integer] | None]]:
    """Return each source with the numbers of its selected samples, or None if all are selected."""
    sources = [*zip_longest(train_set.split.splits, (share.chosen for share in train_set.shares))]
    holes = train_set.changes.holes
    if not len(holes):
        return sources

    firsts = first_samples(split.num_samples for split, _ in sources)
    return [
        (
            split,
            np.setdiff1d(np.arange(split.num_samples) if chosen is None else chosen, holes - first),
        )
        for first, (split, chosen) in zip(firsts[:-1], sources, strict=True)
    ]


def _same_numbers(
    source: Split, chosen: NDArray[np.integer] | None, split: Split
) -> NDArray[np.bool_]:
    if _place(source) != _place(split):
        return np.zeros(split.num_samples, np.bool_)
    trained = np.arange(source.num_samples) if chosen is None else chosen.astype(np.int64)
    [(_, trained_of_whole)] = source.divided(trained)
    [(_, evaluated)] = split.divided(np.arange(split.num_samples))
    return np.isin(evaluated, trained_of_whole, kind="table")


def _place(split: Split) -> tuple[str, str]:
    # `.` and links can give one folder several names, so resolve the path.
    root = str(split.root.resolve()) if isinstance(split.root, Path) else split.root
    return root, parse_name(split.name).split


def _same_checksums(
    source: Split, chosen: NDArray[np.integer] | None, split: Split
) -> NDArray[np.bool_]:
    """Return whether each image of `split` has the checksum of a chosen image of `source`."""
    keys, places = np.unique(image_keys(split.index), return_inverse=True)
    is_trained = np.zeros(len(keys), np.bool_)
    for start in range(0, source.num_samples if chosen is None else len(chosen), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        trained = np.sort(image_keys(source.index[chunk if chosen is None else chosen[chunk]]))
        nearest = np.minimum(np.searchsorted(trained, keys), len(trained) - 1)
        # Search sorted keys, because np.isin takes 20 times as long.
        is_trained |= trained[nearest] == keys

    # A checksum of 0 means that it is unknown, so ignore it.
    is_trained &= keys >> np.uint64(32) != 0
    return is_trained[places]
