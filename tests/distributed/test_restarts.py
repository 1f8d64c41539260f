"""Test that ranks restarted by torchrun ignore the values that an earlier attempt has left in the
store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from families import Family
from proc import children, command_line
from processes import REPOSITORY, TINY, command, environment, final_state, last_step, metrics, train

from vit.distributed.attempt import part_of_attempt
from vit.distributed.world import RankLost

LIMIT = timedelta(seconds=60)


def attempt(store: dist.Store, size: int, late: int | None = None) -> list[dist.Store]:
    """Run each rank in a thread, and return the stores of the ranks. Rank `late` joins after all
    other ranks have started to wait."""
    stores: dict[int, dist.Store] = {}

    def meet(rank: int) -> None:
        stores[rank] = part_of_attempt(store, rank, size, LIMIT)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(size)]
    for rank, thread in enumerate(threads):
        if rank != late:
            thread.start()
    if late is not None:
        time.sleep(0.2)
        threads[late].start()
    for thread in threads:
        thread.join()
    return [stores[rank] for rank in range(size)]


@pytest.mark.parametrize("late", [None, 0, 2])
def test_each_attempt_has_a_separate_part_of_the_store(late):
    store = dist.HashStore()
    for _ in range(3):
        parts = attempt(store, 3, late)
        assert not any(part.check(["ended"]) for part in parts), (
            "a value from the previous attempt must not be visible"
        )
        parts[1].set("ended", "rank 1")
        assert [part.get("ended") for part in parts] == [b"rank 1"] * 3


def test_names_ranks_that_do_not_arrive():
    with pytest.raises(RankLost, match="rank 1, 2 did not respond within"):
        part_of_attempt(dist.HashStore(), 0, 3, timedelta(seconds=0.1))
    with pytest.raises(RankLost, match="rank 0 did not respond within"):
        part_of_attempt(dist.HashStore(), 1, 3, timedelta(seconds=0.1))


@pytest.mark.full
def test_torchrun_starts_a_killed_rank_again_and_the_weights_are_the_same(tmp_path, config):
    train(config, tmp_path / "whole", "train.steps=60", ranks=2)
    run_dir = tmp_path / "run"
    arguments = ("--config", config, f"run.dir={run_dir}", *TINY, "train.steps=60")
    line = command("launch/train.py", *arguments, ranks=2, python=sys.executable)
    line.insert(line.index("--standalone"), "--max-restarts=2")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with Family(line, env=environment(), cwd=REPOSITORY, **pipes) as family:
        deadline = time.monotonic() + 240
        while last_step(run_dir) < 10:
            assert family.process.poll() is None, family.communicate(60)[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ranks = [
            pid for pid in children(family.process.pid) if "launch/train.py" in command_line(pid)
        ]
        os.kill(max(ranks), signal.SIGKILL)
        printed = family.communicate(240)[0]
    assert family.process.returncode == 0, printed
    assert [line["restarts"] for line in metrics(run_dir, "start")] == [0, 1]
    assert final_state(run_dir, 60) == final_state(tmp_path / "whole", 60)
