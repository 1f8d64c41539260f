"""torch's store and its process group, of which every request and every collective is counted.

Counts       by part of a run: the functions that are its parts are wrapped
Store        a dict, seen as TCPStore's clients see it; `Connection`: a real store behind it
Group        collectives of ranks that all give the same
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
"""About what a request of torch's TCPStore has besides keys and values, with its answer."""


class _Thread(threading.local):
    """Where a thread is."""

    def __init__(self) -> None:
        self.parts = ["other"]
        self.others_s = 0.0
        """Time that the stand-ins of the others have taken."""
        self.is_others = False


class Counts:
    """What one rank has asked of the store and sent in collectives, by part."""

    def __init__(self) -> None:
        self.values: dict[str, Counter[str]] = defaultdict(Counter)
        self.keys: dict[str, Counter[str]] = defaultdict(Counter)
        self.is_on = False
        self._thread = _Thread()

    def add(self, what: str, nbytes: int, key: str) -> None:
        """Count a request, a collective or a look at a file; key: of which kind."""
        if self.is_on and not self._thread.is_others:
            part = self._thread.parts[-1]
            self.values[part][what] += 1
            self.values[part][f"{what}_bytes"] += nbytes
            self.keys[part][key] += 1

    def watch(self, place: Any, name: str, part: str) -> None:
        """Let calls of the function `name` of `place` be `part`."""
        function = getattr(place, name)

        @functools.wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            thread = self._thread
            parts = thread.parts
            is_first = part not in parts
            parts.append(part)
            before_s = time.thread_time() - thread.others_s
            said_before = self._said(part)
            try:
                return function(*arguments, **options)
            finally:
                parts.pop()
                taken_s = time.thread_time() - thread.others_s - before_s
                if self.is_on:
                    self.values[part]["calls"] += is_first
                    self.values[part]["speaking"] += is_first and self._said(part) > said_before
                    self.values[part]["cpu_s"] += taken_s
                    if parts[-1] != "other":  # what is within another part is not of that one
                        self.values[parts[-1]]["cpu_s"] -= taken_s

        setattr(place, name, counted)

    def _said(self, part: str) -> int:
        return self.values[part]["requests"] + self.values[part]["collectives"]

    @contextmanager
    def of_others(self) -> Iterator[None]:
        """What the others say meanwhile is not this rank's."""
        thread = self._thread
        began_s = time.thread_time()
        thread.is_others = True
        try:
            yield
        finally:
            thread.is_others = False
            thread.others_s += time.thread_time() - began_s

    def take(self) -> dict[str, dict[str, float]]:
        """Return the counts of each part, and begin anew."""
        taken = {part: dict(values) for part, values in self.values.items()}
        taken["keys"] = {
            f"{p}: {key}": n for p, keys in self.keys.items() for key, n in keys.items()
        }
        self.values.clear()
        self.keys.clear()
        return taken

    def count_files(self, place: Path) -> None:
        """Count the files below `place` that are opened, listed or looked at."""

        def note(event: str, path: Any) -> None:
            is_look = event in ("open", "os.listdir", "os.scandir", "stat")
            if is_look and isinstance(path, str) and path.startswith(f"{place}/"):
                self.add("files", 0, f"{event} {Path(path).suffix}")

        stat = os.stat

        def counted(path: Any, *known: Any, **options: Any) -> os.stat_result:
            note("stat", os.fspath(path) if isinstance(path, os.PathLike) else path)
            return stat(path, *known, **options)

        os.stat = counted
        sys.addaudithook(lambda event, known: note(event, known[0] if known else None))


class Store(dist.Store):
    """torch's interface of a store over `words`, as TCPStore's clients see it; counts requests."""

    def __init__(self, words: dict[str, bytes], counts: Counts):
        super().__init__()
        self.words = words
        self.counts = counts

    def set(self, key: str, value: bytes) -> None:
        self._count("set", key, len(key) + len(value))
        self.words[key] = value

    def get(self, key: str) -> bytes:
        value = self.words[key]
        self._count("get", key, len(key) + len(value))
        return value

    def add(self, key: str, value: int) -> int:
        self._count("add" if value else "look", key, len(key) + 8)
        now = int(self.words.get(key, b"0")) + value
        self.words[key] = str(now).encode()
        return now

    def check(self, keys: list[str]) -> bool:
        self._count("look", keys[0], sum(map(len, keys)))
        return all(key in self.words for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [self.words[key] for key in keys]
        self._count("multi_get", keys[0], sum(map(len, [*keys, *values])))
        return values

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Store:
        return self

    def _count(self, kind: str, key: str, nbytes: int) -> None:
        kept = "".join(letter for letter in key if not letter.isdigit())
        self.counts.add("requests", nbytes + REQUEST_BYTES, f"{kind} {kept}")


class Connection(Store):
    """A real store, whose requests are counted in the same way."""

    def __init__(self, store: dist.Store, counts: Counts):
        super().__init__({}, counts)
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.words[key] = self._store.get(key)
        return super().get(key)

    def add(self, key: str, value: int) -> int:
        super().add(key, value)
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        super().check(keys)
        return self._store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.words |= dict(zip(keys, self._store.multi_get(keys), strict=True))
        return super().multi_get(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout or COLLECTIVE_TIMEOUT)

    def clone(self) -> Connection:
        return Connection(self._store.clone(), self.counts)


class Group(dist.ProcessGroup):
    """torch's interface of a process group, of ranks that all do the same; counts collectives."""

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
        """Rank 0's weights are not known to the other rank that is played: it gets ones. Whole
        numbers are those of DDP's buckets, which all have alike."""
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

    all_gather_single = _allgather_base  # from torch 2.15 on
    all_to_all_single = alltoall_base
