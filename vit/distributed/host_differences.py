"""What must be alike on all ranks, and how a difference is told: which value is on which hosts.

each rank: `software`, and what its caller adds -> {name: value} -> rank 0: `differences`
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from vit.distributed.process_group import World
from vit.system.host import text_of

VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "FI_", "UCX_", "OMP_NUM_THREADS")
"""Beginnings of variables that decide how ranks talk and compute."""
_SAME_ENVIRONMENT = "install the same on all hosts"
REMEDIES = {
    "vit": "all hosts must see the same checkout",
    "config": "all hosts must see the same files",
    "driver": "leave the hosts out, or give all the same driver",
}
"""By name; what is not here is installed, or a variable."""
_MAY_DIFFER = ("CPU kernels", "GPU")
"""These cost speed, or the last bits of a sum, and no more."""


class Difference(NamedTuple):
    """Values of one name that are not the same on all ranks."""

    name: str
    said: str
    """Which value is where, and what to do."""
    is_fatal: bool


def software() -> dict[str, str]:
    """Return versions and settings of this rank that all must have alike, by name."""
    found = {"torch": torch.__version__, "Python": platform.python_version()}
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        found["driver"] = driver_version() or "unknown"
        if torch.distributed.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["GPU"] = torch.cuda.get_device_name()
    found["CPU kernels"] = torch.backends.cpu.get_cpu_capability()
    chosen = sorted(name for name in os.environ if name.startswith(VARIABLES))
    return {**found, **{name: os.environ[name] for name in chosen}}


def driver_version(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's kernel module, "" if there is none. `root`: of `proc`."""
    found = re.search(
        r"Kernel Module.*?(\d+(?:\.\d+)+)", text_of(root / "proc/driver/nvidia/version")
    )
    return found[1] if found else ""


def differences(found: Mapping[int, Mapping[str, str]], hosts: Sequence[str]) -> list[Difference]:
    """Return what differs between ranks.

    found: of each rank that has told, the values by name. hosts: of each rank, () for one.
    """
    told = []
    for name in dict.fromkeys(name for values in found.values() for name in values):
        where: dict[str, list[int]] = {}
        for rank, values in sorted(found.items()):
            where.setdefault(values.get(name, "none"), []).append(rank)
        if len(where) < 2:
            continue
        # What most have comes first: the others are to be changed.
        common = sorted(where.items(), key=lambda pair: -len(pair[1]))
        listed = ", ".join(f"{value} on {places(ranks, hosts)}" for value, ranks in common)
        remedy = REMEDIES.get(name)
        if remedy is None:
            is_variable = name.startswith(VARIABLES)
            remedy = f"export the same {name} everywhere" if is_variable else _SAME_ENVIRONMENT
        if name in _MAY_DIFFER:
            remedy = "the slowest sets the pace, and sums round differently"
        told.append(Difference(name, f"{name} {listed}: {remedy}", name not in _MAY_DIFFER))
    return told


def places(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Return where `ranks` are: "a (ranks 0-7), b (rank 8)"; hosts: of each rank, () if unknown."""
    ranks = sorted(ranks)
    if not hosts:
        return _numbers(ranks)
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    return ", ".join(f"{host} ({_numbers(own)})" for host, own in by_host.items())


def _numbers(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-3, 8"."""
    rows = [
        [rank for _, rank in row]
        for _, row in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{row[0]}-{row[-1]}" if len(row) > 1 else f"{row[0]}" for row in rows]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def compare_hosts(world: World, own: Mapping[str, str]) -> list[str]:
    """Return lines about what is alike on the hosts and what is not; every rank calls it.

    own: what this rank adds to `software`. On rank 0 only, and [] where there is one host: the
    processes of a host were started alike. One message of each host.
    """
    if len(set(world.hosts)) < 2:
        return []
    values = {**software(), **own} if world.is_local_main else None
    told = world.gather("software", values)
    found = {rank: each for rank, each in enumerate(told) if each is not None}
    if not found:
        return []
    unlike = differences(found, world.hosts)
    common = [
        f"{name} {found[0][name]}"
        for name in ("torch", "Python", "driver")
        if name in found[0] and name not in {each.name for each in unlike}
    ]
    line = f"hosts: {len(found)} with {world.size} ranks, the same {', '.join(common)}"
    return [line] * bool(common) + [f"note: hosts differ: {each.said}" for each in unlike]
