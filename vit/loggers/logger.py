"""The interface of a display of metrics, such as Weights & Biases or TensorBoard."""

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
        """Print the messages of the display. Called often, also between lines."""

    def send_pictures(self, step: int, pictures: dict[str, Path]) -> None:
        """Show PNG files, keyed by name."""

    def send_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Show a table."""

    def close(self, outcome: str) -> None:
        """Show everything that is left. outcome: `finished`, `stopped`, `error`, or "" if the run
        was killed."""


CreateLogger = Callable[[Path, LogConfig, Callable[[str], None]], Logger]
"""Creates a logger of a run folder, whose metrics.jsonl may have lines already. The last argument
prints a line."""
