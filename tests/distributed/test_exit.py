"""Test which signals end a process immediately, which signals let it finish the current step, and
what is printed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from processes import REPOSITORY, environment

import vit.distributed.exit as exit_module
from vit.distributed.exit import Interrupted, StopSignals
from vit.distributed.world import RankLost, World

SAVING = "saving after this step, and then ending; a second Ctrl-C ends without saving"
IN_C_CODE = """
import ctypes, signal, sys, threading
from vit.distributed.exit import StopSignals

def let_go():
    begin.acquire()
    print("in C code", flush=True)
    sys.stdin.readline()
    libc.pthread_mutex_unlock(mutex)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
signals = StopSignals()
if sys.argv[1] == "1":
    signals.remember_only()
begin = threading.Lock()
begin.acquire()
threading.Thread(target=let_go).start()
sys.setswitchinterval(1000)  # the other thread continues when the main thread waits in C code
begin.release()
try:
    libc.pthread_mutex_lock(mutex)  # signals do not interrupt it
    print("continued", file=sys.stderr)
except KeyboardInterrupt:
    pass
print("handled", signals.received, file=sys.stderr)
"""


def test_time_limit_signals_always_wait_and_others_after_the_start():
    signals = StopSignals()

    def sent(number: signal.Signals) -> str:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt as error:
            return type(error).__name__
        return signals.received

    try:
        assert sent(signal.SIGUSR1) == "SIGUSR1"
        assert sent(signal.SIGTERM) == "Interrupted"
        signals.remember_only()
        assert sent(signal.SIGTERM) == "SIGTERM"
        assert sent(signal.SIGINT) == "KeyboardInterrupt", (
            "a second Ctrl-C must end the process immediately"
        )
    finally:
        signals.restore()


def test_an_error_waits_for_the_signal_that_may_have_caused_it(monkeypatch):
    """The signal arrives after the error. With the real time limit, the verdict would depend on the
    load of the machine."""
    monkeypatch.setattr(exit_module, "SIGNAL_S", 240.0)
    signals = StopSignals()
    signals.remember_only()
    has_raised = threading.Event()

    def send_later() -> None:
        has_raised.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    def fail() -> None:
        with signals.instead_of_errors("in a test"):
            has_raised.set()
            raise RuntimeError("C++ compile error")

    sender = threading.Thread(target=send_later)
    sender.start()
    try:
        with pytest.raises(Interrupted, match=r"^ended by SIGTERM in a test$") as error:
            fail()
    finally:
        sender.join()
        signals.restore()
    assert error.value.number == signal.SIGTERM
    assert isinstance(error.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    "error", [RankLost("rank 1 ended"), RuntimeError("[/gloo/pair.cc] Connection closed by peer")]
)
def test_the_loss_of_a_rank_is_not_replaced_by_the_signal_that_follows_it(monkeypatch, error):
    monkeypatch.setenv("WORLD_SIZE", "2")
    signals = StopSignals()
    signals.remember_only()
    os.kill(os.getpid(), signal.SIGTERM)  # as torchrun and srun do
    try:
        with pytest.raises(type(error)) as raised, signals.instead_of_errors("in a test"):
            raise error
    finally:
        signals.restore()
    assert raised.value is error


def test_a_rank_that_announced_its_end_was_not_killed():
    process = subprocess.Popen([sys.executable, "-c", ""])
    ended, store = process.pid, dist.HashStore()
    first, second = (
        World(rank, 2, torch.device("cpu"), store, _host_pids={0: os.getpid(), 1: ended})
        for rank in range(2)
    )
    assert not first.has_killed_rank(), "both processes exist"
    process.wait()
    first.announce_end("ended by SIGTERM")
    assert first.has_killed_rank()
    second.announce_end("ended by SIGTERM")
    assert not first.has_killed_rank()


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_errors_without_a_signal_are_raised_unchanged(kind):
    signals = StopSignals()
    try:
        with pytest.raises(kind, match=r"^bad$"), signals.instead_of_errors("in a test"):
            raise kind("bad")
    finally:
        signals.restore()


@pytest.mark.parametrize(
    ("saves", "number", "reaction"),
    [
        (False, signal.SIGHUP, "ending before the first step"),
        (False, signal.SIGUSR1, SAVING),
        (True, signal.SIGTERM, SAVING),
        (True, signal.SIGINT, SAVING),
    ],
)
def test_the_first_signal_is_printed_while_a_library_does_not_return(saves, number, reaction):
    """Python's signal handler runs only after the library call. In this test, the call returns only
    after the line has been printed."""
    done = subprocess.Popen(
        [sys.executable, "-c", IN_C_CODE, str(int(saves))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        env=environment(),
        text=True,
    )
    assert done.stdout is not None
    assert done.stderr is not None
    try:
        assert done.stdout.readline() == "in C code\n"
        done.send_signal(number)
        assert done.stderr.readline() == f"{number.name} received: {reaction}\n"
        assert done.poll() is None, "the C code must still be running"
    finally:
        _, rest = done.communicate("\n")
    assert f"handled {number.name}" in rest
