"""Memory, descriptors and threads of a process do not grow with what it has done: steps,
evaluations and saves of one run, and starts of one run after another in one process.

Ranks are looked at from outside (/proc) while the record goes on. The first third of the way warms
up (allocators, pools of threads, pages of libraries). Over the rest a line is fitted to each
number, and the way up along it is compared with a limit.
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
"""By how much a number may grow from the first look that counts to the last. A descriptor or a
thread that is left by each save would be there by the hundred; a copy of this state, of 0.4 MiB, by
the hundred MiB. What an allocator holds and gives back is a MiB or two."""
PAUSE_S = 0.25
"""Between two looks."""
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
    """At a process. at: how far it had come; MiB: of anonymous memory."""

    at: int
    MiB: float
    descriptors: int
    threads: int


def look(pid: int | str, at: int) -> Look:
    """What a process holds now. Raises ProcessLookupError if it has ended."""
    folder = Path("/proc", str(pid))
    try:
        rows = (row.partition(":") for row in (folder / "status").read_text().splitlines())
        status = {name: value for name, _, value in rows}
        num_descriptors = len(os.listdir(folder / "fd"))
    except OSError:
        status = {}
    if "RssAnon" not in status:  # nobody has waited for it yet
        raise ProcessLookupError(f"process {pid} has ended")
    anonymous_kib = int(status["RssAnon"].split()[0])
    return Look(at, anonymous_kib / 1024, num_descriptors, int(status["Threads"]))


def grown(looks: Sequence[Look]) -> dict[str, float]:
    """By how much each number grows from the first to the last of `looks`, along the line that fits
    best."""
    at = np.array([each.at for each in looks], float)
    return {
        name: float(np.polyfit(at, [asdict(each)[name] for each in looks], 1)[0] * np.ptp(at))
        for name in LIMITS
    }


def judged(looks: Sequence[Look], last: int) -> tuple[str, list[str]]:
    """A sentence about the looks after a third of `last`, and what is wrong with them."""
    counted = [each for each in looks if each.at > last / 3]
    if len(counted) < 5:
        return "", [f"{len(counted)} looks are too few"]
    up = grown(counted)
    first = counted[0]
    said = (
        f"{first.MiB:.0f} MiB {up['MiB']:+.1f}, {first.descriptors} descriptors"
        f" {up['descriptors']:+.1f}, {first.threads} threads {up['threads']:+.1f}"
    )
    return said, [f"{name} grow: {said}" for name in LIMITS if up[name] > LIMITS[name]]


def over_steps(whole: Whole, folder: Path, ranks: int = 2) -> tuple[list[str], list[str]]:
    """Train all steps of `whole` in one attempt, looking at its ranks; returns a sentence about
    each of them, and what is wrong."""
    run_dir = folder / "run"
    run = Background(whole.config, run_dir, *whole.settings, ranks=ranks, cold=True)
    run.wait_for_step(1)
    pids = run.workers()
    looks: dict[int, list[Look]] = {pid: [] for pid in pids}
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(run.end, LONGEST_S)  # it reads: a full pipe would stop the ranks
        while not end.done() and (at := last_step(run_dir)) < whole.steps:
            for pid in pids:
                with suppress(ProcessLookupError):
                    looks[pid].append(look(pid, at))
            time.sleep(PAUSE_S)
    said = end.result()
    if run.process.returncode != 0:
        return [], [f"status {run.process.returncode}: {said}"]
    verdicts = [judged(looks[pid], whole.steps) for pid in pids]
    faults = whole.faults_of(run_dir)
    return (
        [f"rank {rank}: {sentence}" for rank, (sentence, _) in enumerate(verdicts)],
        [*faults, *(fault for _, found in verdicts for fault in found)],
    )


def over_starts(whole: Whole, folder: Path, count: int) -> tuple[str, list[str]]:
    """Start a run so often in one process, each time from its checkpoint and for three more steps;
    returns a sentence, and what is wrong."""
    run_dir = folder / "run"
    code = f"import sys\nsys.path[:0] = {sys.path!r}\n{STARTS}"
    line = [sys.executable, "-c", code, whole.config, run_dir, count]
    done = call([*map(str, line)], environment(), timeout_s=60 + 20 * count)
    if done.returncode != 0:
        return "", [f"status {done.returncode}: {done.stderr}"]
    rows = [row.split(" ", 1)[1] for row in done.stdout.splitlines() if row.startswith("look ")]
    return judged([Look(**json.loads(row)) for row in rows], count)
