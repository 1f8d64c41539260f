"""Test the record of NCCL's collectives without NCCL. The tests replace only the name of the
backend."""

from __future__ import annotations

import os
import pickle
import subprocess

import pytest
import torch
import torch.distributed as dist
import warm_python
from processes import environment

from vit.distributed import flight_recorder

PREFIX = flight_recorder.PREFIX
VARIABLES = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", PREFIX)
needs_nccl = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_nccl_trace"), reason="a torch without NCCL"
)


@pytest.fixture
def process_group(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    for name in VARIABLES:
        os.environ.pop(name, None)


def test_gloo_has_no_record(process_group, tmp_path):
    flight_recorder.write_to(tmp_path)
    assert PREFIX not in os.environ
    assert flight_recorder.dump() == ""


@needs_nccl
def test_writes_a_file_for_each_rank_to_the_run_folder(process_group, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    folder = tmp_path / "run"  # this folder may not exist on this host yet
    flight_recorder.write_to(folder)
    assert flight_recorder.dump() == f"{folder}/nccl_trace_rank_"
    record = pickle.loads((folder / "nccl_trace_rank_0").read_bytes())
    assert {"version", "pg_config"} <= record.keys()


def test_values_of_the_user_take_precedence(process_group, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    monkeypatch.setenv(PREFIX, str(tmp_path / "elsewhere_"))
    flight_recorder.start_recording()
    flight_recorder.write_to(tmp_path / "run")
    assert [os.environ[name] for name in VARIABLES] == ["7", "1", str(tmp_path / "elsewhere_")]


HUNG = """
import torch.distributed as dist
from pathlib import Path
from vit.distributed import flight_recorder
from vit.distributed.exit import leave_hung
from vit.distributed.watchdog import HangVerdict

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.get_backend = lambda: {backend!r}
flight_recorder.write_to(Path({folder!r}))
leave_hung(HangVerdict("rank 1 on node07 has made no progress for 600 s", (1,)))
"""


@needs_nccl
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_message_about_a_hanging_rank_names_the_files_in_the_same_line(backend, tmp_path):
    code = HUNG.format(backend=backend, folder=str(tmp_path))
    line = [warm_python.python(environment()), "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 1
    [message] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message.startswith("error: rank 1 on node07 has made no progress for 600 s; the same")
    named = f"; {tmp_path}/nccl_trace_rank_<rank> list the last NCCL collectives (torchfrtrace"
    assert (named in message) == (backend == "nccl")
    assert (tmp_path / "nccl_trace_rank_0").exists() == (backend == "nccl")
