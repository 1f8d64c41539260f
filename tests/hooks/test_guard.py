"""Test how the guard reacts to a batch with wrong labels. Depending on its settings, the guard
skips the update or stops the run."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from extras.deleted_extras import needs
from PIL import Image
from processes import (
    TINY,
    final_state,
    last_checkpoint,
    metrics,
    run,
    run_here,
    train,
    write_config,
)
from scipy.stats import median_abs_deviation
from small_shards import write_tar

from data_prep import index
from vit.checkpoint.state import RunState
from vit.config.io import load_config
from vit.config.schema import Config
from vit.data.batches import TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.order import make_order
from vit.data.storage.opening import open_split
from vit.distributed.process_group import World
from vit.hooks.guard import GuardHook, limit_of
from vit.loggers.record import Record
from vit.training.plan import make_plan
from vit.training.step_result import NON_FINITE, SPIKE, StepValues

STEPS = 24
BAD_STEP = 16
"""The step of the batch with wrong labels, counted from 0."""
BATCH = 12
SAVED_BEFORE = 12
"""The step of the newest checkpoint before the batch with wrong labels."""
SKIP = "guard.on_spike=skip"
SETTINGS = (
    *("augment.mixup_alpha=0", "augment.cutmix_alpha=0", "augment.mix_group_size=4"),
    "model.drop_path_rate=0",
    *("optim.lr=0.003", "eval.every_steps=10", f"checkpoint.every_steps={SAVED_BEFORE // 2}"),
    *("guard.window_steps=8", "guard.spike_sigmas=5"),
    "checkpoint.keep_last=9",
)


ONE = World(0, 1, torch.device("cpu"))
NOT_EXACT = SimpleNamespace(exact=False)
NOTHING = np.zeros(0, np.float32)
NO_REPORTS = np.zeros((1, 1), np.float32)


def values_of(loss: float, grad_norm: float, verdict: int = 0) -> StepValues:
    return StepValues(loss, grad_norm, 0.0, 0, verdict, NO_REPORTS, NOTHING, NOTHING, None)


def guard_of(config: Path, folder: Path, state: RunState, *settings: str) -> GuardHook:
    loaded = load_config(config, [*TINY, *settings])
    return begun(loaded, state, Record(folder, loaded.log, False, total_steps=99))


def begun(config: Config, state: RunState, record: Record, batches: Any = NOT_EXACT) -> GuardHook:
    guard = GuardHook(config)
    run: Any = SimpleNamespace(
        config=config, state=state, world=ONE, record=record, batches=batches
    )
    guard.begin(run)
    return guard


def test_limits_use_the_same_median_and_deviation_as_scipy(config, tmp_path):
    losses = np.random.default_rng(0).normal(3, 0.1, 60)
    settings = ("guard.on_spike=skip", "guard.window_steps=16", "guard.spike_sigmas=4")
    state = RunState()
    guard = guard_of(config, tmp_path, state, *settings)
    for step in range(60):
        late = guard.loss_limit(step)
        if step >= 2:
            guard.read(step - 1, values_of(losses[step - 1], 1.0))
            # After a pause, the guard has read one more step, but the limit must not change.
            assert guard.loss_limit(step) == late
        else:
            guard.read(0, values_of(losses[0], 1.0)) if step else None
        if step < 17:
            assert late is None
            continue
        window = losses[step - 17 : step - 1]
        deviation = median_abs_deviation(window, scale="normal")
        assert late == pytest.approx(np.median(window) + 4 * deviation, rel=1e-4)
    again = guard_of(config, tmp_path, RunState(**json.loads(json.dumps(asdict(state)))), *settings)
    assert again.loss_limit(60) == guard.loss_limit(60), (
        "saving and loading a checkpoint must not change the limit"
    )
    assert limit_of((2.0,) * 9 + (3.0,) * 7, 4.0) == math.inf, (
        "a window of mostly equal losses must give no limit, because its deviation is zero"
    )


def test_the_window_restarts_when_the_image_size_changes(config, shards, tmp_path):
    """The loss jumps when the image size changes. If the guard still used the limits for smaller
    images, it would skip every later update."""
    settings = ("guard.on_spike=skip", "guard.window_steps=8")
    loaded = load_config(config, [*TINY, *settings])
    split = open_split(shards, "train")
    order = make_order(split.num_samples, BATCH, seed=0)
    border = 3 * order.steps_per_epoch
    form = ImageFormat((16, 16), stages=((3, (8, 8)),))
    batches = TrainBatches(split, order, loaded.augment, form)
    record = Record(tmp_path, loaded.log, False, total_steps=99)
    guard = begun(loaded, RunState(), record, batches)
    for step in range(border + 12):
        of_this_size = step if step < border else step - border
        # At this point, the guard has read seven of the eight steps in the window.
        assert (guard.loss_limit(step) is not None) == (of_this_size >= 9), step
        guard.read(step, values_of(float(step >= border) + 0.01 * (step % 3), 1.0))


NAN = math.nan
ONCE = ["guard.max_skips=1"]
OVERFLOW = (0.7, math.inf, NON_FINITE)


@pytest.mark.parametrize(
    ("precision", "settings", "values", "expected"),
    [
        ("fp32", [], (NAN, NAN, NON_FINITE), "none"),
        ("fp32", ["guard.on_nonfinite=stop"], (NAN, NAN, NON_FINITE), "guard.on_nonfinite=stop"),
        ("fp16", ["guard.on_nonfinite=stop"], OVERFLOW, "none"),
        ("fp16", ["guard.on_nonfinite=stop"], (NAN, NAN, NON_FINITE), "guard.on_nonfinite=stop"),
        ("fp16", ["guard.on_nonfinite=stop", *ONCE], OVERFLOW, "1 times in"),
        ("fp32", ["guard.on_spike=skip"], (9.0, 1.0, SPIKE), "none"),
        ("fp32", ["guard.on_spike=skip", *ONCE], (9.0, 1, SPIKE), "a spike"),
        ("fp32", ["guard.on_spike=stop"], (9.0, 1.0, SPIKE), "guard.on_spike=stop"),
        ("fp32", ONCE, (NAN, NAN, NON_FINITE), "Lower optim.lr or lengthen the warm-up; the last"),
        ("fp16", ONCE, (NAN, NAN, NON_FINITE), "or use train.precision=bf16; the last"),
    ],
)
def test_actions_after_each_verdict(precision, settings, values, expected, config, tmp_path):
    state = RunState()
    guard = guard_of(config, tmp_path, state, *settings, f"train.precision={precision}")
    problem = guard.read(7, values_of(*values))
    assert state.updates_skipped == state.updates_skipped_in_a_row == 1
    assert expected in str(problem).replace("None", "none")
    assert guard.read(8, values_of(1.0, 1.0)) is None
    assert (state.updates_skipped, state.updates_skipped_in_a_row) == (1, 0)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a config for a run of one epoch. The class of an image determines its color, except in
    one batch with wrong labels."""
    folder = tmp_path_factory.mktemp("planted")
    root = folder / "shards"
    root.mkdir()
    config = write_config(folder, root, steps=STEPS, batch=BATCH)
    order = make_plan(load_config(config, TINY), STEPS * BATCH, 1)[1]
    wrong = set(order.rows(BAD_STEP, 0, BATCH).tolist())
    rng = np.random.default_rng(0)
    for split, total in (("train", STEPS * BATCH), ("val", 12)):
        members = []
        for number in range(total):
            label = number % 3
            pixels = np.clip(rng.normal(40 + 80 * label, 20, (20, 20, 3)), 0, 255).astype(np.uint8)
            encoded = io.BytesIO()
            Image.fromarray(pixels).save(encoded, "JPEG")
            if split == "train" and number in wrong:
                label = (label + 1) % 3
            members += [(f"{number:04d}.jpg", encoded.getvalue())]
            members += [(f"{number:04d}.cls", str(label).encode())]
        write_tar(root / f"{split}-0000.tar", members)
    assert index.main([str(root)]) == 0
    return config


@pytest.fixture(scope="module")
def finished(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(planted, folder, *SETTINGS, SKIP)
    return folder


def test_a_run_skips_only_the_update_of_the_spike(finished):
    (line,) = metrics(finished, "fault")
    assert (line["step"], line["action"]) == (BAD_STEP + 1, "skip")
    assert line["loss"] > line["loss_limit"]
    assert len(line["samples"]) == 8
    assert metrics(finished, "train")[-1]["updates_skipped"] == 1


@needs("report")
def test_the_recorded_samples_are_those_of_the_batch(finished):
    (line,) = metrics(finished, "fault")
    run_here("launch/replay.py", finished, "--step", line["step"], "--csv", finished / "b.csv")
    with (finished / "b.csv").open() as file:
        keys = {row["key"] for row in csv.DictReader(file)}
    named = {key for key, _ in line["samples"]}
    assert named <= keys
    losses = [loss for _, loss in line["samples"]]
    assert losses == sorted(losses, reverse=True)


def test_a_resumed_run_skips_the_same_update(finished, planted, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > SAVED_BEFORE:
            shutil.rmtree(folder)
    train(planted, tmp_path / "run", *SETTINGS, SKIP)
    assert [line["step"] for line in metrics(tmp_path / "run", "start")] == [0, SAVED_BEFORE]
    (of_first, of_second) = metrics(tmp_path / "run", "fault")
    assert of_second | {"time": 0} == of_first | {"time": 0}
    assert final_state(finished, STEPS) == final_state(tmp_path / "run", STEPS)


@pytest.mark.full
def test_a_run_stops_before_the_update_and_resumes_with_another_action(planted, tmp_path):
    arguments = ("launch/train.py", "--config", planted, f"run.dir={tmp_path / 'run'}", *TINY)
    done = run(*arguments, *SETTINGS, "guard.on_spike=stop")
    assert done.returncode == 2
    assert f"step {BAD_STEP + 1}: loss above the limit" in done.stderr
    assert "guard.on_spike=stop" in done.stderr
    assert last_checkpoint(tmp_path / "run") == SAVED_BEFORE
    train(planted, tmp_path / "run", *SETTINGS, SKIP)
