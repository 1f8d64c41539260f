"""A copy of a run's state in host memory, from which a thread writes while training goes on.

    computing stream   ... update n | copy of buffers | forward, backward n+1 | update n+1 ...
    copying stream                    \\- copy of everything else -> event ----/
    thread that writes                                              \\- hash and write ...

The copying stream begins when what was queued before the snapshot is done, update n included. Until
its event nothing may change the state, and only two things do: the forward pass changes buffers
(running statistics of a batch norm), which are therefore copied on the computing stream itself, and
an update changes the rest, so the next update waits for the event (`TrainStep.copying`). The host
waits for nothing; the thread waits for the event before it reads the copy. On a CPU the copy is
complete when `take` returns.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from vit.data.to_gpu import page_lock

ALIGNMENT = 64
"""Each tensor of the copy begins at a multiple of it: a line of the processor's cache."""


class Snapshot:
    """Memory for a copy of tensors like `tensors`, used again for each copy.

    cuda: torch.cuda, or what stands in for it in a test.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, cuda: Any = torch.cuda):
        self._device = device
        self._cuda = cuda
        self._is_locked = False
        self._copied: torch.cuda.Event | None = None
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
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
        """Get the memory from the system, and page-lock it for a GPU: seconds for gigabytes."""
        if self._stream is None:
            # By numpy: torch would start its threads a second time for this one.
            self._memory.numpy().fill(0)
            return
        with self._cuda.device(self._device):
            self._is_locked = page_lock(
                self._memory, "memory to copy what is saved", "training stands during the copy"
            )

    def take(
        self, tensors: Mapping[str, Tensor], changing: Collection[str] = ()
    ) -> torch.cuda.Event | None:
        """Copy `tensors`, which have the names and shapes of those that this was made for.

        changing: those that a forward pass changes. Returns the event that an update must wait for,
        None if all is copied already. The copy before must have been written.
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
        """Unlock the memory; nothing may be copied any more."""
        if not self._is_locked:
            return
        self._is_locked = False
        # A device that failed has raised its error before, which is the one to report.
        with suppress(RuntimeError), self._cuda.device(self._device):
            self.wait()
            self._cuda.cudart().cudaHostUnregister(self._memory.data_ptr())


def _private_memory(num_bytes: int) -> Tensor:
    """Return (num_bytes,) uint8 that processes forked from this one do not have."""
    # A loader worker that inherited it would keep the pages of the copy before, and the next copy
    # would first have to duplicate each page. `torch.empty` is also slower at its first use, for
    # which huge pages need a 500th of the page faults.
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with suppress(AttributeError, OSError):  # Linux has them, unless its kernel was built so
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
