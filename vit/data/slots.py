"""The memory of batches: a ring of slots that training and its workers share.

The ring is planned from the size of a batch, the number of workers and a budget in bytes, and made
once: nothing is allocated while training runs, and page faults happen only in the first round.
Workers write rows into a slot; training gets a batch whose tensors are views of it. The slot is
free again when the last of these tensors is released.

The memory is an anonymous file (memfd), which is not in /dev/shm: containers have 64 MiB there.
Behind the slots is the status of each worker (`vit.system.stages`).
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from vit.data.batches import Batch, BatchLayout
from vit.system.stages import STATUS_BYTES, WorkerStatus

PART_ROWS = 128
"""Rows that a worker makes at a time. Order and draws cost 2 ms a part and 0.01 ms a row, decoding
1 ms a row (docs/experiments/)."""
DEFAULT_PREFETCH_BYTES = 2**30
MAX_READY_BATCHES = 16
"""With the default prefetch: more would not smooth the supply further."""
EVAL_READY_BATCHES = 2
"""Of evaluation, whose slots are kept while training goes on."""


@dataclass(frozen=True)
class Ring:
    """How the batches of a rank are divided among its workers, and the memory they take."""

    part_rows: int
    """Rows that a worker makes at a time."""
    num_slots: int
    """Batches that are in work, ready or in use."""
    slot_bytes: int
    """Memory of one batch, in full pages."""
    held_slots: int
    """Batches that training may hold at once; further ones are copies."""

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return self.num_slots * self.slot_bytes


def plan_ring(
    layout: BatchLayout,
    row_unit: int,
    num_batches: int,
    num_workers: int,
    prefetch_gib: float | None,
    on_gpu: bool,
    max_ready: int = MAX_READY_BATCHES,
) -> Ring:
    """Plan the ring of one rank for `num_batches` batches in all.

    Workers make parts of a multiple of `row_unit` rows. `prefetch_gib` bounds the memory; None: as
    much as keeps all workers busy, and up to `max_ready` more batches if a GiB has room for them.
    Raises ValueError if `prefetch_gib` is too little.
    """
    rows = layout.num_rows
    slot_bytes = -(-layout.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    # On a GPU one batch is copied while one computes and the next is handed out.
    held = 3 if on_gpu else 2
    part_rows = rows
    if num_workers:
        part_rows = min(math.ceil(PART_ROWS / row_unit) * row_unit, rows)
    least = held + 1 + math.ceil(num_workers * part_rows / rows)
    if not num_workers:
        slots = least
    elif prefetch_gib is None:
        slots = min(max(least, DEFAULT_PREFETCH_BYTES // slot_bytes), least + max_ready)
    else:
        slots = int(prefetch_gib * 2**30) // slot_bytes
    # Those that are held may be of a pass before (`Loader.restart`).
    slots = min(slots, num_batches + held)
    least = min(least, num_batches + held)
    if slots < least:
        needed_gib = math.ceil(least * slot_bytes / 2**30 * 1000) / 1000
        raise ValueError(
            f"data.prefetch_gib={prefetch_gib:g} holds {slots} of a rank's batches ({rows} images,"
            f" {slot_bytes / 2**20:.1f} MiB); {num_workers} workers need room for {least}: raise it"
            f" to {needed_gib:g}, or lower data.num_workers"
        )
    return Ring(part_rows, slots, slot_bytes, held)


class Slots:
    """The memory of a ring, and of the status of `num_workers` workers.

    Passed to a worker process it is the same memory there.
    """

    def __init__(self, layout: BatchLayout, ring: Ring, num_workers: int = 0):
        """layout: of the largest batch."""
        self.layout = layout
        self.ring = ring
        self._num_bytes = ring.num_bytes + max(num_workers, 1) * STATUS_BYTES
        self.free = deque(range(ring.num_slots))
        self._lent: dict[int, weakref.ref[memoryview]] = {}
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("batches")
        else:  # macOS
            with tempfile.TemporaryFile() as file:
                self._file = os.dup(file.fileno())
        os.ftruncate(self._file, self._num_bytes)
        self._map = mmap.mmap(self._file, self._num_bytes)
        self.close_file = weakref.finalize(self, os.close, self._file)
        """For when no more workers start: the memory stays while any process has it mapped."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "ring": self.ring,
            "_num_bytes": self._num_bytes,
            "_file": reduction.DupFd(self._file),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        file = state["_file"].detach()
        self._map = mmap.mmap(file, self._num_bytes)
        os.close(file)

    def take_back(self) -> None:
        """Make all slots free that are not lent; nobody may write into one meanwhile."""
        self.free.clear()
        for slot in range(self.ring.num_slots):
            # One that is given back meanwhile is free already.
            if slot not in self._lent and slot not in self.free:
                self.free.append(slot)

    def memory(self) -> Tensor:
        """Return all slots as one tensor, (num_bytes,) uint8."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=self.ring.num_bytes)

    def status(self, number: int) -> WorkerStatus:
        """Return the status of worker `number`; 0 without workers is this process itself."""
        start = self.ring.num_bytes + number * STATUS_BYTES
        return WorkerStatus(memoryview(self._map)[start : start + STATUS_BYTES])

    def batch(self, slot: int, layout: BatchLayout | None = None) -> Batch:
        """Return the batch in `slot`, to be written.

        layout: its own, where not all batches have that of the slots.
        """
        layout = layout or self.layout
        return layout.batch_in(self._memory(slot, layout))

    def lend(self, slot: int, layout: BatchLayout | None = None) -> Batch:
        """Return the batch in `slot`, to be read: the slot is free once its tensors are released.

        A copy, if too many batches are held. layout: as in `batch`.
        """
        layout = layout or self.layout
        if len(self._lent) >= self.ring.held_slots:
            batch = self.batch(slot, layout).clone()
            self.free.append(slot)
            return batch

        # The garbage collector may call this at any point of other code: both lines are atomic.
        def give_back(_: object) -> None:
            del self._lent[slot]
            self.free.append(slot)

        # All tensors of the batch hold a reference to this object.
        memory = self._memory(slot, layout)
        self._lent[slot] = weakref.ref(memory, give_back)
        return layout.batch_in(memory)

    def _memory(self, slot: int, layout: BatchLayout) -> memoryview:
        start = slot * self.ring.slot_bytes
        return memoryview(self._map)[start : start + layout.num_bytes]
