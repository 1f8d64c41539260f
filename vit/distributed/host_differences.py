"""Compare the software and settings of all hosts, and report each difference with its hosts.

each rank: `software` and the caller's values -> {name: value} -> rank 0: `differences`
"""

import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

import torch

from vit.distributed.process_group import World
from vit.system.host import text_of

VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "FI_", "UCX_", "OMP_NUM_THREADS")
"""Prefixes of environment variables that affect how ranks communicate and compute."""
_SAME_ENVIRONMENT = "install the same on all hosts"
REMEDIES = {
    "vit": "all hosts must see the same checkout",
    "config": "all hosts must see the same files",
    "driver": "exclude these hosts, or install the same driver on all hosts",
}
"""Maps the name of a value to the remedy for a difference. Names that are missing here are those of
software versions and environment variables."""
_MAY_DIFFER = ("CPU kernels", "GPU")
"""The names of values whose differences affect only the speed or the last bits of sums."""


class Difference(NamedTuple):
    """A setting or version that differs between ranks."""

    name: str
    text: str
    """The values with their hosts, and a remedy."""
    is_fatal: bool


def software() -> dict[str, str]:
    """Return all versions and settings that should be the same on all ranks, keyed by name."""
    versions = {"torch": torch.__version__, "Python": platform.python_version()}
    if torch.cuda.is_available():
        versions["CUDA"] = str(torch.version.cuda)
        versions["driver"] = driver_version() or "unknown"
        if torch.distributed.is_nccl_available():
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["GPU"] = torch.cuda.get_device_name()
    versions["CPU kernels"] = torch.backends.cpu.get_cpu_capability()
    chosen = sorted(name for name in os.environ if name.startswith(VARIABLES))
    return {**versions, **{name: os.environ[name] for name in chosen}}


def driver_version(root: Path = Path("/")) -> str:
    """Return the version of the NVIDIA kernel module, or "". `root`: the folder that contains
    `proc`."""
    match = re.search(
        r"Kernel Module.*?(\d+(?:\.\d+)+)", text_of(root / "proc/driver/nvidia/version")
    )
    return match[1] if match else ""


def differences(by_rank: Mapping[int, Mapping[str, str]], hosts: Sequence[str]) -> list[Difference]:
    """Return the values that differ between ranks.

    Args:
        by_rank: Maps each reporting rank to its values, keyed by name.
        hosts: The host name of each rank, or () if all ranks are on one host.
    """
    result = []
    for name in dict.fromkeys(chain.from_iterable(by_rank.values())):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, values in sorted(by_rank.items()):
            ranks_by_value.setdefault(values.get(name, "none"), []).append(rank)
        if len(ranks_by_value) < 2:
            continue

        # The other hosts should be changed to the most common value, so list it first.
        most_common = sorted(ranks_by_value.items(), key=lambda pair: -len(pair[1]))
        listed = ", ".join(f"{value} on {places(ranks, hosts)}" for value, ranks in most_common)

        if name in _MAY_DIFFER:
            remedy = "all ranks run at the speed of the slowest, and sums round differently"
        elif name.startswith(VARIABLES):
            remedy = f"export the same {name} everywhere"
        else:
            remedy = REMEDIES.get(name, _SAME_ENVIRONMENT)
        result.append(Difference(name, f"{name} {listed}: {remedy}", name not in _MAY_DIFFER))
    return result


def places(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Return the hosts of `ranks`, such as "a (ranks 0-7), b (rank 8)".

    hosts: the host name of each rank, or () if unknown.
    """
    ranks = sorted(ranks)
    if not hosts:
        return _numbers(ranks)
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    return ", ".join(f"{host} ({_numbers(own)})" for host, own in by_host.items())


def _numbers(ranks: Sequence[int]) -> str:
    """Return text such as "rank 3" or "ranks 0-3, 8"."""
    rows = [
        [rank for _, rank in row]
        for _, row in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{row[0]}-{row[-1]}" if len(row) > 1 else f"{row[0]}" for row in rows]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def compare_hosts(world: World, own: Mapping[str, str]) -> list[str]:
    """Return notes about software that differs between hosts. All ranks must call this.

    Only the first rank on each host reports, because all processes on a host start in the same way.
    The result is [] on all ranks except rank 0, and on a single host.

    own: values to add to those of `software`.
    """
    if len(set(world.hosts)) < 2:
        return []
    reports = world.gather("software", {**software(), **own} if world.is_local_main else None)
    by_rank = {rank: report for rank, report in enumerate(reports) if report is not None}
    return [f"note: hosts differ: {each.text}" for each in differences(by_rank, world.hosts)]
