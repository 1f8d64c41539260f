"""Choose the kind of device for all ranks, and bind each rank to the cores next to its GPU.

Each rank finds out which GPUs its host has and which of them torch can use. Rank 0 chooses the kind
of device for all ranks before any rank selects gloo or NCCL, because ranks with different backends
would wait for each other until a time limit ends the run.

On a host with several sockets, a rank is bound to the cores next to its GPU (`bind_near`):

    PCI addresses of the GPUs -> numa_node of each -> cpulist of the node -> this process's cores

The rank's workers, page-locked buffers and NCCL threads inherit these cores. Access to the memory
of another socket is slower. torchrun's `--numa-binding` does the same, but it needs numactl and
fails on hosts that do not report the NUMA nodes of their GPUs.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit.system.host import bind_to_cores, num_nvidia_gpus, text_of


@dataclass(frozen=True)
class HostDevices:
    """The devices of a host, as found by one of its ranks."""

    host: str
    ranks: int
    """The number of this run's ranks on the host."""
    gpus: int
    nvidia_gpus: int
    """The number of NVIDIA GPUs, usable or not; 0 if CUDA_VISIBLE_DEVICES hides all of them."""
    reason: str
    """torch's explanation of why it cannot use a GPU, or ""."""
    has_cuda_build: bool = True
    """Whether torch was built with GPU support."""

    def __str__(self) -> str:
        seen = f"{self.gpus} GPU(s) for {self.ranks} rank(s)"
        return seen if self.gpus else f"torch sees no GPU ({self.reason})"


def find_devices(root: Path = Path("/")) -> HostDevices:
    """Return the devices of this host. `root`: the folder that contains `proc` and `sys`."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reason = ""
    if not gpus:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            # Keep only the first sentence of the first line.
            reason = _with_remedy(str(error).split(". ")[0].splitlines()[0].rstrip("."))

    are_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return HostDevices(
        host=socket.gethostname(),
        ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        gpus=gpus,
        nvidia_gpus=0 if are_hidden else num_nvidia_gpus(root),
        reason=reason,
        has_cuda_build=torch.version.cuda is not None or torch.version.hip is not None,
    )


def gpu_addresses(number: int) -> list[str]:
    """Return the PCI addresses of the first `number` GPUs in Linux's format."""
    gpus: list[Any] = [torch.cuda.get_device_properties(index) for index in range(number)]
    return [
        f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in gpus
    ]


def _with_remedy(reason: str) -> str:
    """Return torch's `reason`, with a remedy if the driver or the torch build is the cause."""
    remedies = {
        "too old": f"this torch is built for CUDA {torch.version.cuda}: update the driver, or"
        " install a torch for an older CUDA (https://pytorch.org)",
        "not compiled with CUDA": "this torch is built for CPUs only: install one for CUDA"
        " (https://pytorch.org)",
    }
    return "; ".join([reason, *(remedy for sign, remedy in remedies.items() if sign in reason)])


def choose_device(choice: str, setting: str, devices: list[HostDevices]) -> tuple[str, list[str]]:
    """Return "cpu" or "cuda" for all ranks, and notes to print.

    Args:
        choice: The user's choice: "auto", "cpu" or "cuda".
        setting: The name of the setting that contains `choice`, followed by "=", for messages.
        devices: The devices of each rank.

    Raises:
        ValueError: a host has fewer GPUs than ranks, although `choice` is "cuda" or other hosts
            have enough; or torch has GPU support, but cannot use a host's NVIDIA GPUs.
    """
    if choice == "cpu":
        return "cpu", []
    hosts = list(dict.fromkeys(devices))  # All ranks on a host have the same entry.
    lacking = [host for host in hosts if host.gpus < host.ranks]
    if not lacking:
        return "cuda", []

    # Training ViT-B on the CPUs of a GPU node would exceed the job's time limit, so unusable GPUs
    # are an error. With a CPU-only build of torch, the user probably wants the CPU.
    has_unusable = any(h.nvidia_gpus and not h.gpus and h.has_cuda_build for h in lacking)
    needs_gpus = choice == "cuda" or len(lacking) < len(hosts) or has_unusable
    if needs_gpus:
        problems = "; ".join(f"{host.host}: {host}" for host in lacking)
        raise ValueError(
            f"{setting}{choice}: {len(lacking)} of {len(hosts)} hosts cannot train on GPUs."
            f" {problems}. Check these hosts with nvidia-smi, start one rank per GPU"
            f" (--nproc_per_node), exclude the hosts, or use {setting}cpu everywhere"
        )

    notes = [
        f"{host.host}, with {host.nvidia_gpus} NVIDIA GPU(s): {host}; TRAINING ON THE CPU, many"
        " times slower. Check nvidia-smi and that this torch is built for its driver, and start one"
        f" rank for each GPU (--nproc_per_node); set {setting}cuda to stop with an error instead,"
        f" or {setting}cpu to silence this note"
        for host in lacking
        if host.gpus or host.nvidia_gpus
    ]
    return "cpu", notes


def bind_near(addresses: Sequence[str], own: int, root: Path = Path("/")) -> None:
    """Bind this process to the cores next to its GPU, if they are known.

    Args:
        addresses: The PCI address ("0000:dc:00.0") of each GPU used on this host, in the order of
            the local ranks.
        own: The index of this rank's GPU in `addresses`.
        root: The folder that contains `sys`.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    near = cores_near(addresses, own, allowed, root)
    if near != allowed:
        bind_to_cores(near)


def cores_near(addresses: Sequence[str], own: int, allowed: set[int], root: Path) -> set[int]:
    """Return the `allowed` cores that are next to GPU `own`, or else all `allowed` cores.

    All allowed cores are returned if the GPU's NUMA node is unknown, or if binding would leave some
    ranks with fewer cores than others. Some virtual machines report one node for all GPUs, and some
    jobs have most of their cores on another node.
    """
    nodes = [text_of(root / "sys/bus/pci/devices" / address / "numa_node") for address in addresses]
    if not nodes[own].isdecimal():  # "" if the file is missing; -1 if no node is known
        return allowed
    cores = text_of(root / "sys/devices/system/node" / f"node{nodes[own]}" / "cpulist")
    near = allowed & _cores_of(cores)
    is_enough = len(near) * len(nodes) >= len(allowed) * nodes.count(nodes[own])
    return near if is_enough else allowed


def _cores_of(text: str) -> set[int]:
    """Return the core numbers in a list such as "0-3,8,10-11"."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
