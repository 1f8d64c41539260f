"""The section `loss` of the config (`vit.training.loss`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vit.config.base import OnlyWith, Rate, Section


class LossConfig(Section):
    """What training makes small, of soft targets; evaluation always reports cross-entropy."""

    name: Annotated[Literal["cross_entropy", "bce"], OnlyWith("distill.task_loss_weight")] = (
        "cross_entropy"
    )
    """`bce`: binary cross-entropy of each class by itself (timm's "ResNet strikes back", DeiT III,
    big_vision's sigmoid_xent)."""
    label_smoothing: Annotated[Rate, OnlyWith("distill.task_loss_weight")] = 0.0
    """Fraction of the target spread evenly over all classes, before a threshold."""
    bce_target_thresh: Annotated[
        Rate | None, OnlyWith("distill.task_loss_weight"), OnlyWith("name=bce")
    ] = None
    """A target above this is 1, any other 0, after mixing (timm's name; DeiT III: 0);
    `None`: soft targets."""
    bce_sum: Annotated[bool, OnlyWith("distill.task_loss_weight"), OnlyWith("name=bce")] = False
    """Sum over the classes (big_vision; timm's --bce-sum) in place of their mean (timm,
    DeiT III)."""
    class_weights: Annotated[
        Literal["balanced"] | tuple[Annotated[float, Field(ge=0)], ...] | None,
        OnlyWith("distill.task_loss_weight"),
    ] = None
    """Factor of each class's part of the loss, in the order of the classes, as torch's losses have
    it; the mean over images is not divided by them. `balanced`: images / (classes x images of the
    class), of those trained on (scikit-learn). `None`: 1."""
