"""Test that the planned host memory matches the memory that a run allocates when it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vit.config.io import load_config
from vit.data.open_data import INDEXED_SHARDS
from vit.distributed.process_group import World
from vit.extras.planner.forecast import make_forecast
from vit.start.needs import disk_needs
from vit.start.preflight import preflight
from vit.system.gpus import find_gpu
from vit.training.run_data import open_data

GIB = 2**30


@pytest.mark.parametrize(
    "settings",
    [
        ("loader.num_workers=0",),
        ("loader.num_workers=3", "data.global_batch_size=12"),
        ("loader.num_workers=2", "order.aug_repeats=2", "augment.mixup_alpha=0.8", "train.steps=2"),
    ],
)
def test_planned_memory_equals_the_request_of_a_start_on_a_gpu(shards, tmp_path, settings):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"""
model: {{name: vit_ti16, image_size: 32, depth: 1}}
data: {{root: {shards}, global_batch_size: 4}}
augment: {{randaugment_layers: 2, erasing_prob: 0.5}}
train: {{epochs: 2, device: cpu}}
ema: {{decay: 0.9}}
eval: {{batch_size: 5}}
""")
    config = load_config(path, list(settings))
    planned = make_forecast(config, 1, find_gpu("H200")).host_memory
    data = open_data(config, World(0, 1, torch.device("cpu")), INDEXED_SHARDS)
    on_gpu = World(0, 1, torch.device("cuda", 0))
    batches = (data.batches, data.eval_batches)
    saved_bytes = disk_needs(config, data.plan, data.num_classes).checkpoint_bytes
    numbers = preflight(config.loader, on_gpu, data.plan, *batches, saved_bytes=saved_bytes).record
    assert planned.batches / GIB == pytest.approx(numbers["batch_gib"], abs=1e-4)
    assert planned.saved_copy / GIB == pytest.approx(numbers["save_copy_gib"], abs=1e-4)
    without_copy = replace(planned, saved_copy=0)
    assert planned.of_each_gpu == without_copy.of_each_gpu > planned.ring.num_bytes
