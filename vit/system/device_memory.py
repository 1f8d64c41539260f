"""Memory that a process holds: of its GPU, or of the host where it computes on a CPU."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import torch

PROC = Path("/proc/self")
"""On Linux only."""


def reset_peak(device: torch.device) -> None:
    """Look for the peak of memory from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif PROC.is_dir():
        (PROC / "clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak since `reset_peak`, as `bytes_in_use`; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM") if PROC.is_dir() else None


def bytes_in_use(device: torch.device) -> int:
    """Return the memory of tensors on a GPU, of this process on a CPU (0 where not known)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS") if PROC.is_dir() else 0


def release_memory(device: torch.device) -> None:
    """Give back what no tensor uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", (PROC / "status").read_text())
    assert found is not None, "Linux has it"
    return int(found[1]) * 1024
