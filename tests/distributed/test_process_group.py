"""Test messages between ranks. The ranks are threads that share a real store, or separate processes
if necessary."""

from __future__ import annotations

import ctypes.util
import datetime
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_python
from processes import REPOSITORY, environment, run
from ranks import together
from torch import nn

from vit.distributed import process_group
from vit.distributed import world as world_module
from vit.distributed.devices import HostDevices, choose_device
from vit.distributed.process_group import AlreadyReported, RankLost, World
from vit.system.host import num_nvidia_gpus

SLOW_MAIN = """
import datetime, os, time
from pathlib import Path
import vit.distributed.process_group as distributed
from vit.distributed.exit import leave_world
distributed.COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=5)
# The time-out also limits the start, and a busy machine starts one rank much later than the other.
here = Path(__file__).parent
(here / f"started{os.environ['RANK']}").touch()
while len(list(here.glob("started*"))) < 2:
    time.sleep(0.01)
world = distributed.join_world("cpu")

def make():
    if world.is_main:
        time.sleep(7)
    return world.rank * 10

made = world.main_first(make)
print(f"rank {world.rank} has {made} and {world.main_first(lambda: 7)}", flush=True)
with world.fail_together():  # a save of the main rank
    make()
leave_world(world)
"""


def launch(script: str, folder: Path, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    return run(path, ranks=ranks, timeout_s=240)


def test_work_on_the_main_rank_may_outlast_the_timeout_of_collectives(tmp_path):
    """Indexing a large dataset or saving a checkpoint may take longer than the timeout of
    collectives."""
    done = launch(SLOW_MAIN, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 has 0 and 7", "rank 1 has 10 and 7"]


# ---- the protocol on each rank ----------------------------------------------------------------


def words(ended: list[Any]) -> list[str]:
    return [f"{type(one).__name__}: {one}" for one in ended]


def test_all_ranks_get_the_broadcast_value():
    announcement = {"name": "step_00000003", "info": {"step": 3, "size": [2, None]}}
    assert (
        together(
            3, lambda world: world.broadcast_from_main(lambda: announcement if world.is_main else 1)
        )
        == [announcement] * 3
    )


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (ValueError("no such shard"), "no such shard"),
        (RuntimeError("a bug"), "RuntimeError: a bug"),
        (MemoryError(), "MemoryError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_waiting_ranks_end_when_the_main_rank_ends_for_any_reason(error, heard):
    def function() -> None:
        raise error

    ended = together(3, lambda world: world.main_first(function))
    assert ended[0] is error
    assert words(ended[1:]) == [f"AlreadyReported: {heard}"] * 2


@pytest.mark.parametrize(
    ("wrong", "tell"), [((), ()), ((0,), (0,)), ((2,), (2,)), ((0, 1, 2), (0,)), ((1, 2), (1, 2))]
)
def test_a_mistake_on_any_rank_ends_all_and_is_reported_once(wrong, tell):
    def function(world: World) -> str:
        with world.fail_together():
            if world.rank in wrong:
                raise ValueError(f"mistake of {world.rank}")
        return "went on"

    expected = [
        "AlreadyReported: mistake of 0"
        if 0 in wrong
        else "AlreadyReported: reported by another rank"
    ] * 3
    for rank in tell:
        expected[rank] = f"ValueError: mistake of {rank}"
    assert words(together(3, function)) == (expected if wrong else ["str: went on"] * 3)


def test_a_bug_on_one_rank_ends_waiting_ranks():
    def function(world: World) -> None:
        with world.fail_together():
            if world.rank == 1:
                raise RuntimeError("a bug")

    heard = "AlreadyReported: RuntimeError: a bug"
    assert words(together(3, function)) == [heard, "RuntimeError: a bug", heard]


def test_a_later_mistake_of_another_rank_ends_ranks_that_are_ahead():
    """The data exists on the host of rank 0, but is missing on the other host."""

    def function(world: World) -> None:
        try:
            world.main_first(lambda: open(__file__ if world.is_main else "nowhere").close())
        except OSError as error:
            # Report the error the way `run_command` does.
            world.announce_end(str(error))
            raise
        with world.fail_together():
            pass

    ended = together(2, function)
    assert isinstance(ended[1], FileNotFoundError)
    assert words(ended[:1]) == [f"AlreadyReported: {ended[1]}"]


def test_names_a_rank_that_does_not_arrive(monkeypatch):
    monkeypatch.setattr(world_module, "LONGEST_WAIT", datetime.timedelta(seconds=4))

    def function(world: World) -> None:
        if world.rank != 2:
            with world.fail_together():
                pass

    ended = together(3, function)
    assert isinstance(ended[0], RankLost)
    assert str(ended[1]).startswith("rank 2 did not respond within")


@pytest.mark.parametrize("silent", [(), (0,), (6,), (2, 3), (0, 1, 2, 3, 4, 5, 6)])
def test_missing_ranks_are_found_by_bisection(silent):
    store = dist.HashStore()
    ranks = [rank for rank in range(8) if rank != 4]
    silent = [ranks[place] for place in silent]
    for rank in set(ranks) - {*silent}:
        store.set(f"part 3 {rank}", "")
    assert world_module.silent_ranks(store, "part 3", ranks) == silent


def test_hosts_must_see_the_same_data():
    ended = together(
        3, lambda world: world.check_same(lambda: "b" if world.rank == 1 else "a", "data")
    )
    assert isinstance(ended[0], AlreadyReported)
    assert isinstance(ended[2], AlreadyReported)
    assert str(ended[1]).startswith(
        f"{socket.gethostname()} does not see the same data as rank 0 (b, expected a)"
    )


# ---- signals and dead ranks -------------------------------------------------------------------

WAIT = """
import time
import vit.distributed.process_group as distributed
from vit.distributed.exit import StopSignals, run_command

def main():
    world = distributed.join_world("cpu")
    StopSignals()
    print("waiting", flush=True)
    world.main_first(lambda: time.sleep(3600))

run_command(main)
"""


JOIN = """
import vit.distributed.process_group as distributed
from vit.distributed.exit import run_command

def main():
    print("waiting", flush=True)
    return distributed.join_world("cpu")

run_command(main)
"""


@contextmanager
def by_hand(script: Path, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start ranks without torchrun, with the store on rank 0, and wait until all of them are
    waiting for each other."""
    with socket.socket() as reserved:
        # Keep the port bound, so that no other process takes it. Rank 0 can still listen on this
        # port.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks = []
        for rank in range(size):
            env = {**environment(), **address, "RANK": str(rank)}
            line = [warm_python.python(environment()), script]
            ranks.append(subprocess.Popen(line, env=env, cwd=REPOSITORY, **pipes))
        try:
            for process in ranks:
                assert process.stdout is not None
                assert process.stdout.readline() == "waiting\n"
            yield ranks
        finally:
            for process in ranks:
                process.kill()
                process.communicate()


def end_of(process: subprocess.Popen[str]) -> tuple[str, int]:
    return process.communicate(timeout=240)[1], process.returncode


def test_a_signal_ends_a_waiting_rank_and_all_ranks_that_wait_with_it(tmp_path):
    """Each rank may run on a different host, where no launcher would end it."""
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    received = "received: ending before the first step\n"
    nothing = "before the first step: nothing to save\n"
    with by_hand(script, 3) as ranks:
        ranks[1].send_signal(signal.SIGTERM)
        lines = f"rank 1: SIGTERM {received}rank 1: ended by SIGTERM {nothing}"
        assert end_of(ranks[1]) == (lines, 143)
        assert end_of(ranks[2]) == ("", 2)
        # Rank 0 receives the signal in the function for which the other ranks are waiting.
        ranks[0].send_signal(signal.SIGINT)
        assert end_of(ranks[0]) == (f"SIGINT {received}ended by SIGINT {nothing}", 130)


def test_a_wrong_network_interface_is_named_by_each_rank(tmp_path, monkeypatch):
    """NCCL's variable may begin with `^`, but gloo does not support this syntax."""
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo,docker")
    named = "error: the environment variable GLOO_SOCKET_IFNAME=^lo,docker: no such interface"
    with by_hand(script, 2) as ranks:
        for process in ranks:
            errors, status = end_of(process)
            assert status == 2, errors
            assert named in errors
            assert "Traceback" not in errors


def test_a_waiting_rank_notices_a_killed_rank_of_its_host(tmp_path):
    """Rank 0 is killed while it saves. The SIGTERM that torchrun then sends does not end ranks that
    still have to save."""
    script = tmp_path / "wait.py"
    waits = """
    with world.fail_together():
        time.sleep(3600 if world.rank == 1 else 0)
"""
    changes = {
        # No signal may end a rank before the rank has reported that it is waiting.
        "    StopSignals()": "    StopSignals().remember_only()",
        "    world.main_first(lambda: time.sleep(3600))": waits,
    }
    text = WAIT
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    script.write_text(text)
    with by_hand(script, 3) as ranks:
        ranks[1].kill()
        ranks[1].wait()
        for rank in (0, 2):
            ranks[rank].send_signal(signal.SIGTERM)
        output, status = end_of(ranks[2])
        assert status in (1, 2)
        killed = (
            f"rank 1 on {socket.gethostname()} ended without a message, so it was probably killed"
        )
        output += end_of(ranks[0])[0]
        assert killed in output


def test_a_waiting_rank_notices_that_the_main_rank_was_killed(tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    lost = "lost the connection to the first host's launcher, or to rank 0"
    reason = "see the message of that rank or of torchrun for the cause"
    with by_hand(script, 2) as ranks:
        ranks[0].kill()
        assert end_of(ranks[1]) == (f"rank 1: {lost}; {reason}\n", 1)


# ---- choosing the device ----------------------------------------------------------------------

GOOD = HostDevices("node1", ranks=8, gpus=8, nvidia_gpus=8, reason="")
BROKEN = HostDevices(
    "node7", ranks=8, gpus=0, nvidia_gpus=8, reason="Found no NVIDIA driver on your system"
)
FEW = HostDevices("node9", ranks=8, gpus=4, nvidia_gpus=4, reason="")
CPU = HostDevices("node3", ranks=8, gpus=0, nvidia_gpus=0, reason="No CUDA GPUs are available")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_names_a_host_without_the_gpus_of_the_others(device):
    for odd, says in (
        (BROKEN, "node7: torch sees no GPU (Found no NVIDIA driver on your system)"),
        (FEW, "node9: 4 GPU(s) for 8 rank(s)"),
    ):
        everyone = [GOOD] * 8 + [odd] * 8
        with pytest.raises(ValueError, match="1 of 2 host") as caught:
            choose_device(device, "train.device=", everyone)
        assert f"cannot train on GPUs. {says}. Check" in str(caught.value)
        assert choose_device("cpu", "train.device=", everyone) == ("cpu", [])


def test_uses_the_device_that_all_hosts_have():
    assert choose_device("auto", "train.device=", [GOOD] * 16) == ("cuda", [])
    assert choose_device("cuda", "train.device=", [GOOD] * 16) == ("cuda", [])
    assert choose_device("auto", "train.device=", [CPU] * 16) == ("cpu", [])
    for host, message in ((CPU, "node3: torch sees no GPU"), (FEW, "node9: 4 GPU")):
        with pytest.raises(ValueError, match=message):
            choose_device("cuda", "train.device=", [host] * 8)


def test_the_main_rank_chooses_one_device_for_all():
    def agreed(world: World, devices: list[HostDevices]) -> tuple[str, tuple[str, ...]]:
        rank_devices = devices[world.rank]
        world = process_group._agree_on_device(world, "auto", "train.device=", rank_devices)
        return str(world.device), world.hosts

    hosts = ("node1", "node1", "node3")
    assert (
        together(3, lambda world: agreed(world, [GOOD, GOOD, replace(GOOD, host="node3")]))
        == [("cuda:0", hosts)] * 3
    )
    assert together(2, lambda world: agreed(world, [CPU, CPU])) == [("cpu", ("node3",) * 2)] * 2
    first, second = together(2, lambda world: agreed(world, [GOOD, BROKEN]))
    assert isinstance(first, ValueError)
    assert isinstance(second, AlreadyReported)
    assert str(first) == str(second)


def test_a_rank_missing_when_devices_are_chosen_ends_all(monkeypatch):
    monkeypatch.setattr(world_module, "COLLECTIVE_TIMEOUT", datetime.timedelta(seconds=4))
    others_ended = threading.Barrier(3)

    def function(world: World) -> None:
        if world.rank == 2:
            others_ended.wait()
            world.announce_end("rank 0 did not say so")
            return
        try:
            process_group._agree_on_device(world, "auto", "train.device=", CPU)
        finally:
            others_ended.wait()

    first, second, _ = together(3, function)
    assert isinstance(first, RankLost)
    assert isinstance(second, AlreadyReported)
    assert str(second).startswith("RankLost: rank 2 did not respond within")


def test_unusable_gpus_are_an_error_unless_the_cpu_is_requested():
    with pytest.raises(ValueError, match=r"train.device=auto: 1 of 1 host.*train.device=cpu"):
        choose_device("auto", "train.device=", [BROKEN] * 8)
    assert choose_device("cpu", "train.device=", [BROKEN] * 8) == ("cpu", [])


def test_training_on_the_cpu_of_a_machine_with_a_gpu_is_reported_loudly():
    for_cpus = replace(BROKEN, has_cuda_build=False)
    kind, [note] = choose_device("auto", "train.device=", [for_cpus] * 8)
    assert kind == "cpu"
    assert "node7, with 8 NVIDIA GPU(s): torch sees no GPU (Found no NVIDIA driver" in note
    assert "TRAINING ON THE CPU" in note
    kind, [note] = choose_device("auto", "train.device=", [FEW] * 8)
    assert (kind, "node9, with 4 NVIDIA GPU(s): 4 GPU(s) for 8 rank(s); TRAINING" in note) == (
        "cpu",
        True,
    )


def test_counts_gpus_on_the_bus_independently_of_the_driver(tmp_path):
    for name, vendor, kind in (
        ("0000:00:02.0", "0x8086", "0x030000"),
        ("0000:17:00.0", "0x10de", "0x030200"),
        ("0000:17:00.1", "0x10de", "0x040300"),
        ("0000:65:00.0", "0x10de", "0x030000"),
    ):
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert num_nvidia_gpus(tmp_path) == 2
    assert num_nvidia_gpus(tmp_path / "elsewhere") == 0


DIFFERENT = """
import os
import vit.distributed.process_group as distributed
from vit.distributed.devices import HostDevices
from vit.distributed.exit import run_command

def main():
    here = HostDevices("node1", 1, 1, 1, "")
    there = HostDevices("node7", 1, 0, 1, "Found no NVIDIA driver on your system")
    return distributed.join_world("auto", found=there if os.environ["RANK"] == "2" else here)

run_command(main)
"""


def test_ranks_on_different_hosts_end_immediately_with_one_message(tmp_path):
    """If ranks used different devices, some would use NCCL and others gloo, and all ranks would
    hang for ten minutes."""
    done = launch(DIFFERENT, tmp_path, ranks=3)
    assert done.returncode == 1, "the exit status must be torchrun's own"
    message = (
        "error: train.device=auto: 1 of 2 hosts cannot train on GPUs. node7: torch sees no GPU"
        " (Found no NVIDIA driver on your system). Check these hosts with nvidia-smi, start one"
        " rank per GPU (--nproc_per_node), exclude the hosts, or use train.device=cpu everywhere"
    )
    lines = done.stderr.splitlines()
    assert lines[0] == message, done.stderr
    assert lines[-2].strip() == f"traceback : {message}"
    assert set(lines[-1]) == {"="}
    assert "exitcode  : 2 " in done.stderr
    assert done.stderr.count("exitcode  :") == 1, (
        "torchrun's report must not repeat messages of other ranks"
    )


@pytest.mark.parametrize(("norm", "sent"), [(nn.BatchNorm1d(4), True), (nn.LayerNorm(4), False)])
def test_sends_buffers_before_each_step_only_if_they_change(norm, sent):
    """The fixed position embeddings of a ViT are identical on all ranks from the start, so ranks do
    not need to send them."""
    model = nn.Sequential(nn.Linear(4, 4), norm)
    model.register_buffer("pos_embed", torch.zeros(4))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = process_group.wrap(model, World(0, 2, torch.device("cpu")))
        assert wrapped.will_sync_module_buffers() is sent
    finally:
        dist.destroy_process_group()


def test_planners_assume_the_bucket_size_of_ddp():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = process_group.wrap(nn.Linear(4, 4), World(0, 2, torch.device("cpu")))
        assert wrapped._get_ddp_logging_data()["bucket_cap_bytes"] == process_group.REDUCED_AT_ONCE
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("platform", "peak"), [("linux", 3 * 2**20), ("darwin", 3 * 2**30)])
def test_the_peak_memory_of_a_process_is_in_gib(platform, peak, monkeypatch):
    """macOS reports bytes, and Linux reports KiB."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=peak))
    assert process_group.peak_memory_gib(torch.device("cpu")) == 3.0


def test_fp32_is_fp32_and_kernels_are_not_chosen_by_timing(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    process_group.join_world("cpu")
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.benchmark
    assert torch.get_float32_matmul_precision() == "highest"
    has_nvml = ctypes.util.find_library("nvidia-ml") is not None
    expected = "expandable_segments:True" if has_nvml else None
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    process_group.join_world("cpu")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "backend:native", (
        "the setting of the user must take precedence"
    )
