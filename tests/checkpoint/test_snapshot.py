"""Test that the saver thread's copy contains the state of a single step.

The tests use a simulated GPU whose streams run in any order that the waits between them allow.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from processes import TINY
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from vit.checkpoint.checkpoint import named_tensors
from vit.checkpoint.snapshot import Snapshot
from vit.compose import build_run
from vit.config import io as config_io
from vit.distributed.process_group import World

GPU = torch.device("cuda", 0)


class FakeEvent:
    def __init__(self, cuda: FakeCuda):
        self._cuda = cuda
        self.is_reached = False

    def reach(self) -> None:
        self.is_reached = True

    def wait(self) -> None:
        if self._cuda.without != "update waits":
            self._cuda.current.queue.append(self)

    def synchronize(self) -> None:
        while not self.is_reached and self._cuda.without != "thread waits":
            assert self._cuda.run_one(), "deadlock: every stream waits for another one"


class FakeStream:
    """A simulated CUDA stream: a queue of functions and waits that run in order, but at arbitrary
    times."""

    def __init__(self, cuda: FakeCuda):
        self._cuda = cuda
        self.queue: deque[Callable[[], Any] | FakeEvent] = deque()

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._cuda)
        self.queue.append(event.reach)
        return event

    def wait_stream(self, other: FakeStream) -> None:
        if self._cuda.without != "copy waits":
            self.queue.append(other.record_event())


class FakeCuda(TorchDispatchMode):
    """A replacement for torch.cuda that queues tensor operations and runs them one at a time.

    choose: a function that selects the next stream to run. without: the name of a wait to omit.
    """

    def __init__(self, choose: Callable[[list[FakeStream]], FakeStream], without: str = ""):
        super().__init__()
        self.without = without
        self._choose = choose
        self.current = FakeStream(self)
        self._streams = [self.current]
        self._is_running = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        later = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar)
        if self._is_running or function not in later:
            return function(*args, **(kwargs or {}))
        self.current.queue.append(lambda: function(*args, **(kwargs or {})))
        return args[0]

    def Stream(self, device: torch.device) -> FakeStream:
        self._streams.append(FakeStream(self))
        return self._streams[-1]

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def run_one(self) -> bool:
        """Run the next operation of a stream that is not waiting. Return False if all streams are
        waiting."""
        ready = []
        for stream in self._streams:
            while stream.queue and isinstance(stream.queue[0], FakeEvent):
                if not stream.queue[0].is_reached:
                    break
                stream.queue.popleft()
            if stream.queue and not isinstance(stream.queue[0], FakeEvent):
                ready.append(stream)
        if ready:
            self._is_running = True
            self._choose(ready).queue.popleft()()
            self._is_running = False
        return bool(ready)


def copies_of_steps(cuda: FakeCuda, steps: int = 5) -> list[tuple[int, list[float]]]:
    """Train for `steps` steps, copying the state after every second step. Return each copy's step
    and the values that the saver thread reads."""
    state = {name: torch.zeros(()) for name in ("model.weight", "optim.slot", "model.buffer")}
    snapshot = Snapshot(state, GPU, cuda)
    copies = []
    copied = None
    with cuda:
        for step in range(1, steps + 1):
            state["model.buffer"].fill_(step)
            if copied is not None:
                copied.wait()
                copied = None
            state["model.weight"].fill_(step)
            state["optim.slot"].fill_(step)
            if step % 2:
                copied = snapshot.take(state, ["model.buffer"])
                if cuda.without == "buffers at once":
                    copied = snapshot.take(state)
                pending = step
            else:
                snapshot.wait()
                copies.append((pending, [float(copy) for copy in snapshot.tensors.values()]))
        while cuda.run_one():
            pass
    return copies


def orders() -> list[Callable[[list[FakeStream]], FakeStream]]:
    """Yield orders in which to run the streams: computations first, copies first, and a hundred
    random orders."""
    chance = random.Random(0)
    return [lambda ready: ready[0], lambda ready: ready[-1], *[chance.choice] * 100]


def test_a_copy_has_one_step_for_any_order_of_streams():
    for choose in orders():
        copies = copies_of_steps(FakeCuda(choose))
        assert copies == [(step, [step] * 3) for step in (1, 3)]


@pytest.mark.parametrize("wait", ["copy waits", "update waits", "thread waits", "buffers at once"])
def test_each_wait_is_needed_in_some_order(wait):
    wrong = [
        copies
        for choose in orders()
        if (copies := copies_of_steps(FakeCuda(choose, wait))) != [(1, [1] * 3), (3, [3] * 3)]
    ]
    assert wrong


def test_a_saver_makes_thread_and_update_wait_for_the_copy(tmp_path, config):
    """The fake GPU makes progress only while the host waits, and it runs the training step
    first."""
    overrides = [*TINY, f"run.dir={tmp_path / 'run'}"]
    run = build_run(config_io.load_config(config, overrides), World(0, 1, torch.device("cpu")))
    run.saver.finish()
    state = run.train_step.model
    # The buffer `seen` changes during the forward pass, like batch norm statistics.
    state.register_buffer("seen", torch.ones(3))
    cuda = FakeCuda(lambda ready: ready[0])
    snapshot = Snapshot(named_tensors(run.train_step), GPU, cuda)
    run.saver._snapshot = snapshot
    # The saver thread must not run the fake GPU until the weight update has been queued.
    is_queued = threading.Event()
    snapshot.wait = lambda: is_queued.wait(60) and Snapshot.wait(snapshot)
    expected = {name: tensor.clone() for name, tensor in named_tensors(run.train_step).items()}
    with cuda:
        run.saver.save(run.state, True)
        state.seen.fill_(2)
        assert run.train_step.copying is snapshot._copied is not None
        run.train_step.copying.wait()
        state.cls_token.data.fill_(7)
    is_queued.set()
    run.saver.finish()
    while cuda.run_one():
        pass
    assert (state.cls_token == 7).all()
    run.__exit__(None, None, None)
    saved = load_file(run.folder / "checkpoints" / "step_00000000" / "state.safetensors")
    assert saved.keys() == expected.keys()
    assert [name for name in saved if not torch.equal(saved[name], expected[name])] == []


def test_closing_after_a_device_failure_raises_no_second_error():
    class Failed(FakeEvent):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda = FakeCuda(lambda ready: ready[0])
    snapshot = Snapshot({"weight": torch.zeros(2)}, GPU, cuda)
    snapshot._copied = Failed(cuda)
    snapshot._is_locked = True
    snapshot.close()


def test_forked_processes_do_not_inherit_the_copy():
    """If loader workers inherited the copy, each worker would keep an outdated copy of the state in
    memory."""
    state = {"weight": torch.ones(2**20)}
    snapshot = Snapshot(state, torch.device("cpu"))
    snapshot.prepare()
    assert snapshot.take(state) is None
    assert torch.equal(snapshot.tensors["weight"], state["weight"])
    address = snapshot.tensors["weight"].data_ptr()

    def maps(pid: int) -> list[tuple[int, int]]:
        with open(f"/proc/{pid}/maps") as file:
            ends = [line.split()[0].split("-") for line in file]
        return [(int(begin, 16), int(end, 16)) for begin, end in ends]

    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        assert any(begin <= address < end for begin, end in maps(os.getpid()))
        assert not any(begin <= address < end for begin, end in maps(child))
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_types_shapes_and_layouts_of_tensors_are_kept():
    state = {
        "half": torch.arange(3).to(torch.bfloat16),
        "step": torch.tensor(7.0),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "count": torch.tensor(2**40),
        "none": torch.zeros(0, 4),
    }
    snapshot = Snapshot(state, torch.device("cpu"))
    snapshot.take(state)
    for name, tensor in state.items():
        copy = snapshot.tensors[name]
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
