"""Test the estimate of the required disk space that a run makes before it starts."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import TINY

from vit.compose import build_run
from vit.config.io import load_config
from vit.config.schema import Config
from vit.distributed.process_group import World
from vit.start.needs import DiskNeeds, disk_needs
from vit.start.preflight import check_disk
from vit.train import train as train_run
from vit.training.plan import Plan, make_plan

GIB = 2**30


def room_of(config: Config, plan: Plan) -> DiskNeeds:
    return disk_needs(config, plan, 3)


def tiny(path: Path, *overrides: str) -> Config:
    return load_config(path, [*TINY, *overrides])


GUEST = ("model.name=timm/resnet10t", "model.image_size=32")


@pytest.mark.parametrize(
    "overrides",
    [
        TINY,
        (*TINY, "ema.decay=null"),
        (*TINY, "optim.name=sgd"),
        (*TINY, "optim.name=sgd", "optim.momentum=0", "ema.decay=null"),
        (*(line for line in TINY if not line.startswith("model.")), *GUEST),
    ],
    ids=["AdamW", "no average", "momentum", "nothing", "buffers"],
)
def test_estimates_the_disk_space_of_a_run_before_it_is_built(overrides, shards, tmp_path):
    path = tmp_path / "config.yaml"
    folder = tmp_path / "run"
    path.write_text(
        f"data: {{root: {shards}, global_batch_size: 12}}\ntrain: {{}}\nema: {{decay: 0.9}}\n"
    )
    once = ("train.epochs=null", "train.steps=1", "eval.every_steps=1", f"run.dir={folder}")
    settings = load_config(path, [*overrides, *once])
    plan, _ = make_plan(settings, 60, 1)
    needs = room_of(settings, plan)
    train_run(build_run(settings, World(0, 1, torch.device("cpu"))))
    assert needs.num_checkpoints == 1
    for expected, pattern in (
        (needs.checkpoint_bytes, "checkpoints/step_*/*"),
        (needs.weights_bytes, "weights/*"),
    ):
        # Some of these files are symbolic links, which must not be followed.
        saved_bytes = sum(file.lstat().st_size for file in folder.glob(pattern))
        assert expected == pytest.approx(saved_bytes, rel=0.02, abs=20_000)
    losses = [file.stat().st_size for file in folder.glob("samples/*")]
    assert needs.samples_bytes == sum(losses) > 0


@pytest.mark.parametrize(
    ("settings", "num_epochs"),
    [((), 3), (("log.sample_losses=2",), 1), (("log.sample_losses=0",), 0)],
)
def test_losses_of_images_are_counted_for_each_started_epoch(config, settings, num_epochs):
    """With 60 images and batches of 12, an epoch has 5 steps. The third epoch is incomplete."""
    run_config = tiny(config, "train.epochs=null", "train.steps=11", *settings)
    plan, _ = make_plan(run_config, 60, 1)
    assert plan.steps_per_epoch == 5
    needs = room_of(run_config, plan)
    header = len(_npy(np.zeros((5, 2, 12), np.float16))) - 5 * 12 * 4
    assert needs.samples_bytes == num_epochs * (5 * 12 * 4 + header)
    assert needs.total_bytes - needs.samples_bytes == (
        needs.num_checkpoints * needs.checkpoint_bytes + needs.weights_bytes
    )


def _npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def test_counts_the_checkpoints_that_exist_at_the_same_time(config):
    for steps, num_kept, expected in ((12, 2, 3), (6, 2, 2), (3, 5, 1), (12, 1, 2)):
        settings = tiny(config, f"train.steps={steps}", f"checkpoint.keep_last={num_kept}")
        plan, _ = make_plan(settings, 60, 1)
        assert room_of(settings, plan).num_checkpoints == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("checkpoint.keep_every=2",), 3),
        (("checkpoint.keep_every=1",), 4),
        (("checkpoint.keep_every=9",), 2),
    ],
)
def test_counts_the_checkpoints_of_keep_every(config, settings, expected):
    """The run saves checkpoints at steps 3, 6, 9 and 12."""
    settings = tiny(config, "checkpoint.keep_last=1", *settings)
    plan, _ = make_plan(settings, 60, 1)
    assert room_of(settings, plan).num_checkpoints == expected


def test_a_resumed_run_needs_no_space_for_its_saved_files(config, tmp_path):
    """If all checkpoints and weights that the run will keep already exist, only one more checkpoint
    needs space."""
    settings = tiny(config)
    plan, _ = make_plan(settings, 60, 1)
    needs = room_of(settings, plan)
    empty = check_disk(needs, tmp_path / "run", 2)
    for number in range(2):
        state = tmp_path / "run" / "checkpoints" / f"step_{number}" / "state.safetensors"
        state.parent.mkdir(parents=True)
        state.write_bytes(bytes(needs.checkpoint_bytes))
    (tmp_path / "run" / "weights").mkdir()
    (tmp_path / "run" / "weights" / "last.safetensors").write_bytes(bytes(needs.weights_bytes))
    later = check_disk(needs, tmp_path / "run", 2)
    for estimate, expected in ((empty, needs.total_bytes), (later, needs.checkpoint_bytes)):
        assert estimate.record["needed_disk_gib"] == round(expected / GIB, 4)
    [line] = empty.lines
    assert line.startswith(f"disk: 3 checkpoint(s) of {needs.checkpoint_bytes / 2**20:.1f} MiB")
