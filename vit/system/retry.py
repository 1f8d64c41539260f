"""One retry policy for servers, object stores and mounted folders.

A caller passes an attempt that raises `RetryableError` for errors that may pass: a lost connection,
"slow down", a stale handle. It is repeated after growing pauses for as long as the policy says;
errors that are probably final, such as a refused login, only a few times. Each process logs one
warning when a server stops answering and one when it is back, however many threads wait for it.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from vit.system.files import ShardError
from vit.system.meter import steady_s

WARN_AFTER_S = 3.0
"""Shorter interruptions are not reported."""
WARN_AGAIN_S = 60.0
NUM_REFUSALS = 6
"""Attempts (some 15 s) after an error that is probably final. A login that is refused in the middle
of a run may work again when its token has been renewed."""
FORGOTTEN_AFTER_S = 180.0
"""An outage ends if no attempt has been made for so long after the last pause: longer than one
attempt takes."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class RetryableError(Exception):
    """An error that a later attempt may not meet; its text is the reason."""

    def __init__(
        self,
        reason: str,
        retry_after_s: float | None = None,
        final: Exception | None = None,
        num_refusals: int = NUM_REFUSALS,
    ):
        """retry_after_s: the shortest pause that the server asks for.

        final: raised after `num_refusals` attempts in a row.
        """
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.final = final
        self.num_refusals = num_refusals


@dataclass(frozen=True)
class RetryPolicy:
    """How long and how often an attempt is repeated; picklable, without state of its own."""

    limit_s: float = 480.0
    """Time since the first failure, or since the last byte from the same server; 0: no retries."""
    first_pause_s: float = 0.5
    """Doubles with each pause. Each is drawn between half and three halves of its length, so that
    clients that failed together do not come back together."""
    longest_pause_s: float = 20.0

    def call(
        self, where: str, attempt: Callable[[], T], while_waiting: Callable[[], None] | None = None
    ) -> T:
        """Return the result of `attempt`, repeated while it raises `RetryableError`.

        where: URL or path to show, without secrets. while_waiting: called a few times a second in
        pauses; may raise to stop.
        Raises ShardError with the number of attempts, their time and the last reason; else what
        `attempt` raises.
        """
        global _retries
        place = _server_or_folder(where)
        began = time.time(), steady_s()
        failed_s = 0.0
        refusals = 0
        for number in itertools.count(1):
            try:
                result = attempt()
            except RetryableError as error:
                now_s = time.monotonic()
                failed_s = failed_s or now_s
                refusals = 0 if error.final is None else refusals + 1
                outage = _outage_of(place, began, failed_s)
                left_s = self.limit_s - (now_s - min(failed_s, outage.failed_s))
                if left_s <= 0 or refusals >= error.num_refusals:
                    if error.final is not None:
                        _outages.pop(place, None)
                        raise error.final from error
                    raise _exhausted(where, error, number, now_s - failed_s) from error
                pause_s = min(self._pause_s(number, error), left_s)
                outage.awaited_until_s = max(outage.awaited_until_s, now_s + pause_s)
                if now_s + pause_s > outage.warn_at_s:
                    outage.warn_at_s = now_s + WARN_AGAIN_S
                    outage.is_reported = True
                    log.warning(
                        "%s: has not answered since %s (%s); trying %s",
                        where,
                        time.strftime("%H:%M:%S", time.localtime(outage.began[0])),
                        error,
                        f"for another {left_s:.0f} s"
                        if error.final is None
                        else f"{error.num_refusals - refusals} more times",
                    )
                _retries += 1  # not atomic: the number is only shown to people
                outage_failed_s = outage.failed_s
                warn_at_s = outage.warn_at_s
                _wait(pause_s, while_waiting)
                # Time for which this process was suspended (maybe hours) does not count.
                suspended_s = max(time.monotonic() - now_s - pause_s, 0.0)
                failed_s += suspended_s
                outage.failed_s = max(outage.failed_s, outage_failed_s + suspended_s)
                outage.warn_at_s = max(outage.warn_at_s, warn_at_s + suspended_s)
            else:
                ended = _outages.pop(place, None)
                if ended is not None and ended.is_reported:
                    away_s = steady_s() - ended.began[1]
                    log.warning("%s: answers again after %.0f s", where, away_s)
                return result
        raise AssertionError("unreachable")

    def _pause_s(self, number: int, error: RetryableError) -> float:
        """Draw the pause after attempt `number`."""
        pause_s = min(self.first_pause_s * 2 ** min(number - 1, 32), self.longest_pause_s)
        asked_s = error.retry_after_s or 0.0
        return max(pause_s * _JITTER.uniform(0.5, 1.5), asked_s * _JITTER.uniform(1.0, 1.25))


_JITTER = random.Random()
"""A generator of its own: the network must not change the draws of training."""


def _exhausted(where: str, error: RetryableError, number: int, elapsed_s: float) -> ShardError:
    times = f", {number} times in {elapsed_s:.0f} s" if number > 1 else ""
    return ShardError(
        f"{where}: {error}{times}; check the address and the network, then start again"
    )


# ---- outages -------------------------------------------------------------------------------------


@dataclass
class _Outage:
    """An outage of one server or folder, as this process has seen it."""

    began: tuple[float, float]
    """`time.time()` and `steady_s()` before the first attempt that failed."""
    failed_s: float
    """`time.monotonic()` of the first failure; the times below are monotonic, too."""
    awaited_until_s: float
    """When the last pause will be over."""
    warn_at_s: float
    is_reported: bool = False


_outages: dict[str, _Outage] = {}
"""Servers and folders from which nothing has come since a failure. All threads share the limit of
an outage: one after another they would wait many times as long. Single dict operations need no
lock."""


def _outage_of(place: str, began: tuple[float, float], failed_s: float) -> _Outage:
    """Return the outage that a failure belongs to; a forgotten one is replaced."""
    known = _outages.get(place)
    if known is not None and time.monotonic() > known.awaited_until_s + FORGOTTEN_AFTER_S:
        _outages.pop(place, None)
    return _outages.setdefault(place, _Outage(began, failed_s, failed_s, failed_s + WARN_AFTER_S))


def _server_or_folder(where: str) -> str:
    server = re.match(r"\w+://[^/]*", where)
    return server[0] if server else os.path.dirname(where)


def _wait(pause_s: float, while_waiting: Callable[[], None] | None) -> None:
    resume_s = time.monotonic() + pause_s
    while (left_s := resume_s - time.monotonic()) > 0:
        if while_waiting is not None:
            while_waiting()
        time.sleep(min(left_s, 0.2))
        note_progress()


# ---- counters ------------------------------------------------------------------------------------

_retries = 0
_progress = 0


def num_retries() -> int:
    """Return how many attempts this process has repeated; 0 after a fork."""
    return _retries


def num_progress() -> int:
    """Return a number that grows while bytes come to any thread, or one pauses between attempts.

    A process whose number grows does not hang.
    """
    return _progress


def note_progress() -> None:
    """Record that bytes have come."""
    global _progress
    _progress += 1  # not atomic: that the number changes is enough


def _reset() -> None:
    global _retries
    _retries = 0
    _outages.clear()


os.register_at_fork(after_in_child=_reset)
