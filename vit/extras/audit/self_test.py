"""Test this machine without a run: the same step many times on every rank.

Each rank trains alone, on the same synthetic batch and from the same weights, so all ranks with the
same kernels must get the same bits. A rank that differs from the majority has a fault.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from vit.checkpoint.checkpoint import named_tensors
from vit.config import io as config_io
from vit.config.schema import Config
from vit.create_step import create_train_step
from vit.data.augment.draw import draw_table, sample_keys
from vit.data.batches import Batch
from vit.data.image_format import ImageFormat
from vit.distributed.process_group import World, kernels_of
from vit.step import TrainStep
from vit.training.freeze import create_trained_model
from vit.training.loss import create_loss
from vit.training.objective import Objective
from vit.training.plan import make_plan
from vit.training.run_data import choose_settings
from vit.weights.save import bytes_of

SMALL = {
    "model": {"name": "vit_ti16", "image_size": 64, "depth": 4},
    "data": {"root": ".", "global_batch_size": 32},
    "train": {"steps": 1},
}
"""The settings of the test without a config."""
NUM_IMAGES = 2**24
"""The assumed number of training images, which decides only the learning rate of the step."""
STORED_PX = (375, 500)


def self_test(config: Config | None, world: World, times: int) -> dict[str, Any]:
    """Do the same step `times` times on this rank. Return its kernels and the hash of each result.

    config: the settings of the model and the step; None: a small fixed model.
    """
    config = config or config_io.from_dict(SMALL, "the self-test")
    # A compiled step would test the compiler too, and a teacher needs a file.
    changed = {"distill.teacher": None, "train.compile": False, "train.exact_over_ranks": False}
    create = partial(create_step, config_io.with_settings(config, changed), world)
    return {"kernels": kernels_of(world.device), "hashes": hashes_of(create, times)}


def hashes_of(create: Callable[[], tuple[TrainStep, Batch]], times: int) -> list[str]:
    """Return the sha256 of loss and state after the step of each call of `create`."""
    hashes = []
    for _ in range(times):
        step, batch = create()
        digest = hashlib.sha256(repr(step(batch, 0).read().loss).encode())
        for _, tensor in sorted(named_tensors(step).items()):
            digest.update(bytes_of(tensor).numpy().data)
        hashes.append(digest.hexdigest())
        del step, batch
    return hashes


def create_step(config: Config, world: World) -> tuple[TrainStep, Batch]:
    """Return the training step of `config` on this rank alone, and a batch of noise."""
    alone = World(0, 1, world.device)
    num_classes = config.model.num_classes or 1000
    plan, _ = make_plan(config, NUM_IMAGES, world.size)
    rows = plan.micro_batch_size
    config = config_io.with_settings(
        choose_settings(config, alone), {"data.global_batch_size": rows}
    )
    plan = replace(plan, world_size=1, global_batch_size=rows, accumulation_steps=1)
    torch.manual_seed(config.train.seed)
    model = create_trained_model(config, num_classes)
    objective = Objective(create_loss(config.loss, None, world.device))
    step = create_train_step(config, plan, num_classes, model, alone, objective)
    step.model.train()
    batch = _noise(config, rows, num_classes).to(world.device)
    return step, step.augment.change_batch(batch)


def _noise(config: Config, rows: int, num_classes: int) -> Batch:
    form = ImageFormat.from_config(config.model, config.data)
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (rows, *form.size, form.channels), generator=random)
    keys = sample_keys(config.train.seed, 0, np.arange(rows))
    heights, widths = (np.full(rows, pixels) for pixels in STORED_PX)
    return Batch(
        images.to(torch.uint8).permute(0, 3, 1, 2),
        torch.arange(rows) % num_classes,
        torch.ones(rows),
        torch.from_numpy(draw_table(config.augment, keys, widths, heights, form.size)),
        torch.arange(rows),
    )


def differing(answers: Sequence[dict[str, Any]], hosts: Sequence[str]) -> list[tuple[int, str]]:
    """Return the repetitions that differ from most others with the same kernels, with their texts.

    answers: the result of `self_test` of each rank. hosts: the host of each rank, or ().
    """
    lines = []
    for rank, answer in enumerate(answers):
        alike = [each["hashes"] for each in answers if each["kernels"] == answer["kernels"]]
        most = Counter(value for hashes in alike for value in hashes).most_common(1)[0][0]
        place = f"rank {rank}{f' on {hosts[rank]}' if hosts else ''}"
        lines += [
            (number, f"{place}: {value[:12]}, but most repetitions of this step gave {most[:12]}")
            for number, value in enumerate(answer["hashes"], 1)
            if value != most
        ]
    return lines
