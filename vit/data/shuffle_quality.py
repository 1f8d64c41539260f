"""How well an order of samples mixes the classes: two figures beside those of a perfect shuffle.

The data's story: some batches, evenly spaced over the time of one shuffle, say how many classes a
batch has and how far its samples lie from where they are stored; the counts of all labels say what
a perfect shuffle would give. Only labels are read, no images.

A shuffle that only mixes what is stored close together has few classes in a batch where shards are
sorted by class, and moves samples little where shards come in the order of storage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vit.data.order import Order, Share

NUM_BATCHES = 32
"""Batches that are looked at: 0.1 s at 4,096 of ImageNet's samples."""
PERFECT_DISTANCE = 1 / 3
"""Mean distance of two independent uniform numbers in [0, 1)."""
POOR = 0.95
"""Below so large a part of a perfect shuffle's classes the order is said to mix badly."""


@dataclass(frozen=True)
class ShuffleQuality:
    """Figures of an order; `str` makes one line of them."""

    classes_per_batch: float
    """Distinct classes in a batch, mean."""
    perfect_classes_per_batch: float
    """What a perfect shuffle is expected to have."""
    distance: float
    """Mean distance between a sample's place in storage and in time, as a share of both; a perfect
    shuffle's is 1/3."""
    remedy: str = ""
    """What would mix better; empty where nothing is wrong."""

    def __str__(self) -> str:
        return (
            f"{self.classes_per_batch:.1f} classes in a batch (a perfect shuffle:"
            f" {self.perfect_classes_per_batch:.1f}), samples moved by {100 * self.distance:.0f} %"
            " of the data set (33 %)" + (f"; {self.remedy}" if self.remedy else "")
        )


def measure_shuffle(order: Order, labels: NDArray[np.integer]) -> ShuffleQuality:
    """Figures of `order` over samples with these labels (N,), from batches of its first shuffle.
    Where draws are not samples, places in storage are those of the draws: all of a source, and then
    all of the next."""
    num_steps = order.steps_per_shuffle
    num_batches = min(NUM_BATCHES, num_steps)
    steps = [
        int(step) for step in (2 * np.arange(num_batches) + 1) * num_steps // (2 * num_batches)
    ]
    shares = order.shares or (Share(len(labels), len(labels)),)
    class_sizes = sum_classes(
        np.round(count_classes(labels, share) * (share.num_draws / share.num_samples))
        for share in shares
    )
    draws = replace(order, shares=())
    batches = [(labels[order.batch(step)], draws.batch(step)) for step in steps]
    quality = quality_of(
        batches,
        np.array(steps) / num_steps,
        1 / num_steps,
        order.num_samples,
        class_sizes.astype(np.int64),
    )
    if (
        order.block_samples == 1
        or quality.classes_per_batch >= POOR * quality.perfect_classes_per_batch
    ):
        return quality
    neighbours = (
        "neighbours in the shards are of one class and stay together in blocks of"
        f" {order.block_samples}"
    )
    return replace(quality, remedy=f"{neighbours}: data.block_samples=1 parts them")


def count_classes(labels: NDArray[np.integer], share: Share) -> NDArray[np.int64]:
    """How many of a share's samples each class has."""
    parts = []
    for start in range(0, share.num_samples, 2**22):  # in parts: `bincount` copies
        own = (
            np.arange(start, min(start + 2**22, share.num_samples))
            if share.chosen is None
            else share.chosen[start : start + 2**22]
        )
        parts.append(np.bincount(labels[share.first + own]))
    return sum_classes(parts)


def sum_classes(counts: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """The sum of counts of classes, some of which know fewer of them."""
    total = np.zeros(0)
    for more in counts:
        total = np.pad(total, (0, max(len(more) - len(total), 0)))
        total[: len(more)] += more
    return total


def quality_of(
    batches: Sequence[tuple[NDArray[np.integer], NDArray[np.int64]]],
    starts: ArrayLike,
    duration: float,
    num_places: int,
    class_sizes: NDArray[np.int64],
) -> ShuffleQuality:
    """Figures of batches of (labels, places in storage). A batch begins at its `starts` and takes
    `duration`, both as shares of the time of one shuffle."""
    found = []
    expected = []
    moved = []
    for (labels, places), start in zip(batches, np.asarray(starts), strict=True):
        found.append(len(np.unique(labels)))
        expected.append(_expected_classes(class_sizes, len(np.unique(places))))
        times = start + duration * (np.arange(len(places)) + 0.5) / len(places)
        moved.append(np.abs(times - (places + 0.5) / num_places).mean())
    return ShuffleQuality(float(np.mean(found)), float(np.mean(expected)), float(np.mean(moved)))


def _expected_classes(class_sizes: NDArray[np.int64], num_images: int) -> float:
    """Expected classes among `num_images` drawn without replacement: the hypergeometric chance of
    none is C(N - n, g) / C(N, g)."""
    total = int(class_sizes.sum())
    expected = 0.0
    for size, classes in zip(
        *np.unique(class_sizes[class_sizes > 0], return_counts=True), strict=True
    ):
        rest = total - int(size)
        none = (
            math.exp(_log_choose(rest, num_images) - _log_choose(total, num_images))
            if rest >= num_images
            else 0.0
        )
        expected += int(classes) * (1.0 - none)
    return expected


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
