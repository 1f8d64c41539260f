"""Define a single retry policy for servers, object stores and mounted folders.

A caller passes a function that raises `RetryableError` for temporary errors, such as a lost
connection, "slow down" or a stale file handle. The function is retried after growing pauses, up to
the limit of the policy. An error that is probably final, such as a refused login, is retried only a
few times. Each process logs one warning, for all its threads, when a server stops answering, and
one when the server answers again.
"""

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
"""Interruptions shorter than this many seconds are not reported."""
WARN_AGAIN_S = 60.0
NUM_REFUSALS = 6
"""The number of attempts (about 15 s) for an error that is probably final. A refused login may
succeed after its token is renewed."""
FORGOTTEN_AFTER_S = 180.0
"""An outage counts as over if no attempt follows its last pause within this many seconds. An
attempt never takes this long."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class RetryableError(Exception):
    """An error, with its reason as text, after which a retry may succeed."""

    def __init__(
        self,
        reason: str,
        retry_after_s: float | None = None,
        final: Exception | None = None,
        num_refusals: int = NUM_REFUSALS,
    ):
        """Store the reason and the limits on retries.

        Args:
            retry_after_s: The shortest pause that the server allows.
            final: The error to raise after `num_refusals` consecutive failed attempts.
        """
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.final = final
        self.num_refusals = num_refusals


@dataclass(frozen=True)
class RetryPolicy:
    """The limit and pauses of retries. Instances can be pickled and have no state."""

    limit_s: float = 480.0
    """The maximum time since the first failure, or since the last byte from the same server; 0
    turns retries off."""
    first_pause_s: float = 0.5
    """The first pause, which doubles after each attempt. A random factor between 0.5 and 1.5
    spreads the retries of clients that failed at the same time."""
    longest_pause_s: float = 20.0

    def call(
        self,
        address: str,
        attempt: Callable[[], T],
        while_waiting: Callable[[], None] | None = None,
    ) -> T:
        """Call `attempt` until it no longer raises `RetryableError`, and return its result.

        Raises ShardError with the number of attempts, their duration and the last reason. All other
        errors of `attempt` are raised unchanged.

        Args:
            address: The URL or path for messages, without secrets.
            while_waiting: A function that is called a few times per second during pauses. It may
                raise an error to stop the retries.
        """
        global _retries
        place = _server_or_folder(address)
        began = time.time(), steady_s()
        failed_s = 0.0  # the time of the first failure, or 0
        refusals = 0  # the number of consecutive failures that are probably final
        number = 0  # the number of the attempt

        while True:
            number += 1
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
                    raise _exhausted(address, error, number, now_s - failed_s) from error

                pause_s = min(self._pause_s(number, error), left_s)
                outage.awaited_until_s = max(outage.awaited_until_s, now_s + pause_s)
                if now_s + pause_s > outage.warn_at_s:
                    outage.warn_at_s = now_s + WARN_AGAIN_S
                    outage.warn(address, error, left_s, error.num_refusals - refusals)

                _retries += 1  # This need not be atomic, because the number is only reported.
                failed_s += outage.wait(now_s, pause_s, while_waiting)
            else:
                _end_outage(place, address)
                return result

    def _pause_s(self, number: int, error: RetryableError) -> float:
        pause_s = min(self.first_pause_s * 2 ** min(number - 1, 32), self.longest_pause_s)
        return max(
            pause_s * _JITTER.uniform(0.5, 1.5),
            (error.retry_after_s or 0.0) * _JITTER.uniform(1.0, 1.25),
        )


_JITTER = random.Random()
"""A separate generator, so that network errors do not change the random numbers of training."""


def _exhausted(address: str, error: RetryableError, number: int, elapsed_s: float) -> ShardError:
    times = f", {number} times in {elapsed_s:.0f} s" if number > 1 else ""
    return ShardError(
        f"{address}: {error}{times}: check the address and the network, then start again"
    )


# ---- outages -------------------------------------------------------------------------------------


@dataclass
class _Outage:
    """An outage of one server or folder, as seen by this process."""

    began: tuple[float, float]
    """`time.time()` and `steady_s()` before the first failed attempt."""
    failed_s: float
    """`time.monotonic()` of the first failure. The times below use the same clock."""
    awaited_until_s: float
    warn_at_s: float
    is_reported: bool = False

    def warn(self, address: str, error: RetryableError, left_s: float, refusals_left: int) -> None:
        """Log the outage, its reason and the limit of the retries."""
        self.is_reported = True
        log.warning(
            "%s: has not answered since %s (%s); trying %s",
            address,
            time.strftime("%H:%M:%S", time.localtime(self.began[0])),
            error,
            f"for another {left_s:.0f} s" if error.final is None else f"{refusals_left} more times",
        )

    def wait(self, now_s: float, pause_s: float, while_waiting: Callable[[], None] | None) -> float:
        """Wait for `pause_s`, and return how long the process was suspended meanwhile.

        The process may have been suspended for hours, which must not count toward the limit, so the
        outage's times are shifted by that duration. Another thread may already have shifted them.
        """
        failed_s = self.failed_s
        warn_at_s = self.warn_at_s
        _wait(pause_s, while_waiting)
        suspended_s = max(time.monotonic() - now_s - pause_s, 0.0)
        self.failed_s = max(self.failed_s, failed_s + suspended_s)
        self.warn_at_s = max(self.warn_at_s, warn_at_s + suspended_s)
        return suspended_s


_outages: dict[str, _Outage] = {}
"""The current outage of each server or folder. All threads share the time limit of an outage. With
separate limits, threads that wait one after another could wait many times as long. Single dict
operations need no lock."""


def _outage_of(place: str, began: tuple[float, float], failed_s: float) -> _Outage:
    """Return the current outage of `place`. If the last outage is over, begin a new one."""
    outage = _outages.get(place)
    if outage is not None and time.monotonic() > outage.awaited_until_s + FORGOTTEN_AFTER_S:
        _outages.pop(place, None)
    return _outages.setdefault(place, _Outage(began, failed_s, failed_s, failed_s + WARN_AFTER_S))


def _end_outage(place: str, address: str) -> None:
    """Forget the outage of `place`, which has answered. Log the end if the outage was logged."""
    ended = _outages.pop(place, None)
    if ended is not None and ended.is_reported:
        log.warning("%s: answers again after %.0f s", address, steady_s() - ended.began[1])


def _server_or_folder(address: str) -> str:
    server = re.match(r"\w+://[^/]*", address)
    return server[0] if server else os.path.dirname(address)


def _wait(pause_s: float, while_waiting: Callable[[], None] | None) -> None:
    """Sleep for `pause_s`, and call `while_waiting` several times per second."""
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
    """Return the number of retries in this process. A fork resets the number to 0."""
    return _retries


def num_progress() -> int:
    """Return a number that increases while a thread receives bytes or pauses between attempts.

    An increasing number shows that the process is not hung.
    """
    return _progress


def note_progress() -> None:
    """Record that bytes were received."""
    global _progress
    _progress += 1  # This need not be atomic, because any change is enough.


def _reset() -> None:
    global _retries
    _retries = 0
    _outages.clear()


os.register_at_fork(after_in_child=_reset)
