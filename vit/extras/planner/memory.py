"""Calculate the memory that a training step needs on one device, without running the step.

`vit.step.TrainStep` runs under torch's FakeTensorMode, in which tensors have a shape but no memory.
The size of each new storage is added to a sum. The size is subtracted when the last tensor that
uses the storage is freed:

    config -> model, optimizer and batch without memory -> TrainStep -> `StepMemory`, part by part
    config -> augmentation parameters, fake images -> Augment -> temporaries of augmentation

The fake device is a CPU, because torch's autograd needs a real CUDA context for a fake GPU. CPUs
and GPUs keep the same tensors for the backward pass.
"""

import functools
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vit.config.schema import AugmentConfig, Config
from vit.data.augment.apply import Augment
from vit.data.augment.draw import draw_table, sample_keys
from vit.data.augment.table import table_layout
from vit.data.batches import Batch
from vit.data.image_format import ImageFormat
from vit.distributed.exact.by_sample import draw_by_sample
from vit.distributed.exact.tree_sum import held_bytes
from vit.distributed.process_group import World
from vit.extras.planner.device_memory import LiveBytes
from vit.optim.optimizer import create_optimizer
from vit.start.compiling import checkpoint_activations
from vit.step import TrainStep
from vit.training.freeze import create_trained_model
from vit.training.loss import cross_entropy
from vit.training.norm_probes import create_probes
from vit.training.objective import Objective
from vit.training.plan import Plan
from vit.training.reduce import DataParallel
from vit.training.teacher import Distilled, Teacher, find_teacher

BATCHES_ON_DEVICE = 3
"""The number of batches on the device during a step: the current batch, plus the next batch before
and after augmentation."""


class _OnlyFloats(Augment):
    """An augmentation that only converts images to inputs and targets.

    All images are converted in one operation, as on a GPU. On a CPU, `Augment` converts a batch in
    parts, which would change the count.
    """

    def finish(self, images: Tensor, labels: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return torch.addcmul(self.shift, images, self.scale), torch.zeros(
            len(labels), self.num_classes
        )


@dataclass(frozen=True)
class StepMemory:
    """The bytes on one device at the peak of a training step."""

    weights: int
    """The model's parameters and buffers."""
    teacher: int
    """The teacher's parameters and buffers (`distill`)."""
    gradients: int
    """The gradients at the peak, including the partial sums of `train.exact_over_ranks`."""
    optimizer: int
    average: int
    batches: int
    activations: int
    """The activations kept for the backward pass, and the temporary tensors at the peak."""
    augmentation: int
    """The temporary tensors for augmenting the next batch. Augmentation runs on another CUDA stream
    during the step. torch's allocator does not share memory between streams."""

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return sum(astuple(self))

    @property
    def in_turn(self) -> int:
        """The total if augmentation runs before the step, as in `vit.extras.planner.benchmark`."""
        return self.total - self.augmentation


def step_memory(config: Config, plan: Plan, num_classes: int) -> StepMemory:
    """Calculate the memory that a training step needs on each rank. `train.precision` must not be
    `auto`.

    The step is not compiled. A compiled step needs less memory. Batches have the sizes in `plan`
    and the largest image size of the run.
    """
    train = config.train
    rank_batch_size = plan.rank_batch_size
    device = torch.device("cpu")

    with torch.device("meta"):
        model = create_trained_model(config, num_classes)
        teacher_parts = find_teacher(config, num_classes)
    model.train()
    checkpoint_activations(model, train.activation_checkpointing)

    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        drop_memory(model, device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        weight_bytes = live.now

        teacher = None
        if teacher_parts is not None:
            drop_memory(teacher_parts[0], device)
            teacher = Teacher(*teacher_parts, config)
        teacher_bytes = live.now - weight_bytes

        optimizer = create_optimizer(model, config.optim)
        optimizer_bytes = live.now - weight_bytes - teacher_bytes

        # `Ema` copies the module, which fake tensors do not support, so the averaged weights are
        # counted from the state dict. The average is updated in place.
        average_bytes = 0
        if config.ema.decay is not None:
            average_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())

        if train.exact_over_ranks:
            draw_by_sample(model, plan.micro_batch_size, device)

        # DDP's buckets and the partial sums of `TreeSum` stay allocated between steps.
        are_kept = plan.world_size > 1 or train.exact_over_ranks
        if are_kept:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)

        # Two micro-batches are enough, because gradients exist from the second one on.
        largest = ImageFormat.from_config(config.model, config.data, config.schedule).largest
        batch = _batch(largest, min(rank_batch_size, 2 * plan.micro_batch_size), device)
        objective = Objective(cross_entropy)
        if teacher is not None:
            objective = Distilled(cross_entropy, teacher)
        augment = _OnlyFloats(AugmentConfig(), num_classes, (0.5,), (0.5,), device)
        train_step = TrainStep(
            model,
            optimizer,
            augment,
            objective,
            DataParallel(model, World(0, 1, device)),
            lr_at=lambda step: config.optim.lr,
            micro_batch_size=plan.micro_batch_size,
            precision=train.precision,
            clip_grad_norm=config.optim.clip_grad_norm,
            # The plan has a single step, so this step also measures the norms.
            probes=create_probes(model, config, augment, plan.micro_batch_size, 1),
        )

        bytes_before = live.now
        live.begin(lambda: sum(p.grad.nbytes for p in parameters if p.grad is not None))
        train_step(batch, 0)

        # `bytes_before` already includes gradients in buckets.
        bucket_bytes = sum(p.nbytes for p in parameters) if are_kept else 0
        activation_bytes = live.peak - bytes_before - (live.gradients_at_peak - bucket_bytes)
        image_bytes = batch.images[0].nbytes
        if train.exact_over_ranks:
            num_values = sum(p.numel() for p in parameters)
            gradient_bytes = held_bytes(num_values, plan.num_leaves, plan.world_size)
        else:
            gradient_bytes = live.gradients_at_peak

    return StepMemory(
        weights=weight_bytes,
        teacher=teacher_bytes,
        gradients=gradient_bytes,
        optimizer=optimizer_bytes,
        average=average_bytes,
        batches=BATCHES_ON_DEVICE * rank_batch_size * image_bytes,
        activations=activation_bytes,
        augmentation=augmentation_bytes(
            config.augment, tuple(batch.images.shape[1:]), rank_batch_size
        ),
    )


@functools.lru_cache
def augmentation_bytes(
    config: AugmentConfig, image_shape: tuple[int, int, int], num_rows: int
) -> int:
    """Count the peak memory of augmenting `num_rows` images, excluding the resulting images.

    image_shape: (C, H, W). The count is for one random set of augmentation parameters. Other
    batches differ by a few percent.
    """
    keys = sample_keys(0, 0, np.arange(num_rows))
    sides_px = np.full(num_rows, 400)
    table = torch.from_numpy(draw_table(config, keys, sides_px, sides_px, image_shape[1:]))
    # The meta device augments many images in one operation, as a GPU does.
    meta = torch.device("meta")
    augment = Augment(config, 1, (0.5,), (0.5,), meta)
    shape = (num_rows, *image_shape)
    augment.change(torch.empty(shape, dtype=torch.uint8, device=meta), table)  # creates constants
    with LiveBytes() as live:
        images = torch.empty(shape, dtype=torch.uint8, device=meta)
        changed = augment.change(images, table)
    return live.peak - images.nbytes - changed.nbytes


def drop_memory(model: nn.Module, device: torch.device) -> None:
    """Move `model` from the meta device to fake tensors on `device`, under FakeTensorMode.

    `Module.to_empty` fails, because fake tensors cannot be swapped.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _batch(form: ImageFormat, rows: int, device: torch.device) -> Batch:
    return Batch(
        torch.empty(rows, form.channels, *form.size, dtype=torch.uint8, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.ones(rows, device=device),
        torch.zeros(rows, table_layout(AugmentConfig()).width),
        torch.arange(rows),
    )
