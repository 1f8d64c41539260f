"""Test that only one job at a time holds the lease of a run.

Other jobs must wait, acquire an expired lease, and notice a lost lease. The store is a folder with
a file:// URL. The store can refuse to replace a file, but does not support any other locks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import pytest

from vit.data.storage.object_store import ObjectStore
from vit.extras.remote_runs.lease import Lease, LeaseLost
from vit.run_folder.copying import LEASE_FILE
from vit.system.retry import RetryPolicy


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/run", RetryPolicy(1.0))


LEASE_S = 5.0
"""The holder must renew its lease within this time, even on a busy machine."""


def held(store: ObjectStore, place: str = "a", lease_s: float = LEASE_S) -> Lease:
    lease = Lease(store, lease_s)
    lease.acquire(place)
    return lease


def die(lease: Lease) -> None:
    """Stop renewing the lease without releasing it, as if the process had been killed."""
    lease._ended.set()
    assert lease._thread is not None
    lease._thread.join()


def test_a_second_job_is_refused_while_the_first_renews_and_gets_the_lease_afterwards(store, capfd):
    first = held(store)
    with pytest.raises(ValueError, match=r"in use by a live run \(process \d+ on .+\): wait until"):
        held(store, "b")
    assert f"{store}: waiting up to 5 s for process " in capfd.readouterr().err
    first.confirm()
    threading.Timer(0.3, first.release).start()
    second = held(store, "b")
    second.confirm()
    second.release()
    assert not (Path(store.url.removeprefix("file://")) / LEASE_FILE).exists()


def test_a_dead_jobs_lease_is_taken_over_when_it_expires_or_at_once_in_the_same_folder(
    store, capfd
):
    die(held(store, "a", lease_s=3600.0))
    held(store, "a").release()
    began = time.monotonic()
    die(held(store, "a", lease_s=3.0))
    second = held(store, "b")
    assert time.monotonic() - began > 3.0
    assert "has not renewed its lease for 3 s: taking over" in capfd.readouterr().err
    second.release()


def test_a_lease_that_is_expired_by_the_stores_clock_is_taken_over_at_once(store, tmp_path):
    die(held(store, "a", lease_s=3600.0))
    path = tmp_path / "run" / LEASE_FILE
    old = time.time() - 3700
    os.utime(path, (old, old))
    held(store, "b").release()


def test_a_replaced_or_removed_lease_counts_as_lost(store, tmp_path):
    lease = held(store)
    path = tmp_path / "run" / LEASE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "token": "x", "holder": "job 7"}))
    while not lease.is_lost:
        time.sleep(0.05)
    with pytest.raises(LeaseLost, match="job 7 has taken over the run, because this job did not"):
        lease.confirm()
    lease.release()
    assert json.loads(path.read_text())["token"] == "x", "another job's lease must not be removed"
    path.unlink()
    second = held(store)
    path.unlink()
    with pytest.raises(
        LeaseLost, match="the lease is gone, because the run was removed, or another job"
    ):
        second.confirm()
    second.release()


def test_a_late_renewal_does_not_end_the_next_job(store, tmp_path):
    """A job that is suspended between reading and writing the lease overwrites the lease of the
    next job."""
    first = held(store, "a", lease_s=1.0)
    die(first)
    late = first._content()
    second = held(store, "b")
    path = tmp_path / "run" / LEASE_FILE
    path.write_bytes(late)
    second.confirm()
    assert json.loads(path.read_text())["place"] == "b", "the next job must write its lease again"
    with pytest.raises(LeaseLost, match="has taken over the run"):
        first.confirm()
    second.release()


class _Slow(ObjectStore):
    """A store with slow writes. After each write, it replaces the file with the lease of another
    job, `follower`."""

    def __init__(self, store: ObjectStore, path: Path, follower: str):
        super().__init__(store.url, store.retry)
        self._path = path
        self._follower = follower

    def write(self, *args: Any, **keywords: Any) -> bool:
        time.sleep(0.8)
        is_written = super().write(*args, **keywords)
        self._path.write_text(self._follower)
        return is_written


def test_a_job_checks_the_lease_again_after_a_slow_write(store, tmp_path):
    first = held(store, "a", lease_s=1.0)
    die(first)
    path = tmp_path / "run" / LEASE_FILE
    other_lease = {**json.loads(path.read_text()), "token": "x", "holder": "job 7"}
    with pytest.raises(LeaseLost, match="job 7 has taken over"):
        first.confirm(_Slow(store, path, json.dumps(other_lease)))


def _race(url: str, barrier: Barrier, won: multiprocessing.Queue[bool], all_know: Event) -> None:
    lease = Lease(ObjectStore(url, RetryPolicy(1.0)), LEASE_S)
    barrier.wait()
    try:
        lease.acquire(str(os.getpid()))
    except ValueError:
        won.put(False)
    else:
        won.put(True)
        all_know.wait()
        lease.release()


@pytest.mark.full
def test_one_of_many_simultaneous_jobs_gets_an_expired_lease(store):
    for _ in range(3):
        lease = held(store, "dead", lease_s=1.0)
        die(lease)
        time.sleep(1.2)
        number = 6
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(number)
        won = context.Queue()
        all_know = context.Event()
        jobs = [
            context.Process(target=_race, args=(store.url, barrier, won, all_know))
            for _ in range(number)
        ]
        for job in jobs:
            job.start()
        results = [won.get(timeout=240) for _ in jobs]
        all_know.set()
        for job in jobs:
            job.join()
        assert sum(results) == 1
