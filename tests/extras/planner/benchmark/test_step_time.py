"""Test the structure and counts of a measured step, but not its durations."""

from __future__ import annotations

import pytest
import torch

from vit.config.schema import Config
from vit.data.augment.draw import partners
from vit.data.augment.table import LAMBDA
from vit.distributed.process_group import World
from vit.extras.planner.benchmark.step_time import (
    all_reduce_times,
    create_step,
    fits_in_memory,
    largest_micro_batch,
    time_step,
)
from vit.extras.planner.benchmark.subject import synthetic_batches
from vit.extras.planner.device_memory import bytes_in_use, peak_bytes, reset_peak
from vit.training.plan import make_plan
from vit.training.step_result import StepPhase

WORLD = World(0, 1, torch.device("cpu"))
SECTIONS = {
    "model": {
        "name": "vit_ti8",
        "image_size": 16,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "drop_path_rate": 0.1,
    },
    "data": {"root": "none", "global_batch_size": 8, "micro_batch_size": 4},
    "augment": {"mixup_alpha": 0.8, "mix_group_size": 2, "randaugment_layers": 1},
    "train": {"steps": 10, "precision": "fp32"},
    "ema": {"decay": 0.9},
}


@pytest.fixture
def config() -> Config:
    return Config.model_validate(SECTIONS)


@pytest.fixture
def step(config):
    return create_step(config, make_plan(config, 64, 1)[0], 5, WORLD)


def test_synthetic_batches_are_drawn_as_the_recipe_draws_them(config):
    batches = synthetic_batches(config, 8, 5, WORLD.device)
    assert len(batches) == 4
    for batch in batches:
        assert batch.images.shape == (8, 3, 16, 16)
        assert batch.images.dtype == torch.uint8
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        assert int(batch.labels.max()) < 5
        assert batch.weights.tolist() == [1.0] * 8
        mixed = batch.table[:, LAMBDA]
        assert torch.equal(mixed, mixed[partners(config.augment, 8)]), "a pair must share a lambda"
    tables = {batch.table.numpy().tobytes() for batch in batches}
    assert len(tables) == 4, "each step must draw different operations"


def test_steps_are_counted_and_the_rate_follows_from_the_time(step, config):
    batches = synthetic_batches(config, 8, 5, WORLD.device)
    seen = []
    times = time_step(step, batches, num_steps=4, on_step=lambda *done: seen.append(done))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert times.num_steps == 4
    assert 0 < times.fastest_s <= times.step_s <= times.slowest_s
    assert times.images_per_s == pytest.approx(8 / times.step_s)
    assert time_step(step, batches, seconds=0.0).num_steps == 3, (
        "at least three steps must be timed"
    )


def test_every_part_of_a_step_is_timed_without_changing_the_step(step, config):
    batches = synthetic_batches(config, 8, 5, WORLD.device)
    before = step.mark
    parts = time_step(step, batches, num_steps=3).parts_s
    assert set(parts) == set(StepPhase)
    assert parts.pop(StepPhase.TEACHER) == 0, "the step has no teacher"
    assert all(seconds > 0 for seconds in parts.values()), parts
    assert step.mark is before
    assert all_reduce_times(step, batches) is None, "a single rank has no all-reduce"


def test_timing_takes_only_the_needed_batches_from_an_iterator(step, config):
    """Before the timed steps, there are two warm-up steps. The timing must therefore request
    exactly two more batches than timed steps from a loader."""
    batches = synthetic_batches(config, 8, 5, WORLD.device, count=6)
    stream = iter([step.augment.change_batch(batch) for batch in batches])
    assert time_step(step, stream, num_steps=4).num_steps == 4
    assert next(stream, None) is None


@pytest.mark.parametrize("limit", [0, 1, 5, 64])
@pytest.mark.parametrize("first", [1, 100])
def test_the_largest_size_is_found_from_any_first_size(limit, first, step, config):
    """The simulated GPU raises the CUDA allocator's error if a micro-batch has more than `limit`
    rows."""
    tried = []

    def make_batch(rows):
        tried.append(rows)
        if rows > 2 * limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return synthetic_batches(config, rows, 5, WORLD.device, count=1)[0]

    sizes = [2, 4, 8, 16, 32]
    expected = max((size for size in sizes if size <= limit), default=0)
    assert largest_micro_batch(step, sizes, make_batch, first) == expected
    assert len(tried) == len(set(tried)), "no size may be tried twice"
    assert step.micro_batch_size == 4
    assert step.world is WORLD
    assert all(parameter.grad is None for parameter in step.parameters)


def test_errors_that_are_not_about_memory_are_raised(step):
    def make_batch(rows):
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        fits_in_memory(step, 2, make_batch)
    assert step.micro_batch_size == 4


def test_memory_needed_beside_a_step_counts(step, config):
    def make_batch(rows):
        return synthetic_batches(config, rows, 5, WORLD.device, count=1)[0]

    assert fits_in_memory(step, 2, make_batch, beside_bytes=2**20)
    assert not fits_in_memory(step, 2, make_batch, beside_bytes=2**50)


def test_the_peak_includes_freed_memory():
    device = WORLD.device
    before = bytes_in_use(device)
    reset_peak(device)
    torch.ones(2**26).sum()
    peak = peak_bytes(device)
    if peak is not None:
        assert peak - before > 0.9 * 2**28
        reset_peak(device)
        assert peak_bytes(device) < peak
