"""Test the stages of the check on several ranks. The check must name an unresponsive rank, and no
rank may wait forever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from ranks import together

from vit.distributed.process_group import AlreadyReported, World
from vit.extras.planner.check import stages as parts_module
from vit.extras.planner.check.findings import Finding, Verdict
from vit.extras.planner.check.stages import CheckStage, CheckStages

HOSTS = ("a", "a", "b")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(parts_module, "MARGIN_S", 1.5)
    monkeypatch.setattr(parts_module, "GRACE_S", 0.2)


def part(name: str, run: Callable[[], Any], **options: Any) -> CheckStage:
    """Return a stage whose finding lists the values from the ranks that responded."""

    def judge(values: dict[int, Any]) -> Iterator[Finding]:
        yield Finding(name, Verdict.OK, str(values))

    return CheckStage(name, run, judge, **options)


LIMIT_S = 4.0
"""A rank that does not hang must answer within this time, even on a busy machine."""


def check(
    parts_of: Callable[[World], list[CheckStage]], limit_s: float = 240.0, leave: int | None = None
) -> list[Any]:
    """Run the stages on three ranks, except rank `leave`.

    Return one result per rank: the findings for rank 0, [] for other ranks, and the error if the
    rank raised one.
    """

    def rank(world: World) -> list[tuple[str, str, str]]:
        world = replace(world, hosts=HOSTS)
        if world.rank == leave:
            return []
        parts = CheckStages(world, limit_s)
        try:
            parts.run(parts_of(world), lambda number, name: None)
        finally:
            parts.close()
        return [tuple(map(str, each)) for each in parts.findings] if world.is_main else []

    return together(3, rank)


def test_values_of_all_ranks_are_judged_on_rank_0():
    findings = check(lambda world: [part("ten", lambda: 10 * world.rank, is_joint=True)])
    assert findings == [[("ten", "ok", "{0: 0, 1: 10, 2: 20}")], [], []]


def test_equal_problems_are_reported_once_with_their_ranks_and_other_parts_still_run():
    def parts_of(world: World) -> list[CheckStage]:
        def fail() -> None:
            if world.rank:
                raise OSError("no such disk")

        return [
            part("disk", fail),
            part("needs it", lambda: 1, needs=("disk",)),
            part("does not", lambda: 1, is_joint=True),
        ]

    findings, *_ = check(parts_of)
    assert findings == [
        ("disk", "FAIL", "a (rank 1), b (rank 2): OSError: no such disk"),
        ("needs it", "-", "skipped: needs disk"),
        ("does not", "ok", "{0: 1, 1: 1, 2: 1}"),
    ]


def test_ranks_that_wait_for_a_failed_rank_continue():
    # This event simulates a collective that the failed rank never joins.
    ever = threading.Event()

    def parts_of(world: World) -> list[CheckStage]:
        def fail() -> None:
            if world.rank == 2:
                raise AssertionError("out of something")
            ever.wait(240)

        return [
            part("step", fail, is_joint=True),
            part("together", lambda: 1, is_joint=True),
            part("alone", lambda: 1),
        ]

    findings, *_ = check(parts_of)
    ever.set()
    assert findings == [
        ("step", "FAIL", "b (rank 2): AssertionError: out of something"),
        ("together", "-", "skipped: needs all ranks (see step)"),
        ("alone", "ok", "{0: 1, 1: 1, 2: 1}"),
    ]


@pytest.mark.parametrize("is_joint", [True, False])
def test_a_rank_that_does_not_answer_is_named_and_waited_for_only_once(is_joint):
    ever = threading.Event()

    def parts_of(world: World) -> list[CheckStage]:
        def wait() -> None:
            if is_joint:
                ever.wait(240)

        return [part("pairs", wait, is_joint=is_joint), part("alone", lambda: 1)]

    findings, *other_findings = check(parts_of, limit_s=LIMIT_S, leave=1)
    ever.set()
    assert findings == [
        (
            "pairs",
            "FAIL",
            "a (rank 1) did not answer within 4 s, because the process hangs or the network"
            " fails: check the host, or run without it",
        ),
        ("alone", "ok", "{0: 1, 2: 1}"),
    ]
    assert other_findings == [[], []]


def test_another_rank_reports_that_rank_0_does_not_answer():
    _, first, second = check(lambda world: [part("pairs", lambda: 1)], limit_s=LIMIT_S, leave=0)
    assert isinstance(first, ValueError)
    assert str(first).startswith("pairs: a (rank 0) did not answer within 4 s")
    assert isinstance(second, AlreadyReported)


def test_a_hanging_part_is_distinguished_from_a_missing_rank():
    ever = threading.Event()

    def parts_of(world: World) -> list[CheckStage]:
        def read() -> int:
            if world.rank == 2:
                ever.wait(240)
            return 1

        return [part("reading", read), part("step", lambda: 2, is_joint=True)]

    findings, *other_findings = check(parts_of, limit_s=LIMIT_S)
    ever.set()
    assert findings[0][:2] == ("reading", "FAIL")
    assert findings[0][2].startswith("not done within 4 s on b (rank 2): a disk, a network")
    assert findings[1] == ("step", "ok", "{0: 2, 1: 2, 2: 2}")
    assert other_findings == [[], []]
