"""Test how runs end after their terminal is closed, after early and late signals, when limits are
exhausted, and when ranks have different settings."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from contextlib import suppress

import pytest
from extras.deleted_extras import needs
from faults.groups import compile_in, tree
from faults.phases import lines_of, stopped
from proc import children, command_line, status_of
from processes import COMMANDS, TINY, Background, call, command, final_state, train

from vit.checkpoint.resume import settings_sha256
from vit.distributed.exit import Interrupted, StopSignals, problem_of

STEPS = 48


def test_a_closed_terminal_is_remembered_but_not_after_nohup():
    def heard(number, frame):
        """Do nothing, so that the signals do not end this process."""

    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, expected in ((heard, "SIGHUP"), (signal.SIG_IGN, "")):
            signal.signal(signal.SIGHUP, handler)
            signals = StopSignals()
            signals.remember_only()
            os.kill(os.getpid(), signal.SIGHUP)
            signals.restore()
            assert signals.received == expected
            assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_the_first_step_is_not_lost_where_errors_are_ignored():
    signals = StopSignals()
    try:
        with suppress(Interrupted):  # ignore the exception, as Python does in `__del__`
            os.kill(os.getpid(), signal.SIGTERM)
        signals.remember_only()
        assert signals.received == "SIGTERM"
    finally:
        signals.restore()


def test_names_the_limit_when_no_more_files_can_be_opened():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
        with pytest.raises(OSError, match="Too many open files") as error:
            open("/dev/null").close()
        problem = problem_of(error.value)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert problem == (
        "Too many open files: this process may open 3 files: raise the limit (`ulimit -n`) and run"
        " the same command again"
    )


OTHERWISE = """
import os, runpy, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = [*sys.argv[1:-1], *([sys.argv[-1]] if os.environ["RANK"] == "1" else [])]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("word", "difference"),
    [
        ("optim.lr=0.5", "optim.lr: 0.001 on rank 0, 0.5 on rank 1"),
        ("eval.every_steps=5", "eval.every_steps: 6 on rank 0, 5 on rank 1"),
        ("loader.num_workers=1", ""),
    ],
)
def test_refuses_ranks_with_different_settings(tmp_path, config, word, difference):
    """If a config file is edited on only one host, the ranks would train different models."""
    script = tmp_path / "otherwise.py"
    script.write_text(OTHERWISE)
    run_dir = tmp_path / "run"
    arguments = ("--config", config, f"run.dir={run_dir}", *TINY, "train.steps=2", word)
    line = command("launch/train.py", *arguments, ranks=2)
    line.insert(line.index(str(COMMANDS / "launch/train.py")), str(script))
    done = call(line)
    if not difference:
        assert done.returncode == 0, done.stderr
        return
    assert "error: rank 1 on " in done.stderr
    assert (
        f" was started with settings that differ from rank 0:\n  {difference}\nStart" in done.stderr
    )
    assert done.returncode != 0
    assert not run_dir.exists()


@pytest.mark.full
def test_saves_when_the_terminal_is_closed_and_resumes(tmp_path, config):
    """Closing a terminal sends SIGHUP to all of its processes, including loader workers."""
    settings = (f"train.steps={STEPS}", "loader.num_workers=2", "checkpoint.every_steps=1000")
    train(config, tmp_path / "whole", *settings, ranks=2)
    run = Background(config, tmp_path / "run", *settings, ranks=2, cold=True)
    run.wait_for_step(4)
    ranks = run.trainers()
    for pid in [*(worker for rank in ranks for worker in children(rank)), *ranks]:
        os.kill(pid, signal.SIGHUP)
    output = run.end()
    assert run.process.returncode == 0, output
    mark = json.loads((tmp_path / "run" / "stopped_early").read_text())
    assert 4 <= mark["step"] < STEPS
    assert f"stopped at step {mark['step']} of {STEPS}, saved" in output
    train(config, tmp_path / "run", *settings, ranks=2)
    assert final_state(tmp_path / "run", STEPS) == final_state(tmp_path / "whole", STEPS)


@needs("report")
@pytest.mark.full
def test_a_signal_to_a_waiting_rank_does_not_end_a_finished_run(tmp_path, config):
    run = Background(config, tmp_path / "run", "log.report=true", ranks=2, cold=True)
    run.wait_for_step(12)
    first, second = run.trainers()
    deadline = time.monotonic() + 240
    while lines_of(tmp_path / "run")[-1]["kind"] != "end":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with stopped([first]):  # stop rank 0 while it writes the report
        time.sleep(1)  # by then, the other rank has finished its work and is waiting for rank 0
        os.kill(second, signal.SIGTERM)
        while _pending(second):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    output = run.end()
    assert run.process.returncode == 0, output
    assert (tmp_path / "run" / "report" / "index.html").exists()


@pytest.mark.parametrize("begins_with", ["metrics.jsonl", "checkpoints/step_00000002"])
def test_a_killed_rank_does_not_ask_the_batch_script_for_a_requeue(tmp_path, config, begins_with):
    """torchrun sends SIGTERM to the other rank. A job whose attempts all run out of memory would
    otherwise be queued again forever."""
    run_dir = tmp_path / "run"
    run = Background(config, run_dir, "train.steps=5000", "checkpoint.every_steps=2", ranks=2)
    deadline = time.monotonic() + 240
    while not (run_dir / begins_with).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(run.workers()[1], signal.SIGKILL)
    output = run.end()
    assert run.process.returncode != 0
    assert not (run_dir / "stopped_early").exists(), output


def _pending(pid: int) -> int:
    """Return the pending signals of a process, or 0 if the process has exited."""
    lines = status_of(pid)
    return int(lines.get("SigPnd", "0"), 16) | int(lines.get("ShdPnd", "0"), 16)


START = "."  # exists from the start
FIRST_STEP = "run/metrics.jsonl"


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


def test_paths_on_a_host_are_not_treated_as_different_settings():
    def hash_of(rate: float, place: str) -> str:
        data = {"root": place, "sources": [{"root": f"{place}/more"}]}
        return settings_sha256({"optim": {"lr": rate}, "data": data})

    assert hash_of(0.1, "/local/a") == hash_of(0.1, "/local/b")
    assert hash_of(0.1, "/local/a") != hash_of(0.2, "/local/a")
