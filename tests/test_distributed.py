"""What ranks say to each other, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import REPOSITORY, environment
from torch import nn

from vit import distributed
from vit.distributed import World

SLOW_MAIN = """
import datetime, sys, time
import vit.distributed as distributed
distributed.COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=3)
world = distributed.start("cpu")

def make():
    if world.is_main and sys.argv[1] == "wrong":
        raise ValueError("no such shard")
    if world.is_main:
        time.sleep(6)
    return world.rank * 10

try:
    print(f"rank {world.rank} has {world.main_first(make)} and {world.main_first(lambda: 7)}", flush=True)
except ValueError as error:
    print(f"rank {world.rank}: {type(error).__name__}: {error}", flush=True)
distributed.stop(world)
"""


def two_ranks(tmp_path: Path, argument: str) -> list[str]:
    """Sorted lines of two ranks that run SLOW_MAIN."""
    script = tmp_path / "slow_main.py"
    script.write_text(SLOW_MAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, script, argument], capture_output=True, text=True, env=environment(), cwd=REPOSITORY, timeout=120)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_what_the_main_rank_does_first_may_take_longer_than_a_collective(tmp_path):
    """Making an index of a large data set does."""
    assert two_ranks(tmp_path, "right") == ["rank 0 has 0 and 7", "rank 1 has 10 and 7"]


def test_a_mistake_of_the_main_rank_reaches_the_others(tmp_path):
    assert two_ranks(tmp_path, "wrong") == ["rank 0: ValueError: no such shard", "rank 1: AlreadyReported: no such shard"]


@pytest.mark.parametrize(("norm", "sent"), [(nn.BatchNorm1d(4), True), (nn.LayerNorm(4), False)])
def test_buffers_travel_before_each_step_only_where_they_change(norm, sent):
    """A ViT's fixed positions are the same on all ranks from the start."""
    model = nn.Sequential(nn.Linear(4, 4), norm)
    model.register_buffer("pos_embed", torch.zeros(4))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = distributed.wrap(model, World(0, 2, torch.device("cpu")))
        assert wrapped.will_sync_module_buffers() is sent
    finally:
        dist.destroy_process_group()


def test_fp32_is_fp32_and_kernels_are_not_chosen_by_timing(monkeypatch):
    """torch's own defaults, and what a user's other code may have set before."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    distributed.start("cpu")
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.benchmark
    assert torch.get_float32_matmul_precision() == "highest"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    distributed.start("cpu")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "backend:native", "the user's own wins"
