"""Losses of soft targets: cross-entropy, and binary cross-entropy of each class by itself.

Logits come from the model, soft targets from `vit.data.augment.apply` (one-hot rows, mixed by MixUp
and CutMix). Label smoothing is added here; the step weights and sums the loss of each row. Those of
distillation have a teacher's logits in place of targets (`vit.weights.teacher`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.config.loss_section import LossConfig

Loss = Callable[[Tensor, Tensor], Tensor]
"""Logits (B, classes), soft targets (B, classes) -> (B,) float32."""


def create_loss(config: LossConfig, num_classes: int, device: torch.device) -> Loss:
    """Create the loss of `config`; ValueError if its weights are not one for each class."""
    weights = None
    if config.class_weights is not None:
        if len(config.class_weights) != num_classes:
            raise ValueError(
                f"loss.class_weights has {len(config.class_weights)} numbers, the model has"
                f" {num_classes} classes: give one for each"
            )
        weights = torch.tensor(config.class_weights, device=device)
    if config.name == "bce":
        return partial(
            binary_cross_entropy,
            label_smoothing=config.label_smoothing,
            target_thresh=config.bce_target_thresh,
            sum_classes=config.bce_sum,
            class_weights=weights,
        )
    return partial(cross_entropy, label_smoothing=config.label_smoothing, class_weights=weights)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Cross-entropy (B,) of `logits` (B, classes) with soft `targets` (B, classes), in fp32.

    Smoothing as in Szegedy et al. 2016, section 7: the fraction `label_smoothing` of each target
    is spread over all classes. class_weights: (classes,).
    """
    # In fp32 also under autocast: bf16 cannot tell losses apart that differ by less than 0.4 %.
    log_probabilities = logits.float().log_softmax(-1)
    if class_weights is not None:
        log_probabilities = log_probabilities * class_weights
    loss = -(targets * log_probabilities).sum(-1)
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * log_probabilities.mean(-1)
    return loss


def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    target_thresh: float | None = None,
    sum_classes: bool = False,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Binary cross-entropy of sigmoid(`logits`) with soft `targets`, as `cross_entropy`'s; mean
    over the classes, or their sum.

    Smoothing and threshold as in timm, in this order: timm:timm/loss/binary_cross_entropy.py and
    timm/data/mixup.py; facebookresearch/deit:engine.py has a threshold of 0.
    """
    targets = targets.float()
    if label_smoothing:
        targets = targets * (1.0 - label_smoothing) + label_smoothing / targets.shape[-1]
    if target_thresh is not None:
        targets = targets.gt(target_thresh).float()
    losses = F.binary_cross_entropy_with_logits(
        logits.float(), targets, class_weights, reduction="none"
    )
    return losses.sum(-1) if sum_classes else losses.mean(-1)


def hard_distillation(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Cross-entropy (B,) of `logits` (B, classes) with the class that the teacher finds likeliest.

    Touvron et al. 2021 (DeiT), equation 3; facebookresearch/deit:losses.py,
    timm:timm/task/token_distillation.py. Of a mixture that is one class, too.
    """
    return F.cross_entropy(logits.float(), teacher_logits.argmax(-1), reduction="none")


def soft_distillation(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence (B,) of softmax(`logits` / T) from the teacher's, times T**2.

    Hinton et al. 2015 (arXiv 1503.02531), section 2: the factor keeps gradients as large at any
    temperature T. The sum over classes, as timm:timm/task/distillation.py;
    facebookresearch/deit:losses.py divides it by the number of classes.
    """
    log_probabilities = (logits.float() / temperature).log_softmax(-1)
    of_teacher = (teacher_logits.float() / temperature).log_softmax(-1)
    divergence = F.kl_div(log_probabilities, of_teacher, reduction="none", log_target=True)
    return divergence.sum(-1) * temperature**2
