"""Test that a stalled rank is detected and named, both with threads that share a store and in real
training runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import Background, final_state, make_shards, metrics, train, write_config
from ranks import together

from vit.distributed import watchdog as watch_module
from vit.distributed.watchdog import HangVerdict, Watch, _Seen, judge
from vit.distributed.world import LONGEST_WAIT, World

LIMIT_S = 60.0
BUSY_LIMIT_S = 3.0
"""A rank that does not hang must mark and send heartbeats within this time, even on a busy
machine."""


def beat(count: int, ago_s: float, heard_s: float = 0.0, **values) -> _Seen:
    """Return the watchdog's record of a rank that made progress for the last time `ago_s` seconds
    ago, and sent its last heartbeat `heard_s` seconds ago."""
    seen = _Seen(number=1, count=count, step=7, doing="in the step")
    return replace(seen, changed_at=1000.0 - ago_s, heard_at=1000.0 - heard_s, **values)


@pytest.mark.parametrize(
    ("seen", "ranks", "message"),
    [
        ([beat(9, 1), beat(9, 1)], None, ""),
        ([beat(9, 59), beat(8, 59)], None, ""),
        (
            [beat(9, 61), beat(8, 61)],
            (1,),
            "rank 1 on h1 has made no progress for 61 s; last at step 7",
        ),
        # The slowest rank has just made progress, so it has not stalled, even if the other ranks
        # have waited for a long time.
        ([beat(9, 500), beat(8, 2), beat(9, 500)], None, ""),
        (
            [beat(8, 70), beat(9, 1), beat(8, 70)],
            (0, 2),
            "rank 0 on h0, 2 on h2 has made no progress",
        ),
        # The message lists the positions of up to four ranks, because one of them may hang within
        # the step.
        (
            [beat(9, 61), beat(9, 62)],
            (0, 1),
            "all 2 ranks have made no progress for 61 s at step 7, in",
        ),
        (
            [beat(9, 61)] * 9,
            (0, 1, 2, 3),
            "none is behind: the network between them or one of them hangs",
        ),
        (
            [beat(9, 61), beat(9, 1, heard_s=61)],
            (1,),
            "rank 1 on h1 has sent no heartbeat for 60 s",
        ),
        ([beat(9, 99), beat(8, 99, is_away=True)], None, ""),
        ([beat(9, 9999), beat(8, LONGEST_WAIT.total_seconds() + 1, is_away=True)], (1,), "rank 1"),
        # A rank without a heartbeat is still starting, which has a different time limit.
        ([beat(9, 99), _Seen()], None, ""),
        ([beat(9, 99)] + [beat(8, 99)] * 6, (1, 2, 3, 4, 5, 6), "4 on h4 and 2 more has made"),
    ],
)
def test_finds_the_rank_that_is_behind(seen, ranks, message):
    verdict = judge(dict(enumerate(seen)), LIMIT_S, 1000.0, lambda rank: f"h{rank}")
    assert (verdict and verdict.ranks) == ranks
    assert message in (verdict.message if verdict else "")


def watched(world: World, behind: int | None, limit_s: float, for_s: float) -> list[HangVerdict]:
    """Return the watchdog's verdicts during `for_s` seconds in which rank `behind` makes no
    progress."""
    verdicts = list[HangVerdict]()
    watch = Watch(world, limit_s, verdicts.append)
    watch.start()
    end = time.monotonic() + for_s
    step = 0
    while time.monotonic() < end and not verdicts:
        if world.rank != behind:
            step += 1
            watch.mark(step, "in the step")
        time.sleep(0.01)
    watch.close()
    return verdicts


def test_all_ranks_report_the_rank_that_is_behind():
    heard = together(3, lambda world: watched(world, 1, BUSY_LIMIT_S, for_s=240))
    assert [[verdict.ranks for verdict in each] for each in heard] == [[(1,)]] * 3
    assert len({verdict.message for each in heard for verdict in each}) == 1
    assert heard[0][0].message.startswith("rank 1 on ")


def test_does_not_end_ranks_that_make_progress():
    assert (
        together(3, lambda world: watched(world, None, BUSY_LIMIT_S, 1.5 * BUSY_LIMIT_S))
        == [[]] * 3
    )
    assert together(1, lambda world: watched(world, 0, limit_s=0.1, for_s=0.5)) == [[]]


def test_a_rank_that_stops_comparing_is_not_considered_silent():
    """At the end of a run, some ranks close their watchdogs earlier than others."""

    def work(world: World) -> list[HangVerdict]:
        verdicts = watched(world, None, BUSY_LIMIT_S, for_s=0.2)
        if world.rank != 1:
            verdicts += watched(world, None, BUSY_LIMIT_S, 1.5 * BUSY_LIMIT_S)
        return verdicts

    assert together(3, work) == [[]] * 3


def test_time_while_suspended_is_not_counted_as_silence(monkeypatch):
    """Slurm can suspend all ranks of a job. A rank that remains silent after the job has resumed
    must be named."""
    store = dist.HashStore()
    world = World(0, 2, torch.device("cpu"), store, ("first", "second"))
    watch = Watch(world, LIMIT_S, print)
    seen = {1: _Seen()}
    watch._looked_at = 0.0
    store.set("beat 1", json.dumps([0, 4, 7, "in the step", False]))
    verdicts = {}
    for now_s in (3.0, 6.0, *range(1006, 1080, 3)):
        monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: now_s))  # noqa: B023
        watch._look(store, seen, LIMIT_S)
        verdicts[now_s] = judge(seen, LIMIT_S, now_s, world.host_of)
    assert next(now_s for now_s, verdict in verdicts.items() if verdict is not None) == 1066
    assert verdicts[1066].message.startswith("rank 1 on second has sent no heartbeat for 60 s")


class Cable:
    """A network proxy that forwards data until `pull` is called. Afterwards, the proxy drops all
    data but leaves the connections open."""

    def __init__(self, port: int):
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._sockets = [self._server]
        self._is_whole = threading.Event()
        self._is_whole.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = self._server.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                self._sockets += ends
                for pair in (ends, ends[::-1]):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._is_whole.wait()
                target.sendall(data)

    def pull(self) -> None:
        self._is_whole.clear()

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._is_whole.set()


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_rank_without_a_store_ends_once_it_makes_no_progress(is_cut, monkeypatch):
    """A pulled cable does not close a connection, so a request to the store would never return."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cable = Cable(store.port)
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("MASTER_PORT", "29500")
    store_over_cable = dist.TCPStore("127.0.0.1", cable.port, is_master=False)
    world = World(
        1, 2, torch.device("cpu"), dist.PrefixStore("vit", store_over_cable), ("first", "second")
    )
    verdicts = Queue[HangVerdict]()
    watch = Watch(world, BUSY_LIMIT_S, verdicts.put)
    watch.start()
    while not store.check(["vit/beat 1"]):
        time.sleep(0.01)
    if is_cut:
        cable.pull()
    # The run must continue as long as the rank makes progress, even if the store is unreachable.
    for step in range(1, 20):
        watch.mark(step, "in the step")
        time.sleep(1.2 * BUSY_LIMIT_S / 19)
    assert verdicts.empty()
    if is_cut:
        verdict = verdicts.get(timeout=240)
        assert verdict.is_cut_off
        assert "rank 1 on second has not reached the store of torchrun at first:29500 for" in (
            verdict.message
        )
        assert "; last at step 19, in the step: that host or the" in verdict.message
    else:
        # The rank has stalled, but the store still responds.
        time.sleep(1.2 * BUSY_LIMIT_S)
        assert verdicts.empty()
    cable.close()
    watch.close()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shards"))


def test_a_stopped_rank_is_named_in_the_message_and_the_record(shards, tmp_path):
    config = write_config(tmp_path, shards, steps=3000)
    run = Background(config, tmp_path / "run", "run.hang_timeout_s=8", ranks=2, cold=True)
    run.wait_for_step(4)
    stopped = run.trainers()[1]
    os.kill(stopped, signal.SIGSTOP)
    output = run.wait_for_output("has sent no heartbeat for 8 s; last at step")
    assert "rank 1 on " in output
    # Kill the stalled rank, because torchrun would wait 30 s for it.
    os.kill(stopped, signal.SIGKILL)
    output += run.end()
    assert "the same command continues from the newest checkpoint" in output
    assert metrics(tmp_path / "run", "end")[-1]["reason"].startswith("rank 1 on ")


@pytest.mark.full
def test_a_briefly_stopped_rank_continues_to_the_same_weights(shards, tmp_path):
    config = write_config(tmp_path, shards, steps=60)
    train(config, tmp_path / "whole", ranks=2)
    run = Background(config, tmp_path / "run", "run.hang_timeout_s=60", cold=True)
    run.wait_for_step(4)
    stopped = run.trainers()[1]
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(10)
    os.kill(stopped, signal.SIGCONT)
    run.end()
    assert final_state(tmp_path / "run", 60) == final_state(tmp_path / "whole", 60)
