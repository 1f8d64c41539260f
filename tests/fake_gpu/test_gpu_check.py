"""Test the parts of `make gpu-check` that need no computed values, and test out-of-memory
errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from fake_gpu import build
from processes import REPOSITORY, environment

pytestmark = pytest.mark.slow
CHECK = "benchmarks/gpu_check/check.py"


def test_three_parts_pass_and_are_written(rehearse, tmp_path):
    parts = ("slots", "waits", "memory")
    done = rehearse(CHECK, "--small", "--only", *parts, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NVIDIA H100 80GB HBM3, torch " in done.stdout
    assert "pass  the loader's slots: page-locked; 40 of 40 batches arrived" in done.stdout
    assert "pass  no step waits for the GPU: 4 steps queued without a wait" in done.stdout
    assert "pass  peak memory is the planner's: " in done.stdout
    [path] = tmp_path.glob("*-gpu-h100.json")
    assert [line["passed"] for line in json.loads(path.read_text())["promises"]] == [True] * 3
    assert "| no step waits for the GPU | kept |" in path.with_suffix(".md").read_text()


def test_graphs_are_compiled_as_planned(rehearse):
    done = rehearse(CHECK, "--small", "--only", "graphs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none later: 2 in training (2 planned), 1 in evaluation, 0 later" in done.stdout


def test_a_batch_in_another_layout_is_found(rehearse):
    done = rehearse(CHECK, "--small", "--only", "graphs", fault="another layout")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL  graphs are compiled as planned" in done.stdout
    assert "stride mismatch" in done.stderr, "torch says why it compiles again"


def test_the_search_for_the_largest_micro_batch_survives_too_little_memory(rehearse):
    done = rehearse("tests/fake_gpu/memory.py")
    assert done.returncode == 0, done.stderr
    tried = [line.split()[-2] for line in done.stderr.splitlines() if " fit?" in line]
    assert tried[0] == "1024"
    assert len(tried) > 1
    assert done.stdout.split()[-1] in tried[1:]


USE = "import torch; x = torch.zeros(8, device='cuda'); print(torch.cuda.memory_allocated())"
JOIN = "from vit.distributed.process_group import join_world; join_world('cuda'); "


@pytest.mark.usefixtures("rehearse")
def test_training_starts_without_nvml():
    """Without NVML, torch itself ends with a segmentation fault if expandable segments are
    enabled."""

    def start(code: str, **more: str) -> subprocess.CompletedProcess:
        env = environment() | build.variables(build.build(), nvml=False) | more
        return subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=REPOSITORY, capture_output=True, text=True
        )

    done = start(JOIN + USE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "512\n"
    crashed = start(USE, PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert crashed.returncode == -signal.SIGSEGV, "torch is mended: simplify _has_nvml's caller"
