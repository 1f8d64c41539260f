"""Compute the plan of a run: batch sizes, steps and other numbers.

The recipe (global batch, epochs) comes from the config, the number of images from the data set, and
the number of ranks from torchrun. The plan is computed before anything expensive starts. If a batch
cannot be divided evenly, the error lists batch sizes that work.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vit.config.schema import AugmentConfig, Config, DataConfig, GuardConfig, ScheduleConfig
from vit.data.augment.draw import mixes, partners
from vit.data.order import Order, Share, divisors, make_order, possible_lanes
from vit.distributed.world import leaves_of
from vit.optim.schedule import lr_at, weight_decay_at
from vit.training.step_result import READ_LATE


@dataclass(frozen=True)
class Plan:
    """The numbers computed from the config, the data and the number of ranks."""

    world_size: int
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    steps_per_epoch: int
    dropped_per_epoch: int
    distinct_images_per_epoch: int
    """The number of different images in an epoch. An epoch has more rows if `order.aug_repeats` or
    the sources' weights repeat images."""
    total_steps: int
    warmup_steps: int
    eval_every_steps: int
    log_every_steps: int
    decay_steps: int = 0
    """The number of decay steps if `schedule.name` is wsd."""
    cooldown_steps: int = 0
    """The number of cooldown steps. `total_steps` includes cooldown and warmup."""

    @property
    def num_leaves(self) -> int:
        """The number of micro-batches in the global batch."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def rank_batch_size(self) -> int:
        """The largest number of rows on a rank. The ranks' numbers of rows differ only with
        `train.exact_over_ranks`."""
        return math.ceil(self.num_leaves / self.world_size) * self.micro_batch_size

    def rows_of(self, rank: int) -> range:
        """Return the rows of the global batch that a rank trains on. The rows form whole
        micro-batches."""
        leaves = leaves_of(rank, self.world_size, self.num_leaves)
        return range(leaves.start * self.micro_batch_size, leaves.stop * self.micro_batch_size)

    def evaluates_at(self, step: int) -> bool:
        """Return whether an evaluation is due: every `eval_every_steps` steps, and at the end.

        A run shorter than `eval_every_steps` has no final evaluation, so that a two-step trial
        stays cheap.
        """
        at_end = step == self.total_steps and self.total_steps >= self.eval_every_steps
        return at_end or (step > 0 and step % self.eval_every_steps == 0)


def micro_batch_sizes(augment: AugmentConfig, rank_batch_size: int) -> list[int]:
    """Return the micro-batch sizes that divide a rank's batch, in ascending order."""
    unit = augment.mix_group_size if mixes(augment) else 1
    return [size for size in divisors(rank_batch_size) if size % unit == 0]


def divide_batch(
    data: DataConfig, augment: AugmentConfig, world_size: int, is_exact: bool = False
) -> tuple[int, int]:
    """Return (micro_batch_size, accumulation_steps) of each rank.

    is_exact: `train.exact_over_ranks`. Raises ValueError, listing sizes that work, if the batch
    cannot be divided evenly.
    """
    if is_exact:
        return _divide_into_leaves(data, augment, world_size)

    unit = augment.mix_group_size if mixes(augment) else 1
    if data.global_batch_size % (world_size * unit):
        raise ValueError(_indivisible(data.global_batch_size, augment, world_size, unit))

    rank_batch = data.global_batch_size // world_size
    limit = data.micro_batch_size or rank_batch
    sizes = micro_batch_sizes(augment, rank_batch)
    fitting = [size for size in sizes if size <= limit]
    if not fitting:
        raise ValueError(
            f"data.micro_batch_size={limit} is below"
            f" augment.mix_group_size={augment.mix_group_size}: use one of {sizes}"
        )
    return fitting[-1], rank_batch // fitting[-1]


def _indivisible(batch: int, augment: AugmentConfig, world_size: int, unit: int) -> str:
    """Return the message for a batch that is not a multiple of the number of ranks times `unit`
    rows."""
    step = world_size * unit
    near = sorted({max(batch // step, 1) * step, (batch // step + 1) * step})
    needs = f"{world_size} ranks"
    if unit > 1:
        needs += f" times augment.mix_group_size={augment.mix_group_size}"

    ranks = [n for n in divisors(batch) if batch % (n * unit) == 0]
    groups = _group_sizes(augment, batch // world_size) if batch % world_size == 0 else []
    if ranks:
        other = f", or a number of ranks from {ranks}"
    else:
        other = f", or augment.mix_group_size from {groups}" if groups else ""
    return (
        f"data.global_batch_size={batch} is not a multiple of {needs}: use"
        f" {' or '.join(map(str, near))}{other}"
    )


def _group_sizes(augment: AugmentConfig, rank_batch_size: int) -> list[int]:
    """Return the values of `augment.mix_group_size` that divide a rank's batch."""
    unit = 2 if augment.mixup_mode == "pair" else 1
    return [size for size in divisors(rank_batch_size) if size > 1 and size % unit == 0]


def _divide_into_leaves(
    data: DataConfig, augment: AugmentConfig, world_size: int
) -> tuple[int, int]:
    """Divide the batch like `divide_batch`, but choose a micro-batch size that does not depend on
    the number of ranks."""
    batch = data.global_batch_size
    sizes = micro_batch_sizes(augment, batch)
    fitting = [size for size in sizes if batch // size >= world_size]

    if not sizes:
        groups = [size for size in _group_sizes(augment, batch) if batch // size >= world_size]
        raise ValueError(
            f"augment.mix_group_size={augment.mix_group_size} does not divide"
            f" data.global_batch_size={batch}: use"
            f" {f'one of {groups}' if groups else 'a larger batch'}"
        )
    if not fitting:
        raise ValueError(
            f"data.global_batch_size={batch} has at most {batch // sizes[0]} micro-batches for"
            f" {world_size} ranks: use fewer ranks"
        )

    limit = data.micro_batch_size
    if limit is None:
        raise ValueError(
            "train.exact_over_ranks needs a data.micro_batch_size that works on any number of"
            f" ranks: for world size {world_size}, set one of {fitting}, or a smaller one for more"
            " ranks"
        )

    micro = max((size for size in sizes if size <= limit), default=0)
    if micro not in fitting:
        if micro:
            problem = f"makes {batch // micro} micro-batches"
        else:
            problem = "is smaller than a group of images that are mixed"
        raise ValueError(
            f"data.micro_batch_size={limit} {problem}, for {world_size} ranks with"
            f" train.exact_over_ranks: choose one of {fitting}"
        )
    return micro, math.ceil(batch // micro / world_size)


def create_order(config: Config, num_samples: int, shares: tuple[Share, ...] = ()) -> Order:
    """Create the order of `num_samples` training images. shares: as in `Order`.

    Raises ValueError, listing sizes that work, if the batch cannot be divided evenly or if copies
    of an image would be mixed with each other.
    """
    data = config.data
    augment = config.augment
    settings = config.order

    make = partial(
        make_order,
        num_samples,
        data.global_batch_size,
        config.train.seed,
        block_samples=settings.block_samples,
        aug_repeats=settings.aug_repeats,
        aug_repeats_form=settings.aug_repeats_form,
        shares=shares,
    )
    order = make(num_lanes=settings.num_lanes)
    if not mixes(augment) or not _copies_mix(order, augment):
        return order

    choices = possible_lanes(
        data.global_batch_size, settings.aug_repeats, settings.aug_repeats_form
    )
    lanes = [number for number in choices if not _copies_mix(make(num_lanes=number), augment)]
    remedy = (
        f"choose order.num_lanes from {lanes}, or another"
        if lanes
        else "choose a larger batch, or another"
    )

    raise ValueError(
        f"order.aug_repeats={settings.aug_repeats}: with order.num_lanes={order.num_lanes} copies"
        f" of an image would mix with each other in groups of {augment.mix_group_size}: {remedy}"
        " augment.mix_group_size"
    )


def _copies_mix(order: Order, augment: AugmentConfig) -> bool:
    """Return whether any row is mixed with a copy of the same image.

    Checking one batch per copy is enough, because the positions of copies then repeat.
    """
    batches = (
        order.batch(position)
        for position in range(order.aug_repeats if order.aug_repeats > 1 else 0)
    )
    return any(bool((ids == ids[partners(augment, len(ids))]).any()) for ids in batches)


def _check_guard(guard: GuardConfig, total_steps: int) -> None:
    """Raise ValueError if the run is too short for spike limits."""
    first_limit = guard.window_steps + READ_LATE
    if guard.on_spike != "none" and total_steps < first_limit:
        raise ValueError(
            f"guard.on_spike={guard.on_spike} has no effect in a run of {total_steps:,} steps:"
            f" with guard.window_steps={guard.window_steps}, the first limit applies at step"
            f" {first_limit:,}: lower guard.window_steps, lengthen the run, or set"
            " guard.on_spike=none"
        )


def make_plan(
    config: Config, num_samples: int, world_size: int, shares: tuple[Share, ...] = ()
) -> tuple[Plan, Order]:
    """Return the plan and the image order of a run with `num_samples` training images on
    `world_size` ranks.

    shares: as in `Order`. Raises ValueError, listing sizes that work, if the batch cannot be
    divided evenly.
    """
    micro_batch_size, accumulation_steps = divide_batch(
        config.data, config.augment, world_size, config.train.exact_over_ranks
    )
    order = create_order(config, num_samples, shares)

    def steps(count: int | None, epochs: float | None, default: int) -> int:
        """Return a length in steps, which the config gives as `count` or as `epochs`."""
        if count is not None:
            return count
        return default if epochs is None else round(epochs * order.steps_per_epoch)

    total = max(steps(config.train.steps, config.train.epochs, 0), 1)
    schedule = config.schedule
    plan = Plan(
        world_size=world_size,
        global_batch_size=config.data.global_batch_size,
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
        steps_per_epoch=order.steps_per_epoch,
        dropped_per_epoch=order.dropped_per_epoch,
        distinct_images_per_epoch=order.distinct_per_epoch,
        total_steps=total,
        warmup_steps=steps(schedule.warmup_steps, schedule.warmup_epochs, 0),
        eval_every_steps=max(steps(config.eval.every_steps, config.eval.every_epochs, total), 1),
        # Log a line at least every 50 steps, and at least about 20 lines in a short run.
        log_every_steps=config.log.every_steps or max(min(50, total // 20), 1),
        decay_steps=max(round(schedule.decay_fraction * total), 1) if schedule.name == "wsd" else 0,
        cooldown_steps=steps(None, schedule.cooldown_epochs, 0),
    )

    _check_guard(config.guard, total)
    _check_schedule(schedule, plan)
    return plan, order


def _check_schedule(schedule: ScheduleConfig, plan: Plan) -> None:
    """Raise ValueError if the stages of image sizes or the parts of the schedule do not fit into
    the run."""
    total = plan.total_steps
    late = [
        stage.until_epoch
        for stage in schedule.image_sizes
        if stage.until_epoch * plan.steps_per_epoch >= total
    ]
    if late:
        raise ValueError(
            f"schedule.image_sizes: until_epoch={late[0]} is step"
            f" {late[0] * plan.steps_per_epoch:,}, but the run ends at step {total:,} with"
            " model.image_size: end this stage earlier, or lengthen the run"
        )

    parts = {
        "warm-up": plan.warmup_steps,
        "decay": plan.decay_steps,
        "cool-down": plan.cooldown_steps,
    }
    # A warmup that is longer than the run is allowed. It only causes a note in the log.
    if plan.decay_steps + plan.cooldown_steps and sum(parts.values()) > total:
        listed = ", ".join(f"{name} {length:,}" for name, length in parts.items() if length)
        raise ValueError(
            f"the parts of the schedule ({listed} steps) exceed the {total:,} steps of the run:"
            " shorten them, or lengthen the run"
        )


def rates(
    config: Config, plan: Plan
) -> tuple[Callable[[int], float], Callable[[int], float | None]]:
    """Return the learning rate and weight decay as functions of the step. The function of the
    weight decay returns None if the weight decay is constant."""
    schedule = config.schedule
    learning_rate = partial(
        lr_at,
        peak_lr=config.optim.lr,
        total_steps=plan.total_steps,
        warmup_steps=plan.warmup_steps,
        name=schedule.name,
        min_lr=schedule.min_lr,
        warmup_lr=schedule.warmup_lr,
        warmup_prefix=schedule.warmup_prefix,
        decay_steps=plan.decay_steps,
        decay_form=schedule.decay_form,
        cooldown_steps=plan.cooldown_steps,
        interval_steps=plan.steps_per_epoch if schedule.interval == "epoch" else 1,
    )

    if schedule.final_weight_decay is None:
        return learning_rate, lambda step: None
    return learning_rate, partial(
        weight_decay_at,
        first=config.optim.weight_decay,
        final=schedule.final_weight_decay,
        total_steps=plan.total_steps,
    )
