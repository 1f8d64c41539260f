"""Run the parts of `launch/gpu_check.py`, each in a separate process with a time budget.

A part yields `Line`s. Its process is independent of all others, so memory, compiled graphs and
errors of the device end with the process. A part that exceeds its budget is killed with all
processes that it started; the lines that it sent before remain.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from vit.system.redact import shown


@dataclass(frozen=True)
class Line:
    """The result of testing one promise."""

    what: str
    passed: bool | None
    """Whether the promise holds; None: a number without a promise, or not testable."""
    said: str
    """The result as text."""
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        verdict = {True: "pass", False: "FAIL", None: "  - "}[self.passed]
        return f"{verdict}  {self.what}: {self.said}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def run_part(
    what: str,
    part: Callable[[], Iterable[Line]],
    budget_s: float,
    on_line: Callable[[Line], None] = lambda line: None,
) -> list[Line]:
    """Run `part` for at most `budget_s` seconds and return its lines.

    An error and an exceeded budget are failed lines. `on_line` gets each line at once. The caller
    must not have initialized CUDA, because a forked process could not use it.
    """
    lines: list[Line] = []

    def take(line: Line) -> None:
        lines.append(line)
        on_line(line)

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(part, receiver, sender))
    process.start()
    sender.close()
    deadline = time.monotonic() + budget_s
    try:
        while receiver.poll(max(deadline - time.monotonic(), 0.0)):
            try:
                message = receiver.recv()
            except EOFError:
                process.join()
                if process.exitcode:
                    take(Line(what, False, f"its process ended with status {process.exitcode}"))
                return lines
            take(message if isinstance(message, Line) else Line(what, False, message))
        take(Line(what, False, f"not done within its {budget_s:.0f} s"))
        return lines
    finally:
        _end(process)


def _serve(part: Callable[[], Iterable[Line]], receiver: Connection, sender: Connection) -> None:
    """Send the lines of `part`, or the message of its error; runs in the new process."""
    os.setsid()  # so that the process and its children can be killed at once
    receiver.close()
    try:
        for line in part():
            sender.send(line)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        sender.send(shown(f"{type(error).__name__}: {first_line}"))
    sender.close()


def _end(process: Any) -> None:
    """Kill `process` and its group, as far as they are alive."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()  # killed before `setsid` made it a group
    process.join()
