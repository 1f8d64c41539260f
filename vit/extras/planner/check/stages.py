"""The parts of a check, which all ranks do one after the other, each within a time limit.

    rank 0    part, in a thread -> answer -----------------\\
    others    part, in a thread -> answer -> torch's store -> rank 0: who is missing? -> findings
    all       <- which parts to leave out, and who is lost <- store <---/

A part may stand still for ever: in a collective that a stopped rank does not join, or on a disk.
So a thread does it, and the main thread waits, for the answer or for the limit. Answers travel
through the store, never through a collective: who does not answer is named, whatever the others
wait for. After that nothing is tried that needs all ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import torch

from vit.distributed.exit import LOST, problem_of
from vit.distributed.host_differences import places
from vit.distributed.world import ENDED, LOOKS_PER_S, AlreadyReported, World, silent_ranks
from vit.extras.planner.check.findings import Finding, Verdict, by_message

GRACE_S = 10.0
"""For what the other ranks still do after one has failed in a part of all."""
MARGIN_S = 5.0
"""Between ranks: one may begin a part so much later than another."""
POLL_S = 0.1
"""Between two looks at the store; longer from 410 ranks on, as of `World.look_s`."""


class CheckStage(NamedTuple):
    """What is tried together; every rank has the same parts in the same order."""

    name: str
    run: Callable[[], Any]
    """On each rank; returns a JSON value, or raises."""
    judge: Callable[[dict[int, Any]], Iterable[Finding]]
    """On rank 0: what the values of the ranks amount to."""
    is_joint: bool = False
    """Whether ranks wait for each other in it."""
    needs: tuple[str, ...] = ()
    """Parts without whose success it cannot be tried."""
    times: float = 1.0
    """Its limit is so many times the usual one."""


class CheckStages:
    """Does parts on all ranks; `findings` grows on rank 0."""

    def __init__(self, world: World, limit_s: float):
        self.world = world
        self.limit_s = limit_s
        self.findings: list[Finding] = []
        self._failed = set[str]()
        self._lost = set[int]()
        self._apart = ""
        """Why nothing can be tried any more that needs all ranks."""
        # A store's connection serves one call at a time, and the thread may wait in one.
        self._store = None if world.store is None else world.store.clone()
        self._look_s = max(POLL_S, world.size / LOOKS_PER_S)
        self._thread = self._new_thread()

    @property
    def failed(self) -> bool:
        """Whether a part has failed, on any rank; all ranks know it."""
        return bool(self._failed)

    def close(self) -> None:
        """End the thread, unless it stands still."""
        self._thread.shutdown(wait=False)

    def run(self, parts: Iterable[CheckStage], on_part: Callable[[int, str], None]) -> None:
        """Do `parts`. on_part: called with the number of each and its name, before it begins.

        Raises AlreadyReported on a rank that the others do not wait for any more, and if rank 0
        ends; ValueError on one of the others if rank 0 is the one that does not answer.
        """
        for number, part in enumerate(parts):
            on_part(number, part.name)
            lacking = [name for name in part.needs if name in self._failed]
            if part.is_joint and self._apart:
                lacking = [self._apart]
            if lacking:
                said = f"not tried: it needs {', '.join(lacking)}"
                self.findings.append(Finding(part.name, Verdict.SKIPPED, said))
                self._failed.add(part.name)
            else:
                with self.world.asking_store():
                    self._run(number, part)

    def _run(self, number: int, part: CheckStage) -> None:
        key = f"part {number}"
        limit_s = part.times * self.limit_s
        deadline = time.monotonic() + limit_s
        answer = self._answer(part, key, deadline)
        if self._store is not None:
            self._store.set(f"{key} {self.world.rank}", json.dumps(answer))
            self._store.add(key, 1)
        if self.world.is_main:
            decision = self._decide(part, key, limit_s, deadline, answer)
            if self._store is not None:
                self._store.set(f"{key} decided", json.dumps(decision))
        else:
            decision = self._hear(part, key, limit_s, deadline)
        self._lost |= set(decision["lost"])
        self._apart = self._apart or decision["apart"]
        self._failed |= {part.name} if decision["failed"] else set()
        if self.world.rank in self._lost:
            raise AlreadyReported(f"too late for {part.name}")

    # --- on each rank ---------------------------------------------------------------------------

    def _answer(self, part: CheckStage, key: str, deadline: float) -> dict[str, Any]:
        """Do the part; return its value, its problem, or that it is late."""
        future: Future[Any] = self._thread.submit(part.run)
        while not future.done():
            wait([future], timeout=self._look_s)
            if time.monotonic() > deadline and not future.done():
                self._thread = self._new_thread()  # the other one may never come back
                return {"late": True}
            if part.is_joint and self._others_have_failed(key):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        try:
            return {"value": future.result()}
        except AlreadyReported:
            return {"elsewhere": True}
        except Exception as error:
            if self._store is not None:
                self._store.set(f"{key} failed", "")
            return {"problem": problem_of(error)}

    def _others_have_failed(self, key: str) -> bool:
        if self._store is None:
            return False
        return self._store.check([f"{key} failed"]) or bool(self.world.gone())

    def _new_thread(self) -> ThreadPoolExecutor:
        device = self.world.device
        # Of CUDA each thread has a device of its own.
        set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        return ThreadPoolExecutor(1, "check", initializer=set_device)

    def _hear(self, part: CheckStage, key: str, limit_s: float, deadline: float) -> dict[str, Any]:
        """Wait for what rank 0 has decided."""
        store = self._store
        assert store is not None, "there are other ranks"
        deadline += 3 * MARGIN_S
        while not store.check([f"{key} decided"]):
            if store.check([ENDED]):
                raise AlreadyReported("rank 0 has ended")
            if time.monotonic() > deadline or 0 in self.world.gone():
                break
            time.sleep(self._look_s)
        else:
            return json.loads(store.get(f"{key} decided"))
        first = next(rank for rank in range(1, self.world.size) if store.check([f"{key} {rank}"]))
        if self.world.rank != first:
            raise AlreadyReported("another rank tells that rank 0 is missing")
        raise ValueError(f"{part.name}: {self._missing([0], limit_s)}")

    # --- on rank 0 ------------------------------------------------------------------------------

    def _decide(
        self, part: CheckStage, key: str, limit_s: float, deadline: float, own: dict[str, Any]
    ) -> dict[str, Any]:
        """Wait for the answers, judge them, and return what all ranks are to know."""
        answers = self._gather(key, deadline, own)
        missing = [r for r in range(self.world.size) if r not in answers and r not in self._lost]
        late = [rank for rank, answer in answers.items() if "late" in answer]
        problems = {r: each["problem"] for r, each in answers.items() if "problem" in each}
        hosts = self.world.hosts
        lines = []
        if missing:
            lines.append(self._missing(missing, limit_s))
            # What the others tell of that.
            problems = {rank: each for rank, each in problems.items() if each != LOST}
        lines += by_message(problems, hosts)
        if missing:
            pass
        elif late and not problems:  # else they waited for those that are told of
            where = f" on {places(late, hosts)}" if self.world.size > 1 else ""
            lines.append(
                f"not done within {limit_s:.0f} s{where}: a disk, a network or a device stands"
                " still there; --check-limit-s gives more time"
            )
        if lines:
            self.findings.append(Finding(part.name, Verdict.FAIL, "\n".join(lines)))
        else:
            values = {rank: each["value"] for rank, each in answers.items() if "value" in each}
            found = list(part.judge(values))
            self.findings += found
            lines = [each.said for each in found if each.verdict == Verdict.FAIL]
        apart = ""
        if missing or (late and part.is_joint):
            apart = f"all ranks (see {part.name})"
        return {"failed": bool(lines), "lost": missing, "apart": apart}

    def _gather(self, key: str, deadline: float, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the answers that come, by rank."""
        store = self._store
        if store is None:
            return {0: own}
        ranks = [rank for rank in range(self.world.size) if rank not in self._lost]
        while store.add(key, 0) < len(ranks):
            gone = self.world.gone()
            if time.monotonic() > deadline + MARGIN_S or gone:
                break
            time.sleep(self._look_s)
        silent = set(silent_ranks(store, key, ranks))
        there = [rank for rank in ranks if rank not in silent]
        texts = store.multi_get([f"{key} {rank}" for rank in there])
        return {rank: json.loads(text) for rank, text in zip(there, texts, strict=True)}

    def interrupt(self, number: int, name: str, by: str) -> None:
        """Add the finding of part `number`, which the signal `by` has ended, on rank 0."""
        gone = self.world.gone()
        if gone:  # torchrun ends all ranks because of it
            self.findings.append(Finding(name, Verdict.FAIL, self._missing(gone, self.limit_s)))
            return
        waiting = ""
        if self._store is not None:
            ranks = sorted(set(range(self.world.size)) - self._lost)
            out = silent_ranks(self._store, f"part {number}", ranks)
            waiting = f"; no answer yet from {places(out, self.world.hosts)}" if out else ""
        said = f"ended by {by} in it{waiting}: if you did not send it, an error above says why"
        self.findings.append(Finding(name, Verdict.FAIL, said))

    def _missing(self, ranks: list[int], limit_s: float) -> str:
        where = places(ranks, self.world.hosts)
        gone = set(ranks) & set(self.world.gone())
        if gone:
            return (
                f"{places(gone, self.world.hosts)} ended without a word, as if killed: by the"
                " kernel where memory ran out (dmesg), or by the batch system"
            )
        processes = filter(None, map(self.world.process_of, ranks))
        known = "; ".join(processes)
        return (
            f"{where} did not answer within {limit_s:.0f} s"
            f"{f' ({known})' if known else ''}: hung, stopped or cut off; look at the host, or"
            " leave it out"
        )
