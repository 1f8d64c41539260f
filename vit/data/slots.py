"""The memory for batches: a ring buffer of slots that training and its workers share.

The size of the ring depends on the batch size, the number of workers and a memory budget. The ring
is allocated once before training, so page faults occur only on the first use of each slot. Workers
write rows to a slot, and training gets a batch whose tensors are views of the slot. The slot
becomes free when the last of these tensors is released.

The memory is an anonymous file (memfd) because containers limit /dev/shm to 64 MiB.
"""

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
from vit.data.stages import STATUS_BYTES, WorkerStatus

PART_ROWS = 128
"""The number of rows in a part of a batch. Computing the order and the random numbers takes 2 ms
per part and 0.01 ms per row. Decoding takes 1 ms per row (docs/experiments/)."""
PREFETCH_BYTES = 2**30
"""The maximum memory of a ring that holds more batches than its workers need."""
MAX_READY_BATCHES = 16
"""The default maximum number of ready batches. More ready batches do not reduce waits further."""
EVAL_READY_BATCHES = 2
"""The number of ready batches in evaluation, small because the slots stay allocated during
training."""


@dataclass(frozen=True)
class Ring:
    """The sizes of a rank's ring buffer, and of the parts into which batches are divided."""

    part_rows: int
    """The number of rows in a part, which one worker makes."""
    num_slots: int
    """The maximum number of batches that are in progress, ready or in use at the same time."""
    slot_bytes: int
    """The number of bytes per batch, rounded up to whole pages."""
    held_slots: int
    """The number of batches that training may hold. Further batches are returned as copies."""

    @property
    def num_bytes(self) -> int:
        """The total number of bytes in all slots."""
        return self.num_slots * self.slot_bytes


def plan_ring(
    layout: BatchLayout,
    row_unit: int,
    num_batches: int,
    num_workers: int,
    on_gpu: bool,
    max_ready: int = MAX_READY_BATCHES,
) -> Ring:
    """Plan the memory of one rank's loader for `num_batches` batches in total.

    The memory keeps all workers busy, and holds up to `max_ready` more batches if they fit in 1
    GiB. The number of rows per part is a multiple of `row_unit`.
    """
    rows = layout.num_rows
    slot_bytes = math.ceil(layout.num_bytes / mmap.PAGESIZE) * mmap.PAGESIZE

    # On a GPU, training holds three batches: one in the current step, one being copied, and one
    # just returned. With two slots, the loader would copy each batch on the host.
    held = 3 if on_gpu else 2
    # After `Loader.restart`, held batches may be left over from the previous pass, so add their
    # count.
    most = num_batches + held
    if not num_workers:
        return Ring(rows, min(held + 1, most), slot_bytes, held)

    part_rows = min(math.ceil(PART_ROWS / row_unit) * row_unit, rows)
    least = held + 1 + math.ceil(num_workers * part_rows / rows)
    slots = min(max(least, PREFETCH_BYTES // slot_bytes), least + max_ready)
    return Ring(part_rows, min(slots, most), slot_bytes, held)


class Slots:
    """The shared memory: the ring of slots and the status of `num_workers` workers.

    A copy pickled to a worker process maps the same memory.
    """

    def __init__(self, ring: Ring, num_workers: int = 0):
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
        """Closes the file. Call this when no more workers will start. The mapped memory remains
        valid."""

    def __getstate__(self) -> dict[str, Any]:
        return {
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
        """Free all slots that training does not hold. Must not be called while a worker is
        writing."""
        self.free.clear()
        for slot in range(self.ring.num_slots):
            # Check for duplicates, because the garbage collector may call `give_back` during this
            # loop and free the slot. A second entry would lend the slot to two batches.
            if slot not in self._lent and slot not in self.free:
                self.free.append(slot)

    def memory(self) -> Tensor:
        """Return all slots as one tensor, (num_bytes,) uint8."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=self.ring.num_bytes)

    def status(self, number: int) -> WorkerStatus:
        """Return the status of worker `number`. Without workers, 0 is this process."""
        start = self.ring.num_bytes + number * STATUS_BYTES
        return WorkerStatus(memoryview(self._map)[start : start + STATUS_BYTES])

    def batch(self, slot: int, layout: BatchLayout) -> Batch:
        """Return the batch in `slot`, for writing."""
        return layout.batch_in(self._memory(slot, layout))

    def lend(self, slot: int, layout: BatchLayout) -> Batch:
        """Return the batch in `slot`, for reading. The slot is freed when its tensors are released.

        Returns a copy if training already holds `Ring.held_slots` batches.
        """
        # Limit the lent slots. Otherwise, a caller that keeps batches could use up all slots.
        if len(self._lent) >= self.ring.held_slots:
            batch = self.batch(slot, layout).clone()
            self.free.append(slot)
            return batch

        # The garbage collector may call this function between any two bytecodes, so it must not
        # take a lock. Both lines are atomic.
        def give_back(_: object) -> None:
            del self._lent[slot]
            self.free.append(slot)

        # All tensors of the batch and their views hold a reference to this memory, so the callback
        # runs when the last one is released.
        memory = self._memory(slot, layout)
        self._lent[slot] = weakref.ref(memory, give_back)
        return layout.batch_in(memory)

    def _memory(self, slot: int, layout: BatchLayout) -> memoryview:
        start = slot * self.ring.slot_bytes
        return memoryview(self._map)[start : start + layout.num_bytes]
