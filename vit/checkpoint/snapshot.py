"""Copy the state of a run into host memory, so that a thread can write it during training.

    compute stream     ... update n | copy buffers | forward, backward n+1 | update n+1 ...
    copy stream                     \\- copy everything else -> event ----/
    writing thread                                            \\- hash and write ...

The copy stream starts when all work queued before the snapshot is done, including update n. The
state must not change until the event at the end of the copy. The forward pass changes buffers
(batch norm statistics), so they are copied on the compute stream. Updates change everything else,
so the next update waits for the event (`TrainStep.copying`). The thread waits for the event before
it reads the copy. On a CPU, the copy is complete when `take` returns.
"""

import math
import mmap
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from vit.data.to_gpu import page_lock

ALIGNMENT = 64
"""The alignment of each tensor in bytes: one CPU cache line."""


class Snapshot:
    """Reusable memory for copies of tensors with the names and shapes of `tensors`.

    cuda: torch.cuda, or a replacement in tests.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, cuda: Any = torch.cuda):
        self._device = device
        self._cuda = cuda
        self._is_locked = False
        self._copied: torch.cuda.Event | None = None

        sizes = [math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
        self.num_bytes = sum(sizes)
        self._memory = _private_memory(self.num_bytes)
        self._stream = cuda.Stream(device) if device.type == "cuda" else None

        self.tensors: dict[str, Tensor] = {}
        """The copies on the host, keyed by name, in row-major order."""
        begin = 0
        for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
            place = self._memory[begin : begin + tensor.nbytes]
            self.tensors[name] = place.view(tensor.dtype).view(tensor.shape)
            begin += size

    def prepare(self) -> None:
        """Allocate the memory, and page-lock it for a GPU. This takes seconds for gigabytes."""
        if self._stream is None:
            # Use numpy, because torch would start another set of threads for this thread.
            self._memory.numpy().fill(0)
            return

        with self._cuda.device(self._device):
            self._is_locked = page_lock(
                self._memory, "memory for copies of the state", "training waits during the copy"
            )

    def take(
        self, tensors: Mapping[str, Tensor], changing: Collection[str] = ()
    ) -> torch.cuda.Event | None:
        """Copy `tensors`, which must have the names and shapes of the tensors given to `__init__`.

        changing: the names of tensors that a forward pass changes. Returns the event for which the
        next update must wait, or None if the copy is complete. The previous copy must already be
        written.
        """
        if self._stream is None:
            for name, tensor in tensors.items():
                self.tensors[name].copy_(tensor)
            return None

        for name in changing:
            self.tensors[name].copy_(tensors[name], non_blocking=True)

        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            for name, tensor in tensors.items():
                if name not in changing:
                    self.tensors[name].copy_(tensor, non_blocking=True)
            self._copied = self._stream.record_event()
        return self._copied

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Unlock the memory. No copies are allowed afterwards."""
        if not self._is_locked:
            return

        self._is_locked = False
        # A failed device has already raised an error, so ignore the error of this call.
        with suppress(RuntimeError), self._cuda.device(self._device):
            self.wait()
            self._cuda.cudart().cudaHostUnregister(self._memory.data_ptr())


def _private_memory(num_bytes: int) -> Tensor:
    """Return a (num_bytes,) uint8 tensor in memory that forked processes do not inherit."""
    # If loader workers inherited the memory, they would keep the pages of the previous copy, and
    # the next copy would have to duplicate each page. Huge pages also make the first use faster
    # than with `torch.empty`, because they need only a 500th of the page faults.
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with suppress(AttributeError, OSError):  # only some Linux kernels have these flags
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
