"""Interrupt a training run in a given phase without adding test code to the run.

The current phase is detected from metrics.jsonl, the run's folder, the requests to a server, and
/proc.

    phase        lasts while
    start        the ranks are alive, but metrics.jsonl has no `ready` line from this attempt
    step         the newest line is a step that no save or evaluation follows
    save         the run's folder contains an unfinished file or folder from rank 0's thread
    upload       the server suspends the upload of one of the run's objects
    evaluation   metrics.jsonl has the step before the evaluation, but not the result
    data wait    the server suspends the data, and metrics.jsonl does not grow
    report       metrics.jsonl has the end of the run, but the HTML page does not exist

All ranks are stopped with SIGSTOP after a random delay within the phase. If the run is still in the
phase, the signal is sent to the stopped ranks. If the phase has already ended, the ranks continue
until the phase occurs again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from faults.way import Way
from proc import states_of_threads
from processes import Background
from servers import S3Server, WebServer

from vit.run_folder.paths import METRICS_FILE, REPORT_FOLDER

Phase = Literal["start", "step", "save", "upload", "evaluation", "data wait", "report"]
PHASES: tuple[Phase, ...] = get_args(Phase)
SAVE_EVERY_STEPS = 3
EVALUATE_EVERY_STEPS = 6
"""The number of steps per epoch in the config that `processes.write_config` writes."""
STILL_S = 0.3
"""The number of seconds without a new line in metrics.jsonl after which a run is assumed to be
waiting. A normal step takes a tenth of this time."""
LONGEST_S = {"start": 1.5, "report": 2.0, "step": 0.02, "evaluation": 0.01}
"""The maximum random delay in each phase, in seconds. The delay is halved each time the signal
comes too late."""
FOUND_WITHIN_S = 240.0


class Missed(Exception):
    """The exception raised if the run ends before it could be interrupted in the phase."""


@dataclass
class Served:
    """A server for a run's data or folder that can suspend requests.

    `settings` are added to the run's command. A test calls `hold` when it starts the run that it
    will interrupt. `is_held` returns whether a request is currently suspended, and `let_go`
    releases all suspended requests.
    """

    settings: tuple[str, ...] = ()
    hold: Callable[[], None] = lambda: None
    is_held: Callable[[], bool] = lambda: False
    let_go: Callable[[], None] = lambda: None


@contextmanager
def served(
    phase: Phase, folder: Path, shards: Path, rng: random.Random, s3: S3Server | None = None
) -> Iterator[Served]:
    """Start the server that is needed to interrupt the given phase. The phase `upload` requires
    `s3`. The run's local folder is always `folder / "run"`."""
    if phase == "upload":
        assert s3 is not None, "the phase `upload` needs a server"
        with _uploaded(s3, folder, rng) as source:
            yield source
    elif phase == "data wait":
        files = {f"/set/{path.name}": path.read_bytes() for path in shards.iterdir()}
        with WebServer(files) as web:
            yield _fetched(web, folder, shards)
    elif phase == "report":
        yield Served(("log.report=true",))
    elif phase == "evaluation":
        yield Served(("eval.batch_size=1",))  # small batches make the phase last longer
    else:
        yield Served()


@contextmanager
def _uploaded(s3: S3Server, folder: Path, rng: random.Random) -> Iterator[Served]:
    with Way(s3.port) as proxy:
        url = f"{s3.new_bucket()}/runs/x"
        left = [rng.randrange(1, 40)]  # a run of 24 steps uploads about 50 objects
        is_saving = False

        def fault(method: str, path: str) -> str | None:
            nonlocal is_saving
            # Start counting at the first object of a save, because the config and the first metrics
            # are uploaded when the run starts.
            is_saving |= "/samples/" in path
            if method != "PUT" or not is_saving or "lease.json" in path:
                return None
            left[0] -= 1
            return "hold" if left[0] == 0 else None

        def hold() -> None:
            proxy.fault = fault

        def let_go() -> None:
            proxy.is_good()
            proxy.let_go.set()

        local = f"run.local_dir={folder / 'run'}"
        yield Served(
            (f"run.dir={url}", local, "run.lease_s=2"),
            hold,
            lambda: proxy.is_holding.is_set() and not proxy.let_go.is_set(),
            let_go,
        )


def _fetched(web: WebServer, folder: Path, shards: Path) -> Served:
    """Serve the run's data, and stop responding at a random step. The cache has space for only half
    of the data, so the run keeps fetching blocks from the server."""
    room_gib = sum(path.stat().st_size for path in shards.glob("train-*.tar")) * 0.75 / (1 << 30)
    asked_before = [0]

    def hold() -> None:
        asked_before[0] = len(web.requests)
        web.hang_after = 0

    def let_go() -> None:
        web.hang_after = None

    return Served(
        (
            f"data.root={web.url}/set",
            f"loader.cache_dir={folder / 'cache'}",
            f"loader.cache_gib={room_gib}",
            "loader.patience_s=120",
        ),
        hold,
        lambda: web.hang_after is not None and len(web.requests) > asked_before[0],
        let_go,
    )


# ---- the state of a run --------------------------------------------------------------------------


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / METRICS_FILE
    rows = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(row) for row in rows]


def unfinished(run_dir: Path) -> list[Path]:
    """Return the temporary files of unfinished saves and pages, including saves of killed
    processes."""
    paths = [*run_dir.glob(".*.tmp"), *run_dir.glob("checkpoints/.tmp_*")]
    return [*paths, *run_dir.glob("*/.*.tmp")]


@dataclass
class Watched:
    """A running attempt that is observed from outside. `num_starts` is the number of `start` lines
    that earlier attempts wrote to metrics.jsonl."""

    run: Background
    run_dir: Path
    served: Served
    steps: int
    num_starts: int = 0
    _seen: tuple[int, float] = field(default=(0, 0.0))

    def lines(self) -> list[dict[str, Any]]:
        lines = lines_of(self.run_dir)
        starts = [number for number, line in enumerate(lines) if line["kind"] == "start"]
        return lines[starts[-1] :] if len(starts) > self.num_starts else []

    def is_in(self, phase: Phase) -> bool:
        if phase == "save" and not unfinished(self.run_dir):
            return False
        if phase == "upload":
            return self.served.is_held()
        lines = self.lines()
        kinds = [line["kind"] for line in lines]
        if phase == "start":
            return "ready" not in kinds
        if phase == "save":
            return "ready" in kinds and "end" not in kinds
        if phase == "report":
            page = self.run_dir / REPORT_FOLDER / "index.html"
            return "end" in kinds and not page.exists()
        if phase == "data wait":
            return self.served.is_held() and self._stands_still(len(lines))
        steps = [line["step"] for line in lines if line["kind"] == "train"]
        if not steps:
            return False
        results = {line["step"] for line in lines if line["kind"] == "eval"}
        is_due = steps[-1] % EVALUATE_EVERY_STEPS == 0 or steps[-1] == self.steps
        if phase == "evaluation":
            return is_due and steps[-1] not in results
        return steps[-1] % SAVE_EVERY_STEPS != 0 and not is_due and not unfinished(self.run_dir)

    def _stands_still(self, num_lines: int) -> bool:
        now = time.monotonic()
        if num_lines != self._seen[0]:
            self._seen = num_lines, now
        return now - self._seen[1] > STILL_S and self._seen[1] > 0

    @contextmanager
    def stopped_in(self, phase: Phase, rng: random.Random, scale: float = 1.0) -> Iterator[list]:
        """Stop all ranks during the phase, and yield their process ids. The ranks continue when the
        `with` block ends.

        `scale` multiplies the maximum random delay. Raises Missed if the run ends first.
        """
        deadline = time.monotonic() + FOUND_WITHIN_S
        self._wait_until(lambda: phase == "start" or self._is_ready(), phase, deadline)
        self._wait_until(lambda: bool(self.run.workers()), phase, deadline)
        # Find the processes before the phase starts, because finding them takes longer than a save.
        pids = self.run.workers()
        while True:
            self._wait_until(lambda: self.is_in(phase), phase, deadline)
            time.sleep(rng.uniform(0, LONGEST_S.get(phase, 0.0) * scale))
            if phase == "start":
                pids = self.run.workers()  # search again, because new processes may have started
            with stopped(pids):
                if pids and self.run.process.poll() is None and self.is_in(phase):
                    yield pids
                    return

    def _is_ready(self) -> bool:
        return any(line["kind"] == "ready" for line in self.lines())

    def _wait_until(self, is_there: Callable[[], bool], phase: Phase, deadline: float) -> None:
        while not is_there():
            if self.run.process.poll() is not None or time.monotonic() > deadline:
                raise Missed(f"{phase}: not seen\n{self.run.end()}")
            # Sleep between checks, because polling takes CPU time from the ranks.
            time.sleep(0.001 if phase == "save" else 0.004)


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    pids = list(pids)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        for pid in pids:
            _wait_until_stopped(pid)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _wait_until_stopped(pid: int) -> None:
    """Wait until all threads of the process are stopped. A thread in an uninterruptible system
    call, such as fsync, stops only when the call returns."""
    deadline = time.monotonic() + FOUND_WITHIN_S
    while any(state not in "TtZX" for state in states_of_threads(pid).values()):
        assert time.monotonic() < deadline, f"process {pid} did not stop"
        time.sleep(0.0005)
