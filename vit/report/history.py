"""What a record tells about a run: its attempts, how each ended, and what counts.

The data's story: `metrics.jsonl` is read as far as it can be, also after a kill or on a bad disk;
its lines are dealt to attempts, from one `start` line to the next, and what a later attempt did
again is left out of what counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.run.record import read_lines, without_redone
from vit.system.urls import shown_values


@dataclass
class Attempt:
    """One process's part of a run: from a `start` line to the next."""

    number: int
    start: dict[str, Any]
    lines: list[dict[str, Any]]
    outcome: str = ""
    """finished, stopped, failed, going on, killed or unclear."""
    reason: str = ""
    redone: int = 0
    """Steps that the next attempt did again, from an earlier checkpoint."""

    @property
    def last_step(self) -> int:
        return max(line["step"] for line in self.lines)

    @property
    def last_time(self) -> float | None:
        return self.lines[-1].get("time")

    @property
    def elapsed_s(self) -> float | None:
        began = self.start.get("time")
        ended = self.last_time
        return ended - began if began is not None and ended is not None else None


@dataclass
class History:
    """A `metrics.jsonl` as far as it can be read."""

    lines: list[dict[str, Any]]
    """Those that count: without what a later attempt did again."""
    attempts: list[Attempt]
    num_unreadable: int
    """Whole lines that are no record lines; one that a kill cut short at the end is none of
    them."""

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]


def read_history(path: Path, in_use: bool | None) -> History:
    found, num_unreadable = read_lines(path)
    found = shown_values(found)  # a record may be older than the rule that it holds no logins
    attempts = list[Attempt]()
    for line in found:
        if line["kind"] == "start":
            attempts.append(Attempt(len(attempts) + 1, line, []))
        if attempts:
            attempts[-1].lines.append(line)
    # without attempts there is one None too many
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=False):
        _tell_outcome(attempt, following, in_use)
    return History(without_redone(found), attempts, num_unreadable)


def _tell_outcome(attempt: Attempt, following: Attempt | None, in_use: bool | None) -> None:
    if following is not None:
        attempt.redone = max(attempt.last_step - following.start["step"], 0)
    if attempt.lines[-1]["kind"] == "end":
        outcome = str(attempt.lines[-1].get("outcome"))
        attempt.outcome = "failed" if outcome == "error" else outcome
        attempt.reason = str(attempt.lines[-1].get("reason", ""))
    elif following is not None or in_use is False:
        attempt.outcome = "killed"
        attempt.reason = "no farewell in the record"
    else:
        attempt.outcome = "going on" if in_use else "unclear"
