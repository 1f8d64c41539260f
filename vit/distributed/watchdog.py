"""Detect a rank that has stopped, hangs or has lost its host, and end the run with an error.

    main thread   mark("waiting for data"), mark("in the step"), ...   counts its marks
    thread        beat -> store -> rank 0 compares all counts -> verdict -> store -> end of the run

In a collective, all ranks wait, and a time-out does not show which rank is late. Because all ranks
make the same marks in the same order, the late rank is the one with the fewest marks. Heartbeats
("beats") use torchrun's store over a separate connection, which works while the main thread waits
in a collective.

    thread        no answer from the store and no new mark within the limit -> end of this rank

If a network cable is pulled, connections stay open, and a request to the store never returns. A
second thread, which only checks the clock, therefore ends the ranks on a host that has lost its
network.

In each beat, a rank sends one small message, then checks for a verdict and for rank 0's beat. Rank
0 reads all beats in one request. With 4,096 ranks and the default limit, the store receives 700
requests per second, and rank 0 reads 0.2 MB every 30 s (tests/scale measures both).
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vit.distributed.world import COLLECTIVE_TIMEOUT, ENDED, LONGEST_WAIT, StoreLost, World
from vit.system.spelling import few

BEATS_PER_LIMIT = 20
"""The number of heartbeats within one time limit. A verdict is therefore late by at most a tenth of
the limit."""
LONGEST_BEAT_S = 30.0
ENDS_BY_ITSELF_S = 30.0
"""The time after which the watchdog ends its own rank if another rank has announced that it exits.
A rank that waits in an NCCL collective does not notice the announcement."""
LEAVES_WITHIN_S = 10.0
"""The maximum time that the last message to the store may take."""
NAMED = 4
LAST_BEAT = -1
"""The number of the last beat, which a rank sends after `Watch.close` is called."""
VERDICT = "watch verdict"
"""The key in the store under which the verdict is stored: the reason why the run ends, and the
ranks that caused it."""


@dataclass
class _Seen:
    """The most recent beat that was read from a rank."""

    number: int = -1
    """The number of the beat; -1 before the first beat, and `LAST_BEAT` after `Watch.close`."""
    count: int = -1
    step: int = 0
    doing: str = ""
    is_away: bool = False
    changed_at: float = 0.0
    """The time (`time.monotonic`) at which the number of marks last increased."""
    heard_at: float = 0.0


@dataclass(frozen=True)
class HangVerdict:
    """The reason why all ranks must end."""

    message: str
    ranks: tuple[int, ...]
    """The ranks that print a stack: those that are behind or silent, or else the first ranks."""
    is_cut_off: bool = False
    """Whether this host has lost its connection to the store."""


def collective_timeout(limit_s: float | None) -> timedelta:
    """Return the time-out of collectives. It is so long that the watchdog, which can name the late
    rank, ends the run first."""
    return COLLECTIVE_TIMEOUT if limit_s is None else timedelta(seconds=1.2 * limit_s + 60)


class Watch:
    """A watchdog that ends all ranks if one of them makes no progress for `limit_s`.

    The watchdog does nothing with a single rank or without a limit.

    Args:
        limit_s: The maximum time between two marks of a rank, and between two of its beats.
        end: A function that is called with the verdict on a thread of each rank, and must end the
            process.
    """

    def __init__(self, world: World, limit_s: float | None, end: Callable[[HangVerdict], None]):
        self._world = world
        self._limit_s = limit_s
        self._end = end

        self._count = 0
        self._step = 0
        self._doing = "starting"
        self._is_away = False
        self._looked_at: float
        self._answered_at: float
        self._ended_at: float | None = None
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads. All ranks must call this, once."""
        if self._world.store is None or self._limit_s is None:
            return

        try:
            with self._world.asking_store():
                store = self._world.store.clone()
        except StoreLost:
            return  # torchrun has exited, but the ranks may still save.

        self._answered_at = time.monotonic()
        beat_s = min(self._limit_s / BEATS_PER_LIMIT, LONGEST_BEAT_S)
        for work, arguments in (
            (self._compare, (store, self._limit_s, beat_s, self._closed)),
            (self._look_at_clock, (self._limit_s, beat_s, self._closed)),
        ):
            thread = threading.Thread(target=work, args=arguments, name="watch", daemon=True)
            thread.start()
            self._threads.append(thread)

    def mark(self, step: int, doing: str) -> None:
        """Record that this rank begins the activity `doing` of `step`.

        All ranks must make the same marks in the same order.
        """
        self._step = step
        self._doing = doing
        self._count += 1

    @contextmanager
    def away(self, step: int, doing: str) -> Iterator[None]:
        """Allow the block, such as saving or compiling, to take up to `LONGEST_WAIT`."""
        self._is_away = True
        self.mark(step, doing)
        try:
            yield
        finally:
            self.mark(step, f"after {doing}")
            self._is_away = False

    def close(self) -> None:
        """Stop the threads. Other ranks' watchdogs then no longer expect beats from this rank."""
        self._closed.set()
        for thread in self._threads:
            thread.join(LEAVES_WITHIN_S)
        self._threads = []

    # --- the watchdog threads ---------------------------------------------------------------------

    def _compare(
        self, store: dist.Store, limit_s: float, beat_s: float, closed: threading.Event
    ) -> None:
        """Send beats and read those of other ranks until `close` or a verdict."""
        world = self._world
        # Rank 0 watches all other ranks, which watch only rank 0.
        watched = range(1, world.size) if world.is_main else range(1)
        seen = {rank: _Seen() for rank in watched}
        self._looked_at = time.monotonic()

        for number in itertools.count():
            is_closed = closed.wait(beat_s if number else 0)  # the first beat is sent immediately
            try:
                with world.asking_store():
                    beat = self._beat(LAST_BEAT if is_closed else number)
                    store.set(f"beat {world.rank}", json.dumps(beat))
                    if is_closed:
                        return
                    verdict = self._verdict(store, seen, limit_s)
            except StoreLost:
                return  # torchrun or the first host has stopped, but the ranks may still save.

            self._answered_at = time.monotonic()
            if verdict is not None:
                self._end(verdict)
                return

    def _look_at_clock(self, limit_s: float, beat_s: float, closed: threading.Event) -> None:
        """End this rank if the store does not answer and the main thread makes no marks.

        This thread never uses the store, which could block it.
        """
        looked_at = moved_at = time.monotonic()
        count = self._count
        while not closed.wait(beat_s):
            now = time.monotonic()
            if now - looked_at > limit_s / 4:  # This process itself was stopped (see `_look`).
                self._answered_at += now - looked_at
                moved_at += now - looked_at
            looked_at = now

            if self._count != count:
                count = self._count
                moved_at = now

            # Rank 0 may still be saving after the store has shut down.
            is_saving = self._is_away and self._world.is_main
            limit_now_s = LONGEST_WAIT.total_seconds() if is_saving else limit_s
            silent_s = now - self._answered_at
            if min(silent_s, now - moved_at) > limit_now_s:
                self._end(HangVerdict(self._cut_off(silent_s), (), is_cut_off=True))
                return

    def _cut_off(self, silent_s: float) -> str:
        """Return a message with the store's address and this rank's last mark."""
        place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        world = self._world
        return (
            f"rank {world.rank} on {world.host_of(world.rank)} has not reached the store of"
            f" torchrun at {place} for {silent_s:.0f} s; last at step {self._step}, {self._doing}:"
            " that host or the network to it has failed"
        )

    def _beat(self, number: int) -> list[int | str | bool]:
        """Return the values that this rank sends, in the order of the fields of `_Seen`."""
        return [number, self._count, self._step, self._doing, self._is_away]

    def _verdict(
        self, store: dist.Store, seen: dict[int, _Seen], limit_s: float
    ) -> HangVerdict | None:
        """Return the verdict in the store, or else judge the ranks and store a verdict."""
        if store.check([VERDICT]):
            message, ranks = json.loads(store.get(VERDICT))
            return HangVerdict(message, tuple(ranks))
        if self._has_outlived_another(store):
            return HangVerdict(json.loads(store.get(ENDED)), ())

        self._look(store, seen, limit_s)
        verdict = judge(seen, limit_s, self._looked_at, self._world.host_of)
        if verdict is not None:
            store.set(VERDICT, json.dumps([verdict.message, verdict.ranks]))
            store.set(ENDED, json.dumps(verdict.message))  # tells ranks that poll the store
        return verdict

    def _has_outlived_another(self, store: dist.Store) -> bool:
        """Return whether another rank announced its end more than ENDS_BY_ITSELF_S ago."""
        if self._ended_at is None and store.check([ENDED]):
            self._ended_at = time.monotonic()
        return self._ended_at is not None and time.monotonic() - self._ended_at > ENDS_BY_ITSELF_S

    def _look(self, store: dist.Store, seen: dict[int, _Seen], limit_s: float) -> None:
        """Read the latest beats of the ranks into `seen`. On rank 0, add its own beat."""
        now = time.monotonic()
        slept_s = now - self._looked_at
        self._looked_at = now
        if slept_s > limit_s / 4:
            # This process was stopped, for example because Slurm suspended the job. That time must
            # not count against the other ranks.
            for each in seen.values():
                each.heard_at += slept_s
                each.changed_at += slept_s

        keys = {rank: f"beat {rank}" for rank in seen if rank != self._world.rank}
        # `multi_get` would block if a rank has not sent its first beat yet.
        if keys and store.check(list(keys.values())):
            for rank, text in zip(keys, store.multi_get(list(keys.values())), strict=True):
                seen[rank] = _updated(seen[rank], json.loads(text), now)

        if self._world.is_main:
            own = seen.get(self._world.rank, _Seen())
            seen[self._world.rank] = _updated(own, self._beat(own.number + 1), now)


def _updated(seen: _Seen, beat: list[Any], now: float) -> _Seen:
    """Return what is known about a rank after its latest `beat`, which may be the same as
    before."""
    number, count, *_ = beat
    return replace(
        _Seen(*beat),
        changed_at=seen.changed_at if count == seen.count else now,
        heard_at=seen.heard_at if number == seen.number else now,
    )


def judge(
    seen: dict[int, _Seen], limit_s: float, now: float, host_of: Callable[[int], str]
) -> HangVerdict | None:
    """Return a verdict if some ranks have kept the others waiting for `limit_s`, else None.

    A silent rank sends no beats, because its process is stopped or its host has failed. Among the
    other ranks, those with the fewest marks are behind. If all have the same number of marks, the
    network between them hangs.
    """
    watching = {rank: each for rank, each in seen.items() if each.number >= 0}
    silent = [rank for rank, each in watching.items() if now - each.heard_at > limit_s]
    if silent:
        return HangVerdict(
            _sentence(silent, watching, "has sent no heartbeat", limit_s, host_of), (*silent,)
        )
    if len(watching) < len(seen) or len(watching) == 1:
        return None

    fewest = min(each.count for each in watching.values())
    behind = [rank for rank, each in watching.items() if each.count == fewest]
    waited_s = now - max(watching[rank].changed_at for rank in behind)
    is_away = any(watching[rank].is_away for rank in behind)
    if waited_s <= (LONGEST_WAIT.total_seconds() if is_away else limit_s):
        return None

    if len(behind) == len(watching):
        each = watching[behind[0]]
        return HangVerdict(
            f"all {len(watching)} ranks have made no progress for {waited_s:.0f} s at step"
            f" {each.step}, {each.doing}, and none is behind: the network between them or one of"
            " them hangs",
            (*behind[:NAMED],),
        )
    return HangVerdict(
        _sentence(behind, watching, "has made no progress", waited_s, host_of), (*behind,)
    )


def _sentence(
    ranks: list[int],
    seen: dict[int, _Seen],
    problem: str,
    for_s: float,
    host_of: Callable[[int], str],
) -> str:
    """Return a message that names up to `NAMED` ranks, their hosts, and the first rank's last
    mark."""
    first = seen[ranks[0]]
    named = few([f"{rank} on {host_of(rank)}" for rank in ranks], NAMED)
    return (
        f"rank {named} {problem} for {for_s:.0f} s; last at step {first.step},"
        f" {first.doing}, while the others waited"
    )
