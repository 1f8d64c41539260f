"""Run a contestant in several lives. SIGKILL ends each life except the last."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LONGEST_S = 300.0
"""The time limit of a life, in seconds. A life that takes longer is reported as hanging. Lives
usually take 5 to 30 s."""


@dataclass(frozen=True)
class Life:
    """One start of a run, with its ranks and workers, and the step after which the run is
    killed."""

    ranks: int = 1
    workers: int = 2
    kill_at: int | None = None


def live(script: str, variant: str, folder: Path, number: int, life: Life) -> str:
    """Start life `number` (from 1) of the run in `folder`. Return how the life ended, or "" if all
    ranks ended with status 0 or were killed as intended."""
    log = folder / "log"
    log.mkdir(parents=True, exist_ok=True)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    ranks = []
    group = 0
    for rank in range(life.ranks):
        env = {
            **os.environ,
            "RESUME_FOLDER": str(folder),
            "RESUME_SHARED": str(folder.parent),
            "RESUME_WORKERS": str(life.workers),
            "RESUME_VARIANT": variant,
            "RESUME_LIFE": str(number),
            "RESUME_KILL_AT": str(-1 if life.kill_at is None else life.kill_at),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(life.ranks),
            "LOCAL_WORLD_SIZE": str(life.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "resume",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        out = (folder / f"life_{number}_rank_{rank}.txt").open("w")
        ranks.append(
            subprocess.Popen(
                [sys.executable, HERE / f"{script}.py"],
                env=env,
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=group,
            )
        )
        group = ranks[0].pid

    ended = _wait(ranks, log, number)
    with contextlib.suppress(ProcessLookupError):  # all ranks and workers have ended
        os.killpg(group, signal.SIGKILL)

    statuses = [rank.wait() for rank in ranks]
    if ended:
        return ended
    if any(status not in (0, -signal.SIGKILL) for status in statuses):
        return _error(folder, number, statuses)
    return ""


def _wait(ranks: list[subprocess.Popen[bytes]], log: Path, number: int) -> str:
    """Wait until all ranks wait for the kill or have ended, or until a rank has failed."""
    start = time.monotonic()
    while True:
        statuses = [rank.poll() for rank in ranks]
        if any(statuses):
            return ""

        waiting = [
            (log / f"life_{number}_rank_{rank}.waits").exists() for rank in range(len(ranks))
        ]
        if all(wait or status == 0 for wait, status in zip(waiting, statuses, strict=True)):
            return ""
        if time.monotonic() - start > LONGEST_S:
            return f"hangs: not ended after {LONGEST_S:.0f} s"
        time.sleep(0.05)


def _error(folder: Path, number: int, statuses: list[int]) -> str:
    """Return the first exception that the first failed rank printed. If the exception has no text,
    add the line of code that raised it. If the rank printed no exception, return the last line of
    its output."""
    rank = next(i for i, status in enumerate(statuses) if status not in (0, -signal.SIGKILL))
    text = (folder / f"life_{number}_rank_{rank}.txt").read_text(errors="replace")
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in text.splitlines()]
    lines = [line for line in lines if line.strip(" ^~")]
    for before, line in itertools.pairwise(lines):
        if re.match(r"[\w.]*(Error|Exception|Iteration)(:|$)", line):
            return line if ":" in line else f"{line}: {before.strip()}"
    return lines[-1].strip() if lines else f"status {statuses[rank]}"


def copy_run(source: Path, target: Path) -> None:
    """Copy a run after a kill, so that several runs can continue from the same kill."""
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("ended.txt"))
