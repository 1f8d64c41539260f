"""The parts of `launch/gpu_check.py`, each in a process of its own with a time budget.

A part yields `Line`s. Its process shares nothing with the others, so memory, compiled graphs and
errors of the device end with it; one that overruns is killed with all that it has started, and what
it had found by then stays.
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
    """What was found out about one promise."""

    what: str
    passed: bool | None
    """None: a number without a promise, or nothing that can be tried here."""
    said: str
    """The number, for people."""
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        verdict = {True: "pass", False: "FAIL", None: "  - "}[self.passed]
        return f"{verdict}  {self.what}: {self.said}"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def run_part(
    what: str,
    part: Callable[[], Iterable[Line]],
    budget_s: float,
    on_line: Callable[[Line], None] = lambda line: None,
) -> list[Line]:
    """Run `part` for at most `budget_s` seconds and return its lines.

    An error and an overrun are lines, too, which have not passed. `on_line` gets each at once. The
    caller must not have started CUDA: a forked process cannot use it then.
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
    """Send the lines of `part`, or the message of its error, as a process of its own."""
    os.setsid()  # so that all of it can be killed at once
    receiver.close()
    try:
        for line in part():
            sender.send(line)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        sender.send(shown(f"{type(error).__name__}: {first_line}"))
    sender.close()


def _end(process: Any) -> None:
    """End `process` and its group, if something of it is left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()  # it had not come to be a group
    process.join()
