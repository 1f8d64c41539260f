"""Test which precision and compilation the value `auto` selects on a device, and that a run keeps
them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from processes import TINY, final_state, run_here
from ranks import together

from vit.checkpoint.checkpoint import newest_checkpoint
from vit.config.schema import Config
from vit.distributed.process_group import World
from vit.layers.precision import autocast, has_bf16
from vit.training import run_data
from vit.training.run_data import choose_settings

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
AUTO = [each for each in TINY if not each.startswith("train.precision")]


def config_of(**settings: object) -> Config:
    data = {"root": ".", "global_batch_size": 8}
    return Config.model_validate({"data": data, "train": {"steps": 1, **settings}})


@pytest.mark.parametrize(
    ("capability", "is_amd", "expected"),
    [
        ((7, 0), False, False),  # V100
        ((7, 5), False, False),  # T4
        ((8, 0), False, True),  # A100
        ((8, 9), False, True),  # L4
        ((12, 0), False, True),  # RTX 5090
        ((6, 0), True, True),  # AMD's capability numbers have another meaning
    ],
)
def test_gpus_have_bf16_from_ampere_on(capability, is_amd, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", "6.2" if is_amd else None)
    assert has_bf16(GPU) == expected


@pytest.mark.parametrize("instructions", [True, False])
def test_cpus_have_bf16_if_they_multiply_in_it(instructions, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    config = choose_settings(config_of(compile="auto"), World(0, 1, CPU))
    assert config.train.precision == ("bf16" if instructions else "fp32")
    assert config.train.compile is False


def test_the_flags_of_the_kernel_name_the_same_instructions_as_torch():
    if sys.platform != "linux":
        pytest.skip("only Linux lists the flags of a CPU in a file")
    flags = Path("/proc/cpuinfo").read_text().split()
    assert has_bf16(CPU) == ("avx512_bf16" in flags)


@pytest.mark.parametrize("lacking", [(), (0,), (2,), (0, 1, 2)])
def test_all_ranks_agree_on_what_every_gpu_has(lacking, monkeypatch):
    numbers = {torch.device("cuda", number): number for number in range(3)}
    monkeypatch.setattr(run_data, "has_bf16", lambda device: numbers[device] not in lacking)

    def chosen(world: World) -> str:
        gpus = World(world.rank, world.size, torch.device("cuda", world.rank), world.store)
        # Rank 1 was started with different settings, which `check_same_settings` would report
        # afterwards.
        config = config_of(precision="fp16" if world.rank == 1 else "auto")
        return choose_settings(config, gpus).train.precision

    expected = "fp32" if lacking else "bf16"
    assert together(3, chosen) == [expected, "fp16", expected]


@pytest.mark.parametrize("given", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [True, False, "reduce-overhead"])
def test_given_values_stay(given, compiled):
    config = config_of(precision=given, compile=compiled)
    assert choose_settings(config, World(0, 1, CPU)) == config


def test_compiles_on_gpus_only(monkeypatch):
    monkeypatch.setattr(run_data, "has_bf16", lambda device: True)
    chosen = choose_settings(config_of(compile="auto"), World(0, 1, GPU))
    assert (chosen.train.precision, chosen.train.compile) == ("bf16", True)


def test_a_forgotten_choice_is_an_error_rather_than_fp32():
    with pytest.raises(AssertionError, match="chooses a precision"):
        autocast("auto", CPU)


@pytest.mark.slow
@pytest.mark.parametrize(("began", "given"), [("bf16", "auto"), ("fp16", "fp16")])
def test_a_run_keeps_its_precision_on_another_device(
    began, given, config, tmp_path, monkeypatch, capfd
):
    """A CPU that claims to lack bf16 simulates another device. fp16 also stores a loss scale, and
    its overflows are skipped."""
    run_dir = tmp_path / "run"
    # On the two devices, `auto` would choose attention kernels that round differently.
    same = ("launch/train.py", "--config", config, *AUTO, "train.attention=flash")
    same = (*same, "schedule.name=constant")
    line = (*same, f"run.dir={run_dir}")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    run_here(*line, "train.steps=3", f"train.precision={given}")
    assert f" on cpu, {began}" in capfd.readouterr().err
    assert f"precision: {began}\n" in (run_dir / "config.yaml").read_text()
    newest = newest_checkpoint(run_dir)
    assert newest is not None
    assert newest.info["config"]["train"]["precision"] == began

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    longer = (*line, "train.steps=6", "--allow-change", "train.steps")
    with pytest.raises(ValueError, match=rf"train\.precision: {began} there, fp32 here"):
        run_here(*longer, "train.precision=fp32")
    capfd.readouterr()
    run_here(*longer)
    printed = capfd.readouterr().err
    assert (
        f"note: the run continues in {began}, in which it began; train.precision=auto means fp32 on"
        " this device: to change it, set train.precision=fp32 --allow-change train.precision"
    ) in printed
    assert f" on cpu, {began}" in printed

    run_here(*same, f"run.dir={tmp_path / 'whole'}", "train.steps=6", f"train.precision={began}")
    assert final_state(run_dir, 6) == final_state(tmp_path / "whole", 6)
