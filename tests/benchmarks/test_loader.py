"""Test that benchmarks/loader.py measures every installed library and pauses all other libraries
during each measurement."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from processes import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.full]
BENCHMARKS = REPOSITORY / "benchmarks"
OURS = "ours, restart markers, pip only"
V1 = "torchvision v1"
WHOLE = "limit: whole JPEGs"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Run the benchmark and return its output folder."""
    folder = tmp_path_factory.mktemp("loader")
    command = [
        sys.executable,
        BENCHMARKS / "loader.py",
        "--quick",
        "--workers",
        "0",
        "--only",
        OURS,
        V1,
        "FFCV",
        WHOLE,
    ]
    subprocess.run(
        [*command, "--data", folder / "data", "--out", folder / "found.json"],
        check=True,
        cwd=folder,
    )
    return folder


@pytest.fixture
def loader(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("loader")


@pytest.fixture
def data(place, loader):
    return loader.Data(place / "data" / "images-64", 64)


def test_a_quick_run_writes_every_round_and_names_missing_contestants(place, data):
    report = json.loads((place / "found.json").read_text())
    assert report["data"].startswith("64 JPEGs, ")
    tables = {
        (result["title"].split(":")[0], result["unit"]): result["rows"]
        for result in report["results"]
    }
    assert set(tables) == {
        (task, unit) for task in ("Training", "Evaluation") for unit in ("images/CPU-s", "images/s")
    }
    for rows in tables.values():
        assert {OURS, V1, WHOLE} <= set(rows)
        for row in rows.values():
            assert len(row["rounds"]) == 1
            assert row["rounds"][0] > 0
    installed = importlib.util.find_spec("ffcv") is not None
    assert (
        (report["contestants"]["FFCV"] != "not installed")
        == installed
        == ("FFCV" in tables["Training", "images/s"])
    )
    page = (place / "found.md").read_text()
    assert f"| {OURS} | " in page
    num_bytes = sum(file.stat().st_size for file in data.files)
    assert f"| JPEGs in class folders | {num_bytes / 64_000:.1f} | 1.000 |" in page
    assert (place / "found.png").read_bytes().startswith(b"\x89PNG")


def test_contestants_and_their_workers_are_idle_between_turns_and_end(data, loader):
    bench = loader.Benchmark(data, batch_size=8, num_batches=2, rounds=1)
    with bench.serving([OURS, WHOLE], workers=2) as servers:
        assert [server.name for server in servers] == [OURS, WHOLE], bench.failures
        for server in servers:
            assert min(server.turn("train", 2)) > 0
        assert len(list(servers[0].processes())) >= 3
        for _ in range(6000):
            states = {stat[0] for server in servers for _, stat in server.processes()}
            if states == {"T"}:
                break
            time.sleep(0.01)
        assert states == {"T"}
        before = [server.cpu_s() for server in servers]
        time.sleep(0.3)
        assert [server.cpu_s() for server in servers] == before
    assert not [folder for server in servers for folder, _ in server.processes()]


def test_reports_a_failed_contestant_and_continues_with_the_others(data, loader):
    shutil.rmtree(data.marked)
    bench = loader.Benchmark(data, batch_size=8, num_batches=2, rounds=1)
    with bench.serving([OURS, WHOLE], workers=0) as servers:
        assert [server.name for server in servers] == [WHOLE]
    assert "no such directory; expected a folder of shards" in bench.failures[OURS]
