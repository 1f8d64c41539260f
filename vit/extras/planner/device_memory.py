"""Measure time, and the memory of a process or its tensors on the GPU or the host."""

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
"""The folder in which the kernel describes this process. It exists only on Linux."""


def reset_peak(device: torch.device) -> None:
    """Start measuring the peak memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif PROC.is_dir():
        (PROC / "clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak of `bytes_in_use` since `reset_peak`, or None if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM") if PROC.is_dir() else None


def bytes_in_use(device: torch.device) -> int:
    """Return the memory of all tensors on a GPU, or of the process on the CPU (0 if unknown)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS") if PROC.is_dir() else 0


def release_memory(device: torch.device) -> None:
    """Release cached memory that is not in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _status_bytes(name: str) -> int:
    """Return the value of a line such as `VmRSS:  123456 kB` in the process's status."""
    match = re.search(rf"{name}:\s+(?P<kb>\d+) kB", (PROC / "status").read_text())
    assert match is not None, "Linux has this line"
    return int(match["kb"]) * 1024


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that counts the bytes of all live storages created by operations.

    now, peak: bytes. gradients_at_peak: the result of `count_gradients` at the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.gradients_at_peak = 0
        self._sizes: dict[int, int] = {}
        self._count_gradients: Callable[[], int] = lambda: 0

    def begin(self, count_gradients: Callable[[], int]) -> None:
        """Start measuring the peak."""
        self.peak = 0
        self._count_gradients = count_gradients

    def __torch_dispatch__(
        self, function: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # the update count of an optimizer, which does not affect sizes
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
        # A storage object is finalized when the last tensor that uses it is deleted.
        weakref.finalize(storage, self._remove, key)
        if self.now > self.peak:
            self.peak = self.now
            self.gradients_at_peak = self._count_gradients()

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
