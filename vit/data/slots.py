"""The memory of batches: a ring of slots that training and its workers share.

The ring is planned from the size of a batch, the number of workers and a budget in bytes. It is
allocated once, before training, and page faults occur only in the first round.
Workers write rows into a slot; training gets a batch whose tensors are views of it. The slot is
free again when the last of these tensors is released.

The memory is an anonymous file (memfd), because containers limit /dev/shm to 64 MiB. The status of
each worker (`vit.system.stages`) follows the slots.
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
"""The rows of a part. Order and draws cost 2 ms a part and 0.01 ms a row, decoding 1 ms a row
(docs/experiments/)."""
DEFAULT_PREFETCH_BYTES = 2**30
MAX_READY_BATCHES = 16
"""The most ready batches with the default prefetch; more would not smooth the supply further."""
EVAL_READY_BATCHES = 2
"""The ready batches of evaluation; its slots stay allocated during training."""


@dataclass(frozen=True)
class Ring:
    """The division of a rank's batches among its workers, and their memory."""

    part_rows: int
    """The rows of a part, which one worker makes."""
    num_slots: int
    """The batches that are being made, ready or in use."""
    slot_bytes: int
    """The memory for one batch, rounded up to whole pages."""
    held_slots: int
    """The batches that training may hold at once; further ones are copies."""

    @property
    def num_bytes(self) -> int:
        """The memory of all slots."""
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

    The rows of a part are a multiple of `row_unit`. `prefetch_gib` bounds the memory; None: enough
    to keep all workers busy, and up to `max_ready` more batches if they fit in a GiB. Raises
    ValueError if `prefetch_gib` is too small.
    """
    rows = layout.num_rows
    slot_bytes = math.ceil(layout.num_bytes / mmap.PAGESIZE) * mmap.PAGESIZE
    # With a GPU three batches are held: one computes, one is being copied, and one was just
    # returned. With two, the loader would copy each batch on the host.
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
    # Held batches may belong to an earlier pass (`Loader.restart`), so they add to `num_batches`.
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
    """The memory of a ring and the status of `num_workers` workers.

    Pickled to a worker process, the object maps the same memory.
    """

    def __init__(self, layout: BatchLayout, ring: Ring, num_workers: int = 0):
        """layout: the layout of the largest batch."""
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
        """Closes the file when no more workers start. The memory lives as long as it is mapped."""

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
        """Free all slots that are not lent. No worker may still be writing to a slot."""
        self.free.clear()
        for slot in range(self.ring.num_slots):
            # The garbage collector may call `give_back` during this loop. Then the slot is free
            # already, and a second entry would lend it to two batches.
            if slot not in self._lent and slot not in self.free:
                self.free.append(slot)

    def memory(self) -> Tensor:
        """Return all slots as one tensor, (num_bytes,) uint8."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=self.ring.num_bytes)

    def status(self, number: int) -> WorkerStatus:
        """Return the status of worker `number`. Without workers, number 0 is this process."""
        start = self.ring.num_bytes + number * STATUS_BYTES
        return WorkerStatus(memoryview(self._map)[start : start + STATUS_BYTES])

    def batch(self, slot: int, layout: BatchLayout | None = None) -> Batch:
        """Return the batch in `slot`, to be written.

        layout: the layout of this batch, if batches differ in image size.
        """
        layout = layout or self.layout
        return layout.batch_in(self._memory(slot, layout))

    def lend(self, slot: int, layout: BatchLayout | None = None) -> Batch:
        """Return the batch in `slot`, to be read. The slot is free when its tensors are released.

        Returns a copy if training already holds `Ring.held_slots` batches. layout: see `batch`.
        """
        layout = layout or self.layout
        # Without this limit a caller that keeps batches would use up all slots. The next batch
        # would then never be made, because no slot is free.
        if len(self._lent) >= self.ring.held_slots:
            batch = self.batch(slot, layout).clone()
            self.free.append(slot)
            return batch

        # The garbage collector may call this between any two operations of other code, so it must
        # not take a lock; both lines are atomic.
        def give_back(_: object) -> None:
            del self._lent[slot]
            self.free.append(slot)

        # All tensors of the batch, and all views of them, hold a reference to this object, so the
        # weak reference dies with the last of them.
        memory = self._memory(slot, layout)
        self._lent[slot] = weakref.ref(memory, give_back)
        return layout.batch_in(memory)

    def _memory(self, slot: int, layout: BatchLayout) -> memoryview:
        start = slot * self.ring.slot_bytes
        return memoryview(self._map)[start : start + layout.num_bytes]
