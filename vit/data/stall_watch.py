"""Detect hanging processes that make batches, and report why training is waiting.

While training waits for a batch, the watch checks the status of each process (`vit.data.stages`)
about once per second. If the status of a process does not change, a warning reports the process,
its stage and the time of the last change. `vit.data.worker_pool` replaces workers that hang for too
long. A training process that makes its own batches is reported but not stopped.
"""

import logging
import threading
import time
from collections.abc import Callable

from vit.data.stages import DOING, Stage, WorkerStatus

WARN_AFTER_S = 60.0
"""The time in seconds before the first report of a wait and between reports. If the stall
timeout is short, a quarter of the timeout is used instead."""
LOOK_EACH_S = 1.0
"""The time in seconds between two checks while training waits. A short stall timeout reduces this
time."""
MAX_NAMED = 4
"""The maximum number of processes listed in a warning."""

log = logging.getLogger(__name__)


class StallWatch:
    """Measures how long each process has made no progress.

    Time is added only during checks. No time is added while the training process itself is stopped
    (Ctrl-Z, a suspended job), because such a pause does not mean that a worker hangs.
    """

    def __init__(
        self,
        statuses: list[WorkerStatus],
        where: Callable[[int], str],
        stall_timeout_s: float | None,
    ):
        """where: maps a sample number to the file that contains it, for reports."""
        self._statuses = statuses
        self._where = where
        self.warn_after_s = min(WARN_AFTER_S, (stall_timeout_s or 1e9) / 4)
        self.look_each_s = min(LOOK_EACH_S, self.warn_after_s / 4)
        self.stuck_s = [0.0] * len(statuses)
        self._changes = [status.num_changes for status in statuses]
        self.begin()

    def begin(self) -> None:
        """Start measuring how long training waits."""
        self._looked_s = time.monotonic()
        self._waited_s = 0.0
        self._warn_s = self.warn_after_s
        self.idle_s = 0.0
        """The time in seconds for which all processes have been idle."""

    @property
    def is_due(self) -> bool:
        """Return whether the next check is due."""
        return time.monotonic() - self._looked_s >= self.look_each_s

    def look(self, name: Callable[[int], str]) -> None:
        """Check each status, and log a warning if one is due. name: returns the name of a process
        number."""
        now_s = time.monotonic()
        # Add at most two intervals, because a longer gap means that this process was stopped.
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
        """Log which workers the batch waits for: those that are stuck, else those that are busy."""
        numbers = range(len(self._statuses))
        stuck = [n for n in numbers if self.stuck_s[n] >= 0.9 * self.warn_after_s]
        named = stuck or [n for n in numbers if self._statuses[n].stage != Stage.IDLE]

        activities = (
            "; ".join(f"{name(n)} {self.activity(n)}" for n in named[:MAX_NAMED])
            if named
            else f"{', '.join(name(n) for n in numbers[:MAX_NAMED])} takes no work"
        )
        if len(named) > MAX_NAMED:
            activities += f"; and {len(named) - MAX_NAMED} more"
        log.warning("training has waited %.0f s for its next batch: %s", self._waited_s, activities)

    def activity(self, number: int) -> str:
        """Return what a process is doing as text: "has been reading ... since 12:13:14"."""
        status = self._statuses[number]
        began_s = time.time() - (time.monotonic() - status.since_s)
        since = time.strftime("%H:%M:%S", time.localtime(began_s))

        sample = status.sample
        of_sample = (
            f" (sample {sample} of {self._where(sample)})"
            if sample is not None and status.stage not in (Stage.ORDER, Stage.DRAW)
            else ""
        )
        return f"has been {DOING[status.stage]}{of_sample} since {since}"


def watch_in_thread(status: WorkerStatus, watch: StallWatch) -> Callable[[], None]:
    """Start a thread that watches this process, and return a function that stops the thread."""
    ended = threading.Event()

    def look() -> None:
        part = status.part
        while not ended.wait(watch.look_each_s):
            if status.stage == Stage.IDLE or status.part != part:  # a new batch, or no batch
                part = status.part
                watch.begin()
            else:
                watch.look(lambda _: "this process")

    threading.Thread(target=look, daemon=True).start()
    return ended.set
