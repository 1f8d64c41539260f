"""Which cores are next to a GPU: in a host of several sockets the memory of the others is far.

    PCI addresses of the GPUs -> numa_node of each -> cpulist of the node -> this process's cores

A rank that is bound to the cores next to its GPU has its workers, its page-locked slots and NCCL's
threads there, too, because what it starts inherits its cores. (torchrun's `--numa-binding` does the
same with numactl, which is not everywhere, and stops where a host does not say where its GPUs are.)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vit.system.host import bind_to_cores, text_of


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
