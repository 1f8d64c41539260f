"""What each loader process is doing now, and what it has done: numbers in shared memory.

A process that makes batches has a status, in memory that workers and training share. At each change
(say, from reading to decoding) it writes there what it is doing and since when, and adds the time
that has passed to its last stage: some 0.3 microseconds a change. Training only reads, so a process
that hangs is seen as well as one that works. `vit.data.stall_watch` reports where a worker hangs;
`vit.hooks.monitor` writes the sums to the record.
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
    """What a process that makes batches can be doing."""

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
"""Counts: requests to a store or file system that had to be repeated; samples whose block was in
the cache, and was not; bytes of samples that were read from anywhere; bytes that were fetched,
whether or not the cache kept them."""
TALLIED = (*(f"{stage.name.lower()}_s" for stage in Stage), *COUNTED)
"""The names in a `Tally`."""
Tally = dict[str, float]
"""What processes have done, by the names in `TALLIED`: seconds in each stage, then counts."""
_CHANGES, _STAGE, _SINCE_S, _POSITION, _FIRST, _SAMPLE, _OWN_BYTES = range(7)
_SECONDS = 8
"""Index of the first number of the tally; the seconds come first."""
_PLACES = {name: _SECONDS + at for at, name in enumerate(TALLIED)}


def add_up(tallies: Sequence[Tally]) -> Tally:
    """Add up the tallies of several processes."""
    return {name: sum(tally[name] for tally in tallies) for name in TALLIED}


def since(now: Tally, before: Tally) -> Tally:
    """Return what was done after `before`."""
    return {name: now[name] - before[name] for name in TALLIED}


class WorkerStatus:
    """The status of one process, in `STATUS_BYTES` bytes of memory: it writes, others read."""

    def __init__(self, memory: memoryview):
        self._numbers = memory.cast("d")
        self._retries = num_retries()
        self._progress = num_progress()

    # ---- for the process itself ----

    def enter(self, stage: Stage) -> None:
        """End the stage before, and begin `stage`."""
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
        """Enter `stage`, then return to the one before."""
        before = self.stage
        self.enter(stage)
        try:
            yield
        finally:
            self.enter(before)

    def count(self, **counted: int) -> None:
        """Add to the counts of these names in `COUNTED`."""
        for name, number in counted.items():
            self._numbers[_PLACES[name]] += number

    def count_retries(self) -> None:
        """Count the requests that this process has repeated.

        A retry, a pause that a store asked for, and bytes that arrive are progress: a process that
        waits for them does not hang.
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
        """Measure the memory that only this process has, where the system shows it (2 ms)."""
        with suppress(OSError):
            text = Path("/proc/self/smaps_rollup").read_text()
            sizes_kib = re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+) kB", text, re.M)
            self._numbers[_OWN_BYTES] = 1024 * sum(map(int, sizes_kib))

    def restart(self) -> None:
        """Reset for a process that takes the place of a dead one; the tally stays."""
        self._numbers[_STAGE] = Stage.IDLE
        self._numbers[_SINCE_S] = time.monotonic()
        self._numbers[_SAMPLE] = -1

    # ---- for readers ----

    @property
    def num_changes(self) -> int:
        """Changes so far: a different number means progress."""
        return int(self._numbers[_CHANGES])

    @property
    def stage(self) -> Stage:
        """What the process is doing."""
        return Stage(int(self._numbers[_STAGE]))

    @property
    def since_s(self) -> float:
        """When the stage began, in seconds of `time.monotonic`."""
        return self._numbers[_SINCE_S]

    @property
    def part(self) -> tuple[int, int]:
        """(position, first row) of the part it makes, or made last."""
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
        """What the process has done up to its last change."""
        return dict(zip(TALLIED, self._numbers[_SECONDS : _SECONDS + len(TALLIED)], strict=True))


current = WorkerStatus(memoryview(bytearray(STATUS_BYTES)))
"""The status of this process, for all code that reads or decodes."""


def use(status: WorkerStatus) -> WorkerStatus:
    """Make `status` the status of this process; return the one before."""
    global current
    before = current
    current = status
    return before
