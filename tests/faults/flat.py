"""Check that a training process does not leak memory, file descriptors or threads.

The check reads these numbers from /proc during the steps, evaluations and saves of one run, and
during many starts in one process. The first third of the measurements is discarded, because
allocators and thread pools are still warming up. A line is fitted to the remaining measurements,
and its rise must stay below a limit.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from faults.kills import Whole
from processes import Background, call, environment, last_step

LIMITS = {"MiB": 4.0, "descriptors": 1.5, "threads": 1.5}
"""The maximum allowed rise of each number after the warm-up. A leak of one descriptor, one thread
or one copy of the state (0.4 MiB) per save would add up to hundreds. Without a leak, memory use
varies by one or two MiB."""
PAUSE_S = 0.25
LONGEST_S = 3600.0
STARTS = """
import json, sys
from faults.flat import look
from processes import TINY, run_here
config, run_dir, count = sys.argv[1:]
for number in range(1, int(count) + 1):
    steps = [f"train.steps={3 * number}", "--allow-change", "train.steps"]
    run_here("launch/train.py", "--config", config, f"run.dir={run_dir}", *TINY, *steps)
    print("look", json.dumps(look("self", number).__dict__), flush=True)
"""


@dataclass(frozen=True)
class Look:
    """A measurement of a process. `at` is the step or start of the measurement, and `MiB` is the
    anonymous memory."""

    at: int
    MiB: float
    descriptors: int
    threads: int


def look(pid: int | str, at: int) -> Look:
    folder = Path("/proc", str(pid))
    try:
        rows = (row.partition(":") for row in (folder / "status").read_text().splitlines())
        status = {name: value for name, _, value in rows}
        num_descriptors = len(os.listdir(folder / "fd"))
    except OSError:
        status = {}
    if "RssAnon" not in status:  # zombie processes have no memory
        raise ProcessLookupError(f"process {pid} has ended")
    anonymous_kib = int(status["RssAnon"].split()[0])
    return Look(at, anonymous_kib / 1024, num_descriptors, int(status["Threads"]))


def rises(looks: Sequence[Look]) -> dict[str, float]:
    """Fit a line to each series in `looks`, and return how much each line rises from start to
    end."""
    at = np.array([each.at for each in looks], float)
    return {
        name: float(np.polyfit(at, [asdict(each)[name] for each in looks], 1)[0] * np.ptp(at))
        for name in LIMITS
    }


def judged(looks: Sequence[Look], last: int) -> tuple[str, list[str]]:
    """Return a one-sentence summary of the last two thirds of the measurements, and a list of
    problems."""
    counted = [each for each in looks if each.at > last / 3]
    if len(counted) < 5:
        return "", [f"{len(counted)} looks are too few"]
    up = rises(counted)
    first = counted[0]
    sentence = (
        f"{first.MiB:.0f} MiB {up['MiB']:+.1f}, {first.descriptors} descriptors"
        f" {up['descriptors']:+.1f}, {first.threads} threads {up['threads']:+.1f}"
    )
    return sentence, [f"{name} grow: {sentence}" for name in LIMITS if up[name] > LIMITS[name]]


def over_steps(whole: Whole, folder: Path, ranks: int = 2) -> tuple[list[str], list[str]]:
    """Train for all steps of `whole` without interruption while measuring the ranks.

    Returns a one-sentence summary for each rank, and a list of problems.
    """
    run_dir = folder / "run"
    run = Background(whole.config, run_dir, *whole.settings, ranks=ranks, cold=True)
    run.wait_for_step(1)
    pids = run.workers()
    looks: dict[int, list[Look]] = {pid: [] for pid in pids}
    with ThreadPoolExecutor(1) as pool:
        # Call `end` to drain the output pipe, because the ranks would block on a full pipe.
        end = pool.submit(run.end, LONGEST_S)
        while not end.done() and (at := last_step(run_dir)) < whole.steps:
            for pid in pids:
                with suppress(ProcessLookupError):
                    looks[pid].append(look(pid, at))
            time.sleep(PAUSE_S)
    output = end.result()
    if run.process.returncode != 0:
        return [], [f"status {run.process.returncode}: {output}"]
    verdicts = [judged(looks[pid], whole.steps) for pid in pids]
    faults = whole.faults_of(run_dir)
    return (
        [f"rank {rank}: {sentence}" for rank, (sentence, _) in enumerate(verdicts)],
        [*faults, *(fault for _, failures in verdicts for fault in failures)],
    )


def over_starts(whole: Whole, folder: Path, count: int) -> tuple[str, list[str]]:
    """Start a run `count` times in one process, resuming from the checkpoint and training for three
    steps each time.

    Returns a one-sentence summary of the process, and a list of problems.
    """
    run_dir = folder / "run"
    code = f"import sys\nsys.path[:0] = {sys.path!r}\n{STARTS}"
    line = [sys.executable, "-c", code, whole.config, run_dir, count]
    done = call([*map(str, line)], environment(), timeout_s=60 + 20 * count)
    if done.returncode != 0:
        return "", [f"status {done.returncode}: {done.stderr}"]
    rows = [row.split(" ", 1)[1] for row in done.stdout.splitlines() if row.startswith("look ")]
    return judged([Look(**json.loads(row)) for row in rows], count)
