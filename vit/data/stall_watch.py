"""Notices processes that make batches and hang, and reports what training waits for.

While training waits for a batch, the status of each process (`vit.system.stages`) is looked at
again and again. A process whose status does not change makes no progress: it is named in a warning,
with what it has been doing and since when. `vit.data.worker_pool` replaces workers that hang for
too long; a process that makes its own batches is only watched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from vit.system.stages import DOING, Stage, WorkerStatus

WARN_AFTER_S = 60.0
"""A wait of training for its next batch is reported after this time, or after a quarter of the
stall timeout, and again each time as long."""
LOOK_EACH_S = 1.0
"""Between two looks while training waits; less if the stall timeout is short."""
MAX_NAMED = 4
"""Processes that a warning names."""
log = logging.getLogger(__name__)


class StallWatch:
    """How long each of some processes has made no progress.

    Time is counted in looks, not by the clock: if training itself was stopped (Ctrl-Z, a suspended
    job), no process hangs.
    """

    def __init__(
        self,
        statuses: list[WorkerStatus],
        where: Callable[[int], str],
        stall_timeout_s: float | None,
    ):
        """where: sample number -> the file it is read from, for reports."""
        self._statuses = statuses
        self._where = where
        self.warn_after_s = min(WARN_AFTER_S, (stall_timeout_s or 1e9) / 4)
        self.look_each_s = min(LOOK_EACH_S, self.warn_after_s / 4)
        self.stuck_s = [0.0] * len(statuses)
        """How long each process has been at the same point."""
        self._changes = [status.num_changes for status in statuses]
        self.begin()

    def begin(self) -> None:
        """Start to count a wait of training."""
        self._looked_s = time.monotonic()
        self._waited_s = 0.0
        self._warn_s = self.warn_after_s
        self.idle_s = 0.0
        """How long all processes have been without work."""

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self._looked_s >= self.look_each_s

    def look(self, name: Callable[[int], str]) -> None:
        """Look at each status, and warn when it is time to. name: process number -> its name."""
        now_s = time.monotonic()
        # More time than two looks apart has passed only if this process was stopped, too.
        passed_s = min(now_s - self._looked_s, 2 * self.look_each_s)
        self._looked_s = now_s
        self._waited_s += passed_s
        self.idle_s += passed_s
        for number, status in enumerate(self._statuses):
            num_changes = status.num_changes
            self.stuck_s[number] += passed_s
            if status.stage != Stage.IDLE:
                self.idle_s = 0.0
            if status.stage == Stage.IDLE or num_changes != self._changes[number]:
                self.stuck_s[number] = 0.0
            self._changes[number] = num_changes
        if self._waited_s >= self._warn_s:
            self._warn_s += self.warn_after_s
            self._warn(name)

    def _warn(self, name: Callable[[int], str]) -> None:
        numbers = range(len(self._statuses))
        stuck = [n for n in numbers if self.stuck_s[n] >= 0.9 * self.warn_after_s]
        busy = [n for n in numbers if self._statuses[n].stage != Stage.IDLE]
        named = stuck or busy
        what = "; ".join(f"{name(n)} {self.activity(n)}" for n in named[:MAX_NAMED])
        if not named:
            what = f"{', '.join(name(n) for n in numbers[:MAX_NAMED])} takes no work"
        if len(named) > MAX_NAMED:
            what += f"; and {len(named) - MAX_NAMED} more"
        log.warning("training has waited %.0f s for its next batch: %s", self._waited_s, what)

    def activity(self, number: int) -> str:
        """Say what a process is doing: "has been reading ... since 12:13:14"."""
        status = self._statuses[number]
        began_s = time.time() - (time.monotonic() - status.since_s)
        since = time.strftime("%H:%M:%S", time.localtime(began_s))
        sample = status.sample
        of_sample = ""
        if sample is not None and status.stage not in (Stage.ORDER, Stage.DRAW):
            of_sample = f" (sample {sample} of {self._where(sample)})"
        return f"has been {DOING[status.stage]}{of_sample} since {since}"


def watch_in_thread(status: WorkerStatus, watch: StallWatch) -> Callable[[], None]:
    """Watch this process, which makes its own batches, from a thread; return what ends that."""
    ended = threading.Event()

    def look() -> None:
        part = status.part
        while not ended.wait(watch.look_each_s):
            if status.stage == Stage.IDLE or status.part != part:  # another batch, or none
                part = status.part
                watch.begin()
            else:
                watch.look(lambda _: "this process")

    threading.Thread(target=look, daemon=True).start()
    return ended.set
