"""Learning rates of other programs over the epochs, and how far ours is from them.

A rate is a function of the time in epochs, so that programs that change it per step and per epoch
can be compared. Those of timm and torch are tested against the schedulers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vit.extras.recipes.reading import Reading
from vit.optim.schedule import lr_at

Rate = Callable[[float], float]
"""Time in epochs, from 0 on -> learning rate."""
IMAGENET = 1_281_167
"""Images of the training split that recipes are written for."""


def timm_cosine(
    lr: float,
    epochs: float,
    *,
    warmup_epochs: float = 0,
    warmup_lr: float = 0.0,
    min_lr: float = 0.0,
    warmup_prefix: bool = False,
    k_decay: float = 1.0,
    per_step: bool = False,
    late: int = 0,
) -> Rate:
    """timm's CosineLRScheduler, by default changed at the end of an epoch.

    warmup_prefix: the cosine begins after the warm-up, not under it. late: epochs by which it is
    behind, 1 in DeiT, whose main.py passes the epoch that has ended.
    (huggingface/pytorch-image-models@aa4b5850:timm/scheduler/cosine_lr.py)
    """

    def rate(time: float) -> float:
        t = time if per_step else max(math.floor(time) - late, 0)
        if t < warmup_epochs:
            return warmup_lr + t * (lr - warmup_lr) / warmup_epochs
        if warmup_prefix:
            t -= warmup_epochs
        if t >= epochs:
            return min_lr
        return min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(math.pi * (t / epochs) ** k_decay))

    return rate


def timm_step(
    lr: float,
    decay_epochs: float,
    decay_rate: float,
    *,
    warmup_epochs: float = 0,
    warmup_lr: float = 0.0,
) -> Rate:
    """timm's StepLRScheduler (the same repository, timm/scheduler/step_lr.py), per epoch."""

    def rate(time: float) -> float:
        t = math.floor(time)
        if t < warmup_epochs:
            return warmup_lr + t * (lr - warmup_lr) / warmup_epochs
        return lr * decay_rate ** (t // decay_epochs)

    return rate


def torchvision_cosine(
    lr: float,
    epochs: int,
    *,
    warmup_epochs: int = 0,
    warmup_factor: float = 1.0,
    min_lr: float = 0.0,
    linear: bool = True,
) -> Rate:
    """torch's LinearLR (or ConstantLR) and CosineAnnealingLR, one after the other, per epoch.

    warmup_factor: of the rate at the start.
    """

    def rate(time: float) -> float:
        t = math.floor(time)
        if t < warmup_epochs:
            share = t / warmup_epochs if linear else 0.0
            return lr * (warmup_factor + (1 - warmup_factor) * share)
        progress = (t - warmup_epochs) / max(epochs - warmup_epochs, 1)
        return min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(math.pi * progress))

    return rate


def after_warmup(
    lr: float,
    epochs: float,
    *,
    warmup_epochs: float = 0,
    warmup_lr: float = 0.0,
    min_lr: float = 0.0,
    linear: bool = False,
    per_epoch: bool = False,
) -> Rate:
    """A linear warm-up per step, then a cosine (or a line) over the rest.

    MAE's (facebookresearch/mae@efb2a806:util/lr_sched.py), optax's, big_vision's and, with a cosine
    that changes `per_epoch`, OpenMMLab's.
    """

    def rate(time: float) -> float:
        if time < warmup_epochs:
            return warmup_lr + (lr - warmup_lr) * time / warmup_epochs
        t = math.floor(time) if per_epoch else time
        progress = (t - warmup_epochs) / max(epochs - warmup_epochs, 1e-9)
        share = 1 - progress if linear else 0.5 * (1 + math.cos(math.pi * progress))
        return min_lr + (lr - min_lr) * share

    return rate


def our_rate(settings: Mapping[str, Any], steps_per_epoch: int) -> Rate:
    """The rate of a config with `settings` (dotted key -> value)."""
    total = _num_steps(settings, steps_per_epoch)

    def steps(name: str) -> int:
        given = settings.get(f"schedule.{name}_steps")
        epochs = settings.get(f"schedule.{name}_epochs") or 0
        return round(epochs * steps_per_epoch) if given is None else int(given)

    per_epoch = settings.get("schedule.interval") == "epoch"

    def rate(time: float) -> float:
        return lr_at(
            min(int(time * steps_per_epoch), total - 1),
            peak_lr=settings["optim.lr"],
            total_steps=total,
            warmup_steps=steps("warmup"),
            name=settings.get("schedule.name", "cosine"),
            min_lr=settings.get("schedule.min_lr", 0.0),
            warmup_lr=settings.get("schedule.warmup_lr"),
            warmup_prefix=settings.get("schedule.warmup_prefix", True),
            decay_steps=steps("decay"),
            decay_form=settings.get("schedule.decay_form", "1-sqrt"),
            cooldown_steps=steps("cooldown"),
            interval_steps=steps_per_epoch if per_epoch else 1,
        )

    return rate


def _num_steps(settings: Mapping[str, Any], steps_per_epoch: int) -> int:
    if settings.get("train.steps"):
        return int(settings["train.steps"])
    return round(settings["train.epochs"] * steps_per_epoch)


class Distance(NamedTuple):
    """How far two rates are from each other, as shares of the peak."""

    largest: float
    at_epoch: float
    """Where it is largest."""
    mean: float


def distance(theirs: Rate, ours: Rate, peak: float, epochs: float) -> Distance:
    """Compare two rates at 20 times in each epoch, at most 2,000."""
    count = max(min(round(20 * epochs), 2000), 1)
    times = [epochs * (n + 0.5) / count for n in range(count)]
    apart = [abs(theirs(time) - ours(time)) / peak for time in times]
    largest = max(apart)
    return Distance(largest, times[apart.index(largest)], sum(apart) / count)


def in_percent(share: float) -> str:
    """`share` in words, with two digits or without decimals."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def with_effect(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what has no effect without a warm-up."""
    if settings.get("schedule.warmup_epochs") or settings.get("schedule.warmup_steps"):
        return dict(settings)
    without = ("schedule.warmup_lr", "schedule.warmup_prefix")
    return {key: value for key, value in settings.items() if key not in without}


def say_rate(
    reading: Reading, names: str, theirs: Rate, settings: Mapping[str, Any], reasons: str
) -> None:
    """Account for the arguments `names` of a schedule: how far `settings` are from `theirs`.

    The rate, the epochs and the batch must have been said before. reasons: what differs, in words.
    """
    settings = with_effect(settings)
    known = {**reading.settings, **settings}
    for key in ("data.global_batch_size", "optim.lr", "train.epochs", "train.steps"):
        if known.get(key, 1) <= 0:
            raise ValueError(f"{key} follows as {known[key]:g}: expected more than 0")
    steps_per_epoch = max(IMAGENET // known["data.global_batch_size"], 1)
    epochs = _num_steps(known, steps_per_epoch) / steps_per_epoch
    found = distance(theirs, our_rate(known, steps_per_epoch), known["optim.lr"], epochs)
    if found.largest < 0.005:
        reading.same(names, settings)
        return
    reading.differs(
        names,
        f"the rate is at most {in_percent(found.largest)} of its peak from theirs (epoch"
        f" {found.at_epoch:.3g}), {in_percent(found.mean)} on average"
        + (reasons and f": {reasons}"),
        settings,
    )
