"""Worker processes that make parts of batches: how they start, get work, hang, die and end.

Parts go into one pipe, and whichever worker is free takes the next; results come back through one
pipe per worker. Each worker writes what it is doing into its status in shared memory, which
`vit.data.stall_watch` looks at while training waits. A worker without progress for
`stall_timeout_s` is killed. Once it is dead and cannot write any more, another worker takes its
place and its part is made again, from nothing but its position. If all workers say that they wait
for work and parts do not come back (one was stopped as it waited), all are replaced. A part at
which two workers hang, and a worker that even the kernel cannot end, end the run.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import selectors
import signal
import struct
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import NamedTuple

import torch

from vit.data import stages
from vit.data.batches import Batches
from vit.data.slots import Slots
from vit.data.stages import Stage
from vit.data.stall_watch import StallWatch
from vit.system.child_process import follow_parent, signals_blocked
from vit.system.files import ShardError
from vit.system.host import num_oom_kills, process_state

END_WAIT_S = 1.0
"""Time for workers to finish their part, which a slow store may hold up; then they are killed."""
STOP_CHECKS = 50
STOP_CHECK_S = 0.01
"""How often, and how far apart, the kernel is asked whether a worker has stopped."""
PARTS_PER_MEASUREMENT = 64
"""Parts after which a worker measures its memory again."""
MAX_QUEUED_PARTS = 256
"""4 KiB, which every pipe has room for, so adding a part never waits: on Linux, a user with a
thousand pipes gets only 8 KiB for each further one."""
_PART = struct.Struct("<qii")
"""position, slot, first row. Few enough bytes that a pipe passes them in one piece, with any number
of readers."""
_END = -1
"""A position that asks a worker to end."""
Part = tuple[int, int]
"""(position, first row)."""
log = logging.getLogger(__name__)


class WorkerError(ValueError):
    """A loader worker has died or hangs: which, why or where, and what to do."""


class Result(NamedTuple):
    """What a worker reports about a part that is done, or failed."""

    slot: int
    first: int
    num_rows: int
    busy_s: float
    bad_keys: tuple[str, ...] = ()
    mistake: str = ""
    """A user's mistake, one line: ShardError."""
    stack: str = ""
    """The stack of any other exception."""


class WorkerPool:
    """Worker processes, the pipe that they take parts from, and the pipes of their results."""

    def __init__(
        self, batches: Batches, slots: Slots, num_workers: int, stall_timeout_s: float | None
    ):
        # Without fork each worker has 340 MiB of its own, opens every shard again and takes seconds
        # to start.
        self._context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self._batches = batches
        self._slots = slots
        self._timeout_s = stall_timeout_s or float("inf")
        self.statuses = [slots.status(number) for number in range(num_workers)]
        self.num_replaced = 0
        """Workers that hung and were replaced."""
        self._watch = StallWatch(self.statuses, batches.where, stall_timeout_s)
        self._oom_kills_before = num_oom_kills()
        self._queued: dict[Part, int] = {}
        """The slot of each part that was added and has not come back."""
        self._second_time = set[Part]()
        """Parts that are being made again."""
        self._killed = set[int]()
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

    @property
    def num_queued(self) -> int:
        """Parts that were added and have not come back."""
        return len(self._queued)

    def put(self, position: int, slot: int, first: int) -> None:
        """Add a part, for the worker that is free first."""
        self._queued[position, first] = slot
        os.write(self._put.fileno(), _PART.pack(position, slot, first))

    def begin_wait(self) -> None:
        """Start to count a wait of training for a batch, which may span many calls of `results`."""
        self._watch.begin()

    def results(self, wait: bool) -> list[tuple[int, Result]]:
        """Return (position, result) of the parts that are done; with `wait`, of one or more.

        While it waits, workers that hang are reported and replaced. Raises WorkerError if a worker
        has died, or hangs and cannot be replaced.
        """
        found = list[tuple[int, Result]]()
        while True:
            events = self._selector.select(self._watch.look_each_s if wait else 0)
            for number in {key.data for key, _ in events}:
                is_dead = self._receive(number, found)
                if is_dead and number not in self._killed:
                    raise WorkerError(self._cause_of_death(self._workers[number][0]))
                if is_dead:
                    self._replace(number)
            if wait and self._watch.is_due:
                self._watch.look(self._name)
                self._kill_stalled(found)
            if found or not wait:
                return found

    def _start(self, number: int) -> None:
        self.statuses[number].restart()
        # A signal to the job must not end a worker before it has learnt to ignore it.
        with signals_blocked():
            results, send = self._context.Pipe(duplex=False)
            worker = self._context.Process(
                target=_work,
                args=(self._batches, self._slots, number, self._parts, send),
                daemon=True,
            )
            worker.start()
            send.close()  # now only the worker has it, so the pipe ends when the worker does
        self._workers[number] = (worker, results)
        self._selector.register(results, selectors.EVENT_READ, number)
        self._selector.register(worker.sentinel, selectors.EVENT_READ, number)

    def _receive(self, number: int, found: list[tuple[int, Result]]) -> bool:
        """Append what worker `number` has sent to `found`; return True if it is dead."""
        worker, results = self._workers[number]
        # Before the pipe is read: what a worker sent before it died is still there.
        is_dead = worker.exitcode is not None
        try:
            while results.poll():
                position, result = results.recv()
                self._watch.idle_s = 0.0
                self._queued.pop((position, result.first))
                self._second_time.discard((position, result.first))
                found.append((position, result))
        except (EOFError, OSError):
            return True
        return is_dead

    # ---- workers that hang, and workers that died ----

    def _name(self, number: int) -> str:
        pid = self._workers[number][0].pid
        return f"loader worker {number} (process {pid}{process_state(pid)})"

    def _kill_stalled(self, found: list[tuple[int, Result]]) -> None:
        """Kill workers that hang for too long; `results` replaces them once they are dead."""
        if self._watch.idle_s >= self._timeout_s and self._queued:
            self._replace_all(found)
        for number, stuck_s in enumerate(self._watch.stuck_s):
            if stuck_s < self._timeout_s:
                continue
            problem = (
                f"{self._name(number)} {self._watch.activity(number)}, without progress for"
                f" {stuck_s:.0f} s (data.stall_timeout_s)"
            )
            remedy = "look at what it waits for: a dead mount, a debugger, a suspended process"
            if number in self._killed:
                raise WorkerError(
                    f"{problem}, and cannot be killed: it waits inside the kernel, as for a dead"
                    f" mount; {remedy}"
                )
            if not self._batches.repeatable:
                raise WorkerError(f"{problem}; {remedy}")
            if self.statuses[number].part in self._second_time:
                raise WorkerError(f"{problem}, where another worker hung before; {remedy}")
            if self._kill(number):
                log.warning(
                    "%s: it is killed, and another makes its part of the batch again", problem
                )

    def _replace_all(self, found: list[tuple[int, Result]]) -> None:
        """Replace all workers: all say that they have no work, and parts wait.

        One was stopped before it took a part, or before it began it; which, cannot be known. Parts
        are added again once all workers are dead.
        """
        names = [self._name(number) for number in self._workers]
        idle = ", ".join([name for name in names if ", stopped" in name] or names)
        problem = (
            f"{idle} takes no work, for {self._watch.idle_s:.0f} s (data.stall_timeout_s), and"
            f" {self.num_queued} parts of batches wait"
        )
        if not self._batches.repeatable or self._second_time:
            raise WorkerError(
                f"{problem}; look for what stops processes: a debugger, a suspended job"
            )
        for worker, _ in self._workers.values():
            worker.kill()
        self._killed.update(self._workers)
        for number, (worker, _) in self._workers.items():
            worker.join(END_WAIT_S)
            if worker.exitcode is None:
                raise WorkerError(
                    f"{problem}, and one cannot be killed: it waits inside the kernel, as for a"
                    " dead mount"
                )
            self._receive(number, found)
        log.warning("%s: all workers are replaced, and others make these", problem)
        self._watch.idle_s = 0.0
        _drain(self._parts)
        os.set_blocking(self._parts.fileno(), True)
        left = self._queued
        self._queued = {}  # or `_replace` would add the part that its worker had
        for number in list(self._workers):
            self._replace(number)
        self._second_time.update(left)
        for (position, first), slot in left.items():
            self.put(position, slot, first)

    def _kill(self, number: int) -> bool:
        """Kill a worker, unless it continues just now; return whether it was killed.

        It is stopped first, so that its status surely names the part it was at.
        """
        worker = self._workers[number][0]
        status = self.statuses[number]
        num_changes = status.num_changes
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        for _ in range(STOP_CHECKS):
            if process_state(worker.pid) not in (", running", ", sleeping", ""):
                break
            time.sleep(STOP_CHECK_S)
        if status.num_changes != num_changes:
            os.kill(worker.pid, signal.SIGCONT)
            return False
        worker.kill()
        self._killed.add(number)
        self._watch.stuck_s[number] = 0.0
        return True

    def _replace(self, number: int) -> None:
        """Start another worker in place of a dead one, and add its part again if it is missing."""
        worker, results = self._workers[number]
        part = self.statuses[number].part
        self._selector.unregister(results)
        self._selector.unregister(worker.sentinel)
        results.close()
        worker.join()
        worker.close()
        self._killed.remove(number)
        self.num_replaced += 1
        self._start(number)
        if part in self._queued:
            self._second_time.add(part)
            self.put(part[0], self._queued[part], part[1])

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
        num_kills, before = num_oom_kills(), self._oom_kills_before
        # None: the counter cannot be read. Without both numbers nothing is known.
        is_counted = num_kills is not None and before is not None and num_kills > before
        if number == signal.SIGKILL and is_counted:
            reason = (
                "because memory ran out: the kernel has counted it. Lower data.num_workers or"
                " data.prefetch_gib"
            )
        elif number == signal.SIGKILL:
            counted = "it counted none here" if num_kills is not None else "see `dmesg`"
            reason = (
                "by a person or program, or by the kernel, which does so when memory runs out"
                f" ({counted}); if it did, lower data.num_workers or data.prefetch_gib"
            )
        elif number == signal.SIGBUS:
            reason = (
                "as when a mapped file is cut short or its disk fails: was an index (*.index.npy)"
                " rewritten while it was in use?"
            )
        else:
            reason = (
                "so a library it uses crashed, perhaps on a damaged image: `python -m"
                " data_prep.verify` decodes them all"
            )
        return f"a loader worker (process {worker.pid}) was killed by {number.name}, {reason}"


def _drain(parts: Connection) -> None:
    """Remove the parts that no worker has taken; from now on the pipe does not block."""
    os.set_blocking(parts.fileno(), False)
    with suppress(BlockingIOError):
        while os.read(parts.fileno(), 2**16):
            pass


def _end_workers(
    workers: dict[int, tuple[BaseProcess, Connection]],
    parts: Connection,
    put: Connection,
    selector: selectors.BaseSelector,
) -> None:
    """Remove the parts that no worker has begun, end all workers, and kill those that are slow."""
    _drain(parts)
    for _ in workers:
        os.write(put.fileno(), _PART.pack(_END, 0, 0))
    selector.close()
    deadline = time.monotonic() + END_WAIT_S
    for _, results in workers.values():
        results.close()  # so that no worker waits for room for a result
    for worker, _ in workers.values():
        worker.join(max(deadline - time.monotonic(), 0))
        if worker.exitcode is None:
            worker.kill()
            worker.join(END_WAIT_S)
        if worker.exitcode is not None:
            worker.close()
        else:
            # It waits inside the kernel, as for a dead mount, and ends with that wait. Python must
            # not join it at exit.
            multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]
    parts.close()
    put.close()


# --- in a worker process --------------------------------------------------------------------------


def _work(batches: Batches, slots: Slots, number: int, parts: Connection, send: Connection) -> None:
    """Make parts until asked to end."""
    torch.set_num_threads(1)
    # Signals are ignored here: a worker that died of one meant for its rank would cost the rank's
    # last save.
    follow_parent()
    status = slots.status(number)
    stages.use(status)
    batch_in = [slots.batch(slot) for slot in range(slots.ring.num_slots)]
    num_made = 0
    with suppress(BlockingIOError, BrokenPipeError):  # the loader was closed
        while message := os.read(parts.fileno(), _PART.size):  # empty: the parent is dead
            position, slot, first = _PART.unpack(message)
            if position == _END:
                return
            status.take(position, first)
            rows = batch_in[slot].rows(first, first + slots.ring.part_rows)
            began_s = time.perf_counter()
            bad_keys: tuple[str, ...] = ()
            mistake = ""
            stack = ""
            try:
                bad_keys = batches.fill(position, first, rows)
            except ShardError as error:
                mistake = str(error)
            except Exception:
                stack = traceback.format_exc()
            busy_s = time.perf_counter() - began_s
            num_made += 1
            if num_made % PARTS_PER_MEASUREMENT == 2:
                status.measure_memory()
            status.count_retries()
            result = Result(slot, first, len(rows.labels), busy_s, bad_keys, mistake, stack)
            send.send((position, result))
            status.enter(Stage.IDLE)
