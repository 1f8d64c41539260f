"""Plan a batch's augmentation operations on the host, and apply them on the device.

The host knows the operation of each row, so planning does not wait for the device. Each round
applies one operation to each image, with images sorted by kind (`vit.data.augment.kinds`). The
whole plan is sent to the device in one copy.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import vit.data.augment.pixel_ops as pixel_ops
from vit.data.augment.dialects import OPS, Drawn, Size
from vit.data.augment.kinds import NUM_NUMBERS, Kind, Round
from vit.data.augment.table import FLIP, NO_OP, OpColumn, TableLayout

_ALL_OPS = [op for ops in OPS.values() for op in ops]
_ENDS = np.cumsum([len(ops) for ops in OPS.values()]).tolist()
_FIRST_OP = {name: end - len(OPS[name]) for name, end in zip(OPS, _ENDS, strict=True)}
"""The index in `_ALL_OPS` of the first operation of each set."""
_KIND_BOUNDS = np.arange(len(Kind) + 1)


class Rounds(NamedTuple):
    """The operations to apply to each of B rows in each of R rounds. The first round is the flip.

    In each round, the rows of a block are sorted by kind. Rows never move to another block.
    """

    kinds: NDArray[np.int64]
    """(R, B): the kind of each row, in the row order of each round."""
    num_tables: NDArray[np.int64]
    """(R, B): the number of `Kind.TABLE` rows that precede each row, over all rounds."""
    moves: Tensor
    """(R + 1, B) int64: the row at index i in round r was at index `moves[r, i]` in round r - 1.
    Indices are relative to the first row of the block. Before the first round and after the last
    one, rows are in batch order."""
    numbers: Tensor
    """(R, B, NUM_NUMBERS) float32: the parameters of each row, in the order of each round."""
    tables: Tensor
    """(number of `Kind.TABLE` rows, 256) uint8: lookup tables, in the order of each round."""


def plan_rounds(
    layout: TableLayout,
    table: NDArray[np.float32],
    size: Size,
    block_rows: int,
    device: torch.device,
) -> Rounds:
    """Plan the rounds for the rows of `table` (B, K) and images of `size`, with tensors on
    `device`."""
    columns = (OpColumn("flip", FLIP), *layout.op_columns)
    kinds, sources, numbers, tables = _find_numbers(columns, table, size)

    # Sort by block first, because `apply_rounds` gets one block at a time. Use a stable sort, so
    # that the plan does not depend on the numpy version.
    block = np.arange(len(table)) // block_rows
    orders = np.argsort(block * len(Kind) + kinds, axis=1, kind="stable")
    kinds, sources = (np.take_along_axis(values, orders, 1) for values in (kinds, sources))

    by_table = kinds == Kind.TABLE
    num_tables = by_table.cumsum().reshape(kinds.shape) - by_table
    moves = _find_moves(orders) - block * block_rows  # relative to the first row of the block
    arrays: list[NDArray] = [moves, numbers[sources], tables[sources[by_table]]]
    return Rounds(kinds, num_tables, *to_device(arrays, device))


def _find_moves(orders: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place that each row had in the round before, (R + 1, B): see `Rounds.moves`.

    orders: (R, B), the row of the batch at each place of each round. An example with four rows of
    the kinds 0 to 2, and two rounds:

                                     round 0    round 1
        kinds, in batch order        1 0 2 0    0 2 0 1
        orders                       1 3 0 2    0 2 3 1    row of the batch at each place
        places                       2 0 3 1    0 3 1 2    place of each row of the batch
        moves, round 0               1 3 0 2               = orders[0], from the batch order
        moves, round 1                          2 3 1 0    = places[0][orders[1]]
        moves, back to the batch                0 3 1 2    = places[1]

    In round 1, place 1 gets row 2 of the batch, which round 0 left at place 3.
    """
    batch = np.arange(orders.shape[1])
    places = np.argsort(orders, axis=1)  # the argsort of a permutation is its inverse
    places_before = np.vstack([batch, places])
    rows_after = np.vstack([orders, batch])
    return np.take_along_axis(places_before, rows_after, 1)


def apply_rounds(rounds: Rounds, rows: slice, images: Tensor, out: Tensor) -> None:
    """Apply the rounds to `images`, the block `rows` of the batch, and write the result to
    `out`."""
    moves = rounds.moves[:, rows]
    # A block of one row, which occurs with large images on a CPU, needs no moves. Skipping them
    # saves one image copy per round: the operations change `out` in place.
    is_single = len(images) == 1
    current = out.copy_(images) if is_single else images
    for index, kinds in enumerate(rounds.kinds[:, rows]):
        if not is_single:
            current = current.index_select(0, moves[index])
        # Rows are sorted by kind, so each kind is one contiguous slice and needs one device call.
        starts = np.searchsorted(kinds, _KIND_BOUNDS).tolist()
        tables = rounds.tables[rounds.num_tables[index, rows.start] :]
        Round(current, starts, rounds.numbers[index, rows], tables)()

    if not is_single:
        torch.index_select(current, 0, moves[-1], out=out)


def _find_numbers(
    columns: Sequence[OpColumn], table: NDArray[np.float32], size: Size
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.uint8]]:
    """Return kinds (R, B), sources (R, B), numbers (R * B, NUM_NUMBERS) and tables (R * B, 256).

    `sources` contains, for each row of each round, the index of its entry in `numbers` and
    `tables`.
    """
    # For each row of each round: index in `_ALL_OPS`, strength, x and y of the cutout.
    drawn = np.zeros((len(columns), len(table), 4), np.float32)
    for rows, column in zip(drawn, columns, strict=True):
        width = 4 if column.op_set == "big_vision" else 2
        rows[:, :width] = table[:, column.column : column.column + width]
        rows[rows[:, 0] != NO_OP, 0] += _FIRST_OP[column.op_set]

    # Sort all rounds by operation, so that each operation computes its parameters in one call.
    order = np.argsort(drawn[..., 0].ravel(), kind="stable")
    by_op = drawn.reshape(-1, 4)[order]

    kinds = np.zeros(len(by_op), np.int64)
    numbers = np.zeros((len(by_op), NUM_NUMBERS), np.float32)
    tables = np.empty((len(by_op), len(pixel_ops.LEVELS)), np.uint8)
    ops, starts = np.unique(by_op[:, 0], return_index=True)
    for index, start, stop in zip(ops, starts, [*starts[1:], len(by_op)], strict=True):
        if index == NO_OP:
            continue
        op = _ALL_OPS[int(index)]
        kinds[start:stop] = op.kind

        values = torch.from_numpy(by_op[start:stop])
        parameters = op.numbers(Drawn(values[:, 1:2], values[:, 2:], size))
        if isinstance(parameters, Tensor):
            tables[start:stop] = pixel_ops.to_levels(parameters)
            continue
        for place, parameter in enumerate(parameters):
            numbers[start:stop, place : place + 1] = parameter

    # Invert `order` to get the index of each (round, row) in the sorted arrays.
    sources = np.argsort(order).reshape(drawn.shape[:2])
    return kinds[sources], sources, numbers, tables


def to_device(arrays: Sequence[NDArray], device: torch.device) -> list[Tensor]:
    """Copy `arrays` to `device` in one transfer, without waiting for it."""
    tensors = [torch.from_numpy(array) for array in arrays]
    # An int64 view must begin at a multiple of 8 bytes, so pad each tensor.
    padded_bytes = [math.ceil(tensor.nbytes / 8) * 8 for tensor in tensors]

    # Only copies from page-locked memory are asynchronous, so pin the memory. Without a GPU,
    # `device` may still be "cuda" for fake tensors, and pinning would fail.
    pinned = device.type == "cuda" and torch.cuda.is_available()
    packed = torch.empty(sum(padded_bytes), dtype=torch.uint8, pin_memory=pinned)

    for view, tensor in zip(_views(packed, padded_bytes, tensors), tensors, strict=True):
        view.copy_(tensor)
    return _views(packed.to(device, non_blocking=True), padded_bytes, tensors)


def _views(packed: Tensor, padded_bytes: list[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of `packed`, uint8, with the dtypes and shapes of `tensors`."""
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(packed.split(padded_bytes), tensors, strict=True)
    ]
