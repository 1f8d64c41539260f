"""Run the checks one after the other on all ranks, each within a time limit.

    rank 0    check in a thread -> answer -----------------\\
    others    check in a thread -> answer -> torch's store -> rank 0: who is missing? -> findings
    all       <- checks to skip, and lost ranks <------- store <---/

A check may hang on a disk, or in a collective that a stopped rank does not join. Therefore, each
check runs in a thread, and the main thread waits for the answer until the time limit. Answers are
sent through torch's store instead of a collective, so rank 0 can name a rank that does not answer.
Once a rank has failed to answer, checks that need all ranks are skipped.
"""

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
"""The time that other ranks have to finish a joint check after one rank has failed."""
MARGIN_S = 5.0
"""The maximum expected difference between the times at which two ranks start a check."""
POLL_S = 0.1
"""The time between two requests to the store. The time is longer with 410 or more ranks (see
`World.look_s`)."""


class CheckStage(NamedTuple):
    """A check that all ranks run, in the same order."""

    name: str
    run: Callable[[], Any]
    """The function that each rank calls, which returns a JSON value or raises an exception."""
    judge: Callable[[dict[int, Any]], Iterable[Finding]]
    """The function that rank 0 calls to convert the values of all ranks to findings."""
    is_joint: bool = False
    """If true, ranks wait for each other during the check."""
    needs: tuple[str, ...] = ()
    """The checks that must pass first."""
    times: float = 1.0
    """The factor by which the usual time limit is multiplied."""


class CheckStages:
    """The runner of all checks on one rank. Rank 0 collects `findings`."""

    def __init__(self, world: World, limit_s: float):
        self.world = world
        self.limit_s = limit_s
        self.findings: list[Finding] = []
        self._current = 0, ""
        """The number and the name of the check that is running."""
        self._failed = set[str]()
        self._lost = set[int]()
        self._apart = ""
        """The reason for skipping joint checks, or "" if they run."""
        # The main thread has its own connection, because a check can block the connection of the
        # thread that runs the checks.
        self._store = None if world.store is None else world.store.clone()
        self._look_s = max(POLL_S, world.size / LOOKS_PER_S)
        self._thread = self._new_thread()

    @property
    def failed(self) -> bool:
        """True if a check has failed on any rank. The value is equal on all ranks."""
        return bool(self._failed)

    def close(self) -> None:
        """Shut the thread down without waiting for a check that hangs."""
        self._thread.shutdown(wait=False)

    def run(self, parts: Iterable[CheckStage], on_part: Callable[[int, str], None]) -> None:
        """Run `parts`. on_part: called with the number and name of each check before it begins.

        Raises AlreadyReported on a rank that answered too late, or if rank 0 exits. If rank 0 does
        not answer, the first other rank raises ValueError.
        """
        for number, part in enumerate(parts):
            on_part(number, part.name)
            self._current = number, part.name

            lacking = [name for name in part.needs if name in self._failed]
            if part.is_joint and self._apart:
                lacking = [self._apart]

            if lacking:
                self.findings.append(
                    Finding(part.name, Verdict.SKIPPED, f"skipped: needs {', '.join(lacking)}")
                )
                self._failed.add(part.name)
            else:
                with self.world.asking_store():
                    self._run(number, part)

    def _run(self, number: int, part: CheckStage) -> None:
        """Run a check on this rank, and take over the common decision about it.

        In the store, `part 3 7` is the answer of rank 7 to check 3, `part 3` the number of answers,
        and `part 3 decided` the decision of rank 0. `part 3 failed` exists if the check has failed
        on a rank.
        """
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

        self._lost.update(decision["lost"])
        self._apart = self._apart or decision["apart"]
        if decision["failed"]:
            self._failed.add(part.name)
        if self.world.rank in self._lost:
            raise AlreadyReported(f"rank {self.world.rank} answered the check {part.name} too late")

    # --- on each rank ---------------------------------------------------------------------------

    def _answer(self, part: CheckStage, key: str, deadline: float) -> dict[str, Any]:
        """Run the check, and return its value, its problem, or {"late": True}."""
        future: Future[Any] = self._thread.submit(part.run)
        while not future.done():
            wait([future], timeout=self._look_s)
            if time.monotonic() > deadline and not future.done():
                self._thread = self._new_thread()  # the old thread may hang forever
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
        # Each thread has its own current CUDA device.
        set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        return ThreadPoolExecutor(1, "check", initializer=set_device)

    def _hear(self, part: CheckStage, key: str, limit_s: float, deadline: float) -> dict[str, Any]:
        """Wait for rank 0's decision. If rank 0 is missing, one of the other ranks reports it."""
        store = self._store
        assert store is not None, "only a run of one rank has no store"
        deadline += 3 * MARGIN_S
        while not store.check([f"{key} decided"]):
            if store.check([ENDED]):
                raise AlreadyReported("rank 0 has exited")
            if time.monotonic() > deadline or 0 in self.world.gone():
                answered = (r for r in range(1, self.world.size) if store.check([f"{key} {r}"]))
                if self.world.rank != next(answered):
                    raise AlreadyReported("another rank reports that rank 0 is missing")
                raise ValueError(f"{part.name}: {self._missing([0], limit_s)}")
            time.sleep(self._look_s)

        return json.loads(store.get(f"{key} decided"))

    # --- on rank 0 ------------------------------------------------------------------------------

    def _decide(
        self, part: CheckStage, key: str, limit_s: float, deadline: float, own: dict[str, Any]
    ) -> dict[str, Any]:
        """Wait for all ranks' answers, merge the findings, and return the common decision."""
        answers = self._gather(key, deadline, own)
        missing = [r for r in range(self.world.size) if r not in answers and r not in self._lost]
        late = [rank for rank, answer in answers.items() if "late" in answer]
        problems = {r: answer["problem"] for r, answer in answers.items() if "problem" in answer}

        lines = []
        if missing:
            lines.append(self._missing(missing, limit_s))
            # The line above already reports the missing ranks, so omit reports from ranks that lost
            # them.
            problems = {rank: text for rank, text in problems.items() if text != LOST}
        lines += by_message(problems, self.world.hosts)
        # If a rank is missing or has failed, other ranks are late because they waited for that
        # rank.
        only_late = late and not missing and not problems
        if only_late:
            where = f" on {places(late, self.world.hosts)}" if self.world.size > 1 else ""
            lines.append(
                f"not done within {limit_s:.0f} s{where}: a disk, a network or a device hangs"
                " or is slow: allow more time with --check-limit-s"
            )

        if lines:
            self.findings.append(Finding(part.name, Verdict.FAIL, "\n".join(lines)))
        else:
            values = {r: answer["value"] for r, answer in answers.items() if "value" in answer}
            findings = list(part.judge(values))
            self.findings += findings
            lines = [finding.text for finding in findings if finding.verdict == Verdict.FAIL]

        must_part = missing or (late and part.is_joint)
        return {
            "failed": bool(lines),
            "lost": missing,
            "apart": f"all ranks (see {part.name})" if must_part else "",
        }

    def _gather(self, key: str, deadline: float, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Wait for the answers of all ranks, and return those that arrived, by rank."""
        store = self._store
        if store is None:
            return {0: own}
        ranks = [rank for rank in range(self.world.size) if rank not in self._lost]
        while store.add(key, 0) < len(ranks):
            if time.monotonic() > deadline + MARGIN_S or self.world.gone():
                break
            time.sleep(self._look_s)

        silent = set(silent_ranks(store, key, ranks))
        answered = [rank for rank in ranks if rank not in silent]
        texts = store.multi_get([f"{key} {rank}" for rank in answered])
        return {rank: json.loads(text) for rank, text in zip(answered, texts, strict=True)}

    def interrupt(self, by: str) -> None:
        """On rank 0, add a finding that the signal `by` interrupted the running check."""
        number, name = self._current
        gone = self.world.gone()
        if gone:  # torchrun stops all ranks when one has exited
            self.findings.append(Finding(name, Verdict.FAIL, self._missing(gone, self.limit_s)))
            return

        waiting = ""
        if self._store is not None:
            ranks = sorted(set(range(self.world.size)) - self._lost)
            silent = silent_ranks(self._store, f"part {number}", ranks)
            waiting = f"; no answer yet from {places(silent, self.world.hosts)}" if silent else ""

        text = f"interrupted by {by}{waiting}: if you did not send this signal, see the error above"
        self.findings.append(Finding(name, Verdict.FAIL, text))

    def _missing(self, ranks: list[int], limit_s: float) -> str:
        """Return the line that reports that `ranks` have exited, or did not answer in time."""
        gone = set(ranks) & set(self.world.gone())
        if gone:
            return (
                f"{places(gone, self.world.hosts)} exited without a message: the kernel may have"
                " killed it because memory ran out (see dmesg), or the batch system killed it"
            )

        processes = "; ".join(filter(None, map(self.world.process_of, ranks)))
        named = f" ({processes})" if processes else ""
        return (
            f"{places(ranks, self.world.hosts)} did not answer within {limit_s:.0f} s{named},"
            " because the process hangs or the network fails: check the host, or run without it"
        )
