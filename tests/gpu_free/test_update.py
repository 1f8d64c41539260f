"""Test the optimizer update, averaged weights, metrics and evaluation on a fake GPU.

Backward passes cannot run on a fake GPU, so the tests assign gradients with the right shapes.
"""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from gpu_free.fake_gpu import GPU, gpu_without_memory, move_to_fake_gpu
from plain_step import plain_step
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from vit.config.io import from_dict
from vit.config.optim_section import (
    AdafactorConfig,
    AdamWConfig,
    LambConfig,
    MuonConfig,
    NAdamWConfig,
    OptimConfig,
    SgdConfig,
)
from vit.data.augment.apply import create_augment
from vit.data.batches import Batch
from vit.data.eval_sets import EvalSet
from vit.data.image_format import ImageFormat
from vit.data.shards.data_set import open_split
from vit.data.shards.split import Split
from vit.distributed.process_group import World
from vit.evaluation.evaluate import Evaluator, _Count
from vit.layers.precision import LossScale
from vit.model import create_model
from vit.optim.ema import Ema
from vit.optim.optimizer import create_optimizer
from vit.step import TrainStep
from vit.training.metrics import AccuracyCounter
from vit.training.step_result import Slot
from vit.training.teacher import Teacher

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")
OPTIMIZERS = {
    "adamw": AdamWConfig(),
    "adamw without clipping": AdamWConfig(clip_grad_norm=None),
    "sgd": SgdConfig(name="sgd"),
    "sgd with Nesterov": SgdConfig(name="sgd", nesterov=True),
    "sgd without momentum": SgdConfig(name="sgd", momentum=0.0),
    "lamb": LambConfig(name="lamb"),
    "nadamw": NAdamWConfig(name="nadamw"),
    "muon": MuonConfig(name="muon", layer_decay=0.9),
    "adamuon": MuonConfig(name="adamuon", nesterov=True),
    "adafactorbv": AdafactorConfig(name="adafactorbv"),
}
FIELDS = {"embed_dim": 32, "depth": 2, "num_heads": 2, "drop_path_rate": 0.1}


def test_every_optimizer_is_tried():
    union = get_args(get_args(OptimConfig)[0])
    assert {type(config) for config in OPTIMIZERS.values()} == {get_args(one)[0] for one in union}


def make_step(optim: OptimConfig, precision: str, monkeypatch, **options) -> TrainStep:
    """Return a training step whose parameters already have gradients. Call this function inside
    `gpu_without_memory`."""
    # Skip the conversion to fp32, which fails for fake tensors even if they are already fp32.
    monkeypatch.setattr(nn.Module, "float", lambda self: self)
    model = move_to_fake_gpu(create_model("vit_ti8", 16, 5, **FIELDS))
    step = plain_step(
        model,
        model,
        create_optimizer(model, optim),
        None,
        World(0, 1, GPU),
        lr_at=lambda step: 1e-3,
        micro_batch_size=4,
        precision=precision,
        clip_grad_norm=optim.clip_grad_norm,
        ema=Ema(model, 0.99, **options),
    )
    for parameter in step.parameters:
        parameter.grad = torch.empty_like(parameter)
    return step


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_update_waits_for_the_gpu(name, precision, monkeypatch):
    with gpu_without_memory() as mode:
        step = make_step(OPTIMIZERS[name], precision, monkeypatch, warmup=True)
        step._update(0, torch.zeros(Slot.RANK_REPORTS, device=GPU))
        mode.waits.clear()
        norm = step._update(1, torch.zeros(Slot.RANK_REPORTS, device=GPU), 9.0)
    assert norm.device == step.loss_scale.value.device == GPU
    assert all(value.device == GPU for value in step.ema.module.state_dict().values())
    assert mode.waits == []


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_distillation_does_not_wait_for_the_gpu(kind):
    model = {"name": "vit_ti8", "image_size": 24, **FIELDS}
    values = {"model": model, "data": {"root": "."}, "train": {"steps": 1}}
    own = from_dict({**values, "data": {"root": ".", "mean": [0.5], "std": [0.5]}}, "teacher")
    small = {**model, "image_size": 16}
    student = {**values, "model": small, "distill": {"teacher": "x", "distill_type": kind}}
    network = create_model(own.model, num_classes=5)
    with gpu_without_memory() as mode:
        teacher = Teacher(move_to_fake_gpu(network), own, from_dict(student, "student"))
        mode.waits.clear()
        answers = teacher(torch.empty(4, 3, 16, 16, device=GPU))
        logits = torch.empty(4, 5, device=GPU)
        losses = teacher.blend(torch.empty(4, device=GPU), logits, answers)
    assert (losses.shape, losses.device) == ((4,), GPU)
    assert mode.waits == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_change_of_the_loss_scale_waits_for_the_gpu(precision):
    with gpu_without_memory() as mode:
        scale = LossScale(precision, GPU)
        mode.waits.clear()
        scale.update(torch.empty((), device=GPU))
    assert mode.waits == []


def test_evaluation_waits_for_the_gpu_only_at_the_end():
    with gpu_without_memory() as mode:
        counter = AccuracyCounter(GPU)
        logits = torch.empty(6, 5, dtype=torch.bfloat16, device=GPU)
        counter.add(
            logits, torch.empty(6, dtype=torch.int64, device=GPU), torch.empty(6, device=GPU)
        )
        assert mode.waits == []
        with pytest.raises(DataDependentOutputException):
            counter.result(World(0, 1, GPU))


def also_scored(split: Split) -> list[EvalSet]:
    both = torch.zeros(split.num_samples, 2, dtype=torch.int64)
    return [EvalSet("two", split, torch.tensor([2, 0])), EvalSet("real", split, None, both)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_batch_of_an_evaluation_waits_for_the_gpu(shards, precision):
    values = {"data": {"root": str(shards)}, "train": {"steps": 1}}
    config = from_dict(values | {"model": {"name": "vit_ti8", "image_size": 16}}, "test")
    split = open_split(shards, "val")
    models = {name: create_model(config.model, num_classes=3).eval() for name in ("model", "ema")}
    with gpu_without_memory() as mode:
        sets = (EvalSet("val", split), *also_scored(split))
        evaluator = Evaluator(
            sets,
            ImageFormat.from_config(config.model, config.data),
            create_augment(config.augment, config.data, 3, GPU),
            World(0, 1, GPU),
            config.eval,
            precision=precision,
        )
        batch = Batch(
            torch.empty(8, 3, 16, 16, dtype=torch.uint8, device=GPU),
            torch.empty(8, dtype=torch.int64, device=GPU),
            torch.empty(8, device=GPU),
            torch.empty(8, 0),
            torch.arange(8),
        )
        counts = {name: [_Count(each, GPU) for each in sets] for name in models}
        for model in models.values():
            move_to_fake_gpu(model)
        mode.waits.clear()
        with torch.no_grad():
            evaluator._add(models, batch, 5, counts)
    assert mode.waits == []
