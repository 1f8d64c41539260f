"""Time the data loader with and without the training step."""

from __future__ import annotations

import time

import torch

from vit.config.schema import LoaderConfig
from vit.data.loader import Loader
from vit.distributed.process_group import World
from vit.extras.planner.benchmark.step_time import LEAST_STEPS, OnStep, time_step
from vit.step import TrainStep
from vit.system.device_memory import now_s
from vit.training.run_data import RunData

ENDLESS = 10**6
"""A number of batches larger than any measurement needs."""


def time_loading(
    config: LoaderConfig,
    data: RunData,
    train_step: TrainStep,
    *,
    num_steps: int | None = None,
    seconds: float = 10.0,
    on_batch: OnStep = lambda done, total: None,
    on_step: OnStep = lambda done, total: None,
) -> dict[str, float]:
    """Time the loader alone for `seconds`, and then together with the step, using new workers.

    num_steps: the number of batches and steps. If given, `seconds` is ignored. Returns the images
    per second of all ranks, for the loader alone (including augmentation on the device) and for the
    loader with the step. Also returns the fraction of the time with the step that rank 0 spent
    waiting for data.
    """
    world = train_step.world
    with _loader(config, data, train_step) as loader:
        alone = _time_alone(loader, world, num_steps, seconds, on_batch)
    with _loader(config, data, train_step) as loader:
        began_s = 0.0

        def notice(done: int, total: int) -> None:
            nonlocal began_s
            if done == 0:
                began_s = loader.stats.wait_s
            on_step(done, total)

        times = time_step(train_step, loader, num_steps=num_steps, seconds=seconds, on_step=notice)
        waited_s = loader.stats.wait_s - began_s
    return {
        "num_workers": config.num_workers,
        "loader_images_per_s": alone,
        "together_images_per_s": times.num_steps * times.global_batch_size / times.total_s,
        "data_wait_share": min(waited_s / times.total_s, 1.0),
    }


def _loader(config: LoaderConfig, data: RunData, train_step: TrainStep) -> Loader:
    return Loader(
        data.batches,
        0,
        ENDLESS,
        num_workers=config.num_workers,
        device=train_step.world.device,
        stall_timeout_s=config.stall_timeout_s,
        on_device=train_step.augment.change_batch,
    )


def _time_alone(
    loader: Loader, world: World, num_batches: int | None, seconds: float, on_batch: OnStep
) -> float:
    """Read and discard batches, and return the images per second of all ranks."""
    num_rows = len(next(loader).labels)  # not timed, because the workers are still starting
    began_s = time.perf_counter()
    for _ in range(LEAST_STEPS):
        next(loader)
    if num_batches is None:
        fitting = int(seconds / (time.perf_counter() - began_s) * LEAST_STEPS)
        num_batches = world.broadcast_from_main(lambda: max(fitting, LEAST_STEPS))
    on_batch(0, num_batches)
    world.barrier()
    began_s = time.perf_counter()
    for done in range(1, num_batches + 1):
        next(loader)
        on_batch(done, num_batches)
    rate = num_batches * num_rows / (now_s(world.device) - began_s)
    return float(world.sum_(torch.tensor(rate, device=world.device)))
