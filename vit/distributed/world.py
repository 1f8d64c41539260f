"""The ranks of a run as one of them sees them: sums, and waiting for each other.

`vit.distributed.process_group.join_world` makes a `World`; other modules get it instead of asking
torch. Without torchrun it has one rank and no process group, and nothing below waits.

Collectives end a run that takes too long, and block signals meanwhile. So whatever a person, a disk
or a network can make slow waits through torchrun's key-value store instead:

    function              who waits for whom                              for how long
    join_world            all for rank 0, which hears from all            COLLECTIVE_TIMEOUT
    broadcast_from_main   all for the function on rank 0                  as long as it takes
    main_first            the same, then all call the function            as long as it takes
    fail_together         all for all, each may save or load meanwhile    LONGEST_WAIT
    check_same            broadcast_from_main, then fail_together
    barrier               fail_together, then a collective
    sum_, max_, any_rank  all for all, in a collective, as DDP            COLLECTIVE_TIMEOUT
    broadcast_            all for rank 0, in a collective                 COLLECTIVE_TIMEOUT

How a failure of one rank reaches the others:

- A mistake (ValueError) inside one of the store's functions: that rank raises it, all others raise
  AlreadyReported.
- The end of a process: `vit.distributed.exit.run_command` announces it in the store, and every rank
  that waits there, now or later, raises AlreadyReported.
- SIGKILL: ranks of the same host see that the process is gone and raise RankLost, announced in turn
  to other hosts. torchrun's SIGTERM would not end them: they take it as a request to save.
- torchrun itself killed: the store is gone with the first host's. fail_together goes on in a
  collective, so that the ranks can save; the others raise RankLost.
- In a collective gloo notices a dead rank at once. NCCL does not: its ranks stand still until
  torchrun, Slurm (srun --kill-on-bad-exit) or `vit.distributed.watchdog` ends them, which also
  finds ranks that hang.
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
"""For a broken cable or a hung rank (gloo's own default is 30 minutes)."""
LONGEST_WAIT = timedelta(hours=1)
"""For the slowest rank to save or to load: 15 GB at 4 MB/s."""
BROADCAST_BYTES = 2**26
"""Tensors are broadcast together up to about this size; a larger one goes alone."""
ENDED = "ended"
"""Key in the store under which a rank announces why it ends."""
POLL_S = 0.25
"""A rank that waits through the store looks there at least this often, up to 1,024 ranks."""
LOOKS_PER_S = 4096
"""Of all ranks together while they wait: one thread answers them, in 31 microseconds a request
(docs/clusters.md), and a look is two: a quarter of its time."""
FIRST_SHARE = 1 / 16
"""Of the longest time between two looks: the shortest, where that is a millisecond or more."""


def leaves_of(rank: int, num_ranks: int, num_leaves: int) -> range:
    """Return the leaves of a rank (`vit.distributed.exact`): as many as others have, or one
    more."""
    return range(rank * num_leaves // num_ranks, (rank + 1) * num_leaves // num_ranks)


class AlreadyReported(ValueError):
    """Raised for a mistake that another rank found and reports."""


class RankLost(RuntimeError):
    """Another rank has ended, or does not come."""


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
    """How long it took until all ranks had met."""
    _host_pids: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    """Process ids of the ranks on this host, where they can be compared."""
    _has_lost_store: threading.Event = field(
        default_factory=threading.Event, repr=False, compare=False
    )
    """Set for good once the store did not answer: its connection is not opened again."""
    _sequence: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)
    """Numbers the keys in the store: all ranks call the functions below in the same order."""

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and prints."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True on one rank of each host, which looks at files for the others."""
        return not self.hosts or self.hosts.index(self.hosts[self.rank]) == self.rank

    @property
    def look_s(self) -> float:
        """How long a rank that waits lets pass between two looks at the store, so that what all
        ranks ask of it does not grow with their number."""
        return max(POLL_S, self.size / LOOKS_PER_S)

    def host_of(self, rank: int) -> str:
        """Name of the host that `rank` runs on."""
        return self.hosts[rank] if self.hosts else socket.gethostname()

    def barrier(self) -> None:
        """Wait for all ranks, one of which may be saving or drawing its report."""
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
        """Give `tensors` the values that they have on rank 0, in place; on any device.

        All ranks have tensors of the same shapes and types, in the same order.
        """
        if self.size == 1:
            return
        for some in _in_pieces(tensors):
            # One broadcast for some hundred tensors: each takes as long as a message to all ranks.
            sizes = [tensor.numel() for tensor in some]
            if self.is_main:
                flat = torch.cat([tensor.detach().reshape(-1).to(self.device) for tensor in some])
            else:
                flat = torch.empty(sum(sizes), dtype=some[0].dtype, device=self.device)
            dist.broadcast(flat, src=0)
            if not self.is_main:
                parts = flat.split(sizes)
                for tensor, part in zip(some, parts, strict=True):
                    tensor.detach().copy_(part.view(tensor.shape))

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. Waits for the device."""
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
        """Call `function` on rank 0, then on the others: an index can take an hour to make.

        An error of `function` on rank 0 becomes AlreadyReported on the other ranks.
        """
        result = self.on_main(function)
        return result if self.is_main else function()  # type: ignore[return-value]

    def _share(self, function: Callable[[], T], shared: Callable[[T], Any]) -> Any:
        """Call `function` on rank 0 and return its result there, on other ranks `shared` of it."""
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

    def check_same(self, look: Callable[[], str], what: str) -> str:
        """Return what `look` gives on rank 0, after comparing it with one rank of each host.

        Raises ValueError on a host that sees another `what`, and AlreadyReported elsewhere.
        """
        expected = self.broadcast_from_main(look)
        with self.fail_together():
            if self.is_local_main and not self.is_main and (seen := look()) != expected:
                raise ValueError(
                    f"{socket.gethostname()} sees other {what} than rank 0 ({seen}, not"
                    f" {expected}): all hosts must see the same files"
                )
        return expected

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """All ranks leave this block together; a ValueError on one of them ends all.

        If rank 0 has one, only rank 0 raises it; else each rank that has one. The others raise
        AlreadyReported. Raises RankLost if a rank does not come within LONGEST_WAIT.
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
        # Without torchrun the ranks are still alive, and have a last step to save: go on below.
        with suppress(StoreLost):
            has_failed, main_message = self._exchange(key, problem)
        if dist.is_initialized():
            # The store may have ended after it answered one rank and before it answered another.
            # The first would go on to its next collective, which does not match the second's. So
            # all ranks agree here, in a collective. Waits for the device.
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
        """Whether any rank has a problem, and rank 0's message if it has one.

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
        """Let the ranks that wait through the store, now or later, know that this one ends."""
        if self.store is not None:
            with suppress(StoreLost):
                self._post(ENDED, message)

    def gather(self, name: str, value: Any, limit: timedelta | None = None) -> list[Any]:
        """The JSON `value` of every rank, on rank 0; [] on the others, which do not wait.

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
        """What `ranks` have given to `gather(name)`, on any rank; rank 0 must have got it."""
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
        """Poll until `ready`; False when `limit` has passed. Unlike the store's own wait, signals
        are handled meanwhile.

        Raises AlreadyReported if another rank has ended, RankLost if one of this host was killed,
        StoreLost if the store has ended.
        """
        assert self.store is not None, "there are other ranks"
        deadline = None if limit is None else time.monotonic() + limit.total_seconds()
        pause_s = max(0.001, FIRST_SHARE * self.size / LOOKS_PER_S)
        gone = list[int]()
        with self.asking_store():
            while not ready(self.store):
                if self.store.check([ENDED]):
                    raise AlreadyReported(json.loads(self.store.get(ENDED)))
                # One more look at the store after a process is gone: it may have announced why.
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
        """Raise StoreLost where the store does not answer, without asking one that is known to be
        gone: torch prints a page of its own stack for each request to such a store."""
        lost = StoreLost("lost the connection to the first host's launcher, or to rank 0")
        if self._has_lost_store.is_set() or took_store_along():
            raise lost
        try:
            yield
        except dist.DistError:
            self._has_lost_store.set()
            raise lost from None

    def gone(self) -> list[int]:
        """Ranks of this host whose processes have ended."""
        return [rank for rank, pid in self._host_pids.items() if not _is_alive(pid)]

    def process_of(self, rank: int) -> str:
        """The process of a rank of this host and its state, as "process 7, stopped"; else ""."""
        pid = self._host_pids.get(rank)
        return "" if pid is None else f"process {pid}{process_state(pid)}"

    def _names(self, ranks: list[int]) -> str:
        """`ranks` with their hosts, where those are known."""
        names = f"rank {', '.join(map(str, ranks))}"
        hosts = sorted({self.host_of(rank) for rank in ranks}) if self.hosts else []
        return f"{names} on {', '.join(hosts)}" if hosts else names


def silent_ranks(store: dist.Store, key: str, ranks: Sequence[int]) -> list[int]:
    """Return those of `ranks` that have not posted `key`: one look if all have, else by halves."""
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
        some = by_type.setdefault(tensor.dtype, [])
        some.append(tensor)
        if sum(each.nbytes for each in some) >= BROADCAST_BYTES:
            yield by_type.pop(tensor.dtype)
    yield from by_type.values()


def _message(error: BaseException) -> str:
    """What other ranks learn about the end of this one."""
    text = str(error)
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_alive(pid: int) -> bool:
    """Whether there is such a process; a dead one is gone once its parent has noticed."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the number was given to a process of another user
    return True
