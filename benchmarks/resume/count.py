"""Count lost, repeated and changed samples in the steps that made the final weights.

The input is the log of `probe.py`. A life is one start of the run, until the run is killed or ends.
A step of a life is part of the final weights unless a later life starts at or before this step. The
steps in the final weights, in their order, are the *lineage*. All counts are sums over plain lists,
so that they can be checked by hand.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """The samples that one rank saw in one step."""

    life: int
    rank: int
    step: int
    samples: tuple[tuple[int, float], ...]
    """The number and augmentation of each sample in this rank's batch."""


@dataclass(frozen=True)
class Counts:
    """The figures in one row of the table."""

    steps: int
    """The number of steps in the lineage."""
    lost: int
    """The number of samples that do not occur in the last epoch of the lineage."""
    repeated: int
    """The number of occurrences of samples in the last epoch, not counting each sample's first
    occurrence."""
    resumed: int
    """The number of steps of the undisturbed run after the first saved state from which a life
    resumed."""
    equal_batches: int
    """The number of `resumed` steps that have the undisturbed run's sample numbers, over all
    ranks."""
    equal_augmentations: int
    """The number of `resumed` steps that have the undisturbed run's sample numbers and
    augmentations."""
    done_again: int
    """The number of steps that were trained but are not part of the final weights."""
    ends_together: bool
    """Whether all ranks of each step are present, and all ranks ended at the same step."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_log(log: Path) -> list[Step]:
    """Return the steps of all lives and ranks.

    If a rank's step number decreases within a life, the library has restored the weights, as after
    a warm-up pass of DDP. Earlier lines with this or a later step number are then not in the
    weights, and are dropped.
    """
    steps = []
    for path in sorted(log.glob("life_*_rank_*.jsonl")):
        _, life, _, rank = path.stem.split("_")
        own: list[Step] = []
        for text in path.read_text().splitlines():
            line = json.loads(text)
            samples = tuple(zip(line["number"], line["augmentation"], strict=True))
            own = own if not own or own[-1].step < line["step"] else _before(own, line["step"])
            own.append(Step(int(life), int(rank), line["step"], samples))
        steps += own
    return steps


def _before(steps: list[Step], number: int) -> list[Step]:
    return [step for step in steps if step.step < number]


def read_end(log: Path, life: int) -> int | None:
    """Return the number of steps in the weights of a life that ended by itself, if the probe wrote
    it."""
    path = log / f"life_{life}_rank_0.end"
    return int(path.read_text()) if path.exists() else None


def lineage(steps: list[Step], end: int | None = None) -> list[list[Step]]:
    """Return, in order, the ranks' parts of each step that is part of the final weights.

    end: the number of steps in the final weights, which is needed if the last life made no step.
    """
    first = {life: min(s.step for s in steps if s.life == life) for life in {s.life for s in steps}}
    kept = [
        s
        for s in steps
        if not any(life > s.life and start <= s.step for life, start in first.items())
    ]
    numbers = sorted({s.step for s in kept if end is None or s.step <= end})
    return [[s for s in kept if s.step == number] for number in numbers]


def count(
    steps: list[Step],
    undisturbed: list[Step],
    ranks: dict[int, int],
    *,
    steps_per_epoch: int,
    epochs: int,
    num_samples: int,
    end: int | None = None,
) -> Counts:
    """Compare a run with the undisturbed run. ranks: the number of ranks of each life. end: the
    result of `read_end` for the last life."""
    line = lineage(steps, end)
    reference = lineage(undisturbed)
    last_epoch = Counter(
        number
        for parts in line[(epochs - 1) * steps_per_epoch :]
        for part in parts
        for number, _ in part.samples
    )

    later = [s.step for s in steps if s.life > 1]
    resumed_from = min(later) - 1 if later else (end or 0) if len(ranks) > 1 else 0
    expected = reference[resumed_from:]
    seen = line[resumed_from:]
    pairs = list(zip(expected, seen, strict=False))

    return Counts(
        steps=len(line),
        lost=num_samples - len(last_epoch),
        repeated=sum(times - 1 for times in last_epoch.values()),
        resumed=len(expected),
        equal_batches=sum(_numbers(a) == _numbers(b) for a, b in pairs),
        equal_augmentations=sum(_samples(a) == _samples(b) for a, b in pairs),
        done_again=len({(s.life, s.step) for s in steps}) - len(line),
        ends_together=all(
            sorted(part.rank for part in parts) == list(range(ranks[parts[0].life]))
            for parts in line
        ),
    )


def _numbers(parts: list[Step]) -> list[int]:
    return sorted(number for part in parts for number, _ in part.samples)


def _samples(parts: list[Step]) -> list[tuple[int, float]]:
    return sorted(sample for part in parts for sample in part.samples)
