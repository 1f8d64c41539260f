"""Any batch of a run again: the very images, crops, changes and partners of a step.

Nothing of a batch is stored, for nothing needs to be: the order is arithmetic, and augmentation and
mixing are drawn from (seed, epoch, sample, copy) and (seed, position). So the config in the run's
folder gives the rows of a step, the data their images, and the code of training the tensors, bit
for bit on the same kind of device. The record says which steps the run did, on how many ranks and
with which data; `samples/` (vit.hooks.sample_losses) has what each row's loss was.

    record, config -> step -> rows -> TrainBatches.fill -> Augment -> inputs, targets -> sheet, CSV
"""

from __future__ import annotations

import csv
import io
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from textwrap import wrap
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
from vit.extras.report.source import ReportSource
from vit.hooks.sample_losses import epoch_files, read_epoch
from vit.loggers.record import read_metrics
from vit.run_folder import METRICS_FILE
from vit.system.drawing import (
    Cell,
    as_colors,
    cell_width_in,
    display_name,
    plot_cells,
    share_lines,
    shorten,
)
from vit.system.files import replacing, told

ROWS_AT_ONCE = 64
STORED_PX = 160
"""Longer side of a stored image on the sheet."""
PAIRS_IN_A_LINE = 3
CAPTION_PT = 7.0
BOX_COLOR = (213, 94, 0)
"""Of the crop, in the stored image: the orange of the report."""


@dataclass(frozen=True)
class ReplayedRow:
    """A row of a batch. Its fields are the columns of the CSV."""

    row: int
    """In the global batch."""
    rank: int
    sample: int
    """Its number in the training data."""
    key: str
    shard: str
    label: int
    class_name: str
    copy: int
    """Which of its repeats (`data.aug_repeats`)."""
    stored_width: int
    """Pixels of the stored image."""
    stored_height: int
    crop_left: int
    """The window of the stored image that was decoded."""
    crop_top: int
    crop_width: int
    crop_height: int
    augmentation: str
    """What else was done, mixing apart."""
    mixed_by: str
    """mixup, cutmix or empty."""
    partner_row: int | None
    partner_key: str
    own_share: float
    """Of the row's own image in target and, with MixUp, in each pixel."""
    box: str
    """CutMix: top, bottom, left, right of what the partner shows, in pixels of the input."""
    weight: float
    """0: its image could not be decoded, and it was ignored."""
    loss: float | None
    """Of the target that was trained on; None: not kept."""
    margin: float | None
    """Logit of the label minus the largest other one; None: not kept."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a replayed batch with their tensors, which are on the host."""

    rows: list[ReplayedRow]
    inputs: Tensor
    """(B, C, H, W) float32: what the model was given."""
    targets: Tensor
    """(B, classes) float32, without label smoothing."""


class Replay:
    """The batch of step `step`, counted from 1 as in the record, of the run in `source`.

    rank: only the rows of this rank. Raises ValueError if the run did not do that step, or if its
    data are not there any more as they were; the augmentation runs on the device of `source`.
    """

    def __init__(self, source: ReportSource, step: int, rank: int | None = None):
        self.source = source
        self.step = step
        record = source.run_dir / METRICS_FILE
        lines = read_metrics(record)
        starts = [line for line in lines if line["kind"] == "start" and line["step"] < step]
        last = max((line.get("at_step", line["step"]) for line in lines), default=0)
        self.is_passed_over = any(
            line["first_passed_over"] <= step <= line["last_passed_over"]
            for line in lines
            if line["kind"] == "rewind"
        )
        if not last:
            raise ValueError(
                f"{record}: no step is recorded there: name the folder of a run that has trained,"
                " such as runs/demo"
            )
        if not 1 <= step <= last or not starts:
            raise ValueError(f"--step {step}: {source.run_dir} has done steps 1 to {last}")
        config = source.config
        train = source.train_set
        self.world_size = int(starts[-1].get("world_size", 1))
        self.order = source.order
        self.position = step - 1
        self._check_same(starts[-1])
        self._rows_of_ranks = self._divided(starts[-1])
        self.rows = range(self.order.global_batch_size)
        if rank is not None:
            if not 0 <= rank < self.world_size:
                raise ValueError(
                    f"--rank {rank}: step {step} was done by {self.world_size} rank(s): give 0 to"
                    f" {self.world_size - 1}"
                )
            self.rows = self._rows_of_ranks[rank]
        # As one rank of one: rows are those of the global batch.
        self._batches = TrainBatches(
            train.split,
            self.order,
            config.augment,
            source.train_format,
            on_bad_image=config.data.on_bad_image,
            num_batches=step,
        )
        self._values = self._kept_values()

    @property
    def epoch(self) -> int:
        """The epoch that the step is in, counted from 1."""
        return self.position // self.order.steps_per_epoch + 1

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width that images had at this step, in pixels."""
        return self.source.train_format.in_epoch(self.epoch - 1).size

    @property
    def has_losses(self) -> bool:
        """Whether the losses of this step are kept."""
        return bool(np.isfinite(self._values).any())

    def pieces(self, num_rows: int | None = None) -> Iterator[Rows]:
        """Yield the first `num_rows` rows, by default all, some at a time."""
        wanted = self.rows if num_rows is None else self.rows[:num_rows]
        unit = self._batches.row_unit
        at_once = unit * max(ROWS_AT_ONCE // unit, 1)
        # Rows that mix, and copies of an image, are made together.
        for first in range(wanted.start // unit * unit, wanted.stop, at_once):
            stop = min(first + at_once, -(-wanted.stop // unit) * unit)
            made = self._make(first, stop)
            kept = [row - first for row in range(first, stop) if row in wanted]
            yield Rows([made.rows[n] for n in kept], made.inputs[kept], made.targets[kept])

    def _divided(self, start: dict[str, Any]) -> list[range]:
        """Return the rows of each rank, by the record's line of an attempt's start."""
        batch_size = self.order.global_batch_size
        micro = start.get("plan", {}).get("micro_batch_size", batch_size // self.world_size)
        ranks = range(self.world_size)
        leaves = [leaves_of(rank, self.world_size, batch_size // micro) for rank in ranks]
        return [range(own.start * micro, own.stop * micro) for own in leaves]

    def _make(self, first: int, stop: int) -> Rows:
        layout = self._batches.layout_at(self.position)
        piece = BatchLayout(stop - first, layout.image_format, layout.num_columns)
        batch = piece.batch_in(memoryview(bytearray(piece.num_bytes)))
        self._batches.fill(self.position, first, batch)
        on_device = batch.to(self.source.device)
        inputs, targets = self.source.augment(on_device.images, on_device.labels, batch.table)
        return Rows(self._describe(batch, first), inputs.cpu(), targets.cpu())

    def _describe(self, batch: Batch, first: int) -> list[ReplayedRow]:
        config = self.source.config.augment
        split = self._batches.split
        ids, copies = self.order.rows_and_copies(self.position, first, first + len(batch.ids))
        entries = split.index[ids]
        keys = sample_keys(self.order.seed, self.epoch - 1, ids, copies)
        size = self.image_size
        crops = draw_crops(config, keys, entries["width"], entries["height"], size).tolist()
        names = [split.key(int(sample)) for sample in ids]
        partner = partners(config, len(ids)) if mixes(config) else np.arange(len(ids))
        table = batch.table.numpy()
        starts = [rows.start for rows in self._rows_of_ranks]
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
                stored_width=int(entries["width"][n]),
                stored_height=int(entries["height"][n]),
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

    def _kept_values(self) -> NDArray[np.float16]:
        """Return loss and margin (2, global_batch_size) of the step; NaN where not kept."""
        path = epoch_files(self.source.run_dir).get(self.epoch)
        if path is None:
            return np.full((2, self.order.global_batch_size), np.nan, np.float16)
        steps = self.order.steps_per_epoch
        return read_epoch(path, steps, self.order.global_batch_size)[self.position % steps]

    def _check_same(self, start: dict[str, Any]) -> None:
        """Raise ValueError unless data and order are those of the attempt that began with `start`.

        Records of earlier versions do not tell.
        """
        split = self.source.train_set.split
        recorded = start.get("content_sha256")
        if recorded and recorded != (found := content_sha256(split)):
            raise ValueError(
                f"{split.root}: its images or labels are not those that step {self.step} was"
                f" trained on (sha256 of their checksums {found[:12]}, the record has"
                f" {str(recorded)[:12]}): restore the data, or give their place with"
                " data.root=..."
            )
        recorded = start.get("first_batch_sha256")
        if recorded and recorded != rows_sha256(self.order, start["step"]):
            raise ValueError(
                f"{self.source.run_dir}: the settings here give another batch {start['step']} than"
                " the record has: the run was continued with other ones since, or an override"
                " changes the order; give those of the time as section.key=value"
            )


def _mixing(table: NDArray[np.float32], partner: int, partner_key: str) -> dict[str, Any]:
    """Return the fields of `ReplayedRow` that say how a row with this `table` (K,) was mixed."""
    if table[LAMBDA] == 1:
        nothing = {"mixed_by": "", "partner_row": None, "partner_key": "", "box": ""}
        return {**nothing, "own_share": 1.0}
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
    """Write a line for each row of the step; returns `path`."""
    columns = [field.name for field in fields(ReplayedRow)]
    with told(path), replacing(path) as file:
        # A name that is not UTF-8 has its bytes again.
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
        writer = csv.writer(text)
        writer.writerow(columns)
        for piece in replay.pieces():
            writer.writerows([getattr(row, name) for name in columns] for row in piece.rows)
        text.flush()
        text.detach()
    return path


def plot_step(replay: Replay, num_images: int, picture: Path) -> Path:
    """Draw the first rows: the stored image with its crop, and what the model was given."""
    source = replay.source
    data = source.config.data
    names = source.class_names
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
    titles = ["stored, with crop", "as trained on"] * (columns // 2)
    return plot_cells(cells, columns, heading, picture, titles, CAPTION_PT)


def _stored(replay: Replay, row: ReplayedRow) -> Tensor:
    """Return the stored image, (3, H, W) uint8, made small, with its crop as a box."""
    image = Image.fromarray(decode(replay.source.train_set.split.read(row.sample)))
    scale = STORED_PX / max(image.size)
    image = image.resize([max(round(side * scale), 1) for side in image.size])
    right = row.crop_left + row.crop_width
    bottom = row.crop_top + row.crop_height
    corners = [row.crop_left, row.crop_top, right, bottom]
    box = [min(round(corner * scale), STORED_PX - 2) for corner in corners]
    ImageDraw.Draw(image).rectangle(box, outline=BOX_COLOR, width=3)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _caption(row: ReplayedRow, target: list[str], width_in: float) -> list[str]:
    if not row.weight:
        return ["not readable"]
    done = [row.augmentation] if row.augmentation else []
    if row.mixed_by:
        done.append(f"{row.mixed_by} with row {row.partner_row}")
    if row.loss is not None:
        done.append(f"loss {row.loss:.3g}")
    lines = wrap("; ".join(done), int(width_in * 72 / (0.55 * CAPTION_PT)))
    return [*target, *lines]
