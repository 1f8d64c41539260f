"""Test that communication does not grow with the number of ranks, except by the amounts in
`OF_A_RANK`, `OF_A_HOST` and `SUMMED`."""

from __future__ import annotations

import json
import math

import pytest
import warm_python
from processes import REPOSITORY, call, environment, make_shards, run

from vit.monitor import LOADER_COUNTS

FEW = 16
MANY = 64
RANKS_OF_A_HOST = 8
HERE = REPOSITORY / "tests" / "scale"
OF_A_RANK = {
    "start: ranks meet": 260,  # each rank sends a description of its host once
    "start: hosts compared": 80,
    "start: rest": 30,  # whether its device has bf16
    "watch: a beat": 80,  # each rank sends a heartbeat every 30 s
}
"""The number of bytes per rank that rank 0 may read from the store in each part. In all other
parts, this number is 0."""
OF_A_HOST = {"start: ranks meet": 40}
"""The number of bytes per host that every other rank may read to learn the host names."""
SUMMED = {"step": 4 * (1 + len(LOADER_COUNTS) / 5), "evaluation": 4}
"""The number of bytes per rank in collectives. In each step, a rank sends the time for which it
waited for data. Every five steps, a rank sends its loader counters."""
DIGITS = 3
"""The number of decimal digits by which a number may become longer as the number of ranks grows."""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale")
    return make_shards(folder, num_train=2 * MANY, num_val=MANY, size=(16, 16))


def simulated(shards, *ranks):
    """Return the counts as a dict with three levels: the number of ranks, "first" or "last", and
    the part."""
    script = [HERE / "one_of_many.py", shards, "--batch", MANY, "--ranks", *ranks]
    done = call([warm_python.python(environment()), *map(str, script)])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def counted(images):
    """Map each (rank, part, quantity) to two counts, one with few ranks and one with many ranks."""
    few, many = simulated(images, FEW, MANY).values()
    return {
        (who, part, quantity): (values.get(quantity, 0), number)
        for who in ("first", "last")
        for part, of_many in many[who].items()
        for values in [few[who].get(part, {})]
        for quantity, number in of_many.items()
    }


def grown(counted, quantity):
    rows = [
        (key[0], key[1], few, many - few)
        for key, (few, many) in counted.items()
        if key[2] == quantity
    ]
    assert sum(few for _, _, few, _ in rows) > 0
    return rows


@pytest.mark.parametrize("quantity", ["requests", "collectives", "files"])
def test_requests_collectives_and_file_accesses_do_not_grow_with_the_ranks(counted, quantity):
    more = [(who, part, more) for who, part, _, more in grown(counted, quantity) if more > 0]
    assert more == []


def test_rank_0_reads_at_most_one_line_from_each_rank(counted):
    requests = {key[:2]: few for key, (few, _) in counted.items() if key[2] == "requests"}
    for who, part, _, more in grown(counted, "requests_bytes"):
        numbers = DIGITS * requests[who, part]
        if who == "first":
            assert more <= OF_A_RANK.get(part, 0) * (MANY - FEW) + numbers, part
        else:
            hosts = (MANY - FEW) / RANKS_OF_A_HOST
            assert more <= OF_A_HOST.get(part, 0) * hosts + numbers, part


def test_sums_over_ranks_contain_a_few_numbers_of_each_rank(counted):
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
def test_real_ranks_communicate_as_the_simulated_ranks_do(images, tmp_path):
    """Real ranks use gloo and torch's store. The comparison excludes polling requests, because
    their number depends on timing."""
    counts = simulated(images, 4)["4"]
    script = [images, "--batch", MANY, "--real", tmp_path]
    done = run(HERE / "one_of_many.py", *script, ranks=4)
    assert done.returncode == 0, done.stderr
    for who, rank in (("first", 0), ("last", 3)):
        own = json.loads((tmp_path / f"{rank}.json").read_text())
        requests = requests_of(own)
        assert sum(requests.values()) > 50
        assert requests == requests_of(counts[who])


def requests_of(counts):
    ours = {name: number for name, number in counts["keys"].items() if " vit/" in name}
    return {
        name: number
        for name, number in ours.items()
        if ": look " not in name and "beat" not in name
    }
