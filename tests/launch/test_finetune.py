"""Test fine-tuning with `launch/eval.py --finetune` on one and two ranks, after interruptions, and
for new classes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from families import Family
from processes import (
    TINY,
    as_by_another_program,
    command,
    environment,
    final_state,
    last_step,
    make_shards,
    metrics,
    run,
    train,
    write_config,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HIGHER = [setting for setting in TINY if "image_size" not in setting] + ["model.image_size=24"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, shards):
    folder = tmp_path_factory.mktemp("base")
    train(write_config(folder, shards), folder / "run", "ema.decay=null", "model.drop_path_rate=0")
    return folder / "run"


def finetune(base, folder, shards, *arguments, steps=6, ranks=0):
    config = write_config(folder, shards, "higher.yaml", steps=steps)
    return run(
        "launch/eval.py",
        "--checkpoint",
        base,
        "--finetune",
        config,
        f"run.dir={folder / 'tuned'}",
        *HIGHER,
        *arguments,
        ranks=ranks,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.full), 2])
def test_accuracy_before_at_both_sizes_and_after_and_the_paired_difference(
    ranks, base, tmp_path, shards
):
    done = finetune(base, tmp_path, shards, "--json", ranks=ranks)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    sizes = re.findall(r"23 images at (\w+)$", done.stderr, re.M)
    assert sizes == ["16x16", "24x24", "24x24"]
    plain = json.loads(run("launch/eval.py", "--checkpoint", base, "--json").stdout)
    assert result["before"] == plain
    resized = run("launch/eval.py", "--checkpoint", base, "--image-size", 24, "--json")
    assert result["before_resized"] == json.loads(resized.stdout)
    after = json.loads(run("launch/eval.py", "--checkpoint", tmp_path / "tuned", "--json").stdout)
    assert {key: result[key] for key in after} == after
    for name in ("before", "before_resized"):
        difference = result["difference"][name]
        assert (
            difference["only_second"] - difference["only_first"]
            == after["correct_top1"] - result[name]["correct_top1"]
        )
        assert difference["points"] == pytest.approx(after["top1"] - result[name]["top1"])
        assert difference["low"] <= difference["points"] <= difference["high"]
    assert "compared with the base at 16x16:" in done.stderr
    assert "compared with the base at 24x24, not trained at this size:" in done.stderr


def test_flags_are_settings_of_the_fine_tuning(base, tmp_path, shards):
    config = write_config(tmp_path, shards, "higher.yaml", steps=2)
    small = make_shards(tmp_path / "other", num_train=36, num_val=7)
    settings = [
        setting
        for setting in TINY
        if not setting.startswith(("model.image_size", "eval.batch_size"))
    ]
    flags = ["--image-size", 32, 24, "--data", small, "--batch-size", 5, "--device", "cpu"]
    done = run(
        "launch/eval.py",
        "--checkpoint",
        base,
        "--finetune",
        config,
        *flags,
        f"run.dir={tmp_path / 'tuned'}",
        *settings,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"7 images at (\w+)$", done.stdout, re.M) == ["16x16", "32x24", "32x24"]
    written = (tmp_path / "tuned" / "config.yaml").read_text()
    assert re.search(r"image_size: \[32, 24\]", written)
    assert re.search(r"batch_size: 5$", written, re.M)


def test_other_classes_get_a_new_head_and_no_accuracy_before(base, tmp_path):
    root = make_shards(tmp_path / "other", num_train=40, num_val=8, num_classes=4)
    refused = finetune(base, tmp_path, root)
    assert refused.returncode == 2
    assert (
        "the source has 3 classes, but the model has 4: for a new head set init.reset_head=true"
        in refused.stderr
    )
    done = finetune(base, tmp_path, root, "init.reset_head=true", "--json")
    assert done.returncode == 0, done.stderr
    assert "has 3 classes, but" in done.stderr
    assert "compared on the same" not in done.stderr
    result = json.loads(done.stdout)
    assert result["num_images"] == 8
    assert "before" not in result
    assert metrics(tmp_path / "tuned", "train")[0]["loss"] == pytest.approx(np.log(4), abs=1e-3), (
        "a zero head of four classes has a loss of ln 4"
    )


def test_reports_a_mistake_in_the_fine_tuning_config_before_evaluating(base, tmp_path, shards):
    done = finetune(base, tmp_path, shards, "optim.lrr=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean optim.lr?" in done.stderr


@pytest.mark.slow
def test_stopped_fine_tuning_exits_with_0_and_the_same_command_resumes(base, tmp_path, shards):
    whole = tmp_path / "whole"
    whole.mkdir()
    assert finetune(base, whole, shards, steps=60).returncode == 0
    config = write_config(tmp_path, shards, "higher.yaml", steps=60)
    line = command(
        "launch/eval.py",
        "--checkpoint",
        base,
        "--finetune",
        config,
        f"run.dir={tmp_path / 'tuned'}",
        *HIGHER,
        ranks=0,
    )
    with Family(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as family:
        while last_step(tmp_path / "tuned") < 5 and family.process.poll() is None:
            time.sleep(0.01)
        family.process.send_signal(signal.SIGTERM)
        output, _ = family.communicate(240)
    assert family.process.returncode == 0, output
    assert "run the same command to continue" in output
    assert (tmp_path / "tuned" / "stopped_early").exists()
    assert finetune(base, tmp_path, shards, steps=60).returncode == 0
    assert final_state(tmp_path / "tuned", 60) == final_state(whole / "tuned", 60), (
        "the runs must be equal bit for bit"
    )
    assert len(metrics(tmp_path / "tuned", "start")) == 2


def test_detects_a_replaced_base_under_the_same_path(base, tmp_path, shards):
    mine = tmp_path / "mine"
    shutil.copytree(base, mine)
    assert finetune(mine, tmp_path, shards, steps=2).returncode == 0
    weights = load_file(mine / "weights" / "last.safetensors")
    with safe_open(mine / "weights" / "last.safetensors", framework="pt") as file:
        metadata = as_by_another_program(file.metadata())
    save_file(
        {name: tensor + 1e-3 for name, tensor in weights.items()},
        mine / "weights" / "last.safetensors",
        metadata,
    )
    before = (tmp_path / "tuned" / "metrics.jsonl").read_bytes()
    done = finetune(mine, tmp_path, shards, steps=2)
    assert done.returncode == 2
    assert "was fine-tuned from weights that differ from" in done.stderr
    assert (tmp_path / "tuned" / "metrics.jsonl").read_bytes() == before
