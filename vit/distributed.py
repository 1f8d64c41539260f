"""torch.distributed lives here: who am I, start, sums, waiting for each other, wrapping.

The data's story: torchrun sets RANK, WORLD_SIZE and LOCAL_RANK; `join_world` reads them once, agrees
with the other ranks on the kind of device, and gives a `World`, which every other module is handed
instead of asking torch. Without torchrun the world is one process and no process group exists. CPU
with gloo is a supported target, a GPU uses NCCL; nothing else differs.

Who waits for whom, and how long. What a person, a disk or a network can make slow goes through the
store, which torchrun serves, and not through a collective, which ends the run when it takes too
long and holds back signals:

    join_world      the main rank for all others                        COLLECTIVE_TIMEOUT
    broadcast_from_main      all others for the main rank's function             as long as it takes
    main_first      the same, and then they call the function           as long as it takes
    fail_together    all for all, who may save or load meanwhile         LONGEST_WAIT
    check_same      broadcast_from_main, then fail_together
    barrier         fail_together, then a collective
    sum_, any, DDP  all for all, in collectives                         COLLECTIVE_TIMEOUT

A mistake (ValueError) in one of the middle ones ends all ranks: the one that made it tells, the
others raise AlreadyReported. So they do where a rank has ended of something else, wherever it was,
as `vit.exit.run_command` leaves word of it. Of one that was killed those ranks of its host take
notice that wait through the store, and leave word for the other hosts; torchrun's SIGTERM would not
end them, as it means to save first. Where torchrun was killed the store goes with the first host's.
Then fail_together goes on in a collective, so that its ranks can save; the others raise RankLost. In
collectives gloo notices a dead rank at once. NCCL does not: its other ranks stand still until
torchrun, Slurm (srun --kill-on-bad-exit) or COLLECTIVE_TIMEOUT ends them.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from vit.system.devices import HostDevices, choose_device, find_devices

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""For a dead cable or a hung rank (gloo's own default is 30 minutes)."""
LONGEST_WAIT = timedelta(hours=1)
"""For the slowest rank to save or to load: 15 GB at 4 MB/s."""
ENDED = "ended"
"""The word in the store under which a rank leaves why it has ended."""
POLL_S = 0.25
"""A rank that waits through the store looks at least so often."""


class AlreadyReported(ValueError):
    """Raised on the other ranks for a mistake that one rank found and reports."""


class RankLost(RuntimeError):
    """Another rank has ended, or does not come."""


class StoreLost(RankLost):
    """Nobody serves the store any more."""


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None
    """Where the ranks leave words for each other; of several ranks only."""
    hosts: tuple[str, ...] = ()
    """Of each rank, the name of its host; of several ranks only."""
    _beside: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    """The ranks of this host, if they can be told from others, with their process numbers."""
    _turns: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)
    """Of the words in the store: all ranks wait for each other in the same order."""

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True on one rank of each host: it looks at files for the others."""
        return not self.hosts or self.hosts.index(self.hosts[self.rank]) == self.rank

    def host_of(self, rank: int) -> str:
        """The name of the host that `rank` runs on."""
        return self.hosts[rank] if self.hosts else socket.gethostname()

    def barrier(self) -> None:
        """Wait for all ranks, of whom one may be saving or drawing its report."""
        if self.size > 1:
            with self.fail_together():
                pass
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks in place. Queued on the device like any other operation."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_from_main(self, function: Callable[[], T]) -> T:
        """What `function` gives on the main rank (anything that JSON holds), on all ranks, who wait
        as long as it takes. Whatever it raises there becomes AlreadyReported on the others."""
        if self.store is None:
            return function()
        word = f"broadcast_from_main {next(self._turns)}"
        if self.is_main:
            try:
                result = function()
            except BaseException as error:
                self._say(word, {"problem": _in_words(error)})
                raise
            self._say(word, {"result": result})
            return result
        self._wait_until(lambda store: store.check([word]))
        told = json.loads(self.store.get(word))
        if "problem" in told:
            raise AlreadyReported(told["problem"])
        return told["result"]

    def main_first(self, function: Callable[[], T]) -> T:
        """`function()` on the main rank, then on the others, who wait as long as it takes: an index
        can take an hour to make. Whatever it raises on the main rank becomes AlreadyReported on
        them."""
        results = list[T]()

        def first() -> None:
            results.append(function())

        self.broadcast_from_main(first)
        return results[0] if results else function()

    def check_same(self, look: Callable[[], str], what: str) -> str:
        """What `look` gives on the main rank. Raises ValueError on a host where it gives something
        else to the first rank, the only one that looks; `what` says in words what it describes. All
        ranks stop.
        """
        expected = self.broadcast_from_main(look)
        with self.fail_together():
            if self.is_local_main and not self.is_main and (text := look()) != expected:
                raise ValueError(
                    f"{socket.gethostname()} sees other {what} than rank 0 ({text}, not"
                    f" {expected}): all hosts must see the same files"
                )
        return expected

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """All ranks come here together; a ValueError on one of them stops all. The main rank tells
        its own, else each rank that has one does. Raises RankLost where a rank does not come within
        LONGEST_WAIT."""
        if self.store is None:
            yield
            return
        turn = f"fail_together {next(self._turns)}"
        problem: ValueError | None = None
        try:
            yield
        except ValueError as error:
            problem = error
        except BaseException as error:
            self.announce_end(_in_words(error))
            raise
        is_told = problem is not None
        told_by_main = "told by rank 0" if is_told and self.is_main else ""
        # torchrun was killed: its ranks are alive, and have a last step to save.
        with suppress(StoreLost):
            is_told, told_by_main = self._exchange(turn, problem)
        if dist.is_initialized():
            # The store may have gone after it told one rank and before it told another. The one
            # would go on to the next collective, and the other's would not fit: so all meet here.
            flags = torch.tensor(
                [is_told, bool(told_by_main)], device=self.device, dtype=torch.int32
            )
            is_told, by_main = (count > 0 for count in self.sum_(flags).tolist())
            told_by_main = told_by_main or ("told by rank 0" if by_main else "")
        if not is_told:
            return
        if problem is not None and (self.is_main or not told_by_main):
            raise problem
        raise AlreadyReported(told_by_main or "told by another rank")

    def _exchange(self, turn: str, problem: ValueError | None) -> tuple[bool, str]:
        """Whether a rank has a problem, and the main rank's in words, if it has one. Raises
        StoreLost, and RankLost where a rank does not come."""
        store = self.store
        assert store is not None, "there are other ranks"
        with _noticing_its_loss():
            store.set(f"{turn} {self.rank}", "" if problem is None else _in_words(problem))
            if problem is not None:
                store.add(f"{turn} problems", 1)
            store.add(turn, 1)
            if not self._wait_until(lambda store: store.add(turn, 0) >= self.size, LONGEST_WAIT):
                missing = [r for r in range(self.size) if not store.check([f"{turn} {r}"])]
                hours = LONGEST_WAIT / timedelta(hours=1)
                raise RankLost(f"{self._names(missing)} did not come within {hours:g} hour(s)")
            return store.add(f"{turn} problems", 0) > 0, store.get(f"{turn} 0").decode()

    def announce_end(self, words: str) -> None:
        """Let the ranks that wait, or will wait, through the store know that this one ends."""
        if self.store is not None:
            with suppress(dist.DistError):
                self._say(ENDED, words)

    def any_rank(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on one."""
        return bool(self.sum_(torch.tensor(float(flag), device=self.device)).item() > 0)

    def _say(self, word: str, value: Any) -> None:
        assert self.store is not None, "there are other ranks"
        self.store.set(word, json.dumps(value))

    def _wait_until(
        self, ready: Callable[[dist.Store], bool], limit: timedelta | None = None
    ) -> bool:
        """Look again and again; False when `limit` has passed. Raises AlreadyReported where another
        rank has ended, RankLost where one of this host was killed, StoreLost where the store has
        ended. Unlike the store's own waiting it lets signals through."""
        assert self.store is not None, "there are other ranks"
        deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        pause_s = 0.001
        gone = list[int]()
        with _noticing_its_loss():
            while not ready(self.store):
                if self.store.check([ENDED]):
                    raise AlreadyReported(json.loads(self.store.get(ENDED)))
                if gone:  # and its last words, if it left any, would have been seen above
                    raise RankLost(f"{self._names(gone)} has ended without a word, as if killed")
                gone = [rank for rank, pid in self._beside.items() if not _is_alive(pid)]
                if deadline is not None and time.monotonic() > deadline:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, POLL_S)
        return True

    def _names(self, ranks: list[int]) -> str:
        """`ranks` with their hosts, where they are known."""
        names = f"rank {', '.join(map(str, ranks))}"
        hosts = sorted({self.host_of(rank) for rank in ranks}) if self.hosts else []
        return f"{names} on {', '.join(hosts)}" if hosts else names


@contextmanager
def _noticing_its_loss() -> Iterator[None]:
    """For words in the store: raises StoreLost where it does not answer."""
    try:
        yield
    except dist.DistError:
        where = "the first host's launcher, or to rank 0"
        raise StoreLost(f"lost the connection to {where}") from None


def _in_words(error: BaseException) -> str:
    """What other ranks are told about the end of this one."""
    if isinstance(error, ValueError) and str(error):
        return str(error)
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}"


def world_size() -> int:
    """Ranks that torchrun has started, 1 without torchrun; known before `join_world`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Ranks that torchrun has started on this host, 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """True on rank 0; known before `join_world`, for messages about what went wrong on the way there."""
    return int(os.environ.get("RANK", "0")) == 0


# --- start and wrapping ------------------------------------------------------------------------


def _process_space() -> str:
    """In what the number of a process means the same process: the running kernel and the container.
    Empty where nothing tells."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended is gone when its parent knows of it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user, who has got the number
    return True


def _agree_on_device(world: World, asked: str, setting: str, found: HostDevices) -> World:
    """`world` with the device of this rank and the names of all hosts. Raises as `choose_device`
    does."""

    def decide() -> tuple[str, list[str], list[tuple[str, int]]]:
        everyone = [found]
        processes = list[tuple[str, int]]()
        if world.store is not None:
            words = [f"found {rank}" for rank in range(world.size)]
            if not world._wait_until(lambda store: store.check(words), COLLECTIVE_TIMEOUT):
                missing = [r for r in range(world.size) if not world.store.check([words[r]])]
                minutes = COLLECTIVE_TIMEOUT / timedelta(minutes=1)
                raise RankLost(f"{world._names(missing)} did not come within {minutes:g} min")
            everyone = [HostDevices(**json.loads(text)) for text in world.store.multi_get(words)]
            said = world.store.multi_get([f"process {rank}" for rank in range(world.size)])
            processes = [json.loads(text) for text in said]
        kind, notes = choose_device(asked, setting, everyone)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        return kind, [one.host for one in everyone], processes

    space = _process_space()
    if world.store is not None:
        world._say(f"process {world.rank}", (space, os.getpid()))
        world._say(f"found {world.rank}", asdict(found))
    kind, hosts, processes = world.broadcast_from_main(decide)
    beside = {rank: pid for rank, (its, pid) in enumerate(processes) if space and its == space}
    index = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", index) if kind == "cuda" else torch.device("cpu")
    return replace(world, device=device, hosts=tuple(hosts), _beside=beside)


_here: World | None = None
"""The world that was started in this process."""


def announce_end(words: str) -> None:
    """`World.announce_end` of the world that was started here, if one was: for the end of a process,
    where nobody has it at hand."""
    if _here is not None:
        _here.announce_end(words)


def join_world(
    device: str = "auto", setting: str = "train.device=", found: HostDevices | None = None
) -> World:
    """Join the process group that torchrun describes, or be a world of one.

    `device`: cpu; cuda; or auto, which is a GPU where each rank of every host has one, else the
    CPU. `found`: what there is on this host, by default what `find_devices` finds. Raises
    ValueError where GPUs are asked for, in messages `setting` that setting or flag, and there are
    fewer than ranks on a host; where hosts differ; and where the ranks cannot meet.
    """
    _set_backends()
    rank = int(os.environ.get("RANK", "0"))
    size = world_size()
    store: dist.Store | None = None
    if size > 1:
        _end_with_launcher()
        try:
            store, rank, _ = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise ValueError(_why_not_met(str(error))) from None
    words = dist.PrefixStore("words", store) if store is not None else None
    global _here
    _here = world = World(rank, size, torch.device("cpu"), words)
    world = _agree_on_device(world, device, setting, found or find_devices())
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        # Before the first CUDA call, or every rank opens a context on GPU 0.
        torch.cuda.set_device(world.device)
    if store is not None:
        try:
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                timeout=COLLECTIVE_TIMEOUT,
                store=store,
                rank=rank,
                world_size=size,
                device_id=world.device if on_gpu else None,
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise ValueError(_why_not_met(str(error))) from None
    return world


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
    address = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    if "EADDRINUSE" in reason:
        return (
            f"MASTER_PORT={port} is in use by another program: choose another, or let torchrun"
            " --standalone find a free one"
        )
    first_line = (reason.splitlines() or [""])[0].rstrip(". ")
    return (
        f"rank 0 was not met at {address}:{port} ({first_line}): check that it runs there and"
        " MASTER_ADDR and MASTER_PORT name it"
    )


def _end_with_launcher() -> None:
    """Ask Linux to send SIGTERM, which saves and stops, when torchrun dies: its ranks would
    otherwise train on, unseen, beside the next attempt."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def wrap(model: nn.Module, world: World) -> nn.Module:
    """`model` under DDP, or itself in a world of one. Rank 0's weights go to all ranks, and before
    each forward pass its buffers if some change in training: those of batch norms."""
    if world.size == 1:
        return model
    options: dict[str, Any] = {"gradient_as_bucket_view": True}
    if world.device.type == "cuda":
        options["device_ids"] = [world.device]
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        # Fixed positions, say, which all ranks have alike. torch 2.15 gave the argument another
        # name.
        known = inspect.signature(DistributedDataParallel).parameters
        options[
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        ] = False
    return DistributedDataParallel(model, **options)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which backward passes of a wrapped `model` add up locally. The forward pass
    belongs inside, too."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def peak_memory_gib(device: torch.device) -> float:
    """Of the GPU; without one, of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**30 if sys.platform == "darwin" else 2**20
    )
