"""Test that the exit status of `launch/job.py` lets a scheduler distinguish how the attempt
ended."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time

import pytest
import warm_python
from extras.deleted_extras import needs
from families import Family
from processes import REPOSITORY, TINY, call, environment, last_step, metrics

sys.path.insert(0, str(REPOSITORY / "launch"))
job = runpy.run_path(str(REPOSITORY / "launch" / "job.py"))
judge = job["judge"]
sys.path.pop(0)


@pytest.mark.parametrize(
    ("outcome", "stop_signal", "before", "after", "status"),
    [
        ("finished", "", "a", "b", 0),
        ("finished", "SIGTERM", "a", "a", 0),
        ("stopped", "SIGTERM", "a", "a", 75),
        ("stopped", "", "", "a", 75),
        ("mistake", "", "", "", 2),
        ("mistake", "SIGTERM", "a", "a", 2),
        ("mistake", "", "a", "b", 75),
        (None, "SIGTERM", "", "", 75),
        (None, "", "a", "b", 75),
        (None, "", "", "a", 75),
        (None, "", "a", "a", 1),
        (None, "", "", "", 1),
        ("finished", "", "a", None, 0),
        ("stopped", "SIGTERM", None, None, 75),
        ("mistake", "", "a", None, 1),
        ("mistake", "", None, "a", 1),
        (None, "SIGTERM", "a", None, 75),
    ],
)
def test_an_attempt_has_one_of_four_exit_statuses(outcome, stop_signal, before, after, status):
    assert judge(outcome, stop_signal, before, after)[0] == status


@pytest.mark.parametrize(
    ("launcher_status", "stop_signal", "status"), [(0, "", 0), (1, "", 2), (1, "SIGTERM", 75)]
)
def test_a_check_is_not_repeated_unless_it_was_ended(launcher_status, stop_signal, status):
    assert job["judge_check"](launcher_status, stop_signal)[0] == status


@needs("planner")
@pytest.mark.slow
@pytest.mark.full
def test_a_pod_checks_in_place_of_training(config, tmp_path):
    env = environment()
    env["PYTHON_EXEC"] = warm_python.python(env)
    line = [env["PYTHON_EXEC"], str(REPOSITORY / "launch" / "job.py"), "--config", str(config)]
    line += [f"run.dir={tmp_path / 'run'}", *TINY, "--check", "--check-limit-s=50"]
    green = call(line, env)
    assert green.returncode == 0, green.stdout + green.stderr
    assert "checked, and nothing was started" in green.stdout.splitlines()[-1]
    red = call([*line, "data.root=/nowhere"], env)
    assert red.returncode == 2, red.stdout + red.stderr
    assert "/nowhere" in red.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_saves_on_sigterm_asks_for_a_restart_and_then_finishes(config, tmp_path):
    env = environment()
    env["PYTHON_EXEC"] = warm_python.python(env)
    run_dir = tmp_path / "run"
    line = [env["PYTHON_EXEC"], str(REPOSITORY / "launch" / "job.py"), "--config", str(config)]
    line += [f"run.dir={run_dir}", *TINY, "train.steps=60", "checkpoint.every_steps=1000"]
    line += ["eval.every_steps=1000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with Family(line, env=env, cwd=REPOSITORY, **pipes) as family:
        deadline = time.monotonic() + 240
        while last_step(run_dir) < 3:
            assert family.process.poll() is None, family.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        family.process.terminate()
        printed, _ = family.communicate(240)
    assert family.process.returncode == 75, printed
    assert "stopped and saved (step_" in printed.splitlines()[-1], printed
    again = call(line, env)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [end["outcome"] for end in metrics(run_dir, "end")] == ["stopped", "finished"]
    mistaken = call([*line, "train.stepz=5"], env)
    assert mistaken.returncode == 2
    assert mistaken.stderr.strip().endswith("did you mean train.steps?"), mistaken.stderr
