"""Each collective that a run uses, with its result, its rate, and the slowest pair of ranks.

Sizes are those of training: what DDP averages at a time. Rates are those of the link that has most
to carry ("bus bandwidth" of NVIDIA's nccl-tests, doc/PERFORMANCE.md), so they compare over numbers
of ranks. Pairs are tried in rounds, each rank with one other at a time (a round-robin tournament):
within the hosts, then between them, from each rank to those of the same place on other hosts, as
fabrics with a network card for each GPU connect them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vit.distributed.host_differences import places
from vit.distributed.process_group import REDUCED_AT_ONCE, World
from vit.extras.planner.check.findings import Finding, Verdict

REPEATS = 3
"""Timed, after one that makes the connections; the median counts."""
PAIR_BYTES = 2**22
"""Each way."""
MAX_ROUNDS = 32
"""Of pairs, within hosts and between them; more than so many are left out, evenly."""
SLOW_SHARE = 1 / 3
"""Of the median of pairs of its kind: a pair that is slower is told."""
SLOW_BETWEEN_HOSTS = 2e9
"""Bytes per second: GPUs whose hosts exchange less are not on the fabric that was paid for."""
WITHIN = "within a host"
BETWEEN = "between hosts"


def try_collectives(world: World, is_exact: bool) -> dict[str, float]:
    """Return the rate of each collective in bytes per second, by name; every rank calls it.

    is_exact: with those of `train.exact_over_ranks`. Raises ValueError for a wrong result.
    """
    size = world.size
    if size == 1:
        return {}
    length = REDUCED_AT_ONCE // 4 // size * size
    own = torch.full((length,), float(world.rank + 1), device=world.device)
    part = torch.empty(length // size, device=world.device)
    whole = torch.empty_like(own)
    # The numbers of the ranks, each in its part of the tensor.
    by_rank = torch.arange(1.0, size + 1, device=world.device).repeat_interleave(length // size)
    total = size * (size + 1) / 2

    def all_reduce() -> tuple[Tensor, Tensor]:
        summed = own.clone()
        dist.all_reduce(summed)
        return summed, torch.full_like(summed, total)

    def broadcast() -> tuple[Tensor, Tensor]:
        sent = own.clone()
        dist.broadcast(sent, src=0)
        return sent, torch.ones_like(sent)

    def all_gather() -> tuple[Tensor, Tensor]:
        dist.all_gather_into_tensor(whole, own[: length // size])
        return whole, by_rank

    def reduce_scatter() -> tuple[Tensor, Tensor]:
        dist.reduce_scatter_tensor(part, own)
        return part, torch.full_like(part, total)

    def all_to_all() -> tuple[Tensor, Tensor]:
        dist.all_to_all_single(whole, own)
        return whole, by_rank

    share = (size - 1) / size
    tried: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], float]] = {
        "all_reduce": (all_reduce, 2 * share),
        "broadcast": (broadcast, 1.0),
        "all_gather": (all_gather, share),
        "reduce_scatter": (reduce_scatter, share),
    }
    if is_exact:
        tried["all_to_all"] = (all_to_all, share)
    rates = {}
    for name, (collective, carried) in tried.items():
        taken_s = [_time(world, collective, name) for _ in range(1 + REPEATS)]
        rates[name] = carried * 4 * length / statistics.median(taken_s[1:])
    return rates


def _time(world: World, collective: Callable[[], tuple[Tensor, Tensor]], name: str) -> float:
    dist.barrier(device_ids=[world.device.index] if world.device.type == "cuda" else None)
    began_s = _now_s(world.device)
    found, expected = collective()
    taken_s = _now_s(world.device) - began_s
    if not torch.equal(found, expected):
        raise ValueError(
            f"{name} gives wrong numbers: a network card, a cable or a GPU is broken, or the"
            " library is: leave the host out"
        )
    return taken_s


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# --- pairs ----------------------------------------------------------------------------------------


def num_rounds(members: Sequence[int]) -> int:
    """Return how many rounds it takes until each of `members` has met each other."""
    return len(members) - 1 + len(members) % 2


def round_of(members: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Return one of the `num_rounds` in which each of `members` meets each other once, one at a
    time (the circle method of tournaments)."""
    seats: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    # All but the first move on by a seat from round to round.
    first = len(seats) - number
    seats = [seats[0], *seats[first:], *seats[1:first]]
    half = len(seats) // 2
    pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def all_rounds(hosts: Sequence[str]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return the kind and the pairs of each round; hosts: of each rank."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    own = list(by_host.values())
    most = max(map(len, own))
    rails = [[ranks[place] for ranks in own if place < len(ranks)] for place in range(most)]
    found = []
    for kind, groups in ((WITHIN, own), (BETWEEN, rails)):
        groups = [group for group in groups if len(group) > 1]
        longest = max(map(num_rounds, groups), default=0)
        every = -(-longest // MAX_ROUNDS) or 1
        for number in range(0, longest, every):
            playing = [group for group in groups if number < num_rounds(group)]
            pairs = [pair for group in playing for pair in round_of(group, number)]
            found.append((kind, pairs))
    return found


def try_pairs(world: World) -> list[list[Any]]:
    """Return kind, partner and bytes per second of each pair that this rank was in; every rank
    calls it."""
    found: list[list[Any]] = []
    if world.size == 1:
        return found
    sent = torch.zeros(PAIR_BYTES // 4, device=world.device)
    received = torch.empty_like(sent)
    for kind, pairs in all_rounds(world.hosts):
        partners = dict([*pairs, *((b, a) for a, b in pairs)])
        partner = partners.get(world.rank)
        if partner is None:
            continue
        taken_s = []
        for _ in range(1 + REPEATS):
            began_s = _now_s(world.device)
            operations = [
                dist.P2POp(dist.isend, sent, partner),
                dist.P2POp(dist.irecv, received, partner),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            taken_s.append(_now_s(world.device) - began_s)
        # The first makes the connection, and waits for a partner that comes later.
        found.append([kind, partner, PAIR_BYTES / statistics.median(taken_s[1:])])
    return found


# --- what they amount to --------------------------------------------------------------------------


def judge_collectives(found: dict[int, dict[str, float]], world: World) -> Iterator[Finding]:
    """Yield the rates, of the slowest rank."""
    if world.size == 1:
        yield Finding("collectives", Verdict.OK, "one rank: there is nothing to send")
        return
    slowest = {name: min(each[name] for each in found.values()) for name in found[0]}
    rates = ", ".join(f"{name} {rate_text(rate)}" for name, rate in slowest.items())
    said = f"right on all {world.size} ranks: {rates} ({REDUCED_AT_ONCE >> 20} MiB)"
    yield Finding("collectives", Verdict.OK, said)


def judge_pairs(found: dict[int, list[list[Any]]], world: World) -> Iterator[Finding]:
    """Yield the slowest pair of each kind; a note where it is much slower than the others."""
    pairs: dict[str, dict[tuple[int, int], list[float]]] = {}
    for rank, own in found.items():
        for kind, partner, rate in own:
            a, b = sorted((rank, partner))
            pairs.setdefault(kind, {}).setdefault((a, b), []).append(rate)
    lines = []
    notes = []
    for kind, rates in pairs.items():
        of_pair = {pair: max(ends) for pair, ends in rates.items()}
        slowest = min(of_pair, key=of_pair.__getitem__)
        rate = of_pair[slowest]
        middle = statistics.median(of_pair.values())
        lines.append(
            f"{kind}, the slowest of {len(of_pair)}: {places(slowest, world.hosts)} with"
            f" {rate_text(rate)} each way (median {rate_text(middle)})"
        )
        if len(of_pair) > 2 and rate < SLOW_SHARE * middle:
            notes.append("this pair holds all others up: try without one of its hosts")
        if kind == BETWEEN and world.device.type == "cuda" and middle < SLOW_BETWEEN_HOSTS:
            notes.append(
                "hosts talk as over Ethernet: NCCL_DEBUG=INFO says by which interface;"
                " NCCL_IB_HCA and NCCL_SOCKET_IFNAME choose it"
            )
    if lines:
        verdict = Verdict.NOTE if notes else Verdict.OK
        yield Finding("pairs", verdict, "\n".join([*lines, *notes]))


def rate_text(bytes_per_s: float) -> str:
    """Return a rate with three digits."""
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.3g} GB/s"
    return f"{bytes_per_s / 1e6:.3g} MB/s"
