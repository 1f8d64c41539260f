"""Stop a rank, a loader worker or the saver thread for some time, and then let it continue.

The run must also continue, and its results must be bit-identical to those of an undisturbed run.
SIGSTOP would stop all threads of a process. To stop only the saver thread, as a hanging disk would,
the test uses ptrace (PTRACE_SEIZE and PTRACE_INTERRUPT). Training then continues until the next
save, which waits for the stopped thread.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from faults.kills import Whole
from faults.phases import Served, Watched, lines_of, stopped
from proc import children, stat_of, states_of_threads
from processes import Background

TARGETS = ("rank", "worker", "writer")
_SEIZE = 0x4206
_INTERRUPT = 0x4207
_DETACH = 17
"""The constants of ptrace from <linux/ptrace.h>."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def stopped_and_continued(
    whole: Whole, folder: Path, target: str, for_s: float, rng: random.Random
) -> list[str]:
    """Train on two ranks in `folder`, stop `target` (one of `TARGETS`) for some time, and return a
    list of problems.

    The run must not make progress while the target is stopped. A stopped loader worker is an
    exception, because another worker may replace it. Raises PermissionError if this process is not
    allowed to trace threads.
    """
    run_dir = folder / "run"
    run = Background(
        whole.config,
        run_dir,
        f"loader.num_workers={2 if target == 'worker' else 0}",
        f"loader.stall_timeout_s={2 * for_s + 60}",
        f"run.hang_timeout_s={2 * for_s + 60}",
    )
    watched = Watched(run, run_dir, Served(), whole.steps)

    if target == "writer":
        with watched.stopped_in("save", rng) as pids:
            thread = _newest_thread(pids[0])
            _trace(_SEIZE, thread)
            _trace(_INTERRUPT, thread)
        faults = _waits(run_dir, for_s, lambda: states_of_threads(pids[0]).get(thread) == "t")
        _trace(_DETACH, thread)
    else:
        run.wait_for_step(rng.randrange(1, whole.steps // 2))
        pids = run.workers()
        if target == "worker":
            pids = [child for pid in pids for child in children(pid)]
        victim = rng.choice(pids)
        with stopped([victim]):
            if target == "worker":
                time.sleep(for_s)
                faults = []
            else:
                faults = _waits(
                    run_dir, for_s, lambda: {*states_of_threads(victim).values()} == {"T"}
                )

    output = run.end()
    if run.process.returncode != 0:
        return [*faults, f"status {run.process.returncode}: {output}"]
    return faults + whole.faults_of(run_dir, whole.state(2))


def _waits(run_dir: Path, for_s: float, is_stopped: Callable[[], bool]) -> list[str]:
    """Check for `for_s` seconds that metrics.jsonl does not grow and that the run does not end, and
    return a list of problems."""
    time.sleep(0.9 * for_s)
    before = len(lines_of(run_dir))
    time.sleep(0.1 * for_s)
    faults = [] if is_stopped() else ["it was not stopped to the end"]
    lines = lines_of(run_dir)
    return faults if len(lines) == before else [*faults, f"went on to {lines[-1]}"]


def _newest_thread(pid: int) -> int:
    """Return the id of rank 0's saver thread. Each save starts a new thread, so the saver thread is
    the newest one."""

    def began_at(thread: int) -> int:
        return int((stat_of(pid, thread) or ["0"] * 20)[19])

    return max(states_of_threads(pid), key=began_at)


def _trace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"thread {thread}: {os.strerror(error)}")
