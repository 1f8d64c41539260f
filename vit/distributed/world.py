"""Communicate between the ranks of a run: sums, broadcasts, barriers and shared errors.

`vit.distributed.process_group.join_world` creates a `World`. Other modules use it instead of
calling `torch.distributed`. Without torchrun, the world has one rank, and no function waits.

A collective ends the run after a time-out and blocks signals while it waits. Waits that a user, a
disk or a network can prolong therefore use torchrun's key-value store:

    function              who waits for whom                              for how long
    join_world            all for rank 0, and rank 0 for all              COLLECTIVE_TIMEOUT
    broadcast_from_main   all for the function on rank 0                  as long as it takes
    main_first            the same, then all call the function            as long as it takes
    main_then_others      the same, then the others call a function       as long as it takes
    fail_together         all for all, while each may save or load        LONGEST_WAIT
    check_same            broadcast_from_main, then fail_together
    barrier               fail_together, then a collective
    sum_, max_, any_rank  all for all, in a collective, as DDP            COLLECTIVE_TIMEOUT
    broadcast_            all for rank 0, in a collective                 COLLECTIVE_TIMEOUT

A failure of one rank reaches the other ranks in these ways:

- If a rank raises ValueError (a user's mistake) in a function that uses the store, all other ranks
  raise AlreadyReported.
- A process that exits announces its end in the store (`vit.distributed.exit.run_command`). Every
  rank that waits through the store, now or later, raises AlreadyReported.
- After SIGKILL, ranks on the same host see that the process is gone, raise RankLost, and announce
  the loss to other hosts. torchrun's SIGTERM would not end these ranks, because they treat it as a
  request to save.
- If torchrun on the first host is killed, the store is lost. fail_together then uses only a
  collective, so that the ranks can save. All other functions raise RankLost.
- In a collective, gloo notices a dead rank immediately. Ranks that use NCCL wait until torchrun,
  Slurm (srun --kill-on-bad-exit) or `vit.distributed.watchdog` ends them. The watchdog also finds
  ranks that hang.
"""

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vit.distributed.launcher import took_store_along
from vit.system.host import process_state

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""The time after which a collective fails because of a cut cable or a hung rank (gloo's default: 30
minutes)."""
LONGEST_WAIT = timedelta(hours=1)
"""The time that the slowest rank may take to save or load, which is enough for 15 GB at 4 MB/s."""
BROADCAST_BYTES = 2**26
"""The approximate maximum size of a broadcast that combines several tensors."""

ENDED = "ended"
"""The key in the store under which any rank announces why it exits. With a rank's number at its
end, the key holds the announcement of that rank."""

BY_MAIN = "reported by rank 0"
"""The message for a problem of rank 0 whose text did not reach this rank."""

POLL_S = 0.25
"""The longest interval at which a waiting rank polls the store, with up to 1,024 ranks."""
LOOKS_PER_S = 4096
"""The maximum number of polls per second over all ranks. A poll is two requests of 31 microseconds
each (docs/clusters.md), so polling uses a quarter of the time of the store's thread."""
FIRST_SHARE = 1 / 16
"""The shortest polling interval, as a fraction of the longest. It is never below 1 ms."""


def leaves_of(rank: int, num_ranks: int, num_leaves: int) -> range:
    """Return a rank's leaves (micro-batches, see `vit.distributed.exact`). The number of leaves
    differs by at most one between ranks."""
    return range(rank * num_leaves // num_ranks, (rank + 1) * num_leaves // num_ranks)


class AlreadyReported(ValueError):
    """An exception for a user's mistake that another rank reports."""


class RankLost(RuntimeError):
    """The error raised if another rank has exited or did not respond in time."""


class StoreLost(RankLost):
    """The error raised if torchrun's store no longer answers."""


@dataclass(frozen=True)
class World:
    """All ranks of a run, and the rank of this process."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None
    """torchrun's key-value store; None if there is only one rank."""
    hosts: tuple[str, ...] = ()
    """The host name of each rank; () if there is only one rank."""
    joined_s: float = field(default=0.0, compare=False)
    """The time in seconds that it took for all ranks to join."""

    _host_pids: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    """The process ids, in this process's PID namespace, of the ranks on this host."""
    _has_lost_store: threading.Event = field(
        default_factory=threading.Event, repr=False, compare=False
    )
    """Set when the store stops answering. The connection is never reopened."""
    _sequence: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)
    """The counter that numbers keys in the store. All ranks call the functions in the same order
    and therefore use the same numbers."""

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this process is the first rank on its host, which checks files for the host."""
        return not self.hosts or self.hosts.index(self.hosts[self.rank]) == self.rank

    @property
    def look_s(self) -> float:
        """The longest polling interval in seconds. The interval grows with the number of ranks, to
        keep the total number of requests per second constant."""
        return max(POLL_S, self.size / LOOKS_PER_S)

    @property
    def _shared_store(self) -> dist.Store:
        """The store of a world with several ranks."""
        assert self.store is not None, "there are other ranks"
        return self.store

    def host_of(self, rank: int) -> str:
        """Return the host name of `rank`."""
        return self.hosts[rank] if self.hosts else socket.gethostname()

    def barrier(self) -> None:
        """Wait for all ranks, which may still be saving or drawing the report."""
        if self.size > 1:
            with self.fail_together():
                pass
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks in place. Does not wait for the device."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` with its elementwise maximum over the ranks. Does not wait for the
        device."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite `tensors` with rank 0's values on all ranks, on any device.

        All ranks must pass tensors of the same shapes and dtypes in the same order.
        """
        if self.size == 1:
            return

        for piece in _in_pieces(tensors):
            # Each broadcast costs a round trip, so send hundreds of tensors in one broadcast.
            sizes = [tensor.numel() for tensor in piece]
            if self.is_main:
                flat = torch.cat([tensor.detach().reshape(-1).to(self.device) for tensor in piece])
            else:
                flat = torch.empty(sum(sizes), dtype=piece[0].dtype, device=self.device)
            dist.broadcast(flat, src=0)
            if not self.is_main:
                for tensor, part in zip(piece, flat.split(sizes), strict=True):
                    tensor.detach().copy_(part.view(tensor.shape))

    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank. Waits for the device."""
        return bool(self.sum_(torch.tensor(float(flag), device=self.device)).item() > 0)

    def broadcast_from_main(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0, and return its result, a JSON value, on all ranks.

        If `function` raises an error on rank 0, the other ranks raise AlreadyReported.
        """
        return self._share(function, lambda result: result)

    def on_main(self, function: Callable[[], T]) -> T | None:
        """Call `function` on rank 0 and return its result. Other ranks wait and return None.

        If `function` raises an error on rank 0, the other ranks raise AlreadyReported.
        """
        return self._share(function, lambda result: None)

    def main_first(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0, then on the other ranks, which can reuse rank 0's files.

        If `function` raises an error on rank 0, the other ranks raise AlreadyReported.
        """
        return self.main_then_others(function, lambda result: None, lambda _: function())

    def main_then_others(
        self, main: Callable[[], T], shared: Callable[[T], Any], others: Callable[[Any], T]
    ) -> T:
        """Call `main` on rank 0, and then `others` on the other ranks. Each returns its own result.

        `others` receives `shared(result of main)`, a JSON value. An error of `main` becomes
        AlreadyReported on the other ranks.
        """
        answer = self._share(main, shared)
        return answer if self.is_main else others(answer)

    def _share(self, function: Callable[[], T], shared: Callable[[T], Any]) -> Any:
        """Call `function` on rank 0 and return its result. Other ranks return `shared(result)`.

        Rank 0 writes its result or its problem to the store, and the other ranks wait for it.
        """
        if self.store is None:
            return function()

        key = f"broadcast {next(self._sequence)}"
        if self.is_main:
            try:
                result = function()
            except BaseException as error:
                self._post(key, {"problem": _message(error)})
                raise
            self._post(key, {"result": shared(result)})
            return result

        self._wait_until(lambda store: store.check([key]))
        answer = json.loads(self.store.get(key))
        if "problem" in answer:
            raise AlreadyReported(answer["problem"])
        return answer["result"]

    def check_same(self, look: Callable[[], str], subject: str) -> str:
        """Return rank 0's result of `look`, after comparing it with one rank per host.

        Raises ValueError, which names the `subject`, on a host with a different result. All other
        ranks raise AlreadyReported.
        """
        expected = self.broadcast_from_main(look)
        with self.fail_together():
            seen = look() if self.is_local_main and not self.is_main else expected
            if seen != expected:
                raise ValueError(
                    f"{socket.gethostname()} does not see the same {subject} as rank 0 ({seen},"
                    f" expected {expected}): give all hosts the same files"
                )
        return expected

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Make all ranks leave the block together, and make all of them fail if one raises
        ValueError.

        If the block raises ValueError on rank 0, only rank 0's error is raised. Otherwise, each
        failing rank raises its own error. All other ranks raise AlreadyReported. Raises RankLost if
        a rank does not leave the block within LONGEST_WAIT.
        """
        if self.store is None:
            yield
            return

        key = f"fail_together {next(self._sequence)}"
        problem: ValueError | None = None
        try:
            yield
        except ValueError as error:
            problem = error
        except BaseException as error:
            self.announce_end(_message(error))
            raise

        any_failed, main_message = self._agree_on_failure(key, problem)
        if not any_failed:
            return
        is_reporter = self.is_main or not main_message
        if problem is not None and is_reporter:
            raise problem
        raise AlreadyReported(main_message or "reported by another rank")

    def _agree_on_failure(self, key: str, problem: ValueError | None) -> tuple[bool, str]:
        """Return whether any rank has a problem, and rank 0's message, or "" if rank 0 has no
        problem.

        All ranks return the same answer even if the store stops answering. `BY_MAIN` then replaces
        the message.
        """
        try:
            any_failed, main_message = self._exchange(key, problem)
        except StoreLost:
            # torchrun has exited, but the ranks must still save the last step. Only the collective
            # below synchronizes them.
            any_failed = problem is not None
            main_message = BY_MAIN if any_failed and self.is_main else ""
        if not dist.is_initialized():
            return any_failed, main_message

        # The store may shut down after answering only some ranks. These ranks would then call a
        # different collective than the other ranks, so all ranks agree in this collective, which
        # waits for the device.
        flags = torch.tensor(
            [any_failed, bool(main_message)], device=self.device, dtype=torch.int32
        )
        num_failed, num_main_failed = self.sum_(flags).tolist()
        return num_failed > 0, main_message or (BY_MAIN if num_main_failed > 0 else "")

    def _exchange(self, key: str, problem: ValueError | None) -> tuple[bool, str]:
        """Return whether any rank has a problem, and rank 0's message if rank 0 has a problem.

        Raises StoreLost if the store does not answer, and RankLost if a rank does not respond.
        """
        store = self._shared_store
        with self.asking_store():
            store.set(f"{key} {self.rank}", "" if problem is None else _message(problem))
            if problem is not None:
                store.add(f"{key} problems", 1)
            store.add(key, 1)
            if not self._wait_until(lambda store: store.add(key, 0) >= self.size, LONGEST_WAIT):
                self._report_missing(key, LONGEST_WAIT)

            any_failed = store.add(f"{key} problems", 0) > 0
            return any_failed, store.get(f"{key} 0").decode() if any_failed else ""

    def announce_end(self, message: str) -> None:
        """Announce to all ranks that use the store that this rank is exiting."""
        if self.store is not None:
            with suppress(StoreLost):
                self._post(f"{ENDED} {self.rank}", message)
                self._post(ENDED, message)

    def gather(self, name: str, value: object, limit: timedelta | None = None) -> list[Any]:
        """Return the JSON `value` of every rank on rank 0. Other ranks return [] immediately.

        Raises RankLost if a rank does not respond within `limit` (None: COLLECTIVE_TIMEOUT).
        """
        limit = limit or COLLECTIVE_TIMEOUT
        if self.store is None:
            return [value]

        self._post(f"{name} {self.rank}", value)
        if not self.is_main:
            return []
        keys = [f"{name} {rank}" for rank in range(self.size)]
        if not self._wait_until(lambda store: store.check(keys), limit):
            self._report_missing(name, limit)
        return self.gathered(name, range(self.size))

    def gathered(self, name: str, ranks: Iterable[int]) -> list[Any]:
        """Return the values that `ranks` passed to `gather(name)`, after rank 0 has received
        them."""
        keys = [f"{name} {rank}" for rank in ranks]
        return [json.loads(text) for text in self._shared_store.multi_get(keys)]

    def _report_missing(self, key: str, limit: timedelta) -> NoReturn:
        """Raise RankLost, which names the ranks that have not posted `key`."""
        missing = silent_ranks(self._shared_store, key, range(self.size))
        raise RankLost(f"{self._names(missing)} did not respond within {limit}")

    def _post(self, key: str, value: object) -> None:
        with self.asking_store():
            self._shared_store.set(key, json.dumps(value))

    def _wait_until(
        self, ready: Callable[[dist.Store], bool], limit: timedelta | None = None
    ) -> bool:
        """Poll until `ready` returns True, or return False after `limit`.

        Unlike the store's own wait, polling lets Python handle signals. Raises AlreadyReported if
        another rank has exited, RankLost if a rank on this host was killed, and StoreLost if the
        store has shut down.
        """
        store = self._shared_store
        deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        pause_s = max(0.001, FIRST_SHARE * self.size / LOOKS_PER_S)
        gone = list[int]()

        with self.asking_store():
            while not ready(store):
                if store.check([ENDED]):
                    raise AlreadyReported(json.loads(store.get(ENDED)))
                # The process may still announce why it exited, so raise the error one poll later.
                if gone:
                    raise RankLost(
                        f"{self._names(gone)} ended without a message, so it was probably killed"
                    )

                gone = self.gone()
                if deadline is not None and time.monotonic() > deadline:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self.look_s)
        return True

    @contextmanager
    def asking_store(self) -> Iterator[None]:
        """Raise StoreLost if the store does not answer inside the block.

        No request is sent to a store that has shut down, because torch would print a long stack.
        """
        lost = StoreLost("lost the connection to the first host's launcher, or to rank 0")
        if self._has_lost_store.is_set() or took_store_along():
            raise lost
        try:
            yield
        except dist.DistError:
            self._has_lost_store.set()
            raise lost from None

    def gone(self) -> list[int]:
        """Return the ranks on this host whose processes have exited."""
        return [rank for rank, pid in self._host_pids.items() if not _is_alive(pid)]

    def has_killed_rank(self) -> bool:
        """Return whether a rank on this host has exited without announcing it."""
        if self.store is None:
            return False
        with suppress(StoreLost), self.asking_store():
            return any(not self.store.check([f"{ENDED} {rank}"]) for rank in self.gone())
        return False

    def process_of(self, rank: int) -> str:
        """Return a rank's process id and state, such as "process 7, stopped"; "" if unknown."""
        pid = self._host_pids.get(rank)
        return "" if pid is None else f"process {pid}{process_state(pid)}"

    def _names(self, ranks: list[int]) -> str:
        """Return text that lists `ranks`, with their hosts if known."""
        names = f"rank {', '.join(map(str, ranks))}"
        hosts = sorted({self.host_of(rank) for rank in ranks}) if self.hosts else []
        return f"{names} on {', '.join(hosts)}" if hosts else names


def silent_ranks(store: dist.Store, key: str, ranks: Sequence[int]) -> list[int]:
    """Return those of `ranks` that have not posted `key`, found by bisection."""
    if not ranks or store.check([f"{key} {rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    return silent_ranks(store, key, ranks[:half]) + silent_ranks(store, key, ranks[half:])


def _in_pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of the same dtype, each of about BROADCAST_BYTES."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        piece = by_type.setdefault(tensor.dtype, [])
        piece.append(tensor)
        if sum(each.nbytes for each in piece) >= BROADCAST_BYTES:
            yield by_type.pop(tensor.dtype)
    yield from by_type.values()


def _message(error: BaseException) -> str:
    """Return a message for other ranks about the `error` that ends this rank."""
    text = str(error)
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_alive(pid: int) -> bool:
    """Return whether the process exists, even if only as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # The process exists but is owned by another user.
    return True
