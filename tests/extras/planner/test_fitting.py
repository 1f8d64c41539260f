"""Test that the advice after an out-of-memory error lists only settings that fit into memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vit.config.io import from_dict
from vit.config.schema import Config
from vit.distributed.exit import out_of_memory
from vit.extras.planner.fitting import gpu_of, naming_what_fits, what_to_lower
from vit.extras.planner.forecast import RESERVED_GIB, USABLE_SHARE
from vit.extras.planner.memory import step_memory
from vit.system.gpus import GPUS
from vit.system.meter import GIB
from vit.training.plan import make_plan

BATCH = "Lower data.micro_batch_size (64 now) to a size that divides a rank's batch of 64: 32, 16,"


def small_config(checkpointing: str = "none") -> Config:
    return from_dict(
        {
            "model": {"name": "vit_ti16", "depth": 4, "image_size": 64},
            "data": {"root": "none", "global_batch_size": 64},
            "train": {"steps": 1, "precision": "bf16", "activation_checkpointing": checkpointing},
        },
        "test",
    )


def needed_bytes(config: Config, rows: int = 64) -> int:
    plan, _ = make_plan(config, 64, 1)
    plan = replace(plan, micro_batch_size=rows)
    return step_memory(config, plan, 10).total


def advice(config: Config, memory_bytes: float) -> str:
    """Return the advice for a GPU on which a step may use up to `memory_bytes`."""
    plan, _ = make_plan(config, 64, 1)
    memory_gib = RESERVED_GIB + memory_bytes / GIB / USABLE_SHARE
    small = replace(GPUS[0], memory_gib=memory_gib)
    return what_to_lower(config, plan, 10, small)


def test_the_memory_of_a_gpu_is_read_from_the_driver(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA A100-SXM-64GB", total_memory=64 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu = gpu_of(torch.device("cuda", 0))
    assert (gpu.name, gpu.bf16_tflops, gpu.memory_gib) == ("A100", 312.0, 64)
    properties.name = "NVIDIA H200 MIG 1g.18gb"
    gpu = gpu_of(torch.device("cuda", 0))
    assert (gpu.name, gpu.memory_gib) == (properties.name, 64)
    assert gpu_of(torch.device("cpu")) is None


@pytest.mark.full
def test_activation_checkpointing_is_advised_only_if_the_step_then_fits():
    config = small_config()
    again = needed_bytes(small_config("block"))
    assert again < needed_bytes(config)
    text = advice(config, again * 1.01)
    assert text.startswith(BATCH)
    assert "set train.activation_checkpointing=block, which fits but" in text
    assert "activation_checkpointing" not in advice(config, again * 0.99)
    text = advice(small_config("block"), again * 0.99)
    assert "activation_checkpointing" not in text


@pytest.mark.parametrize(("error", "noted"), [(torch.OutOfMemoryError("full"), 1), (KeyError(), 0)])
def test_only_an_out_of_memory_error_gets_a_note_and_stays_the_same_error(error, noted):
    config = small_config()
    plan, _ = make_plan(config, 64, 1)
    with pytest.raises(type(error)) as caught:
        with naming_what_fits(config, plan, 10, torch.device("cpu")):
            raise error
    assert caught.value is error
    notes = getattr(error, "__notes__", [])
    assert len(notes) == noted
    if noted:
        assert out_of_memory(error) == f"full. {BATCH} 8, 4, 2, 1; or {notes[0].split('; or ')[1]}"
