"""What this machine gives to this process: cores, memory, open files.

The kernel reports what there is (`/proc`). A container or a batch job may be allowed less (control
groups, version 2 or 1); each level of its groups may set a limit, and the smallest counts.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from vit.system.files import ShardError

_SHARED = {
    "lustre",
    "gpfs",
    "mmfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "smbfs",
    "afs",
    "9p",
    "virtiofs",
    "panfs",
    "wekafs",
    "glusterfs",
    "pvfs2",
}
_STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "D": "waiting in the kernel",
    "R": "running",
    "S": "sleeping",
    "Z": "dead",
}
_V1_UNLIMITED = 2**60
"""Version 1 writes "no limit" as a number near 2**63."""
_num_before_binding: int | None = None
"""Cores that this process might use before `bind_to_cores`."""


def num_cores(root: Path = Path("/")) -> int:
    """Cores that the job may use on this host, at least 1.

    The affinity that this process was started with, or a smaller quota of its groups. `root`: the
    folder of `proc` and `sys`.
    """
    cores = float(_num_before_binding or _num_allowed())
    for group in _groups(root, "cpu"):
        quota, _, period = text_of(group / "cpu.max").partition(" ")
        if not quota:
            quota = text_of(group / "cpu.cfs_quota_us")
            period = text_of(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # "max" and -1: no limit
            cores = min(cores, int(quota) / int(period))
    return max(math.floor(cores), 1)


def bind_to_cores(cores: set[int]) -> None:
    """Let this process, and what it starts from now on, run on `cores` only.

    `num_cores` goes on counting the cores that it had: ranks share those of a host.
    """
    global _num_before_binding
    _num_before_binding = _num_before_binding or _num_allowed()
    os.sched_setaffinity(0, cores)


def _num_allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process and its children may still use; None if the system does not say.

    What the kernel calls available, or less if a control group has a limit; its file cache counts
    as free.
    """
    free = [
        int(line.split()[1]) * 1024
        for line in text_of(root / "proc/meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    for group in _groups(root, "memory"):
        limit = text_of(group / "memory.max") or text_of(group / "memory.limit_in_bytes")
        used = text_of(group / "memory.current") or text_of(group / "memory.usage_in_bytes")
        if limit.isdecimal() and used.isdecimal() and int(limit) < _V1_UNLIMITED:
            stat = dict(line.split() for line in text_of(group / "memory.stat").splitlines())
            cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            free.append(max(int(limit) - int(used) + cache, 0))
    return min(free, default=None)


def num_oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has killed so far because memory ran out.

    In the control groups of this process or, where they do not count, on the machine. None if the
    system does not say.
    """
    counted = [
        text_of(group / name)
        for group in _groups(root, "memory")
        for name in ("memory.events", "memory.oom_control")
    ]
    lines = "\n".join([*counted, text_of(root / "proc/vmstat")]).splitlines()
    found = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return max(found, default=None)


def file_system(path: Path, root: Path = Path("/")) -> str:
    """The kernel's name of the file system of an existing `path` (ext4, nfs4, lustre), or "".

    `root`: the folder of `proc`.
    """
    device = os.stat(path).st_dev
    path = path.resolve()
    place = f"{os.major(device)}:{os.minor(device)}"
    found = ("", "")
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        mount, _, described = line.partition(" - ")
        _, _, number, _, point, *_ = mount.split()
        if number == place and path.is_relative_to(point) and len(point) >= len(found[0]):
            found = point, described.split()[0]
    return found[1]


def is_shared(kind: str) -> bool:
    """Whether a file system of this kind is on other machines, such as a cluster's homes."""
    return kind in _SHARED or kind.startswith(("nfs", "fuse."))


def process_state(pid: int | None) -> str:
    """The state of a process, to follow its number: ", stopped"; "" if the system does not say."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return f", {_STATES[letter]}" if letter in _STATES else ""


def num_nvidia_gpus(root: Path = Path("/")) -> int:
    """NVIDIA GPUs on the PCI bus, whether their driver works or not.

    0 if the system does not say. `root`: the folder of `proc` and `sys`.
    """
    display = "0x03"  # PCI's class of display and 3D controllers
    return sum(
        text_of(device / "vendor") == "0x10de" and text_of(device / "class").startswith(display)
        for device in (root / "sys/bus/pci/devices").glob("*")
    )


def raise_open_files(wanted: int) -> int:
    """Raise the limit of open files, which children inherit, as far as allowed; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= reachable:
        return wanted if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    except (ValueError, OSError):  # macOS has a lower limit than it says
        return soft
    return reachable


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control groups of this process that may limit `controller`, from the innermost up."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / name.strip("/")
        # Inside a container the name may be the host's, of which only the mount itself is seen.
        yield from (
            place
            for place in (group, *group.parents)
            if place.is_relative_to(mount) and place.is_dir()
        )


def text_of(path: Path) -> str:
    """The content of a small file of the kernel; "" if there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cpu_name(root: Path = Path("/")) -> str:
    """Return the maker's name of this CPU, or its kind. `root`: the folder of `proc`."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", (root / "proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def _is_of_another(place: Path) -> bool:
    return os.path.lexists(place) and place.lstat().st_uid != os.geteuid()


def default_folder(root: Path = Path("/")) -> Path:
    """Return a folder on a disk of this machine.

    In SLURM_TMPDIR or TMPDIR, which batch systems set to a local disk; else `vit` in XDG_CACHE_HOME
    or in ~/.cache. root: the folder that contains `proc`.
    Raises ShardError if all of these are in memory or on network file systems.
    """
    places = [
        Path(os.environ[name]) / f"vit-{os.getuid()}"
        for name in ("SLURM_TMPDIR", "TMPDIR")
        if os.environ.get(name)
    ]
    places.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit")
    refused = []
    for place in places:
        existing = next(folder for folder in (place, *place.parents) if folder.exists())
        if place.name == f"vit-{os.getuid()}" and _is_of_another(place):
            refused.append(f"{place} (another user's)")  # a name that others can guess
            continue
        kind = file_system(existing, root)
        if not is_shared(kind) and kind != "tmpfs":
            return place
        refused.append(f"{place} ({kind})")
    raise ShardError(
        "no folder on a disk of this machine is known for blocks of shards, only"
        f" {', '.join(refused)}: name one with data.cache_dir, as /scratch or /local_disk of a"
        " cluster's node"
    )
