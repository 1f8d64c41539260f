"""Replace torch's store and process group with versions that count all requests and collectives.

`Counts` sorts the counts by part of a run. `Store` is a dict with the interface of TCPStore, and
`Connection` forwards requests to a real store. `Group` simulates collectives among ranks that all
contribute the same values.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from vit.distributed.world import COLLECTIVE_TIMEOUT

REQUEST_BYTES = 16
"""The approximate number of bytes that torch's TCPStore adds to each request and its response."""


class _Thread(threading.local):
    """The state of one thread: the part of the run that it executes, and whether it simulates
    another rank."""

    def __init__(self) -> None:
        self.parts = ["other"]
        self.others_s = 0.0
        self.is_others = False


class Counts:
    def __init__(self) -> None:
        self.values: dict[str, Counter[str]] = defaultdict(Counter)
        self.keys: dict[str, Counter[str]] = defaultdict(Counter)
        self.is_on = False
        self._thread = _Thread()

    def add(self, quantity: str, nbytes: int, key: str) -> None:
        """Count a request, a collective or a file access. `key` is the kind of event."""
        if self.is_on and not self._thread.is_others:
            part = self._thread.parts[-1]
            self.values[part][quantity] += 1
            self.values[part][f"{quantity}_bytes"] += nbytes
            self.keys[part][key] += 1

    def watch(self, place: Any, name: str, part: str) -> None:
        function = getattr(place, name)

        @functools.wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            thread = self._thread
            parts = thread.parts
            is_first = part not in parts
            parts.append(part)
            before_s = time.thread_time() - thread.others_s
            sent_before = self._num_sent(part)
            try:
                return function(*arguments, **options)
            finally:
                parts.pop()
                taken_s = time.thread_time() - thread.others_s - before_s
                if self.is_on:
                    self.values[part]["calls"] += is_first
                    self.values[part]["speaking"] += is_first and self._num_sent(part) > sent_before
                    self.values[part]["cpu_s"] += taken_s
                    if parts[-1] != "other":  # exclude this time from the outer part
                        self.values[parts[-1]]["cpu_s"] -= taken_s

        setattr(place, name, counted)

    def _num_sent(self, part: str) -> int:
        return self.values[part]["requests"] + self.values[part]["collectives"]

    @contextmanager
    def of_others(self) -> Iterator[None]:
        """Exclude the requests of simulated ranks from the counts until the `with` block ends."""
        thread = self._thread
        began_s = time.thread_time()
        thread.is_others = True
        try:
            yield
        finally:
            thread.is_others = False
            thread.others_s += time.thread_time() - began_s

    def take(self) -> dict[str, dict[str, float]]:
        taken = {part: dict(values) for part, values in self.values.items()}
        taken["keys"] = {
            f"{p}: {key}": n for p, keys in self.keys.items() for key, n in keys.items()
        }
        self.values.clear()
        self.keys.clear()
        return taken

    def count_files(self, place: Path) -> None:
        def note(event: str, path: Any) -> None:
            is_look = event in ("open", "os.listdir", "os.scandir", "stat")
            if is_look and isinstance(path, str) and path.startswith(f"{place}/"):
                self.add("files", 0, f"{event} {Path(path).suffix}")

        stat = os.stat

        def counted(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            note("stat", os.fspath(path) if isinstance(path, os.PathLike) else path)
            return stat(path, *arguments, **options)

        os.stat = counted
        sys.addaudithook(lambda event, arguments: note(event, arguments[0] if arguments else None))


class Store(dist.Store):
    """A replacement for torch's store that keeps its values in the dict `entries`, and counts
    requests in the way a TCPStore would receive them."""

    def __init__(self, entries: dict[str, bytes], counts: Counts):
        super().__init__()
        self.entries = entries
        self.counts = counts

    def set(self, key: str, value: bytes) -> None:
        self._count("set", key, len(key) + len(value))
        self.entries[key] = value

    def get(self, key: str) -> bytes:
        value = self.entries[key]
        self._count("get", key, len(key) + len(value))
        return value

    def add(self, key: str, value: int) -> int:
        self._count("add" if value else "look", key, len(key) + 8)
        now = int(self.entries.get(key, b"0")) + value
        self.entries[key] = str(now).encode()
        return now

    def check(self, keys: list[str]) -> bool:
        self._count("look", keys[0], sum(map(len, keys)))
        return all(key in self.entries for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [self.entries[key] for key in keys]
        self._count("multi_get", keys[0], sum(map(len, [*keys, *values])))
        return values

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Store:
        return self

    def _count(self, kind: str, key: str, nbytes: int) -> None:
        key_pattern = "".join(letter for letter in key if not letter.isdigit())
        self.counts.add("requests", nbytes + REQUEST_BYTES, f"{kind} {key_pattern}")


class Connection(Store):
    """A client of a real store that counts requests in the same way as `Store`."""

    def __init__(self, store: dist.Store, counts: Counts):
        super().__init__({}, counts)
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.entries[key] = self._store.get(key)
        return super().get(key)

    def add(self, key: str, value: int) -> int:
        super().add(key, value)
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        super().check(keys)
        return self._store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.entries |= dict(zip(keys, self._store.multi_get(keys), strict=True))
        return super().multi_get(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout or COLLECTIVE_TIMEOUT)

    def clone(self) -> Connection:
        return Connection(self._store.clone(), self.counts)


class Group(dist.ProcessGroup):
    """A replacement for torch's process group that counts collectives. All ranks contribute equal
    values."""

    def __init__(self, rank: int, size: int, counts: Counts):
        super().__init__(rank, size)
        self._size = size
        self._counts = counts

    def getBackendName(self) -> str:
        return "counted"

    def size(self) -> int:
        return self._size

    def _done(self, kind: str, sent: list[torch.Tensor], value: Any = None) -> Any:
        self._counts.add("collectives", sum(tensor.nbytes for tensor in sent), kind)
        future: Future[Any] = Future()
        future.set_result(sent if value is None else value)
        return _create_work_from_future(future)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._size)
        return self._done("all_reduce", tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Replace the weights with ones, because a simulated rank does not have the weights of rank
        0. Integers describe DDP's buckets and are equal on all ranks, so they stay unchanged."""
        for tensor in tensors if self.rank() else ():
            if tensor.is_floating_point():
                tensor.fill_(1)
        return self._done("broadcast", tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self._done("barrier", [torch.zeros(1)])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            for each in output:
                each.copy_(own)
        return self._done("all_gather", inputs, outputs)

    def _allgather_base(self, output: Any, own: Any, opts: Any = None) -> Any:
        output.view(self._size, -1).copy_(own.reshape(-1))
        return self._done("all_gather", [output], output)

    def alltoall_base(self, output: Any, own: Any, *splits: Any) -> Any:
        output.copy_(own)
        return self._done("all_to_all", [own], output)

    all_gather_single = _allgather_base  # this method has had a different name since torch 2.15
    all_to_all_single = alltoall_base
