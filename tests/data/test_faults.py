"""Test that training from a faulty server ends with the same weights as training without faults, or
with an error that describes the fault."""

from __future__ import annotations

import random
import re

import pytest
from faults.outage import STEPS, settings, trained_through
from processes import Background, final_state, train
from remote_shards import files_of
from servers import WebServer


@pytest.mark.full
@pytest.mark.parametrize("kind", ["http", "s3"])
def test_an_outage_in_the_middle_changes_nothing(kind, shards, tmp_path):
    stderr, equal = trained_through(kind, tmp_path, shards, away_s=4.0)
    assert equal
    assert re.search("has not answered since .*; trying for another", stderr)
    assert "answers again after" in stderr


@pytest.fixture
def web(shards) -> WebServer:
    with WebServer(files_of(shards)) as server:
        yield server


@pytest.mark.full
def test_many_faults_together_change_nothing(web, shards, config, tmp_path):
    train(config, tmp_path / "whole", f"data.root={shards}", ranks=2)
    rng = random.Random(0)
    web.statuses = [rng.choice([503, 429, 500]) for _ in range(4)]
    web.wrong_ranges = 3
    web.fails_each = 7
    train(
        config,
        tmp_path / "faults",
        *settings(f"{web.url}/set", shards, tmp_path / "cache", 60),
        ranks=2,
    )
    assert final_state(tmp_path / "faults", STEPS) == final_state(tmp_path / "whole", STEPS)


@pytest.mark.full
def test_a_permanently_replaced_shard_is_named(web, shards, config, tmp_path):
    run_dir = tmp_path / "run"
    background = Background(
        config, run_dir, *settings(f"{web.url}/set", shards, tmp_path / "cache", 3), ranks=2
    )
    background.wait_for_step(3)
    for name in [name for name in web.files if name.endswith(".tar") and "train" in name]:
        web.files[name] += bytes(512)
    stderr = background.end()
    assert background.process.returncode
    assert re.search(
        r"error: http.*/set/train-0000\d.tar: .*the file was replaced at its URL while in use"
        r" \(before: \d+ bytes",
        stderr,
    )
