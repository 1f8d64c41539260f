"""Test this machine: every rank does the same step of a small model several times.

Each rank trains alone, on the same synthetic batch and from the same weights, so all ranks with the
same kernels must get the same bits. A rank that differs from the majority has a fault.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from vit.checkpoint.checkpoint import named_tensors
from vit.config import io as config_io
from vit.config.schema import Config
from vit.data.augment.draw import draw_table, sample_keys
from vit.data.batches import Batch
from vit.data.image_format import ImageFormat
from vit.distributed.process_group import World, kernels_of
from vit.start.create_step import create_train_step
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
    "train": {"steps": 1, "compile": False},  # a compiled step would test the compiler too
}
"""The settings of the step."""
NUM_CLASSES = 1000
NUM_IMAGES = 2**24
"""The assumed number of training images, which decides only the learning rate of the step."""
STORED_PX = (375, 500)


def repeat_step(world: World, times: int) -> dict[str, Any]:
    """Repeat one step on this rank. Return its kernels, and the hash of each result."""
    return {
        "kernels": kernels_of(world.device),
        "hashes": hashes_of(partial(create_step, world), times),
    }


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


def create_step(world: World) -> tuple[TrainStep, Batch]:
    """Return the training step on this rank alone, and a batch of noise."""
    alone = World(0, 1, world.device)
    config = choose_settings(config_io.from_dict(SMALL, "the repeated step"), alone)
    plan, _ = make_plan(config, NUM_IMAGES, alone.size)

    torch.manual_seed(config.train.seed)
    model = create_trained_model(config, NUM_CLASSES)
    objective = Objective(create_loss(config.loss, None, world.device))
    step = create_train_step(config, plan, NUM_CLASSES, model, alone, objective)
    step.model.train()
    return step, step.augment.change_batch(_noise(config, plan.micro_batch_size).to(world.device))


def _noise(config: Config, rows: int) -> Batch:
    """Return a batch of noise images with random augmentation, which is equal on all ranks."""
    form = ImageFormat.from_config(config.model, config.data)
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (rows, *form.size, form.channels), generator=random)
    keys = sample_keys(config.train.seed, 0, np.arange(rows))
    heights, widths = (np.full(rows, pixels) for pixels in STORED_PX)

    return Batch(
        images.to(torch.uint8).permute(0, 3, 1, 2),
        torch.arange(rows),
        torch.ones(rows),
        torch.from_numpy(draw_table(config.augment, keys, widths, heights, form.size)),
        torch.arange(rows),
    )


def differing(answers: Sequence[dict[str, Any]], hosts: Sequence[str]) -> list[str]:
    """Return a line for each repetition that differs from most others with the same kernels.

    answers: the result of `repeat_step` of each rank. hosts: the host of each rank, or ().
    """
    lines = []
    for rank, answer in enumerate(answers):
        counts = Counter[str]()
        for each in answers:
            if each["kernels"] == answer["kernels"]:
                counts.update(each["hashes"])
        [(most, _)] = counts.most_common(1)

        place = f"rank {rank} on {hosts[rank]}" if hosts else f"rank {rank}"
        lines += [
            f"{place}: {value[:12]}, but most repetitions of this step gave {most[:12]}"
            for value in answer["hashes"]
            if value != most
        ]
    return lines
