"""Test that the cores closest to a GPU are read from the kernel's files on a host with several NUMA
nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vit.distributed.devices import cores_near

ROOT = Path(__file__).parents[2]
GPUS = [f"0000:{bus:02x}:00.0" for bus in range(8)]
CORES = {0: "0-15,32-47", 1: "16-31,48-63"}
ALL = set(range(64))
NEAR_1 = {*range(16, 32), *range(48, 64)}


def host(folder: Path, nodes: list[str], cores: dict[int, str] = CORES) -> Path:
    """Create the kernel's files for a host whose GPUs are on the given NUMA nodes. The value ""
    stands for an unknown node."""
    for address, node in zip(GPUS, nodes, strict=False):
        if node:
            path = folder / "sys/bus/pci/devices" / address / "numa_node"
            path.parent.mkdir(parents=True)
            path.write_text(f"{node}\n")
    for node, text in cores.items():
        path = folder / f"sys/devices/system/node/node{node}/cpulist"
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("nodes", "allowed", "expected"),
    [
        ("00001111", ALL, NEAR_1),
        # The rank is restricted to fewer cores than its share.
        ("00001111", ALL - {63}, ALL - {63}),
        ("00001111", set(range(8, 24)), set(range(16, 24))),
        # Slurm gave the rank no core on this NUMA node.
        ("00001111", set(range(16)), set(range(16))),
        ("01", ALL, NEAR_1),
        ("11111111", ALL, ALL),  # eight ranks share half of the cores
        ("1", ALL, ALL),  # a single rank gets all cores of the NUMA node
        ("1", NEAR_1, NEAR_1),
    ],
)
def test_a_rank_gets_the_cores_of_its_gpu_but_never_fewer_than_its_share(
    nodes, allowed, expected, tmp_path
):
    root = host(tmp_path, list(nodes))
    assert cores_near(GPUS[: len(nodes)], len(nodes) - 1, allowed, root) == expected


@pytest.mark.parametrize("node", ["", "-1", "7"], ids=["no file", "not known", "no such node"])
def test_keeps_all_cores_if_the_system_reports_no_node(node, tmp_path):
    assert cores_near(GPUS[:2], 1, ALL, host(tmp_path, ["0", node])) == ALL
    assert cores_near(GPUS[:2], 1, ALL, tmp_path / "no sys") == ALL


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_children_of_a_bound_rank_are_bound_and_the_hosts_cores_are_counted(tmp_path):
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    text = {node: str(core) for node, core in enumerate(allowed)}
    root = host(tmp_path, [str(node) for node in text][:8], text)
    if len(allowed) > 8:
        pytest.skip("this host has more than eight cores")
    code = f"""
import os, subprocess, sys
from pathlib import Path
from vit.system.host import num_cores
from vit.distributed.devices import bind_near
before = num_cores()
bind_near({GPUS[: len(allowed)]}, 1, Path({str(root)!r}))
assert num_cores() == before
code = "import os; print(*os.sched_getaffinity(0))"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(allowed[1])]
