"""Test that a hanging worker is replaced, and that a report names the worker and its task.

Every long wait during training must be explained by a message.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from data.numbered import Numbered
from proc import is_alive, state_of
from processes import REPOSITORY, environment

from vit.config.schema import AugmentConfig
from vit.data import stages, worker_pool
from vit.data.batches import Batch, TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.slots import Slots, plan_ring
from vit.data.stages import STATUS_BYTES, TALLIED, Stage, WorkerStatus, add_up, since
from vit.data.storage.opening import open_split
from vit.data.worker_pool import WorkerError, WorkerPool
from vit.system.retry import RetryableError, RetryPolicy, num_retries

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
FORMAT = ImageFormat((16, 16), 3, "bilinear")
STALL_S = 3.0
"""A worker that does not hang must make progress within this time, even on a busy machine."""


class Reading(Numbered):
    """Numbered batches whose workers report that they are reading sample 7."""

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        stages.current.read(7)
        return super().fill(position, first, rows)

    def where(self, sample: int) -> str:
        return f"shard-{sample // 5}.tar"


class Hanging(Reading):
    """Numbered batches for which the first `times` processes that reach row 0 at position 3
    hang."""

    def __init__(self, times: int):
        super().__init__()
        self.left = multiprocessing.Value("i", times)

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        if position == 3 and first == 0:
            stages.current.read(7)
            with self.left.get_lock():
                self.left.value -= 1
                hangs = self.left.value >= 0
            while hangs:
                time.sleep(0.05)
        return super().fill(position, first, rows)


class Killed(Numbered):
    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        if position == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fill(position, first, rows)


class Stopped(Reading):
    """Numbered batches for which the first worker that reaches row 0 at position 3 stops itself
    with SIGSTOP."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = multiprocessing.Value("i", 0)

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        if position == 3 and first == 0:
            stages.current.read(7)
            with self.stopped.get_lock():
                is_first = self.stopped.value == 0
                self.stopped.value = self.stopped.value or os.getpid()
            if is_first:
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().fill(position, first, rows)

    def wake(self, may_go_on: Callable[[], bool]) -> None:
        """Start a thread that resumes the stopped process as soon as `may_go_on()` returns True."""

        def wait() -> None:
            while not (self.stopped.value and state_of(self.stopped.value) == "T" and may_go_on()):
                time.sleep(0.01)
            os.kill(self.stopped.value, signal.SIGCONT)

        threading.Thread(target=wait, daemon=True).start()


def test_a_stopped_worker_is_named_and_replaced_and_batches_stay_the_same(caplog):
    batches = Stopped()
    with Loader(batches, 0, 40, num_workers=2, stall_timeout_s=STALL_S) as loader:
        for position, batch in enumerate(loader):
            batches.check(position, batch)
        assert loader._pool.num_replaced == 1
    stopped = batches.stopped.value
    assert not is_alive(stopped)
    worker = (
        rf"loader worker \d \(process {stopped}, stopped\) has been reading \(sample 7 of"
        r" shard-1.tar\) since \d\d:\d\d:\d\d"
    )
    assert re.search(rf"training has waited \d+ s for its next batch: {worker}", caplog.text), (
        caplog.text
    )
    killed = (
        rf"{worker}, without progress for \d+ s \(loader.stall_timeout_s\): all workers are"
        r" replaced, and new ones repeat their work"
    )
    assert len(re.findall(killed, caplog.text)) == 1, caplog.text


def test_a_worker_that_is_stopped_while_it_waits_for_work_is_replaced(caplog):
    batches = Reading()
    with Loader(batches, 0, 40, num_workers=1, stall_timeout_s=STALL_S) as loader:
        while loader._pool._queued:
            loader._note(loader._pool.results(wait=True))
        # A worker becomes idle only a moment after it has returned its result.
        while loader._pool.statuses[0].stage != Stage.IDLE:
            time.sleep(0.001)
        stopped = loader._pool._workers[0][0].pid
        os.kill(stopped, signal.SIGSTOP)
        for position, batch in enumerate(loader):
            batches.check(position, batch)
        assert loader._pool.num_replaced == 1
    assert not is_alive(stopped)
    assert (
        f"next batch: loader worker 0 (process {stopped}, stopped) takes no work\n" in caplog.text
    )
    killed = (
        rf"loader worker 0 \(process {stopped}, stopped\) takes no work for \d+ s"
        r" \(loader\.stall_timeout_s\), although "
    )
    assert re.search(killed, caplog.text)


def test_a_part_that_a_worker_took_but_did_not_begin_is_made_by_another_worker(caplog):
    batches = Reading(pause_s=0.01)
    with Loader(batches, 0, 40, num_workers=2, stall_timeout_s=STALL_S) as loader:
        # Take a task from the queue, like a worker that is stopped before it begins the task.
        os.read(loader._pool._parts.fileno(), worker_pool._PART.size)
        for position, batch in enumerate(loader):
            batches.check(position, batch)
        assert loader._pool.num_replaced == 2
    assert caplog.text.count("all workers are replaced, and new ones repeat") == 1


def test_a_worker_that_continues_in_time_is_not_replaced(caplog, monkeypatch):
    monkeypatch.setattr("vit.data.stall_watch.WARN_AFTER_S", 0.3)
    batches = Stopped()
    with Loader(batches, 0, 40, num_workers=2, stall_timeout_s=600.0) as loader:
        batches.wake(lambda: "training has waited" in caplog.text)
        for position, batch in enumerate(loader):
            batches.check(position, batch)
        assert loader._pool.num_replaced == 0
        assert is_alive(batches.stopped.value)


def test_without_a_timeout_a_stopped_worker_is_reported_and_not_killed(caplog, monkeypatch):
    monkeypatch.setattr("vit.data.stall_watch.WARN_AFTER_S", 0.3)
    batches = Stopped()
    with Loader(batches, 0, 20, num_workers=2, stall_timeout_s=None) as loader:
        batches.wake(lambda: "training has waited" in caplog.text)
        list(loader)
    assert f"(process {batches.stopped.value}, stopped) has been reading" in caplog.text
    assert "killed" not in caplog.text


def test_a_part_that_hangs_two_workers_ends_the_run(caplog):
    with Loader(Hanging(2), 0, 40, num_workers=2, stall_timeout_s=STALL_S) as loader:
        with pytest.raises(
            WorkerError,
            match=(
                r"sample 7 of shard-1.tar\) since .*, and another worker also hung on this part;"
                r" check for a dead mount"
            ),
        ):
            list(loader)
    assert not multiprocessing.active_children()
    batches = Hanging(1)
    with Loader(batches, 0, 10, num_workers=2, stall_timeout_s=STALL_S) as loader:
        for position, batch in enumerate(loader):
            batches.check(position, batch)


@pytest.mark.parametrize("dies", [True, False])
def test_a_worker_that_does_not_die_is_reported_repeatedly(dies, caplog):
    """A process that waits in the kernel for an unavailable mount cannot be killed until the mount
    is available again."""
    batches = Stopped()
    with Loader(batches, 0, 10, num_workers=1, stall_timeout_s=STALL_S) as loader:
        worker = loader._pool._workers[0][0]
        kill = worker.kill
        named = rf"loader worker 0 \(process {worker.pid}, stopped\) was killed but has not"
        worker.kill = lambda: None
        if dies:
            worker.join = lambda timeout: re.search(named, caplog.text) and kill()
            for position, batch in enumerate(loader):
                batches.check(position, batch)
        else:
            with pytest.raises(WorkerError, match=r"for \d+ s .*and cannot be killed; check for"):
                list(loader)
            assert len(re.findall(named, caplog.text)) >= 3
        kill()


def test_a_hang_in_a_stream_ends_the_run():
    class Stream(Hanging):
        exact = False

    with (
        Loader(Stream(1), 0, 40, num_workers=2, stall_timeout_s=STALL_S) as loader,
        pytest.raises(WorkerError, match=r"without progress"),
    ):
        list(loader)


def test_after_the_whole_job_was_stopped_no_worker_is_considered_hanging():
    code = """
import sys, time
sys.path[:0] = ["tests/helpers", "tests", "tests/data"]
from test_worker_pool import Reading
from vit.data.loader import Loader
batches = Reading(pause_s=0.2)
with Loader(batches, 0, 16, num_workers=2, stall_timeout_s=3.0) as loader:
    for position, batch in enumerate(loader):
        batches.check(position, batch)
        print(position, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**environment(), "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "0\n"
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(4)
    os.killpg(process.pid, signal.SIGCONT)
    out, err = process.communicate()
    assert out.split() == [str(n) for n in range(1, 16)], err
    assert "without progress" not in err


def test_a_slow_batch_is_reported_without_workers(caplog):
    class Slow(Reading):
        def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
            if position == 1:
                stages.current.read(7)
                time.sleep(3)
            return super().fill(position, first, rows)

    with Loader(Slow(), 0, 3, stall_timeout_s=1.0) as loader:
        list(loader)
    assert re.search(
        r"waited \d+ s for its next batch: this process has been reading \(sample 7 of"
        r" shard-1.tar\) since",
        caplog.text,
    )


def test_decoding_between_batches_is_not_counted_as_waiting_in_training(caplog):
    """While training has a loader open, the report decodes images in the same process."""
    # Waits are reported after three seconds.
    with Loader(Reading(), 0, 3, stall_timeout_s=12.0) as loader:
        next(loader)
        stages.current.enter(Stage.RESIZE)
        time.sleep(4.5)
        list(loader)
    assert "training has waited" not in caplog.text


class Trickling(Reading):
    """Numbered batches whose workers make steady progress but take too long to fill a batch."""

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        stages.current.read(7)
        for _ in range(len(rows.labels) // 40):
            time.sleep(0.3)
            stages.current.beat()
        return super().fill(position, first, rows)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wait_is_reported_although_parts_of_the_batch_trickle_in(workers, caplog, monkeypatch):
    monkeypatch.setattr("vit.data.stall_watch.WARN_AFTER_S", 0.4)
    with Loader(Trickling(), 0, 1, num_workers=workers) as loader:
        list(loader)
    assert re.search(
        r"training has waited \d+ s for its next batch: .* has been reading \(sample 7 of"
        r" shard-1.tar\)",
        caplog.text,
    )


# ---- counters and priorities ---------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stages_add_up_to_the_busy_time_of_the_workers(workers, shards):
    batches = TrainBatches(open_split(shards, "train"), make_order(60, 12), AugmentConfig(), FORMAT)
    with Loader(batches, 0, 20, num_workers=workers) as loader:
        for _ in loader:
            before = loader.tally()
        while any(status.stage != Stage.IDLE for status in loader._pool.statuses):
            time.sleep(0.01)
        tally = since(loader.tally(), dict.fromkeys(TALLIED, 0.0))
        busy_s = sum(tally[f"{stage.name.lower()}_s"] for stage in Stage if stage != Stage.IDLE)
        assert busy_s >= 0.5 * loader.stats.busy_s, "workers spend time outside all stages"
        assert tally["read_bytes"] == sum(
            int(batches.split.index["size"][i])
            for n in range(20)
            for i in batches.order.rows(n, 0, 12)
        )
        assert all(
            tally[name] > 0 for name in ("order_s", "read_s", "decode_s", "resize_s", "draw_s")
        )
        assert tally["store_s"] == tally["lock_s"] == tally["retries"] == 0
        assert add_up([before, since(tally, before)]) == pytest.approx(tally)


def test_a_status_works_in_any_kind_of_memory():
    memory = memoryview(bytearray(3 * STATUS_BYTES))
    status = WorkerStatus(memory[STATUS_BYTES : 2 * STATUS_BYTES])
    seen = WorkerStatus(memory[STATUS_BYTES : 2 * STATUS_BYTES])
    status.take(5, 128)
    status.read(2**40)
    assert (seen.stage, seen.part, seen.sample) == (Stage.READ, (5, 128), 2**40)
    with status.within(Stage.STORE):
        assert seen.stage == Stage.STORE
        time.sleep(0.02)
    assert seen.stage == Stage.READ
    status.count(read_bytes=100, cache_hits=1)
    status.count(read_bytes=200, cache_misses=1)
    status.enter(Stage.IDLE)
    tally = seen.tally()
    assert tally["store_s"] >= 0.02
    assert (tally["read_bytes"], tally["cache_hits"], tally["cache_misses"]) == (300, 1, 1)
    assert not any([*memory[:STATUS_BYTES], *memory[2 * STATUS_BYTES :]])


def test_a_pause_requested_by_a_store_is_not_a_hang():
    """A pause requested by the server may be longer than `stall_timeout_s`, so it must count as
    progress. The retry must be counted when the pause ends."""

    def attempt() -> None:
        if num_retries() == before:
            raise RetryableError("the server answers 429", retry_after_s=1.0)

    before = num_retries()
    status = WorkerStatus(memoryview(bytearray(STATUS_BYTES)))
    waiting = threading.Thread(
        target=RetryPolicy(30.0, 0.1).call, args=("memory://bucket", attempt)
    )
    waiting.start()
    changes = set()
    while waiting.is_alive():
        time.sleep(0.01)
        status.count_retries()
        changes.add(status.num_changes)
    assert len(changes) >= 3, "the progress counter must keep changing"
    assert status.tally()["retries"] == 1


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [(2, 3, "because memory ran out, "), (2, 2, "no such kill"), (None, 3, "no such kill")],
)
def test_only_an_increased_count_of_oom_kills_is_reported_as_out_of_memory(
    monkeypatch, before, after, message
):
    """A count of None means that the loader could not read the kernel's counter of OOM kills when
    it started."""
    counts = iter([before, after])
    monkeypatch.setattr(worker_pool, "num_oom_kills", lambda: next(counts))
    with (
        Loader(Killed(), 0, 100, num_workers=1) as loader,
        pytest.raises(WorkerError, match=f"killed by SIGKILL, .*{message}"),
    ):
        list(loader)


@pytest.mark.parametrize("niceness", [0, 7])
def test_workers_run_at_the_set_niceness(niceness):
    layout = Numbered().layout
    slots = Slots(plan_ring(layout, 1, 4, 1, False), 1)
    pool = WorkerPool(Numbered(), slots, 1, None, niceness)
    pool.put(0, 0, 0)
    pool.results(wait=True)
    worker_niceness = os.getpriority(os.PRIO_PROCESS, pool._workers[0][0].pid)
    assert worker_niceness == min(os.getpriority(os.PRIO_PROCESS, 0) + niceness, 19)
    pool.end()
