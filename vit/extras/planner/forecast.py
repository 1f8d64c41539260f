"""Forecast a run's time, cost and memory from a config and a number of GPUs.

`vit.training.plan` computes steps and batches, and `vit.extras.planner.memory` computes bytes. Time
is the number of operations divided by the rate. Training on an image costs as much as three forward
passes, because a backward pass costs two. Drop path reduces this cost, and recomputed activations
and a teacher's forward pass are added. The rate is a fraction of the GPU's peak (MFU), either
measured on the same GPU model or taken from a published range.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from vit.config.io import with_settings
from vit.config.schema import Config
from vit.data.augment.table import table_layout
from vit.data.batches import BatchLayout, row_unit
from vit.data.image_format import ImageFormat
from vit.data.open_data import choose_num_classes, choose_train_set, open_split, open_train_splits
from vit.data.shards.split_slice import parse_name, part_size
from vit.extras.planner.memory import StepMemory, step_memory
from vit.hooks.needs import DiskNeeds, HostMemory, Load, disk_needs, host_memory
from vit.system.files import ShardError
from vit.system.gpus import Gpu
from vit.training.freeze import create_trained_model
from vit.training.mfu import train_flops_per_image
from vit.training.model_summary import flops_per_image, frozen_flops_per_image
from vit.training.plan import Plan, create_order, make_plan, micro_batch_sizes
from vit.training.print_config import IMAGENET_IMAGES
from vit.training.teacher import find_teacher

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
"""The folder of `*-gpu-*.json` files with measured MFU. An installed package does not have this
folder."""
MFU_RANGE = (0.2, 0.4)
"""The MFU range assumed for GPUs without a measurement. Published values for training ViTs: ViT-5-B
on H100s 22.5 % end to end and 28 % without data (nvSubquadratic, docs/benchmarks.md), ViT g/14 29 %
(NVIDIA NeMo)."""
RESERVED_GIB = 1.5
"""The estimated memory for the CUDA context, the cuBLAS and cuDNN workspaces, and the NCCL
buffers."""
USABLE_SHARE = 0.95
"""The estimated usable fraction of the remaining memory. The allocator cannot fill every gap
between tensors."""
IMAGES_PER_CORE_S = 1034
"""The number of 116 kB images per second that one Intel Xeon core decodes for training at 224 px
(benchmarks/results/2026-11-21-loader-intel-xeon-processor.md)."""
SHARD_BYTES_PER_IMAGE = 122_000
"""The average size of a stored image. ImageNet's shards take 156 GB (docs/data.md)."""
IMAGENET_VAL_IMAGES = 50_000
SAME_NETWORK = 0.1
"""The maximum relative difference in operations between two measurements of the same network. The
number of classes and the drop-path rate cause smaller differences."""
GIB = 2**30


@dataclass(frozen=True)
class DataSize:
    """The dataset sizes that a forecast uses."""

    num_classes: int
    num_val_images: int
    num_images: int
    further_images: tuple[int, ...]
    """The number of images in each additional split in `eval.sets`."""
    assumed: str
    """The reason why ImageNet-1k's sizes are assumed, or "" if the data was opened."""


@dataclass(frozen=True)
class Speed:
    """The lowest and highest expected fraction of a GPU's peak FLOP/s."""

    low: float
    high: float
    source: str


@dataclass(frozen=True)
class Stage:
    """A stage of a run with one image size."""

    image_size: tuple[int, int]
    """The image size (height, width) in pixels."""
    stop: int
    """The step at which the stage ends."""
    train_flops: int
    """The number of operations to train on one image."""


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
    forward_flops: int
    """The number of operations to evaluate one image."""
    train_flops: int
    """The number of operations to train on one image (forward and backward), averaged over the
    run."""
    teacher_flops: int
    """The number of operations in the teacher's forward pass for one image, or 0 without a
    teacher."""
    stages: tuple[Stage, ...]
    """The stages of a run that trains at several image sizes. The last stage ends with the run."""
    train_images: int
    """The number of images in all training steps, including repetitions."""
    eval_images: int
    """The number of images in all evaluations."""

    @property
    def fits(self) -> bool:
        """True if a step with the planned micro-batch size fits on the GPU."""
        return self.memory.total <= usable_bytes(self.gpu)

    @property
    def images_per_s(self) -> tuple[float, float]:
        """The training images per second of all GPUs together."""
        return self.images_per_s_at(self.train_flops)

    def images_per_s_at(self, train_flops: int) -> tuple[float, float]:
        """Return the images per second if training on an image takes `train_flops` operations."""
        slow, fast = self._flops_per_s
        flops = train_flops + self.teacher_flops
        return slow / flops, fast / flops

    @property
    def hours(self) -> tuple[float, float]:
        """The duration of the run in hours, including evaluations."""
        image_flops = self.train_flops + self.teacher_flops
        flops = image_flops * self.train_images + self.forward_flops * self.eval_images
        slow, fast = self._flops_per_s
        return flops / fast / 3600, flops / slow / 3600

    @property
    def cores_per_gpu(self) -> tuple[float, float]:
        """The number of CPU cores that each GPU needs for loading, at the smallest image size."""
        flops = min((stage.train_flops for stage in self.stages), default=self.train_flops)
        slow, fast = self.images_per_s_at(flops)
        return slow / self.num_gpus / IMAGES_PER_CORE_S, fast / self.num_gpus / IMAGES_PER_CORE_S

    @property
    def _flops_per_s(self) -> tuple[float, float]:
        peak = self.gpu.peak_tflops(self.precision) * 1e12 * self.num_gpus
        return self.speed.low * peak, self.speed.high * peak


def make_forecast(config: Config, num_gpus: int, gpu: Gpu, results: Path = RESULTS) -> Forecast:
    """Forecast the run of `config`. ImageNet-1k is assumed if the data cannot be opened.

    Raises ValueError if batch sizes do not divide evenly (`vit.training.plan.make_plan`) or if
    `loader.prefetch_gib` is too small.
    """
    data, plan = size_and_plan(config, num_gpus)
    with torch.device("meta"):
        model = create_trained_model(config, data.num_classes)
        teacher = find_teacher(config, data.num_classes)
    num_evaluations = plan.total_steps // plan.eval_every_steps
    if plan.total_steps % plan.eval_every_steps:
        num_evaluations += plan.evaluates_at(plan.total_steps)  # the final evaluation
    num_models = 1 if config.ema.decay is None else 2
    disk = disk_needs(config, plan, data.num_classes)
    trained_flops = train_flops_per_image(model, plan.micro_batch_size)
    stages = _stages(config, plan, model)
    train_flops = _mean_flops(stages)
    memory = step_memory(config, plan, data.num_classes)
    largest = largest_micro_batch(config, plan, data.num_classes, gpu, memory)
    return Forecast(
        gpu=gpu,
        num_gpus=num_gpus,
        precision=config.train.precision,
        plan=plan,
        data=data,
        memory=memory,
        largest_micro_batch_size=largest,
        host_memory=_host_memory(config, plan, data, disk.checkpoint_bytes),
        disk=disk,
        speed=expected_speed(
            config.model.name, config.train.precision, trained_flops, gpu, results
        ),
        forward_flops=flops_per_image(model),
        train_flops=train_flops,
        teacher_flops=0 if teacher is None else flops_per_image(teacher[0]),
        stages=stages if len(stages) > 1 else (),
        train_images=plan.total_steps * plan.global_batch_size,
        eval_images=num_evaluations * num_models * (data.num_val_images + sum(data.further_images)),
    )


def _host_memory(config: Config, plan: Plan, data: DataSize, saved_bytes: int) -> HostMemory:
    form = ImageFormat.from_config(config.model, config.data, config.schedule)
    order = create_order(config, data.num_images)
    columns = table_layout(config.augment).width
    train = Load(
        BatchLayout(plan.rank_batch_size, form.largest, columns),
        row_unit(config.augment, order),
        plan.total_steps,
    )
    eval_form = ImageFormat.from_config(config.model, config.data)
    layout = BatchLayout(config.eval.batch_size, eval_form, 0)
    rows = config.eval.batch_size * plan.world_size
    sizes = (data.num_val_images, *data.further_images)
    evals = [Load(layout, 1, math.ceil(size / rows)) for size in sizes]
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
    sizes = [0, *micro_batch_sizes(config.augment, rank_batch)]
    if config.train.exact_over_ranks:  # Ranks can have different numbers of micro-batches.
        batch_sizes = micro_batch_sizes(config.augment, plan.global_batch_size)
        sizes = [0, *(size for size in batch_sizes if size <= rank_batch)]
    if planned is None:
        planned = step_memory(config, plan, num_classes)
    totals = {0: 0, plan.micro_batch_size: planned.total}

    def fits(size: int) -> bool:
        if size not in totals:
            tried = replace(plan, micro_batch_size=size)
            totals[size] = step_memory(config, tried, num_classes).total
        return totals[size] <= usable_bytes(gpu)

    left = usable_bytes(gpu) - planned.total
    about = plan.micro_batch_size * (1 + left / max(planned.activations, 1))
    position = max(bisect_right(sizes, about) - 1, 0)
    while position and not fits(sizes[position]):
        position -= 1
    while position + 1 < len(sizes) and fits(sizes[position + 1]):
        position += 1
    return sizes[position]


def expected_speed(
    model_name: str, precision: str, flops: int, gpu: Gpu, results: Path = RESULTS
) -> Speed:
    """Return the measured MFU in `results` for this model on this GPU, or the published range.

    The fastest matching row is used. flops: the operations to train on one image. They distinguish
    networks with the same name but different image sizes or depths.
    """
    best: tuple[float, str] | None = None
    for path in sorted(results.glob("*-gpu-*.json")):
        measured = json.loads(path.read_text())
        for row in measured["training"]:
            same = row["model"] == model_name and measured["gpu"] == gpu.name
            same = same and abs(row["flops_per_image"] / flops - 1) <= SAME_NETWORK
            # Rows with recomputation are skipped, because `_train_flops` already adds recomputed
            # operations.
            once = row.get("activation_checkpointing", "none") == "none"
            if same and once and row["precision"] == precision:
                best = max(best or (0.0, ""), (row["mfu"], path.name))
    if best is not None:
        return Speed(best[0], best[0], f"measured, benchmarks/results/{best[1]}")
    low, high = MFU_RANGE
    return Speed(low, high, "not measured on this GPU: published ViT training has 22 to 29 %")


def _stages(config: Config, plan: Plan, model: nn.Module) -> tuple[Stage, ...]:
    form = ImageFormat.from_config(config.model, config.data, config.schedule)
    ends = [(until * plan.steps_per_epoch, size) for until, size in form.stages]
    return tuple(
        Stage(size, stop, _train_flops(config, plan, model, size))
        for stop, size in (*ends, (plan.total_steps, form.size))
    )


def _mean_flops(stages: tuple[Stage, ...]) -> int:
    """Return the number of training operations per image, averaged over the steps of the run."""
    starts = (0, *(stage.stop for stage in stages))
    total = sum(
        (stage.stop - start) * stage.train_flops
        for start, stage in zip(starts, stages, strict=False)
    )
    return total // stages[-1].stop


def _train_flops(config: Config, plan: Plan, model: nn.Module, image_size: tuple[int, int]) -> int:
    """Return the number of operations to train on one image.

    With activation checkpointing, the embedding and the head are counted like blocks.
    """
    size = plan.micro_batch_size if config.model.drop_path_form == "subset" else None
    forward = flops_per_image(model, size, image_size)
    # Frozen layers have no backward pass and no recomputation.
    backward = forward - frozen_flops_per_image(model, size, image_size)
    every = config.train.activation_checkpointing  # "none", "block", or every n-th block
    recomputed = {"none": 0.0, "block": 1.0}[every] if isinstance(every, str) else 1 / every
    return int(forward + backward * (2 + recomputed))


def size_and_plan(config: Config, num_gpus: int) -> tuple[DataSize, Plan]:
    """Return the data sizes and the plan. If the data is missing, ImageNet-1k is assumed."""
    places = config.eval.further_places(config.data.root, config.data.val_split)
    at_once = with_settings(config, {"loader.patience_s": 0.0})
    try:
        val_split = open_split(at_once, config.data.val_split)
        splits = open_train_splits(at_once)
        further = [open_split(at_once, split, root=root) for root, split in places]
    except ShardError as error:
        images = config.stream.num_samples or part_size(config.data.train_split, IMAGENET_IMAGES)
        plan, _ = make_plan(config, images, num_gpus)
        classes = config.model.num_classes or 1000
        trained = parse_name(config.data.train_split).split
        assumed = tuple(
            part_size(split, IMAGENET_IMAGES)
            if parse_name(split).split == trained
            else IMAGENET_VAL_IMAGES
            for _, split in places
        )
        return DataSize(classes, IMAGENET_VAL_IMAGES, images, assumed, str(error)), plan
    train = choose_train_set(config, splits, val_split, num_classes=config.model.num_classes)
    plan, order = make_plan(config, train.num_draws, num_gpus, train.shares)
    classes = choose_num_classes(config.model, config.data, train.split, val_split)
    further_images = tuple(split.num_samples for split in further)
    return DataSize(classes, val_split.num_samples, order.num_samples, further_images, ""), plan
