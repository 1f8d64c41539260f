"""How long training waits for data, and what to do about it.

Ranks go on together, so each step waits for the slowest of them. The sums over an interval name the
rank that waited longest, and the sentence for people its host, what its loader spends its time on,
and a remedy.
"""

from __future__ import annotations

from typing import NamedTuple

from vit.data.stages import Stage, Tally, add_up
from vit.ranks.distributed import World, local_world_size
from vit.system.host import num_cores

NOTABLE_WAIT_SHARE = 0.1
"""Share of an interval spent on waiting for data above which it is reported, and by which it must
change to be reported again."""
NOTABLE_STAGE_SHARE = 0.05
"""Share of the loader's work above which a stage is named."""
UNEVEN = 1.5
"""A rank that waited this many times as long as the average rank is named."""


class Waiting(NamedTuple):
    """How long ranks waited for their batches in an interval, in seconds."""

    waited_s: float
    """Sum over the steps of the slowest rank's wait."""
    max_s: float
    """Total of the rank that waited longest."""
    mean_s: float
    """Total of a rank, on average."""
    rank: int
    """The one that waited longest."""

    @property
    def is_uneven(self) -> bool:
        """Whether the other ranks wait for one rank, or for a few."""
        return self.max_s > UNEVEN * self.mean_s


def sum_up(waits_s: list[tuple[float, ...]]) -> Waiting:
    """Sum up `waits_s`: for each step, how long each rank waited for its batch."""
    totals = [sum(rank) for rank in zip(*waits_s, strict=True)]
    longest = max(totals)
    mean_s = sum(totals) / len(totals)
    return Waiting(sum(map(max, waits_s)), longest, mean_s, totals.index(longest))


def advice(
    share: float,
    waiting: Waiting,
    loaders: list[Tally],
    images_per_s: float | None,
    num_workers: int,
    world: World,
) -> str:
    """Return the sentence about training that spends `share` of its time on waiting for data.

    loaders: what the loader of each rank did, [] if that is not known. images_per_s: what the
    loaders of all ranks can make, if that is known.
    """
    waited = f"data-bound: {share:.0%} of the time was spent on waiting for images"
    if waiting.is_uneven:
        work = _work(loaders[waiting.rank]) if loaders else ""
        return (
            f"{waited} of rank {waiting.rank} on {world.host_of(waiting.rank)}"
            f" ({waiting.max_s:.1f} s, ranks on average {waiting.mean_s:.1f} s){work}; look at its"
            " disk, its network and what else runs there"
        )
    rate = ""
    if images_per_s is not None:
        rate = f"; the loader makes {images_per_s:.0f} images/s"
    work = _work(add_up(loaders)) if loaders else ""
    cores = num_cores()
    ranks = local_world_size()
    remedy = f"all {cores} core(s) are busy: cheaper images help (docs/data.md), or more cores"
    if max(num_workers, 1) * ranks < cores:
        remedy = (
            f"raise data.num_workers ({num_workers} for each of {ranks} rank(s), {cores} cores)"
        )
    return f"{waited}{rate}{work}; {remedy}"


def _work(tally: Tally) -> str:
    """Return what loaders spent their time on: "; its time: decode 71%, read 20%, 3 retries"."""
    stages = [stage.name.lower() for stage in Stage if stage != Stage.IDLE]
    busy_s = max(sum(tally[f"{name}_s"] for name in stages), 1e-9)
    shares = sorted(((tally[f"{name}_s"] / busy_s, name) for name in stages), reverse=True)
    parts = [f"{name} {share:.0%}" for share, name in shares if share >= NOTABLE_STAGE_SHARE]
    if tally["retries"]:
        parts.append(f"{tally['retries']:.0f} retries")
    return f"; its time: {', '.join(parts)}" if parts else ""
