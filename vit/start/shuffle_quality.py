"""Measure how well an order shuffles, compared with a perfect shuffle.

Two measures are averaged over evenly spaced batches of one shuffle: the number of classes per
batch, and the distance between a sample's positions in the shuffle and in storage. The expected
number of distinct classes under a perfect shuffle is computed from the class sizes. Only labels are
read, not images.

If shards are sorted by class and a shuffle only mixes samples that are stored close together,
batches contain few classes and samples move little.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vit.data.order import Order, Share
from vit.data.select import count_labels

NUM_BATCHES = 32
"""The number of batches to measure. Measuring them takes 0.1 s with 4,096 ImageNet samples per
batch."""
POOR = 0.95
"""An order is reported as poor if the number of classes per batch is below this fraction of the
number in a perfect shuffle."""


@dataclass(frozen=True)
class ShuffleQuality:
    """The measures of an order, which `str` formats as one line."""

    classes_per_batch: float
    """The mean number of distinct classes in a batch."""
    perfect_classes_per_batch: float
    """The expected number of distinct classes in a batch of a perfect shuffle."""
    distance: float
    """The mean distance between a sample's positions in storage and in the shuffle, as a fraction
    of the data set; 1/3 for a perfect shuffle."""
    remedy: str = ""
    """The setting that would improve the shuffle; "" if the order is good."""

    def __str__(self) -> str:
        remedy = f"; {self.remedy}" if self.remedy else ""
        return (
            f"{self.classes_per_batch:.1f} classes in a batch (a perfect shuffle:"
            f" {self.perfect_classes_per_batch:.1f}), samples moved by {100 * self.distance:.0f} %"
            f" of the data set (33 %){remedy}"
        )


def measure_shuffle(order: Order, labels: NDArray[np.integer]) -> ShuffleQuality:
    """Measure the first shuffle of `order` over samples with `labels` (N,).

    With several sources, the draws are numbered source by source, and a draw's number counts as its
    position in storage.
    """
    num_steps = order.steps_per_shuffle
    num_batches = min(NUM_BATCHES, num_steps)
    # Divide the shuffle into `num_batches` equal parts, and take the batch in the middle of each.
    steps = (2 * np.arange(num_batches) + 1) * num_steps // (2 * num_batches)

    shares = order.shares or (Share(len(labels), len(labels)),)
    class_sizes = np.zeros(int(labels.max()) + 1, np.int64)
    for share in shares:
        numbers = range(share.num_samples) if share.chosen is None else share.chosen
        counts = count_labels(labels[share.first :], numbers, len(class_sizes))
        # Each sample of a small source may be drawn several times.
        class_sizes += np.round(counts * (share.num_draws / share.num_samples)).astype(np.int64)

    draws = replace(order, shares=())
    batches = [(labels[order.batch(step)], draws.batch(step)) for step in steps.tolist()]
    quality = quality_of(batches, steps / num_steps, 1 / num_steps, order.num_samples, class_sizes)
    is_good = quality.classes_per_batch >= POOR * quality.perfect_classes_per_batch
    if is_good or order.block_samples == 1:
        return quality
    return replace(
        quality,
        remedy="neighbors in the shards have the same class and stay together in blocks of"
        f" {order.block_samples}: set order.block_samples=1 to separate them",
    )


def quality_of(
    batches: Sequence[tuple[NDArray[np.integer], NDArray[np.int64]]],
    starts: ArrayLike,
    duration: float,
    num_places: int,
    class_sizes: NDArray[np.int64],
) -> ShuffleQuality:
    """Measure a shuffle from some of its batches, each given as (labels, positions in storage).

    Args:
        starts: The start of each batch, as a fraction of one shuffle.
        duration: The length of a batch, as a fraction of one shuffle.
    """
    num_classes = []
    expected = []
    moved = []
    for (labels, places), start in zip(batches, np.asarray(starts), strict=True):
        num_classes.append(len(np.unique(labels)))
        expected.append(_expected_classes(class_sizes, len(np.unique(places))))
        times = start + duration * (np.arange(len(places)) + 0.5) / len(places)
        moved.append(np.abs(times - (places + 0.5) / num_places).mean())

    return ShuffleQuality(
        float(np.mean(num_classes)), float(np.mean(expected)), float(np.mean(moved))
    )


def _expected_classes(class_sizes: NDArray[np.int64], num_images: int) -> float:
    """Return the expected number of classes among `num_images` drawn without replacement.

    If a class has n of N images, C(N - n, g) / C(N, g) is the hypergeometric probability that g
    images contain none of them.
    """
    total = int(class_sizes.sum())
    expected = 0.0

    # Classes of the same size have the same probability.
    sizes, counts = np.unique(class_sizes[class_sizes > 0], return_counts=True)
    for size, num_classes in zip(sizes.tolist(), counts.tolist(), strict=True):
        num_others = total - size
        missed = (
            math.exp(_log_choose(num_others, num_images) - _log_choose(total, num_images))
            if num_others >= num_images
            else 0.0
        )
        expected += num_classes * (1.0 - missed)

    return expected


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
