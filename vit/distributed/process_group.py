"""Join torchrun's process group, choose the device, and wrap the model.

torchrun sets RANK, WORLD_SIZE and LOCAL_RANK. `join_world` reads these variables, agrees with the
other ranks on the kind of device, and returns the `World` (vit/distributed/world.py) that all other
modules use. CPU ranks communicate through gloo, and GPU ranks through NCCL.
"""

import ctypes
import inspect
import os
import resource
import socket
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from vit.distributed import flight_recorder
from vit.distributed.attempt import may_restart, part_of_attempt
from vit.distributed.devices import (
    HostDevices,
    bind_near,
    choose_device,
    find_devices,
    gpu_addresses,
)
from vit.distributed.launcher import (
    check_variables,
    end_with_launcher,
    is_main_process,
    local_world_size,
    world_size,
)
from vit.distributed.world import COLLECTIVE_TIMEOUT, AlreadyReported, RankLost, World
from vit.system.host import cpu_name

__all__ = [
    "AlreadyReported",
    "RankLost",
    "World",
    "is_main_process",
    "join_world",
    "kernels_of",
    "local_world_size",
    "make_deterministic",
    "no_sync",
    "world_size",
    "wrap",
]

REDUCED_AT_ONCE = 25 * 2**20
"""The number of gradient bytes that DDP reduces in a single all-reduce (torch's default)."""

_joined: World | None = None

KERNEL_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
"""Environment variables that restrict the CPU instructions of oneDNN and MKL."""


def announce_end(message: str) -> None:
    """Call `World.announce_end` if this process has joined a world."""
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
    """Join torchrun's process group. Without torchrun, return a world of one rank.

    Args:
        device: "cpu", "cuda" or "auto", which means GPUs if every host has one per rank, else CPUs.
        setting: The prefix of `device` in messages: a setting or a flag.
        found: The devices of this host, or None to find them with `find_devices`.
        deterministic: Whether GPUs use only deterministic operations.
        collective_timeout: The time after which gloo and NCCL abort a collective.
        limit: The time that rank 0 waits for the other ranks, or None for COLLECTIVE_TIMEOUT.

    Raises:
        ValueError: a host has fewer GPUs than ranks, hosts differ, or the ranks cannot connect.
        RankLost: a rank does not join in time.
    """
    began = time.perf_counter()
    check_variables()
    _set_backends()
    if deterministic:
        make_deterministic()

    rank = int(os.environ.get("RANK", "0"))
    size = world_size()
    store: dist.Store | None = None
    # RANK may also be set by hand, but only torchrun sets this variable, even for a single rank.
    if "TORCHELASTIC_RUN_ID" in os.environ or size > 1:
        end_with_launcher()

    if size > 1:
        try:
            store, rank, _ = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
        except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:
            raise ValueError(_why_not_met(str(error))) from None
        if may_restart():
            store = part_of_attempt(store, rank, size, limit or COLLECTIVE_TIMEOUT)

    own_store = dist.PrefixStore("vit", store) if store is not None else None
    global _joined
    _joined = world = World(rank, size, torch.device("cpu"), own_store)
    world = _agree_on_device(world, device, setting, found or find_devices(), limit)

    if world.device.type == "cuda":
        # Set the device before the first CUDA call. Otherwise every rank would open a context on
        # GPU 0.
        torch.cuda.set_device(world.device)
        # Bind to the cores before NCCL's threads and the loader workers start, because they inherit
        # the binding.
        bind_near(gpu_addresses(local_world_size()), world.device.index)
        flight_recorder.start_recording()

    if store is not None:
        _connect(world, store, collective_timeout)
    return replace(world, joined_s=time.perf_counter() - began)


def _connect(world: World, store: dist.Store, timeout: timedelta) -> None:
    """Connect the ranks with NCCL or gloo. Raises ValueError if they cannot connect."""
    on_gpu = world.device.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=timeout,
            store=store,
            rank=world.rank,
            world_size=world.size,
            device_id=world.device if on_gpu else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise ValueError(_why_not_met(str(error))) from None
    except RuntimeError as error:
        problem = _wrong_interface(str(error))
        if problem:
            raise ValueError(problem) from None
        raise


def _agree_on_device(
    world: World, device: str, setting: str, found: HostDevices, limit: timedelta | None = None
) -> World:
    """Return `world` with this rank's device and the hosts and process ids of all ranks.

    Rank 0 decides for all ranks before NCCL or gloo is selected, because ranks with different
    backends would wait for each other. Raises the errors of `choose_device`.
    """
    space = _pid_space()
    own = {"pid": (space, os.getpid()), "found": asdict(found)}
    if not world.is_main:
        world.gather("rank", own)

    def decide() -> tuple[str, list[tuple[str, int]]]:
        """Return the kind of device, and (host, number of ranks) for each host, in rank order."""
        # Gather inside `decide`, so that all ranks raise the error if one rank does not join.
        devices = [HostDevices(**rank["found"]) for rank in world.gather("rank", own, limit)]
        kind, notes = choose_device(device, setting, devices)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        # Every rank receives the result. One name per host keeps the result short.
        rows = groupby(each.host for each in devices)
        return kind, [(host, len(list(row))) for host, row in rows]

    kind, rows = world.broadcast_from_main(decide)
    chosen = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if kind == "cuda"
        else torch.device("cpu")
    )
    if world.size == 1:
        return replace(world, device=chosen)

    hosts = tuple(chain.from_iterable([host] * number for host, number in rows))
    ranks_here = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    pids = [each["pid"] for each in world.gathered("rank", ranks_here)]
    host_pids = {
        rank: pid
        for rank, (pid_space, pid) in zip(ranks_here, pids, strict=True)
        if space and pid_space == space
    }
    return replace(world, device=chosen, hosts=hosts, _host_pids=host_pids)


def _pid_space() -> str:
    """Return an identifier of this process's kernel and container, or "" if unknown.

    Two ranks can look up each other's process ids only if their identifiers are the same.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _set_backends() -> None:
    """Set options of torch whose defaults would change results or waste memory."""
    # `fp32` must mean fp32. TF32, the default of cuDNN, is 8 times as fast but has only 10 bits of
    # fraction. Users who want speed can set bf16.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False

    # Benchmarking may choose another kernel after a resume, which would change the bits.
    torch.backends.cudnn.benchmark = False

    # Augmentation allocates tensors of hundreds of sizes in each step, which would fragment GPU
    # memory without expandable segments. A value set by the user takes precedence.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and _has_nvml():
        # torch reads the variable when it creates the first GPU tensor.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def _has_nvml() -> bool:
    """Return whether NVIDIA's management library loads, as in all but the smallest containers.

    For expandable segments, torch 2.15 calls this library without checking that it exists. If the
    library is missing, the process ends with a segmentation fault.
    """
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def make_deterministic() -> None:
    """Make torch use only deterministic GPU operations and raise an error for all others.

    Libraries read their environment variables when CUDA starts, so call this function before that.
    It has no effect on CPUs.
    """
    # This setting applies to the backward pass of flash attention and to cuBLAS. It also stops
    # torch.compile from choosing kernels by timing.
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True

    # By default, this mode also fills new memory with a fixed value. That takes time and would only
    # hide reads of uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    # In deterministic mode, torch computes matrix products only with these values of the variable.
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # NVSwitch reductions have no fixed order (NVIDIA/Megatron-LM, --deterministic-mode).
    os.environ.setdefault("NCCL_ALGO", "^NVLS")


def _wrong_interface(reason: str) -> str:
    """Return a message if gloo or NCCL did not find the network interface that the user named, else
    ""."""
    signs = {
        "GLOO_SOCKET_IFNAME": "ind address for",
        "NCCL_SOCKET_IFNAME": "no socket interface found",
    }
    for name, sign in signs.items():
        if sign in reason:
            return (
                f"the environment variable {name}={os.environ.get(name)}: no such interface with an"
                f" address on {socket.gethostname()}: expected one of"
                f" {', '.join(interface for _, interface in socket.if_nameindex())} (gloo does not"
                f" know NCCL's ^, = and prefixes), or `unset {name}`"
            )
    return ""


def _why_not_met(reason: str) -> str:
    """Return a message about torch's reason why this rank could not connect to rank 0."""
    port = os.environ.get("MASTER_PORT")
    if "EADDRINUSE" in reason:
        return (
            f"MASTER_PORT={port} is in use by another program: choose another, or let torchrun"
            " --standalone find a free one"
        )

    first_line = (reason.splitlines() or [""])[0].rstrip(". ")
    return (
        f"rank 0 cannot be reached at {os.environ.get('MASTER_ADDR')}:{port} ({first_line}): check"
        " that rank 0 runs and that MASTER_ADDR and MASTER_PORT are its address"
    )


def wrap(
    model: nn.Module, world: World, sync: bool = True, reduces_in_bf16: bool = False
) -> nn.Module:
    """Return `model` wrapped by DDP, or `model` itself if there is only one rank.

    DDP copies rank 0's weights to all ranks, unless `sync` is False because a checkpoint will be
    loaded. For models with batch norm, whose buffers change during training, DDP also copies the
    buffers before each forward pass. reduces_in_bf16: whether DDP rounds gradients to bf16, divides
    them by the number of ranks and sums them in bf16, instead of fp32.
    """
    if world.size == 1:
        return model

    options: dict[str, Any] = {"gradient_as_bucket_view": True, "init_sync": sync}
    if world.device.type == "cuda":
        options["device_ids"] = [world.device]
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        # Buffers of other models, such as fixed positions, never change, so broadcasting them
        # wastes time. torch 2.15 has renamed the option.
        is_renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        options["forward_sync_buffers" if is_renamed else "broadcast_buffers"] = False

    wrapped = DistributedDataParallel(model, **options)
    if reduces_in_bf16:
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the gradients of `model` accumulate without an all-reduce.

    The forward pass must also run inside the context.
    """
    # FSDP2, which `wrap` does not use, would need `set_requires_gradient_sync`. Without that call,
    # its gradients would be correct, but would be reduced after each micro-batch.
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def now_s(device: torch.device) -> float:
    """Wait until the device has finished all queued work, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of the GPU in GiB, or of this process if the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    per_gib = 2**30 if sys.platform == "darwin" else 2**20  # macOS reports bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_gib


def kernels_of(device: torch.device) -> str:
    """Describe everything on this host that affects the bits of a sum on `device`."""
    version = f"torch {torch.__version__}"
    if device.type == "cuda":
        return f"{version} on {torch.cuda.get_device_name(device)}"
    # BLAS libraries choose kernels by CPU vendor and cache size.
    own = (
        f"{version} on {cpu_name()} with {torch.backends.cpu.get_cpu_capability()},"
        f" {torch.get_num_threads()} thread(s)"
    )
    limits = [f"{name}={os.environ[name]}" for name in KERNEL_LIMITS if name in os.environ]
    return ", ".join([own, *limits])
