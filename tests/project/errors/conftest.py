"""Scenarios run at once in as many threads as there are cores, for nearly all of their time is
spent on starting Python."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from error_rows import Place


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """A finished run of three steps."""
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
    """Row -> the future of its scenario, for the rows that were chosen on pytest's command line."""
    scenario = request.module.scenario
    base = tmp_path_factory.mktemp("errors")

    def provoke(what: str) -> Place:
        place = Place(Path(tempfile.mkdtemp(dir=base)), shards, finished)
        scenario.of[what](place)
        return place

    here = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and "row" in item.fixturenames
    ]
    rows: list[Any] = [item.callspec.params["row"] for item in here]
    chosen = [row.what for row in rows]
    with ThreadPoolExecutor(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    ) as pool:
        by_length = sorted(chosen, key=lambda what: what not in scenario.slow)
        futures: dict[str, Future[Place]] = {what: pool.submit(provoke, what) for what in by_length}
        yield futures
        pool.shutdown(cancel_futures=True)
