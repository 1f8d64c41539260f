"""Test gradients that are summed in bf16 (`train.reduce_dtype=bf16`) on real ranks."""

from __future__ import annotations

import subprocess

import pytest
import torch
import warm_python
from processes import TINY, Background, environment, final_state, run, train
from safetensors.torch import load_file

IN_BF16 = "train.reduce_dtype=bf16"
UNIT = 2.0**-8
"""The largest relative error of rounding to bf16."""
GRADIENTS = """
import os, sys, torch, torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from vit.distributed.process_group import join_world, wrap

world = join_world("cpu")
for reduces_in_bf16 in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    wrapped = wrap(model, world, reduces_in_bf16=reduces_in_bf16)
    torch.manual_seed(1 + world.rank)
    images = torch.randn(8, 64)
    for passes in range(2):  # the second pass has the final buckets
        model.zero_grad()
        wrapped(images).square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(images).square().sum().backward()
    found |= {f"own {name}": p.grad for name, p in model.named_parameters()}
    save_file(found, os.path.join(sys.argv[1], f"{reduces_in_bf16}_{world.rank}"))
dist.barrier()
os._exit(0)  # skips the finalization, with which gloo's threads race
"""


@pytest.fixture(scope="module")
def gradients(tmp_path_factory) -> dict[tuple[bool, int], dict[str, torch.Tensor]]:
    """Return the averaged gradients, reduced in fp32 and in bf16, and each rank's own gradients."""
    folder = tmp_path_factory.mktemp("gradients")
    script = folder / "gradients.py"
    script.write_text(GRADIENTS)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    line = [warm_python.python(environment()), *torchrun, str(script), str(folder)]
    subprocess.run(line, env=environment(), check=True, timeout=120)
    return {
        (in_bf16, rank): load_file(folder / f"{in_bf16}_{rank}")
        for in_bf16 in (False, True)
        for rank in (0, 1)
    }


def test_each_element_is_within_one_rounding_per_rank_and_one_of_the_sum(gradients):
    names = [name for name in gradients[False, 0] if not name.startswith("own ")]
    assert len(names) == 4
    for name in names:
        exact, rounded = (gradients[in_bf16, 0][name] for in_bf16 in (False, True))
        parts = [gradients[False, rank][f"own {name}"] / 2 for rank in (0, 1)]
        bound = UNIT * (parts[0].abs() + parts[1].abs()) + UNIT * rounded.abs()
        # Sums in fp32 are also rounded, with errors of about 2**-24 of the parts.
        bound += 2.0**-22 * (parts[0].abs() + parts[1].abs())
        assert ((rounded - exact).abs() <= bound).all(), name
        assert not torch.equal(rounded, exact), "the sum must be in bf16"
        assert torch.equal(rounded, rounded.bfloat16().float())


def test_ranks_have_equal_bits(gradients):
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert torch.equal(gradients[True, 0][name], gradients[True, 1][name])


@pytest.mark.full
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(config, tmp_path):
    """The run has two micro-batches per step, so gradients stay in DDP's buckets."""
    settings = (IN_BF16, "data.micro_batch_size=3", "train.steps=24")
    train(config, tmp_path / "whole", *settings, ranks=2)
    train(config, tmp_path / "plain", *settings[1:], ranks=2)
    killed = Background(config, tmp_path / "killed", *settings, ranks=2)
    killed.wait_for_step(14)
    killed.kill_all()
    train(config, tmp_path / "killed", *settings, ranks=2)
    assert final_state(tmp_path / "killed", 24) == final_state(tmp_path / "whole", 24)
    assert final_state(tmp_path / "plain", 24) != final_state(tmp_path / "whole", 24)


def test_a_resumed_run_keeps_its_reduce_dtype_and_one_rank_is_told(config, tmp_path):
    done = train(config, tmp_path / "run", "train.steps=6", IN_BF16)
    assert "note: train.reduce_dtype=bf16 has no effect on one rank" in done.stdout + done.stderr
    arguments = ("--config", config, f"run.dir={tmp_path / 'run'}", *TINY, "train.steps=6")
    again = run("launch/train.py", *arguments)
    assert again.returncode == 2
    assert "train.reduce_dtype" in again.stderr
