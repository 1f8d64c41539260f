"""Numbers of the page whose record lacks some, or whose run was killed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from processes import write_config

from vit.config.io import load_config
from vit.report import facts
from vit.report.history import read_history
from vit.report.page import make_report
from vit.report.source import ReportSource

PLAN = {"world_size": 1, "micro_batch_size": 12, "accumulation_steps": 1}
START = {"kind": "start", "step": 0, "time": 1e9, "restarts": 0, "plan": PLAN}
EVALUATION = {"kind": "eval", "step": 4, "time": 1e9, "num_images": 23, "loss": 1.0}


def record(folder: Path, *lines: dict) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def train_line(step: int) -> dict:
    return {"kind": "train", "step": step, "time": 1e9, "images_per_s": 6.0, "data_wait_s": 1.0}


def test_images_of_a_killed_run_are_all_seen(tmp_path):
    """Killed after step 27 and its checkpoint at 25: no line has the images of steps 21 to 25."""
    resumed = {**START, "step": 25, "restarts": 1}
    path = record(tmp_path, START, train_line(10), train_line(20), resumed, train_line(30))
    found = facts.throughput(read_history(path), 12)
    assert found["num_images"] == 30 * 12
    assert found["data_wait_share"] == pytest.approx(3 / (25 * 12 / 6.0))
    assert facts.throughput(read_history(path), 0)["num_images"] is None


@pytest.mark.parametrize("plan", [None, {}, {"total_steps": 90}])
def test_a_plan_that_lacks_something(plan, shards, tmp_path):
    path = record(tmp_path, {**START, "plan": plan}, train_line(10), EVALUATION)
    make_report(tmp_path, torch.device("cpu"))
    config = load_config(write_config(tmp_path, shards)).config
    source = ReportSource(tmp_path, torch.device("cpu"))
    recipe = dict(facts.config_facts(source, config, read_history(path), plan or {}))["recipe"]
    assert recipe.startswith("batches of")


@pytest.mark.parametrize("missing", [{"top1"}, {"correct_top1"}, {"num_images"}])
def test_an_evaluation_that_lacks_something(missing, tmp_path):
    full = EVALUATION | {"top1": 50.0, "correct_top1": 11}
    lines = [full, {key: full[key] for key in full.keys() - missing} | {"step": 8}]
    evaluations = facts.evaluation_rows(read_history(record(tmp_path, START, *lines)), {})
    assert facts.headline(evaluations)["best"]["step"] == 4
    make_report(tmp_path, torch.device("cpu"))


def test_speed_of_each_gpu_and_its_share_of_the_peak_are_on_the_page(tmp_path):
    rates = {"images_per_s": 12000.0, "images_per_s_per_gpu": 3000.0, "mfu": 0.3196}
    path = record(tmp_path, START, {**train_line(10), **rates}, EVALUATION)
    found = facts.throughput(read_history(path), 12)
    assert {name: found[name] for name in rates} == rates
    page = make_report(tmp_path, torch.device("cpu")).page.read_text()
    text = re.sub(r"<[^>]+>", "", page)
    assert "12,000 images/s; 3,000 on each GPU, 32.0 % of its peak (MFU)" in text


def test_older_records_and_cpus_have_no_share_of_a_peak(tmp_path):
    record(tmp_path, START, train_line(10), {**train_line(20), "mfu": None}, EVALUATION)
    page = make_report(tmp_path, torch.device("cpu")).page.read_text()
    assert "MFU" not in page
