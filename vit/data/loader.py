"""Who makes the batches, and how they get here: worker processes that write into shared memory, and
a copy to the GPU behind the step.

The data's story: training puts parts of batches (some rows of a position, and the slot for it) into
one pipe; whoever is free takes the next part, writes its rows where they belong and says so in a
few bytes. When all parts are there, the batch is handed out: nothing was copied, pickled or
allocated on the way. Several workers share a batch, so that few slots keep many workers busy and
the first batch is soon there. What is in a batch depends neither on their number nor on who is
faster.

    training                                       workers
    free slot, next position  -> (parts) pipe  ->  whoever is free writes rows into the slot
    batch when it is complete <- result pipes  <-  slot, row, seconds, keys of bad images

Processes and not threads, because threads that decode make a training step wait for the
interpreter's lock (docs/experiments.md).
"""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from vit.data import stages
from vit.data.batches import Batch, Batches
from vit.data.slots import Slots, plan_ring
from vit.data.stages import Stage, Tally, WorkerStatus, add_up
from vit.data.worker_pool import MAX_QUEUED_PARTS, Lookout, Result, WorkerPool
from vit.distributed import local_world_size
from vit.system.files import ShardError

STALL_TIMEOUT_S = 240.0
"""Twice that, for a worker and for who takes its place, is less than the ten minutes for which
ranks wait for each other."""


class LoaderStats(NamedTuple):
    """What a loader's batches have cost up to now."""

    wait_s: float = 0.0
    """Time that training spent waiting for them."""
    busy_s: float = 0.0
    """Time that the workers spent on making `num_made` images, added up over the workers."""
    num_made: int = 0


@dataclass
class _PartialBatch:
    """A batch of which parts are missing."""

    slot: int
    missing_rows: int
    results: list[Result] = field(default_factory=list)


class Loader:
    """Iterates over the batches at positions [start, stop), made by workers, or here where there
    are none.

    A wait that is long is told, with what the workers are at; a worker without progress for
    `stall_timeout_s` is replaced (None: never).

    A batch stays as it is for as long as any of its tensors, or a view of one, is held. Whoever
    holds more than two batches (three on a GPU) gets copies, which are slower. With a GPU as
    `device`, images, labels and weights arrive there, copied while the step before computes; table
    and ids stay on the host. `prefetch_gib`: see `slots.plan_ring`.

    Raises ShardError in the training process for what a worker found, once its batch is due;
    `vit.data.worker_pool.WorkerError` at once when a worker has died, and when one hangs that
    cannot be replaced. Close it, or leave it as a context. For one thread.
    """

    def __init__(
        self,
        batches: Batches,
        start: int,
        stop: int,
        *,
        num_workers: int = 0,
        prefetch_gib: float | None = None,
        device: torch.device | None = None,
        stall_timeout_s: float | None = STALL_TIMEOUT_S,
    ):
        on_gpu = device is not None and device.type == "cuda"
        self.num_workers = num_workers
        self.stats = LoaderStats()
        self._batches = batches
        self.ring = plan_ring(
            batches.layout, batches.row_unit, stop - start, num_workers, prefetch_gib, on_gpu
        )
        self._position = start
        self._to_start = start
        self._stop = stop
        self._num_batches = stop - start
        self._slots = Slots(batches.layout, self.ring, num_workers)
        if num_workers:
            batches.prepare(num_workers * local_world_size())
        self._partial_batches: dict[int, _PartialBatch] = {}
        self._queue: deque[tuple[int, int, int]] = deque()
        works = start < stop
        self._pool = (
            WorkerPool(batches, self._slots, num_workers, stall_timeout_s)
            if num_workers and works
            else None
        )
        self._own_row = self._slots.row(0)
        self._lookout = (
            Lookout(self._own_row, batches.where, stall_timeout_s)
            if not num_workers and works
            else None
        )
        self._to_gpu = _ToGpu(self._slots, device) if on_gpu and device is not None else None
        self._start_batches()

    def __len__(self) -> int:
        """Batches from `start` to `stop`, however many were taken."""
        return self._num_batches

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._position == self._stop:
            raise StopIteration
        position = self._position
        began = time.perf_counter()
        self._position += 1  # also where this one fails
        batch = self._make(position) if self._pool is None else self._receive(position, self._pool)
        self.stats = self.stats._replace(wait_s=self.stats.wait_s + time.perf_counter() - began)
        self._start_batches()
        return batch if self._to_gpu is None else self._to_gpu(batch)

    def tally(self) -> Tally:
        """What those who make the batches have done up to now: all workers, or this process."""
        return add_up([row.tally() for row in self._rows()])

    def worker_bytes(self) -> int:
        """Memory that is a worker's alone, of the one that has most; 0 while it was not
        measured."""
        return max(row.own_bytes for row in self._rows())

    @property
    def num_replaced(self) -> int:
        """Workers that hung, and in whose place others came."""
        return self._pool.num_replaced if self._pool is not None else 0

    def _rows(self) -> list[WorkerStatus]:
        return self._pool.rows if self._pool is not None else [self._own_row]

    def close(self) -> None:
        """End the workers, whatever they are at, and let the memory go with the last batch that is
        held."""
        self._position = self._stop
        if self._pool is not None:
            self._pool.end()
        if self._lookout is not None:
            self._lookout.end()
        self._slots.close_file()
        if self._to_gpu is not None:
            self._to_gpu.close()
            self._to_gpu = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, position: int) -> Batch:
        """The batch at `position`, made here."""
        slot = self._slots.free.popleft()
        began = time.perf_counter()
        row_before = stages.use(self._own_row)
        self._own_row.take(position, 0)
        try:
            bad_keys = self._batches.fill(position, 0, self._slots.batch(slot))
        except BaseException:
            self._slots.free.append(slot)
            raise
        finally:
            self._own_row.count_retries()
            self._own_row.enter(Stage.IDLE)
            # a picture that is decoded for a report is no batch that training waits for
            stages.use(row_before)
        self._add_work(time.perf_counter() - began, self._batches.layout.num_rows)
        return replace(self._slots.lend(slot), bad_keys=bad_keys)

    def _receive(self, position: int, pool: WorkerPool) -> Batch:
        """The batch at `position`, made by the workers."""
        self._note(pool.results(wait=False))
        pool.begin_wait()
        while position not in self._partial_batches or self._partial_batches[position].missing_rows:
            self._start_batches()
            self._note(pool.results(wait=True))
        done = self._partial_batches.pop(position)
        done.results.sort(key=lambda result: result.first)
        for result in done.results:
            if result.mistake or result.stack:
                self._slots.free.append(done.slot)
                raise (
                    ShardError(result.mistake)
                    if result.mistake
                    else RuntimeError(f"in a loader worker:\n{result.stack}")
                )
        return replace(
            self._slots.lend(done.slot),
            bad_keys=tuple(key for result in done.results for key in result.bad_keys),
        )

    def _start_batches(self) -> None:
        """Give the workers something to do for each free slot."""
        if self._pool is None:
            return
        rows = self._batches.layout.num_rows
        while self._slots.free and self._to_start < self._stop:
            slot = self._slots.free.popleft()
            self._partial_batches[self._to_start] = _PartialBatch(slot, rows)
            self._queue.extend(
                (self._to_start, slot, first) for first in range(0, rows, self.ring.part_rows)
            )
            self._to_start += 1
        while self._queue and self._pool.num_queued < MAX_QUEUED_PARTS:
            self._pool.put(*self._queue.popleft())

    def _add_work(self, busy_s: float, num_rows: int) -> None:
        wait_s, busy_before_s, made_before = self.stats
        self.stats = LoaderStats(wait_s, busy_before_s + busy_s, made_before + num_rows)

    def _note(self, results: list[tuple[int, Result]]) -> None:
        for position, result in results:
            self._add_work(result.busy_s, result.num_rows)
            self._partial_batches[position].missing_rows -= result.num_rows
            self._partial_batches[position].results.append(result)


# --- to the GPU -----------------------------------------------------------------------------------


class _ToGpu:
    """Copies each batch on a stream of its own, out of page-locked memory, so that nobody waits:
    the copy runs while the GPU computes the step before, and the host goes on."""

    def __init__(self, slots: Slots, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory = slots.whole()
        with torch.cuda.device(device):
            self._is_locked = page_lock(self._memory)
        self._given: Batch | None = None
        self._in_use: deque[tuple[Batch, torch.cuda.Event]] = deque()

    def __call__(self, batch: Batch) -> Batch:
        """`batch` on the device, for work that is queued on the current stream from now on."""
        computing = torch.cuda.current_stream(self._device)
        if not self._is_locked:
            batch = batch.pin_memory()
        # The step that was queued since the last call reads the last batch's slot (its table) until
        # the device comes to here.
        if self._given is not None:
            self._in_use.append((self._given, computing.record_event()))
        while len(self._in_use) > 1 or (self._in_use and self._in_use[0][1].query()):
            self._in_use.popleft()[1].synchronize()
        self._given = batch
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device)
        computing.wait_stream(self._stream)
        for tensor in (moved.images, moved.labels, moved.weights):
            # its memory belongs to the copying stream, and must not be given away before the step
            # is done
            tensor.record_stream(computing)
        return moved

    def close(self) -> None:
        """Let the device finish, and unlock the memory."""
        # a device that failed has told so before
        with suppress(RuntimeError), torch.cuda.device(self._device):
            torch.cuda.synchronize()
            if self._is_locked:
                torch.cuda.check_error(
                    int(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
                )
        self._in_use.clear()
        self._given = None


def page_lock(memory: torch.Tensor) -> bool:
    """Let the GPU read `memory` by itself. False where the CUDA runtime refuses it, with a note:
    inside gVisor, WSL and some virtual machines it does. Batches then take the way through memory
    that torch page-locks: a copy more on the host for each.
    """
    try:
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    except RuntimeError as error:  # torch.cuda.CudaError is one, and so is a missing driver
        reason = str(error).splitlines()[0]
        # CUDA keeps the error for who asks next, which is torch after its next kernel: this one.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
        print(
            f"note: memory of batches is not page-locked here ({reason}): each is copied once more"
            " on the host",
            file=sys.stderr,
        )
        return False
    return True
