"""Test which signals end a process immediately, and which signals let it finish the current
step."""

from __future__ import annotations

import signal

from vit.distributed.exit import StopSignals


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
