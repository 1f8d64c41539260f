"""Send a stop signal to all processes of a job, as Slurm, systemd, `timeout` and terminals do.

A compiler has no signal handler and exits immediately, so its rank receives a compiler error.
Regardless of which process exits first, the job must not report a mistake or a bug, because
schedulers do not retry these.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from families import Family
from proc import children
from processes import REPOSITORY, TINY, environment

COMPILER = """#!/bin/sh
if [ -e "{folder}/{begins_with}" ]; then
  touch "{folder}/compiling"
  exec sleep 1000
fi
exec g++ "$@"
"""
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AGAIN = 75
"""The exit status with which `launch/job.py` asks for a retry."""
WITHIN_S = 600


def tree(pid: int) -> list[int]:
    """Return the ids of a process and its descendants, with children before their parents."""
    return [*(each for child in children(pid) for each in tree(child)), pid]


def start_job(config: Path, folder: Path, script: str = "job", **variables: str) -> Family:
    """Start a run in `folder` that compiles its model with an empty compiler cache."""
    line = [sys.executable, str(REPOSITORY / "launch" / f"{script}.py"), "--config", str(config)]
    line += [f"run.dir={folder / 'run'}", *TINY, "train.compile=true", "loader.num_workers=1"]
    env = {
        **environment(),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **variables,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return Family(line, env=env, cwd=REPOSITORY, start_new_session=True, **pipes)


def compile_in(folder: Path, config: Path, begins_with: str, script: str = "train") -> Family:
    """Start training, and wait until its compiler runs. The compiler hangs as soon as `folder`
    contains the file `begins_with`."""
    compiler = folder / "g++"
    compiler.write_text(COMPILER.format(folder=folder, begins_with=begins_with))
    compiler.chmod(0o755)
    family = start_job(config, folder, script, CXX=str(compiler))
    deadline = time.monotonic() + 240
    while not (folder / "compiling").exists():
        if family.process.poll() is not None or time.monotonic() > deadline:
            family.kill()
            raise AssertionError(f"does not compile:\n{family.process.communicate()[0]}")
        time.sleep(0.02)
    return family


def signalled(
    config: Path, folder: Path, number: signal.Signals, after_s: float, rng: random.Random
) -> list[str]:
    """Start a job, and wait until it has used `after_s` seconds of CPU time. Then send the signal
    `number` to all of its processes in random order. Return a list of problems."""
    with start_job(config, folder) as family:
        job = family.process.pid
        _wait_until(lambda: family.process.poll() is not None or _cpu_s(job) > after_s)
        pids = tree(job)
        rng.shuffle(pids)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        output, _ = family.communicate(WITHIN_S)
    status = family.process.returncode
    # Until the job has imported its modules, the signal ends the job like any other program.
    expected = (AGAIN, 0, -number, 128 + number)
    return (
        [] if status in expected else [f"{number.name} after {after_s:.1f} s: {status}\n{output}"]
    )


def cpu_s_of_a_whole_job(config: Path, folder: Path) -> float:
    """Train once, and return the CPU time of all processes in the job, in seconds."""
    before = os.times()
    with start_job(config, folder) as family:
        output, _ = family.communicate(WITHIN_S)
    assert family.process.returncode == 0, output
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def _cpu_s(pid: int) -> float:
    """Return the CPU time of all live processes in a process tree and of their exited children, in
    seconds."""
    ticks = 0
    for each in tree(pid):
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _wait_until(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.01)
