"""torch.distributed lives here: who am I, start, stop, sums, wrapping.

The data's story: torchrun sets RANK, WORLD_SIZE and LOCAL_RANK; `start` reads them once into a `World`, which every other module is handed
instead of asking torch. Without torchrun the world is one process and no process group exists. CPU with gloo is a supported target, a GPU
uses NCCL; nothing else differs.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import inspect
import itertools
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""A dead process is noticed at once; a dead cable or a hung rank only after this long (gloo's own default is 30 minutes)."""


SILENT_S = 3.0
"""A rank that has nothing to say leaves this much later: torchrun ends the others at the first exit, and one may be about to say why."""


_turns = itertools.count()
"""Of `World.main_first`, which all ranks call in the same order."""


class AlreadyReported(ValueError):
    """Raised on the other ranks for a mistake that the main rank found and reports."""


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None
    """Where the ranks leave words for each other; of several ranks only."""

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks in place. Queued on the device like any other operation."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_text(self, text: str) -> str:
        """The main rank's `text`, on every rank."""
        if self.size == 1:
            return text
        box = [text]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def main_first(self, function: Callable[[], T]) -> T:
        """`function()` on the main rank, then on the others, who wait as long as it takes: an index can take an hour to make. A ValueError
        of the main rank becomes AlreadyReported on them."""
        if self.store is None:
            return function()
        word = f"main_first {next(_turns)}"
        if self.is_main:
            try:
                result = function()
            except ValueError as error:
                self.store.set(word, str(error) or type(error).__name__)
                raise
            self.store.set(word, "")
            return result
        pause_s = 0.001
        while not self.store.check([word]):  # a collective would end by COLLECTIVE_TIMEOUT, and keep signals waiting
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
        problem = self.store.get(word).decode()
        if problem:
            raise AlreadyReported(problem)
        return function()

    def check_same(self, text: str, what: str) -> None:
        """Raise ValueError on a rank whose `text` is not the main rank's; `what` says in words what it describes. All ranks stop."""
        expected = self.broadcast_text(text)
        with self.main_reports():
            if text != expected:
                raise ValueError(f"sees other {what} than rank 0 ({text}, not {expected}): all hosts must see the same files")

    @contextmanager
    def main_reports(self) -> Iterator[None]:
        """All ranks come here together; a ValueError on one of them stops all. The main rank tells its own, else each rank that has one
        does."""
        problem: ValueError | None = None
        try:
            yield
        except ValueError as error:
            problem = error
        if not self.any(problem is not None):
            return
        main_tells = self.broadcast_text("yes" if problem is not None else "") == "yes"
        if problem is not None and (self.is_main or not main_tells):
            raise problem
        raise AlreadyReported("told by another rank")

    def any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on one."""
        return bool(self.sum_(torch.tensor(float(flag), device=self.device)).item() > 0)


def world_size() -> int:
    """Ranks that torchrun has started, 1 without torchrun; known before `start`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Ranks that torchrun has started on this host, 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """True on rank 0; known before `start`, for messages about what went wrong on the way there."""
    return int(os.environ.get("RANK", "0")) == 0


def start(device: str = "auto", asked_by: str = "train.device=") -> World:
    """Join the process group that torchrun describes, or be a world of one.

    `device`: cpu; cuda; or auto, which is a GPU where each rank of the host has one, else the CPU. Raises ValueError where GPUs are asked
    for, in messages `asked_by` that setting or flag, and there are fewer than ranks on this host; and where the ranks cannot meet.
    """
    local_rank, local_size, size = int(os.environ.get("LOCAL_RANK", "0")), local_world_size(), world_size()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise ValueError(f"{asked_by}cuda, but torch sees no GPU here: use {asked_by}cpu, or check the driver with nvidia-smi")
    if device == "cuda" and gpus < local_size:
        raise ValueError(
            f"{asked_by}cuda, but this host has {gpus} GPU(s) for {local_size} ranks: start torchrun with --nproc_per_node={gpus}"
        )
    if device == "auto" and 0 < gpus < local_size and local_rank == 0:
        print(
            f"this host has {gpus} GPU(s) for {local_size} ranks: training on the CPU; use --nproc_per_node={gpus} for the GPU",
            file=sys.stderr,
        )
    if size > 1:
        _end_with_launcher()
    _set_backends()
    if device == "cuda" or (device == "auto" and gpus >= local_size):
        where = torch.device("cuda", local_rank)
        torch.cuda.set_device(where)  # before the first CUDA call, or every rank opens a context on GPU 0
    else:
        where = torch.device("cpu")
    if size > 1:
        backend = "nccl" if where.type == "cuda" else "gloo"
        try:
            store, rank, _ = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
            device_id = where if where.type == "cuda" else None
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, store=store, rank=rank, world_size=size, device_id=device_id)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise ValueError(_why_not_met(str(error))) from None
        return World(rank, size, where, dist.PrefixStore("words", store))
    return World(int(os.environ.get("RANK", "0")), size, where)


def _set_backends() -> None:
    """What torch would decide by itself, or by an environment that differs from host to host.

    fp32 means fp32: no TF32, which cuDNN's convolutions take by default (8 times as fast, with 10
    bits of fraction; who wants speed takes bf16). No cuDNN benchmark: timings that choose a kernel
    choose another one after a resume. Segments of GPU memory may grow, as augmentation allocates
    hundreds of sizes in a step; the user's own allocator settings win.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # read when the first tensor comes to a GPU
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def _why_not_met(reason: str) -> str:
    """What to tell when the ranks could not meet."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if "EADDRINUSE" in reason:
        return f"MASTER_PORT={port} is in use by another program: choose another, or let torchrun --standalone find a free one"
    first_line = (reason.splitlines() or [""])[0].rstrip(". ")
    return f"rank 0 was not met at {address}:{port} ({first_line}): check that it runs there and MASTER_ADDR and MASTER_PORT name it"


def _end_with_launcher() -> None:
    """Ask Linux to send SIGTERM, which saves and stops, when torchrun dies: its ranks would otherwise train on, unseen, beside the next
    attempt."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def stop(world: World) -> None:
    """End this process with status 0, after every rank has come here. Does not return when there is a process group.

    gloo's worker threads race with the interpreter's finalisation: a plain exit aborts about a quarter of two-rank runs in torch 2.15
    ("terminate called without an active exception"). A barrier, dropping the DDP objects, and leaving without finalisation together ended
    it.
    """
    if world.size == 1:
        return
    world.barrier()
    gc.collect()
    dist.destroy_process_group()
    leave(0)


def leave(status: int) -> NoReturn:
    """End this process at once, without waiting for other ranks: they notice the closed connections. Never returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def wrap(model: nn.Module, world: World) -> nn.Module:
    """`model` under DDP, or itself in a world of one. Rank 0's weights go to all ranks, and before
    each forward pass its buffers if some change in training: those of batch norms."""
    if world.size == 1:
        return model
    options: dict[str, Any] = {"gradient_as_bucket_view": True}
    if world.device.type == "cuda":
        options["device_ids"] = [world.device]
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        # Fixed positions, say, which all ranks have alike. torch 2.15 gave the argument another name.
        known = inspect.signature(DistributedDataParallel).parameters
        options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False
    return DistributedDataParallel(model, **options)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which backward passes of a wrapped `model` add up locally. The forward pass belongs inside, too."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


class StopSignals:
    """Remembers that this process was asked to end. The handler only sets a flag; the loop acts at the next step boundary, on all ranks."""

    def __init__(self) -> None:
        self.received = ""
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:  # somebody who presses Ctrl-C twice means it
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def release_interrupt(self) -> None:
        """Let Ctrl-C interrupt again: there are no more steps that would see the flag."""
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])

    def restore(self) -> None:
        """Give the signals back to who had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def peak_memory_gib(device: torch.device) -> float:
    """Of the GPU; without one, of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)  # bytes there, KiB on Linux


def run_command(command: Callable[[], World | None]) -> None:
    """Run `command`, which returns the world it started, and end the process with its exit status.

    0: it returned. 2: a mistake that a person can mend, told in one message without a stack. 1: anything else, with its stack.
    A mistake is a ValueError raised by our own code; one from inside a library is a bug and keeps its stack.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        world = command()
        if world is not None:
            stop(world)
    except AlreadyReported:
        time.sleep(SILENT_S)
        leave(2)
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours, raised_in = (Path(__file__).resolve().parent, Path(sys.argv[0]).resolve()), Path(frames[-1].filename).resolve()
        if not any(raised_in.is_relative_to(place) for place in ours):
            traceback.print_exc()
            leave(1)
        if os.environ.get("LOCAL_RANK", "0") == "0" or dist.is_initialized():  # before that, all ranks of a host find the same
            print(f"{_who(rank)}error: {error}", file=sys.stderr)
        else:
            time.sleep(SILENT_S)
        leave(2)
    except KeyboardInterrupt:
        print(f"{_who(rank)}interrupted", file=sys.stderr)
        leave(130)
    except Exception as error:
        if problem := _out_of_memory(error) or _disk_full(error):
            print(f"{_who(rank)}error: {problem}", file=sys.stderr)
            leave(2)
        if rank and any(
            sign in str(error) for sign in ("onnection closed by peer", "onnection reset by peer", "ncclRemoteError", "Broken pipe")
        ):
            print(f"{_who(rank)}lost the connection to another rank; its own message says why", file=sys.stderr)
        else:
            traceback.print_exc()
        leave(1)


def _out_of_memory(error: Exception) -> str:
    """Which memory ran out and which setting to lower; empty if `error` is about something else. Only the GPU's has a class of its own:
    the CPU's allocator is told from its text, and so is what a loader worker sends home."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        reason = text.split(". ")[0]
    elif asked := re.search(r"DefaultCPUAllocator: .*?(\d+) bytes|Unable to allocate ([\d.]+ \w+)", text):
        reason = f"out of memory, {f'{int(asked[1]) / 2**30:.2f} GiB' if asked[1] else asked[2]} more were asked for"
    elif isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or "MemoryError" in text or "bad_alloc" in text:
        reason = "out of memory"
    else:
        return ""
    files = {Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)}
    if Path(__file__).with_name("data") / "workers.py" in files:
        return f"{reason} while loading a batch. Lower data.num_workers, data.prefetch_gib or data.global_batch_size (eval.batch_size)"
    return f"{reason}. Lower data.micro_batch_size in training, eval.batch_size in evaluation, or take a smaller model"


def _disk_full(error: Exception) -> str:
    """What to tell when `error` is a full disk or a used-up quota that nobody nearer has told; else empty."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror}; what was complete is untouched. Free some space and run the same command again"


def _who(rank: int) -> str:
    return f"rank {rank}: " if rank else ""
