"""What the device needs to know of a batch's operations, made on the host from the batch's table.

Which row has which operation is known here, so nothing waits for the device: images lie sorted by
kind (`vit.data.augment.kinds`) in each round, and all numbers reach the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import vit.data.augment.pixel_ops as pixel_ops
from vit.data.augment.dialects import OPS, Drawn, Size
from vit.data.augment.kinds import NUM_NUMBERS, Kind, Round
from vit.data.augment.table import FLIP, OpColumn, TableLayout

_ALL_OPS = [op for ops in OPS.values() for op in ops]
_FIRST_OP = dict(zip(OPS, np.cumsum([0, *map(len, OPS.values())]).tolist(), strict=False))
_KIND_BOUNDS = np.arange(len(Kind) + 1)


class Rounds(NamedTuple):
    """The operations of B rows in R rounds, the flip being the first one.

    Rows lie in blocks, which they do not leave; in each round those of a block are sorted by kind.
    """

    kinds: NDArray[np.int64]
    """(R, B), in the order of each round."""
    num_tables: NDArray[np.int64]
    """(R, B): rows of `Kind.TABLE` that come before it, in all rounds."""
    moves: Tensor
    """(R + 1, B) int64: which row of the order before comes here, counted from the block's first
    row; at first the order before is that of the batch, and at last the order is."""
    numbers: Tensor
    """(R, B, NUM_NUMBERS) float32, in the order of each round."""
    tables: Tensor
    """(rows of `Kind.TABLE`, 256) uint8, in the order of each round."""


def plan_rounds(
    layout: TableLayout,
    table: NDArray[np.float32],
    size: Size,
    block_rows: int,
    device: torch.device,
) -> Rounds:
    """Make the rounds for the rows of `table` (B, K), images of `size`; tensors on `device`."""
    columns = (OpColumn("flip", FLIP), *layout.op_columns)
    kinds, where, numbers, tables = _find_numbers(columns, table, size)
    batch = np.arange(len(table))
    block = batch // block_rows
    order = np.argsort(block * len(Kind) + kinds, axis=1, kind="stable")
    place = np.argsort(order, axis=1)
    moves = np.take_along_axis(np.vstack([batch, place]), np.vstack([order, batch]), 1)
    kinds, where = (np.take_along_axis(values, order, 1) for values in (kinds, where))
    by_table = kinds == Kind.TABLE
    num_tables = by_table.cumsum().reshape(kinds.shape) - by_table
    arrays: list[NDArray] = [moves - block * block_rows, numbers[where], tables[where[by_table]]]
    return Rounds(kinds, num_tables, *to_device(arrays, device))


def apply_rounds(rounds: Rounds, rows: slice, images: Tensor, out: Tensor) -> None:
    """Write `images`, which are those of `rows`, a block, into `out` after their operations."""
    moves = rounds.moves[:, rows]
    # A single row, as of large images on a CPU, stays where it is.
    alone = len(images) == 1
    current = out.copy_(images) if alone else images
    for index, kinds in enumerate(rounds.kinds[:, rows]):
        if not alone:
            current = current.index_select(0, moves[index])
        starts = np.searchsorted(kinds, _KIND_BOUNDS).tolist()
        tables = rounds.tables[rounds.num_tables[index, rows.start] :]
        Round(current, starts, rounds.numbers[index, rows], tables)()
    if not alone:
        torch.index_select(current, 0, moves[-1], out=out)


def _find_numbers(
    columns: Sequence[OpColumn], table: NDArray[np.float32], size: Size
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.uint8]]:
    """Return kinds (R, B), and where in numbers (R * B, NUM_NUMBERS) and tables (R * B, 256)."""
    shape = len(columns), len(table)
    drawn = np.zeros((shape[0] * shape[1], 4), np.float32)  # operation, strength, place
    for rows, column in zip(np.split(drawn, len(columns)), columns, strict=True):
        width = 4 if column.op_set == "big_vision" else 2
        rows[:, :width] = table[:, column.column : column.column + width]
        rows[:, 0] += np.where(rows[:, 0] < 0, 0, _FIRST_OP[column.op_set])
    # Sorted by operation, so that each has a slice.
    order = np.argsort(drawn[:, 0], kind="stable")
    drawn = drawn[order]
    kinds = np.zeros(len(drawn), np.int64)
    numbers = np.zeros((len(drawn), NUM_NUMBERS), np.float32)
    tables = np.empty((len(drawn), len(pixel_ops.LEVELS)), np.uint8)
    ops, starts = np.unique(drawn[:, 0], return_index=True)
    for number, start, stop in zip(ops, starts, [*starts[1:], len(drawn)], strict=True):
        if number < 0:  # these rows drew none
            continue
        op = _ALL_OPS[int(number)]
        kinds[start:stop] = op.kind
        values = torch.from_numpy(drawn[start:stop])
        found = op.numbers(Drawn(values[:, 1:2], values[:, 2:], size))
        if isinstance(found, Tensor):
            tables[start:stop] = pixel_ops.to_levels(found)
            continue
        for place, value in enumerate(found):
            numbers[start:stop, place : place + 1] = value
    where = np.argsort(order).reshape(shape)
    return kinds[where], where, numbers, tables


def to_device(arrays: Sequence[NDArray], device: torch.device) -> list[Tensor]:
    """Copy `arrays` to `device` in one copy, for which the host does not wait."""
    starts = np.cumsum([0, *(-(-array.nbytes // 8) * 8 for array in arrays)]).tolist()
    # Only from page-locked memory. Fake tensors may be on a GPU where there is none.
    pinned = device.type == "cuda" and torch.cuda.is_available()
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pinned)
    views = [
        (start, start + array.nbytes, torch.from_numpy(array))
        for start, array in zip(starts, arrays, strict=False)
    ]
    for start, stop, tensor in views:
        packed[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    packed = packed.to(device, non_blocking=True)
    return [
        packed[start:stop].view(tensor.dtype).view(tensor.shape) for start, stop, tensor in views
    ]
