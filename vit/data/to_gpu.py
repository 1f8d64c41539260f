"""Copy batches to the GPU while it computes the previous step.

    slot, page-locked -> copying stream: copy, then `on_device` (augmentation) -> computing stream

The host queues everything ahead and continues at once. The order can go wrong in three ways: a slot
is filled again before the device has read it, device memory is read before it is written, or it is
reused before it is read. Every wait below prevents one of these. `tests/data/test_to_gpu.py` runs
`ToGpu` on a simulated GPU that works as late, and in as odd an order, as streams and events allow,
and removes each wait in turn.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import torch
from torch import Tensor

from vit.data.batches import Batch


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Return whether the device has reached the point."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached the point."""
        ...


class Gpu(Protocol):
    """The operations of a GPU that `ToGpu` uses: two streams, their order, and memory."""

    def lock(self, memory: Tensor) -> bool:
        """Page-lock host memory for asynchronous copies; return whether that worked."""
        ...

    def unlock(self, memory: Tensor) -> None:
        """Undo `lock`."""
        ...

    def pin(self, batch: Batch) -> Batch:
        """Copy `batch` into page-locked memory that lives until all copies out of it are done."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """Return a context in which work is queued on the copying stream, with its memory."""
        ...

    def move(self, batch: Batch) -> Batch:
        """Queue copies of images, labels and weights to the device."""
        ...

    def compute_after_copies(self) -> None:
        """Make the computing stream wait for all work queued on the copying stream."""
        ...

    def keep_for_computing(self, tensor: Tensor) -> None:
        """Reuse `tensor`'s memory only after the work now queued on the computing stream."""
        ...

    def record(self) -> Event:
        """Return the current end of the work on the computing stream."""
        ...

    def synchronize(self) -> None:
        """Wait for both streams."""
        ...


class ToGpu:
    """Copies batches to the GPU, one after the other."""

    def __init__(self, gpu: Gpu, memory: Tensor, on_device: Callable[[Batch], Batch] | None = None):
        """memory: all slots, (num_bytes,) uint8. on_device: see `vit.data.loader.Loader`."""
        self._gpu = gpu
        self._memory = memory
        self._on_device = on_device
        self._is_locked = gpu.lock(memory)
        self._last: Batch | None = None
        self._in_use: deque[tuple[Batch, Event]] = deque()

    def __call__(self, batch: Batch) -> Batch:
        """Return `batch` on the device, for work that is queued on the computing stream from now.

        Table and ids stay on the host. Copies out of them may also be queued until the next call.
        """
        gpu = self._gpu
        if not self._is_locked:
            batch = gpu.pin(batch)
        # Holding the last batch keeps its slot from being filled again. All copies out of the slot
        # are done when the device reaches this event: the batch's own copy, which the step waited
        # for, and copies that were queued with the step.
        if self._last is not None:
            self._in_use.append((self._last, gpu.record()))
        # The host waits only if two steps are queued already; else it drops finished events.
        while len(self._in_use) > 1 or (self._in_use and self._in_use[0][1].query()):
            self._in_use.popleft()[1].synchronize()
        self._last = batch
        # On the computing stream, copy and augmentation would wait for the previous step.
        with gpu.copying():
            moved = gpu.move(batch)
            if self._on_device is not None:
                moved = self._on_device(moved)
        # The device waits before the step; the host does not wait.
        gpu.compute_after_copies()
        for tensor in (moved.images, moved.labels, moved.weights):
            # The memory belongs to the copying stream. Without this line the allocator would give
            # it to the next copy as soon as the host drops the tensor, before the step has run.
            gpu.keep_for_computing(tensor)
        return moved

    def close(self) -> None:
        """Wait until the device has finished, and unlock the memory."""
        # Suppressed, because a device that failed has raised its error before.
        with suppress(RuntimeError):
            # Unlocking memory that a copy still reads would be an error of the device.
            self._gpu.synchronize()
            if self._is_locked:
                self._gpu.unlock(self._memory)
        self._in_use.clear()
        self._last = None


class Cuda:
    """A `Gpu` by torch.cuda. The computing stream is the current stream of each call."""

    def __init__(self, device: torch.device):
        self._device = device
        self._copying = torch.cuda.Stream(device)

    def lock(self, memory: Tensor) -> bool:
        """See `page_lock`."""
        with torch.cuda.device(self._device):
            return page_lock(memory, "memory of batches", "each is copied once more on the host")

    def unlock(self, memory: Tensor) -> None:
        """Undo `lock`."""
        with torch.cuda.device(self._device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))

    def pin(self, batch: Batch) -> Batch:
        """See `Batch.pin_memory`; torch's allocator reuses the memory only after the copies."""
        return batch.pin_memory()

    def copying(self) -> AbstractContextManager[object]:
        """See `Gpu.copying`."""
        return torch.cuda.stream(self._copying)

    def move(self, batch: Batch) -> Batch:
        """See `Batch.to`."""
        return batch.to(self._device)

    def compute_after_copies(self) -> None:
        """See `Gpu.compute_after_copies`."""
        torch.cuda.current_stream(self._device).wait_stream(self._copying)

    def keep_for_computing(self, tensor: Tensor) -> None:
        """See `Gpu.keep_for_computing`."""
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def record(self) -> Event:
        """See `Gpu.record`."""
        return torch.cuda.current_stream(self._device).record_event()

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self._device)


def page_lock(memory: Tensor, what: str, otherwise: str) -> bool:
    """Page-lock `memory` for asynchronous copies by the GPU; return whether that worked.

    The CUDA runtime refuses inside gVisor, WSL and some virtual machines. Then a note is printed
    that `what` is not page-locked, with the consequence `otherwise`.
    """
    try:
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    except RuntimeError as error:  # also torch.cuda.CudaError, and the error of a missing driver
        reason = str(error).splitlines()[0]
        # CUDA reports the error again after the next kernel: launch one here, or a step would fail.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
        print(f"note: {what} is not page-locked here ({reason}): {otherwise}", file=sys.stderr)
        return False
    return True
