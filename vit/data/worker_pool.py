"""Run worker processes that make parts of batches, and replace workers that hang.

A part is a range of rows in one batch. All parts are sent through one pipe, from which each free
worker takes the next one. Each worker sends results through its own pipe and writes its current
stage to shared memory, which `vit.data.stall_watch` checks while training waits. If a worker makes
no progress for `stall_timeout_s`, the pool kills all workers. The pool does the same if all workers
stay idle that long while parts are still missing, because a worker must have stopped before taking
its part. Once all killed workers have exited and can no longer write, the pool starts new workers
to make the missing parts. The run fails if two workers hang at the same part, or if a worker cannot
be killed. Without workers, `OwnProcess` makes the parts.
"""

import functools
import logging
import multiprocessing
import os
import selectors
import signal
import struct
import sys
import time
import traceback
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import NamedTuple

import torch

from vit.data import stages
from vit.data.batches import Batch, Batches
from vit.data.slots import Slots
from vit.data.stages import Stage, WorkerStatus
from vit.data.stall_watch import StallWatch, watch_in_thread
from vit.system.child_process import follow_parent, signals_blocked
from vit.system.files import ShardError
from vit.system.host import num_oom_kills, process_state

END_WAIT_S = 1.0
"""The maximum time in seconds to wait for a worker to end. A killed worker takes longer only if it
is waiting inside the kernel."""
NICENESS_BESIDE_GPU = 10
"""The niceness of workers if training uses a GPU. Workers then get a tenth of the scheduler weight
of the threads that launch kernels and run NCCL, because the GPU waits for these threads. If
training runs on the CPU, workers and training have the same weight."""
PARTS_PER_MEASUREMENT = 64
"""The number of parts between two measurements of a worker's memory."""

MAX_QUEUED_PARTS = 256
"""The maximum number of parts in the pipe. These parts take 4 KiB, which fits in any pipe, so
sending one never blocks. Once a user has about a thousand open pipes, Linux limits each further
pipe to 8 KiB."""
_PART = struct.Struct("<qii")
"""The message that describes a part: position, slot, first row. A message this small is read as a
whole, even if several workers read from the pipe."""
RowRange = tuple[int, int]
"""A part of a batch, as (position, first row)."""

log = logging.getLogger(__name__)


class WorkerError(ValueError):
    """A loader worker died or hung. The message names the worker, the cause and a remedy."""


class WorkerResult(NamedTuple):
    """The result of making one part of a batch."""

    position: int
    first: int
    num_rows: int
    busy_s: float
    bad_keys: tuple[str, ...]
    error: Exception | None
    """The error if the part failed; a ShardError if the user can fix it."""


class OwnProcess:
    """Makes the parts in this process when training waits for them; used without workers.

    A thread watches this process. The thread can report a hang but cannot stop it.
    """

    num_replaced = 0

    def __init__(self, batches: Batches, slots: Slots, stall_timeout_s: float | None):
        self._batches = batches
        self._slots = slots
        self._parts = deque[tuple[int, int, int]]()
        self.statuses = [slots.status(0)]
        self.watch = StallWatch(self.statuses, batches.where, stall_timeout_s)
        # Use Finalize, which also ends the watch thread if the loader is never closed.
        self.end = Finalize(self, watch_in_thread(self.statuses[0], self.watch))

    def put(self, position: int, slot: int, first: int) -> None:
        """Queue a part."""
        self._parts.append((position, slot, first))

    def drop(self) -> None:
        """Drop all parts that have not been made yet."""
        self._parts.clear()

    def results(self, wait: bool) -> list[WorkerResult]:
        """Make the next part if `wait` is true, and return its result."""
        # Make parts only on demand. Preparing them in advance would take just as much time from
        # training, and more memory.
        if not wait:
            return []

        position, slot, first = self._parts.popleft()
        status_before = stages.use(self.statuses[0])
        try:
            batch = self._slots.batch(slot, self._batches.layout_at(position))
            return [_make(self._batches, self.statuses[0], position, first, batch)]
        except BaseException:
            # Free the slot after Ctrl-C. Otherwise, a caller that catches the exception and
            # continues would soon run out of slots.
            self._slots.free.append(slot)
            raise
        finally:
            self.statuses[0].enter(Stage.IDLE)
            # This process may also decode other images, for example for a report. Restore the old
            # status, so that this work does not look like a batch that training waits for.
            stages.use(status_before)


class WorkerPool:
    """The worker processes, the pipe that sends them parts, and the pipes that return results."""

    def __init__(
        self,
        batches: Batches,
        slots: Slots,
        num_workers: int,
        stall_timeout_s: float | None,
        niceness: int = 0,
    ):
        """niceness: added to the niceness of this process."""
        # Fork the workers, so that they share memory and open files with this process. Otherwise,
        # each worker would take 340 MiB, open every shard again and need seconds to start.
        self._context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self._batches = batches
        self._slots = slots
        self._timeout_s = stall_timeout_s or float("inf")
        self._niceness = niceness

        self.statuses = [slots.status(number) for number in range(num_workers)]
        self.num_replaced = 0
        """The number of workers that hung and were replaced."""
        self.watch = StallWatch(self.statuses, batches.where, stall_timeout_s)
        self._oom_kills_before = num_oom_kills()

        self._waiting = deque[tuple[int, int, int]]()
        """Parts that have not been sent to the pipe yet."""
        self._queued: dict[RowRange, int] = {}
        """The slot of each part that is in the pipe or in a worker."""
        self._hung = set[RowRange]()
        """The parts at which a worker hung. Each part is retried once. If the retry hangs, the run
        fails."""

        self._parts, self._put = self._context.Pipe(duplex=False)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, tuple[BaseProcess, Connection]] = {}

        # Use Finalize, which also runs if the loader is never closed. Otherwise, the process would
        # never end: at exit, Python sends SIGTERM to the workers, which ignore it, and joins them.
        self.end = Finalize(
            self,
            _end_workers,
            (self._workers, self._parts, self._put, self._selector),
            exitpriority=100,
        )
        for number in range(num_workers):
            self._start(number)

    def put(self, position: int, slot: int, first: int) -> None:
        """Queue a part for the next free worker, without waiting."""
        self._waiting.append((position, slot, first))
        self._fill_pipe()

    def drop(self) -> None:
        """Drop all parts that are not in the pipe, and wait until the others are made.

        Slots cannot be reused earlier, because workers write to them until their parts are made.
        """
        self._waiting.clear()
        self.watch.begin()
        while self._queued:
            self.results(wait=True)

    def results(self, wait: bool) -> list[WorkerResult]:
        """Return the results of finished parts. With `wait`, wait for at least one result.

        Reports and replaces workers that hang in the meantime. Raises WorkerError if a worker died,
        or if a worker hangs and cannot be replaced.
        """
        results = list[WorkerResult]()
        while True:
            # Wait for all workers together. The wait ends when a worker sends a result or dies,
            # because the pipe of a dead worker becomes readable, or when the next status check is
            # due.
            for key, _ in self._selector.select(self.watch.look_each_s if wait else 0):
                if self._receive(key.data, results):
                    raise WorkerError(self._cause_of_death(self._workers[key.data][0]))

            if wait and self.watch.is_due:
                self.watch.look(self._name)
                self._replace_stalled(results)
            self._fill_pipe()
            if results or not wait:
                return results

    def _fill_pipe(self) -> None:
        # Limit the queued parts, so that this write never blocks. A blocked write could deadlock,
        # because workers stop taking parts if this process does not read their results.
        while self._waiting and len(self._queued) < MAX_QUEUED_PARTS:
            position, slot, first = self._waiting.popleft()
            self._queued[position, first] = slot
            os.write(self._put.fileno(), _PART.pack(position, slot, first))

    def _start(self, number: int) -> None:
        """Start worker `number` and connect its pipe."""
        # Reset the status now, because only the worker may write it after the start.
        self.statuses[number].restart()
        # Block signals until `_work` ignores them, because a signal to the job must not kill a new
        # worker.
        with signals_blocked():
            results, send = self._context.Pipe(duplex=False)
            worker = self._context.Process(
                target=_work,
                args=(self._batches, self._slots, number, self._parts, send, self._niceness),
                daemon=True,
            )
            worker.start()
            # Close `send`, so that only the worker has it open and the pipe ends when the worker
            # dies.
            send.close()

        self._workers[number] = (worker, results)
        self._selector.register(results, selectors.EVENT_READ, number)

    def _receive(self, number: int, received: list[WorkerResult]) -> bool:
        """Append the worker's results to `received`, and return whether the worker is dead."""
        pipe = self._workers[number][1]
        # The pipe of a dead worker ends after everything that the worker sent. Reading a message
        # that was cut off by the kill also raises EOFError.
        with suppress(EOFError, OSError):
            while pipe.poll():
                result = pipe.recv()
                self.watch.idle_s = 0.0
                self._queued.pop((result.position, result.first))
                received.append(result)
            return False
        return True

    # ---- workers that hang, and workers that died ----

    def _name(self, number: int) -> str:
        pid = self._workers[number][0].pid
        return f"loader worker {number} (process {pid}{process_state(pid)})"

    def _replace_stalled(self, received: list[WorkerResult]) -> None:
        """Replace all workers if `_find_stall` finds any that hang.

        Raises WorkerError if a worker cannot be killed, if a worker already hung at the same part,
        or if new workers could not repeat the same batches.
        """
        num_hung, hung, problem = self._find_stall()
        if not num_hung:
            return

        remedy = "check for a dead mount, a debugger, or a suspended job"
        if not self._batches.exact:
            raise WorkerError(f"{problem}; {remedy}")
        if hung & self._hung:
            raise WorkerError(f"{problem}, and another worker also hung on this part; {remedy}")

        self._hung |= hung
        log.warning("%s: all workers are replaced, and new ones repeat their work", problem)
        self._replace_all(received, f"{problem}, and cannot be killed; {remedy}")
        self.num_replaced += num_hung

    def _find_stall(self) -> tuple[int, set[RowRange], str]:
        """Return the number of workers that hang, their parts, and a description of the problem.

        All workers count as hanging if they stay idle while parts are missing. One of them was then
        stopped before it took or began a part, and the statuses do not show which one.
        """
        stuck = [n for n, stuck_s in enumerate(self.watch.stuck_s) if stuck_s >= self._timeout_s]
        if stuck:
            first = stuck[0]
            problem = (
                f"{self._name(first)} {self.watch.activity(first)}, without progress for"
                f" {self.watch.stuck_s[first]:.0f} s (loader.stall_timeout_s)"
            )
            return len(stuck), {self.statuses[number].part for number in stuck}, problem

        if self.watch.idle_s < self._timeout_s or not self._queued:
            return 0, set(), ""

        names = [self._name(number) for number in self._workers]
        # If the system reports stopped processes, name only these.
        idle = ", ".join([name for name in names if ", stopped" in name] or names)
        problem = (
            f"{idle} takes no work for {self.watch.idle_s:.0f} s (loader.stall_timeout_s), although"
            f" {len(self._queued)} parts of batches are waiting"
        )
        return len(self._workers), set(self._queued), problem

    def _replace_all(self, received: list[WorkerResult], problem: str) -> None:
        """Kill all workers, start new ones, and queue the missing parts again.

        All workers are killed, because one may have died after it took a part and before it updated
        its status. When all are dead and the pipe is empty, the missing parts are exactly those
        without a result. At most one part per worker is wasted. Raises WorkerError(problem) if a
        worker does not die.
        """
        for worker, _ in self._workers.values():
            worker.kill()

        # A process that waits inside the kernel dies only when that wait ends, for example when a
        # mount recovers.
        deadline = time.monotonic() + self._timeout_s
        for number, (worker, pipe) in list(self._workers.items()):
            while worker.exitcode is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise WorkerError(problem)
                worker.join(min(self.watch.warn_after_s, left_s))
                if worker.exitcode is None:
                    log.warning("%s was killed but has not ended yet", self._name(number))
            self._receive(number, received)
            self._selector.unregister(pipe)
            pipe.close()

        # Empty the pipe only after all workers are dead, because a live worker could still take a
        # part or write to a slot.
        os.set_blocking(self._parts.fileno(), False)
        with suppress(BlockingIOError):
            while os.read(self._parts.fileno(), _PART.size):
                pass
        os.set_blocking(self._parts.fileno(), True)  # new workers inherit the pipe and must block

        # Training waits for the first missing part, so put missing parts first, in their original
        # order.
        self._waiting.extendleft(
            (position, slot, first) for (position, first), slot in reversed(self._queued.items())
        )
        self._queued.clear()
        for number in range(len(self.statuses)):
            self._start(number)
        self.watch.idle_s = 0.0

    def _cause_of_death(self, worker: BaseProcess) -> str:
        """Describe why a worker ended without being told to, and what to do."""
        worker.join(END_WAIT_S)
        code = worker.exitcode
        if code is None or code >= 0:
            return (
                f"a loader worker (process {worker.pid}) ended unexpectedly with exit status"
                f" {code}: start again, and report the problem if it recurs"
            )

        number = signal.Signals(-code)
        if number == signal.SIGKILL:
            cause = self._cause_of_kill()
        elif number == signal.SIGBUS:
            cause = (
                "which happens if a mapped file is truncated or its disk fails: check whether an"
                " index (*.index.npy) was rewritten while in use"
            )
        else:
            cause = (
                "so a library crashed, perhaps on a damaged image: check all images with `python -m"
                " data_prep.verify`"
            )
        return f"a loader worker (process {worker.pid}) was killed by {number.name}, {cause}"

    def _cause_of_kill(self) -> str:
        """Describe who may have sent SIGKILL to a worker.

        The kernel's count of kills is None if it cannot be read. A higher count proves that memory
        ran out on this host or in this container, but another process may have been killed.
        """
        num_kills = num_oom_kills()
        memory_ran_out = (
            num_kills is not None
            and self._oom_kills_before is not None
            and num_kills > self._oom_kills_before
        )
        if memory_ran_out:
            return (
                "because memory ran out, according to the kernel: lower loader.num_workers, or"
                " give the job more memory"
            )

        kernel_note = (
            "the kernel has counted no such kill" if num_kills is not None else "see `dmesg`"
        )
        return (
            f"by a user or program, or by the kernel because memory ran out ({kernel_note});"
            " if memory ran out, lower loader.num_workers, or give the job more memory"
        )


def _end_workers(
    workers: dict[int, tuple[BaseProcess, Connection]],
    parts: Connection,
    put: Connection,
    selector: selectors.BaseSelector,
) -> None:
    """Kill the workers. Waiting for their results could delay a clean exit if a read is slow."""
    selector.close()
    for worker, _ in workers.values():
        worker.kill()

    for worker, results in workers.values():
        results.close()
        worker.join(END_WAIT_S)
        if worker.exitcode is None:
            # The worker is blocked in the kernel, for example on a dead mount. Python would hang at
            # exit when joining the worker, so remove it from the list of children.
            multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]
    parts.close()
    put.close()


# --- in a worker process --------------------------------------------------------------------------


def _work(
    batches: Batches, slots: Slots, number: int, parts: Connection, send: Connection, niceness: int
) -> None:
    """Run a worker: decode the parts of batches that arrive in `parts`, and send the results."""
    os.nice(niceness)
    # By default, each worker's resizes start a thread on every core. Use one core per worker.
    torch.set_num_threads(1)
    # `follow_parent` also ignores signals. If a SIGTERM to the job killed a worker, its rank would
    # fail before saving the last checkpoint.
    follow_parent()

    status = slots.status(number)
    stages.use(status)
    batch_in = functools.cache(slots.batch)
    num_made = 0

    # When the parent is dead, reading returns b"" and sending raises BrokenPipeError.
    with suppress(BrokenPipeError):
        while message := os.read(parts.fileno(), _PART.size):
            position, slot, first = _PART.unpack(message)
            batch = batch_in(slot, batches.layout_at(position))
            rows = batch.rows(first, first + slots.ring.part_rows)
            result = _make(batches, status, position, first, rows)

            if result.error is not None and not isinstance(result.error, ShardError):
                # Send the traceback as text, because some exceptions cannot be pickled, and
                # pickling drops tracebacks.
                stack = "".join(traceback.format_exception(result.error))
                result = result._replace(error=RuntimeError(f"in a loader worker:\n{stack}"))

            num_made += 1
            # The first part still opens files and allocates memory, so measure after the second.
            if num_made % PARTS_PER_MEASUREMENT == 2:
                status.measure_memory()
            send.send(result)
            # Become idle only after sending. If all workers are idle while parts are missing,
            # `_find_stall` assumes that a part was lost.
            status.enter(Stage.IDLE)


def _make(
    batches: Batches, status: WorkerStatus, position: int, first: int, rows: Batch
) -> WorkerResult:
    """Fill the rows of one part. Return its result, which contains the error if there was one."""
    status.take(position, first)
    began_s = time.perf_counter()
    bad_keys: tuple[str, ...] = ()
    error = None
    try:
        bad_keys = batches.fill(position, first, rows)
    except Exception as raised:
        # Return the error, so that training raises it on reaching this batch.
        error = raised

    busy_s = time.perf_counter() - began_s
    status.count_retries()
    return WorkerResult(
        position, first, num_rows=len(rows.labels), busy_s=busy_s, bad_keys=bad_keys, error=error
    )
