"""Test the time limits, pauses and messages of retries.

The tests use either a fake clock or time limits of at most one second.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from types import SimpleNamespace

import pytest

from vit.system import retry
from vit.system.files import ShardError
from vit.system.retry import NUM_REFUSALS, WARN_AFTER_S, RetryableError, RetryPolicy, num_retries

QUICK = RetryPolicy(limit_s=0.3, first_pause_s=0.01, longest_pause_s=0.05)
URL = "http://host.example/set/a.tar"


@pytest.fixture(autouse=True)
def no_outage():
    retry._reset()


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Replace the clock for retries with a fake clock. The fake clock advances only when a retry
    sleeps, and by one microsecond each time it is read. Threads from earlier tests continue to use
    the real clock."""
    now = SimpleNamespace(strftime=time.strftime, localtime=time.localtime, passed_s=0.0)
    ours = threading.current_thread()

    def sleep(seconds: float) -> None:
        if threading.current_thread() is ours:
            now.passed_s += seconds
        else:
            time.sleep(seconds)

    now.sleep = sleep

    def monotonic() -> float:
        if threading.current_thread() is not ours:
            return time.monotonic()
        now.passed_s += 1e-6
        return 1000 + now.passed_s

    now.monotonic = monotonic
    now.time = lambda: 1e9 + now.passed_s
    monkeypatch.setattr(retry, "time", now)
    return now


def failing(times: int, **details):
    made = []

    def attempt() -> int:
        made.append(retry.time.monotonic())
        if len(made) <= times:
            raise RetryableError("the server answers 503", **details)
        return len(made)

    attempt.made = made  # type: ignore[attr-defined]
    return attempt


def test_retries_a_temporary_failure(clock):
    before = num_retries()
    assert QUICK.call(URL, failing(3)) == 4
    # threads from earlier tests may retry as well
    assert num_retries() - before >= 3


def test_raises_a_permanent_failure_immediately():
    made = []

    def attempt() -> None:
        made.append(1)
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        QUICK.call(URL, attempt)
    assert made == [1]


def test_at_the_limit_everything_is_reported(clock):
    attempt = failing(1000)
    with pytest.raises(
        ShardError,
        match=(
            rf"^{URL}: the server answers 503, (\d+) times in \d+ s: check the address and the"
            r" network"
        ),
    ) as error:
        QUICK.call(URL, attempt)
    assert f" {len(attempt.made)} times" in str(error.value)
    assert 5 < len(attempt.made) < 40
    assert attempt.made[-1] - attempt.made[0] == pytest.approx(0.3, abs=1e-3), (
        "the last attempt must be made at the limit"
    )


def test_a_limit_of_0_is_one_attempt():
    attempt = failing(1)
    with pytest.raises(ShardError, match=rf"^{URL}: the server answers 503: check"):
        RetryPolicy(limit_s=0).call(URL, attempt)
    assert len(attempt.made) == 1


def test_retries_a_probably_permanent_failure_a_few_times():
    gone = FileNotFoundError("gone")
    assert (
        RetryPolicy(60, 0.01, 0.05).call(URL, failing(NUM_REFUSALS - 1, final=gone)) == NUM_REFUSALS
    )
    attempt = failing(NUM_REFUSALS, final=gone)
    with pytest.raises(FileNotFoundError, match="gone"):
        RetryPolicy(60, 0.01, 0.05).call(URL, attempt)
    assert len(attempt.made) == NUM_REFUSALS


def test_waits_as_long_as_the_server_asks(clock):
    attempt = failing(1, retry_after_s=0.2)
    QUICK.call(URL, attempt)
    assert attempt.made[1] - attempt.made[0] >= 0.2


def test_does_not_wait_beyond_the_limit(clock):
    attempt = failing(1000, retry_after_s=3600)
    with pytest.raises(ShardError, match=r"2 times in \d+ s"):
        QUICK.call(URL, attempt)
    assert len(attempt.made) == 2


def messages(caplog) -> list[str]:
    """Return only messages about this file's server, because threads from earlier tests may still
    be retrying."""
    return [message for message in caplog.messages if message.startswith(URL)]


def test_many_threads_report_a_wait_for_one_server_once(caplog):
    with caplog.at_level(logging.WARNING):
        several = RetryPolicy(limit_s=240, first_pause_s=0.01)
        waits = [failing(1, retry_after_s=WARN_AFTER_S) for _ in range(8)]
        threads = [
            threading.Thread(target=several.call, args=(f"{URL}{n}", wait))
            for n, wait in enumerate(waits)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    away, back = messages(caplog)
    assert "has not answered since " in away
    assert "(the server answers 503); trying for another 240 s" in away
    assert "answers again after " in back


def test_a_few_attempts_are_not_reported_as_a_long_wait(caplog, monkeypatch, clock):
    monkeypatch.setattr(retry, "WARN_AFTER_S", 0.0)
    with caplog.at_level(logging.WARNING), pytest.raises(FileNotFoundError):
        RetryPolicy(480, 0.01, 0.05).call(URL, failing(1000, final=FileNotFoundError("gone")))
    [line] = messages(caplog)
    assert line.endswith(f"(the server answers 503); trying {NUM_REFUSALS - 1} more times")


def test_reports_a_lasting_outage_again(caplog, monkeypatch, clock):
    monkeypatch.setattr(retry, "WARN_AFTER_S", 0.05)
    monkeypatch.setattr(retry, "WARN_AGAIN_S", 0.1)
    with caplog.at_level(logging.WARNING), pytest.raises(ShardError):
        RetryPolicy(0.5, 0.01, 0.02).call(URL, failing(1000))
    assert 3 <= len(messages(caplog)) <= 6
    assert len({line.split("; trying")[0] for line in messages(caplog)}) == 1, (
        "the repeated message must keep its start time and reason"
    )


def test_later_requests_share_the_time_limit_of_an_outage(clock):
    for number in range(9):
        attempt = failing(1000)
        with pytest.raises(ShardError, match=r"the server answers 503.*: check the address"):
            RetryPolicy(1.0, 0.01, 0.05).call(f"{URL}{number}", attempt)
    assert clock.passed_s == pytest.approx(1.0, abs=1e-2)
    assert len(attempt.made) == 1
    assert QUICK.call("http://other.example/a.tar", failing(2)) == 3, (
        "an outage of one server must not affect another"
    )
    assert RetryPolicy(1.0).call(URL, failing(0)) == 1
    assert RetryPolicy(1.0, 0.01).call(URL, failing(2)) == 3, "a response must end the outage"


def test_forgets_an_outage_without_requests_for_a_while(clock):
    with pytest.raises(ShardError):
        QUICK.call(URL, failing(1000))
    clock.sleep(retry.FORGOTTEN_AFTER_S + 1)
    assert QUICK.call(URL, failing(2)) == 3


def test_does_not_count_time_of_a_suspended_process(clock):
    naps = [0.6]
    assert QUICK.call(URL, failing(3), lambda: clock.sleep(naps.pop() if naps else 0)) == 4


def test_a_command_can_be_stopped_in_a_pause():
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RetryPolicy(first_pause_s=60).call(URL, failing(1), stop)


def test_a_forked_process_counts_separately():
    QUICK.call(URL, failing(1))
    assert num_retries() > 0
    pid = os.fork()
    if pid == 0:
        os._exit(num_retries())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
