"""The section `loss` of the config (`vit.loss`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vit.config.base import Rate, Section


class LossConfig(Section):
    """What training makes small, of soft targets; evaluation always reports cross-entropy."""

    name: Literal["cross_entropy", "bce"] = "cross_entropy"
    """`bce`: binary cross-entropy of each class by itself (timm's "ResNet strikes back", DeiT III,
    big_vision's sigmoid_xent)."""
    label_smoothing: Rate = 0.0
    """Fraction of the target spread evenly over all classes, before a threshold."""
    bce_target_thresh: Rate | None = None
    """For `bce`: a target above this is 1, any other 0, after mixing (timm's name; DeiT III: 0);
    `None`: soft targets."""
    bce_sum: bool = False
    """For `bce`: sum over the classes (big_vision; timm's --bce-sum) in place of their mean (timm,
    DeiT III)."""
    class_weights: Literal["balanced"] | tuple[Annotated[float, Field(ge=0)], ...] | None = None
    """Factor of each class's part of the loss, in the order of the classes, as torch's losses have
    it; the mean over images is not divided by them. `balanced`: images / (classes x images of the
    class), of those trained on (scikit-learn). `None`: 1."""
