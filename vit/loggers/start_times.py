"""How long a start takes, part by part: what a run tells once its first batch is there."""

from __future__ import annotations

import time

from vit.loggers.record import Record


class StartTimes:
    """Parts of a start on this rank, in seconds; a part begins where the one before ends."""

    def __init__(self, joined_s: float):
        """joined_s: how long the ranks took to meet."""
        self.parts_s = {"ranks": joined_s}
        self._began = time.perf_counter()

    def end(self, name: str) -> None:
        """End a part, or a further piece of it."""
        now = time.perf_counter()
        self.parts_s[name] = self.parts_s.get(name, 0.0) + now - self._began
        self._began = now

    def tell(self, record: Record, step: int) -> None:
        """Show the parts in a line, and write them into the record."""
        parts = ", ".join(f"{name} {took_s:.1f}" for name, took_s in self.parts_s.items())
        total_s = sum(self.parts_s.values())
        record.say(f"ready in {total_s:.1f} s: {parts}")
        rounded = {name: round(took_s, 3) for name, took_s in self.parts_s.items()}
        record.write("ready", step, total_s=round(total_s, 3), parts_s=rounded)
