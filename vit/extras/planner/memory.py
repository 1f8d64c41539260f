"""Bytes of a training step on one device, counted without computing it.

`vit.step.TrainStep` itself runs under torch's FakeTensorMode: each operation gets the shape of its
result and no memory. Every storage that appears is added to a sum, and taken off when the last
tensor that uses it goes, as an allocator would do it:

    config -> model, optimizer and batch without memory -> TrainStep -> `StepMemory`, part by part
    config -> a drawn table, images without memory -> Augment -> its temporaries, one part more

The device is a "cpu" that computes nothing, because torch's autograd asks for a real context on a
GPU that is not there. What is kept for the backward pass is the same on both: autocast casts the
same tensors, and attention keeps its inputs, its output and one number a row.
"""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass
from typing import Any

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
from vit.optim.optimizer import create_optimizer
from vit.step import TrainStep
from vit.system.device_memory import LiveBytes
from vit.training.compiling import checkpoint_activations
from vit.training.freeze import create_trained_model
from vit.training.loss import cross_entropy
from vit.training.norm_probes import create_probes
from vit.training.objective import Supervised
from vit.training.plan import Plan
from vit.training.reduce import DataParallel
from vit.training.teacher import Distilled, Teacher, find_teacher

BATCHES_ON_DEVICE = 3
"""A rank's batch in use, and the next one as it comes and as augmented, during the step."""


class _OnlyFloats(Augment):
    """Makes inputs and targets of images, and nothing else: tables have no values here.

    All images at once, as on a GPU; a CPU takes them in parts, each of which would be counted.
    """

    def finish(self, images: Tensor, labels: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return torch.addcmul(self.shift, images, self.scale), torch.zeros(
            len(labels), self.num_classes
        )


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device at the peak of a training step."""

    weights: int
    """Parameters and buffers."""
    teacher: int
    """Those of the teacher (`distill`)."""
    gradients: int
    """Those that exist at the peak; with `train.exact_over_ranks` its partial sums, too."""
    optimizer: int
    average: int
    batches: int
    activations: int
    """What the backward pass needs of the forward pass, and temporaries at the peak."""
    augmentation: int
    """Temporaries of the next batch's augmentation, which runs beside the step on a stream of its
    own; torch's allocator gives memory of one stream to no other."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(astuple(self))

    @property
    def in_turn(self) -> int:
        """The sum where a batch is augmented before its step, as `vit.extras.planner.benchmark`
        does it."""
        return self.total - self.augmentation


def step_memory(config: Config, plan: Plan, num_classes: int) -> StepMemory:
    """Count the bytes of one step of `plan` on each rank; without torch.compile, which needs less.

    config: its sections model, init, distill, optim, schedule, train, augment, log; batches are
    those of `plan`, their images the largest of the run.
    """
    optim = config.optim
    train = config.train
    rank_batch_size = plan.rank_batch_size
    device = torch.device("cpu")
    with torch.device("meta"):
        model: Any = create_trained_model(config, num_classes)
        found = find_teacher(config, num_classes)
    model.train()
    checkpoint_activations(model, train.activation_checkpointing)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        drop_memory(model, device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        weights = live.now
        teacher = None
        if found is not None:
            drop_memory(found[0], device)
            teacher = Teacher(*found, config)
        of_teacher = live.now - weights
        optimizer = create_optimizer(model, optim)
        state = live.now - weights - of_teacher
        average = 0
        if train.ema_decay is not None:
            # `Ema` copies a module, which fake tensors do not allow; its update is in place.
            average = sum(tensor.nbytes for tensor in model.state_dict().values())
        if train.exact_over_ranks:
            draw_by_sample(model, plan.micro_batch_size, device)
        # DDP keeps the gradients in its buckets from step to step, `TreeSum` its partial sums.
        are_kept = plan.world_size > 1 or train.exact_over_ranks
        if are_kept:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        # One pass after another: what counts is that gradients exist when the second one begins.
        largest = ImageFormat.from_config(config.model, config.data, config.schedule).largest
        batch = _batch(largest, min(rank_batch_size, 2 * plan.micro_batch_size), device)
        augment = _OnlyFloats(AugmentConfig(), num_classes, (0.5,), (0.5,), device)
        train_step = TrainStep(
            model,
            optimizer,
            augment,
            Supervised(cross_entropy) if teacher is None else Distilled(cross_entropy, teacher),
            DataParallel(model, World(0, 1, device)),
            lr_at=lambda step: optim.lr,
            micro_batch_size=plan.micro_batch_size,
            precision=train.precision,
            clip_grad_norm=optim.clip_grad_norm,
            # At the step that is counted, the first one of one.
            probes=create_probes(model, config, augment, plan.micro_batch_size, 1),
        )
        before = live.now
        live.begin(lambda: sum(p.grad.nbytes for p in parameters if p.grad is not None))
        train_step(batch, 0)
        # Gradients in buckets are part of `before`.
        in_buckets = sum(p.nbytes for p in parameters) if are_kept else 0
        activations = live.peak - before - (live.gradients_at_peak - in_buckets)
        image_bytes = batch.images[0].nbytes
        gradients = live.gradients_at_peak
        if train.exact_over_ranks:
            num_values = sum(p.numel() for p in parameters)
            gradients = held_bytes(num_values, plan.num_leaves, plan.world_size)
    return StepMemory(
        weights=weights,
        teacher=of_teacher,
        gradients=gradients,
        optimizer=state,
        average=average,
        batches=BATCHES_ON_DEVICE * rank_batch_size * image_bytes,
        activations=activations,
        augmentation=augmentation_bytes(
            config.augment, tuple(batch.images.shape[1:]), rank_batch_size
        ),
    )


@functools.lru_cache
def augmentation_bytes(
    config: AugmentConfig, image_shape: tuple[int, int, int], num_rows: int
) -> int:
    """Count what the augmentation of `num_rows` images needs at its peak besides its result.

    image_shape: (C, H, W). For the operations that one batch of the recipe draws: another one
    differs by some percent.
    """
    keys = sample_keys(0, 0, np.arange(num_rows))
    sides_px = np.full(num_rows, 400)
    table = torch.from_numpy(draw_table(config, keys, sides_px, sides_px, image_shape[1:]))
    # The meta device: as on a GPU, many images are changed at once.
    meta = torch.device("meta")
    augment = Augment(config, 1, (0.5,), (0.5,), meta)
    shape = (num_rows, *image_shape)
    augment.change(torch.empty(shape, dtype=torch.uint8, device=meta), table)  # makes constants
    with LiveBytes() as live:
        images = torch.empty(shape, dtype=torch.uint8, device=meta)
        changed = augment.change(images, table)
    return live.peak - images.nbytes - changed.nbytes


def drop_memory(model: nn.Module, device: torch.device) -> None:
    """Put `model`, which is on the meta device, on a device without memory; under FakeTensorMode.

    `Module.to_empty` does not work there: it swaps tensors, which fake ones refuse.
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
    """Return a batch of images of that form that nothing is done to."""
    columns = table_layout(AugmentConfig()).width
    return Batch(
        torch.empty(rows, form.channels, *form.size, dtype=torch.uint8, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.ones(rows, device=device),
        torch.zeros(rows, columns),
        torch.arange(rows),
    )
