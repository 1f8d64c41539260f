"""Test the parts of `make gpu-check` that do not train for long.

All tests in this file require a GPU. tests/extras/planner/gpu_check/test_guarantees.py shows on a
CPU that each check can fail.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kills
import pytest
import torch

CHECK = Path(__file__).parents[4] / "benchmarks" / "gpu_check" / "check.py"
BUDGET_S = 500.0


@pytest.mark.parametrize("part", ["slots", "equality", "waits", "graphs", "memory"])
def test_the_check_passes(part):
    """The check runs in a separate program, because other tests initialize CUDA in this process.
    Processes forked after that cannot use a GPU."""
    line = [sys.executable, str(CHECK), "--only", part]
    done = subprocess.run(line, capture_output=True, text=True, timeout=BUDGET_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\npass  " in done.stdout, "the program checked no promise"


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path):
    place = kills.make_place(tmp_path, "train.device=cuda", "train.precision=bf16")
    [line] = kills.killed_and_resumed(place, deterministic=True, promised=True)
    assert line.passed, str(line)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_killed_rank_is_noticed(tmp_path: Path):
    place = kills.make_place(tmp_path, "train.device=cuda", "train.precision=bf16")
    [line] = kills.killed_rank(place)
    assert line.passed, str(line)
