"""Which signals end a process at once, and which wait for a step."""

from __future__ import annotations

import signal

from vit.distributed.exit import StopSignals


def test_what_comes_ahead_of_a_time_limit_waits_for_the_first_step_and_all_do_later():
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
        assert sent(signal.SIGINT) == "KeyboardInterrupt", "a second wish, from a terminal"
    finally:
        signals.restore()
