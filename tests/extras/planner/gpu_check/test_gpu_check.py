"""Run a small version of `make gpu-check` on a CPU."""

from __future__ import annotations

import json

import pytest
from processes import REPOSITORY, run

SCRIPT = str(REPOSITORY / "benchmarks" / "gpu_check" / "check.py")


def test_rejects_an_unknown_part():
    done = run(SCRIPT, "--device", "cpu", "--small", "--only", "slots", "wait")
    assert done.returncode == 2
    assert (
        "error: --only wait: expected a selection of slots, equality, waits, graphs" in done.stderr
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


def test_a_failed_part_sets_the_exit_status():
    """With a time limit of zero, each part of the check times out."""
    arguments = ("--device", "cpu", "--small", "--only", "slots", "--minutes", "1e-6")
    done = run(SCRIPT, *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL  the loader's slots: not done within its 0 s" in done.stdout


@pytest.mark.slow
@pytest.mark.full
def test_runs_all_parts_at_a_small_size(tmp_path):
    arguments = ("--device", "cpu", "--small", "--minutes", "60", "--out", tmp_path)
    done = run(SCRIPT, *arguments, timeout_s=1500)
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
