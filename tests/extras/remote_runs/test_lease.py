"""One job at a time: several take turns, wait, take over, and notice what they have lost. The store
is a folder by its URL, which refuses to replace a file but has nothing else of a lock."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from vit.data.storage.object_store import ObjectStore
from vit.extras.remote_runs.lease import LEASE_FILE, Lease, LeaseLost
from vit.system.retry import RetryPolicy


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/run", RetryPolicy(1.0))


def held(store: ObjectStore, place: str = "a", lease_s: float = 1.0) -> Lease:
    lease = Lease(store, lease_s)
    lease.acquire(place)
    return lease


def die(lease: Lease) -> None:
    """End as a killed process does: without a word."""
    lease._ended.set()
    assert lease._thread is not None
    lease._thread.join()


def test_a_second_job_is_refused_while_the_first_renews_and_gets_it_when_that_ends(store, capfd):
    first = held(store)
    with pytest.raises(ValueError, match=r"in use by a live run \(process \d+ on .+\): wait for"):
        held(store, "b")
    assert f"{store}: waiting up to 1 s for process " in capfd.readouterr().err
    first.confirm()
    threading.Timer(0.3, first.release).start()
    second = held(store, "b")
    second.confirm()
    second.release()
    assert not (Path(store.url.removeprefix("file://")) / LEASE_FILE).exists()


def test_a_job_that_died_is_followed_after_its_lease_and_at_once_in_its_own_folder(store, capfd):
    die(held(store, "a", lease_s=3.0))
    began = time.monotonic()
    held(store, "a", lease_s=3.0).release()
    same_place_s = time.monotonic() - began
    die(held(store, "a", lease_s=3.0))
    began = time.monotonic()
    second = held(store, "b", lease_s=1.0)
    assert time.monotonic() - began > 2.5 > same_place_s
    assert "has not renewed its lease for 3 s: taking over" in capfd.readouterr().err
    second.release()


def test_a_lease_that_is_old_by_the_clock_of_the_store_is_not_waited_for(store, tmp_path):
    die(held(store, "a", lease_s=600.0))
    path = tmp_path / "run" / LEASE_FILE
    old = time.time() - 700
    os.utime(path, (old, old))
    began = time.monotonic()
    held(store, "b").release()
    assert time.monotonic() - began < 60


def test_who_finds_the_lease_of_another_or_none_has_lost_it(store, tmp_path):
    lease = held(store)
    path = tmp_path / "run" / LEASE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "token": "x", "holder": "job 7"}))
    for _ in range(200):
        if lease.is_lost:
            break
        time.sleep(0.05)
    with pytest.raises(LeaseLost, match="job 7 has taken over the run, because this job did not"):
        lease.confirm()
    lease.release()
    assert json.loads(path.read_text())["token"] == "x", "not ours to remove"
    path.unlink()
    second = held(store)
    path.unlink()
    with pytest.raises(LeaseLost, match="its lease is gone: the run was removed, or another job"):
        second.confirm()
    second.release()


def test_a_renewal_that_comes_late_costs_the_next_job_nothing(store, tmp_path):
    """Who was suspended between its look at the lease and its write replaces another's."""
    first = held(store, "a", lease_s=1.0)
    die(first)
    late = first._content()
    second = held(store, "b", lease_s=1.0)
    path = tmp_path / "run" / LEASE_FILE
    path.write_bytes(late)
    second.confirm()
    assert json.loads(path.read_text())["place"] == "b", "it has written its own again"
    with pytest.raises(LeaseLost, match="has taken over the run"):
        first.confirm()
    second.release()


class _Slow(ObjectStore):
    """A store that writes late; then `follower` writes its lease again."""

    def __init__(self, store: ObjectStore, path: Path, follower: str):
        super().__init__(store.url, store.retry)
        self._path = path
        self._follower = follower

    def write(self, *args: Any, **keywords: Any) -> bool:
        time.sleep(0.8)
        is_written = super().write(*args, **keywords)
        self._path.write_text(self._follower)
        return is_written


def test_who_has_written_late_looks_once_more(store, tmp_path):
    first = held(store, "a", lease_s=1.0)
    die(first)
    path = tmp_path / "run" / LEASE_FILE
    others = {**json.loads(path.read_text()), "token": "x", "holder": "job 7"}
    with pytest.raises(LeaseLost, match="job 7 has taken over"):
        first.confirm(_Slow(store, path, json.dumps(others)))


def _race(url: str, barrier: Barrier, won: multiprocessing.Queue[bool]) -> None:
    lease = Lease(ObjectStore(url, RetryPolicy(1.0)), 3.0)
    barrier.wait()
    try:
        lease.acquire(str(os.getpid()))
    except ValueError:
        won.put(False)
    else:
        won.put(True)
        time.sleep(6)  # longer than the others wait
        lease.release()


@pytest.mark.full
def test_of_many_that_find_an_expired_lease_at_once_one_gets_it(store):
    for _ in range(3):
        lease = held(store, "dead", lease_s=1.0)
        die(lease)
        time.sleep(1.2)
        number = 6
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(number)
        won = context.Queue()
        jobs = [
            context.Process(target=_race, args=(store.url, barrier, won)) for _ in range(number)
        ]
        for job in jobs:
            job.start()
        results = [won.get(timeout=60) for _ in jobs]
        for job in jobs:
            job.join()
        assert sum(results) == 1
