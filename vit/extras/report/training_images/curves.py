"""Find training images that were never learned, forgotten or mislabeled, from a run's losses.

`samples/` contains the loss and margin of each row of a batch (vit.hooks.sample_losses). A row's
image is computed from the order, and its weight from the random numbers used for mixing. Statistics
over all epochs:

    mean margin     Pleiss et al. 2020 (AUM): a label is probably wrong if the model predicts
                    another class, although it has learned the class from other images
    times forgotten Toneva et al. 2019: how often an image was correct and then wrong

With mixing, the weight of an observation is 2 lambda - 1, or 0 if lambda is below one half. The
loss and the margin are computed from the mixed input.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vit.data.augment.draw import draw_mix, mixes
from vit.data.augment.table import LAMBDA, table_layout
from vit.extras.report.source import ReportSource
from vit.extras.report.training_images.doubles import Duplicates, NearDoubles
from vit.hooks.sample_losses import epoch_files, read_epoch
from vit.system.files import csv_writer, replacing, report_write_errors

MAX_CURVE_VALUES = 2**28
"""The maximum number of margins in memory (512 MiB). For longer runs, only the margins of every
n-th epoch are kept."""
LARGEST = float(np.finfo(np.float16).max)
COLUMNS = (
    *("key", "shard", "label", "class_name", "mean_margin", "mean_loss", "epochs_seen"),
    *("first_right_epoch", "times_forgotten", "same_bytes_as"),
    *("near_to", "near_cosine", "near_split"),
)
"""The columns of the table of all images."""


@dataclass(frozen=True)
class SampleCurves:
    """The curves of N training images over E recorded epochs. Values of images not seen are NaN."""

    epochs: list[int]
    """The recorded epochs, starting at 1."""
    num_seen: NDArray[np.int64]
    """The number of epochs in which each image was seen, (N,)."""
    mean_loss: NDArray[np.float64]
    """The mean loss of each image, (N,)."""
    mean_margin: NDArray[np.float64]
    """The mean margin of each image, (N,)."""
    first_right: NDArray[np.int64]
    """The first epoch in which each image was classified correctly, or 0 if never, (N,)."""
    last_right: NDArray[np.int64]
    """The last epoch in which each image was classified correctly, or 0 if never, (N,)."""
    times_forgotten: NDArray[np.int64]
    """The number of times each image was classified incorrectly after being correct, (N,)."""
    margins: NDArray[np.float16]
    """The margin of each image in C epochs, (C, N). With many epochs, only every n-th is kept."""

    @property
    def never_learnt(self) -> NDArray[np.bool_]:
        """A mask of the images that were seen but never classified correctly, (N,)."""
        return (self.num_seen > 0) & (self.first_right == 0)

    @property
    def late_wrong(self) -> NDArray[np.bool_]:
        """A mask of the images that were never correct in the second half of the epochs, (N,)."""
        half = self.epochs[len(self.epochs) // 2]
        return (self.num_seen > 0) & (self.last_right < half)

    @property
    def suspects(self) -> NDArray[np.int64]:
        """The images that were seen, sorted by mean margin, so that probable label errors come
        first."""
        seen = np.flatnonzero(self.num_seen > 0)
        return seen[np.argsort(self.mean_margin[seen], kind="stable")]


def read_curves(
    source: ReportSource, on_epoch: Callable[[int, int], None] = lambda done, total: None
) -> SampleCurves:
    """Read the losses of a run. `on_epoch(done, total)` is called after each epoch.

    Raises ValueError if no losses were recorded or if their files are damaged.
    """
    files = epoch_files(source.run_dir)
    num_samples = source.train_set.split.num_samples  # raises ValueError for a stream
    if not files:
        raise ValueError(
            f"{source.run_dir}: this run recorded no per-image losses: train with"
            " log.sample_losses=1"
        )

    every = math.ceil(len(files) * num_samples / MAX_CURVE_VALUES)  # keep every n-th epoch
    margins = []
    num_seen = np.zeros(num_samples, np.int64)
    sums = np.zeros((3, num_samples))
    first_right = np.zeros(num_samples, np.int64)
    last_right = np.zeros(num_samples, np.int64)
    times_forgotten = np.zeros(num_samples, np.int64)
    was_right = np.zeros(num_samples, bool)

    for number, (epoch, path) in enumerate(files.items()):
        sums_of_epoch = _sum_epoch(source, epoch, path)
        weight, _, margin = sums_of_epoch
        seen = weight > 0
        is_right = seen & (margin > 0)
        num_seen += seen
        sums += sums_of_epoch
        first_right[is_right & (first_right == 0)] = epoch
        last_right[is_right] = epoch
        times_forgotten += seen & was_right & ~is_right
        was_right = np.where(seen, is_right, was_right)

        if number % every == 0:
            with np.errstate(invalid="ignore"):
                margins.append((margin / np.where(seen, weight, np.nan)).astype(np.float16))
        on_epoch(number + 1, len(files))

    total = np.where(sums[0] > 0, sums[0], np.nan)
    return SampleCurves(
        list(files),
        num_seen,
        mean_loss=sums[1] / total,
        mean_margin=sums[2] / total,
        first_right=first_right,
        last_right=last_right,
        times_forgotten=times_forgotten,
        margins=np.stack(margins),
    )


def _sum_epoch(source: ReportSource, epoch: int, path: Path) -> NDArray[np.float64]:
    """Return each image's weight, weighted loss and weighted margin in an epoch, (3, N).

    An image can be in several rows (`order.aug_repeats`), whose values are added.
    """
    order = source.order
    steps = order.steps_per_epoch
    values = read_epoch(path, steps, order.global_batch_size)

    samples_of_steps = []
    rows_of_steps = []
    for step in range(steps):
        losses, margins = np.nan_to_num(values[step].astype(np.float64), nan=np.nan, posinf=LARGEST)
        weights = (~np.isnan(losses)).astype(np.float64)
        if not weights.any():
            continue

        position = (epoch - 1) * steps + step
        if mixes(source.config.augment):
            weights *= _own_weights(source, epoch, position)
        samples_of_steps.append(order.batch(position))
        rows_of_steps.append(
            [weights, weights * np.nan_to_num(losses), weights * np.nan_to_num(margins)]
        )

    num_samples = source.train_set.split.num_samples
    if not samples_of_steps:
        return np.zeros((3, num_samples))
    samples = np.concatenate(samples_of_steps)
    columns = np.concatenate(rows_of_steps, axis=1)
    return np.stack([np.bincount(samples, column, num_samples) for column in columns])


def _own_weights(source: ReportSource, epoch: int, position: int) -> NDArray[np.float32]:
    """Return how much each row of a mixed batch counts for its own image, (B,).

    The weight is 2 lambda - 1, or 0 if the partner image has the larger share.
    """
    order, augment = source.order, source.config.augment
    table = np.zeros((order.global_batch_size, table_layout(augment).width), np.float32)
    table[:, LAMBDA] = 1.0  # The weight remains 1 after `augment.mixup_off_epoch`.
    draw_mix(
        augment,
        table,
        weights=np.ones(order.global_batch_size, np.float32),
        seed=order.seed,
        position=position,
        first_row=0,
        size=source.train_format.in_epoch(epoch - 1).size,
        epoch=epoch - 1,
    )

    return np.maximum(2 * table[:, LAMBDA] - 1, 0)


# --- files ----------------------------------------------------------------------------------------


def write_table(
    source: ReportSource,
    curves: SampleCurves,
    duplicates: Duplicates,
    near: NearDoubles | None,
    path: Path,
) -> Path:
    """Write a CSV line for each image that was seen, in order of mean margin.

    near: None if near duplicates were not searched for. The last three columns are then empty.
    """
    split = source.train_set.split
    names, labels = source.class_names, source.train_labels

    twin_of: dict[int, int] = {}
    for first, *others in duplicates.groups:
        twin_of.update(dict.fromkeys(others, first))

    near_to: dict[int, tuple[str, float, str]] = {}
    if near is not None:
        for sample, other, cosine in reversed(near.also_evaluated):
            near_to[sample] = (source.val_split.key(other), cosine, source.val_split.name)
        for first, second, cosine in reversed(near.pairs):
            near_to[first] = (split.key(second), cosine, split.name)
            near_to[second] = (split.key(first), cosine, split.name)

    with csv_writer(path) as writer:
        writer.writerow(COLUMNS)
        for sample in curves.suspects.tolist():
            twin = twin_of.get(sample)
            near_key, cosine, near_split = near_to.get(sample, ("", 0.0, ""))
            writer.writerow(
                [
                    split.key(sample),
                    split.where(sample),
                    int(labels[sample]),
                    names[labels[sample]],
                    f"{curves.mean_margin[sample]:.4f}",
                    f"{curves.mean_loss[sample]:.4f}",
                    int(curves.num_seen[sample]),
                    int(curves.first_right[sample]) or "",
                    int(curves.times_forgotten[sample]),
                    "" if twin is None else split.key(twin),
                    near_key,
                    f"{cosine:.4f}" if near_key else "",
                    near_split,
                ]
            )
    return path


def write_keys(source: ReportSource, samples: Sequence[int], path: Path) -> Path:
    """Write the keys of `samples`, one per line, in the format of `data.exclude`."""
    split = source.train_set.split
    with report_write_errors(path), replacing(path) as file:
        for sample in samples:
            file.write(split.key(sample).encode("utf-8", "surrogateescape") + b"\n")
    return path
