"""The interface of classes that display metrics, for example in Weights & Biases or TensorBoard."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from vit.config.schema import LogConfig


class Logger(Protocol):
    """Displays the lines of metrics.jsonl elsewhere. Only rank 0 has loggers.

    No method raises an error or makes training wait; only `close` may wait, within time limits.
    """

    def send(self, step: int, time_s: float, numbers: dict[str, float]) -> None:
        """Show `numbers`, keyed by name, at `step`. time_s: seconds since 1970."""

    def poll(self) -> None:
        """Print the display's messages. This method is called often, also between lines of
        metrics."""

    def send_pictures(self, step: int, pictures: dict[str, Path]) -> None:
        """Show PNG files, keyed by name."""

    def send_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Show a table."""

    def close(self, outcome: str) -> None:
        """Show everything that was not shown yet. outcome: `finished`, `stopped`, `error`, or "" if
        the run was killed."""


CreateLogger = Callable[[Path, LogConfig, Callable[[str], None]], Logger]
"""A function that creates a logger for a run folder, whose metrics.jsonl may already contain lines.
Its last argument is a function that prints a line."""
