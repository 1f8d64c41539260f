"""Run each check of `benchmarks/gpu_check/check.py` in a separate process with a time budget.

Each check yields `Line`s. A check's memory, compiled graphs and CUDA errors disappear with its
process. A check that exceeds its budget is killed together with all processes that it started.
Lines that the check sent before are kept.
"""

from __future__ import annotations

import math
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
    """The result of one check."""

    what: str
    passed: bool | None
    """Whether the check passed. None for a measurement without a limit, and for a check that cannot
    run or has no time left."""
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        verdict = {True: "pass", False: "FAIL", None: "  - "}[self.passed]
        return f"{verdict}  {self.what}: {self.text}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)


def run_part(
    what: str,
    part: Callable[[], Iterable[Line]],
    budget_s: float,
    left_s: float = math.inf,
    on_line: Callable[[Line], None] = lambda line: None,
) -> list[Line]:
    """Run `part` for at most `budget_s` or `left_s` seconds and return its lines.

    If the part raises an error or exceeds `budget_s`, a failed line is returned. `left_s` is the
    time left for all parts. If only this time is exceeded, nothing is known about the part, and its
    line has no verdict. `on_line` is called with each line as soon as it arrives. The caller must
    not have initialized CUDA, because the forked process could not use it.
    """
    lines: list[Line] = []

    def take(line: Line) -> None:
        lines.append(line)
        on_line(line)

    if left_s <= 0:
        take(Line(what, None, "not run, because no time was left"))
        return lines

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(part, receiver, sender))
    process.start()
    sender.close()
    deadline = time.monotonic() + min(budget_s, left_s)
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
        if left_s < budget_s:
            take(Line(what, None, f"not finished within the {left_s:.0f} s that were left"))
        else:
            take(Line(what, False, f"not done within its {budget_s:.0f} s"))
        return lines
    finally:
        _end(process)


def _serve(part: Callable[[], Iterable[Line]], receiver: Connection, sender: Connection) -> None:
    """Send the lines of `part`, or its error message. Runs in the child process."""
    os.setsid()  # so that the process and its children can be killed as a group
    receiver.close()
    try:
        for line in part():
            sender.send(line)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        sender.send(shown(f"{type(error).__name__}: {first_line}"))
    sender.close()


def _end(process: Any) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()  # `setsid` has not yet created the group.
    process.join()
