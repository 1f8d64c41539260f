"""Copy a run's state into host memory, from which a thread writes it while training continues.

    computing stream   ... update n | copy of buffers | forward, backward n+1 | update n+1 ...
    copying stream                    \\- copy of everything else -> event ----/
    thread that writes                                              \\- hash and write ...

The copying stream begins when all work queued before the snapshot is done, including update n. The
state must not change until its event. The forward pass changes buffers (running statistics of a
batch norm), so these are copied on the computing stream. An update changes the rest, so the next
update waits for the event (`TrainStep.copying`). The host does not wait. The thread waits for the
event before it reads the copy. On a CPU the copy is complete when `take` returns.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from vit.data.to_gpu import page_lock

ALIGNMENT = 64
"""Bytes to whose multiples each tensor of the copy is aligned: a line of the processor's cache."""


class Snapshot:
    """Memory for a copy of tensors like `tensors`, which each copy reuses.

    cuda: torch.cuda, or its replacement in a test.
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
        """The copy: on the host, row-major, with the names of the state."""
        begin = 0
        for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
            place = self._memory[begin : begin + tensor.nbytes]
            self.tensors[name] = place.view(tensor.dtype).view(tensor.shape)
            begin += size

    def prepare(self) -> None:
        """Allocate the memory, and page-lock it for a GPU; takes seconds for gigabytes."""
        if self._stream is None:
            # By numpy, because torch would start a second set of threads for this thread.
            self._memory.numpy().fill(0)
            return
        with self._cuda.device(self._device):
            self._is_locked = page_lock(
                self._memory, "memory to copy what is saved", "training stands during the copy"
            )

    def take(
        self, tensors: Mapping[str, Tensor], changing: Collection[str] = ()
    ) -> torch.cuda.Event | None:
        """Copy `tensors`, whose names and shapes are those of the tensors given to `__init__`.

        changing: names of tensors that a forward pass changes. Returns the event that the next
        update must wait for, or None if the copy is complete. The previous copy must be written.
        """
        if self._stream is None:
            for name, tensor in tensors.items():
                self.tensors[name].copy_(tensor)
            return None
        computing = self._cuda.current_stream(self._device)
        for name in changing:
            self.tensors[name].copy_(tensors[name], non_blocking=True)
        self._stream.wait_stream(computing)
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
        """Unlock the memory; do not copy afterwards."""
        if not self._is_locked:
            return
        self._is_locked = False
        # A device that failed has already raised its error, which is the one to report.
        with suppress(RuntimeError), self._cuda.device(self._device):
            self.wait()
            self._cuda.cudart().cudaHostUnregister(self._memory.data_ptr())


def _private_memory(num_bytes: int) -> Tensor:
    """Return (num_bytes,) uint8 that processes forked from this one do not inherit."""
    # A loader worker that inherited the memory would keep the pages of the previous copy, and the
    # next copy would first have to duplicate each page. `torch.empty` is also slower at first use:
    # huge pages need a 500th of its page faults.
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with suppress(AttributeError, OSError):  # only Linux, and not every kernel, has them
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
