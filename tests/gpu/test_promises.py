"""What is promised of a GPU: the functions of `make gpu-check`, each in a process of its own.

Without a GPU nothing here runs; that each of them can fail is shown on a CPU by
tests/measure/test_promises.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch

from vit.measure import kills, promises
from vit.measure.parts import Line, run_part
from vit.ranks.distributed import join_world

BUDGET_S = 500.0


def keeps(part: Callable[[], Iterable[Line]]) -> None:
    """A process of its own, as this one may not start CUDA: others here are forked from it."""

    def joined() -> Iterable[Line]:
        join_world("cuda")
        return part()

    lines = run_part("this part", joined, BUDGET_S)
    assert any(line.passed for line in lines), "nothing was promised"
    assert not [str(line) for line in lines if line.passed is False]


@pytest.mark.parametrize(
    "promise",
    [
        promises.page_locked_slots,
        promises.equals_the_cpu,
        promises.no_waits,
        promises.graphs_as_planned,
        promises.planned_memory,
    ],
)
def test_the_promise_is_kept(promise, gpu: torch.device):
    keeps(partial(promise, gpu))


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path):
    place = kills.make_place(tmp_path, "train.device=cuda", "train.precision=bf16")
    [line] = kills.killed_and_resumed(place, deterministic=True, promised=True)
    assert line.passed, str(line)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_killed_rank_is_noticed(tmp_path: Path):
    place = kills.make_place(tmp_path, "train.device=cuda", "train.precision=bf16")
    [line] = kills.killed_rank(place)
    assert line.passed, str(line)
