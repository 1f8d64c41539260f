"""Track the current stage and the counters of each loader process in shared memory.

Each process that makes batches shares its status with the training process through memory. When the
process enters a new stage, such as decoding after reading, it stores the stage and the time, and
adds the duration of the previous stage to a sum. A change takes about 0.3 microseconds. The
training process only reads the status, so it sees the stage even if the process hangs.
`vit.data.stall_watch` reports the stage, and `vit.monitor` writes the sums to metrics.jsonl.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path

from vit.system.retry import num_progress, num_retries

STATUS_BYTES = 256
"""The size of each process's status: 32 numbers of 8 bytes."""


class Stage(IntEnum):
    """The stages that a loader process can be in."""

    IDLE = 0
    """Waiting for work."""
    ORDER = 1
    """Looking up samples and their rows in the index."""
    STORE = 2
    """Waiting for a block of a shard to be fetched."""
    LOCK = 3
    """Waiting for another process that is fetching the same block or measuring the cache."""
    READ = 4
    """Reading a file."""
    DECODE = 5
    """Decoding compressed bytes into pixels."""
    RESIZE = 6
    """Resizing pixels to the model's size."""
    DRAW = 7
    """Drawing random augmentation parameters."""


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

COUNTED = ("retries", "cache_hits", "cache_misses", "read_bytes", "fetched_bytes")
"""The counters: repeated requests to a store or file system; samples whose block was cached;
samples whose block was not cached; bytes of samples read from any source; bytes fetched from a
store."""
TALLIED = (*(f"{stage.name.lower()}_s" for stage in Stage), *COUNTED)
Tally = dict[str, float]
"""The work of one or more processes, keyed by `TALLIED`: seconds per stage, then counters."""

_CHANGES, _STAGE, _SINCE_S, _POSITION, _FIRST, _SAMPLE, _OWN_BYTES = range(7)
_SECONDS = 8
"""The index at which the tally begins, with the seconds in each stage."""
_PLACES = {name: index for index, name in enumerate(TALLIED, _SECONDS)}


def add_up(tallies: Sequence[Tally]) -> Tally:
    """Return the sum of several processes' tallies."""
    return {name: sum(tally[name] for tally in tallies) for name in TALLIED}


def since(now: Tally, before: Tally) -> Tally:
    """Return the difference between two tallies of the same process."""
    return {name: now[name] - before[name] for name in TALLIED}


class WorkerStatus:
    """The status of one process, stored in `STATUS_BYTES` bytes of shared memory."""

    def __init__(self, memory: memoryview):
        self._numbers = memory.cast("d")
        self._retries, self._progress = num_retries(), num_progress()

    # ---- methods for the process itself ----

    def enter(self, stage: Stage) -> None:
        """End the current stage and begin `stage`."""
        numbers = self._numbers
        now_s = time.monotonic()
        numbers[_SECONDS + int(numbers[_STAGE])] += now_s - (numbers[_SINCE_S] or now_s)
        numbers[_SINCE_S] = now_s
        numbers[_STAGE] = stage
        numbers[_CHANGES] += 1

    def take(self, position: int, first: int) -> None:
        """Begin the part of batch number `position` that starts at row `first`."""
        self._numbers[_POSITION] = position
        self._numbers[_FIRST] = first
        self._numbers[_SAMPLE] = -1
        self.enter(Stage.ORDER)

    def read(self, sample: int) -> None:
        """Begin reading `sample`."""
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
        """Increment the counters. counted: maps names in `COUNTED` to increments."""
        for name, number in counted.items():
            self._numbers[_PLACES[name]] += number

    def count_retries(self) -> None:
        """Add new retries of this process to its counters.

        Retries, pauses between attempts, and received bytes count as progress, because a process
        that waits for a store does not hang.
        """
        retries, progress = num_retries(), num_progress()
        self._numbers[_PLACES["retries"]] += retries - self._retries
        if (retries, progress) != (self._retries, self._progress):
            self._retries, self._progress = retries, progress
            self._numbers[_CHANGES] += 1

    def beat(self) -> None:
        """Report progress during a wait that is certain to end."""
        self._numbers[_CHANGES] += 1

    def measure_memory(self) -> None:
        """Measure the private memory of this process, if the system reports it (2 ms)."""
        with suppress(OSError):
            text = Path("/proc/self/smaps_rollup").read_text()
            sizes_kib = re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+) kB", text, re.M)
            self._numbers[_OWN_BYTES] = 1024 * sum(map(int, sizes_kib))

    def restart(self) -> None:
        """Reset everything except the tally, for the successor of a dead process."""
        self._numbers[_STAGE] = Stage.IDLE
        self._numbers[_SINCE_S] = time.monotonic()
        self._numbers[_SAMPLE] = -1

    # ---- methods for readers ----

    @property
    def num_changes(self) -> int:
        """The number of changes. A growing number shows that the process makes progress."""
        return int(self._numbers[_CHANGES])

    @property
    def stage(self) -> Stage:
        """The current stage of the process."""
        return Stage(int(self._numbers[_STAGE]))

    @property
    def since_s(self) -> float:
        """The time (`time.monotonic`) at which the stage began."""
        return self._numbers[_SINCE_S]

    @property
    def part(self) -> tuple[int, int]:
        """The batch number and first row of the part that the process is making or last made."""
        return int(self._numbers[_POSITION]), int(self._numbers[_FIRST])

    @property
    def sample(self) -> int | None:
        """The sample that is being read or decoded; None before the first sample of a part."""
        sample = int(self._numbers[_SAMPLE])
        return None if sample < 0 else sample

    @property
    def own_bytes(self) -> int:
        """The private memory of the process, or 0 until it is measured."""
        return int(self._numbers[_OWN_BYTES])

    def tally(self) -> Tally:
        """Return the tally up to the process's last change of stage."""
        return dict(zip(TALLIED, self._numbers[_SECONDS : _SECONDS + len(TALLIED)], strict=True))


current = WorkerStatus(memoryview(bytearray(STATUS_BYTES)))
"""The status of this process, updated by the code that reads and decodes."""


def use(status: WorkerStatus) -> WorkerStatus:
    """Make `status` the status of this process, and return the previous status."""
    global current
    before = current
    current = status
    return before
