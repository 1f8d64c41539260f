"""Test that the tests in this folder notice a fault that is inserted into any part of a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from augmenting import mixed_table
from gpu_free.fake_gpu import GPU, gpu_without_memory, move_to_fake_gpu
from plain_step import plain_step
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
)

from vit import step as step_module
from vit.config.schema import AdamWConfig, AugmentConfig
from vit.data.augment import apply, pixel_ops
from vit.data.augment.apply import Augment
from vit.data.batches import Batch
from vit.distributed.process_group import World
from vit.layers.precision import LossScale
from vit.model import Mlp, create_model
from vit.optim.optimizer import create_optimizer
from vit.training import objective
from vit.training.metrics import AccuracyCounter

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")
RECIPE = AugmentConfig(randaugment_layers=2, erasing_prob=1.0, mixup_alpha=0.8)
ROWS = 16
PLACES = {
    "levels": (pixel_ops, "look_up"),
    "warps": (pixel_ops, "affine"),
    "boxes": (pixel_ops, "in_box"),
    "normalization": (apply.Augment, "normalize"),
    "network": (Mlp, "forward"),
    "loss": (objective, "margins"),
    "update": (step_module, "set_rates"),
    "loss scale": (LossScale, "update"),
}
"""Maps each part of a step to (owner, name) of a function that this part calls."""
FAULTS: dict[str, tuple[Callable[[torch.Tensor], object], type[Exception]]] = {
    "a value that is read": (lambda x: x.sum().item(), DataDependentOutputException),
    "a branch": (lambda x: bool(x.sum() > 0), DataDependentOutputException),
    "a shape that depends on values": (lambda x: x[x > 0], DynamicOutputShapeException),
    "a tensor of the host": (lambda x: x + torch.zeros(x.shape), FakeTensorDeviceMismatchError),
}
WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "a copy to the host": lambda x: x.cpu(),
    "a copy to the GPU": lambda x: torch.zeros(3).to(x.device),
    "a number that is copied": lambda x: torch.tensor([1.0], device=x.device),
    "an index of the host": lambda x: x.flatten()[torch.arange(2)],
}
"""Operations that block the CPU until the GPU has finished, although torch raises no error."""


def queue_a_step(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    model = create_model("vit_ti8", 24, 5, embed_dim=32, depth=2, num_heads=2)
    with gpu_without_memory() as mode:
        move_to_fake_gpu(model)
        step = plain_step(
            model,
            model,
            create_optimizer(model, AdamWConfig()),
            Augment(RECIPE, 5, (0.5,) * 3, (0.25,) * 3, GPU),
            World(0, 1, GPU),
            lr_at=lambda step: 1e-3,
            micro_batch_size=ROWS,
            precision="fp16",
            clip_grad_norm=1.0,
        )
        batch = Batch(
            torch.empty(ROWS, 3, 24, 24, dtype=torch.uint8, device=GPU),
            torch.empty(ROWS, dtype=torch.int64, device=GPU),
            torch.empty(ROWS, device=GPU),
            torch.from_numpy(mixed_table(RECIPE, ROWS, (24, 24))),
            torch.from_numpy(np.arange(ROWS)),
        )

        def backward(loss: torch.Tensor) -> None:
            for parameter in step.parameters:
                parameter.grad = torch.empty_like(parameter)

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        step._queue(step.augment.change_batch(batch), 0, False, (0.0,))
        mode.waits.clear()
        step._queue(step.augment.change_batch(batch), 1, False, (0.0,))
    return mode.waits


def plant(monkeypatch: pytest.MonkeyPatch, place: str, fault: Callable[[torch.Tensor], object]):
    owner, name = PLACES[place]
    unchanged = getattr(owner, name)

    def changed(*arguments, **options):
        fault(torch.empty(4, 3, device=GPU))
        return unchanged(*arguments, **options)

    monkeypatch.setattr(owner, name, changed)


def test_a_step_without_a_fault_passes(monkeypatch):
    assert queue_a_step(monkeypatch) == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", PLACES)
def test_a_planted_fault_is_an_error(place, fault, monkeypatch):
    do, expected = FAULTS[fault]
    plant(monkeypatch, place, do)
    with pytest.raises(expected):
        queue_a_step(monkeypatch)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("place", PLACES)
def test_a_planted_wait_is_recorded(place, wait, monkeypatch):
    plant(monkeypatch, place, WAITS[wait])
    assert queue_a_step(monkeypatch) != []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_metric_is_an_error(fault, monkeypatch):
    do, expected = FAULTS[fault]
    unchanged = AccuracyCounter.add
    monkeypatch.setattr(
        AccuracyCounter,
        "add",
        lambda counter, logits, *rest: (do(logits.float()), unchanged(counter, logits, *rest)),
    )
    with gpu_without_memory(), pytest.raises(expected):
        AccuracyCounter(GPU).add(
            torch.empty(6, 5, device=GPU),
            torch.empty(6, dtype=torch.int64, device=GPU),
            torch.empty(6, device=GPU),
        )
