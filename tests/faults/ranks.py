"""Test runs that resume on a different number of ranks after each kill, and two runs that train at
the same time."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

from faults.kills import Whole
from faults.phases import lines_of, stopped
from processes import TINY, Background, run, train

EXACT = ("train.exact_over_ranks=true", "data.micro_batch_size=4")


def on_each_number(
    whole: Whole, folder: Path, numbers: Sequence[int], rng: random.Random
) -> list[str]:
    """Resume the run in `folder` on one number of ranks after another, and return a list of
    problems. In every attempt except the last, one rank or all ranks are killed at regular
    intervals.

    If `whole` is exact over ranks, the results must be bit-identical. If not, only the batches must
    match.
    """
    run_dir = folder / "run"
    for number, ranks in enumerate(numbers[:-1], 1):
        background = Background(whole.config, run_dir, *whole.settings, ranks=ranks)
        background.wait_for_step(whole.steps * number // len(numbers) - rng.randrange(3))
        if rng.random() < 0.5:
            background.kill_all()
        else:
            os.kill(rng.choice(background.workers()), signal.SIGKILL)
            background.end()
    train(whole.config, run_dir, *whole.settings, ranks=numbers[-1])
    sizes = [line["world_size"] for line in lines_of(run_dir) if line["kind"] == "start"]
    faults = [] if sizes == [*numbers] else [f"ranks of the starts: {sizes}"]
    expected = whole.state(1) if EXACT[0] in whole.settings else None
    return faults + whole.faults_of(run_dir, expected)


def two_at_once(whole: Whole, folder: Path) -> list[str]:
    """Start two training runs at the same time on this machine, and a third run in a folder that is
    already in use. Return a list of the problems that occurred."""
    folders = [folder / "one", folder / "two"]
    jobs = [Background(whole.config, run_dir, *whole.settings) for run_dir in folders]
    jobs[0].wait_for_step(1)
    arguments = ["--config", whole.config, f"run.dir={folders[0]}", *TINY, *whole.settings]
    # Stop the first job temporarily so that it does not finish before the third run, which waits
    # for its folder.
    with stopped(jobs[0].workers()):
        third = run("launch/train.py", *arguments, ranks=2)
    faults = []
    if third.returncode == 0 or "in use by a live run" not in third.stderr:
        faults.append(f"a third into the first's folder: {third.returncode}, {third.stderr}")
    for job, run_dir in zip(jobs, folders, strict=True):
        output = job.end()
        if job.process.returncode != 0:
            faults.append(f"status {job.process.returncode}: {output}")
        faults += whole.faults_of(run_dir, whole.state(2))
    return faults
