"""Who makes parts of batches: worker processes, how they start, get work, hang, die and end.

Parts go into one pipe, and whichever worker is free takes the next; results come back through one
pipe per worker. Each worker writes what it is doing into its status in shared memory, which
`vit.data.stall_watch` looks at while training waits. If a worker makes no progress for
`stall_timeout_s`, or all say that they wait for work and parts do not come back (one was stopped as
it waited), all are killed. Once they are dead and cannot write any more, others take their places,
and parts that had not come back are made again, from nothing but their positions. A part at which
two workers hang, and a worker that even the kernel cannot end, end the run. Without workers
`OwnProcess` makes the parts.
"""

from __future__ import annotations

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

from vit.data.batches import Batch, Batches
from vit.data.slots import Slots
from vit.data.stall_watch import StallWatch, watch_in_thread
from vit.system import stages
from vit.system.child_process import follow_parent, signals_blocked
from vit.system.files import ShardError
from vit.system.host import num_oom_kills, process_state
from vit.system.stages import Stage, WorkerStatus

END_WAIT_S = 1.0
"""Time in which a killed process ends, unless it waits inside the kernel."""
NICENESS_BESIDE_GPU = 10
"""Of workers: a tenth of the weight of the thread that launches kernels and of NCCL's. These need
little time, but a GPU waits for it. On a CPU, where the step computes too, all weigh the same."""
PARTS_PER_MEASUREMENT = 64
"""Parts after which a worker measures its memory again."""
MAX_QUEUED_PARTS = 256
"""4 KiB, which every pipe has room for, so adding a part never waits: on Linux, a user with a
thousand pipes gets only 8 KiB for each further one."""
_PART = struct.Struct("<qii")
"""position, slot, first row. Few enough bytes that a pipe passes them in one piece, with any number
of readers."""
RowRange = tuple[int, int]
"""(position, first row)."""
log = logging.getLogger(__name__)


class WorkerError(ValueError):
    """A loader worker has died or hangs: which, why or where, and what to do."""


class Result(NamedTuple):
    """What is reported about a part that is done, or failed."""

    position: int
    first: int
    num_rows: int
    busy_s: float
    bad_keys: tuple[str, ...]
    error: Exception | None
    """ShardError for a mistake of the user."""


class OwnProcess:
    """The loader without workers: this process makes a part when training waits for it.

    A thread watches it, which can only report.
    """

    num_replaced = 0

    def __init__(self, batches: Batches, slots: Slots, stall_timeout_s: float | None):
        self._batches = batches
        self._slots = slots
        self._parts = deque[tuple[int, int, int]]()
        self.statuses = [slots.status(0)]
        self.watch = StallWatch(self.statuses, batches.where, stall_timeout_s)
        # Also if the loader is never closed: the thread would look at nothing for ever.
        self.end = Finalize(self, watch_in_thread(self.statuses[0], self.watch))

    def put(self, position: int, slot: int, first: int) -> None:
        """Add a part."""
        self._parts.append((position, slot, first))

    def drop(self) -> None:
        """Forget all parts that are not made."""
        self._parts.clear()

    def results(self, wait: bool) -> list[Result]:
        """Make the next part, if training waits for one."""
        # Not before: what is made ahead in the same process costs training the same time.
        if not wait:
            return []
        position, slot, first = self._parts.popleft()
        status_before = stages.use(self.statuses[0])
        try:
            batch = self._slots.batch(slot, self._batches.layout_at(position))
            return [_make(self._batches, self.statuses[0], position, first, batch)]
        except BaseException:
            # Ctrl-C: the batch is lost, not its slot, for whoever goes on.
            self._slots.free.append(slot)
            raise
        finally:
            self.statuses[0].enter(Stage.IDLE)
            # What else this process decodes, as for a report, must not look like a batch that
            # training waits for.
            stages.use(status_before)


class WorkerPool:
    """Worker processes, the pipe that they take parts from, and the pipes of their results."""

    def __init__(
        self,
        batches: Batches,
        slots: Slots,
        num_workers: int,
        stall_timeout_s: float | None,
        niceness: int = 0,
    ):
        """niceness: what workers add to that of this process."""
        # Without fork each worker has 340 MiB of its own, opens every shard again and takes seconds
        # to start.
        self._context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self._batches = batches
        self._slots = slots
        self._timeout_s = stall_timeout_s or float("inf")
        self._niceness = niceness
        self.statuses = [slots.status(number) for number in range(num_workers)]
        self.num_replaced = 0
        """Workers that hung and were replaced."""
        self.watch = StallWatch(self.statuses, batches.where, stall_timeout_s)
        self._oom_kills_before = num_oom_kills()
        self._waiting = deque[tuple[int, int, int]]()
        """Parts that are not in the pipe yet."""
        self._queued: dict[RowRange, int] = {}
        """The slot of each part that is in the pipe, or that a worker has."""
        self._hung = set[RowRange]()
        """Parts at which a worker hung: each is made once more."""
        self._parts, self._put = self._context.Pipe(duplex=False)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, tuple[BaseProcess, Connection]] = {}
        # Also if the loader is never closed: at exit Python would wait for the workers, and they
        # ignore SIGTERM.
        self.end = Finalize(
            self,
            _end_workers,
            (self._workers, self._parts, self._put, self._selector),
            exitpriority=100,
        )
        for number in range(num_workers):
            self._start(number)

    def put(self, position: int, slot: int, first: int) -> None:
        """Add a part, for the worker that is free first. Never waits."""
        self._waiting.append((position, slot, first))
        self._fill_pipe()

    def drop(self) -> None:
        """Forget all parts that are not in the pipe, and wait for the others: they fill slots."""
        self._waiting.clear()
        self.watch.begin()
        while self._queued:
            self.results(wait=True)

    def results(self, wait: bool) -> list[Result]:
        """Return the results of the parts that are done; with `wait`, of one or more.

        While it waits, workers that hang are reported and replaced. Raises WorkerError if a worker
        has died, or hangs and cannot be replaced.
        """
        found = list[Result]()
        while True:
            # The only place where training waits for workers, and it never waits for one of them:
            # whoever sends or dies first ends it, and at the latest the next look at all.
            events = self._selector.select(self.watch.look_each_s if wait else 0)
            for key, _ in events:
                if self._receive(key.data, found):
                    raise WorkerError(self._cause_of_death(self._workers[key.data][0]))
            if wait and self.watch.is_due:
                self.watch.look(self._name)
                self._replace_stalled(found)
            self._fill_pipe()
            if found or not wait:
                return found

    def _fill_pipe(self) -> None:
        # A write that blocked would stop training: workers take parts only if they get rid of
        # results, which training must read.
        while self._waiting and len(self._queued) < MAX_QUEUED_PARTS:
            position, slot, first = self._waiting.popleft()
            self._queued[position, first] = slot
            os.write(self._put.fileno(), _PART.pack(position, slot, first))

    def _start(self, number: int) -> None:
        # Before it lives: a status is written by its process alone.
        self.statuses[number].restart()
        # A signal to the job must not end a worker before it has learnt to ignore it.
        with signals_blocked():
            results, send = self._context.Pipe(duplex=False)
            worker = self._context.Process(
                target=_work,
                args=(self._batches, self._slots, number, self._parts, send, self._niceness),
                daemon=True,
            )
            worker.start()
            send.close()  # now only the worker has it, so the pipe ends when the worker does
        self._workers[number] = (worker, results)
        self._selector.register(results, selectors.EVENT_READ, number)

    def _receive(self, number: int, found: list[Result]) -> bool:
        """Append what worker `number` has sent to `found`; return True if it is dead."""
        results = self._workers[number][1]
        # The end of the pipe is the worker's, and comes after all that it sent before it died; half
        # a message, of a worker that was killed as it wrote, reads as the end, too.
        with suppress(EOFError, OSError):
            while results.poll():
                result = results.recv()
                self.watch.idle_s = 0.0
                self._queued.pop((result.position, result.first))
                found.append(result)
            return False
        return True

    # ---- workers that hang, and workers that died ----

    def _name(self, number: int) -> str:
        pid = self._workers[number][0].pid
        return f"loader worker {number} (process {pid}{process_state(pid)})"

    def _replace_stalled(self, found: list[Result]) -> None:
        """Replace all workers if one hangs for too long, or if all have no work and parts wait.

        In the second case one was stopped before it took a part, or before it began it; which,
        cannot be known.
        """
        stuck = [n for n, stuck_s in enumerate(self.watch.stuck_s) if stuck_s >= self._timeout_s]
        if stuck:
            hung = {self.statuses[number].part for number in stuck}
            problem = (
                f"{self._name(stuck[0])} {self.watch.activity(stuck[0])}, without progress for"
                f" {self.watch.stuck_s[stuck[0]]:.0f} s (data.stall_timeout_s)"
            )
        elif self.watch.idle_s >= self._timeout_s and self._queued:
            hung = set(self._queued)
            names = [self._name(number) for number in self._workers]
            idle = ", ".join([name for name in names if ", stopped" in name] or names)
            problem = (
                f"{idle} takes no work, for {self.watch.idle_s:.0f} s (data.stall_timeout_s), and"
                f" {len(hung)} parts of batches wait"
            )
        else:
            return
        remedy = "look for what stops it: a dead mount, a debugger, a suspended job"
        if not self._batches.exact:
            raise WorkerError(f"{problem}; {remedy}")
        if hung & self._hung:
            raise WorkerError(f"{problem}, where another worker hung before; {remedy}")
        self._hung |= hung
        log.warning("%s: all workers are replaced, and others make their parts again", problem)
        self._replace_all(found, f"{problem}, and cannot be killed; {remedy}")
        self.num_replaced += len(stuck) or len(self._workers)

    def _replace_all(self, found: list[Result], problem: str) -> None:
        """Kill all workers, start others, and add the parts again that have not come back.

        All, not only the one that hangs: a worker may die between taking a part and saying so, and
        with all dead and the pipe empty, the parts that are left need no guess. It costs what the
        others had begun, at most a part of each. Raises WorkerError(problem) if one does not die.
        """
        for worker, _ in self._workers.values():
            worker.kill()
        # In the kernel a process dies only when its wait ends, as when a mount comes back.
        deadline = time.monotonic() + self._timeout_s
        for number, (worker, results) in list(self._workers.items()):
            while worker.exitcode is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise WorkerError(problem)
                worker.join(min(self.watch.warn_after_s, left_s))
                if worker.exitcode is None:
                    log.warning("%s has been killed, and has not ended yet", self._name(number))
            self._receive(number, found)
            self._selector.unregister(results)
            results.close()
        # Only now: while one of them lived, it could still write into a slot, or take a part.
        os.set_blocking(self._parts.fileno(), False)
        with suppress(BlockingIOError):
            while os.read(self._parts.fileno(), _PART.size):
                pass
        os.set_blocking(self._parts.fileno(), True)  # those to come share this end, and wait at it
        # In front of what waits, in their order: training waits for the first of them.
        self._waiting.extendleft(
            (position, slot, first) for (position, first), slot in reversed(self._queued.items())
        )
        self._queued.clear()
        for number in range(len(self.statuses)):
            self._start(number)
        self.watch.idle_s = 0.0

    def _cause_of_death(self, worker: BaseProcess) -> str:
        """Explain the death of a worker that was not killed by the pool, with a remedy."""
        worker.join(END_WAIT_S)
        code = worker.exitcode
        if code is None or code >= 0:
            return (
                f"a loader worker (process {worker.pid}) ended by itself with exit status {code}:"
                " start again, report it if it returns"
            )
        number = signal.Signals(-code)
        cause = (
            "so a library it uses crashed, perhaps on a damaged image: `python -m"
            " data_prep.verify` decodes them all"
        )
        if number == signal.SIGBUS:
            cause = (
                "as when a mapped file is cut short or its disk fails: was an index (*.index.npy)"
                " rewritten while it was in use?"
            )
        if number == signal.SIGKILL:
            num_kills = num_oom_kills()
            before = self._oom_kills_before
            counted = "it counted none here" if num_kills is not None else "see `dmesg`"
            cause = (
                "by a person or program, or by the kernel, which does so when memory runs out"
                f" ({counted}); if it did, lower data.num_workers or data.prefetch_gib"
            )
            # Without both counts (None: it cannot be read) nothing is known.
            if num_kills and before is not None and num_kills > before:
                cause = (
                    "because memory ran out: the kernel has counted it. Lower data.num_workers or"
                    " data.prefetch_gib"
                )
        return f"a loader worker (process {worker.pid}) was killed by {number.name}, {cause}"


def _end_workers(
    workers: dict[int, tuple[BaseProcess, Connection]],
    parts: Connection,
    put: Connection,
    selector: selectors.BaseSelector,
) -> None:
    """Kill all workers: nobody waits for what they are making, and a slow store may hold it up."""
    selector.close()
    for worker, _ in workers.values():
        worker.kill()
    for worker, results in workers.values():
        results.close()
        worker.join(END_WAIT_S)
        if worker.exitcode is None:
            # It waits inside the kernel, as for a dead mount, and ends with that wait. Python must
            # not join it at exit.
            multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]
    parts.close()
    put.close()


# --- in a worker process --------------------------------------------------------------------------


def _work(
    batches: Batches, slots: Slots, number: int, parts: Connection, send: Connection, niceness: int
) -> None:
    """Make parts until killed."""
    os.nice(niceness)
    # Of all cores of the host a worker takes one: its resizes would start a thread on each.
    torch.set_num_threads(1)
    # Signals are ignored here: a worker that died of one meant for its rank would cost the rank's
    # last save.
    follow_parent()
    status = slots.status(number)
    stages.use(status)
    batch_in = functools.cache(slots.batch)
    num_made = 0
    with suppress(BrokenPipeError):  # the parent is dead, as if there is no message
        while message := os.read(parts.fileno(), _PART.size):
            position, slot, first = _PART.unpack(message)
            batch = batch_in(slot, batches.layout_at(position))
            rows = batch.rows(first, first + slots.ring.part_rows)
            result = _make(batches, status, position, first, rows)
            if result.error is not None and not isinstance(result.error, ShardError):
                # As text: not every exception can be pickled, and none takes its stack along.
                stack = "".join(traceback.format_exception(result.error))
                result = result._replace(error=RuntimeError(f"in a loader worker:\n{stack}"))
            num_made += 1
            # At the second part: the first has opened and allocated what each worker needs.
            if num_made % PARTS_PER_MEASUREMENT == 2:
                status.measure_memory()
            send.send(result)
            # After the result is in the pipe: whoever says that it has no work owes nothing.
            status.enter(Stage.IDLE)


def _make(batches: Batches, status: WorkerStatus, position: int, first: int, rows: Batch) -> Result:
    """Write rows `first` and following of the batch at `position` into `rows`."""
    status.take(position, first)
    began_s = time.perf_counter()
    bad_keys: tuple[str, ...] = ()
    error = None
    try:
        bad_keys = batches.fill(position, first, rows)
    except Exception as raised:
        # Not raised here: an error is due with its batch, after all batches before it.
        error = raised
    busy_s = time.perf_counter() - began_s
    status.count_retries()
    return Result(position, first, len(rows.labels), busy_s, bad_keys, error)
