"""Test that a single rank, as on a host with one GPU, saves and exits when its torchrun is
killed."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from processes import Background


@pytest.mark.slow
def test_the_only_rank_saves_and_stops_if_torchrun_is_killed(config, tmp_path):
    endless = ("train.steps=1000000", "log.sample_losses=0", "eval.every_steps=1000000")
    background = Background(config, tmp_path / "run", *endless, ranks=1, cold=True)
    background.wait_for_step(2)
    (rank,) = background.trainers()
    os.kill(background.process.pid, signal.SIGKILL)
    try:
        output = background.end()  # the output pipe closes when the rank exits
    except subprocess.TimeoutExpired:
        os.kill(rank, signal.SIGKILL)
        raise
    assert "SIGTERM received: saving after this step" in output
    assert (tmp_path / "run" / "stopped_early").exists()
