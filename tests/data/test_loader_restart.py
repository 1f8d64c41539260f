"""Test loaders that restart with the same workers, as evaluation does.

Leftover batches must be dropped. The loader must detect workers that died or stopped between
passes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time

import pytest
from data.numbered import Numbered
from proc import is_alive, stat_of, state_of

from vit.data.batches import Batch
from vit.data.loader import Loader
from vit.data.stages import Stage
from vit.data.worker_pool import WorkerError

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def crew_of(loader: Loader) -> list[int]:
    return sorted(worker.pid for worker, _ in loader._pool._workers.values())


def passes_of(loader: Loader, number: int) -> None:
    for _ in range(number):
        loader.restart()
        list(loader)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_pass_begins_with_the_first_batch_even_after_an_incomplete_pass(workers):
    batches = Numbered(num_rows=300)
    with Loader(batches, 5, 17, num_workers=workers) as loader:
        crew = crew_of(loader) if workers else []
        for taken in (12, 0, 1, 7, 12):
            for position, batch in zip(range(5, 5 + taken), loader, strict=False):
                batches.check(position, batch)
            loader.restart()
            assert loader.stats.num_made == 0
        assert [int(batch.ids[0]) // 300 for batch in loader] == list(range(5, 17))
        assert (crew_of(loader) if workers else []) == crew
        assert loader.stats.num_made == 12 * 300


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("num_batches", [1, 2, 9])
def test_held_batches_outlive_the_pass(num_batches, workers):
    """A pass over a single batch needs only one buffer, but the caller may keep the batch."""
    batches = Numbered()
    held: list[Batch] = []
    with Loader(batches, 0, num_batches, num_workers=workers, max_ready=0) as loader:
        for _ in range(4):
            held += loader
            loader.restart()
    for number, batch in enumerate(held):
        batches.check(number % num_batches, batch)


def test_after_ctrl_c_in_a_batch_no_two_batches_share_a_buffer():
    class Interrupted(Numbered):
        times = 1

        def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
            self.times -= 1
            if self.times == 0:
                raise KeyboardInterrupt
            return super().fill(position, first, rows)

    batches = Interrupted()
    with Loader(batches, 0, 6) as loader:
        with pytest.raises(KeyboardInterrupt):
            next(loader)
        loader.restart()
        assert sorted(loader._slot_of.values()) == sorted(set(loader._slot_of.values()))
        for position, batch in enumerate(loader):
            batches.check(position, batch)


@ON_LINUX
def test_workers_sleep_between_two_passes():
    with Loader(Numbered(), 0, 4, num_workers=2) as loader:
        list(loader)
        deadline = time.monotonic() + 120
        while not all(status.stage == Stage.IDLE for status in loader._pool.statuses) or not all(
            state_of(pid) == "S" for pid in crew_of(loader)
        ):
            assert time.monotonic() < deadline, "the workers never become idle"
            time.sleep(0.01)
        changes = [status.num_changes for status in loader._pool.statuses]
        ticks = [stat_of(pid)[11:13] for pid in crew_of(loader)]
        with Loader(Numbered(), 0, 40, num_workers=1) as training:
            list(training)
        assert [status.num_changes for status in loader._pool.statuses] == changes
        assert ticks == [stat_of(pid)[11:13] for pid in crew_of(loader)], (
            "idle workers must not use CPU time"
        )


def test_a_worker_that_died_between_two_passes_is_an_error_in_the_next():
    with Loader(Numbered(), 0, 4, num_workers=2) as loader:
        list(loader)
        os.kill(crew_of(loader)[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"process \d+\) was killed by SIGKILL"):
            # Retry until the kernel has ended the worker.
            passes_of(loader, 1000)
    assert not multiprocessing.active_children()


@ON_LINUX
def test_workers_that_were_stopped_between_two_passes_are_replaced_in_the_next():
    batches = Numbered()
    # The timeout includes the time until stopped workers have been killed.
    with Loader(batches, 0, 4, num_workers=2, stall_timeout_s=5) as loader:
        list(loader)
        crew = crew_of(loader)
        for pid in crew:
            os.kill(pid, signal.SIGSTOP)
        loader.restart()
        for position, batch in enumerate(loader):
            batches.check(position, batch)
        assert loader.num_replaced >= 1, "a stopped worker with an unfinished part must be replaced"
        assert not any(is_alive(pid) for pid in crew)
