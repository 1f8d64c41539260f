from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from processes import run

ROOT = Path(__file__).parents[3]
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


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("launch/plan.py", *arguments)


def test_answers_every_question_in_a_line():
    arguments = ("--config", "configs/vit_l16.yaml", "--gpus", "8xRTX-4090", "model.depth=12")
    done = plan(*arguments, "--price", "2")
    assert done.returncode == 0, done.stderr
    title, *lines = done.stdout.splitlines()
    assert title.startswith("vit_l16 on 8 x RTX-4090 (bf16: peak 165 TFLOP/s")
    names = [line.split()[0] for line in lines]
    assert names == TOPICS
    assert "DOES NOT FIT" in done.stdout, done.stdout
    largest = int(re.search(r"data\.micro_batch_size=(\d+)", done.stdout)[1])
    fits = plan(*arguments, f"data.micro_batch_size={largest}")
    assert "DOES NOT FIT" not in fits.stdout
    assert f"{largest} is the largest that fits" in fits.stdout


def test_json_has_the_same_numbers():
    done = plan("--config", "configs/demo.yaml", "--gpus", "H100", "--price", "3.5", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["fits"]
    assert report["cost"] == pytest.approx([3.5 * hours for hours in report["gpu_hours"]])
    parts = {name: value for name, value in report["memory_bytes"].items() if name != "total"}
    assert sum(parts.values()) == report["memory_bytes"]["total"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8xH300"], "error: 'H300' is not a known GPU"),
        (["--gpus", "none"], "error: 'none' is not a known GPU"),
        (["--gpus", "13xH100"], "error: data.global_batch_size=4096 is not a multiple of 13 ranks"),
        (["--gpus", "8xH100", "--price", "-2"], "error: --price -2.0: expected the hourly cost"),
        (["--gpus", "8xH100", "--price", "nan"], "error: --price nan: expected the hourly cost"),
        ([], "--gpus"),
    ],
)
def test_reports_a_mistake_in_one_line(arguments, message):
    done = plan("--config", "configs/vit_b16.yaml", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_describes_a_small_run_in_seconds_and_whole_numbers():
    done = plan("--config", "configs/demo.yaml", "--gpus", "8xH200", "train.steps=100")
    assert re.search(r"time +\S+ to \S+ s, ", done.stdout), done.stdout
    assert "e+0" not in done.stdout
    assert "memory       0.0 of" not in done.stdout
