"""How long to go on when files cannot be had for a while: one rule for servers, object stores and
mounted folders. Free of torch.

The data's story: who reads gives an attempt that raises `RetryableError` for what a later attempt
may not meet (a lost connection, "slow down", a stale handle). It is made again after growing pauses, for as
long as the limit says; what looks final, though it may pass, a few times only. A process tells once
that a server is away, and once that it is back, however many threads wait for it.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from vit.system.files import ShardError

TELL_AFTER_S = 3.0
"""Shorter interruptions are nobody's business."""
TELL_AGAIN_S = 60.0
NUM_REFUSALS = 6
"""Attempts (some 15 s) at what is probably final: a login refused in the middle of a run, say, as
its token may just be renewed."""
FORGOTTEN_AFTER_S = 180.0
"""An outage is over for who fails so long after the last attempt should have been made: longer than
one takes."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class RetryableError(Exception):
    """What a later attempt may not meet; the text is the reason."""

    def __init__(
        self,
        reason: str,
        retry_after_s: float | None = None,
        final: Exception | None = None,
        num_refusals: int = NUM_REFUSALS,
    ):
        """retry_after_s: how long the server wants to be left alone. final: to raise after
        `num_refusals` attempts in a row."""
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.final = final
        self.num_refusals = num_refusals


@dataclass(frozen=True)
class RetryPolicy:
    """Repeats attempts; picklable, and without state of its own."""

    limit_s: float = 480.0
    """So long an attempt is repeated, counted from the first failure, or since when nothing came
    from its place; 0: never."""
    first_pause_s: float = 0.5
    """Doubles from pause to pause, and is drawn between half and three halves of that: who failed
    together does not come back together."""
    longest_pause_s: float = 20.0

    def call(
        self, where: str, attempt: Callable[[], T], while_waiting: Callable[[], None] | None = None
    ) -> T:
        """What `attempt` returns, repeated while it raises `RetryableError`.

        where: URL or path, for people, without secrets. while_waiting: called a few times a second
        in pauses; may raise to stop. Raises ShardError that says how often and how long it was
        tried, and the last reason; else what `attempt` raises.
        """
        began_s = time.time()
        failed_s = 0.0
        number = 0
        refusals = 0
        tell_s = TELL_AFTER_S
        while True:
            number += 1
            try:
                result = attempt()
            except RetryableError as error:
                now_s = time.monotonic()
                failed_s = failed_s or now_s
                place = _place(where)
                outage = _outage_of(place, began_s, failed_s)
                away_s = now_s - min(failed_s, outage.failed_s)
                left_s = self.limit_s - away_s
                refusals = 0 if error.final is None else refusals + 1
                if left_s <= 0 or refusals >= error.num_refusals:
                    if error.final is not None:
                        _away.pop(place, None)
                        _told.pop(place, None)
                        raise error.final from error
                    times = (
                        f", after {away_s:.0f} s in which nothing came from there"
                        if away_s >= 1
                        else ""
                    )
                    times = f", {number} times in {now_s - failed_s:.0f} s" if number > 1 else times
                    raise ShardError(
                        f"{where}: {error}{times}; check the address and the network, then start"
                        " again"
                    ) from error
                pause_s = min(
                    self.first_pause_s * 2 ** min(number - 1, 32), self.longest_pause_s
                ) * _JITTER.uniform(0.5, 1.5)
                pause_s = min(
                    max(pause_s, (error.retry_after_s or 0.0) * _JITTER.uniform(1.0, 1.25)), left_s
                )
                outage.awaited_until_s = max(outage.awaited_until_s, now_s + pause_s)
                if now_s + pause_s - failed_s > tell_s:
                    tell_s = now_s - failed_s + TELL_AGAIN_S
                    if _told.setdefault(place, began_s) is began_s:
                        since = time.strftime("%H:%M:%S", time.localtime(outage.began_s))
                        log.warning(
                            "%s: has not answered since %s (%s); trying for another %.0f s",
                            where,
                            since,
                            error,
                            left_s,
                        )
                _count_retry()
                outage_s = outage.failed_s
                _wait(pause_s, while_waiting)
                # hours, where the process was suspended, and nobody's patience
                slept_s = max(time.monotonic() - now_s - pause_s, 0.0)
                failed_s = failed_s + slept_s
                outage.failed_s = max(outage.failed_s, outage_s + slept_s)
            else:
                if (
                    _away
                    and (ended := _away.pop(_place(where), None)) is not None
                    and _told.pop(_place(where), None) is not None
                ):
                    log.warning(
                        "%s: answers again after %.0f s", where, time.time() - ended.began_s
                    )
                return result


@dataclass
class _Outage:
    """Of one place, as this process has seen it."""

    began_s: float
    """Of `time.time`, before the first attempt that failed."""
    failed_s: float
    """Of `time.monotonic`, as all that follow."""
    awaited_until_s: float
    """When the last pause will be over."""


def _outage_of(place: str, began_s: float, failed_s: float) -> _Outage:
    """The outage that a failure belongs to: the last one unless something came since, or nobody has
    asked for long."""
    known = _away.get(place)
    if known is not None and time.monotonic() > known.awaited_until_s + FORGOTTEN_AFTER_S:
        _away.pop(place, None)
        _told.pop(place, None)
    return _away.setdefault(place, _Outage(began_s, failed_s, failed_s))


_JITTER = random.Random()
"""Its own generator: nobody's draws depend on the network."""
_away: dict[str, _Outage] = {}
"""Places from which nothing has come since. Nobody who fails there has patience of his own: many
would use it up one after another."""
_told: dict[str, float] = {}
"""Those that were told: who puts one in, or takes it out, tells it. Single operations need no
lock."""
_retries = 0
_moves = 0


def num_retries() -> int:
    """Attempts that this process has repeated so far; a forked one begins at 0."""
    return _retries


def num_progress() -> int:
    """Goes on for as long as bytes come to any of this process's threads, or one pauses between
    attempts: none of them hangs."""
    return _moves


def note_progress() -> None:
    """Some bytes have come."""
    global _moves
    _moves += 1  # threads may lose one of each other's: another number is enough


def _count_retry() -> None:
    global _retries
    _retries += 1  # threads may lose one of each other's: it is for people


def _start_over() -> None:
    global _retries
    _retries = 0
    _away.clear()
    _told.clear()


os.register_at_fork(after_in_child=_start_over)


def _place(where: str) -> str:
    """Server or folder."""
    server = re.match(r"\w+://[^/]*", where)
    return server[0] if server else os.path.dirname(where)


def _wait(pause_s: float, while_waiting: Callable[[], None] | None) -> None:
    resume_s = time.monotonic() + pause_s
    while (left_s := resume_s - time.monotonic()) > 0:
        if while_waiting is not None:
            while_waiting()
        time.sleep(min(left_s, 0.2))
        note_progress()
