"""Test the results and rates of all collectives that a run uses, and find slow pairs of ranks.

Tensors have the size of a DDP bucket. Rates are the "bus bandwidth" of NVIDIA's nccl-tests
(doc/PERFORMANCE.md), which can be compared across numbers of ranks. Pairs are tested in rounds, and
each rank has one partner per round (a round-robin tournament). Pairs within a host come first.
Pairs between hosts have equal local ranks, because fabrics with one network card per GPU connect
such ranks.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vit.distributed.host_differences import places
from vit.distributed.process_group import REDUCED_AT_ONCE, World, now_s
from vit.extras.planner.check.findings import Finding, Verdict
from vit.system.meter import rate_text

REPEATS = 3
"""The number of timed repeats, whose median is used. An untimed call opens the connections
first."""
PAIR_BYTES = 2**22
"""The number of bytes that the ranks of a pair send in each direction."""
MAX_ROUNDS = 32
"""The maximum number of rounds within hosts, and between hosts. If more rounds are possible, only
evenly spaced ones are tested."""
SLOW_SHARE = 1 / 3
"""A pair is reported as slow if its rate is below this share of the median."""
SLOW_BETWEEN_HOSTS = 2e9
"""The rate in bytes per second below which hosts probably do not use their GPU fabric."""
WITHIN = "within a host"
BETWEEN = "between hosts"


def try_collectives(world: World, is_exact: bool) -> dict[str, float]:
    """Return the rate of each collective in bytes per second, by name.

    Every rank must call this function. is_exact: also test the collectives that
    `train.exact_over_ranks` needs. Raises ValueError if a collective returns a wrong result.
    """
    size = world.size
    if size == 1:
        return {}

    # Each rank sends its number plus 1, in fp32.
    length = REDUCED_AT_ONCE // 4 // size * size
    own = torch.full((length,), float(world.rank + 1), device=world.device)
    part = torch.empty(length // size, device=world.device)
    whole = torch.empty_like(own)

    total = torch.tensor(size * (size + 1) / 2, device=world.device)
    of_first_rank = torch.ones((), device=world.device)
    by_rank = torch.arange(1.0, size + 1, device=world.device).repeat_interleave(length // size)

    # Maps each collective to its call, its result, the expected values, and the bytes sent over
    # each link as a fraction of the tensor.
    share = (size - 1) / size
    tried: dict[str, tuple[Callable[[], Any], Tensor, Tensor, float]] = {
        "all_reduce": (lambda: dist.all_reduce(whole.copy_(own)), whole, total, 2 * share),
        "broadcast": (lambda: dist.broadcast(whole.copy_(own), src=0), whole, of_first_rank, 1.0),
        "all_gather": (
            lambda: dist.all_gather_into_tensor(whole, own[: length // size]),
            whole,
            by_rank,
            share,
        ),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, own), part, total, share),
        "all_to_all": (lambda: dist.all_to_all_single(whole, own), whole, by_rank, share),
    }
    if not is_exact:
        del tried["all_to_all"]

    rates = {}
    for name, (call, result, expected, carried) in tried.items():
        call_s = _time_correct(world, name, call, result, expected)
        rates[name] = carried * own.nbytes / call_s
    return rates


def _time_correct(
    world: World, name: str, call: Callable[[], Any], result: Tensor, expected: Tensor
) -> float:
    """Return the median seconds of `call`. Raises ValueError if it sets `result` to wrong values.

    name: the collective.
    """
    taken_s = []
    for _ in range(1 + REPEATS):
        dist.barrier(device_ids=[world.device.index] if world.device.type == "cuda" else None)
        began_s = now_s(world.device)
        call()
        taken_s.append(now_s(world.device) - began_s)
        if not bool((result == expected).all()):
            raise ValueError(
                f"{name} computes wrong sums: a network card, a cable, a GPU or the library may"
                " be faulty: exclude this host"
            )

    return statistics.median(taken_s[1:])  # the first call opens the connections


# --- pairs ----------------------------------------------------------------------------------------


def num_rounds(members: Sequence[int]) -> int:
    """Return the number of rounds until every pair of `members` has met."""
    return len(members) - 1 + len(members) % 2


def round_of(members: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Return the pairs of one round, by the circle method of round-robin tournaments.

    Over all `num_rounds` rounds, each member meets every other member once.
    """
    seats: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    # In each round, all members except the first move by one seat.
    first = len(seats) - number
    seats = [seats[0], *seats[first:], *seats[1:first]]

    half = len(seats) // 2
    pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def all_rounds(hosts: Sequence[str]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return the kind and the pairs of each round. hosts: the host of each rank.

    Within a host, all ranks meet. Between hosts, the ranks of a rail meet, which is a network that
    connects the GPUs of the same local rank on all hosts.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    rails: dict[int, list[int]] = {}
    for ranks in by_host.values():
        for local_rank, rank in enumerate(ranks):
            rails.setdefault(local_rank, []).append(rank)

    rounds = [(WITHIN, pairs) for pairs in _rounds_of_groups(by_host.values())]
    return rounds + [(BETWEEN, pairs) for pairs in _rounds_of_groups(rails.values())]


def _rounds_of_groups(members: Iterable[list[int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of each round, in which all groups meet at the same time.

    members: the members of each group.
    """
    groups = [group for group in members if len(group) > 1]
    longest = max(map(num_rounds, groups), default=0)
    every = math.ceil(longest / MAX_ROUNDS) or 1
    for number in range(0, longest, every):
        pairs: list[tuple[int, int]] = []
        for group in groups:
            if number < num_rounds(group):
                pairs += round_of(group, number)
        yield pairs


def try_pairs(world: World) -> list[list[Any]]:
    """Return the kind, partner and bytes per second of each pair that includes this rank.

    Every rank must call this function.
    """
    rates: list[list[Any]] = []
    if world.size == 1:
        return rates

    sent = torch.zeros(PAIR_BYTES // 4, device=world.device)
    received = torch.empty_like(sent)
    for kind, pairs in all_rounds(world.hosts):
        partners = dict([*pairs, *((b, a) for a, b in pairs)])
        partner = partners.get(world.rank)
        if partner is None:
            continue

        taken_s = []
        for _ in range(1 + REPEATS):
            began_s = now_s(world.device)
            operations = [
                dist.P2POp(dist.isend, sent, partner),
                dist.P2POp(dist.irecv, received, partner),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            taken_s.append(now_s(world.device) - began_s)

        # The first measurement includes connecting and waiting for the partner, so it is discarded.
        rates.append([kind, partner, PAIR_BYTES / statistics.median(taken_s[1:])])

    return rates


# --- findings --------------------------------------------------------------------------


def judge_collectives(rates: dict[int, dict[str, float]], world: World) -> Iterator[Finding]:
    """Yield each collective's rate on its slowest rank. rates: maps ranks to rates by name."""
    if world.size == 1:
        yield Finding("collectives", Verdict.OK, "not needed for one rank")
        return

    texts = []
    for name in rates[0]:
        slowest = min(rank_rates[name] for rank_rates in rates.values())
        texts.append(f"{name} {rate_text(slowest)}")
    yield Finding(
        "collectives",
        Verdict.OK,
        f"correct on all {world.size} ranks: {', '.join(texts)} ({REDUCED_AT_ONCE >> 20} MiB)",
    )


def judge_pairs(rank_pairs: dict[int, list[list[Any]]], world: World) -> Iterator[Finding]:
    """Yield the slowest pair of each kind, with a note if the pair is much slower than the median.

    rank_pairs: the result of `try_pairs` on each rank.
    """
    pairs: dict[str, dict[tuple[int, int], list[float]]] = {}
    for rank, partners in rank_pairs.items():
        for kind, partner, rate in partners:
            a, b = sorted((rank, partner))
            pairs.setdefault(kind, {}).setdefault((a, b), []).append(rate)

    lines = []
    notes = []
    for kind, rates in pairs.items():
        pair_rates = {pair: max(ends) for pair, ends in rates.items()}
        slowest = min(pair_rates, key=pair_rates.__getitem__)
        rate = pair_rates[slowest]
        middle = statistics.median(pair_rates.values())

        lines.append(
            f"{kind}, the slowest of {len(pair_rates)}: {places(slowest, world.hosts)} with"
            f" {rate_text(rate)} each way (median {rate_text(middle)})"
        )
        if len(pair_rates) > 2 and rate < SLOW_SHARE * middle:
            notes.append("this pair slows all ranks down: try without one of its hosts")
        is_slow = kind == BETWEEN and middle < SLOW_BETWEEN_HOSTS
        if is_slow and world.device.type == "cuda":
            notes.append(
                "hosts are connected at the speed of Ethernet: find the interface with"
                " NCCL_DEBUG=INFO, and choose another with NCCL_IB_HCA or NCCL_SOCKET_IFNAME"
            )

    if lines:
        yield Finding("pairs", Verdict.NOTE if notes else Verdict.OK, "\n".join([*lines, *notes]))
