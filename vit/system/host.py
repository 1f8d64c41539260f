"""Find the resources that this process may use: cores, memory, open files and local disks.

`/proc` lists the resources of the machine. Control groups (version 2 or 1) may limit a container or
a batch job further. Each level of nested groups may set a limit, and the smallest limit applies.
"""

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
"""A limit of at least this number means "no limit", for which version 1 stores about 2**63."""
_num_before_binding: int | None = None
"""The number of cores that this process could use before `bind_to_cores` was called."""


def num_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that the job may use on this host, at least 1.

    The process's initial affinity and the quotas of its control groups limit the number. `root`:
    the folder that contains `proc` and `sys`.
    """
    cores = float(_num_before_binding or _num_allowed())
    for group in _groups(root, "cpu"):
        quota, _, period = text_of(group / "cpu.max").partition(" ")
        if not quota:
            quota = text_of(group / "cpu.cfs_quota_us")
            period = text_of(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # "max" and -1 mean no limit.
            cores = min(cores, int(quota) / int(period))
    return max(math.floor(cores), 1)


def bind_to_cores(cores: set[int]) -> None:
    """Bind this process, and all processes that it starts later, to `cores`.

    `num_cores` still counts all cores of the job, because the ranks on a host share them.
    """
    global _num_before_binding
    _num_before_binding = _num_before_binding or _num_allowed()
    os.sched_setaffinity(0, cores)


def _num_allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process and its children may still use; None if unknown.

    Both the machine's available memory and the control groups' limits apply. A control group's file
    cache counts as free.
    """
    free = [
        int(line.split()[1]) * 1024
        for line in text_of(root / "proc/meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]

    for group in _groups(root, "memory"):
        limit = text_of(group / "memory.max") or text_of(group / "memory.limit_in_bytes")
        used = text_of(group / "memory.current") or text_of(group / "memory.usage_in_bytes")
        has_limit = limit.isdecimal() and int(limit) < _V1_UNLIMITED
        if has_limit and used.isdecimal():
            stat = dict(line.split() for line in text_of(group / "memory.stat").splitlines())
            cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            free.append(max(int(limit) - int(used) + cache, 0))
    return min(free, default=None)


def num_oom_kills(root: Path = Path("/")) -> int | None:
    """Return the number of processes that the kernel has killed for lack of memory.

    Kills are counted in this process's control groups, or else on the whole machine. Returns None
    if unknown.
    """
    counted = [
        text_of(group / name)
        for group in _groups(root, "memory")
        for name in ("memory.events", "memory.oom_control")
    ]
    lines = "\n".join([*counted, text_of(root / "proc/vmstat")]).splitlines()
    kills = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return max(kills, default=None)


def file_system(path: Path, root: Path = Path("/")) -> str:
    """Return the kernel's name for the file system of `path` (ext4, nfs4, lustre), or "".

    `root`: the folder that contains `proc`.
    """
    device = os.stat(path).st_dev
    path = path.resolve()
    device_number = f"{os.major(device)}:{os.minor(device)}"

    deepest_mount = kind = ""
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        mount, _, described = line.partition(" - ")
        _, _, number, _, point, *_ = mount.split()
        is_mount_of_path = number == device_number and path.is_relative_to(point)
        if is_mount_of_path and len(point) >= len(deepest_mount):
            deepest_mount = point
            kind = described.split()[0]
    return kind


def is_shared(kind: str) -> bool:
    """Return whether other machines share a file system of this kind."""
    return kind in _SHARED or kind.startswith(("nfs", "fuse."))


def process_state(pid: int | None) -> str:
    """Return a process's state as text to append to a message, such as ", stopped", or "" if
    unknown."""
    letter = text_of(Path(f"/proc/{pid}/stat")).rpartition(") ")[2][:1]
    return f", {_STATES[letter]}" if letter in _STATES else ""


def num_nvidia_gpus(root: Path = Path("/")) -> int:
    """Return the number of NVIDIA GPUs on the PCI bus, with or without a working driver.

    Returns 0 if unknown. `root`: the folder that contains `proc` and `sys`.
    """
    display = "0x03"  # the PCI class of display and 3D controllers
    return sum(
        text_of(device / "vendor") == "0x10de" and text_of(device / "class").startswith(display)
        for device in (root / "sys/bus/pci/devices").glob("*")
    )


def raise_open_files(limit: int) -> int:
    """Raise the open-file limit of this process to `limit` if allowed, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    if soft == resource.RLIM_INFINITY or soft >= reachable:
        return limit if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    except (ValueError, OSError):  # macOS allows fewer open files than it reports.
        return soft
    return reachable


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the control groups that may limit `controller` for this process, innermost first."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / name.strip("/")
        # In a container, `group` may be a path on the host. Only the mount point then exists.
        yield from (
            place
            for place in (group, *group.parents)
            if place.is_relative_to(mount) and place.is_dir()
        )


def text_of(path: Path) -> str:
    """Return the content of a small kernel file, or "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cpu_name(root: Path = Path("/")) -> str:
    """Return the CPU model, or the architecture if unknown. `root`: the folder that contains
    `proc`."""
    match = re.search(r"^model name\s*:\s*(.+)$", text_of(root / "proc/cpuinfo"), re.M)
    return match[1].strip() if match else platform.machine()


def _is_of_another(place: Path) -> bool:
    return os.path.lexists(place) and place.lstat().st_uid != os.geteuid()


def default_folder(root: Path = Path("/")) -> Path:
    """Return the path of a cache folder on a local disk.

    The folder is inside SLURM_TMPDIR or TMPDIR, which batch systems set to a local disk, or else is
    `vit` in XDG_CACHE_HOME or ~/.cache. Raises ShardError if all of these are in memory or on
    network file systems. root: the folder that contains `proc`.
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
            refused.append(f"{place} (another user's)")  # Another user created it first.
            continue

        kind = file_system(existing, root)
        if not is_shared(kind) and kind != "tmpfs":
            return place
        refused.append(f"{place} ({kind})")

    raise ShardError(
        f"found no folder on a local disk for the shard cache, only {', '.join(refused)}: set"
        " loader.cache_dir to one, such as /scratch or /local_disk"
    )
