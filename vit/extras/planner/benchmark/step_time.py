"""The training step under a clock: how long, how long each part, how much memory, how much fits.

    config -> `create_step` -> the `TrainStep` of training -> `time_step`, `all_reduce_times`, ...

Every function takes that step and batches that are ready
(`vit.extras.planner.benchmark.synthetic`), and goes on from wherever the weights are: what they are
changes no time. Under torchrun all ranks call the same functions; rank 0 decides what depends on a
clock.
"""

from __future__ import annotations

import itertools
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vit.config.schema import Config
from vit.create_step import create_train_step
from vit.data.batches import Batch
from vit.distributed.exit import out_of_memory
from vit.distributed.process_group import REDUCED_AT_ONCE, World
from vit.extras.compose import create_reduce_of
from vit.step import TrainStep
from vit.system.device_memory import release_memory
from vit.training.freeze import create_trained_model
from vit.training.loss import create_loss
from vit.training.objective import Objective, Supervised
from vit.training.plan import Plan
from vit.training.reduce import DataParallel
from vit.training.step_result import StepPhase, StepResult
from vit.training.teacher import Distilled, Teacher, find_teacher

WARM_UP_STEPS = 2
"""The first one allocates, loads kernels and compiles; the second one shows how long a step is."""
LEAST_STEPS = 3
OnStep = Callable[[int, int], None]
"""Called with the steps done and their number, at first with 0."""


@dataclass(frozen=True)
class StepTimes:
    """How long steps took."""

    step_s: float
    """Median."""
    fastest_s: float
    slowest_s: float
    total_s: float
    """Of all steps."""
    parts_s: dict[StepPhase, float]
    """Medians. On a GPU of its own stream, by events."""
    num_steps: int
    global_batch_size: int

    @property
    def images_per_s(self) -> float:
        """Images of all ranks in a second, by the median step."""
        return self.global_batch_size / self.step_s


@dataclass(frozen=True)
class AllReduce:
    """What averaging the gradients over the ranks takes in a step."""

    alone_s: float
    """With nothing else to do."""
    exposed_s: float
    """By how much a step is longer with it than without: what the backward pass does not hide."""
    num_bytes: int


def create_step(config: Config, plan: Plan, num_classes: int, world: World) -> TrainStep:
    """Create the training step of `config`, with fresh weights in training mode.

    A teacher has fresh weights, too: what it answers costs no time.
    """
    torch.manual_seed(config.train.seed)
    model = create_trained_model(config, num_classes)
    # Their values change no time.
    weights = None if config.loss.class_weights is None else (1.0,) * num_classes
    loss = create_loss(config.loss, weights, world.device)
    objective: Objective = Supervised(loss)
    if (teacher := find_teacher(config, num_classes)) is not None:
        of_teacher, settings = teacher
        objective = Distilled(loss, Teacher(of_teacher.to(world.device), settings, config))
    create_reduce = create_reduce_of(config)
    step = create_train_step(config, plan, num_classes, model, world, objective, create_reduce)
    step.model.train()
    return step


def time_step(
    train_step: TrainStep,
    batches: Iterable[Batch],
    *,
    num_steps: int | None = None,
    seconds: float = 10.0,
    on_step: OnStep = lambda done, total: None,
) -> StepTimes:
    """Warm up, then time `num_steps` steps, or as many as `seconds` allow, three at least.

    batches: repeated, and augmented each time; an iterator, such as a loader, has done that.
    """
    world = train_step.world
    stream = batches if isinstance(batches, Iterator) else augmented(train_step, batches)
    first = next(stream)
    num_rows = len(first.labels)
    *_, last_s = run_steps(train_step, itertools.chain([first], stream), WARM_UP_STEPS)
    if num_steps is None:
        fitting = int(seconds / last_s)
        num_steps = world.broadcast_from_main(lambda: max(fitting, LEAST_STEPS))
    clock = PartClock(world.device)
    before = train_step.mark
    train_step.mark = clock.mark
    try:
        taken_s = run_steps(train_step, stream, num_steps, on_step, clock)
    finally:
        train_step.mark = before
    parts = clock.steps()
    return StepTimes(
        step_s=statistics.median(taken_s),
        fastest_s=min(taken_s),
        slowest_s=max(taken_s),
        total_s=sum(taken_s),
        parts_s={
            part: statistics.median(each.get(part, 0.0) for each in parts) for part in StepPhase
        },
        num_steps=num_steps,
        global_batch_size=num_rows * world.size,
    )


def run_steps(
    train_step: TrainStep,
    batches: Iterable[Batch],
    num_steps: int,
    on_step: OnStep = lambda done, total: None,
    clock: PartClock | None = None,
) -> list[float]:
    """Do `num_steps` steps as training does them, and return the seconds of each."""
    on_gpu = train_step.world.device.type == "cuda"
    stream = batches if isinstance(batches, Iterator) else augmented(train_step, batches)
    on_step(0, num_steps)
    ends_s = [_now_s(train_step.world.device)]
    pending: StepResult | None = None

    def finish(result: StepResult) -> None:
        result.read()
        ends_s.append(time.perf_counter())
        on_step(len(ends_s) - 1, num_steps)

    for step in range(num_steps):
        result = train_step(next(stream), step)
        if clock is not None:
            clock.mark(None)
        if pending is not None:  # read one step late: the GPU goes on meanwhile
            finish(pending)
            pending = None
        if on_gpu:
            pending = result
        else:
            finish(result)
    if pending is not None:
        finish(pending)
    return [end - begin for begin, end in pairwise(ends_s)]


def augmented(train_step: TrainStep, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Repeat `batches`, which lie as they came, and augment each when its step is due.

    So both have their time, one after the other. In training the loader's stream augments the next
    batch while the GPU computes.
    """
    for batch in itertools.cycle(batches):
        train_step.mark(StepPhase.CHANGE)
        yield train_step.augment.change_batch(batch)


class PartClock:
    """Notes when each part of a step begins; `mark` is for `TrainStep.mark`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[tuple[StepPhase | None, Any]] = []

    def mark(self, part: StepPhase | None) -> None:
        """Let `part` begin, for the work that is queued from now; None: the step has ended."""
        moment: Any = time.perf_counter()
        if self._device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._marks.append((part, moment))

    def steps(self) -> list[dict[StepPhase, float]]:
        """Return the seconds of the parts of each step, once the device has done them."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
        steps: list[dict[StepPhase, float]] = []
        seconds: dict[StepPhase, float] = {}
        for (part, begin), (following, end) in pairwise(self._marks):
            if part is not None:
                taken_s = begin.elapsed_time(end) / 1e3 if on_gpu else end - begin
                seconds[part] = seconds.get(part, 0.0) + taken_s
            if following is None:
                steps.append(seconds)
                seconds = {}
        return steps


def all_reduce_times(
    train_step: TrainStep, batches: Iterable[Batch], num_steps: int = LEAST_STEPS
) -> AllReduce | None:
    """Return what averaging gradients takes; None in a world of one."""
    world = train_step.world
    if world.size == 1:
        return None
    num_bytes = sum(parameter.nbytes for parameter in train_step.parameters)
    sizes = [REDUCED_AT_ONCE] * (num_bytes // REDUCED_AT_ONCE) + [num_bytes % REDUCED_AT_ONCE]
    buckets = [torch.zeros(max(size // 4, 1), device=world.device) for size in sizes]
    alone_s = []
    for _ in range(WARM_UP_STEPS + num_steps):
        world.barrier()
        began_s = _now_s(world.device)
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        alone_s.append(_now_s(world.device) - began_s)
    with_s = statistics.median(run_steps(train_step, batches, num_steps))
    reduce = train_step.reduce
    train_step.reduce = DataParallel(train_step.model, world)  # without DDP nothing is averaged
    try:
        run_steps(train_step, batches, 1)
        without_s = statistics.median(run_steps(train_step, batches, num_steps))
    finally:
        train_step.reduce = reduce
    exposed_s = max(with_s - without_s, 0.0)
    return AllReduce(statistics.median(alone_s[WARM_UP_STEPS:]), exposed_s, num_bytes)


def largest_micro_batch(
    train_step: TrainStep,
    sizes: Sequence[int],
    make_batch: Callable[[int], Batch],
    first: int,
    beside_bytes: int = 0,
    on_try: Callable[[int], None] = lambda size: None,
) -> int:
    """Return the largest of `sizes` whose step fits into memory on every rank; 0 for none.

    sizes: ascending. make_batch: rows -> a batch on the device. first: where to begin, such as the
    planner's number: the sizes next to it are tried, one after the other. beside_bytes: see
    `fits_in_memory`. on_try: called with each.
    """
    fits = -1
    too_large = len(sizes)
    tried = min(bisect_left(sizes, first), len(sizes) - 1)
    while too_large - fits > 1:
        on_try(sizes[tried])
        # Without DDP: a rank that runs out of memory would leave the others in an all-reduce.
        fits_here = fits_in_memory(train_step, sizes[tried], make_batch, beside_bytes)
        if train_step.world.any_rank(not fits_here):
            too_large = tried
            tried -= 1
        else:
            fits = tried
            tried += 1
    return sizes[fits] if fits >= 0 else 0


def fits_in_memory(
    train_step: TrainStep,
    micro_batch_size: int,
    make_batch: Callable[[int], Batch],
    beside_bytes: int = 0,
) -> bool:
    """Return whether this rank's device has the memory for steps of two passes of that size.

    Two, because gradients exist when the second one begins, as they always do under DDP.
    beside_bytes: what training needs at the same time, as for the next batch's augmentation.
    """
    beside: Tensor | None = None
    before = (train_step.reduce, train_step.micro_batch_size)
    alone = replace(train_step.world, rank=0, size=1)
    train_step.reduce = DataParallel(train_step.model, alone)
    train_step.micro_batch_size = micro_batch_size
    fits = True
    try:
        beside = torch.empty(beside_bytes, dtype=torch.uint8, device=train_step.world.device)
        run_steps(train_step, [make_batch(2 * micro_batch_size)], WARM_UP_STEPS)
    except Exception as error:
        if not out_of_memory(error):
            raise
        fits = False
    finally:
        train_step.reduce, train_step.micro_batch_size = before
    del beside
    # After the `except`: its stack holds tensors.
    train_step.optimizer.zero_grad(set_to_none=True)
    release_memory(train_step.world.device)
    return fits


def _now_s(device: torch.device) -> float:
    """Return the time at which the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
