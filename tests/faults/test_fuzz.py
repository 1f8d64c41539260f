"""Test some of the combinations that tests/faults/fuzz.py generates, and its report about two runs
that differ."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from extras.deleted_extras import needs
from faults.combinations import Data, draw
from faults.fuzz import Fuzz, Refused, Result, differences
from processes import train
from servers import S3Server


@pytest.fixture
def data(shards) -> Data:
    return Data(shards, shards, shards)


@needs("remote_runs")
@pytest.mark.full
def test_a_killed_combination_ends_with_the_bits_of_the_uninterrupted_run(data, tmp_path):
    """The run is exact over ranks, uses Muon, and skips updates with loss spikes. The test
    repeats the run on two and on three ranks."""
    config = tmp_path / "fuzz.yaml"
    config.write_text(f"data: {{root: {data.shards}}}\n")
    drawn = draw(random.Random(0), data)
    settings = (
        *("data.global_batch_size=12", "train.steps=12", "checkpoint.every_steps=3"),
        *("eval.every_steps=4", "optim.name=muon", "train.exact_over_ranks=true"),
        *("data.micro_batch_size=4", "guard.on_spike=skip", "guard.window_steps=8"),
        *("guard.spike_sigmas=0.3", "guard.max_skips=100"),
        *("log.every_steps=3", "ema.decay=0.9"),
    )
    kills = tuple(
        replace(drawn.kills[0], ranks=ranks, step=step, delay_s=0.0, hits_all=step == 4)
        for ranks, step in ((3, 4), (2, 7))
    )
    combination = replace(
        drawn, settings=settings, place="s3", steps=12, ranks=3, other_ranks=2, kills=kills
    )
    with S3Server() as s3:
        fuzz = Fuzz(tmp_path, data, config, s3)
        fuzz.run_whole(tmp_path / "whole", combination)
        result = fuzz.broken(tmp_path, Result(0, combination, []))
    assert not result.differences
    assert result.num_kills == 2


def test_reports_two_runs_that_differ_in_one_setting(config, tmp_path):
    for name, rate in (("one", 1e-3), ("other", 1.1e-3)):
        train(config, tmp_path / name, "train.steps=6", f"optim.lr={rate}")
    assert not differences(tmp_path / "one", tmp_path / "one", 6)
    names = "\n".join(differences(tmp_path / "one", tmp_path / "other", 6))
    for name in ("model.head.weight: ", "last.safetensors head.weight: ", "train line 1 lr: "):
        assert f"\n{name}" in f"\n{names}", names


def test_draws_again_when_a_config_is_rejected(data, tmp_path):
    config = tmp_path / "fuzz.yaml"
    config.write_text(f"data: {{root: {data.shards}}}\n")
    combination = replace(draw(random.Random(0), data), settings=("optim.lr=-1",))
    with S3Server() as s3, pytest.raises(Refused, match=r"optim\.lr"):
        Fuzz(tmp_path, data, config, s3).run_whole(tmp_path / "run", combination)


def test_a_seed_always_draws_the_same_combination(data):
    drawn = [draw(random.Random(seed), data) for seed in range(200)]
    assert drawn == [draw(random.Random(seed), data) for seed in range(200)]
    settings = {setting for each in drawn for setting in each.settings}
    assert {"train.compile=true", "optim.name=muon", "loader.on_bad_image=skip"} <= settings
    assert {each.place for each in drawn} == {"", "file", "s3"}
    assert {each.ranks for each in drawn} == {1, 2, 3}
