"""Notices a rank that has stopped, hangs or is gone with its host, and ends all with its name.

    main thread   mark("waiting for data"), mark("in the step"), ...   counts what it has done
    thread        beat -> store -> rank 0 compares the counts of all -> verdict -> store -> the end

In a collective all ranks stand still and none knows for whom; all it could say after a time-out is
that it has waited. But all ranks make the same marks in the same order, so the one for which the
others wait has made the fewest. The words go through torchrun's store, on a connection of their
own: they pass also while the main thread is within a collective or holds the other connection.

    thread        the store has not answered for the limit, and this rank has not moved -> the end

A cable that was pulled ends no connection: what asks the store then waits for ever. So a second
thread looks at the clock alone, and a host that is cut off ends by itself, with what it has lost.

Beats are one small message of each rank, which then looks for a verdict and for rank 0's beat;
rank 0 reads all of them with one request: at 4,096 ranks and the default limit 700 requests a
second to the store, and 0.2 MB every 30 s on rank 0 (tests/scale counts them).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from vit.distributed.world import COLLECTIVE_TIMEOUT, ENDED, LONGEST_WAIT, StoreLost, World

BEATS_PER_LIMIT = 20
"""A verdict comes at most a tenth later than the limit."""
LONGEST_BEAT_S = 30.0
ENDS_BY_ITSELF_S = 30.0
"""Time in which a rank notices by itself that another has announced its end; one that stands in a
collective of NCCL does not."""
LEAVES_WITHIN_S = 10.0
"""For the last word to a store; one that does not answer is left alone."""
NAMED = 4
"""Ranks of many that are in the same state, in what people read."""
VERDICT = "watch verdict"
"""Key in the store of why all ranks end, and which ranks are to blame."""


@dataclass
class _Seen:
    """The last beat of a rank, as rank 0 saw it."""

    number: int = -1
    """Of the beat; -1 before the first and after the last one of a rank that compares no more."""
    count: int = -1
    step: int = 0
    doing: str = ""
    is_away: bool = False
    changed_at: float = 0.0
    """When its count of marks was last seen to grow (`time.monotonic`)."""
    heard_at: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Why all ranks end."""

    message: str
    ranks: tuple[int, ...]
    """Those who are behind or silent, or the first ones if no rank is behind another: they show
    where they stand."""
    is_cut_off: bool = False
    """This host knows nothing of the others, nor they of what it says."""


def collective_timeout(limit_s: float | None) -> timedelta:
    """Return when a collective ends by itself: after the watch, which knows names."""
    if limit_s is None:
        return COLLECTIVE_TIMEOUT
    return timedelta(seconds=1.2 * limit_s + 60)


class Watch:
    """Marks what this rank does, and ends all ranks once one has not moved for `limit_s`.

    Does nothing in a world of one, or without a limit.

    Args:
        limit_s: longest time between two marks of a rank; also how long one may be silent.
        end: called on each rank's thread with the verdict; is to end the process.
    """

    def __init__(self, world: World, limit_s: float | None, end: Callable[[Verdict], None]):
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
        """Begin to compare, which each rank must do; again after `close`, too."""
        if self._world.store is None or self._limit_s is None or self._threads:
            return
        try:
            with self._world.asking_store():
                store = self._world.store.clone()
        except StoreLost:
            return  # as in `_compare`
        self._closed = threading.Event()
        self._answered_at = time.monotonic()
        beat_s = min(self._limit_s / BEATS_PER_LIMIT, LONGEST_BEAT_S)
        for work, its in (
            (self._compare, (store, self._limit_s, beat_s, self._closed)),
            (self._look_at_clock, (self._limit_s, beat_s, self._closed)),
        ):
            thread = threading.Thread(target=work, args=its, name="watch", daemon=True)
            thread.start()
            self._threads.append(thread)

    def mark(self, step: int, doing: str) -> None:
        """This rank has come to `doing` of `step`; as often, and in the same order, on each."""
        self._step = step
        self._doing = doing
        self._count += 1

    @contextmanager
    def away(self, step: int, doing: str) -> Iterator[None]:
        """What may take longer than the limit, up to `LONGEST_WAIT`: a disk, a compiler."""
        self._is_away = True
        self.mark(step, doing)
        try:
            yield
        finally:
            self.mark(step, f"after {doing}")
            self._is_away = False

    def close(self) -> None:
        """Compare no longer; others may still do so, and judge nobody without this rank."""
        self._closed.set()
        for thread in self._threads:
            thread.join(LEAVES_WITHIN_S)
        self._threads = []

    # --- the threads -----------------------------------------------------------------------------

    def _compare(
        self, store: dist.Store, limit_s: float, beat_s: float, closed: threading.Event
    ) -> None:
        """Beat, and look at the others' beats, until `close` or a verdict."""
        world = self._world
        watched = range(world.size) if world.is_main else range(1)
        seen = {rank: _Seen() for rank in watched if rank != world.rank}
        self._looked_at = time.monotonic()
        for number in range(2**62):
            is_last = closed.wait(beat_s if number else 0)
            try:
                with world.asking_store():
                    beat = self._beat(-1 if is_last else number)
                    store.set(f"beat {world.rank}", json.dumps(beat))
                    if is_last:
                        return
                    verdict = self._verdict(store, seen, limit_s)
                self._answered_at = time.monotonic()
            except StoreLost:
                return  # the store has ended: torchrun, or the first host; ranks may save yet
            if verdict is not None:
                self._end(verdict)
                return

    def _look_at_clock(self, limit_s: float, beat_s: float, closed: threading.Event) -> None:
        """End this rank where the store is silent and the main thread stands still; asks nobody."""
        looked_at = moved_at = time.monotonic()
        count = self._count
        while not closed.wait(beat_s):
            now = time.monotonic()
            if now - looked_at > limit_s / 4:  # this process was stopped, as in `_look`
                self._answered_at += now - looked_at
                moved_at += now - looked_at
            looked_at = now
            if self._count != count:
                count = self._count
                moved_at = now
            # The main rank alone may have to save what the others wait for, through a dead store.
            is_saving = self._is_away and self._world.is_main
            limit_now_s = LONGEST_WAIT.total_seconds() if is_saving else limit_s
            silent_s = now - self._answered_at
            if min(silent_s, now - moved_at) > limit_now_s:
                self._end(Verdict(self._cut_off(silent_s), (), is_cut_off=True))
                return

    def _cut_off(self, silent_s: float) -> str:
        """Say what does not answer, and where this rank stands."""
        place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        world = self._world
        return (
            f"rank {world.rank} on {world.host_of(world.rank)} has not reached the store of"
            f" torchrun at {place} for {silent_s:.0f} s; last at step {self._step}, {self._doing}:"
            " that host is gone, or the network to it"
        )

    def _beat(self, number: int) -> list[int | str | bool]:
        return [number, self._count, self._step, self._doing, self._is_away]

    def _verdict(self, store: dist.Store, seen: dict[int, _Seen], limit_s: float) -> Verdict | None:
        """The verdict that is in the store, or this rank's own, which it puts there."""
        if store.check([VERDICT]):
            message, ranks = json.loads(store.get(VERDICT))
            return Verdict(message, tuple(ranks))
        if self._has_outlived_another(store):
            return Verdict(json.loads(store.get(ENDED)), ())
        self._look(store, seen, limit_s)
        verdict = judge(seen, limit_s, self._looked_at, self._world.host_of)
        if verdict is not None:
            store.set(VERDICT, json.dumps([verdict.message, verdict.ranks]))
            store.set(ENDED, json.dumps(verdict.message))  # for ranks that wait through the store
        return verdict

    def _has_outlived_another(self, store: dist.Store) -> bool:
        """Whether a rank has announced its end so long ago that this one cannot have noticed."""
        if self._ended_at is None and store.check([ENDED]):
            self._ended_at = time.monotonic()
        return self._ended_at is not None and time.monotonic() - self._ended_at > ENDS_BY_ITSELF_S

    def _look(self, store: dist.Store, seen: dict[int, _Seen], limit_s: float) -> None:
        """Read the beats of the ranks in `seen`, and note this rank's own there."""
        now = time.monotonic()
        slept_s = now - self._looked_at
        self._looked_at = now
        if slept_s > limit_s / 4:
            # This process itself was stopped, perhaps with all others, as Slurm's suspend does:
            # that time says nothing about them.
            for each in seen.values():
                each.heard_at += slept_s
                each.changed_at += slept_s
        keys = {rank: f"beat {rank}" for rank in seen if rank != self._world.rank}
        # A rank without a beat is still opening its loader: `multi_get` would wait for it.
        if keys and store.check(list(keys.values())):
            for rank, text in zip(keys, store.multi_get(list(keys.values())), strict=True):
                _note(seen[rank], json.loads(text), now)
        if self._world.is_main:
            own = seen.setdefault(self._world.rank, _Seen())
            _note(own, self._beat(own.number + 1), now)


def _note(seen: _Seen, beat: list, now: float) -> None:
    number, count, step, doing, is_away = beat
    if number != seen.number:
        seen.heard_at = now
    if count != seen.count:
        seen.changed_at = now
    seen.number = number
    seen.count = count
    seen.step = step
    seen.doing = doing
    seen.is_away = is_away


def judge(
    seen: dict[int, _Seen], limit_s: float, now: float, host_of: Callable[[int], str]
) -> Verdict | None:
    """Return who has kept the others waiting for `limit_s`; None while nobody has.

    A silent rank is one whose thread does not beat either: its process is stopped, or its host
    gone. Of ranks that beat, those with the fewest marks are behind; if all have as many, the
    connection between them is what hangs.
    """
    known = {rank: each for rank, each in seen.items() if each.number >= 0}
    silent = [rank for rank, each in known.items() if now - each.heard_at > limit_s]
    if silent:
        return Verdict(
            _sentence(silent, known, "has not been heard of", limit_s, host_of), (*silent,)
        )
    if len(known) < len(seen) or len(known) == 1:
        return None
    fewest = min(each.count for each in known.values())
    behind = [rank for rank, each in known.items() if each.count == fewest]
    waited_s = now - max(known[rank].changed_at for rank in behind)
    is_away = any(known[rank].is_away for rank in behind)
    if waited_s <= (LONGEST_WAIT.total_seconds() if is_away else limit_s):
        return None
    if len(behind) == len(known):
        each = known[behind[0]]
        return Verdict(
            f"all {len(known)} ranks have stood at step {each.step}, {each.doing}, for"
            f" {waited_s:.0f} s and none is behind: the network between them hangs, or one of them"
            " there",
            (*behind[:NAMED],),
        )
    return Verdict(_sentence(behind, known, "has not moved", waited_s, host_of), (*behind,))


def _sentence(
    ranks: list[int],
    known: dict[int, _Seen],
    what: str,
    for_s: float,
    host_of: Callable[[int], str],
) -> str:
    """Say of up to `NAMED` of `ranks` where they are and what they were doing."""
    first = known[ranks[0]]
    named = ", ".join(f"{rank} on {host_of(rank)}" for rank in ranks[:NAMED])
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return (
        f"rank {named}{more} {what} for {for_s:.0f} s; last at step {first.step}, {first.doing},"
        " and the others wait for it"
    )
