"""Compute other projects' learning rate schedules, and compare them with this project's schedules.

A schedule is a function of the time in epochs, so per-step and per-epoch schedules can be compared.
Tests compare the functions with the schedulers of timm and torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from vit.config.schema import ScheduleConfig
from vit.extras.recipes.reading import Findings, Reading, cannot, differs, inert, same
from vit.optim.schedule import lr_at

Rate = Callable[[float], float]
"""A function that returns the learning rate at a time in epochs, starting at 0."""
IMAGENET = 1_281_167
"""The number of training images in ImageNet-1k."""
VISIBLE_GAP = 0.005
"""The share of the peak learning rate from which on a difference is reported."""


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
    """Return the schedule of timm's CosineLRScheduler, which changes once per epoch by default
    (huggingface/pytorch-image-models@aa4b5850:timm/scheduler/cosine_lr.py).

    Args:
        epochs: The length of the cosine schedule.
        warmup_prefix: Start the cosine after the warm-up instead of at epoch 0.
        k_decay: The exponent of the completed share, which changes the shape of the cosine.
        per_step: Change the rate each step.
        late: The delay in epochs, which is 1 for DeiT, whose main.py passes the epoch that has just
            ended.
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


def timm_wsd(
    lr: float,
    epochs: float,
    *,
    decay_epochs: float,
    decay_fn: str = "1-sqrt",
    warmup_epochs: float = 0,
    warmup_lr: float = 0.0,
    min_lr: float = 0.0,
    per_step: bool = False,
) -> Rate:
    """Return the schedule of timm's WSDLRScheduler.

    epochs: the length with the warm-up, but without a cool-down (timm 1.0.31:
    timm/scheduler/wsd_lr.py).
    """
    decays: dict[str, Callable[[float], float]] = {
        "linear": lambda share: 1 - share,
        "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
        "exp": lambda share: (0.1**share - 0.1) / 0.9,
    }

    def rate(time: float) -> float:
        t = time if per_step else math.floor(time)
        if t < warmup_epochs:
            return warmup_lr + t * (lr - warmup_lr) / warmup_epochs
        share = min(max(t - (epochs - decay_epochs), 0) / decay_epochs, 1)
        decay = decays.get(decay_fn, lambda share: 1 - math.sqrt(share))
        return min_lr + (lr - min_lr) * decay(share)

    return rate


def timm_step(lr: float, epoch: float, decay_epochs: float, decay_rate: float) -> float:
    """Return the learning rate of timm's StepLRScheduler after the warm-up
    (timm/scheduler/step_lr.py)."""
    return lr * decay_rate ** (math.floor(epoch) // decay_epochs)


def after_warmup(
    lr: float,
    epochs: float,
    *,
    warmup_epochs: float = 0,
    warmup_lr: float = 0.0,
    min_lr: float = 0.0,
    warmup_changes: Literal["each step", "each epoch", "never"] = "each step",
    linear: bool = False,
    per_epoch: bool = False,
) -> Rate:
    """Return a schedule with a warm-up, followed by a cosine or, with `linear`, a linear decay.

    MAE (facebookresearch/mae@efb2a806:util/lr_sched.py), optax and big_vision use this schedule
    with a linear warm-up per step. torchvision uses it with
    `per_epoch`, which changes the cosine once per epoch, and changes the warm-up each epoch
    (torch's LinearLR) or never (ConstantLR).
    """

    def rate(time: float) -> float:
        epoch = math.floor(time)
        if time < warmup_epochs:
            passed = {"each step": time, "each epoch": epoch, "never": 0}[warmup_changes]
            return warmup_lr + (lr - warmup_lr) * passed / warmup_epochs
        t = epoch if per_epoch else time
        progress = (t - warmup_epochs) / max(epochs - warmup_epochs, 1e-9)
        share = 1 - progress if linear else 0.5 * (1 + math.cos(math.pi * progress))
        return min_lr + (lr - min_lr) * share

    return rate


def our_rate(settings: Mapping[str, Any], steps_per_epoch: int) -> Rate:
    """Return the learning rate schedule for `settings`, which maps dotted keys to values."""
    total = _num_steps(settings, steps_per_epoch)

    def steps(name: str) -> int:
        stated = settings.get(f"schedule.{name}_steps")
        epochs = settings.get(f"schedule.{name}_epochs") or 0
        return round(epochs * steps_per_epoch) if stated is None else int(stated)

    per_epoch = settings.get("schedule.interval") == "epoch"
    decay_fraction = settings.get("schedule.decay_fraction", ScheduleConfig().decay_fraction)

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
            decay_steps=max(round(decay_fraction * total), 1),
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
    """The difference between two schedules, as a fraction of the peak learning rate."""

    largest: float
    at_epoch: float
    """The epoch of the largest difference."""
    mean: float


def distance(theirs: Rate, ours: Rate, peak: float, epochs: float) -> Distance:
    """Compare two schedules at 20 points per epoch, up to 2,000 points in total."""
    count = max(min(round(20 * epochs), 2000), 1)
    times = [epochs * (n + 0.5) / count for n in range(count)]
    apart = [abs(theirs(time) - ours(time)) / peak for time in times]
    largest = max(apart)
    return Distance(largest, times[apart.index(largest)], sum(apart) / count)


def in_percent(share: float) -> str:
    """Format `share` as a percentage with two significant digits."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def map_schedule(
    reading: Reading,
    names: str,
    settings: Mapping[str, Any],
    shape: Callable[..., Rate] = after_warmup,
    *,
    limited: Sequence[str] = ("schedule.warmup_lr", "schedule.min_lr"),
    kind: str = "",
    unused: str = "",
    note: str = "",
    reasons: str = "",
    epochs: float | None = None,
) -> Findings:
    """Map the arguments `names` to `settings`, and compare the learning rates.

    Args:
        reading: The reading, with findings for learning rate, length and batch size.
        names: The arguments.
        settings: Our settings with the numbers of the source project.
        shape: The function for the source project's schedule.
        limited: The settings that are limited to the peak learning rate.
        kind: The name of the source project's schedule, if it has no equivalent.
        unused: The arguments of other schedules.
        note: A text about the schedule `kind`.
        reasons: Why the learning rates differ.
        epochs: The length of the cosine schedule, if it differs from the length of training.
    """
    lr = reading.settings["optim.lr"]
    has_warmup = settings.get("schedule.warmup_epochs") or settings.get("schedule.warmup_steps")
    ours = {
        key: min(value, lr) if key in limited else value
        for key, value in settings.items()
        if has_warmup or key not in ("schedule.warmup_lr", "schedule.warmup_prefix")
    }

    if kind:
        yield cannot(f"{names} {unused}", f"the schedule {kind}: replaced by a cosine{note}", ours)
        return
    if unused:
        yield inert(unused, f"the schedule is {ours.get('schedule.name', 'cosine')}")

    everything = {**reading.settings, **ours}
    for key in ("data.global_batch_size", "optim.lr", "train.epochs", "train.steps"):
        if everything.get(key, 1) <= 0:
            raise ValueError(f"{key} would be {everything[key]:g}: expected a value above 0")

    steps_per_epoch = max(IMAGENET // everything["data.global_batch_size"], 1)
    length = _num_steps(everything, steps_per_epoch) / steps_per_epoch
    theirs = shape(
        lr,
        length if epochs is None else epochs,
        warmup_epochs=settings.get(
            "schedule.warmup_epochs", settings.get("schedule.warmup_steps", 0) / steps_per_epoch
        ),
        warmup_lr=settings["schedule.warmup_lr"],
        min_lr=settings.get("schedule.min_lr", 0.0),
    )
    gap = distance(theirs, our_rate(everything, steps_per_epoch), lr, length)

    if gap.largest < VISIBLE_GAP:
        yield same(names, ours)
    else:
        text = (
            f"the learning rate differs by at most {in_percent(gap.largest)} of its peak (epoch"
            f" {gap.at_epoch:.3g}), {in_percent(gap.mean)} on average"
        )
        yield differs(names, f"{text}: {reasons}" if reasons else text, ours)
