"""A terminal that is closed, and a signal to ranks that have nothing left to do."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from faults.phases import lines_of, stopped
from processes import Background, children, final_state, train

from vit.ranks.exit import StopSignals

STEPS = 48


def test_a_closed_terminal_is_remembered_but_not_after_nohup():
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, expected in ((signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, "")):
            signal.signal(signal.SIGHUP, handler)
            signals = StopSignals()
            signals.remember_only()
            os.kill(os.getpid(), signal.SIGHUP)
            signals.restore()
            assert signals.received == expected
            assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.full
def test_a_run_whose_terminal_is_closed_is_saved_and_goes_on(tmp_path, config):
    """The terminal tells each of its processes, also the loader's workers."""
    settings = (f"train.steps={STEPS}", "data.num_workers=2", "checkpoint.every_steps=1000")
    train(config, tmp_path / "whole", *settings, ranks=2)
    run = Background(config, tmp_path / "run", *settings, ranks=2, cold=True)
    run.wait_for_step(4)
    ranks = run.trainers()
    for pid in [*(worker for rank in ranks for worker in children(rank)), *ranks]:
        os.kill(pid, signal.SIGHUP)
    said = run.end()
    assert run.process.returncode == 0, said
    mark = json.loads((tmp_path / "run" / "stopped_early").read_text())
    assert 4 <= mark["step"] < STEPS
    assert f"stopped at step {mark['step']} of {STEPS}, saved" in said
    train(config, tmp_path / "run", *settings, ranks=2)
    assert final_state(tmp_path / "run", STEPS) == final_state(tmp_path / "whole", STEPS)


@pytest.mark.full
def test_a_finished_run_is_not_ended_by_a_rank_that_waits_for_the_report(tmp_path, config):
    run = Background(config, tmp_path / "run", "log.report=true", ranks=2, cold=True)
    run.wait_for_step(12)
    first, second = run.trainers()
    deadline = time.monotonic() + 240
    while lines_of(tmp_path / "run")[-1]["kind"] != "end":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with stopped([first]):  # it draws
        time.sleep(1)  # the other one has closed its run meanwhile, and waits
        os.kill(second, signal.SIGTERM)
        while _pending(second):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    said = run.end()
    assert run.process.returncode == 0, said
    assert (tmp_path / "run" / "report" / "index.html").exists()


def _pending(pid: int) -> int:
    """The signals that have come to a process and not reached it yet; none of one that ended."""
    path = Path(f"/proc/{pid}/status")
    if not path.exists():
        return 0
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return int(lines.get("SigPnd", "0"), 16) | int(lines.get("ShdPnd", "0"), 16)
