"""Test runs with paused processes or threads, runs that change their number of ranks, and two runs
that train at the same time."""

from __future__ import annotations

import random

import pytest
from faults.kills import Whole
from faults.ranks import EXACT, on_each_number, two_at_once
from faults.stops import TARGETS, stopped_and_continued


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"), shards)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_a_paused_process_continues_to_the_same_weights(whole, tmp_path, target):
    try:
        faults = stopped_and_continued(whole, tmp_path, target, 10, random.Random(0))
    except PermissionError as error:
        pytest.skip(f"this process may not trace threads: {error}")
    assert not faults


@pytest.mark.full
@pytest.mark.parametrize("settings", [(), EXACT], ids=["plain", "exact"])
def test_resumes_on_another_number_of_ranks_after_each_kill(tmp_path, shards, settings):
    whole = Whole(tmp_path, shards, *settings, steps=48, batch=24)
    assert not on_each_number(whole, tmp_path, (4, 2, 3, 1), random.Random(0))


@pytest.mark.full
def test_two_jobs_do_not_disturb_each_other_and_a_folder_in_use_is_rejected(whole, tmp_path):
    assert not two_at_once(whole, tmp_path)
