"""Provide fixtures that run error scenarios in parallel. There is one thread per core, because most
of the time is spent on starting Python."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from error_rows import Place
from extras.deleted_extras import DELETED


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    place = Place(tmp_path_factory.mktemp("finished"), shards, Path())
    place.train("train.steps=3", "eval.every_steps=100")
    assert place.done.returncode == 0, place.done.stderr
    return place.run_dir


@pytest.fixture(scope="module")
def happened(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    shards: Path,
    finished: Path,
):
    """Run the scenarios of all selected rows, and yield a dict that maps each row to the future of
    its scenario."""
    scenario = request.module.scenario
    base = tmp_path_factory.mktemp("errors")

    def provoke(problem: str) -> Place:
        place = Place(Path(tempfile.mkdtemp(dir=base)), shards, finished)
        scenario.of[problem](place)
        return place

    items = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and "row" in item.fixturenames
    ]
    rows: list[Any] = [item.callspec.params["row"] for item in items]
    chosen = [row.what for row in rows if row.needs not in DELETED]
    with ThreadPoolExecutor(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    ) as pool:
        by_length = sorted(chosen, key=lambda problem: problem not in scenario.slow)
        futures: dict[str, Future[Place]] = {
            problem: pool.submit(provoke, problem) for problem in by_length
        }
        yield futures
        pool.shutdown(cancel_futures=True)
