"""Test which pairs of ranks are measured, and when a pair is reported as slow."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
import torch

from vit.distributed.process_group import World
from vit.extras.planner.check.collectives import (
    BETWEEN,
    MAX_ROUNDS,
    WITHIN,
    all_rounds,
    judge_pairs,
    num_rounds,
    round_of,
)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 8])
def test_each_pair_of_ranks_is_measured_once_and_no_rank_twice_at_a_time(number):
    ranks = range(number)
    rounds = [round_of(ranks, each) for each in range(num_rounds(ranks))]
    for pairs in rounds:
        assert max(Counter(rank for pair in pairs for rank in pair).values(), default=1) == 1
    met = Counter(frozenset(pair) for pairs in rounds for pair in pairs)
    assert met == Counter(map(frozenset, combinations(range(number), 2)))


def test_pairs_are_within_hosts_and_between_ranks_of_the_same_place():
    hosts = ("a", "b", "a", "b", "a", "c")
    met = {
        (kind, frozenset(pair)) for kind, pairs in all_rounds(hosts) for pair in map(tuple, pairs)
    }
    within = {(WITHIN, frozenset(pair)) for pair in ((0, 2), (0, 4), (2, 4), (1, 3))}
    between = {(BETWEEN, frozenset(pair)) for pair in ((0, 1), (0, 5), (1, 5), (2, 3))}
    assert met == within | between


def test_rounds_do_not_grow_with_the_hosts():
    for num_hosts in (2, 33, 512):
        hosts = tuple(f"n{rank // 8}" for rank in range(8 * num_hosts))
        kinds = Counter(kind for kind, _ in all_rounds(hosts))
        assert kinds[WITHIN] == 7
        assert kinds[BETWEEN] <= min(num_hosts - 1, MAX_ROUNDS)


def test_a_pair_that_is_much_slower_than_other_pairs_gets_a_note():
    hosts = ("a", "b", "c")
    rates = {(0, 1): 9e9, (0, 2): 8e9, (1, 2): 1e9}
    speeds = {
        rank: [[BETWEEN, sum(pair) - rank, rate] for pair, rate in rates.items() if rank in pair]
        for rank in range(3)
    }
    world = World(0, 3, torch.device("cpu"), hosts=hosts)
    [slow] = judge_pairs(speeds, world)
    assert slow.verdict == "note"
    assert slow.text.splitlines() == [
        "between hosts, the slowest of 3: b (rank 1), c (rank 2) with 1 GB/s each way (median"
        " 8 GB/s)",
        "this pair slows all ranks down: try without one of its hosts",
    ]
    rates[1, 2] = 7e9
    speeds[1][1][2] = speeds[2][1][2] = 7e9
    [alike] = judge_pairs(speeds, world)
    assert alike.verdict == "ok"
