"""Memory that a process holds, on its GPU or on the host, and that tensors hold (`LiveBytes`)."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_DEVICE_OF = torch.ops.prim.device.default
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


class LiveBytes(TorchDispatchMode):
    """Sums the bytes of all storages that operations make while they live.

    now, peak: bytes. gradients_at_peak: what the function of `begin` returned at the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.gradients_at_peak = 0
        self._sizes: dict[int, int] = {}
        self._count_gradients: Callable[[], int] = lambda: 0

    def begin(self, count_gradients: Callable[[], int]) -> None:
        """Look for the peak from here on."""
        self.peak = 0
        self._count_gradients = count_gradients

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # a count of updates that an optimizer reads: no size follows from it
        if function is _DEVICE_OF:
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        # The object of a storage lives as long as any tensor that uses it.
        weakref.finalize(storage, self._remove, key)
        if self.now > self.peak:
            self.peak = self.now
            self.gradients_at_peak = self._count_gradients()

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
