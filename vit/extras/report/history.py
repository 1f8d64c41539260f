"""Read a run's attempts, their outcomes and the valid lines from metrics.jsonl.

Lines that were damaged by a kill or a bad disk are skipped. Each `start` line begins an attempt.
Steps that a later attempt repeated are removed.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from vit.loggers.lines import read_lines, without_redone
from vit.system.redact import shown_values


@dataclass
class Attempt:
    """An attempt of a run, from one `start` line to the next."""

    number: int
    start: dict[str, Any]
    lines: list[dict[str, Any]]
    outcome: str = ""
    """One of: finished, stopped, failed, running, killed, unclear."""
    reason: str = ""
    redone: int = 0
    """The number of steps that the next attempt repeated from a checkpoint."""

    @property
    def last_step(self) -> int:
        return max(line["step"] for line in self.lines)

    @property
    def elapsed_s(self) -> float | None:
        times = [line["time"] for line in self.lines if line.get("time") is not None]
        return max(times) - min(times) if times else None

    @property
    def images_per_s(self) -> float | None:
        return median(self.lines, "images_per_s")


@dataclass
class History:
    """The readable content of a `metrics.jsonl`."""

    lines: list[dict[str, Any]]
    """The valid lines, without steps that a later attempt repeated."""
    attempts: list[Attempt]
    num_unreadable: int
    """The number of complete lines that are invalid. A truncated last line is not counted."""
    training_loss: str = "cross-entropy"
    """The name of the training loss, from the run's config."""

    @property
    def plan(self) -> dict[str, Any]:
        """The plan of the last attempt that recorded a plan, or {} if no attempt did."""
        plans = [attempt.start.get("plan") for attempt in self.attempts]
        return next((plan for plan in reversed(plans) if isinstance(plan, dict)), {})

    @property
    def steps_per_epoch(self) -> float | None:
        """The number of steps per epoch in the last train line, or None if unknown."""
        lines = [line for line in self.of_kind("train") if line.get("epoch")]
        return lines[-1]["step"] / lines[-1]["epoch"] if lines else None

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind, such as "eval"."""
        return [line for line in self.lines if line["kind"] == kind]

    def image_sizes(self) -> list[tuple[int, str]]:
        """Return (step before the change, new size such as "160x192") for each change of the image
        size.

        Returns [] if metrics.jsonl has no image sizes.
        """
        sizes = list[tuple[int, str]]()
        previous_step = 0
        for line in self.of_kind("train"):
            size = line.get("image_size")
            if size:
                text = "x".join(map(str, size)) if isinstance(size, list) else str(size)
                is_new = not sizes or sizes[-1][1] != text
                if is_new:
                    sizes.append((previous_step, text))
            previous_step = line["step"]

        return sizes

    def intervals(self) -> Iterator[tuple[dict[str, Any], float, float]]:
        """Yield each train line with the images and seconds since the previous train line.

        Lines with missing values are skipped.
        """
        step = 0
        batch_size = math.nan
        for line in self.lines:
            if line["kind"] == "start":
                batch_size = (line.get("plan") or {}).get("global_batch_size", math.nan)
                step = line["step"]
            elif line["kind"] == "train":
                num_images = (line["step"] - step) * batch_size
                step = line["step"]

                images_per_s = line.get("images_per_s")
                is_timed = images_per_s and line.get("data_wait_s") is not None
                if num_images > 0 and is_timed:
                    yield line, num_images, num_images / images_per_s


def median(lines: list[dict[str, Any]], name: str) -> float | None:
    """Return the median of a value over the train lines among `lines`."""
    values = [
        line[name] for line in lines if line["kind"] == "train" and line.get(name) is not None
    ]
    return statistics.median(values) if values else None


def set_names(history: History) -> list[str]:
    """Return the names of all evaluation sets other than `data.val_split`."""
    keys = chain.from_iterable(history.of_kind("eval"))
    return list(dict.fromkeys(key.partition("/")[0] for key in keys if "/" in key))


def read_history(path: Path, in_use: bool | None = None) -> History:
    """Read metrics.jsonl. in_use: whether a process is training the run, or None if unknown."""
    lines, num_unreadable = read_lines(path)
    lines = shown_values(lines)  # Old versions of this project may have recorded logins.

    attempts = list[Attempt]()
    for line in lines:
        if line["kind"] == "start":
            attempts.append(Attempt(len(attempts) + 1, line, []))
        if attempts:
            attempts[-1].lines.append(line)

    for attempt, following in zip_longest(attempts, attempts[1:]):
        _set_outcome(attempt, following, in_use)
    return History(without_redone(lines), attempts, num_unreadable)


def _set_outcome(attempt: Attempt, following: Attempt | None, in_use: bool | None) -> None:
    """Set how `attempt` ended, and how many of its steps the `following` attempt repeated."""
    if following is not None:
        attempt.redone = max(attempt.last_step - following.start["step"], 0)

    last = attempt.lines[-1]
    if last["kind"] == "end":
        outcome = str(last.get("outcome"))
        attempt.outcome = "failed" if outcome == "error" else outcome
        attempt.reason = str(last.get("reason", ""))
    elif following is not None or in_use is False:
        attempt.outcome = "killed"
        attempt.reason = "metrics.jsonl ends without an `end` line"
    else:
        attempt.outcome = "running" if in_use else "unclear"
