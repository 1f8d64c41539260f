"""The ranks of a run, seen from one of them: sums over the ranks, and waiting for each other.

`vit.distributed.process_group.join_world` makes a `World`; other modules use it instead of calling
torch. Without torchrun it has one rank and no process group, and no function waits.

A collective ends the run after a time-out, and blocks signals while it waits. So waits that a user,
a disk or a network can prolong go through torchrun's key-value store instead:

    function              who waits for whom                              for how long
    join_world            all for rank 0, which hears from all            COLLECTIVE_TIMEOUT
    broadcast_from_main   all for the function on rank 0                  as long as it takes
    main_first            the same, then all call the function            as long as it takes
    fail_together         all for all, while each may save or load        LONGEST_WAIT
    check_same            broadcast_from_main, then fail_together
    barrier               fail_together, then a collective
    sum_, max_, any_rank  all for all, in a collective, as DDP            COLLECTIVE_TIMEOUT
    broadcast_            all for rank 0, in a collective                 COLLECTIVE_TIMEOUT

How a failure of one rank reaches the others:

- A mistake (ValueError) inside one of the store's functions: that rank raises it, all others raise
  AlreadyReported.
- The end of a process: `vit.distributed.exit.run_command` announces it in the store, and every rank
  that waits through the store, now or later, raises AlreadyReported.
- SIGKILL: ranks of the same host see that the process is gone, raise RankLost, and announce it to
  the other hosts. torchrun's SIGTERM would not end them, because it is a request to save.
- torchrun is killed: the store ends with the torchrun of the first host. fail_together continues
  with a collective, so that the ranks can save; the other functions raise RankLost.
- In a collective gloo notices a dead rank at once. NCCL does not: its ranks wait until torchrun,
  Slurm (srun --kill-on-bad-exit) or `vit.distributed.watchdog` ends them. The watchdog also finds
  ranks that hang.
"""

from __future__ import annotations

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
"""Time after which a collective fails, as with a cut cable or a hung rank (gloo's default: 30
minutes)."""
LONGEST_WAIT = timedelta(hours=1)
"""Time that the slowest rank may take to save or to load: 15 GB at 4 MB/s."""
BROADCAST_BYTES = 2**26
"""Approximate size up to which tensors are broadcast together."""
ENDED = "ended"
"""Key in the store under which a rank announces why it ends."""
POLL_S = 0.25
"""Longest time between two looks of a waiting rank at the store, up to 1,024 ranks."""
LOOKS_PER_S = 4096
"""Looks of all waiting ranks together. A look is two requests of 31 microseconds
(docs/clusters.md), so they take a quarter of the time of the store's thread."""
FIRST_SHARE = 1 / 16
"""The shortest time between two looks, as a share of the longest; at least a millisecond."""


def leaves_of(rank: int, num_ranks: int, num_leaves: int) -> range:
    """Return the leaves of a rank (`vit.distributed.exact`); numbers of ranks differ by at most
    one."""
    return range(rank * num_leaves // num_ranks, (rank + 1) * num_leaves // num_ranks)


class AlreadyReported(ValueError):
    """A mistake that another rank has found and reports."""


class RankLost(RuntimeError):
    """Another rank has ended, or did not come."""


class StoreLost(RankLost):
    """The store does not answer any more."""


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None
    """torchrun's key-value store; None in a world of one."""
    hosts: tuple[str, ...] = ()
    """Host name of each rank; () in a world of one."""
    joined_s: float = field(default=0.0, compare=False)
    """Time until all ranks had met."""
    _host_pids: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    """Process ids of the ranks on this host, if they share the process ids of this process."""
    _has_lost_store: threading.Event = field(
        default_factory=threading.Event, repr=False, compare=False
    )
    """Set when the store did not answer; the connection is not opened again."""
    _sequence: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)
    """Numbers for keys in the store; they agree because all ranks call the functions in the same
    order."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first rank of its host, which checks files for the others."""
        return not self.hosts or self.hosts.index(self.hosts[self.rank]) == self.rank

    @property
    def look_s(self) -> float:
        """The longest time between two looks of a waiting rank at the store. It grows with the
        number of ranks, so that the number of requests a second does not."""
        return max(POLL_S, self.size / LOOKS_PER_S)

    def host_of(self, rank: int) -> str:
        """Return the name of the host that `rank` runs on."""
        return self.hosts[rank] if self.hosts else socket.gethostname()

    def barrier(self) -> None:
        """Wait for all ranks; a rank may still be saving, or drawing the report."""
        if self.size > 1:
            with self.fail_together():
                pass
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks in place; queued on the device like any other operation."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Take the largest of each element over the ranks, in place and queued as `sum_`."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of `tensors` on rank 0 to all ranks, in place; on any device.

        All ranks must have tensors of the same shapes and types, in the same order.
        """
        if self.size == 1:
            return
        for piece in _in_pieces(tensors):
            # One broadcast for some hundred tensors, because each broadcast takes as long as a
            # message to all ranks.
            sizes = [tensor.numel() for tensor in piece]
            if self.is_main:
                flat = torch.cat([tensor.detach().reshape(-1).to(self.device) for tensor in piece])
            else:
                flat = torch.empty(sum(sizes), dtype=piece[0].dtype, device=self.device)
            dist.broadcast(flat, src=0)
            if not self.is_main:
                parts = flat.split(sizes)
                for tensor, part in zip(piece, parts, strict=True):
                    tensor.detach().copy_(part.view(tensor.shape))

    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank. Waits for the device."""
        return bool(self.sum_(torch.tensor(float(flag), device=self.device)).item() > 0)

    def broadcast_from_main(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 and return its result, a JSON value, on all ranks.

        An error of `function` becomes AlreadyReported on the other ranks.
        """
        return self._share(function, lambda result: result)

    def on_main(self, function: Callable[[], T]) -> T | None:
        """Call `function` on rank 0 and return its result; the other ranks wait and get None.

        An error of `function` becomes AlreadyReported on the other ranks.
        """
        return self._share(function, lambda result: None)

    def main_first(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0, then on the others, such as to make an index only once.

        An error of `function` on rank 0 becomes AlreadyReported on the other ranks.
        """
        result = self.on_main(function)
        return result if self.is_main else function()  # type: ignore[return-value]

    def _share(self, function: Callable[[], T], shared: Callable[[T], Any]) -> Any:
        """Call `function` on rank 0; return its result there, and `shared(result)` elsewhere."""
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
        """Return the result of `look` on rank 0, after comparing it with one rank of each host.

        Raises ValueError, which names the `subject`, on a host with a different result, and
        AlreadyReported elsewhere.
        """
        expected = self.broadcast_from_main(look)
        with self.fail_together():
            if self.is_local_main and not self.is_main and (seen := look()) != expected:
                raise ValueError(
                    f"{socket.gethostname()} sees other {subject} than rank 0 ({seen}, not"
                    f" {expected}): all hosts must see the same files"
                )
        return expected

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Make all ranks leave the block together; a ValueError on one of them ends all.

        If rank 0 has a ValueError, only rank 0 raises it; otherwise each rank with a ValueError
        does. The others raise AlreadyReported. Raises RankLost if a rank does not come within
        LONGEST_WAIT.
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
        has_failed = problem is not None
        main_message = "reported by rank 0" if has_failed and self.is_main else ""
        # If torchrun has ended, the ranks still live, and must save the last step: the collective
        # below does the rest.
        with suppress(StoreLost):
            has_failed, main_message = self._exchange(key, problem)
        if dist.is_initialized():
            # The store may have ended after it answered one rank and before it answered another.
            # The first rank would then start its next collective, which does not match that of the
            # second. So all ranks agree in this collective. It waits for the device.
            flags = torch.tensor(
                [has_failed, bool(main_message)], device=self.device, dtype=torch.int32
            )
            has_failed, by_main = (count > 0 for count in self.sum_(flags).tolist())
            if by_main and not main_message:
                main_message = "reported by rank 0"
        if not has_failed:
            return
        if problem is not None and (self.is_main or not main_message):
            raise problem
        raise AlreadyReported(main_message or "reported by another rank")

    def _exchange(self, key: str, problem: ValueError | None) -> tuple[bool, str]:
        """Return whether any rank has a problem, and rank 0's message if rank 0 has one.

        Raises StoreLost, and RankLost if a rank does not come.
        """
        store = self.store
        assert store is not None, "there are other ranks"
        with self.asking_store():
            store.set(f"{key} {self.rank}", "" if problem is None else _message(problem))
            if problem is not None:
                store.add(f"{key} problems", 1)
            store.add(key, 1)
            if not self._wait_until(lambda store: store.add(key, 0) >= self.size, LONGEST_WAIT):
                self._report_missing(key, LONGEST_WAIT)
            has_failed = store.add(f"{key} problems", 0) > 0
            return has_failed, store.get(f"{key} 0").decode() if has_failed else ""

    def announce_end(self, message: str) -> None:
        """Announce the end of this rank to all ranks that wait through the store, now or later."""
        if self.store is not None:
            with suppress(StoreLost):
                self._post(ENDED, message)

    def gather(self, name: str, value: Any, limit: timedelta | None = None) -> list[Any]:
        """Return the JSON `value` of every rank on rank 0; [] on the others, which do not wait.

        Raises RankLost if a rank does not come within `limit`; None: COLLECTIVE_TIMEOUT.
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
        """Return the values that `ranks` gave to `gather(name)`, after `gather` on rank 0."""
        assert self.store is not None, "there are other ranks"
        return [json.loads(text) for text in self.store.multi_get([f"{name} {r}" for r in ranks])]

    def _report_missing(self, key: str, limit: timedelta) -> NoReturn:
        """Raise RankLost with the ranks that have not posted `key`."""
        assert self.store is not None, "there are other ranks"
        missing = silent_ranks(self.store, key, range(self.size))
        raise RankLost(f"{self._names(missing)} did not come within {limit}")

    def _post(self, key: str, value: Any) -> None:
        assert self.store is not None, "there are other ranks"
        with self.asking_store():
            self.store.set(key, json.dumps(value))

    def _wait_until(
        self, ready: Callable[[dist.Store], bool], limit: timedelta | None = None
    ) -> bool:
        """Poll until `ready`; return False after `limit`. Unlike the store's own wait, it lets
        Python handle signals.

        Raises AlreadyReported if another rank has ended, RankLost if a rank of this host was
        killed, StoreLost if the store has ended.
        """
        assert self.store is not None, "there are other ranks"
        deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        pause_s = max(0.001, FIRST_SHARE * self.size / LOOKS_PER_S)
        gone = list[int]()
        with self.asking_store():
            while not ready(self.store):
                if self.store.check([ENDED]):
                    raise AlreadyReported(json.loads(self.store.get(ENDED)))
                # Raised one look later, because the process may have announced why it ended.
                if gone:
                    raise RankLost(f"{self._names(gone)} has ended without a word, as if killed")
                gone = self.gone()
                if deadline is not None and time.monotonic() > deadline:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self.look_s)
        return True

    @contextmanager
    def asking_store(self) -> Iterator[None]:
        """Raise StoreLost if the store does not answer, and without a request if it is known to be
        gone, because torch prints a page of stack for each request to such a store."""
        lost = StoreLost("lost the connection to the first host's launcher, or to rank 0")
        if self._has_lost_store.is_set() or took_store_along():
            raise lost
        try:
            yield
        except dist.DistError:
            self._has_lost_store.set()
            raise lost from None

    def gone(self) -> list[int]:
        """Return the ranks of this host whose processes have ended."""
        return [rank for rank, pid in self._host_pids.items() if not _is_alive(pid)]

    def process_of(self, rank: int) -> str:
        """Return process and state of a rank of this host, as "process 7, stopped"; else ""."""
        pid = self._host_pids.get(rank)
        return "" if pid is None else f"process {pid}{process_state(pid)}"

    def _names(self, ranks: list[int]) -> str:
        """Return `ranks` with their hosts, if those are known."""
        names = f"rank {', '.join(map(str, ranks))}"
        hosts = sorted({self.host_of(rank) for rank in ranks}) if self.hosts else []
        return f"{names} on {', '.join(hosts)}" if hosts else names


def silent_ranks(store: dist.Store, key: str, ranks: Sequence[int]) -> list[int]:
    """Return those of `ranks` that have not posted `key`; one request if all have, else halves."""
    if not ranks or store.check([f"{key} {rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    return silent_ranks(store, key, ranks[:half]) + silent_ranks(store, key, ranks[half:])


def _in_pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one type, of about BROADCAST_BYTES each."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        piece = by_type.setdefault(tensor.dtype, [])
        piece.append(tensor)
        if sum(each.nbytes for each in piece) >= BROADCAST_BYTES:
            yield by_type.pop(tensor.dtype)
    yield from by_type.values()


def _message(error: BaseException) -> str:
    """Return the message about the end of this rank for other ranks."""
    text = str(error)
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_alive(pid: int) -> bool:
    """Return whether the process exists; a dead one exists until its parent has waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process belongs to another user
    return True
