"""Test metrics and evaluation on a fake GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_free.fake_gpu import GPU, gpu_without_memory, move_to_fake_gpu
from torch._subclasses.fake_tensor import DataDependentOutputException

from vit.config.io import from_dict
from vit.data.augment.apply import create_augment
from vit.data.batches import Batch
from vit.data.eval_sets import EvalSet
from vit.data.image_format import ImageFormat
from vit.data.shards.split import Split
from vit.data.storage.opening import open_split
from vit.distributed.process_group import World
from vit.evaluation.evaluate import Evaluator, _Count
from vit.model import create_model
from vit.training.metrics import AccuracyCounter

pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")


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
