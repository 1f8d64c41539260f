"""Reconstruct the batch of any training step: images, crops, augmentations and mixing.

Batches are not stored. The order of samples is computed from the config, and random numbers depend
only on (seed, epoch, sample, copy) and (seed, position). On the same type of device, the
reconstructed tensors are bit-identical to the original ones. metrics.jsonl contains the steps, the
number of ranks and the hash of the data. `samples/` (vit.hooks.sample_losses) contains the loss of
each row.

    metrics, config -> step -> rows -> TrainBatches.fill -> Augment -> inputs, targets -> sheet, CSV
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from vit.data.augment.draw import draw_crops, mixes, partners, sample_keys
from vit.data.augment.table import BOTTOM, CUTMIX, LAMBDA, LEFT, RIGHT, TOP, describe
from vit.data.batches import Batch, BatchLayout, TrainBatches
from vit.data.decode.images import decode
from vit.data.order import rows_sha256
from vit.data.sources import content_sha256
from vit.distributed.world import leaves_of
from vit.extras.report.drawing import (
    Cell,
    as_colors,
    cell_width_in,
    display_name,
    plot_cells,
    share_lines,
    shorten,
    wrap_caption,
)
from vit.extras.report.source import ReportSource
from vit.hooks.sample_losses import epoch_files, read_epoch
from vit.loggers.lines import read_metrics
from vit.run_folder.paths import METRICS_FILE
from vit.system.files import csv_writer

ROWS_AT_ONCE = 64
STORED_PX = 160
"""The longer side of a stored image on the sheet, in pixels."""
PAIRS_IN_A_LINE = 3
CAPTION_PT = 7.0
BOX_COLOR = (213, 94, 0)
"""The color of the box that marks the crop in the stored image."""


@dataclass(frozen=True)
class ReplayedRow:
    """A row of a batch. Each field is a column of the CSV."""

    row: int
    """The index of the row in the global batch."""
    rank: int
    sample: int
    """The index of the sample in the training data."""
    key: str
    shard: str
    label: int
    class_name: str
    copy: int
    """The index of the repeated copy (`order.aug_repeats`)."""
    stored_width: int
    """The width of the stored image in pixels."""
    stored_height: int
    crop_left: int
    """The left edge of the crop in the stored image."""
    crop_top: int
    crop_width: int
    crop_height: int
    augmentation: str
    """A text that lists all augmentations except mixing."""
    mixed_by: str
    """The mixing method: "mixup", "cutmix", or "" for a row that is not mixed."""
    partner_row: int | None
    partner_key: str
    own_share: float
    """The weight of the row's own image in the target and, for MixUp, in each pixel."""
    box: str
    """The CutMix box that shows the partner image: top, bottom, left, right, in input pixels."""
    weight: float
    """The loss weight of the row, which is 0 if its image could not be decoded."""
    loss: float | None
    """The training loss of the row, or None if it was not recorded."""
    margin: float | None
    """The logit of the label minus the largest other logit, or None if it was not recorded."""


@dataclass(frozen=True)
class BatchRows:
    """Several rows of a replayed batch, with their tensors on the host."""

    rows: list[ReplayedRow]
    inputs: Tensor
    """The model's inputs, (B, C, H, W) float32."""
    targets: Tensor
    """The targets without label smoothing, (B, classes) float32."""


class Replay:
    """The batch of a training step. Steps are counted from 1.

    rank: the rank whose rows are replayed, or None for all rows. Augmentation runs on the device of
    `source`. Raises ValueError if the run did not reach the step, or if its data is missing or has
    changed.
    """

    def __init__(self, source: ReportSource, step: int, rank: int | None = None):
        start = _start_before(source.run_dir, step)
        self.source = source
        self.step = step
        self.world_size = int(start.get("world_size", 1))
        self.order = source.order
        self.position = step - 1
        self._check_same(start)

        self._rows_of_ranks = self._divided(start)
        if rank is None:
            self.rows = range(self.order.global_batch_size)
        elif 0 <= rank < self.world_size:
            self.rows = self._rows_of_ranks[rank]
        else:
            raise ValueError(
                f"--rank {rank}: step {step} ran with world size {self.world_size}: pass 0 to"
                f" {self.world_size - 1}"
            )

        # Load all rows, so that row numbers are those in the global batch.
        self._batches = TrainBatches(
            source.train_set.split,
            self.order,
            source.config.augment,
            source.train_format,
            on_bad_image=source.config.loader.on_bad_image,
            changes=source.train_set.changes,
            num_batches=step,
        )
        self._values = self._recorded_values()

    @property
    def epoch(self) -> int:
        """The epoch that contains the step, starting at 1."""
        return self.position // self.order.steps_per_epoch + 1

    @property
    def image_size(self) -> tuple[int, int]:
        """The height and width of images at this step, in pixels."""
        return self.source.train_format.in_epoch(self.epoch - 1).size

    @property
    def has_losses(self) -> bool:
        """True if the losses of this step were recorded."""
        return bool(np.isfinite(self._values).any())

    def pieces(self, num_rows: int | None = None) -> Iterator[BatchRows]:
        """Yield the first `num_rows` rows, or all rows, in pieces."""
        requested = self.rows if num_rows is None else self.rows[:num_rows]
        unit = self._batches.row_unit
        at_once = unit * max(ROWS_AT_ONCE // unit, 1)

        # Mixed rows and copies of an image must be computed together, so pieces consist of complete
        # groups.
        for first in range(requested.start // unit * unit, requested.stop, at_once):
            stop = min(first + at_once, math.ceil(requested.stop / unit) * unit)
            made = self._make(first, stop)
            indices = [row - first for row in range(first, stop) if row in requested]
            rows = [made.rows[n] for n in indices]
            yield BatchRows(rows, made.inputs[indices], made.targets[indices])

    def _divided(self, start: dict[str, Any]) -> list[range]:
        """Return the rows of each rank. start: the attempt's `start` line in metrics.jsonl."""
        batch_size = self.order.global_batch_size
        micro = start.get("plan", {}).get("micro_batch_size", batch_size // self.world_size)
        num_leaves = batch_size // micro
        leaves = [leaves_of(rank, self.world_size, num_leaves) for rank in range(self.world_size)]
        return [range(part.start * micro, part.stop * micro) for part in leaves]

    def _make(self, first: int, stop: int) -> BatchRows:
        """Load and augment the rows from `first` to `stop` of the global batch."""
        layout = self._batches.layout_at(self.position)
        piece = BatchLayout(stop - first, layout.image_format, layout.num_columns)
        batch = piece.batch_in(memoryview(bytearray(piece.num_bytes)))
        self._batches.fill(self.position, first, batch)

        on_device = batch.to(self.source.device)
        inputs, targets = self.source.augment(on_device.images, on_device.labels, batch.table)
        return BatchRows(self._describe(batch, first), inputs.cpu(), targets.cpu())

    def _describe(self, batch: Batch, first: int) -> list[ReplayedRow]:
        """Return the rows of `batch`, which begins at row `first` of the global batch."""
        config = self.source.config.augment
        split = self._batches.split
        ids, copies = self.order.rows_and_copies(self.position, first, first + len(batch.ids))
        entries = split.index[ids]

        keys = sample_keys(self.order.seed, self.epoch - 1, ids, copies)
        widths, heights = entries["width"], entries["height"]
        crops = draw_crops(config, keys, widths, heights, self.image_size).tolist()
        names = [split.key(int(sample)) for sample in ids]

        partner = partners(config, len(ids)) if mixes(config) else np.arange(len(ids))
        table = batch.table.numpy()
        starts = [rows.start for rows in self._rows_of_ranks]  # the first row of each rank

        return [
            ReplayedRow(
                row=first + n,
                rank=bisect_right(starts, first + n) - 1,
                sample=sample,
                key=names[n],
                shard=split.where(sample),
                label=int(batch.labels[n]),
                class_name=display_name(self.source.class_names, int(batch.labels[n])),
                copy=int(copies[n]),
                stored_width=int(widths[n]),
                stored_height=int(heights[n]),
                crop_left=crops[n][0],
                crop_top=crops[n][1],
                crop_width=crops[n][2],
                crop_height=crops[n][3],
                augmentation=", ".join(describe(config, table[n])),
                weight=float(batch.weights[n]),
                loss=_number(self._values[0, first + n]),
                margin=_number(self._values[1, first + n]),
                **_mixing(table[n], first + int(partner[n]), names[partner[n]]),
            )
            for n, sample in enumerate(ids.tolist())
        ]

    def _recorded_values(self) -> NDArray[np.float16]:
        """Return the recorded losses and margins, (2, global_batch_size), with NaN for missing
        values."""
        path = epoch_files(self.source.run_dir).get(self.epoch)
        if path is None:
            return np.full((2, self.order.global_batch_size), np.nan, np.float16)

        steps = self.order.steps_per_epoch
        return read_epoch(path, steps, self.order.global_batch_size)[self.position % steps]

    def _check_same(self, start: dict[str, Any]) -> None:
        """Raise ValueError if the data or the order differ from those of the attempt.

        start: the `start` line of the attempt. Runs of earlier versions recorded no hashes and are
        not checked.
        """
        split = self.source.train_set.split
        content = start.get("content_sha256")
        actual = content_sha256(split) if content else ""
        if content and content != actual:
            raise ValueError(
                f"{split.root}: the images or labels have changed since step {self.step} (sha256 of"
                f" their checksums {actual[:12]}, expected {str(content)[:12]}): restore the data,"
                " or pass the original data with data.root=..."
            )

        first_batch = start.get("first_batch_sha256")
        if first_batch and first_batch != rows_sha256(self.order, start["step"]):
            raise ValueError(
                f"{self.source.run_dir}: batch {start['step']} differs from the recorded one,"
                " because the run was continued with different settings, or an override changes the"
                " order: pass the original settings as section.key=value"
            )


def _start_before(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the `start` line of the attempt that did this step.

    Raises ValueError if the run did not reach the step.
    """
    record = run_dir / METRICS_FILE
    lines = read_metrics(record)
    last = max((line["step"] for line in lines), default=0)
    if not last:
        raise ValueError(
            f"{record}: contains no training steps: pass the folder of a run that has trained,"
            " such as runs/demo"
        )

    starts = [line for line in lines if line["kind"] == "start" and line["step"] < step]
    if not 1 <= step <= last or not starts:
        raise ValueError(f"--step {step}: {run_dir} has steps 1 to {last}: pass one of them")
    return starts[-1]


def _mixing(table: NDArray[np.float32], partner: int, partner_key: str) -> dict[str, Any]:
    """Return the mixing fields of a row. table: its augmentation parameters, (K,)."""
    if table[LAMBDA] == 1:
        return {"mixed_by": "", "partner_row": None, "partner_key": "", "own_share": 1.0, "box": ""}

    is_cut = bool(table[CUTMIX])
    box = " ".join(f"{table[column]:.0f}" for column in (TOP, BOTTOM, LEFT, RIGHT))
    return {
        "mixed_by": "cutmix" if is_cut else "mixup",
        "partner_row": partner,
        "partner_key": partner_key,
        "own_share": float(table[LAMBDA]),
        "box": box if is_cut else "",
    }


def _number(value: np.float16) -> float | None:
    return None if np.isnan(value) else float(value)


def write_csv(replay: Replay, path: Path) -> Path:
    """Write a CSV line for each row of the step, and return `path`."""
    columns = [field.name for field in fields(ReplayedRow)]
    with csv_writer(path) as writer:
        writer.writerow(columns)
        for piece in replay.pieces():
            for row in piece.rows:
                writer.writerow([getattr(row, name) for name in columns])
    return path


def plot_step(replay: Replay, num_images: int, picture: Path) -> Path:
    """Draw the stored image with its crop, and the model's input, for the first rows."""
    source = replay.source
    data, names = source.config.data, source.class_names
    side = cell_width_in(2 * PAIRS_IN_A_LINE)

    cells = []
    for piece in replay.pieces(num_images):
        shown = as_colors(piece.inputs, data.mean, data.std)
        for row, image, target in zip(piece.rows, shown, piece.targets, strict=True):
            lines = [shorten(text, side, CAPTION_PT) for text in (row.key, row.class_name)]
            cells.append(Cell(_stored(replay, row), lines))
            cells.append(Cell(image, _caption(row, share_lines(target, names, side), side)))

    height, width = replay.image_size
    first = replay.rows.start
    heading = (
        f"{source.run_dir.name}, step {replay.step:,} (epoch {replay.epoch}): rows {first} to"
        f" {first + len(cells) // 2 - 1} of {replay.order.global_batch_size:,}, {width} × {height}"
        " pixels"
    )

    columns = min(len(cells), 2 * PAIRS_IN_A_LINE)
    return plot_cells(
        cells,
        columns,
        heading=heading,
        picture=picture,
        titles=["stored, with crop", "as trained on"] * (columns // 2),
        caption_pt=CAPTION_PT,
    )


def _stored(replay: Replay, row: ReplayedRow) -> Tensor:
    """Return a thumbnail of the stored image with the crop as a box, (3, H, W) uint8."""
    image = Image.fromarray(decode(replay.source.train_set.split.read(row.sample)))
    scale = STORED_PX / max(image.size)
    image = image.resize([max(round(side * scale), 1) for side in image.size])

    left, top = row.crop_left, row.crop_top
    corners = [left, top, left + row.crop_width, top + row.crop_height]
    box = [min(round(corner * scale), STORED_PX - 2) for corner in corners]
    ImageDraw.Draw(image).rectangle(box, outline=BOX_COLOR, width=3)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _caption(row: ReplayedRow, target: list[str], width_in: float) -> list[str]:
    if not row.weight:
        return ["not readable"]

    parts = [row.augmentation] if row.augmentation else []
    if row.mixed_by:
        parts.append(f"{row.mixed_by} with row {row.partner_row}")
    if row.loss is not None:
        parts.append(f"loss {row.loss:.3g}")

    return [*target, *wrap_caption("; ".join(parts), width_in, CAPTION_PT)]
