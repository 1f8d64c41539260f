"""Test that the numbers on the page are correct even for incomplete metrics and killed runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from processes import write_config

from vit.config import io as config_io
from vit.config.io import load_config
from vit.extras.report import facts
from vit.extras.report.history import read_history
from vit.extras.report.page import make_report
from vit.extras.report.source import ReportSource

PLAN = {"global_batch_size": 12}
START = {"kind": "start", "step": 0, "time": 1e9, "restarts": 0, "plan": PLAN}
EVALUATION = {"kind": "eval", "step": 4, "time": 1e9, "num_images": 23, "loss": 1.0}


def record(folder: Path, *lines: dict) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def train_line(step: int) -> dict:
    return {"kind": "train", "step": step, "time": 1e9, "images_per_s": 6.0, "data_wait_s": 1.0}


def test_all_images_of_a_killed_run_are_counted(tmp_path):
    """The run was killed after step 27 and has a checkpoint at step 25. The metrics do not contain
    a line for the images of steps 21 to 25."""
    resumed = {**START, "step": 25, "restarts": 1}
    path = record(tmp_path, START, train_line(10), train_line(20), resumed, train_line(30))
    throughput = facts.throughput(read_history(path), 12)
    assert throughput["num_images"] == 30 * 12
    assert throughput["data_wait_share"] == pytest.approx(3 / (25 * 12 / 6.0))
    assert facts.throughput(read_history(path), 0)["num_images"] is None


@pytest.mark.parametrize("plan", [None, {}, {"total_steps": 90}])
def test_an_incomplete_plan_is_shown(plan, shards, tmp_path):
    record(tmp_path, {**START, "plan": plan}, train_line(10), EVALUATION)
    make_report(tmp_path, torch.device("cpu"))
    config = load_config(write_config(tmp_path, shards))
    source = ReportSource(tmp_path, torch.device("cpu"))
    recipe = dict(facts.config_facts(source, config, plan or {}))["recipe"]
    assert recipe.startswith("batches of")


def test_the_page_states_the_teacher(shards, tmp_path):
    settings = ["distill.teacher=t.pth", "distill.distill_type=soft", "distill.temperature=2"]
    config = load_config(write_config(tmp_path, shards), settings)
    source = ReportSource(tmp_path, torch.device("cpu"))
    assert dict(facts.config_facts(source, config, {}))["teacher"] == "t.pth; soft targets"


@pytest.mark.parametrize("missing", [{"top1"}, {"correct_top1"}, {"num_images"}])
def test_an_incomplete_evaluation_is_shown(missing, tmp_path):
    full = EVALUATION | {"top1": 50.0, "correct_top1": 11}
    lines = [full, {key: full[key] for key in full.keys() - missing} | {"step": 8}]
    evaluations = facts.evaluation_rows(read_history(record(tmp_path, START, *lines)), {})
    assert facts.headline(evaluations)["best"]["step"] == 4
    make_report(tmp_path, torch.device("cpu"))


def test_the_page_states_the_speed_per_gpu_and_its_share_of_the_peak(tmp_path):
    rates = {"images_per_s": 12000.0, "images_per_s_per_gpu": 3000.0, "mfu": 0.3196}
    path = record(tmp_path, START, {**train_line(10), **rates}, EVALUATION)
    throughput = facts.throughput(read_history(path), 12)
    assert {name: throughput[name] for name in rates} == rates
    page = make_report(tmp_path, torch.device("cpu")).page.read_text()
    text = re.sub(r"<[^>]+>", "", page)
    assert "12,000 images/s; 3,000 on each GPU, 32.0 % of its peak (MFU)" in text


def test_older_records_and_cpus_have_no_share_of_a_peak(tmp_path):
    record(tmp_path, START, train_line(10), {**train_line(20), "mfu": None}, EVALUATION)
    page = make_report(tmp_path, torch.device("cpu")).page.read_text()
    assert "MFU" not in page


def shown(folder: Path, *lines: dict) -> str:
    """Return the text of the page for a run that has only metrics."""
    record(folder, START, *lines)
    html = make_report(folder, torch.device("cpu")).page.read_text()
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", html))


@pytest.mark.parametrize(("limit", "shown_limit"), [(2.5, "; loss limit 2.5"), (None, "")])
def test_a_spike_and_the_limit_are_listed(limit, shown_limit, tmp_path):
    spike = {"reason": "loss above the limit", "loss": 7.5, "grad_norm": 1.0, "loss_limit": limit}
    line = {"kind": "fault", "step": 6, "time": 1e9 + 5, "action": "skip", **spike}
    text = shown(tmp_path, line, train_line(10))
    assert f"loss above the limit (loss 7.5; gradient norm 1{shown_limit})" in text, (
        "a missing limit must not be shown as a limit that is not finite"
    )


def test_checkpoints_are_listed_with_their_hashes(tmp_path):
    saved = [
        {"kind": "checkpoint", "step": step, "time": 1e9, "sha256": f"{step:064x}"}
        for step in range(1, 8)
    ]
    listed = shown(tmp_path, train_line(10), *saved).partition("Checkpoints")[2]
    assert [listed.count(line["sha256"]) for line in saved] == [1, 1, 2, 2, 2, 2, 2]
    assert "All 7" in listed
    assert "With train.exact_over_ranks" not in listed
    assert "Checkpoints" not in shown(tmp_path, train_line(10))


def test_a_run_with_excluded_images_names_the_run_that_it_otherwise_equals(shards, tmp_path):
    changed = f"data.exclude={tmp_path / 'list.txt'}"
    runs = {
        "a_other": ["optim.lr=0.5"],
        "b_first": [],
        "c_without": [changed],
        "d_other": [changed, "train.seed=3"],
    }
    configs = {}
    for name, settings in runs.items():
        run_dir = tmp_path / name
        run_dir.mkdir()
        recipe = write_config(run_dir, shards)
        settings = [*settings, f"run.dir={run_dir}"]
        configs[name] = load_config(recipe, settings)
        values = config_io.to_dict(configs[name])
        (run_dir / "config.yaml").write_text(config_io.dump_yaml(values))
        record(run_dir, {**START, "chosen": "60 samples, 1,234 changed (0123456789abcdef)"})

    def twin(name: str) -> list[tuple[str, str]]:
        history = read_history(tmp_path / name / "metrics.jsonl")
        return facts.twin_facts(history, tmp_path / name, configs[name])

    images = "1,234 excluded or relabeled images"
    assert twin("c_without") == [("equal to", f"b_first, but for {images}")]
    assert twin("d_other") == []
