"""Measure the time of a training step, of its parts and of the loader, and the largest micro-batch
that fits.

    config -> `create_step` -> the `TrainStep` of training -> `time_step`, `all_reduce_times`, ...

Every function takes this step and batches from `vit.extras.planner.benchmark.subject`. Weights
are not reset between measurements, because their values do not affect the time. With torchrun, all
ranks call the same functions, and rank 0 makes all decisions that depend on measured time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vit.compose import parts_of
from vit.config.schema import Config, LoaderConfig
from vit.data.batches import Batch
from vit.data.loader import Loader
from vit.distributed.exit import out_of_memory
from vit.distributed.process_group import REDUCED_AT_ONCE, World, now_s
from vit.extras.planner.device_memory import release_memory
from vit.start.create_step import create_train_step
from vit.step import TrainStep
from vit.training.freeze import create_trained_model
from vit.training.loss import create_loss
from vit.training.objective import Objective
from vit.training.plan import Plan
from vit.training.reduce import DataParallel
from vit.training.run_data import RunData
from vit.training.step_result import StepPhase, StepResult
from vit.training.teacher import Distilled, Teacher, find_teacher

WARM_UP_STEPS = 2
"""The number of untimed steps. The first step allocates memory, loads kernels and compiles. The
second step is used to estimate the step time."""
LEAST_STEPS = 3
ENDLESS = 10**6
"""A number of batches larger than any measurement needs."""
OnStep = Callable[[int, int], None]
"""A callback that receives the number of finished steps (starting at 0) and the total number."""


@dataclass(frozen=True)
class StepTimes:
    """The measured times of training steps."""

    step_s: float
    """The median time of a step."""
    fastest_s: float
    slowest_s: float
    total_s: float
    """The total time of all steps."""
    parts_s: dict[StepPhase, float]
    """The median time of each part of the step, measured with CUDA events on GPUs."""
    num_steps: int
    global_batch_size: int

    @property
    def images_per_s(self) -> float:
        """The images per second of all ranks together, computed from the median step time."""
        return self.global_batch_size / self.step_s


def create_step(config: Config, plan: Plan, num_classes: int, world: World) -> TrainStep:
    """Create the training step of `config` with random weights, in training mode.

    A teacher also has random weights, because its outputs do not affect the time.
    """
    torch.manual_seed(config.train.seed)
    model = create_trained_model(config, num_classes)

    # The values of class weights do not affect the time.
    weights = None if config.loss.class_weights is None else (1.0,) * num_classes
    loss = create_loss(config.loss, weights, world.device)
    objective = Objective(loss)
    teacher = find_teacher(config, num_classes)
    if teacher is not None:
        teacher_model, settings = teacher
        objective = Distilled(loss, Teacher(teacher_model.to(world.device), settings, config))

    step = create_train_step(
        config,
        plan,
        num_classes=num_classes,
        model=model,
        world=world,
        objective=objective,
        create_reduce=parts_of(config).create_reduce,
    )

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
    """Warm up, then time `num_steps` steps, or as many as fit in `seconds`, but at least three.

    Args:
        train_step: The step to time.
        batches: An iterator of augmented batches, such as a loader, or a list of batches. If it is
            a list, its batches are used repeatedly, and each batch is augmented before its step.
        num_steps: The number of timed steps. If given, `seconds` is ignored.
        seconds: The approximate duration of all timed steps.
        on_step: Called with the number of finished steps and the total number of steps.
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
    medians = {}
    for part in StepPhase:
        medians[part] = statistics.median([step.get(part, 0.0) for step in parts])

    return StepTimes(
        step_s=statistics.median(taken_s),
        fastest_s=min(taken_s),
        slowest_s=max(taken_s),
        total_s=sum(taken_s),
        parts_s=medians,
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
    """Run `num_steps` steps as in training, and return the duration of each step in seconds."""
    # On a GPU, read each result one step late, as in training, so the GPU never waits for the host.
    most_pending = 1 if train_step.world.device.type == "cuda" else 0
    stream = batches if isinstance(batches, Iterator) else augmented(train_step, batches)
    on_step(0, num_steps)
    ends_s = [now_s(train_step.world.device)]
    pending = deque[StepResult]()

    def finish(result: StepResult) -> None:
        result.read()
        ends_s.append(time.perf_counter())
        on_step(len(ends_s) - 1, num_steps)

    for step in range(num_steps):
        pending.append(train_step(next(stream), step))
        if clock is not None:
            clock.mark(None)
        if len(pending) > most_pending:
            finish(pending.popleft())

    for result in pending:
        finish(result)
    return [end - begin for begin, end in pairwise(ends_s)]


def augmented(train_step: TrainStep, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Repeat `batches`, and augment each batch directly before its step.

    Augmentation does not overlap with the step, so the two can be timed separately. In training,
    the loader's CUDA stream augments the next batch while the GPU computes the step.
    """
    for batch in itertools.cycle(batches):
        train_step.mark(StepPhase.CHANGE)
        yield train_step.augment.change_batch(batch)


class PartClock:
    """A timer for the parts of a step. The `mark` method replaces `TrainStep.mark`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[tuple[StepPhase | None, Any]] = []

    def mark(self, part: StepPhase | None) -> None:
        """Record that `part` begins with the next queued operation. None ends the step."""
        moment: Any = time.perf_counter()
        if self._device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._marks.append((part, moment))

    def steps(self) -> list[dict[StepPhase, float]]:
        """Wait for the device, and return the seconds of each part of each step."""
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
    train_step: TrainStep,
    batches: Iterable[Batch],
    dtype: torch.dtype = torch.float32,
    num_steps: int = LEAST_STEPS,
) -> dict[str, float] | None:
    """Return the cost of averaging gradients over ranks, or None for a single rank.

    The result has alone_s, the time of an all-reduce that overlaps with nothing; exposed_s, the
    all-reduce time that the backward pass does not hide; and num_bytes, the size of the gradients
    that a rank sends. dtype: the format of the sums.
    """
    world = train_step.world
    if world.size == 1:
        return None

    length = sum(parameter.numel() for parameter in train_step.parameters)
    gradients = torch.zeros(length, dtype=dtype, device=world.device)
    buckets = gradients.split(REDUCED_AT_ONCE // 4)  # DDP's buckets, in fp32 elements

    all_reduces_s = []
    for _ in range(WARM_UP_STEPS + num_steps):
        world.barrier()
        began_s = now_s(world.device)
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        all_reduces_s.append(now_s(world.device) - began_s)

    step_s = statistics.median(run_steps(train_step, batches, num_steps))
    saved_reduce = train_step.reduce
    train_step.reduce = DataParallel(train_step.model, world)  # a step without gradient averaging
    try:
        run_steps(train_step, batches, 1)
        step_without_reduce_s = statistics.median(run_steps(train_step, batches, num_steps))
    finally:
        train_step.reduce = saved_reduce

    return {
        "alone_s": statistics.median(all_reduces_s[WARM_UP_STEPS:]),
        "exposed_s": max(step_s - step_without_reduce_s, 0.0),
        "num_bytes": gradients.nbytes,
    }


def largest_micro_batch(
    train_step: TrainStep,
    sizes: Sequence[int],
    make_batch: Callable[[int], Batch],
    first: int,
    beside_bytes: int = 0,
    on_try: Callable[[int], None] = lambda size: None,
) -> int:
    """Return the largest of `sizes` whose step fits in memory on every rank, or 0 if none fits.

    Args:
        train_step: The step to try.
        sizes: The micro-batch sizes, in ascending order.
        make_batch: Returns a batch of a given size on the device.
        first: The size to try first, such as the planner's estimate.
        beside_bytes: See `fits_in_memory`.
        on_try: Called with each size before its trial.
    """
    fits = -1
    too_large = len(sizes)
    tried = min(bisect_left(sizes, first), len(sizes) - 1)

    while too_large - fits > 1:
        on_try(sizes[tried])
        # Trial steps run without DDP. With DDP, all other ranks would hang in the all-reduce if one
        # rank ran out of memory.
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
    """Return whether steps with two micro-batches of this size fit in this rank's memory.

    Gradients already exist when the second micro-batch begins, as they always do with DDP.
    beside_bytes: the memory that training needs at the same time, for example to augment the next
    batch.
    """
    reserved: Tensor | None = None
    saved_state = (train_step.reduce, train_step.micro_batch_size)
    # Ranks step independently: if one of them runs out of memory, no other waits for it.
    one_rank = replace(train_step.world, rank=0, size=1)
    train_step.reduce = DataParallel(train_step.model, one_rank)
    train_step.micro_batch_size = micro_batch_size

    try:
        reserved = torch.empty(beside_bytes, dtype=torch.uint8, device=train_step.world.device)
        run_steps(train_step, [make_batch(2 * micro_batch_size)], WARM_UP_STEPS)
    except Exception as error:
        if not out_of_memory(error):
            raise
        fits = False
    else:
        fits = True
    finally:
        train_step.reduce, train_step.micro_batch_size = saved_state

    del reserved
    # Free gradients after the `except` block, because the traceback keeps tensors alive inside it.
    train_step.optimizer.zero_grad(set_to_none=True)
    release_memory(train_step.world.device)

    return fits


# --- the loader -----------------------------------------------------------------------------------


def time_loading(
    config: LoaderConfig,
    data: RunData,
    train_step: TrainStep,
    *,
    num_steps: int | None = None,
    seconds: float = 10.0,
    on_batch: OnStep = lambda done, total: None,
    on_step: OnStep = lambda done, total: None,
) -> dict[str, float]:
    """Time the loader alone for `seconds`, and then together with the step, using new workers.

    num_steps: the number of batches and steps. If given, `seconds` is ignored.

    Returns the images per second of all ranks, for the loader alone (including augmentation on the
    device) and for the loader with the step. Also returns the fraction of the time with the step
    that rank 0 spent waiting for data.
    """
    with _loader(config, data, train_step) as loader:
        alone = _time_alone(loader, train_step.world, num_steps, seconds, on_batch)

    with _loader(config, data, train_step) as loader:
        waits_s: list[float] = []  # the wait before the first timed step

        def notice(done: int, total: int) -> None:
            if done == 0:
                waits_s.append(loader.stats.wait_s)
            on_step(done, total)

        times = time_step(train_step, loader, num_steps=num_steps, seconds=seconds, on_step=notice)
        waited_s = loader.stats.wait_s - waits_s[0]

    return {
        "num_workers": config.num_workers,
        "loader_images_per_s": alone,
        "together_images_per_s": times.num_steps * times.global_batch_size / times.total_s,
        "data_wait_share": min(waited_s / times.total_s, 1.0),
    }


def _loader(config: LoaderConfig, data: RunData, train_step: TrainStep) -> Loader:
    return Loader(
        data.batches,
        0,
        ENDLESS,
        num_workers=config.num_workers,
        device=train_step.world.device,
        stall_timeout_s=config.stall_timeout_s,
        on_device=train_step.augment.change_batch,
    )


def _time_alone(
    loader: Loader, world: World, num_batches: int | None, seconds: float, on_batch: OnStep
) -> float:
    """Read and discard batches, and return the images per second of all ranks."""
    num_rows = len(next(loader).labels)  # not timed, because the workers are still starting

    began_s = time.perf_counter()
    for _ in range(LEAST_STEPS):
        next(loader)
    if num_batches is None:
        fitting = int(seconds / (time.perf_counter() - began_s) * LEAST_STEPS)
        num_batches = world.broadcast_from_main(lambda: max(fitting, LEAST_STEPS))

    on_batch(0, num_batches)
    world.barrier()
    began_s = time.perf_counter()
    for done in range(1, num_batches + 1):
        next(loader)
        on_batch(done, num_batches)

    rate = num_batches * num_rows / (now_s(world.device) - began_s)
    return float(world.sum_(torch.tensor(rate, device=world.device)))
