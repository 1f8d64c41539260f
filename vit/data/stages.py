"""What each loader process is doing now, and what it has done: numbers in memory that training
reads whenever it likes. Free of torch.

The data's story: a process that makes batches has a row of numbers, which lies in the memory that
workers and training share. At each turn (from reading to decoding) it writes there what it does now
and since when, and adds the time that is over to that of its stage; some 0.3 microseconds a turn.
Nobody is asked and nobody answers, so a process that hangs is seen as well as one that works.
`vit.data.loader` tells people what a worker hangs at; `vit.run.monitor` puts the sums into the
record.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path

from vit.data.storage.retry import num_progress, num_retries

STATUS_BYTES = 256
"""Of one process: 32 numbers of 8 bytes."""


class Stage(IntEnum):
    """What a process that makes batches can be at."""

    IDLE = 0
    """Waiting for a part of a batch to make."""
    ORDER = 1
    """Which samples, and their rows of the index."""
    STORE = 2
    """Waiting for a block of a shard to be fetched."""
    LOCK = 3
    """Waiting for another process that fetches the same block, or counts the cache."""
    READ = 4
    """Reading a file."""
    DECODE = 5
    """Encoded bytes to pixels."""
    RESIZE = 6
    """Pixels to the model's size."""
    DRAW = 7
    """The augmentation's table."""


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
"""For people."""
COUNTED = ("retries", "cache_hits", "cache_misses", "read_bytes", "fetched_bytes")
"""Beside seconds: attempts at a store or file system that had to be repeated; samples whose block
the cache had, and had not; bytes of samples that were read, from wherever; bytes that were fetched
into the cache, or past it."""
TALLIED = (*(f"{stage.name.lower()}_s" for stage in Stage), *COUNTED)
"""The names in a `Tally`."""
Tally = dict[str, float]
"""What processes have done, by the names in `TALLIED`: seconds in each stage, then what is
counted."""
_TURNS, _STAGE, _SINCE_S, _POSITION, _FIRST, _SAMPLE, _OWN_BYTES = range(7)
_SECONDS = 8
"""Where the tally begins; the seconds come first."""
_PLACES = {name: _SECONDS + at for at, name in enumerate(TALLIED)}


def add_up(tallies: Sequence[Tally]) -> Tally:
    """Of several processes."""
    return {name: sum(tally[name] for tally in tallies) for name in TALLIED}


def since(now: Tally, before: Tally) -> Tally:
    """What came after `before`."""
    return {name: now[name] - before[name] for name in TALLIED}


class WorkerStatus:
    """The numbers of one process, in `STATUS_BYTES` bytes of memory. It alone writes; anybody
    reads."""

    def __init__(self, memory: memoryview):
        self._numbers = memory.cast("d")
        self._retries = num_retries()
        self._moves = num_progress()

    # ---- by the process itself ----

    def enter(self, stage: Stage) -> None:
        """What was begun before is over, and `stage` begins."""
        numbers = self._numbers
        now_s = time.monotonic()
        numbers[_SECONDS + int(numbers[_STAGE])] += now_s - (numbers[_SINCE_S] or now_s)
        numbers[_SINCE_S] = now_s
        numbers[_STAGE] = stage
        numbers[_TURNS] += 1

    def take(self, position: int, first: int) -> None:
        """A part of a batch is begun: the rows from `first` on of the one at `position`."""
        self._numbers[_POSITION] = position
        self._numbers[_FIRST] = first
        self._numbers[_SAMPLE] = -1
        self.enter(Stage.ORDER)

    def read(self, sample: int) -> None:
        """Reading of `sample` begins."""
        self._numbers[_SAMPLE] = sample
        self.enter(Stage.READ)

    @contextmanager
    def within(self, stage: Stage) -> Iterator[None]:
        """In `stage` for a while, then in the one before."""
        before = self.stage
        self.enter(stage)
        try:
            yield
        finally:
            self.enter(before)

    def count(self, **counted: int) -> None:
        """Add to what is `COUNTED`."""
        for name, number in counted.items():
            self._numbers[_PLACES[name]] += number

    def count_retries(self) -> None:
        """What this process has tried again by now. That, a pause before it, and bytes that come
        are progress: who waits for it does not hang."""
        retries = num_retries()
        moves = num_progress()
        self._numbers[_PLACES["retries"]] += retries - self._retries
        if (retries, moves) != (self._retries, self._moves):
            self._retries = retries
            self._moves = moves
            self._numbers[_TURNS] += 1

    def beat(self) -> None:
        """A wait that is known to end goes on."""
        self._numbers[_TURNS] += 1

    def measure_memory(self) -> None:
        """Write down how much memory is this process's alone, where the system tells (2 ms)."""
        with suppress(OSError):
            text = Path("/proc/self/smaps_rollup").read_text()
            self._numbers[_OWN_BYTES] = sum(
                int(kb) * 1024
                for kb in re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+) kB", text, re.M)
            )

    def begin_again(self) -> None:
        """For another process in the place of one that was killed: sums stay."""
        self._numbers[_STAGE] = Stage.IDLE
        self._numbers[_SINCE_S] = time.monotonic()
        self._numbers[_SAMPLE] = -1

    # ---- by anybody ----

    @property
    def turns(self) -> int:
        """Changes up to now: another number means progress."""
        return int(self._numbers[_TURNS])

    @property
    def stage(self) -> Stage:
        """What it does now."""
        return Stage(int(self._numbers[_STAGE]))

    @property
    def since_s(self) -> float:
        """Since when, in `time.monotonic`'s seconds."""
        return self._numbers[_SINCE_S]

    @property
    def part(self) -> tuple[int, int]:
        """(position, first row) of what it makes, or made last."""
        return int(self._numbers[_POSITION]), int(self._numbers[_FIRST])

    @property
    def sample(self) -> int | None:
        """The number of the sample in hand."""
        sample = int(self._numbers[_SAMPLE])
        return None if sample < 0 else sample

    @property
    def own_bytes(self) -> int:
        """Memory that is this process's alone; 0 while it was not measured."""
        return int(self._numbers[_OWN_BYTES])

    def tally(self) -> Tally:
        """What it has done, up to its last turn."""
        return dict(zip(TALLIED, self._numbers[_SECONDS : _SECONDS + len(TALLIED)], strict=True))


current = WorkerStatus(memoryview(bytearray(STATUS_BYTES)))
"""This process's. Written by whoever reads or decodes, wherever it lies."""


def use(row: WorkerStatus) -> WorkerStatus:
    """From now on this process writes into `row`; returns the one before."""
    global current
    before = current
    current = row
    return before
