from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vit.data.augment.apply import Augment
from vit.distributed.exact.leaves import Leaves
from vit.distributed.process_group import World
from vit.layers.image_model import ImageModel
from vit.optim.norms import Norms
from vit.step import TrainStep
from vit.training.loss import Loss, cross_entropy
from vit.training.norm_probes import Probes
from vit.training.objective import Objective
from vit.training.reduce import DataParallel
from vit.training.teacher import Distilled, Teacher


def plain_step(
    model: ImageModel,
    wrapped: nn.Module,
    optimizer: torch.optim.Optimizer,
    augment: Augment,
    world: World,
    *,
    loss: Loss = cross_entropy,
    teacher: Teacher | None = None,
    leaves: Leaves | None = None,
    norms: Norms | None = None,
    **options: Any,
) -> TrainStep:
    """Return a training step for `model`. `wrapped` is the same model, optionally wrapped in
    DDP."""
    objective = Objective(loss)
    if teacher is not None:
        objective = Distilled(loss, teacher)
    probes = None
    if norms is not None:
        precision = options.get("precision", "fp32")
        probes = Probes(norms, model, augment, options["micro_batch_size"], precision)
    reduce = leaves or DataParallel(model, world, wrapped)
    return TrainStep(model, optimizer, augment, objective, reduce, probes=probes, **options)
