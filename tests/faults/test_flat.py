"""Test that the memory, descriptors and threads of a process do not grow over many steps and
starts, and that the check detects a leak."""

from __future__ import annotations

import gc
import socket
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from faults.flat import Look, judged, look, over_starts, over_steps
from faults.kills import Whole
from faults.phases import unfinished
from processes import TINY, run_here, write_config


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        ({}, []),
        ({"MiB": 0.05}, ["MiB"]),
        ({"descriptors": 0.1}, ["descriptors"]),
        ({"threads": 0.1}, ["threads"]),
    ],
)
def test_a_leak_is_seen_through_the_noise(leak, named):
    """The test simulates a leak of one descriptor every ten saves, and a leak of 50 KiB per save
    (an eighth of the state)."""
    rng = np.random.default_rng(0)
    looks = [
        Look(
            at,
            200 + 5 * (at < 20) + rng.uniform(-1, 1) + leak.get("MiB", 0) * at,
            int(30 + rng.integers(3) + leak.get("descriptors", 0) * at),
            int(9 + leak.get("threads", 0) * at),
        )
        for at in range(300)
    ]
    _, faults = judged(looks, 299)
    assert [fault.split()[0] for fault in faults] == named


@pytest.mark.slow
def test_starts_leak_no_descriptor_or_thread_and_remove_leftovers_of_kills(tmp_path: Path, shards):
    config = write_config(tmp_path, shards)
    run_dir = tmp_path / "run"
    looks = []
    for number in range(1, 5):
        steps = (f"train.steps={3 * number}", "--allow-change", "train.steps")
        run_here("launch/train.py", "--config", config, f"run.dir={run_dir}", *TINY, *steps)
        gc.collect()
        looks.append(look("self", number))
    # Skip the first start, because objects from earlier tests in this process are freed during it.
    for numbers in ([each.descriptors for each in looks], [each.threads for each in looks]):
        assert any(after <= before for before, after in pairwise(numbers)), numbers
    (run_dir / "checkpoints" / ".tmp_step_00000012").mkdir()
    for name in (".config.yaml", "weights/.last.safetensors", "report/.index.html"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / f"{name}.elsewhere.1.tmp").touch()
        (run_dir / f"{name}.{socket.gethostname()}.1.tmp").touch()
    assert len(unfinished(run_dir)) == 7
    run_here("launch/train.py", "--config", config, f"run.dir={run_dir}", *TINY, *steps)
    assert sorted(path.name for path in unfinished(run_dir)) == [
        *(".config.yaml.elsewhere.1.tmp", ".index.html.elsewhere.1.tmp"),
        ".last.safetensors.elsewhere.1.tmp",
    ], "a recent file from another host must remain, because it may be in use"


@pytest.mark.full
def test_resources_stay_flat_over_many_saves_of_one_run(tmp_path, shards):
    sentences, faults = over_steps(Whole(tmp_path, shards, steps=600), tmp_path / "steps")
    assert not faults
    assert len(sentences) == 2


@pytest.mark.full
def test_resources_stay_flat_over_many_starts_in_one_process(tmp_path, shards):
    _, faults = over_starts(Whole(tmp_path, shards), tmp_path / "starts", 30)
    assert not faults
