"""Test that batches arrive intact on a GPU, whatever timing the streams and events allow.

`LateGpu` queues GPU operations and runs them in random order, as late as the waits allow. Memory is
reused in the same way as by torch's allocator. Each step compares its batch with the data that was
written. If a wait is omitted, the comparison must fail for at least one order.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from vit.data.batches import Batch, BatchLayout
from vit.data.image_format import ImageFormat
from vit.data.slots import Slots, plan_ring
from vit.data.to_gpu import ToGpu

LAYOUT = BatchLayout(4, ImageFormat((2, 2), 3), 2)
STEPS = 12
ORDERS = range(60)
WAITS = (
    "the step for its copy",
    "images for the step",
    "labels for the step",
    "weights for the step",
    "a slot for its event",
    "the host for an event",
    "the end for all work",
)
DTYPES = {"images": torch.uint8, "labels": torch.int64, "weights": torch.float32}


class Work(NamedTuple):
    is_ready: Callable[[], bool]
    run: Callable[[], None]


class LateEvent:
    def __init__(self, gpu: LateGpu, is_done: bool = False):
        self.gpu = gpu
        self.is_done = is_done

    def set(self) -> None:
        self.is_done = True

    def query(self) -> bool:
        self.gpu.run_some()
        return self.is_done

    def synchronize(self) -> None:
        if self.gpu.without == "the host for an event":
            return
        while not self.is_done:
            self.gpu.run_one()


class LateGpu:
    """A fake `vit.data.to_gpu.Cuda` that stores device memory on the host. `without` is the name of
    a wait to omit."""

    def __init__(self, seed: int, without: str = "", locks: bool = True):
        self.random = random.Random(seed)
        self.without = without
        self.locks = locks
        self.queues: dict[str, deque[Work]] = {"copying": deque(), "computing": deque()}
        # Each stream advances with this probability while the host does other work.
        self.pace = {name: self.random.choice([0.0, 0.5, 1.0]) for name in self.queues}
        self.current = "computing"
        self.faults: list[str] = []
        self.steps_done = 0
        self.changes_done = 0
        self.locked: Tensor | None = None
        self.blocks: list[object] = []
        """All memory blocks, which are kept alive so that delayed operations cannot read memory
        that Python has freed."""
        self.free: defaultdict[tuple[str, int], list[bytearray]] = defaultdict(list)
        """The free memory blocks, keyed by stream and size."""
        self.freed: deque[tuple[bytearray, str, list[LateEvent]]] = deque()
        """The unused blocks, each with the events that must complete before the block can be
        reused."""
        self.kept: defaultdict[int, set[str]] = defaultdict(set)
        """Maps a block's address to the streams, other than its owner, that use the block."""

    # ---- queues ----

    def queue(self, run: Callable[[], None], is_ready: Callable[[], bool] = lambda: True) -> None:
        self.queues[self.current].append(Work(is_ready, run))
        self.run_some()

    def ready(self) -> list[str]:
        return [name for name, queue in self.queues.items() if queue and queue[0].is_ready()]

    def run_some(self) -> None:
        while going := [name for name in self.ready() if self.random.random() < self.pace[name]]:
            self.queues[self.random.choice(going)].popleft().run()

    def run_one(self) -> None:
        ready = self.ready()
        assert ready, "deadlock: all streams wait for each other"
        weights = [self.pace[name] + 0.01 for name in ready]
        self.queues[self.random.choices(ready, weights)[0]].popleft().run()

    def event_on(self, stream: str) -> LateEvent:
        event = LateEvent(self)
        self.queues[stream].append(Work(lambda: True, event.set))
        return event

    # ---- memory ----

    def empty_like(self, tensor: Tensor) -> Tensor:
        for _ in range(len(self.freed)):
            block, home, events = self.freed.popleft()
            if all(event.is_done for event in events):
                self.free[home, len(block)].append(block)
            else:
                self.freed.append((block, home, events))
        home = self.current
        of_size = self.free[home, tensor.nbytes]
        block = of_size.pop() if of_size else bytearray(tensor.nbytes)
        self.blocks.append(block)
        memory = memoryview(block)
        out = torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
        address = out.data_ptr()

        def give_back(_: object) -> None:
            users = self.kept.pop(address, set())
            self.freed.append((block, home, [self.event_on(stream) for stream in users]))

        self.blocks.append(weakref.ref(memory, give_back))
        return out

    # ---- the interface for `ToGpu`

    def lock(self, memory: Tensor) -> bool:
        self.blocks.append(memory)
        self.locked = memory if self.locks else None
        return self.locks

    def unlock(self, memory: Tensor) -> None:
        assert self.locked is memory
        self.locked = None

    def pin(self, batch: Batch) -> Batch:
        pinned = batch.clone()
        self.blocks.append(pinned)
        return pinned

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.current = "copying"
        yield
        self.current = "computing"

    def move(self, batch: Batch) -> Batch:
        return replace(batch, **{name: self.copied(getattr(batch, name)) for name in DTYPES})

    def copied(self, tensor: Tensor) -> Tensor:
        is_slot = self.is_locked(tensor)
        # CUDA copies pageable memory to a staging buffer immediately.
        if not is_slot and self.locks:
            tensor = tensor.clone()
            self.blocks.append(tensor)
        out = self.empty_like(tensor)
        source, to = untracked(tensor), untracked(out)

        def copy() -> None:
            if is_slot and not self.is_locked(source):
                self.faults.append("a copy reads memory that is unlocked")
            to.copy_(source)

        self.queue(copy)
        return out

    def is_locked(self, tensor: Tensor) -> bool:
        if self.locked is None:
            return False
        start = self.locked.data_ptr()
        return start <= tensor.data_ptr() < start + self.locked.nbytes

    def compute_after_copies(self) -> None:
        if self.without == "the step for its copy":
            return
        event = self.event_on("copying")
        self.queue(lambda: None, lambda: event.is_done)

    def keep_for_computing(self, tensor: Tensor) -> None:
        if self.without in {f"{n} for the step" for n, d in DTYPES.items() if d == tensor.dtype}:
            return
        self.kept[tensor.data_ptr()].add("computing")

    def record(self) -> LateEvent:
        if self.without == "a slot for its event":
            return LateEvent(self, is_done=True)
        return self.event_on("computing")

    def synchronize(self) -> None:
        if self.without == "the end for all work":
            return
        while any(self.queues.values()):
            self.run_one()

    # ---- the work on batches

    def invert(self, batch: Batch) -> Batch:
        """Modify images in two passes with temporary memory, as augmentation does."""
        between = self.empty_like(batch.images)
        out = self.empty_like(batch.images)
        first, second, third = (untracked(images) for images in (batch.images, between, out))
        self.queue(lambda: second.copy_(first + 1))

        def finish() -> None:
            third.copy_(254 - (second - 2))
            self.changes_done += 1

        self.queue(finish)
        return replace(batch, images=out)

    def step(self, number: int, batch: Batch) -> None:
        """Queue a comparison of all tensors in `batch`, including those on the host, with the
        expected data."""
        names = (*DTYPES, "table", "ids")
        tensors = {name: untracked(getattr(batch, name)) for name in names}
        expected = Batch(*(torch.empty_like(tensors[name]) for name in names))
        fill(expected, number)
        expected.images.copy_(255 - expected.images)

        def compare() -> None:
            self.steps_done += 1
            self.faults += [
                f"step {number} reads other {name}"
                for name, tensor in tensors.items()
                if not torch.equal(tensor, getattr(expected, name))
            ]

        self.queue(compare)


def untracked(tensor: Tensor) -> Tensor:
    """Return a view that does not keep the memory alive, like the address that a kernel
    receives."""
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def fill(batch: Batch, number: int) -> None:
    for tensor in (batch.images, batch.labels, batch.weights, batch.table, batch.ids):
        tensor.fill_(number)


class Training:
    """A training loop that uses `ToGpu` with real buffers. Simulated workers overwrite each free
    buffer immediately."""

    def __init__(self, gpu: LateGpu):
        self.gpu = gpu
        self.slots = Slots(plan_ring(LAYOUT, 1, STEPS, 0, on_gpu=True))
        self.to_gpu = ToGpu(gpu, self.slots.memory(), gpu.invert)

    def next_batch(self, number: int) -> Batch:
        self.write_into_free_slots()
        slot = self.slots.free.popleft()
        fill(self.slots.batch(slot, LAYOUT), number)
        return self.to_gpu(self.slots.lend(slot, LAYOUT))

    def write_into_free_slots(self) -> None:
        for slot in self.slots.free:
            fill(self.slots.batch(slot, LAYOUT), 99)

    def run(self, num_held: int) -> None:
        held = deque[Batch](maxlen=num_held)
        for number in range(STEPS):
            batch = self.next_batch(number)
            self.gpu.step(number, batch)
            held.append(batch)
            del batch
            self.write_into_free_slots()
            self.gpu.run_some()
        held.clear()
        self.to_gpu.close()
        assert self.gpu.locked is None, "the next loader could not lock this memory again"
        self.write_into_free_slots()
        while any(self.gpu.queues.values()):
            self.gpu.run_one()


@pytest.mark.parametrize("locks", [True, False], ids=["locked", "pinned"])
@pytest.mark.parametrize("num_held", [0, 1, 2, STEPS])
def test_each_step_reads_its_own_batch_for_any_order_of_work(num_held, locks):
    for seed in ORDERS:
        gpu = LateGpu(seed, locks=locks)
        Training(gpu).run(num_held)
        assert gpu.faults == [], f"order {seed}"
        assert gpu.steps_done == STEPS


@pytest.mark.parametrize("wait", WAITS)
def test_omitting_any_wait_breaks_some_order_of_work(wait):
    faults = set()
    for seed in ORDERS:
        gpu = LateGpu(seed, without=wait)
        Training(gpu).run(num_held=0)
        faults.update(gpu.faults)
    assert faults, f"no order fails without this wait: {wait}"


def test_a_batch_is_changed_while_the_previous_step_computes():
    """The host runs one step ahead of the GPU, so it waits only for the step before the previous
    one."""
    gpu = LateGpu(0)
    gpu.pace = {"copying": 1.0, "computing": 0.0}
    training = Training(gpu)
    for number in range(STEPS):
        gpu.step(number, training.next_batch(number))
        assert gpu.changes_done == number + 1
        assert gpu.steps_done == max(number - 1, 0)
    training.to_gpu.close()
    assert gpu.steps_done == STEPS
