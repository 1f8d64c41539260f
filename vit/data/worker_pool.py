"""Worker processes: how they start, take parts of batches, say what they did, hang, die and end.

The data's story: parts go into one pipe, and whoever is free takes the next; results come back
through a pipe for each worker. What a worker does in between it writes into its row of shared
memory (`vit.data.stages`). While training waits for a batch, the rows are looked at: who makes no
progress is named after a minute, with what it hangs at. After `stall_timeout_s` it is killed, and
once it is dead, so that it can write nowhere any more, another worker takes its place and its part
is made again, from nothing but its position. Where all say that they wait for work and parts do not
come back (one was stopped as it waited), all are replaced. A part at which two workers hang, and a
worker that the kernel cannot end either, end the run.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import selectors
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import NamedTuple

import torch

from vit.data import stages
from vit.data.batches import Batches
from vit.data.slots import Slots
from vit.data.stages import DOING, Stage, WorkerStatus
from vit.system.child_process import follow_parent, signals_blocked
from vit.system.files import ShardError
from vit.system.host import num_oom_kills, process_state

END_WAIT_S = 1.0
"""For workers to finish the part they are at, which a slow store may hold up; then they are
killed."""
TELL_AFTER_S = 60.0
"""A wait of training for its next batch is told after so long, or a quarter of the stall timeout,
and again each time as long."""
LOOK_EACH_S = 1.0
"""While training waits, or more often where the stall timeout is short."""
MEASURE_EACH = 64
"""Parts after which a worker measures its memory anew."""
MAX_QUEUED_PARTS = 256
"""4 KiB, which every pipe has room for, so putting in a part never waits: Linux gives who has a
thousand pipes only 8 KiB for each more."""
_PART = struct.Struct("<qii")
"""position, slot, first row: few enough bytes that a pipe takes and gives them whole, with any
number of readers."""
_END = -1
"""A position that tells a worker to end."""
log = logging.getLogger(__name__)


class WorkerError(ValueError):
    """A loader worker has died or hangs: of what, or at what, and what to do."""


class Result(NamedTuple):
    """What a worker says about a part that is done, or failed."""

    slot: int
    first: int
    num_rows: int
    busy_s: float
    bad_keys: tuple[str, ...] = ()
    mistake: str = ""
    """A person's, one line: ShardError."""
    stack: str = ""
    """Of anything else that was raised."""


class Watch:
    """How long each of some processes has made no progress.

    Counted in looks, not by the clock: where training itself was stopped (Ctrl-Z, a suspended job),
    nobody hangs.
    """

    def __init__(
        self, rows: list[WorkerStatus], where: Callable[[int], str], stall_timeout_s: float | None
    ):
        self._rows = rows
        self._where = where
        self.tell_after_s = min(TELL_AFTER_S, (stall_timeout_s or 1e9) / 4)
        self.look_each_s = min(LOOK_EACH_S, self.tell_after_s / 4)
        self.stuck_s = [0.0] * len(rows)
        """Of each process, in its present stage."""
        self._turns = [row.turns for row in rows]
        self.begin()

    def begin(self) -> None:
        """Training begins to wait."""
        self._looked_s = time.monotonic()
        self._waited_s = 0.0
        self._to_tell_s = self.tell_after_s
        self.idle_s = 0.0
        """How long nobody has had anything to do."""

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self._looked_s >= self.look_each_s

    def look(self, names: Callable[[int], str]) -> None:
        """Look at the rows, and tell if it is time to. `names`: who process number n is."""
        now_s = time.monotonic()
        passed_s = min(now_s - self._looked_s, 2 * self.look_each_s)
        self._looked_s = now_s
        self._waited_s += passed_s
        for number, row in enumerate(self._rows):
            turns = row.turns
            moved = turns != self._turns[number] or row.stage == Stage.IDLE
            self._turns[number], self.stuck_s[number] = (
                turns,
                (0.0 if moved else self.stuck_s[number] + passed_s),
            )
        self.idle_s = (
            self.idle_s + passed_s if all(row.stage == Stage.IDLE for row in self._rows) else 0.0
        )
        if self._waited_s >= self._to_tell_s:
            self._to_tell_s += self.tell_after_s
            stuck = [
                n for n, stuck_s in enumerate(self.stuck_s) if stuck_s >= 0.9 * self.tell_after_s
            ]
            busy = [n for n, row in enumerate(self._rows) if row.stage != Stage.IDLE]
            said = "; ".join(f"{names(n)} {self.at(n)}" for n in (stuck or busy)[:4])
            idle = ", ".join(names(n) for n in range(min(len(self._rows), 4)))
            more = len(stuck or busy) - 4
            fetched_gb = sum(row.tally()["fetched_bytes"] for row in self._rows) / 1e9
            log.warning(
                "training has waited %.0f s for its next batch: %s%s%s",
                self._waited_s,
                said or f"{idle} takes no work",
                f"; and {more} more" if more > 0 else "",
                f"; {fetched_gb:.2f} GB have been fetched up to now" if fetched_gb else "",
            )

    def at(self, number: int) -> str:
        """What a process is at: "has been reading ... since 12:13:14"."""
        row = self._rows[number]
        since = time.strftime(
            "%H:%M:%S", time.localtime(time.time() - (time.monotonic() - row.since_s))
        )
        sample = row.sample
        of = (
            ""
            if sample is None or row.stage in (Stage.ORDER, Stage.DRAW)
            else f" (sample {sample} of {self._where(sample)})"
        )
        return f"has been {DOING[row.stage]}{of} since {since}"


class Lookout:
    """Looks at a process that makes its batches itself, from a thread: it can tell, and do
    nothing."""

    def __init__(
        self, row: WorkerStatus, where: Callable[[int], str], stall_timeout_s: float | None
    ):
        watch = Watch([row], where, stall_timeout_s)
        self._over = threading.Event()

        def look() -> None:
            part = row.part
            while not self._over.wait(watch.look_each_s):
                if row.stage == Stage.IDLE or row.part != part:  # another batch, or none
                    part = row.part
                    watch.begin()
                else:
                    watch.look(lambda _: "this process")

        threading.Thread(target=look, daemon=True).start()
        self.end = Finalize(self, self._over.set)


class WorkerPool:
    """Worker processes, the pipe that they take parts from, and the pipes that their results come
    through."""

    def __init__(
        self, batches: Batches, slots: Slots, num_workers: int, stall_timeout_s: float | None
    ):
        # Anything but a fork has 340 MiB of its own for each worker, opens every shard anew and
        # takes seconds to begin.
        self._context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self._batches = batches
        self._slots = slots
        self._timeout_s = stall_timeout_s
        self.rows = [slots.row(number) for number in range(num_workers)]
        self.num_replaced = 0
        """Workers that hung and were replaced."""
        self._watch = Watch(self.rows, batches.where, stall_timeout_s)
        self._oom_kills = num_oom_kills()
        self._given: dict[tuple[int, int], int] = {}
        """The slot of each part that was put in and did not come back."""
        self._again = set[tuple[int, int]]()
        """Parts that are being made for the second time."""
        self._killed = set[int]()
        self._parts, self._put = self._context.Pipe(duplex=False)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, tuple[BaseProcess, Connection]] = {}
        # Ended also where nobody closes the loader: at exit Python would wait for them, and they
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
        """Parts that were put in and did not come back."""
        return len(self._given)

    def put(self, position: int, slot: int, first: int) -> None:
        """Hand a part to whoever is free first."""
        self._given[position, first] = slot
        os.write(self._put.fileno(), _PART.pack(position, slot, first))

    def begin_wait(self) -> None:
        """Training begins to wait for a batch; `results` tells how long it has, however many parts
        come meanwhile."""
        self._watch.begin()

    def results(self, wait: bool) -> list[tuple[int, Result]]:
        """(position, result) of parts that were done meanwhile; with `wait`, at least one, and who
        hangs is told and replaced.

        Raises WorkerError if a worker has died, or hangs for good.
        """
        found = list[tuple[int, Result]]()
        while True:
            for number in {
                key.data for key, _ in self._selector.select(self._watch.look_each_s if wait else 0)
            }:
                is_over = self._hear(number, found)
                if is_over and number in self._killed:
                    self._replace(number)
                elif is_over:
                    raise WorkerError(self._death_of(self._workers[number][0]))
            if wait and self._watch.is_due:
                self._watch.look(self._name)
                self._mend(found)
            if found or not wait:
                return found

    def _start(self, number: int) -> None:
        self.rows[number].begin_again()
        with signals_blocked():
            results, say = self._context.Pipe(duplex=False)
            worker = self._context.Process(
                target=_work,
                args=(self._batches, self._slots, number, self._parts, say),
                daemon=True,
            )
            worker.start()
            say.close()  # the worker alone has it, so that its end is noticed
        self._workers[number] = (worker, results)
        self._selector.register(results, selectors.EVENT_READ, number)
        self._selector.register(worker.sentinel, selectors.EVENT_READ, number)

    def _hear(self, number: int, found: list[tuple[int, Result]]) -> bool:
        """Add to `found` what worker `number` has said; True if it is no more."""
        worker, results = self._workers[number]
        # asked first: what it said before is still in the pipe
        is_over = worker.exitcode is not None
        try:
            while results.poll():
                position, result = results.recv()
                self._watch.idle_s = 0.0
                self._given.pop((position, result.first))
                self._again.discard((position, result.first))
                found.append((position, result))
        except (EOFError, OSError):
            return True
        return is_over

    # ---- who hangs, and who has died ----

    def _name(self, number: int) -> str:
        pid = self._workers[number][0].pid
        return f"loader worker {number} (process {pid}{process_state(pid)})"

    def _mend(self, found: list[tuple[int, Result]]) -> None:
        """Kill who hangs for too long; `results` sees when it is dead."""
        if self._timeout_s is not None and self._watch.idle_s >= self._timeout_s and self._given:
            self._deal_again(found)
        for number, stuck_s in enumerate(self._watch.stuck_s):
            if self._timeout_s is None or stuck_s < self._timeout_s:
                continue
            said = (
                f"{self._name(number)} {self._watch.at(number)}, without progress for {stuck_s:.0f}"
                " s (data.stall_timeout_s)"
            )
            remedy = (
                "look at what it waits for: a mount that is away, a debugger, a suspended process"
            )
            if number in self._killed:
                raise WorkerError(
                    f"{said}, and cannot be killed: the kernel waits for something, as it does for"
                    f" a mount; {remedy}"
                )
            if not self._batches.repeatable:
                raise WorkerError(f"{said}; {remedy}")
            if self.rows[number].part in self._again:
                raise WorkerError(f"{said}, where another worker hung before; {remedy}")
            if self._kill(number):
                log.warning("%s: it is killed, and another makes its part of the batch again", said)

    def _deal_again(self, found: list[tuple[int, Result]]) -> None:
        """Other workers for all, who say that they have nothing to do while parts wait: one was
        stopped before it took a part, or with a part that it had not begun. All, as nobody knows
        who has which part. Theirs are put in again once all are dead.
        """
        names = [self._name(number) for number in self._workers]
        idle = ", ".join([name for name in names if ", stopped" in name] or names)
        said = (
            f"{idle} takes no work, for {self._watch.idle_s:.0f} s (data.stall_timeout_s), and"
            f" {self.num_queued} parts of batches wait"
        )
        if not self._batches.repeatable or self._again:
            raise WorkerError(f"{said}; look for who stops processes: a debugger, a suspended job")
        for number, (worker, _) in self._workers.items():
            worker.kill()
            self._killed.add(number)
        for number, (worker, _) in self._workers.items():
            worker.join(END_WAIT_S)
            if worker.exitcode is None:
                raise WorkerError(
                    f"{said}, and one cannot be killed: the kernel waits for something, as it does"
                    " for a mount"
                )
            self._hear(number, found)
        log.warning("%s: all workers are replaced, and others make these", said)
        self._watch.idle_s = 0.0
        _empty(self._parts)
        os.set_blocking(self._parts.fileno(), True)
        left = self._given
        self._given = {}
        for number in list(self._workers):
            self._replace(number)
        self._again.update(left)
        for (position, first), slot in left.items():
            self.put(position, slot, first)

    def _kill(self, number: int) -> bool:
        """Kill a worker, unless it goes on just now. It is stopped first, or waits in the kernel:
        then its row tells its part."""
        worker = self._workers[number][0]
        row = self.rows[number]
        turns = self.rows[number].turns
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        for _ in range(50):
            if process_state(worker.pid) not in (", running", ", sleeping", ""):
                break
            time.sleep(0.01)
        if row.turns != turns:
            os.kill(worker.pid, signal.SIGCONT)
            return False
        worker.kill()
        self._killed.add(number)
        self._watch.stuck_s[number] = 0.0
        return True

    def _replace(self, number: int) -> None:
        """Another worker in the place of one that was killed and is dead; its part is put in again,
        if it was not done."""
        worker, results = self._workers[number]
        part = self.rows[number].part
        self._selector.unregister(results)
        self._selector.unregister(worker.sentinel)
        results.close()
        worker.join()
        worker.close()
        self._killed.remove(number)
        self.num_replaced += 1
        self._start(number)
        if part in self._given:
            self._again.add(part)
            self.put(part[0], self._given[part], part[1])

    def _death_of(self, worker: BaseProcess) -> str:
        """What to tell about a worker that is no more."""
        worker.join(END_WAIT_S)
        code = worker.exitcode
        if code is None or code >= 0:
            return (
                f"a loader worker (process {worker.pid}) ended by itself with exit status {code}:"
                " start again, report it if it returns"
            )
        name = signal.Signals(-code).name
        kills = num_oom_kills()
        before = self._oom_kills
        if -code == signal.SIGKILL and kills is not None and before is not None and kills > before:
            reason = (
                "because memory ran out: the kernel has counted it. Lower data.num_workers or"
                " data.prefetch_gib"
            )
        elif -code == signal.SIGKILL:
            counted = "it counted none here" if kills is not None else "`dmesg` tells"
            reason = (
                f"by somebody, or by the kernel, which does so when memory runs out ({counted}); "
                "if it did, lower data.num_workers or data.prefetch_gib"
            )
        elif -code == signal.SIGBUS:
            reason = (
                "as when a mapped file is cut short or its disk fails: was an index (*.index.npy)"
                " written anew while it was in use?"
            )
        else:
            reason = (
                "so a library it uses crashed, perhaps on a damaged image: `python -m"
                " data_prep.verify` decodes them all"
            )
        return f"a loader worker (process {worker.pid}) was killed by {name}, {reason}"


def _empty(parts: Connection) -> None:
    """Take back what no worker has taken; the pipe does not block from now on."""
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
    """Take back what is not begun, tell all to end, and kill those that are not quick about it."""
    _empty(parts)
    for _ in workers:
        os.write(put.fileno(), _PART.pack(_END, 0, 0))
    selector.close()
    deadline = time.monotonic() + END_WAIT_S
    for _, results in workers.values():
        results.close()  # nobody waits until there is room for a result
    for worker, _ in workers.values():
        worker.join(max(deadline - time.monotonic(), 0))
        if worker.exitcode is None:
            worker.kill()
            worker.join(END_WAIT_S)
        if worker.exitcode is not None:
            worker.close()
        else:
            # it waits in the kernel, as for a mount that is away: it ends with that, and Python
            # must not wait for it at exit
            multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]
    parts.close()
    put.close()


# --- in a worker process --------------------------------------------------------------------------


def _work(batches: Batches, slots: Slots, number: int, parts: Connection, say: Connection) -> None:
    """Make parts until told to end. A worker that died of a signal meant for its rank would lose
    the rank's last save."""
    torch.set_num_threads(1)
    follow_parent()
    row = slots.row(number)
    stages.use(row)
    into = [slots.batch(slot) for slot in range(slots.ring.num_slots)]
    num_made = 0
    with suppress(BlockingIOError, BrokenPipeError):  # the loader was closed
        while True:
            message = os.read(parts.fileno(), _PART.size)
            # empty: the parent is no more
            position, slot, first = _PART.unpack(message) if message else (_END, 0, 0)
            if position == _END:
                return
            row.take(position, first)
            rows = into[slot].rows(first, first + slots.ring.part_rows)
            began = time.perf_counter()
            bad_keys = tuple[str, ...]()
            mistake = ""
            stack = ""
            try:
                bad_keys = batches.fill(position, first, rows)
            except ShardError as error:
                mistake = str(error)
            except Exception:
                stack = traceback.format_exc()
            if num_made % MEASURE_EACH == 1:
                row.measure_memory()
            num_made += 1
            row.count_retries()
            say.send(
                (
                    position,
                    Result(
                        slot,
                        first,
                        len(rows.labels),
                        time.perf_counter() - began,
                        bad_keys,
                        mistake,
                        stack,
                    ),
                )
            )
            row.enter(Stage.IDLE)
