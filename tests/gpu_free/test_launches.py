"""Limit the number of operations that each part of a training step launches.

In eager mode, a GPU runs the operations of a small model faster than the CPU can launch them, so
each additional operation makes the step slower. The tests count the operations on a CPU, which runs
the same operations as a GPU.

tests/data/augment/test_rounds.py limits the operations of each augmentation policy.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpu_free.fake_gpu import Launches
from plain_step import plain_step

from vit.config.schema import AdamWConfig, AugmentConfig
from vit.data.augment.apply import Augment
from vit.data.augment.table import table_layout
from vit.data.batches import Batch
from vit.distributed.process_group import World
from vit.layers.precision import autocast
from vit.model import create_model
from vit.optim.ema import Ema
from vit.optim.optimizer import create_optimizer
from vit.step import TrainStep
from vit.training.loss import cross_entropy
from vit.training.step_result import Slot

DEPTH = 4
ROOM = DEPTH - 1
"""The number of additional operations that the tests tolerate. The tolerance is smaller than the
number of blocks, so the tests detect a single additional operation per block."""
EXPECTED = {"forward": 129, "backward": 149, "update": 27, "rest": 33}
"""The expected number of operations in each part of a step. The model is a ViT with `DEPTH` blocks
in bf16, trained with gradient clipping and averaged weights. `rest` counts all other operations of
a step with one micro-batch and no augmentation."""
CPU = torch.device("cpu")
CONFIG = AugmentConfig(hflip_prob=0.0)


def make_step() -> TrainStep:
    fields = {"embed_dim": 64, "depth": DEPTH, "num_heads": 2, "drop_path_rate": 0.1}
    model = create_model("vit_ti8", 16, 5, **fields)
    return plain_step(
        model,
        model,
        create_optimizer(model, AdamWConfig()),
        Augment(CONFIG, 5, (0.5,), (0.25,), CPU),
        World(0, 1, CPU),
        lr_at=lambda step: 1e-3,
        micro_batch_size=8,
        precision="bf16",
        loss=partial(cross_entropy, label_smoothing=0.1),
        clip_grad_norm=1.0,
        ema=Ema(model, 0.99),
    )


def launched_by_part() -> dict[str, Launches]:
    step = make_step()
    parts = {name: Launches("cpu") for name in ("inputs", "forward", "backward", "update", "step")}
    images = torch.zeros(8, 3, 16, 16, dtype=torch.uint8)
    labels = torch.zeros(8, dtype=torch.int64)
    table = torch.zeros(8, table_layout(CONFIG).width)
    batch = Batch(images, labels, torch.ones(8), table, torch.arange(8))
    with parts["inputs"]:
        inputs, _ = step.augment.finish(images, labels, table)
    with parts["forward"], autocast(step.precision, CPU):
        logits = step.reduce.module(inputs)
    with parts["backward"]:
        logits.sum().backward()
    sums = torch.zeros(Slot.RANK_REPORTS)
    with parts["update"]:
        step._update(0, sums)
    step.optimizer.zero_grad()
    with parts["step"]:
        step._queue(batch, 0, False, (0.0,))
    return parts


@pytest.fixture(scope="module")
def launched() -> dict[str, Launches]:
    return launched_by_part()


@pytest.mark.parametrize("part", EXPECTED)
def test_a_step_launches_no_more_operations_than_stated(part, launched):
    number = launched[part].total() if part in launched else 0
    counted = str(launched.get(part, launched["step"]))
    if part == "rest":
        parts = ("inputs", "forward", "backward", "update")
        number = launched["step"].total() - sum(launched[other].total() for other in parts)
    assert number <= EXPECTED[part] + ROOM, (
        f"{part}: {number} operations, but EXPECTED states {EXPECTED[part]}; remove new ones or"
        f" explain them there: {counted}"
    )


def test_an_additional_operation_in_each_block_is_detected_and_named(monkeypatch):
    from vit import model

    before = launched_by_part()["forward"].total()
    plain = model.Mlp.forward
    monkeypatch.setattr(model.Mlp, "forward", lambda self, x: plain(self, x * 1.0))
    after = launched_by_part()["forward"]
    assert after.total() - before == DEPTH > ROOM
    assert f"{DEPTH} mul model.py:" in str(after)
