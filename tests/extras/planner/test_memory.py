"""Compare a step's predicted memory with measurements and manual calculations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from augmenting import POLICIES

from vit.config.schema import Config
from vit.extras.planner.device_memory import LiveBytes
from vit.extras.planner.memory import StepMemory, augmentation_bytes, step_memory
from vit.model import create_model
from vit.training.plan import Plan
from vit.training.run_data import with_precision

MIB = 2**20
ROOT = Path(__file__).parents[3]


def config_of(**sections: dict) -> Config:
    base = {"data": {"root": "none", "global_batch_size": 16}, "train": {"steps": 1}}
    return Config.model_validate({**base, **sections})


def plan_of(micro_batch_size: int, rank_batch_size: int, world_size: int) -> Plan:
    passes = rank_batch_size // micro_batch_size
    of_steps = (1, 0, rank_batch_size * world_size, 1, 0, 1, 1)
    return Plan(world_size, rank_batch_size * world_size, micro_batch_size, passes, *of_steps)


def count(
    config: Config, num_classes: int, micro_batch: int, rank_batch: int, world_size: int
) -> StepMemory:
    plan = plan_of(micro_batch, rank_batch, world_size)
    return step_memory(with_precision(config, has_bf16=True), plan, num_classes)


SMALL = {"name": "vit_s16", "depth": 4, "image_size": 160}
STEP = """
import re, sys, torch
import numpy as np
from vit.config.schema import AugmentConfig, Config
from vit.data.augment.apply import create_augment
from vit.data.augment.table import table_layout
from vit.data.batches import Batch
from vit.model import create_model
from vit.optim.optimizer import create_optimizer
from vit.distributed.process_group import World
from vit.start.compiling import checkpoint_activations
from vit.training.loss import cross_entropy
from vit.training.objective import Objective
from vit.training.reduce import DataParallel
from vit.step import TrainStep

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

config = Config.model_validate(CONFIG)
rows, device = ROWS, torch.device("cpu")
model = create_model(config.model, num_classes=1000).train()
checkpoint_activations(model, config.train.activation_checkpointing)
step = TrainStep(
    model, create_optimizer(model, config.optim),
    create_augment(AugmentConfig(), config.data, 1000, device),
    Objective(cross_entropy), DataParallel(model, World(0, 1, device)),
    lr_at=lambda step: 1e-3, micro_batch_size=ROWS, precision=config.train.precision,
)
def batch(rows):
    columns = table_layout(AugmentConfig()).width
    return Batch(
        torch.zeros(rows, 3, 160, 160, dtype=torch.uint8), torch.zeros(rows, dtype=torch.int64),
        torch.ones(rows), torch.zeros(rows, columns), torch.arange(rows),
    )
step(batch(2), 0).read()  # what libraries allocate once
images = batch(rows)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak from here on
step(images, 1).read()
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize(
    ("precision", "checkpointing", "fields"),
    [
        pytest.param("fp32", "none", {}, marks=pytest.mark.full),
        pytest.param("bf16", "none", {}, marks=pytest.mark.full),
        pytest.param(
            *("fp32", "block", {"drop_path_rate": 0.2, "proj_drop_rate": 0.1}),
            marks=pytest.mark.full,
        ),
        pytest.param("bf16", 2, {}, marks=pytest.mark.full),
        ("fp32", "none", {"drop_path_rate": 0.5, "drop_path_form": "subset"}),
    ],
)
def test_counted_bytes_agree_with_measured_bytes_within_a_tenth(precision, checkpointing, fields):
    rows = 48
    train = {"steps": 1, "precision": precision, "activation_checkpointing": checkpointing}
    sections = {"model": {**SMALL, **fields}, "train": train, "optim": {"clip_grad_norm": 1.0}}
    config = config_of(**sections)
    counted = count(config, 1000, rows, rows, world_size=1)
    code = STEP.replace("ROWS", str(rows)).replace("CONFIG", repr(config.model_dump()))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        # Make the allocator return freed memory to the operating system immediately, so that the
        # measurement does not include earlier peaks.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    measured = int(done.stdout)
    assert counted.gradients + counted.activations == pytest.approx(measured, rel=0.1)


def test_weights_gradients_and_optimizer_state_follow_from_the_parameters():
    config = config_of(model=SMALL, train={"steps": 1}, ema={"decay": 0.9999})
    with torch.device("meta"):
        model = create_model(config.model, num_classes=1000)
    stored = sum(parameter.nbytes for parameter in model.parameters())
    memory = count(config, 1000, 8, 16, world_size=2)
    assert memory.weights == memory.gradients == memory.average == stored
    assert 2 * stored <= memory.optimizer < 2 * stored + 8 * len(list(model.parameters()))
    assert memory.batches == 3 * 16 * 3 * 160 * 160
    assert memory.total == sum(memory.__dict__.values())


def test_partial_sums_of_exact_runs_are_counted():
    """With two micro-batches per rank, each rank stores the sum, its own gradients, and two halves
    received from other ranks."""
    fields = {**SMALL, "depth": 1, "image_size": 32, "proj_drop_rate": 0.1}
    config = config_of(model=fields, train={"steps": 1, "exact_over_ranks": True})
    memory = count(config, 10, 2, 4, world_size=2)
    assert memory.gradients == 3 * memory.weights


def test_micro_batches_need_less_memory_than_one_pass():
    config = config_of(model=SMALL)
    at_once = count(config, 1000, 16, 16, world_size=2)
    in_turn = count(config, 1000, 4, 16, world_size=2)
    assert in_turn.activations < 0.4 * at_once.activations
    assert in_turn.batches == at_once.batches


def test_checkpointed_activations_are_not_counted():
    options = ("none", 2, "block")
    config = {"model": {**SMALL, "depth": 12}}
    none, half, all_blocks = (
        count(
            config_of(**config, train={"steps": 1, "activation_checkpointing": each}), 10, 8, 8, 1
        )
        for each in options
    )
    assert all_blocks.activations < 0.25 * none.activations
    assert all_blocks.activations < 0.6 * half.activations < 0.45 * none.activations


def test_gradients_count_only_if_they_exist_at_the_peak():
    """On one GPU, gradients are created while activations are being freed. With DDP, all gradients
    are stored in buckets throughout the step."""
    config = config_of(model=SMALL)
    alone = count(config, 1000, 16, 16, world_size=1)
    in_ddp = count(config, 1000, 16, 16, world_size=2)
    assert alone.gradients < in_ddp.gradients == in_ddp.weights


def test_the_copy_for_norms_counts_if_weights_exceed_activations():
    model = {"name": "vit_s16", "depth": 2, "image_size": 16}
    sections = {"model": model, "data": {"root": "none", "global_batch_size": 1}}
    without, measured = (
        count(config_of(**sections, log={"norms_every_steps": every}), 1000, 1, 1, 1)
        for every in (None, 100)
    )
    assert 0.9 * without.weights < measured.total - without.total < 1.1 * without.weights


def test_live_bytes_count_storages_and_not_views():
    with LiveBytes() as live:
        first = torch.zeros(MIB, dtype=torch.uint8)
        view = first[: MIB // 2].view(-1, 2)
        assert live.now == MIB
        del first
        assert live.now == MIB, "the view keeps the storage alive"
        second = view + 1
        assert live.now == MIB + MIB // 2 == live.peak
        del view, second
        assert live.now == 0
    assert live.peak == MIB + MIB // 2


def test_the_memory_of_a_timm_model_is_counted():
    config = config_of(model={"name": "timm/resnet18", "image_size": 64})
    memory = count(config, 10, 4, 8, world_size=1)
    assert memory.weights == pytest.approx(4 * 11.18e6, rel=0.01)
    assert memory.activations > 4 * MIB


@pytest.mark.full
def test_counting_a_large_model_allocates_no_memory():
    """Six ViT-H blocks need 10 GiB at this batch size, but counting may use at most 1 GiB."""
    huge = with_precision(config_of(model={"name": "vit_h14", "depth": 6}), has_bf16=True)
    code = f"""
import resource, re
from vit.extras.planner.memory import step_memory
from vit.config.schema import Config
from vit.training.plan import Plan
used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, -1))
config = Config.model_validate({huge.model_dump()!r})
plan = {plan_of(128, 128, 1)!r}
print(step_memory(config, plan, 1000).total)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(re.sub(r"\D", "", done.stdout)) > 10 * 2**30


AUGMENT = """
import re, torch
from augmenting import POLICIES, table_of
from vit.data.augment import apply
from vit.data.augment.apply import Augment

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

apply.CPU_VALUES = 2**40  # all images at once, as on a GPU
config = POLICIES["timm"]
augment = Augment(config, 1, (0.5,), (0.5,), torch.device("cpu"))
images = torch.full((ROWS, 3, 128, 128), 7, dtype=torch.uint8)
table = torch.from_numpy(table_of(config, ROWS, (128, 128)))
augment.change(images, table)  # what is allocated once
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak from here on
changed = augment.change(images, table)
print(status("VmHWM") - before)  # the result has no pages yet: it is written last
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.full
def test_counted_temporaries_of_the_augmentation_agree_with_measured_ones():
    rows = 256
    code = AUGMENT.replace("ROWS", str(rows))
    helpers = f"{ROOT}:{ROOT / 'tests' / 'helpers'}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": helpers},
    )
    assert done.returncode == 0, done.stderr
    counted = augmentation_bytes(POLICIES["timm"], (3, 128, 128), rows)
    assert counted > 3 * rows * 3 * 128 * 128
    assert counted == pytest.approx(int(done.stdout), rel=0.1)


def test_the_augmentation_is_part_of_the_sum_and_grows_with_its_operations():
    policies = ({}, {"randaugment_layers": 2}, {"auto_augment": "three_augment"})
    few, more, most = (count(config_of(model=SMALL, augment=it), 10, 8, 8, 1) for it in policies)
    assert few.augmentation < more.augmentation < most.augmentation
    assert most.total - few.total == most.augmentation - few.augmentation
    assert few.in_turn == more.in_turn == most.in_turn
