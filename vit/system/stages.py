"""The status of each loader process: its current stage and its counts, in shared memory.

A process that makes batches has a status, in memory that workers and training share. When it
changes its stage, such as from reading to decoding, it writes the new stage and the time, and adds
the time of the last stage to its sum: about 0.3 microseconds a change. Training only reads the
status, so it also sees the stage of a process that hangs. `vit.data.stall_watch` reports that
stage, and `vit.hooks.monitor` writes the sums to the record.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path

from vit.system.retry import num_progress, num_retries

STATUS_BYTES = 256
"""Size of a process's status: 32 numbers of 8 bytes."""


class Stage(IntEnum):
    """The stages of a process that makes batches."""

    IDLE = 0
    """Waiting for work."""
    ORDER = 1
    """Looking up samples and their rows of the index."""
    STORE = 2
    """Waiting for a block of a shard to be fetched."""
    LOCK = 3
    """Waiting for another process that fetches the same block or measures the cache."""
    READ = 4
    """Reading a file."""
    DECODE = 5
    """Turning encoded bytes into pixels."""
    RESIZE = 6
    """Resizing pixels to the model's size."""
    DRAW = 7
    """Drawing the augmentation's table."""


DOING = {
    Stage.IDLE: "waiting for work",
    Stage.ORDER: "looking up the order",
    Stage.STORE: "waiting for the store",
    Stage.LOCK: "waiting for another process's lock on the cache",
    Stage.READ: "reading",
    Stage.DECODE: "decoding",
    Stage.RESIZE: "resizing",
    Stage.DRAW: "drawing the augmentation",
}
"""Stages in messages."""
COUNTED = ("retries", "cache_hits", "cache_misses", "read_bytes", "fetched_bytes")
"""Counts: repeated requests to a store or file system; samples whose block was in the cache, or was
not; bytes of samples that were read, from anywhere; bytes that were fetched, whether or not the
cache kept them."""
TALLIED = (*(f"{stage.name.lower()}_s" for stage in Stage), *COUNTED)
"""The names in a `Tally`."""
Tally = dict[str, float]
"""The work of processes, by the names in `TALLIED`: seconds in each stage, then counts."""
_CHANGES, _STAGE, _SINCE_S, _POSITION, _FIRST, _SAMPLE, _OWN_BYTES = range(7)
_SECONDS = 8
"""Index of the first number of the tally; the seconds come first."""
_PLACES = {name: index for index, name in enumerate(TALLIED, _SECONDS)}


def add_up(tallies: Sequence[Tally]) -> Tally:
    """Add up the tallies of several processes."""
    return {name: sum(tally[name] for tally in tallies) for name in TALLIED}


def since(now: Tally, before: Tally) -> Tally:
    """Return the difference of two tallies of a process."""
    return {name: now[name] - before[name] for name in TALLIED}


class WorkerStatus:
    """The status of one process, in `STATUS_BYTES` bytes that it writes and others read."""

    def __init__(self, memory: memoryview):
        self._numbers = memory.cast("d")
        self._retries = num_retries()
        self._progress = num_progress()

    # ---- for the process itself ----

    def enter(self, stage: Stage) -> None:
        """End the current stage, and begin `stage`."""
        numbers = self._numbers
        now_s = time.monotonic()
        numbers[_SECONDS + int(numbers[_STAGE])] += now_s - (numbers[_SINCE_S] or now_s)
        numbers[_SINCE_S] = now_s
        numbers[_STAGE] = stage
        numbers[_CHANGES] += 1

    def take(self, position: int, first: int) -> None:
        """Begin a part: rows `first` and following of the batch at `position`."""
        self._numbers[_POSITION] = position
        self._numbers[_FIRST] = first
        self._numbers[_SAMPLE] = -1
        self.enter(Stage.ORDER)

    def read(self, sample: int) -> None:
        """Begin to read `sample`."""
        self._numbers[_SAMPLE] = sample
        self.enter(Stage.READ)

    @contextmanager
    def within(self, stage: Stage) -> Iterator[None]:
        """Enter `stage` for the block, then return to the previous stage."""
        before = self.stage
        self.enter(stage)
        try:
            yield
        finally:
            self.enter(before)

    def count(self, **counted: int) -> None:
        """Add to counts. counted: numbers by names in `COUNTED`."""
        for name, number in counted.items():
            self._numbers[_PLACES[name]] += number

    def count_retries(self) -> None:
        """Count the requests that this process has repeated.

        A retry, a pause between attempts, and arriving bytes count as progress, because a process
        that waits for them does not hang.
        """
        retries = num_retries()
        progress = num_progress()
        self._numbers[_PLACES["retries"]] += retries - self._retries
        if (retries, progress) != (self._retries, self._progress):
            self._retries = retries
            self._progress = progress
            self._numbers[_CHANGES] += 1

    def beat(self) -> None:
        """Report progress during a wait that is known to end."""
        self._numbers[_CHANGES] += 1

    def measure_memory(self) -> None:
        """Measure the memory that only this process has, if the system reports it (2 ms)."""
        with suppress(OSError):
            text = Path("/proc/self/smaps_rollup").read_text()
            sizes_kib = re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+) kB", text, re.M)
            self._numbers[_OWN_BYTES] = 1024 * sum(map(int, sizes_kib))

    def restart(self) -> None:
        """Reset the status for the successor of a dead process; the tally stays."""
        self._numbers[_STAGE] = Stage.IDLE
        self._numbers[_SINCE_S] = time.monotonic()
        self._numbers[_SAMPLE] = -1

    # ---- for readers ----

    @property
    def num_changes(self) -> int:
        """Number of changes so far; a different number means progress."""
        return int(self._numbers[_CHANGES])

    @property
    def stage(self) -> Stage:
        """The current stage of the process."""
        return Stage(int(self._numbers[_STAGE]))

    @property
    def since_s(self) -> float:
        """The time at which the stage began, in seconds of `time.monotonic`."""
        return self._numbers[_SINCE_S]

    @property
    def part(self) -> tuple[int, int]:
        """(position, first row) of the part that the process makes, or made last."""
        return int(self._numbers[_POSITION]), int(self._numbers[_FIRST])

    @property
    def sample(self) -> int | None:
        """The number of the sample that is read or decoded, None before the first of a part."""
        sample = int(self._numbers[_SAMPLE])
        return None if sample < 0 else sample

    @property
    def own_bytes(self) -> int:
        """Memory that only this process has; 0 until it is measured."""
        return int(self._numbers[_OWN_BYTES])

    def tally(self) -> Tally:
        """Return the tally of the process up to its last change."""
        return dict(zip(TALLIED, self._numbers[_SECONDS : _SECONDS + len(TALLIED)], strict=True))


current = WorkerStatus(memoryview(bytearray(STATUS_BYTES)))
"""The status of this process; code that reads or decodes updates it."""


def use(status: WorkerStatus) -> WorkerStatus:
    """Make `status` the status of this process; return the previous one."""
    global current
    before = current
    current = status
    return before
