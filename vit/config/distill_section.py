"""The section `distill` of the config: a teacher, and how it is heard (`vit.training.teacher`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vit.config.base import MAY_CHANGE, OnlyWith, Section


class DistillConfig(Section):
    """What a trained model, the teacher, says of each training image is a second target.

    A model with `model.dist_token` learns it with its second head (DeiT, arXiv 2012.12877), any
    other one with its only head.
    """

    teacher: Annotated[str | None, MAY_CHANGE] = None
    """Weights of the teacher: run folder, checkpoint folder, exported folder or file, ours or of
    another program, of any model of timm too. A resumed run compares the weights, not the path.
    `None`: no teacher."""
    teacher_model: Annotated[str | None, OnlyWith("teacher")] = None
    """timm's name of a teacher that was trained elsewhere, if neither file nor folder says it."""
    distill_type: Annotated[Literal["hard", "soft"], OnlyWith("teacher")] = "hard"
    """`hard`: cross-entropy with the class that the teacher finds likeliest (DeiT's best); `soft`:
    the Kullback-Leibler divergence from all of its probabilities (timm's `logit`)."""
    temperature: Annotated[
        float, Field(gt=0), OnlyWith("teacher"), OnlyWith("distill_type=soft")
    ] = 1.0
    """Logits of both are divided by it, and the divergence is multiplied by its square
    (Hinton et al. 2015; timm's --kd-temperature, DeiT's tau)."""
    task_loss_weight: Annotated[float, Field(ge=0), OnlyWith("teacher")] = 0.5
    """Factor of the loss of the labels (timm's name; DeiT's 1 - alpha); 0: the teacher alone."""
    distill_loss_weight: Annotated[float, Field(gt=0), OnlyWith("teacher")] = 0.5
    """Factor of the loss of the teacher, a mean over images and a sum over classes (timm's name;
    DeiT's alpha, for `soft` over the number of classes, as its code takes their mean)."""
    precision: Annotated[Literal["fp32", "bf16", "fp16"] | None, OnlyWith("teacher")] = None
    """Format of the teacher's matrix products; `None`: `train.precision`, as DeiT and timm do."""
