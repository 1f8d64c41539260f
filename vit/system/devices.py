"""Which kind of device a run computes on: what each rank finds, and what follows for all of them.

Each rank looks at what torch can use on its host and what is built in. Rank 0 decides for all,
before any of them chooses between gloo and NCCL: a host that chose the other one would wait for the
rest until a time limit ends the run.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from vit.system.host import num_nvidia_gpus


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
            said = str(error).split(". ")[0].splitlines()[0].rstrip(".")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    built_in = 0 if hidden else num_nvidia_gpus(root)
    return HostDevices(socket.gethostname(), ranks, gpus, built_in, said)


def choose_device(asked: str, setting: str, found: list[HostDevices]) -> tuple[str, list[str]]:
    """ "cpu" or "cuda" for all ranks, and notes to print.

    Args:
        asked: "auto", "cpu" or "cuda".
        setting: how messages name the setting of `asked`.
        found: the devices of each rank.

    Raises:
        ValueError: some hosts lack a GPU per rank while "cuda" is asked for or other hosts have
            one; they are named.
    """
    if asked == "cpu":
        return "cpu", []
    hosts = list(dict.fromkeys(found))  # the ranks of a host find the same
    lacking = [host for host in hosts if host.gpus < host.ranks]
    if not lacking:
        return "cuda", []
    if asked == "cuda" and len(hosts) == 1:
        [here] = hosts
        if not here.gpus:
            raise ValueError(
                f"{setting}cuda, but torch sees no GPU here ({here.said}): use {setting}cpu, or"
                " check the driver with nvidia-smi"
            )
        raise ValueError(
            f"{setting}cuda, but this host has {here.gpus} GPU(s) for {here.ranks} ranks: start"
            f" torchrun with --nproc_per_node={here.gpus}"
        )
    if asked == "cuda" or len(lacking) < len(hosts):
        fine = next((host for host in hosts if host not in lacking), None)
        elsewhere = f", where {fine.host} has {fine}" if fine is not None else ""
        problems = "; ".join(f"{host.host}: {host}" for host in lacking)
        raise ValueError(
            f"{setting}{asked}: {len(lacking)} of {len(hosts)} host(s) cannot train on"
            f" GPUs{elsewhere}. {problems}. Check them with nvidia-smi, leave them out, or use"
            f" {setting}cpu everywhere"
        )
    notes = []
    for host in lacking:
        if host.gpus:
            notes.append(
                f"{host.host} has {host}: training on the CPU; use --nproc_per_node={host.gpus} for"
                " the GPU"
            )
        elif host.nvidia_gpus:
            notes.append(
                f"{host.host} has {host.nvidia_gpus} NVIDIA GPU(s), but {host}: TRAINING ON THE"
                " CPU, many times slower. Check nvidia-smi and that this torch is built for its"
                f" driver; {setting}cuda makes it an error, {setting}cpu leaves this note out"
            )
    return "cpu", notes
