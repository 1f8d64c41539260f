"""Losses for soft targets: cross-entropy, and binary cross-entropy per class.

Soft targets come from `vit.data.augment.apply` (one-hot rows, mixed by MixUp and CutMix). The
losses include label smoothing. The training step weights and sums the row losses. Distillation
losses replace the targets with a teacher's logits (`vit.training.teacher`).
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vit.config.schema import LossConfig
from vit.data.sources import TrainSet, images_by_class
from vit.system.spelling import few

Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss function: logits (B, classes), soft targets (B, classes) -> (B,) float32."""


def choose_class_weights(
    config: LossConfig, train_set: TrainSet, num_classes: int
) -> tuple[float, ...] | None:
    """Return the class weights, computed from image counts if "balanced", or None if unset.

    Raises ValueError if the number of weights differs from `num_classes`, or if a balanced weight
    is undefined because a class has no images.
    """
    setting = config.class_weights
    if setting is None:
        return None
    if setting != "balanced":
        if len(setting) != num_classes:
            raise ValueError(
                f"loss.class_weights has {len(setting)} numbers, but the model has {num_classes}"
                " classes: give one number per class"
            )
        return setting

    counts = images_by_class(train_set, num_classes)
    if not counts.all():
        missing = np.flatnonzero(counts == 0).tolist()
        names = train_set.split.class_names
        shown = [repr(names[i]) if i < len(names) else str(i) for i in missing]
        raise ValueError(
            f"loss.class_weights=balanced: {len(missing):,} of {num_classes:,} classes have no"
            f" training images ({few(shown)}): give the weights as numbers, or choose images of all"
            " classes"
        )
    # This is the formula in sklearn/utils/class_weight.py, compute_class_weight.
    balanced: list[float] = (counts.sum() / (num_classes * counts)).tolist()
    return tuple(balanced)


def describe_class_weights(
    weights: Sequence[float] | None, class_names: Sequence[str]
) -> list[str]:
    """Return a line with the smallest and largest class weights, or [] if there are none."""
    if weights is None:
        return []

    def describe(number: int) -> str:
        name = f"'{class_names[number]}'" if number < len(class_names) else f"class {number}"
        return f"{weights[number]:.3g} ({name})"

    by_weight = sorted(range(len(weights)), key=weights.__getitem__)
    return [f"class weights: {describe(by_weight[0])} to {describe(by_weight[-1])}"]


def create_loss(
    config: LossConfig, class_weights: Sequence[float] | None, device: torch.device
) -> Loss:
    """Create the loss function of `config`. class_weights: from `choose_class_weights`."""
    weights = (
        None
        if class_weights is None
        else torch.tensor(class_weights, dtype=torch.float32, device=device)
    )

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
    """Return the cross-entropy (B,) of `logits` with soft `targets`, both (B, classes), in fp32.

    Label smoothing follows Szegedy et al. 2016, section 7: the fraction `label_smoothing` of each
    target is spread over all classes. class_weights: (classes,).
    """
    # Compute in fp32 even under autocast, because bf16 rounds away differences below 0.4 %.
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
    """Return the binary cross-entropy (B,) of sigmoid(`logits`) with soft `targets`: the mean over
    the classes, or the sum.

    Smoothing precedes the threshold, as in timm:timm/loss/binary_cross_entropy.py and
    timm/data/mixup.py. facebookresearch/deit:engine.py uses a threshold of 0.
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
    """Return the cross-entropy (B,) of `logits` (B, classes) with the teacher's top class.

    From Touvron et al. 2021 (DeiT), equation 3; facebookresearch/deit:losses.py,
    timm:timm/task/token_distillation.py. Even a mixed image has a single target class.
    """
    return F.cross_entropy(logits.float(), teacher_logits.argmax(-1), reduction="none")


def soft_distillation(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return the Kullback-Leibler divergence (B,) of softmax(`logits` / T) from the teacher's
    softmax, times T**2.

    From Hinton et al. 2015 (arXiv 1503.02531), section 2: the factor T**2 makes the scale of
    gradients independent of the temperature T. The divergence is summed over classes, as in
    timm:timm/task/distillation.py, whereas facebookresearch/deit:losses.py also divides by the
    number of classes.
    """
    log_probabilities = (logits.float() / temperature).log_softmax(-1)
    teacher_log_probabilities = (teacher_logits.float() / temperature).log_softmax(-1)
    divergence = F.kl_div(
        log_probabilities, teacher_log_probabilities, reduction="none", log_target=True
    )
    return divergence.sum(-1) * temperature**2
