"""Join torchrun's process group, choose the device, wrap the model.

torchrun sets RANK, WORLD_SIZE and LOCAL_RANK. `join_world` reads them once, agrees with the other
ranks on the kind of device, and returns the `World` (vit/distributed/world.py) that other modules
get. CPUs use gloo, GPUs NCCL; nothing else differs.
"""

from __future__ import annotations

import inspect
import os
import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from vit.distributed.attempt import may_restart, part_of_attempt
from vit.distributed.launcher import (
    end_with_launcher,
    is_main_process,
    local_world_size,
    world_size,
)
from vit.distributed.world import COLLECTIVE_TIMEOUT, AlreadyReported, RankLost, World
from vit.system.devices import HostDevices, bind_near, choose_device, find_devices, gpu_addresses

__all__ = [
    "AlreadyReported",
    "RankLost",
    "World",
    "is_main_process",
    "join_world",
    "local_world_size",
    "make_deterministic",
    "no_sync",
    "world_size",
    "wrap",
]

REDUCED_AT_ONCE = 25 * 2**20
"""Bytes of gradients in one of DDP's all-reduces (torch's default)."""
_joined: World | None = None
"""The world of this process."""


def announce_end(message: str) -> None:
    """`World.announce_end` of this process's world, for the end of a process that may have none."""
    if _joined is not None:
        _joined.announce_end(message)


def join_world(
    device: str = "auto",
    setting: str = "train.device=",
    found: HostDevices | None = None,
    *,
    deterministic: bool = False,
    collective_timeout: timedelta = COLLECTIVE_TIMEOUT,
    limit: timedelta | None = None,
) -> World:
    """Join the process group that torchrun describes, or be a world of one.

    Args:
        device: "cpu"; "cuda"; or "auto", which is a GPU if every host has one per rank, else the
            CPU.
        setting: how messages name the setting or flag of `device`.
        found: devices of this host; None: what `find_devices` finds.
        deterministic: whether GPUs add in one order only.
        collective_timeout: after which gloo and NCCL end a run whose ranks do not come together.
        limit: how long rank 0 waits for the others; None: COLLECTIVE_TIMEOUT.

    Raises:
        ValueError: a host has fewer GPUs than ranks; hosts differ; the ranks cannot meet.
        RankLost: a rank does not come.
    """
    began = time.perf_counter()
    _set_backends()
    if deterministic:
        make_deterministic()
    rank = int(os.environ.get("RANK", "0"))
    size = world_size()
    store: dist.Store | None = None
    if size > 1:
        end_with_launcher()
        try:
            store, rank, _ = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise ValueError(_why_not_met(str(error))) from None
        if may_restart():
            store = part_of_attempt(store, rank, size, limit or COLLECTIVE_TIMEOUT)
    own_store = dist.PrefixStore("vit", store) if store is not None else None
    global _joined
    _joined = world = World(rank, size, torch.device("cpu"), own_store)
    world = _agree_on_device(world, device, setting, found or find_devices(), limit)
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        # Before the first CUDA call: else every rank opens a context on GPU 0.
        torch.cuda.set_device(world.device)
        # Before threads of NCCL and loader workers: they inherit the cores.
        bind_near(gpu_addresses(local_world_size()), world.device.index)
    if store is not None:
        try:
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                timeout=collective_timeout,
                store=store,
                rank=rank,
                world_size=size,
                device_id=world.device if on_gpu else None,
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise ValueError(_why_not_met(str(error))) from None
    return replace(world, joined_s=time.perf_counter() - began)


def _agree_on_device(
    world: World, device: str, setting: str, found: HostDevices, limit: timedelta | None = None
) -> World:
    """`world` with this rank's device, and the hosts and processes of all ranks.

    Rank 0 decides for all before NCCL or gloo is chosen: a host that chose the other one would wait
    for the rest, and the rest for it. Raises as `choose_device` does.
    """
    space = _pid_space()
    own = {"pid": (space, os.getpid()), "found": asdict(found)}
    if not world.is_main:
        world.gather("rank", own)

    def decide() -> tuple[str, list[tuple[str, int]]]:
        # Gathered here, so that the others get to know if a rank does not come.
        gathered = world.gather("rank", own, limit)
        devices = [HostDevices(**rank["found"]) for rank in gathered]
        kind, notes = choose_device(device, setting, devices)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        # Each rank gets this: a name for each host, and not for each rank.
        rows = groupby(each.host for each in devices)
        return kind, [(host, len(list(row))) for host, row in rows]

    kind, rows = world.broadcast_from_main(decide)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")
    if world.size == 1:
        return replace(world, device=chosen)
    hosts = tuple(host for host, number in rows for _ in range(number))
    beside = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    pids = [each["pid"] for each in world.gathered("rank", beside)]
    host_pids = {
        rank: pid for rank, (its, pid) in zip(beside, pids, strict=True) if space and its == space
    }
    return replace(world, device=chosen, hosts=hosts, _host_pids=host_pids)


def _pid_space() -> str:
    """Identifies where a process id means the same process: the running kernel and the container.

    Empty where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _set_backends() -> None:
    """Fix what torch would decide by itself, or by variables that differ from host to host."""
    # fp32 means fp32. TF32, cuDNN's default, is 8 times as fast with 10 bits of fraction; bf16 is
    # the setting for speed.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    # Its timings would choose a different kernel after a resume, and so different bits.
    torch.backends.cudnn.benchmark = False
    # Augmentation allocates hundreds of sizes per step: without growing segments they fragment the
    # GPU's memory. The user's own settings win.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # read when the first tensor comes to a GPU
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def make_deterministic() -> None:
    """Let every operation add in the same order in each run, and refuse those that cannot.

    Before CUDA starts, as libraries read their variables then. CPUs compute as they do without it.
    """
    # Flash attention's backward pass and cuBLAS obey it, and the compiler does not choose kernels
    # by timing them.
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    # It would fill all new memory as well; what reads memory before writing it is a bug anywhere.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # The two that cuBLAS knows; torch refuses matrix products with any other one.
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # Sums within NVSwitch have no fixed order (NVIDIA/Megatron-LM, --deterministic-mode).
    os.environ.setdefault("NCCL_ALGO", "^NVLS")


def _why_not_met(reason: str) -> str:
    """Message for ranks that could not meet."""
    address = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    if "EADDRINUSE" in reason:
        return (
            f"MASTER_PORT={port} is in use by another program: choose another, or let torchrun"
            " --standalone find a free one"
        )
    first_line = (reason.splitlines() or [""])[0].rstrip(". ")
    return (
        f"rank 0 was not met at {address}:{port} ({first_line}): check that it runs there and"
        " MASTER_ADDR and MASTER_PORT name it"
    )


def wrap(model: nn.Module, world: World, sync: bool = True) -> nn.Module:
    """`model` under DDP, or itself in a world of one.

    Rank 0's weights go to all ranks, unless a checkpoint's will (sync=False); and before each
    forward pass its buffers if it has batch norms, whose buffers change in training.
    """
    if world.size == 1:
        return model
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "init_sync": sync}
    if world.device.type == "cuda":
        options["device_ids"] = [world.device]
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        # Other buffers, such as fixed positions, are equal on all ranks: save the broadcast.
        known = inspect.signature(DistributedDataParallel).parameters
        renamed = "forward_sync_buffers" in known  # in torch 2.15
        options["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
    return DistributedDataParallel(model, **options)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which gradients of a wrapped `model` accumulate without a reduction.

    The forward pass belongs inside, too.
    """
    # `wrap` knows only DDP. A module under FSDP2 has `set_requires_gradient_sync` instead; without
    # it the gradients would be right, but reduced after each micro-batch.
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory in GiB of the GPU, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    per_gib = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_gib
