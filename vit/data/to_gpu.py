"""Copy batches to the GPU while it computes the previous step.

    page-locked slot -> copy stream: copy, then `on_device` (augmentation) -> compute stream

The host queues all work without waiting. Three errors must be avoided: refilling a slot before the
device has read it, reading device memory before it is written, and reusing device memory before it
is read. Each wait below prevents one of these errors. `tests/data/test_to_gpu.py` runs `ToGpu` on a
simulated GPU that delays and reorders work as much as streams and events allow. The test also
removes each wait and checks that an error follows.
"""

import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from vit.data.batches import Batch


class ToGpu:
    """Copies batches to the GPU, one after another, on a separate stream."""

    def __init__(self, gpu: Any, memory: Tensor, on_device: Callable[[Batch], Batch] | None = None):
        """Page-lock `memory`. See `vit.data.loader.Loader` for `on_device`.

        Args:
            gpu: A `Cuda`, or an object with the same methods.
            memory: All slots, (num_bytes,) uint8.
        """
        self._gpu = gpu
        self._memory = memory
        self._on_device = on_device
        self._is_locked = gpu.lock(memory)
        self._last: Batch | None = None
        self._in_use: deque[tuple[Batch, Any]] = deque()

    def __call__(self, batch: Batch) -> Batch:
        """Return `batch` on the device, for work that is queued later on the compute stream.

        Augmentation parameters and ids stay on the host. Until the next call, the caller may also
        queue copies of them.
        """
        gpu = self._gpu
        if not self._is_locked:
            batch = gpu.pin(batch)

        # Hold the last batch, so that its slot is not refilled. When this event completes, the
        # device has finished all copies from the slot: the batch's own copy and those queued with
        # the step.
        if self._last is not None:
            self._in_use.append((self._last, gpu.record()))
        # Wait only if two steps are already queued. Otherwise, only remove completed events.
        while len(self._in_use) > 1 or any(event.query() for _, event in self._in_use):
            self._in_use.popleft()[1].synchronize()
        self._last = batch

        # On the compute stream, the copy and the augmentation would wait for the previous step, so
        # use the copy stream.
        with gpu.copying():
            moved = gpu.move(batch)
            if self._on_device is not None:
                moved = self._on_device(moved)

        # Only the device waits for the copies. The host continues.
        gpu.compute_after_copies()
        for tensor in (moved.images, moved.labels, moved.weights):
            # The memory belongs to the copy stream. Without this line, the allocator would reuse it
            # as soon as the host releases the tensor, before the step has run.
            gpu.keep_for_computing(tensor)
        return moved

    def close(self) -> None:
        """Wait until the device has finished, then unlock the memory."""
        # Ignore errors, because a device that has failed has already raised them.
        with suppress(RuntimeError):
            # Unlocking memory that a copy is still reading is a device error, so wait first.
            self._gpu.synchronize()
            if self._is_locked:
                self._gpu.unlock(self._memory)
        self._in_use.clear()
        self._last = None


class Cuda:
    """The copy stream and the compute stream of a GPU, with their memory.

    The current stream is the compute stream.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._copying = torch.cuda.Stream(device)

    def lock(self, memory: Tensor) -> bool:
        """Page-lock host memory for asynchronous copies. Return whether this succeeded."""
        with torch.cuda.device(self._device):
            return page_lock(
                memory, "memory of batches", "each batch is copied once more on the host"
            )

    def unlock(self, memory: Tensor) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))

    def pin(self, batch: Batch) -> Batch:
        """See `Batch.pin_memory`. torch's allocator reuses the memory only after all copies have
        finished."""
        return batch.pin_memory()

    def copying(self) -> AbstractContextManager[object]:
        """Return a context in which work is queued, and memory allocated, on the copy stream."""
        return torch.cuda.stream(self._copying)

    def move(self, batch: Batch) -> Batch:
        """Queue copies of images, labels and weights to the device."""
        return batch.to(self._device)

    def compute_after_copies(self) -> None:
        """Make the compute stream wait for all work queued on the copy stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._copying)

    def keep_for_computing(self, tensor: Tensor) -> None:
        """Do not reuse the memory of `tensor` until the work queued on the compute stream has
        finished."""
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def record(self) -> torch.cuda.Event:
        """Return an event recorded at the end of the compute stream's queue."""
        return torch.cuda.current_stream(self._device).record_event()

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self._device)


def page_lock(memory: Tensor, what: str, consequence: str) -> bool:
    """Page-lock `memory` for asynchronous copies by the GPU. Return whether this succeeded.

    The CUDA runtime refuses to page-lock inside gVisor, WSL and some virtual machines. A note on
    stderr then names `what` and the `consequence`.
    """
    try:
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    except RuntimeError as error:  # also torch.cuda.CudaError, or a missing driver
        reason = str(error).splitlines()[0]
        # CUDA reports the error again after the next kernel. Launch one now, so that no training
        # step fails.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
        print(f"note: {what} is not page-locked ({reason}): {consequence}", file=sys.stderr)
        return False
    return True
