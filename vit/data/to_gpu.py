"""Batches on their way to the GPU, while it computes the step before.

    slot, page-locked -> copying stream: copy, then `on_device` (augmentation) -> computing stream

The host queues all of it ahead and goes on at once. What may go wrong is order: a slot that is
filled again before the device has read it, device memory that is read before it was written or used
again before it was read. Every wait here prevents one of these; `tests/data/test_to_gpu.py` runs
`ToGpu` on a GPU whose work comes as late, and in as odd an order, as streams and events allow, and
takes each wait away in turn.
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
        """Return whether the device has reached it."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached it."""
        ...


class Gpu(Protocol):
    """All that `ToGpu` asks of a GPU: two streams, their order, and memory."""

    def lock(self, memory: Tensor) -> bool:
        """Page-lock host memory, from which the device copies by itself; return whether it did."""
        ...

    def unlock(self, memory: Tensor) -> None:
        """Undo `lock`."""
        ...

    def pin(self, batch: Batch) -> Batch:
        """Copy `batch` into page-locked memory that lasts until all copies out of it are done."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """Queue what follows on the copying stream, and allocate for it."""
        ...

    def move(self, batch: Batch) -> Batch:
        """Queue copies of images, labels and weights to the device."""
        ...

    def compute_after_copies(self) -> None:
        """Let the computing stream wait for all that is queued on the copying stream."""
        ...

    def keep_for_computing(self, tensor: Tensor) -> None:
        """Keep `tensor`'s memory, once it is freed, until the computing stream has come so far."""
        ...

    def record(self) -> Event:
        """Mark the point up to which work is queued on the computing stream."""
        ...

    def synchronize(self) -> None:
        """Wait for both streams."""
        ...


class ToGpu:
    """Moves batches, one after the other, to the GPU."""

    def __init__(self, gpu: Gpu, memory: Tensor, on_device: Callable[[Batch], Batch] | None = None):
        """memory: of all slots, (num_bytes,) uint8. on_device: see `vit.data.loader.Loader`."""
        self._gpu = gpu
        self._memory = memory
        self._on_device = on_device
        self._is_locked = gpu.lock(memory)
        self._last: Batch | None = None
        self._in_use: deque[tuple[Batch, Event]] = deque()

    def __call__(self, batch: Batch) -> Batch:
        """Return `batch` on the device, for work that is queued on the computing stream from now.

        Table and ids stay on the host; copies out of them, too, may be queued until the next call.
        """
        gpu = self._gpu
        if not self._is_locked:
            batch = gpu.pin(batch)
        # Copies out of the last batch's slot are done when the device reaches this event: that of
        # the batch itself, which the step has waited for, and any that came with the step. Until
        # then holding the batch keeps its slot from being filled again.
        if self._last is not None:
            self._in_use.append((self._last, gpu.record()))
        # A host-device sync only when two steps are queued already; else done events are skipped.
        while len(self._in_use) > 1 or (self._in_use and self._in_use[0][1].query()):
            self._in_use.popleft()[1].synchronize()
        self._last = batch
        # On the stream of the step all this would wait for the step before.
        with gpu.copying():
            moved = gpu.move(batch)
            if self._on_device is not None:
                moved = self._on_device(moved)
        # The device waits before the step; the host waits for nothing.
        gpu.compute_after_copies()
        for tensor in (moved.images, moved.labels, moved.weights):
            # Allocated for the copying stream: without this the allocator would give the memory to
            # the next copy as soon as the host drops the tensor, and the step may not have run.
            gpu.keep_for_computing(tensor)
        return moved

    def close(self) -> None:
        """Wait until the device has finished, and unlock the memory."""
        # A device that failed has raised its error before.
        with suppress(RuntimeError):
            # A copy that still reads memory as it is unlocked would be an error of the device.
            self._gpu.synchronize()
            if self._is_locked:
                self._gpu.unlock(self._memory)
        self._in_use.clear()
        self._last = None


class Cuda:
    """A `Gpu` by torch.cuda. The computing stream is the one that is current at each call."""

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
        """See `Batch.pin_memory`; torch's allocator waits for copies before it uses it again."""
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
    """Page-lock `memory`, so that the GPU can read and write it by itself; return whether it could.

    The CUDA runtime refuses inside gVisor, WSL and some virtual machines: then a note is printed,
    of `what` is not locked and what happens `otherwise`.
    """
    try:
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    except RuntimeError as error:  # torch.cuda.CudaError is one, and so is a missing driver
        reason = str(error).splitlines()[0]
        # CUDA reports the error again after the next kernel: launch one here, or a step would fail.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
        print(f"note: {what} is not page-locked here ({reason}): {otherwise}", file=sys.stderr)
        return False
    return True
