"""Test that a stop signal to all processes of a run is reported as such, whichever process it ends
first.

Slurm, systemd, `timeout` and terminals signal all processes. A compiler has no handler and dies at
once, and its rank then sees a compiler error. The compiler of these tests waits when it is called
in the chosen moment, so that the signal always arrives while it runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from families import Family
from proc import children, command_line
from processes import REPOSITORY, TINY, environment

COMPILER = """#!/bin/sh
if [ -e "{folder}/{begins_with}" ]; then
  touch "{folder}/compiling"
  exec sleep 1000
fi
exec g++ "$@"
"""
START = "."  # exists from the start
FIRST_STEP = "run/metrics.jsonl"


def compile_in(folder: Path, config: Path, begins_with: str, script: str = "train") -> Family:
    """Start training, and wait until its compiler runs. begins_with: the file from which on the
    compiler waits."""
    compiler = folder / "g++"
    compiler.write_text(COMPILER.format(folder=folder, begins_with=begins_with))
    compiler.chmod(0o755)
    env = {
        **environment(),
        "CXX": str(compiler),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    line = [sys.executable, str(REPOSITORY / "launch" / f"{script}.py"), "--config", str(config)]
    line += [f"run.dir={folder / 'run'}", *TINY, "train.compile=true", "loader.num_workers=1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    family = Family(line, env=env, cwd=REPOSITORY, start_new_session=True, **pipes)
    deadline = time.monotonic() + 240
    while not (folder / "compiling").exists():
        if family.process.poll() is not None or time.monotonic() > deadline:
            family.kill()
            raise AssertionError(f"does not compile:\n{family.process.communicate()[0]}")
        time.sleep(0.02)
    return family


def tree(pid: int) -> list[int]:
    """Return the ids of a process and its descendants, the deepest first."""
    return [*(each for child in children(pid) for each in tree(child)), pid]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begins_with", "number", "moment"),
    [
        (START, signal.SIGINT, "before the first step: nothing to save"),
        pytest.param(
            FIRST_STEP,
            signal.SIGTERM,
            "in an unfinished step: run the same command to continue from the newest checkpoint",
        ),
    ],
)
def test_a_signal_to_the_process_group_of_a_compiling_run(
    tmp_path, config, begins_with, number, moment
):
    with compile_in(tmp_path, config, begins_with) as family:
        os.killpg(family.process.pid, number)
        output, _ = family.communicate(240)
    assert family.process.returncode == 128 + number, output
    assert output.count(f"{number.name} received: ") == 1, output
    assert output.rstrip().endswith(f"ended by {number.name} {moment}"), output
    marker = tmp_path / "run" / "stopped_early"
    assert marker.exists() == (begins_with == FIRST_STEP), "a batch script looks for this file"
    if marker.exists():
        assert json.loads(marker.read_text()) == {"step": 0, "signal": "SIGTERM"}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_all_processes_of_a_job_asks_for_a_retry(tmp_path, config, number):
    with compile_in(tmp_path, config, FIRST_STEP, script="job") as family:
        pids = tree(family.process.pid)
        assert any("sleep 1000" in command_line(pid) for pid in pids), "the compiler must be alive"
        for pid in pids:
            os.kill(pid, number)
        output, _ = family.communicate(240)
    assert family.process.returncode == 75, output
    assert f"ended by {number.name} before the first save" in output.splitlines()[-1]
    assert "torch.compile failed" not in output
