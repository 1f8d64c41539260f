"""Read the lines of `metrics.jsonl` without importing torch, so that small processes start fast.

A restarted run appends to the same file. A `start` line contains the step from which the run
continues, and the lines after it replace earlier lines about later steps.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROVENANCE = ("command", "git", "python", "torch", "host")
"""Keys of a `start` line that name the software and the machine."""
_OF_EACH_LINE = {"kind", "step", "time"}


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the readable lines of a `metrics.jsonl`, and the number of unreadable lines.

    Text after the last line break is ignored, because it was cut off by a kill.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return parse_lines(text.split("\n")[:-1])


def parse_lines(rows: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the readable lines among `rows`, and the number of unreadable ones."""
    lines = list[dict[str, Any]]()
    num_unreadable = 0
    for row in rows:
        try:
            line = json.loads(row)
            lines.append({**line, "kind": str(line["kind"]), "step": int(line["step"])})
        except (ValueError, TypeError, KeyError):
            num_unreadable += 1
    return lines, num_unreadable


def without_redone(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `lines` without the lines that a resume has replaced."""
    valid: list[dict[str, Any]] = []
    for line in lines:
        if line["kind"] == "start":
            valid = [old for old in valid if old["kind"] == "start" or old["step"] <= line["step"]]
        valid.append(line)
    return valid


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the readable lines of a `metrics.jsonl` that are still valid."""
    return without_redone(read_lines(path)[0])


def numbers_of(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in a line that are to be displayed, with names such as `train/loss`.

    A line of norms gives names such as `norms/grad_norm/blocks.0`. Lines of other kinds give {}.
    """
    kind = line["kind"]
    if kind not in ("train", "eval", "fault", "norms"):
        return {}

    values = {key: value for key, value in line.items() if key not in _OF_EACH_LINE}
    if kind == "norms":
        named = {
            f"{name}/{layer}": norm
            for name, by_layer in values.items()
            for layer, norm in by_layer.items()
        }
    else:
        named = values
    return {
        f"{kind}/{name}": value for name, value in named.items() if isinstance(value, int | float)
    }


class Rows:
    """The rows that W&B shows: the step of each valid line, and its numbers, keyed by name."""

    def __init__(self) -> None:
        self.rows = list[tuple[int, dict[str, float]]]()
        self.most = 0
        """The largest number of rows so far. The number of rows falls when lines are replaced."""
        self._restarts = 0

    def add(self, line: dict[str, Any]) -> None:
        """Add the next line of the record."""
        if line["kind"] == "start":
            self.rows = [row for row in self.rows if row[0] <= line["step"]]
            self._restarts = line.get("restarts", self._restarts)
        if numbers := numbers_of(line):
            self.rows.append((line["step"], {"restarts": self._restarts, **numbers}))
            self.most = max(self.most, len(self.rows))
