"""Run the parts of a check, one after the other on all ranks, each within a time limit.

    rank 0    part, in a thread -> answer -----------------\\
    others    part, in a thread -> answer -> torch's store -> rank 0: who is missing? -> findings
    all       <- which parts to skip, and lost ranks <------- store <---/

A part may hang: in a collective that a stopped rank does not join, or on a disk. So a thread runs
it, and the main thread waits for the answer or the limit. Answers travel through the store, never
through a collective, so a rank that does not answer can be named even if all other ranks hang. Then
parts that need all ranks are skipped.
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
"""The time that other ranks have to finish after one rank failed in a joint part."""
MARGIN_S = 5.0
"""The time by which one rank may begin a part later than another."""
POLL_S = 0.1
"""The time between two requests to the store; longer from 410 ranks on, as in `World.look_s`."""


class CheckStage(NamedTuple):
    """A part of the check; every rank has the same parts in the same order."""

    name: str
    run: Callable[[], Any]
    """The function for each rank; it returns a JSON value, or raises."""
    judge: Callable[[dict[int, Any]], Iterable[Finding]]
    """The function for rank 0, from the values of all ranks to findings."""
    is_joint: bool = False
    """Whether ranks wait for each other in the part."""
    needs: tuple[str, ...] = ()
    """The parts that must pass first."""
    times: float = 1.0
    """The factor of the usual time limit."""


class CheckStages:
    """The runner of the parts on all ranks; `findings` grows on rank 0."""

    def __init__(self, world: World, limit_s: float):
        self.world = world
        self.limit_s = limit_s
        self.findings: list[Finding] = []
        self._failed = set[str]()
        self._lost = set[int]()
        self._apart = ""
        """The reason why joint parts are skipped; "" if they are not."""
        # A clone, because a connection serves one call at a time and the thread may wait in a call.
        self._store = None if world.store is None else world.store.clone()
        self._look_s = max(POLL_S, world.size / LOOKS_PER_S)
        self._thread = self._new_thread()

    @property
    def failed(self) -> bool:
        """Whether a part has failed on any rank; the value is the same on all ranks."""
        return bool(self._failed)

    def close(self) -> None:
        """End the thread, without waiting if it hangs."""
        self._thread.shutdown(wait=False)

    def run(self, parts: Iterable[CheckStage], on_part: Callable[[int, str], None]) -> None:
        """Run `parts`. on_part: called with number and name of each part before it begins.

        Raises AlreadyReported on a rank that was given up, and if rank 0 ends. If rank 0 does not
        answer, raises ValueError on the first other rank.
        """
        for number, part in enumerate(parts):
            on_part(number, part.name)
            lacking = [name for name in part.needs if name in self._failed]
            if part.is_joint and self._apart:
                lacking = [self._apart]
            if lacking:
                text = f"not tried: it needs {', '.join(lacking)}"
                self.findings.append(Finding(part.name, Verdict.SKIPPED, text))
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
        """Run the part, and return its value, its problem, or the note that it is late."""
        future: Future[Any] = self._thread.submit(part.run)
        while not future.done():
            wait([future], timeout=self._look_s)
            if time.monotonic() > deadline and not future.done():
                self._thread = self._new_thread()  # the old thread may hang for good
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
        # CUDA's current device is per thread.
        set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        return ThreadPoolExecutor(1, "check", initializer=set_device)

    def _hear(self, part: CheckStage, key: str, limit_s: float, deadline: float) -> dict[str, Any]:
        """Wait for the decision of rank 0 and return it."""
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
        """Wait for the answers, judge them, and return the decision for all ranks."""
        answers = self._gather(key, deadline, own)
        missing = [r for r in range(self.world.size) if r not in answers and r not in self._lost]
        late = [rank for rank, answer in answers.items() if "late" in answer]
        problems = {r: answer["problem"] for r, answer in answers.items() if "problem" in answer}
        hosts = self.world.hosts
        lines = []
        if missing:
            lines.append(self._missing(missing, limit_s))
            # Other ranks report the missing rank as lost; the line above covers that.
            problems = {rank: text for rank, text in problems.items() if text != LOST}
        lines += by_message(problems, hosts)
        if missing:
            pass
        elif late and not problems:  # with problems, late ranks waited for the ranks that failed
            late_hosts = f" on {places(late, hosts)}" if self.world.size > 1 else ""
            lines.append(
                f"not done within {limit_s:.0f} s{late_hosts}: a disk, a network or a device stands"
                " still there; --check-limit-s gives more time"
            )
        if lines:
            self.findings.append(Finding(part.name, Verdict.FAIL, "\n".join(lines)))
        else:
            values = {r: answer["value"] for r, answer in answers.items() if "value" in answer}
            findings = list(part.judge(values))
            self.findings += findings
            lines = [finding.said for finding in findings if finding.verdict == Verdict.FAIL]
        apart = ""
        if missing or (late and part.is_joint):
            apart = f"all ranks (see {part.name})"
        return {"failed": bool(lines), "lost": missing, "apart": apart}

    def _gather(self, key: str, deadline: float, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the answers that arrive in time, by rank."""
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
        answered = [rank for rank in ranks if rank not in silent]
        texts = store.multi_get([f"{key} {rank}" for rank in answered])
        return {rank: json.loads(text) for rank, text in zip(answered, texts, strict=True)}

    def interrupt(self, number: int, name: str, by: str) -> None:
        """Add the finding of part `number`, which was ended by the signal `by`, on rank 0."""
        gone = self.world.gone()
        if gone:  # torchrun ends all ranks because of it
            self.findings.append(Finding(name, Verdict.FAIL, self._missing(gone, self.limit_s)))
            return
        waiting = ""
        if self._store is not None:
            ranks = sorted(set(range(self.world.size)) - self._lost)
            silent = silent_ranks(self._store, f"part {number}", ranks)
            waiting = f"; no answer yet from {places(silent, self.world.hosts)}" if silent else ""
        text = f"ended by {by} in it{waiting}: if you did not send it, an error above says why"
        self.findings.append(Finding(name, Verdict.FAIL, text))

    def _missing(self, ranks: list[int], limit_s: float) -> str:
        rank_places = places(ranks, self.world.hosts)
        gone = set(ranks) & set(self.world.gone())
        if gone:
            return (
                f"{places(gone, self.world.hosts)} ended without a word, as if killed: by the"
                " kernel where memory ran out (dmesg), or by the batch system"
            )
        processes = "; ".join(filter(None, map(self.world.process_of, ranks)))
        if processes:
            processes = f" ({processes})"
        return (
            f"{rank_places} did not answer within {limit_s:.0f} s{processes}: hung, stopped or cut"
            " off; look at the host, or leave it out"
        )
