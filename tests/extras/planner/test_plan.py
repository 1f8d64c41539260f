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
    "compute",
    "end to end",
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
    names = [re.split(r" {2,}", line.strip())[0] for line in lines]
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
    for name in ("compute", "end_to_end"):
        hours = report["hours"][name]
        assert report["gpu_hours"][name] == pytest.approx(hours)
        assert report["cost"][name] == pytest.approx([3.5 * end for end in hours])
    assert report["end_to_end"]["low"] > 1
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
        (["--gpus", "8xH100", "--cores", "0"], "error: --cores 0.0: expected a positive number"),
        (["--gpus", "8xMine", "--peak-tflops", "300"], "give all three, or none for a GPU in the"),
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
    assert re.search(r"compute +\S+ to \S+ s, ", done.stdout), done.stdout
    assert "e+0" not in done.stdout
    assert "memory       0.0 of" not in done.stdout


@pytest.mark.full
def test_an_unknown_gpu_and_the_limits_of_a_machine_are_taken_from_flags():
    """The demo computes in fp32. In fp32, an H100 has a peak of 66.9 TFLOP/s according to its data
    sheet."""
    h100 = ("--peak-tflops", "66.9", "--bandwidth-gbs", "3352", "--memory-gib", "79.1")
    limits = ("--cores", "0.01", "--network-gbs", "100")
    known, unknown, limited = (
        json.loads(plan("--config", "configs/demo.yaml", "--json", *arguments).stdout)
        for arguments in (
            ("--gpus", "16xH100"),
            ("--gpus", "16xMine", *h100),
            ("--gpus", "16xH100", *limits),
        )
    )
    assert unknown["gpu"]["name"] == "Mine"
    assert unknown["hours"] == known["hours"]
    assert limited["hours"]["compute"] == known["hours"]["compute"]
    assert limited["hours"]["end_to_end"][0] > known["hours"]["end_to_end"][1]
    assert known["network_gbs"] > 0
