"""Which kind of device a run computes on: what each rank finds, and what follows for all of them.

Each rank looks at what torch can use on its host and what is built in. Rank 0 decides for all,
before any of them chooses between gloo and NCCL: a host that chose the other one would wait for the
rest until a time limit ends the run.

On a host of several sockets a rank is bound to the cores next to its GPU (`bind_near`):

    PCI addresses of the GPUs -> numa_node of each -> cpulist of the node -> this process's cores

Its workers, its page-locked slots and NCCL's threads inherit these cores; the memory of the other
socket is far. torchrun's `--numa-binding` needs numactl, and fails on a host that does not report
where its GPUs are.
"""

from __future__ import annotations

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
    """The devices that a rank finds on its host."""

    host: str
    ranks: int
    """Ranks of this run on the host."""
    gpus: int
    """GPUs that torch can use."""
    nvidia_gpus: int
    """GPUs that are built in, usable or not; 0 where CUDA_VISIBLE_DEVICES hides all."""
    said: str
    """Why torch can use none, in its own words."""
    has_cuda_build: bool = True
    """Whether torch is built for GPUs."""

    def __str__(self) -> str:
        if not self.gpus:
            return f"torch sees no GPU ({self.said})"
        return f"{self.gpus} GPU(s) for {self.ranks} rank(s)"


def find_devices(root: Path = Path("/")) -> HostDevices:
    """The devices of this host. `root`: the folder of `proc` and `sys`."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    said = ""
    if not gpus:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            said = _with_remedy(str(error).split(". ")[0].splitlines()[0].rstrip("."))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    built_in = 0 if hidden else num_nvidia_gpus(root)
    has_cuda_build = torch.version.cuda is not None or torch.version.hip is not None
    return HostDevices(socket.gethostname(), ranks, gpus, built_in, said, has_cuda_build)


def gpu_addresses(number: int) -> list[str]:
    """Return the places of the first `number` GPUs on the PCI bus, as Linux names them."""
    found: list[Any] = [torch.cuda.get_device_properties(index) for index in range(number)]
    return [f"{it.pci_domain_id:04x}:{it.pci_bus_id:02x}:{it.pci_device_id:02x}.0" for it in found]


def _with_remedy(said: str) -> str:
    """Return torch's reason `said`, with what to do where its driver or its build is the cause."""
    remedies = {
        "too old": f"this torch is built for CUDA {torch.version.cuda}: update the driver, or"
        " install a torch for an older CUDA (https://pytorch.org)",
        "not compiled with CUDA": "this torch is built for CPUs only: install one for CUDA"
        " (https://pytorch.org)",
    }
    return "; ".join([said, *(remedy for sign, remedy in remedies.items() if sign in said)])


def choose_device(asked: str, setting: str, found: list[HostDevices]) -> tuple[str, list[str]]:
    """ "cpu" or "cuda" for all ranks, and notes to print.

    Args:
        asked: "auto", "cpu" or "cuda".
        setting: how messages name the setting of `asked`.
        found: the devices of each rank.

    Raises:
        ValueError: some hosts lack a GPU per rank while "cuda" is asked for or other hosts have
            one, or have NVIDIA GPUs that a torch for GPUs cannot use; they are named.
    """
    if asked == "cpu":
        return "cpu", []
    hosts = list(dict.fromkeys(found))  # the ranks of a host find the same
    lacking = [host for host in hosts if host.gpus < host.ranks]
    if not lacking:
        return "cuda", []
    # Ranks of ViT-B on the CPUs of a GPU node would train until the job's time limit. Who has
    # installed a torch for CPUs wants that: a laptop, the demo.
    has_unusable = any(h.nvidia_gpus and not h.gpus and h.has_cuda_build for h in lacking)
    if asked == "cuda" or len(lacking) < len(hosts) or has_unusable:
        problems = "; ".join(f"{host.host}: {host}" for host in lacking)
        raise ValueError(
            f"{setting}{asked}: {len(lacking)} of {len(hosts)} host(s) cannot train on GPUs."
            f" {problems}. Check them with nvidia-smi, start one rank for each GPU"
            f" (--nproc_per_node), leave them out, or use {setting}cpu everywhere"
        )
    notes = [
        f"{host.host}, with {host.nvidia_gpus} NVIDIA GPU(s): {host}; TRAINING ON THE CPU, many"
        " times slower. Check nvidia-smi and that this torch is built for its driver, and start one"
        f" rank for each GPU (--nproc_per_node); {setting}cuda makes it an error, {setting}cpu"
        " leaves this note out"
        for host in lacking
        if host.gpus or host.nvidia_gpus
    ]
    return "cpu", notes


def bind_near(addresses: Sequence[str], own: int, root: Path = Path("/")) -> None:
    """Bind this process to the cores next to its GPU; without effect where that is not known.

    addresses: on the PCI bus ("0000:dc:00.0"), of the GPU of each rank of this host. own: which of
    them is this rank's. root: the folder of `sys`.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    near = cores_near(addresses, own, allowed, root)
    if near != allowed:
        bind_to_cores(near)


def cores_near(addresses: Sequence[str], own: int, allowed: set[int], root: Path) -> set[int]:
    """Return those of the `allowed` cores that are next to GPU `own`, or all of them.

    All, if the system does not say where it is, or if a rank would have fewer cores so: on some
    virtual machines all GPUs are said to be on one node, and some jobs have most cores on another.
    """
    nodes = [text_of(root / "sys/bus/pci/devices" / it / "numa_node") for it in addresses]
    if not nodes[own].isdecimal():  # "": no such file; -1: the firmware does not say
        return allowed
    cores = text_of(root / "sys/devices/system/node" / f"node{nodes[own]}" / "cpulist")
    near = allowed & _cores_of(cores)
    if len(near) * len(nodes) < len(allowed) * nodes.count(nodes[own]):
        return allowed
    return near


def _cores_of(text: str) -> set[int]:
    """Return the numbers of "0-3,8,10-11"."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
