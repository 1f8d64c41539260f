"""The loader: worker processes write batches into shared memory, from which they are copied to the
GPU.

The training process sends parts of batches through one pipe. A part consists of a range of rows in
a batch, and the slot of shared memory for these rows. A free worker takes the next part, writes its
rows and reports completion in a few bytes. When all parts of a batch are complete, the loader
returns the batch without copying, pickling or allocating anything. Several workers share a batch,
so a few slots keep many workers busy, and the first batch arrives early.

    training                                       workers
    free slot, next position  -> (parts) pipe  ->  a free worker writes rows into the slot
    batch when it is complete <- result pipes  <-  slot, row, seconds, keys of bad images

Workers are processes, because training would wait for the GIL if threads decoded the images
(docs/experiments/).
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch

from vit.data.batches import Batch, Batches
from vit.data.slots import MAX_READY_BATCHES, Slots, plan_ring
from vit.data.stages import Tally, add_up
from vit.data.to_gpu import Cuda, ToGpu
from vit.data.worker_pool import NICENESS_BESIDE_GPU, OwnProcess, WorkerPool, WorkerResult
from vit.distributed.process_group import local_world_size

STALL_TIMEOUT_S = 240.0
"""The default stall timeout in seconds. A worker and its replacement may both hang, so twice this
time must be less than the ten minutes that ranks wait for each other."""


class LoaderStats(NamedTuple):
    """A loader's statistics: times, and the number of images that it has returned."""

    wait_s: float = 0.0
    """The time in seconds that training has waited for batches."""
    busy_s: float = 0.0
    """The time in seconds that workers spent on `num_made` images, summed over workers."""
    num_made: int = 0


class Loader(Iterator[Batch], AbstractContextManager["Loader"]):
    """Iterates over the batches at positions [start, stop), made by worker processes or this
    process.

    The loader logs long waits with the current stage of each worker. A worker that makes no
    progress for `stall_timeout_s` is replaced; None disables this.

    A batch does not change while the caller holds any of its tensors or a view of them. If the
    caller holds more than two batches (three with a GPU), the loader returns copies, which is
    slower. If `device` is a GPU, images, labels and weights are copied to it while the previous
    step is still computing, and `on_device` runs right after this copy. Augmentation parameters and
    ids stay on the host. Without a GPU, `on_device` runs in this process. See `slots.plan_ring` for
    `max_ready`.

    Iteration raises ShardError when it reaches a batch that failed, and
    `vit.data.worker_pool.WorkerError` immediately if a worker died, or if a worker hangs and cannot
    be replaced. Close the loader, or use it as a context manager. The loader is not thread-safe.
    """

    def __init__(
        self,
        batches: Batches,
        start: int,
        stop: int,
        *,
        num_workers: int = 0,
        max_ready: int = MAX_READY_BATCHES,
        device: torch.device | None = None,
        stall_timeout_s: float | None = STALL_TIMEOUT_S,
        on_device: Callable[[Batch], Batch] | None = None,
    ):
        on_gpu = device is not None and device.type == "cuda"
        self.num_workers = num_workers
        self.stats = LoaderStats()
        self._batches = batches
        self.ring = plan_ring(
            batches.layout,
            batches.row_unit,
            num_batches=stop - start,
            num_workers=num_workers,
            on_gpu=on_gpu,
            max_ready=max_ready,
        )
        self._positions = range(start, stop)
        self._due: Iterator[int] = iter(self._positions)
        self._not_started = iter(self._positions)

        # Allocate the slots before the workers start, because workers inherit this memory.
        self._slots = Slots(self.ring, num_workers)
        self._slot_of: dict[int, int] = {}
        """The slot of each position whose parts were sent to the workers."""
        self._done: defaultdict[int, list[WorkerResult]] = defaultdict(list)
        """The results of the finished parts at each position."""

        if num_workers and start < stop:
            # Open files before the fork, so that workers inherit them. Otherwise, each worker would
            # open the thousands of files of a large data set.
            batches.prepare(num_workers * local_world_size())
            self._pool: WorkerPool | OwnProcess = WorkerPool(
                batches,
                self._slots,
                num_workers,
                stall_timeout_s,
                niceness=NICENESS_BESIDE_GPU if on_gpu else 0,
            )
        else:
            self._pool = OwnProcess(batches, self._slots, stall_timeout_s)

        self._to_device: Callable[[Batch], Batch] | None = on_device
        self._to_gpu: ToGpu | None = None
        if on_gpu and device is not None:
            self._to_gpu = ToGpu(Cuda(device), self._slots.memory(), on_device)
            self._to_device = self._to_gpu
        self._start_batches()

    def __len__(self) -> int:
        """Return the total number of batches, including those already returned."""
        return len(self._positions)

    def __next__(self) -> Batch:
        position = next(self._due)  # advance first, so that a failed batch is not retried
        began_s = time.perf_counter()
        batch = self._receive(position)
        waited_s = time.perf_counter() - began_s
        # The monitor reads each step's tuple one step later, so create a new one.
        self.stats = self.stats._replace(wait_s=self.stats.wait_s + waited_s)

        # Start batches before the training step, so that workers fill free slots during the step.
        self._start_batches()
        return batch if self._to_device is None else self._to_device(batch)

    def restart(self) -> None:
        """Restart from `start` with the same workers and memory, and reset the statistics.

        Batches that have not been returned yet are dropped. Batches that the caller holds do not
        change.
        Raises WorkerError if a worker died.
        """
        self._pool.drop()
        self._slots.take_back()
        self._slot_of.clear()
        self._done.clear()
        self._due = iter(self._positions)
        self._not_started = iter(self._positions)
        self.stats = LoaderStats()
        self._start_batches()

    def tally(self) -> Tally:
        """Return the total work done by all workers or, without workers, by this process."""
        return add_up([status.tally() for status in self._pool.statuses])

    def worker_bytes(self) -> int:
        """Return the largest private memory of any worker in bytes; 0 until it is measured."""
        return max(status.own_bytes for status in self._pool.statuses)

    @property
    def num_replaced(self) -> int:
        """The number of workers that hung and were replaced."""
        return self._pool.num_replaced

    def close(self) -> None:
        """Stop the workers immediately. The memory remains valid as long as the caller holds a
        batch."""
        self._due = iter(())
        self._pool.end()
        self._slots.close_file()
        if self._to_gpu is not None:
            self._to_gpu.close()
            self._to_gpu = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, position: int) -> Batch:
        """Return the batch at `position` when all of its parts are done.

        Raises the error of its first part that failed.
        """
        # Process earlier results first, so that this work does not count as waiting.
        self._note(self._pool.results(wait=False))

        # Measure the wait for the whole batch. Measuring it per part would hide a long wait if
        # parts arrive slowly.
        self._pool.watch.begin()
        num_rows = self._batches.layout.num_rows
        while sum(result.num_rows for result in self._done[position]) < num_rows:
            # This batch was not started if no slot was free. The caller may have released a slot
            # since then.
            self._start_batches()
            self._note(self._pool.results(wait=True))

        slot = self._slot_of.pop(position)
        # Sort by row, so that the raised error and the order of bad keys do not depend on the speed
        # of workers.
        results = sorted(self._done.pop(position), key=lambda result: result.first)
        for result in results:
            if result.error is not None:
                # Free the slot of the failed batch, so that a caller that catches the error can
                # continue with the next batch.
                self._slots.free.append(slot)
                raise result.error

        bad_keys = tuple(key for result in results for key in result.bad_keys)
        batch = self._slots.lend(slot, self._batches.layout_at(position))
        return replace(batch, bad_keys=bad_keys)

    def _start_batches(self) -> None:
        while self._slots.free and (position := next(self._not_started, None)) is not None:
            slot = self._slots.free.popleft()
            self._slot_of[position] = slot
            for first in range(0, self._batches.layout.num_rows, self.ring.part_rows):
                self._pool.put(position, slot, first)

    def _note(self, results: list[WorkerResult]) -> None:
        for result in results:
            wait_s, busy_s, num_made = self.stats
            self.stats = LoaderStats(wait_s, busy_s + result.busy_s, num_made + result.num_rows)
            self._done[result.position].append(result)
