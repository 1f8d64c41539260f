"""Show the progress of a task as a live line in a terminal, or as a line every 10 s in a log.

Durations, sizes, rates and other numbers are formatted here as well.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

LOG_EVERY_S = 10.0
MIB = 2**20
GIB = 2**30


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    if not math.isfinite(seconds):
        return "-:--:--"
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def steady_s() -> float:
    """Return seconds from a clock that does not jump when the system time is set.

    On Linux, the clock continues while the machine sleeps.
    """
    has_clock = hasattr(time, "CLOCK_BOOTTIME")
    return time.clock_gettime(time.CLOCK_BOOTTIME) if has_clock else time.monotonic()


class Meter:
    """A progress display on stderr with the completed units of `total`, the rate and the remaining
    time.

        with Meter("evaluating", 50_000, "images") as meter:
            meter.update(done=6_400)

    Args:
        shown: Whether to print anything.
        into: A function that receives the text instead of stderr.
    """

    def __init__(
        self,
        task: str,
        total: int,
        unit: str,
        shown: bool = True,
        into: Callable[[str], None] | None = None,
    ):
        self.task = task
        self.total = total
        self.unit = unit
        self.shown = shown and total > 0
        self.into = into
        self._began = self._printed_at = time.monotonic()

        self._live: Progress | None = None
        is_live = self.shown and into is None and sys.stderr.isatty()
        if is_live:
            self._live = Progress(
                BarColumn(24),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._live.add_task(f"{task} ...", total=total)

    def __enter__(self) -> Meter:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, done: int, also: str = "", num_bytes: int = 0) -> None:
        """Report `done` completed units, the text `also`, and optionally the rate of `num_bytes` in
        MB/s."""
        now = time.monotonic()
        is_in_log = self.into is None and self._live is None
        is_too_soon = is_in_log and now - self._printed_at < LOG_EVERY_S
        if is_too_soon or not self.shown:
            return

        self._printed_at = now
        elapsed_s = max(now - self._began, 1e-9)
        per_s = done / elapsed_s
        eta_s = (self.total - done) / per_s if done else math.inf
        parts = [
            f"{done:,} of {self.total:,} {self.unit}",
            f"ETA {duration(eta_s)}",
            f"{per_s:,.{1 if per_s < 10 else 0}f} {self.unit}/s",
        ]
        if num_bytes:
            parts.append(f"{num_bytes / elapsed_s / 1e6:,.1f} MB/s")

        # Narrow terminals truncate the line, so put the least important text last.
        text = f"{self.task}: {', '.join(filter(None, [*parts, also]))}"
        if self.into is not None:
            self.into(text)
        elif self._live is not None:
            self._live.update(self._task, completed=done, description=text)
        else:
            print(text, file=sys.stderr, flush=True)


def digits(value: float) -> str:
    """Format a number with at least two significant digits: 2,712, 27.1, 0.27, 0.0027."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 0.1:
        return f"{value:.{1 if value >= 10 else 2}f}"
    return f"{value:.2g}"


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as text."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def rate_text(bytes_per_s: float) -> str:
    """Format a rate with three significant digits."""
    has_gb = bytes_per_s >= 1e9
    return f"{bytes_per_s / 1e9:.3g} GB/s" if has_gb else f"{bytes_per_s / 1e6:.3g} MB/s"
