"""Control the fake GPU of this process, and read its log.

Each line of the log describes a call, with its kind and the details that the functions in `cuda/`
know. If a call waits, copies pageable memory or allocates host memory, the line is followed by the
Python stack of the calling thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
OURS = ("vit/", "launch/", "benchmarks/", "tests/")
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


@dataclass
class Call:
    """A call to the fake GPU.

    kind: "launch", "gemm", "copy", "memset", "wait", "host allocation", "malloc", "event",
    "stream waits", "graph", "missing", or "mark" for a text that `mark` wrote.
    """

    kind: str
    fields: list[str]
    stack: list[str] = field(default_factory=list)
    """The frames of the Python stack as `file:line function`, innermost first. The list is empty if
    no Python code runs in the thread."""

    @property
    def what(self) -> str:
        """The kernel's name, a copy's direction, or the function that was called."""
        return self.fields[0]

    def __str__(self) -> str:
        ours = [frame for frame in self.stack if frame.startswith(OURS)] or self.stack
        place = " < ".join(ours[:3]) or "no Python code"
        return f"{self.kind} {self.what} at {place}"


def read(path: Path) -> list[Call]:
    """Return the calls in the log at `path`, in the order in which they were made."""
    calls: list[Call] = []
    for line in path.read_text(errors="replace").splitlines():
        if frame := FRAME.fullmatch(line):
            file = frame["file"].removeprefix(f"{REPOSITORY}/")
            calls[-1].stack.append(f"{file}:{frame['line']} {frame['function']}")
        elif "\t" in line:
            kind, *fields = line.split("\t")
            calls.append(Call(kind, fields))
    return calls


def blocking(calls: list[Call]) -> list[Call]:
    """Return the calls for which the host waits, or that make a later copy wait. These calls are
    waits, copies of pageable memory, and allocations of page-locked memory."""
    return [
        call
        for call in calls
        if call.kind in ("wait", "host allocation")
        or (call.kind == "copy" and "pageable" in call.what)
    ]


# ---- in a process with the fake GPU ------------------------------------------------------------


def library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["LD_PRELOAD"])


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Write the CUDA calls of this process to `path`."""
    with path.open("wb") as file:
        faulthandler.register(signal.SIGUSR2, file, all_threads=False)
        library().fake_gpu_log(file.fileno(), int(signal.SIGUSR2))
        try:
            yield
        finally:
            library().fake_gpu_log(-1, 0)
            faulthandler.unregister(signal.SIGUSR2)


def set_memory(num_bytes: int) -> None:
    """Set the size of the fake GPU's memory."""
    library().fake_gpu_set_memory(ctypes.c_size_t(num_bytes))
