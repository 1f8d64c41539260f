"""What a training says does not grow with the ranks, but where it is told here."""

from __future__ import annotations

import json
import math

import pytest
import warm_python
from processes import REPOSITORY, call, environment, make_shards, run

from vit.hooks.monitor import LOADER_COUNTS

FEW = 16
MANY = 64
RANKS_OF_A_HOST = 8
HERE = REPOSITORY / "tests" / "scale"
OF_A_RANK = {
    "start: ranks meet": 260,  # what each finds on its host, once
    "start: hosts compared": 80,
    "watch: a beat": 80,  # each 30 s
}
"""Bytes for each rank that rank 0 may get from the store; where nothing is said none."""
OF_A_HOST = {"start: ranks meet": 40}
"""Bytes for each host that any other rank may get: its name."""
SUMMED = {"step": 4 * (1 + len(LOADER_COUNTS) / 5), "evaluation": 4}
"""Bytes for each rank in collectives: how long it waited for data; with a line of metrics, in one
of five steps here, what its loader did."""
DIGITS = 3
"""A number of ranks, or of one, may have so many more."""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale")
    return make_shards(folder, num_train=2 * MANY, num_val=MANY, size=(16, 16))


def simulated(shards, *ranks):
    """Counts by number of ranks, then "first" or "last", then part."""
    script = [HERE / "one_of_many.py", shards, "--batch", MANY, "--ranks", *ranks]
    done = call([warm_python.python(environment()), *map(str, script)])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def counted(images):
    """Who, part and what -> the counts with few ranks and with many."""
    few, many = simulated(images, FEW, MANY).values()
    return {
        (who, part, what): (values.get(what, 0), number)
        for who in ("first", "last")
        for part, of_many in many[who].items()
        for values in [few[who].get(part, {})]
        for what, number in of_many.items()
    }


def grown(counted, what):
    """Yield who, part, the count with few ranks, and by how much it has grown."""
    found = [
        (key[0], key[1], few, many - few) for key, (few, many) in counted.items() if key[2] == what
    ]
    assert sum(few for _, _, few, _ in found) > 0
    return found


@pytest.mark.parametrize("what", ["requests", "collectives", "files"])
def test_no_rank_speaks_or_opens_files_more_often_where_there_are_more_ranks(counted, what):
    more = [(who, part, more) for who, part, _, more in grown(counted, what) if more > 0]
    assert more == []


def test_what_rank_0_hears_of_each_rank_is_a_line(counted):
    requests = {key[:2]: few for key, (few, _) in counted.items() if key[2] == "requests"}
    for who, part, _, more in grown(counted, "requests_bytes"):
        numbers = DIGITS * requests[who, part]
        if who == "first":
            assert more <= OF_A_RANK.get(part, 0) * (MANY - FEW) + numbers, part
        else:
            hosts = (MANY - FEW) / RANKS_OF_A_HOST
            assert more <= OF_A_HOST.get(part, 0) * hosts + numbers, part


def test_what_is_summed_over_the_ranks_has_a_few_numbers_of_each(counted):
    calls = {key[:2]: few for key, (few, _) in counted.items() if key[2] == "calls"}
    for who, part, _, more in grown(counted, "collectives_bytes"):
        allowed = SUMMED.get(part, 0) * (MANY - FEW) * calls.get((who, part), 0)
        assert more <= math.ceil(allowed), part


def test_all_parts_of_a_run_were_counted(counted):
    spoken = {key[1] for key, (few, _) in counted.items() if key[2] == "requests" and few}
    assert spoken > {*OF_A_RANK, "start: data", "start: checkpoint read", "order check"}
    assert spoken > {"evaluation", "save", "end"}
    assert counted["first", "keys", "watch: a beat: multi_get vit/beat "] == (1, 1)


@pytest.mark.full
def test_real_ranks_say_what_the_simulated_ones_say(images, tmp_path):
    """Over gloo and torch's store; how often one that waits looks there is a matter of time."""
    found = simulated(images, 4)["4"]
    script = [images, "--batch", MANY, "--real", tmp_path]
    done = run(HERE / "one_of_many.py", *script, ranks=4)
    assert done.returncode == 0, done.stderr
    for who, rank in (("first", 0), ("last", 3)):
        own = json.loads((tmp_path / f"{rank}.json").read_text())
        words = words_of(own)
        assert sum(words.values()) > 50
        assert words == words_of(found[who])


def words_of(counts):
    """What was asked of the store but for looks, beats, and torch's own words."""
    ours = {name: number for name, number in counts["keys"].items() if " vit/" in name}
    return {
        name: number
        for name, number in ours.items()
        if ": look " not in name and "beat" not in name
    }
