"""Run a small version of `make gpu-check` on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import check
import pytest
import torch
from processes import REPOSITORY, run

SCRIPT = str(REPOSITORY / "benchmarks" / "gpu_check" / "check.py")
CPU = ("--device", "cpu", "--small")


def promises_in(folder: Path) -> list[dict]:
    [path] = folder.glob("*.json")
    return json.loads(path.read_text())["promises"]


def test_rejects_an_unknown_part():
    done = run(SCRIPT, "--device", "cpu", "--small", "--only", "slots", "wait")
    assert done.returncode == 2
    assert (
        "error: --only wait: expected a selection of vit_b16, slots, waits, graphs" in done.stderr
    )


def test_prints_a_line_for_each_part_and_does_not_name_files_after_a_gpu(tmp_path):
    arguments = ("--device", "cpu", "--small", "--only", "slots", "waits", "--out", tmp_path)
    done = run(SCRIPT, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "thread(s)), torch " in lines[0]
    assert lines[1].startswith("pass  the loader's slots: ")
    assert lines[2].startswith("  -   no step waits for the GPU: ")
    assert lines[-1].startswith("1 guarantees hold, 0 do not, in ")
    [path] = tmp_path.glob("*.json")
    assert "-gpu-" not in path.name, (
        "the name must not contain -gpu-, because the planner reads such files"
    )
    document = json.loads(path.read_text())
    assert [line["passed"] for line in document["promises"]] == [True, None]
    assert "| the loader's slots | kept |" in path.with_suffix(".md").read_text()


def test_a_broken_guarantee_sets_the_exit_status_after_the_other_results_were_written(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(f"""
import sys
sys.path.insert(0, {str(Path(SCRIPT).parent)!r})
import check
from gpu_check_lines import Line
good = check.GpuCheck("slots", "good", 60, lambda: [Line("good", True, "")])
broken = check.GpuCheck("waits", "broken", 60, lambda: [Line("broken", False, "")])
check.parts = lambda *arguments: [good, broken]
check.main()
""")
    done = run(str(script), *CPU, "--out", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 guarantees hold, 1 do not" in done.stdout
    assert [line["passed"] for line in promises_in(tmp_path)] == [True, False]


def test_a_part_without_time_is_not_run_and_breaks_nothing(tmp_path):
    run(SCRIPT, *CPU, "--only", "slots", "--out", tmp_path)
    done = run(SCRIPT, *CPU, "--only", "waits", "memory", "--minutes", "1e-6", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  -   no step waits: not run, because no time was left" in done.stdout
    assert "0 guarantees hold, 0 do not" in done.stdout
    assert "2 parts were not run (no step waits, peak memory is the planner's)" in done.stdout
    # The results of an earlier call are kept.
    assert [line["passed"] for line in promises_in(tmp_path)] == [True, None, None]
    # A later call replaces the line of a part that did not finish.
    run(SCRIPT, *CPU, "--only", "waits", "--out", tmp_path)
    assert [line["what"] for line in promises_in(tmp_path)] == [
        "the loader's slots",
        "peak memory is the planner's",
        "no step waits for the GPU",
    ]


def test_a_signal_ends_the_part_that_runs_and_keeps_its_lines(tmp_path):
    script = tmp_path / "stopped.py"
    script.write_text(f"""
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(SCRIPT).parent)!r})
import check
from gpu_check_lines import Line
def endless():
    Path("part.pid").write_text(str(os.getpid()))
    yield Line("good", True, "")
    time.sleep(3600)
take = check._take
def take_and_stop(lines, line):
    take(lines, line)
    os.kill(os.getpid(), signal.SIGTERM)
check._take = take_and_stop
check.parts = lambda *arguments: [check.GpuCheck("slots", "endless", 3600, endless)]
check.run_command(check.main)
""")
    done = run(str(script), *CPU, "--out", tmp_path, cwd=tmp_path)
    assert done.returncode == 143, done.stdout + done.stderr
    assert "ended by SIGTERM" in done.stderr
    assert not Path("/proc", (tmp_path / "part.pid").read_text()).exists()
    assert [line["what"] for line in promises_in(tmp_path)] == ["good"]


def test_speed_comes_first_and_kills_last():
    names = [part.name for part in check.parts(torch.device("cuda"), False, Path("unused"), 2)]
    assert names[0] == "vit_b16"
    assert names[-3:] == ["pauses", "resume", "ranks"]
    assert sorted(names) == sorted(check.ORDER)


@pytest.mark.slow
@pytest.mark.full
def test_runs_all_parts_at_a_small_size(tmp_path):
    arguments = ("--device", "cpu", "--small", "--minutes", "60", "--out", tmp_path)
    # Cold, because the script stops a rank, and a SIGSTOP would not reach the fork of a warm Python.
    done = run(SCRIPT, *arguments, timeout_s=1500, cold=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "pass  kill -9 and resume, with train.deterministic: equal bit for bit (1 restart)",
        "pass  a killed rank ends the 1 other(s): after ",
        "  -   2 ranks against 1: ",
        "  -   a save stops training: for ",
    ):
        assert f"\n{line}" in done.stdout, line
    [path] = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["training"]
