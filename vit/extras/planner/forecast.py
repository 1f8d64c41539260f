"""Forecast a run's time, cost and memory from a config and a number of GPUs.

`vit.training.plan` computes steps and batches, `vit.extras.planner.memory` computes bytes, and
`vit.extras.planner.roofline` computes the time per image. Drop path reduces this time, and
recomputed activations and a teacher's forward pass are added to it. `vit.extras.planner.speed`
corrects the time with measurements on the same GPU, and returns how much longer complete published
runs took.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vit.config.schema import Config
from vit.data.augment.table import table_layout
from vit.data.batches import BatchLayout, row_unit
from vit.data.image_format import ImageFormat
from vit.extras.planner.data_size import DataSize, size_and_plan
from vit.extras.planner.memory import StepMemory, step_memory
from vit.extras.planner.roofline import UPDATE_BYTES, Work, forward_work, seconds, training_work
from vit.extras.planner.speed import RESULTS, EndToEnd, Speed, choose_speed, end_to_end
from vit.layers.image_model import ImageModel
from vit.start.needs import DiskNeeds, HostMemory, Load, disk_needs, host_memory
from vit.system.gpus import Gpu
from vit.system.meter import GIB
from vit.training.freeze import create_trained_model
from vit.training.mfu import train_flops_per_image
from vit.training.plan import Plan, create_order, micro_batch_sizes
from vit.training.run_data import with_precision
from vit.training.teacher import find_teacher

RESERVED_GIB = 1.5
"""The estimated memory for the CUDA context, the cuBLAS and cuDNN workspaces, and the NCCL
buffers."""
USABLE_SHARE = 0.95
"""The estimated usable fraction of the remaining memory. The allocator cannot fill every gap
between tensors."""
IMAGES_PER_CORE_S = 899
"""The number of ImageNet's photographs (110 kB on average) per second that one Intel Xeon core
decodes for training at 224 px (benchmarks/results/2026-11-30-loader-photos-intel-xeon.md)."""
SHARD_BYTES_PER_IMAGE = 122_000
"""The average size of a stored image. ImageNet's shards take 156 GB (docs/data.md)."""
GPUS_PER_HOST = 8
"""The assumed number of GPUs per host. The network does not limit GPUs on the same host."""


@dataclass(frozen=True)
class SizeStage:
    """A stage of a run with one image size."""

    image_size: tuple[int, int]
    """The image size (height, width) in pixels."""
    stop: int
    """The step at which the stage ends."""
    image_s: float
    """The time in seconds that one GPU takes to train on one image, including the teacher and the
    update."""


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run on `num_gpus` GPUs. Pairs are (minimum, maximum)."""

    gpu: Gpu
    num_gpus: int
    precision: str
    plan: Plan
    data: DataSize
    memory: StepMemory
    """The memory of a step with `plan.micro_batch_size`."""
    largest_micro_batch_size: int
    """The largest micro-batch size that divides the rank's batch and fits, or 0 if none fits."""
    host_memory: HostMemory
    disk: DiskNeeds
    speed: Speed
    end_to_end: EndToEnd
    forward: Work
    """The work to evaluate one image."""
    teacher_flops: float
    """The FLOPs of the teacher's forward pass for one image, or 0 without a teacher."""
    stages: tuple[SizeStage, ...]
    """The stages of the run, one for each image size. The last stage ends with the run."""
    train_flops: int
    """The FLOPs of training on one image, without those that activation checkpointing repeats."""
    train_images: int
    """The number of images in all training steps, including repetitions."""
    eval_images: int
    """The number of images in all evaluations."""
    eval_image_s: float
    """The time in seconds that one GPU takes to evaluate one image."""
    gradient_bytes: int
    """The number of gradient bytes that the ranks sum in each step."""

    @property
    def fits(self) -> bool:
        """True if a step with the planned micro-batch size fits on the GPU."""
        return self.memory.total <= usable_bytes(self.gpu)

    @property
    def image_s(self) -> float:
        """The time in seconds that one GPU takes to train on one image, averaged over the run."""
        starts = (0, *(stage.stop for stage in self.stages[:-1]))
        total_s = sum(
            (stage.stop - start) * stage.image_s
            for start, stage in zip(starts, self.stages, strict=True)
        )
        return total_s / self.stages[-1].stop

    @property
    def mfu(self) -> tuple[float, float]:
        """The fraction of the GPU's peak FLOP/s that training reaches, at the last image size."""
        flops = self.train_flops + self.teacher_flops
        peak = self.gpu.peak_tflops(self.precision) * 1e12
        mfu = flops / self.stages[-1].image_s / peak
        return mfu / self.speed.within, mfu * self.speed.within

    def images_per_s(self, image_s: float) -> tuple[float, float]:
        """Return the images per second of all GPUs if one GPU needs `image_s` for an image."""
        rate = self.num_gpus / image_s
        return rate / self.speed.within, rate * self.speed.within

    @property
    def compute_h(self) -> tuple[float, float]:
        """The hours of computation, including evaluations."""
        total_s = self.image_s * self.train_images + self.eval_image_s * self.eval_images
        hours = total_s / self.num_gpus / 3600
        return hours / self.speed.within, hours * self.speed.within

    def end_to_end_h(self, cores: float | None, network_gbs: float | None) -> tuple[float, float]:
        """Return the hours of the run, if it exceeds its computation time by the same factor as
        published runs of its size.

        cores: CPU cores per GPU, which limit the loader. network_gbs: 10**9 bytes per second per
        host, which limit the sums of gradients. None: no limit.
        """
        hours = math.prod(self.compute_h) ** 0.5  # the geometric mean of both ends
        limit_s = 0.0
        if cores is not None:
            limit_s = self.train_images / (cores * self.num_gpus * IMAGES_PER_CORE_S)
        if network_gbs is not None and self.num_gpus > GPUS_PER_HOST:
            # An all-reduce passes all gradients through each host twice.
            sums_s = self.plan.total_steps * 2 * self.gradient_bytes / (network_gbs * 1e9)
            limit_s = max(limit_s, sums_s)
        low, high = hours * self.end_to_end.low, hours * self.end_to_end.high
        return max(low, limit_s / 3600), max(high, limit_s / 3600)

    @property
    def cores_per_gpu(self) -> tuple[float, float]:
        """The number of CPU cores that each GPU needs for loading, at the smallest image size."""
        slow, fast = self.images_per_s(min(stage.image_s for stage in self.stages))
        return slow / self.num_gpus / IMAGES_PER_CORE_S, fast / self.num_gpus / IMAGES_PER_CORE_S

    @property
    def network_gbs(self) -> float:
        """The rate at which each host must send and receive, in 10**9 bytes per second, or 0 for
        one host.

        An all-reduce passes all gradients through each host twice. It overlaps with the backward
        pass, which takes two thirds of the step.
        """
        if self.num_gpus <= GPUS_PER_HOST:
            return 0.0
        backward_s = 2 / 3 * self.image_s * self.plan.global_batch_size / self.num_gpus
        return 2 * self.gradient_bytes / backward_s / 1e9


def make_forecast(config: Config, num_gpus: int, gpu: Gpu, results: Path = RESULTS) -> Forecast:
    """Forecast the run of `config`. ImageNet-1k is assumed if the data cannot be opened.

    Raises ValueError if batch sizes do not divide evenly (`vit.training.plan.make_plan`).
    """
    config = with_precision(config, gpu.has_bf16)
    data, plan = size_and_plan(config, num_gpus)
    with torch.device("meta"):
        model = create_trained_model(config, data.num_classes)
        teacher = find_teacher(config, data.num_classes)

    precision = config.train.precision
    train_flops = train_flops_per_image(model, plan.micro_batch_size)
    compiled = bool(config.train.compile)
    speed = choose_speed(config.model.name, precision, train_flops, gpu, compiled, results)

    def image_s(work: Work) -> float:
        return speed.factor * seconds(work, gpu, precision, compiled)

    # An image takes the passes of the trained model, one of the teacher, and its share of an
    # update.
    forward, _ = forward_work(model)
    teacher_forward = Work(0.0, 0.0, 0.0) if teacher is None else forward_work(teacher[0])[0]
    num_weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    update_s = speed.factor * num_weights * UPDATE_BYTES / (gpu.bandwidth_gbs * 1e9)
    further_s = image_s(teacher_forward) + update_s / plan.rank_batch_size

    form = ImageFormat.from_config(config.model, config.data, config.schedule)
    ends = [(until * plan.steps_per_epoch, size) for until, size in form.stages]
    ends.append((plan.total_steps, form.size))
    stages = tuple(
        SizeStage(size, stop, image_s(_train_work(config, plan, model, size)) + further_s)
        for stop, size in ends
    )

    disk = disk_needs(config, plan, data.num_classes)
    memory = step_memory(config, plan, data.num_classes)
    return Forecast(
        gpu=gpu,
        num_gpus=num_gpus,
        precision=precision,
        plan=plan,
        data=data,
        memory=memory,
        largest_micro_batch_size=largest_micro_batch(config, plan, data.num_classes, gpu, memory),
        host_memory=_host_memory(config, plan, data, disk.checkpoint_bytes),
        disk=disk,
        speed=speed,
        end_to_end=end_to_end(forward),
        forward=forward,
        teacher_flops=teacher_forward.flops,
        stages=stages,
        train_flops=train_flops,
        train_images=plan.total_steps * plan.global_batch_size,
        eval_images=_num_eval_images(config, plan, data),
        eval_image_s=image_s(forward),
        gradient_bytes=num_weights * (2 if config.train.reduce_dtype == "bf16" else 4),
    )


def _num_eval_images(config: Config, plan: Plan, data: DataSize) -> int:
    """Return the number of images that all evaluations of all splits and weights read."""
    num_evaluations = plan.total_steps // plan.eval_every_steps
    if plan.total_steps % plan.eval_every_steps:
        num_evaluations += plan.evaluates_at(plan.total_steps)  # the final evaluation
    num_models = 1 if config.ema.decay is None else 2  # the averaged weights are evaluated too
    return num_evaluations * num_models * (data.num_val_images + sum(data.further_images))


def _host_memory(config: Config, plan: Plan, data: DataSize, saved_bytes: int) -> HostMemory:
    """Return the host memory for loading training and evaluation images, and for saving.

    saved_bytes: the size of a checkpoint.
    """
    form = ImageFormat.from_config(config.model, config.data, config.schedule)
    train = Load(
        BatchLayout(plan.rank_batch_size, form.largest, table_layout(config.augment).width),
        row_unit=row_unit(config.augment, create_order(config, data.num_images)),
        num_batches=plan.total_steps,
    )

    eval_form = ImageFormat.from_config(config.model, config.data)
    layout = BatchLayout(config.eval.batch_size, eval_form, 0)  # no augmentation table
    rows_of_all_ranks = config.eval.batch_size * plan.world_size
    evals = [
        Load(layout, row_unit=1, num_batches=math.ceil(num_images / rows_of_all_ranks))
        for num_images in (data.num_val_images, *data.further_images)
    ]

    return host_memory(config.loader, train, evals, on_gpu=True, saved_bytes=saved_bytes)


def usable_bytes(gpu: Gpu) -> float:
    """Return the bytes of GPU memory that a training step can use."""
    return (gpu.memory_gib - RESERVED_GIB) * USABLE_SHARE * GIB


def largest_micro_batch(
    config: Config, plan: Plan, num_classes: int, gpu: Gpu, planned: StepMemory | None = None
) -> int:
    """Return the largest micro-batch size that divides a rank's batch and fits, or 0 if none fits.

    planned: the memory of `plan`, if already counted. The search starts from an estimate that
    assumes activations proportional to the micro-batch size.
    """
    rank_batch = plan.global_batch_size // plan.world_size
    # With `exact_over_ranks`, ranks can have different numbers of micro-batches.
    divided = plan.global_batch_size if config.train.exact_over_ranks else rank_batch
    divisors = micro_batch_sizes(config.augment, divided)
    sizes = [0] + [size for size in divisors if size <= rank_batch]  # 0 if none fits
    if planned is None:
        planned = step_memory(config, plan, num_classes)
    totals = {plan.micro_batch_size: planned.total}

    def fits(size: int) -> bool:
        if size not in totals:
            tried = replace(plan, micro_batch_size=size)
            totals[size] = step_memory(config, tried, num_classes).total
        return totals[size] <= usable_bytes(gpu)

    free_bytes = usable_bytes(gpu) - planned.total
    estimate = plan.micro_batch_size * (1 + free_bytes / max(planned.activations, 1))
    position = max(bisect_right(sizes, estimate) - 1, 0)
    while position and not fits(sizes[position]):
        position -= 1
    while position + 1 < len(sizes) and fits(sizes[position + 1]):
        position += 1
    return sizes[position]


def _train_work(config: Config, plan: Plan, model: ImageModel, image_size: tuple[int, int]) -> Work:
    """Return the work of training on one image.

    With activation checkpointing, the embedding and the head are counted like blocks.
    """
    size = plan.micro_batch_size if config.model.drop_path_form == "subset" else None
    every = config.train.activation_checkpointing  # "none", "block", or every n-th block
    recomputed = {"none": 0.0, "block": 1.0}[every] if isinstance(every, str) else 1 / every
    return training_work(*forward_work(model, size, image_size), recomputed)
