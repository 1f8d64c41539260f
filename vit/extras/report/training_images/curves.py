"""What a run's losses say about its training images: never learnt, forgotten, mislabelled.

`samples/` has loss and margin of each row (vit.hooks.sample_losses); the order tells which image a
row showed, and the draws of mixing how much of it was to be seen. Added up over the epochs:

    mean margin     Pleiss et al. 2020 (AUM): an image that is taken for another class while its
                    class is learnt from others probably has a wrong label
    times forgotten Toneva et al. 2019: how often it was right and then wrong; some never get right

Where images mix, an observation weighs as much as its own image prevails, 2 lambda - 1, and nothing
below a half; loss and margin are still those of the mixed input.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vit.data.augment.draw import draw_mix, mixes
from vit.data.augment.table import LAMBDA, table_layout
from vit.extras.report.source import ReportSource
from vit.extras.report.training_images.doubles import Duplicates
from vit.extras.report.training_images.near_doubles import NearDoubles
from vit.hooks.sample_losses import epoch_files, read_epoch
from vit.system.files import replacing, told

MAX_CURVE_VALUES = 2**28
"""Margins that are held, 512 MiB; of longer runs every n-th epoch."""
LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class SampleCurves:
    """Of N training images in E kept epochs; NaN where an image was not seen."""

    epochs: list[int]
    """(E,) counted from 1."""
    num_seen: NDArray[np.int64]
    """(N,) epochs in which the image was seen."""
    mean_loss: NDArray[np.float64]
    """(N,)"""
    mean_margin: NDArray[np.float64]
    """(N,)"""
    first_right: NDArray[np.int64]
    """(N,) the first epoch in which it was classified rightly; 0: in none."""
    last_right: NDArray[np.int64]
    """(N,) the last such epoch; 0: none."""
    times_forgotten: NDArray[np.int64]
    """(N,) epochs in which it was wrong, and right when it was seen before."""
    curve_epochs: list[int]
    """(C,) those of `margins`."""
    margins: NDArray[np.float16]
    """(C, N)"""

    @property
    def never_learnt(self) -> NDArray[np.bool_]:
        """(N,) seen, and never right."""
        return (self.num_seen > 0) & (self.first_right == 0)

    @property
    def late_wrong(self) -> NDArray[np.bool_]:
        """(N,) seen, and not right in the second half of the epochs."""
        half = self.epochs[len(self.epochs) // 2]
        return (self.num_seen > 0) & (self.last_right < half)

    @property
    def suspects(self) -> NDArray[np.int64]:
        """All images that were seen, those first whose label is least likely to be right."""
        seen = np.flatnonzero(self.num_seen > 0)
        return seen[np.argsort(self.mean_margin[seen], kind="stable")]


def read_curves(
    source: ReportSource, on_epoch: Callable[[int, int], None] | None = None
) -> SampleCurves:
    """Read the losses of a run. `on_epoch(done, total)` is called after each epoch.

    Raises ValueError if none were kept or their files are damaged.
    """
    files = epoch_files(source.run_dir)
    num_samples = source.train_set.split.num_samples  # streams have none, and say so
    if not files:
        raise ValueError(
            f"{source.run_dir}: no losses of its images were kept (log.sample_losses=0, a run that"
            " has not saved yet, or one of an earlier version): train with log.sample_losses=1"
        )
    every = -(-len(files) * num_samples // MAX_CURVE_VALUES)
    margins = []
    num_seen = np.zeros(num_samples, np.int64)
    sums = np.zeros((3, num_samples))
    first_right = np.zeros(num_samples, np.int64)
    last_right = np.zeros(num_samples, np.int64)
    times_forgotten = np.zeros(num_samples, np.int64)
    was_right = np.zeros(num_samples, bool)
    for number, (epoch, path) in enumerate(files.items()):
        added = _add_up(source, epoch, path)
        weight, _, margin = added
        seen = weight > 0
        is_right = seen & (margin > 0)
        num_seen += seen
        sums += added
        first_right[is_right & (first_right == 0)] = epoch
        last_right[is_right] = epoch
        times_forgotten += seen & was_right & ~is_right
        was_right = np.where(seen, is_right, was_right)
        if number % every == 0:
            with np.errstate(invalid="ignore"):
                margins.append((margin / np.where(seen, weight, np.nan)).astype(np.float16))
        if on_epoch is not None:
            on_epoch(number + 1, len(files))
    total = np.where(sums[0] > 0, sums[0], np.nan)
    return SampleCurves(
        list(files),
        num_seen,
        sums[1] / total,
        sums[2] / total,
        first_right,
        last_right,
        times_forgotten,
        list(files)[::every],
        np.stack(margins),
    )


def _add_up(source: ReportSource, epoch: int, path: Path) -> NDArray[np.float64]:
    """Return the weights of an epoch's observations of each image, and weighted sums of their
    losses and margins: (3, N)."""
    order = source.order
    augment = source.config.augment
    steps = order.steps_per_epoch
    values = read_epoch(path, steps, order.global_batch_size)
    width = table_layout(augment).width
    readable = np.ones(order.global_batch_size, np.float32)
    ids = []
    rows = []
    for step in range(steps):
        losses, margins = np.nan_to_num(values[step].astype(np.float64), nan=np.nan, posinf=LARGEST)
        weights = (~np.isnan(losses)).astype(np.float64)
        if not weights.any():
            continue
        position = (epoch - 1) * steps + step
        if mixes(augment):
            table = np.zeros((len(losses), width), np.float32)
            table[:, LAMBDA] = 1.0  # stays so behind `augment.mixup_off_epoch`
            size = source.train_format.in_epoch(epoch - 1).size
            draw_mix(augment, table, readable, order.seed, position, 0, size, epoch - 1)
            weights *= np.maximum(2 * table[:, LAMBDA] - 1, 0)
        ids.append(order.batch(position))
        rows.append([weights, *(np.nan_to_num(each) * weights for each in (losses, margins))])
    num_samples = source.train_set.split.num_samples
    if not ids:
        return np.zeros((3, num_samples))
    which = np.concatenate(ids)
    columns = np.concatenate(rows, axis=1)
    return np.stack([np.bincount(which, column, num_samples) for column in columns])


# --- files ----------------------------------------------------------------------------------------


def write_table(
    source: ReportSource,
    curves: SampleCurves,
    duplicates: Duplicates,
    near: NearDoubles | None,
    path: Path,
) -> Path:
    """Write a line for each image that was seen, the most suspicious first, as CSV.

    near: None if they were not looked for; the last three columns are then empty.
    """
    split = source.train_set.split
    names = source.class_names
    labels = split.index["label"]
    twin_of = {other: same[0] for same in duplicates.groups for other in same[1:]}
    near_to: dict[int, tuple[str, float, str]] = {}
    if near is not None:
        val = source.val_split
        for sample, other, cosine in reversed(near.also_evaluated):
            near_to[sample] = (val.key(other), cosine, val.name)
        for first, second, cosine in reversed(near.pairs):
            near_to[first] = (split.key(second), cosine, split.name)
            near_to[second] = (split.key(first), cosine, split.name)
    columns = ("key", "shard", "label", "class_name", "mean_margin", "mean_loss", "epochs_seen")
    with told(path), replacing(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        writer = csv.writer(text)
        more = ("first_right_epoch", "times_forgotten", "same_bytes_as")
        writer.writerow([*columns, *more, "near_to", "near_cosine", "near_split"])
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
        text.flush()
        text.detach()
    return path


def write_keys(source: ReportSource, samples: Sequence[int], path: Path) -> Path:
    """Write the keys of `samples`, a line each, as `data.exclude` takes them."""
    split = source.train_set.split
    with told(path), replacing(path) as file:
        for sample in samples:
            file.write(split.key(sample).encode("utf-8", "surrogateescape") + b"\n")
    return path
