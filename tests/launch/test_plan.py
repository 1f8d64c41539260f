"""`launch/plan.py` as people call it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from processes import run

ROOT = Path(__file__).parents[2]
TOPICS = [
    "data",
    "steps",
    "memory",
    "micro-batch",
    "speed",
    "time",
    "cores",
    "host",
    "disk",
    "cost",
]


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    return run("launch/plan.py", *words)


def test_every_question_has_a_line():
    words = ("--config", "configs/vit_l16.yaml", "--gpus", "8xRTX-4090", "model.depth=12")
    done = plan(*words, "--price", "2")
    assert done.returncode == 0, done.stderr
    title, *lines = done.stdout.splitlines()
    assert title.startswith("vit_l16 on 8 x RTX-4090 (bf16: peak 165 TFLOP/s")
    names = [line.split()[0] for line in lines]
    assert names == TOPICS
    assert "DOES NOT FIT" in done.stdout, done.stdout
    largest = int(re.search(r"data\.micro_batch_size=(\d+)", done.stdout)[1])
    fits = plan(*words, f"data.micro_batch_size={largest}")
    assert "DOES NOT FIT" not in fits.stdout
    assert f"{largest} is the largest that fits" in fits.stdout


def test_json_has_the_same_numbers():
    done = plan("--config", "configs/demo.yaml", "--gpus", "H100", "--price", "3.5", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"]
    assert found["cost"] == pytest.approx([3.5 * hours for hours in found["gpu_hours"]])
    parts = {name: value for name, value in found["memory_bytes"].items() if name != "total"}
    assert sum(parts.values()) == found["memory_bytes"]["total"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8xH300"], "error: 'H300' is not in the table of GPUs"),
        (["--gpus", "none"], "error: 'none' is not in the table of GPUs"),
        (["--gpus", "13xH100"], "error: data.global_batch_size=4096 is not a multiple of 13 ranks"),
        (["--gpus", "8xH100", "--price", "-2"], "error: --price -2.0: expected the cost of one"),
        (["--gpus", "8xH100", "--price", "nan"], "error: --price nan: expected the cost of one"),
        ([], "--gpus"),
    ],
)
def test_mistakes_are_one_line(words, message):
    done = plan("--config", "configs/vit_b16.yaml", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_small_run_is_told_in_seconds_and_whole_numbers():
    done = plan("--config", "configs/demo.yaml", "--gpus", "8xH200", "train.steps=100")
    assert re.search(r"time +\S+ to \S+ s, ", done.stdout), done.stdout
    assert "e+0" not in done.stdout
    assert "memory       0.0 of" not in done.stdout
