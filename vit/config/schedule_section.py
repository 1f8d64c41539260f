"""The section `schedule` of the config: what changes over the run, rates (`vit.optim.schedule`) and
the size of training images (`vit.layers.image_sizes`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vit.config.base import OnlyWith, Positive, Section, Size


class ImageSizeStage(Section):
    """Epochs whose training images have another size than `model.image_size`."""

    until_epoch: Positive
    """Epochs of the run after which it ends."""
    image_size: Size
    """Side of the square training image, or `[height, width]`: multiples of the patch."""


class ScheduleConfig(Section):
    """What changes over the run: learning rate (linear warm-up, a shape, and a cool-down), weight
    decay, and the size of training images."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up. `wsd`: constant, then a decay at the end (warm-up, stable, decay:
    MiniCPM, arXiv 2404.06395)."""
    interval: Annotated[
        Literal["step", "epoch"], OnlyWith("name!=constant", "warmup_epochs", "warmup_steps")
    ] = "step"
    """When the rate changes; `epoch`: at the beginning of each, as in DeiT, torchvision, and timm
    without --sched-on-updates."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Length of the warm-up in steps; this, `warmup_epochs`, or neither for none."""
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None
    """Length of the warm-up in epochs."""
    warmup_lr: Annotated[
        Annotated[float, Field(ge=0)] | None, OnlyWith("warmup_epochs", "warmup_steps")
    ] = None
    """Learning rate of the first update, from which the warm-up rises to the peak right behind it
    (timm, DeiT: 1e-6; torchvision: a part of the peak; 0: big_vision, MAE). `None`: the first has
    one part of as many as the warm-up has steps, the last of them the peak."""
    warmup_prefix: Annotated[
        bool, OnlyWith("warmup_epochs", "warmup_steps"), OnlyWith("name=cosine|linear")
    ] = True
    """`cosine` and `linear` begin behind the warm-up (MAE, big_vision, torchvision); `false`: with
    the run, so that the warm-up ends with a jump to where they have come (timm, DeiT)."""
    decay_steps: Annotated[Positive | None, OnlyWith("name=wsd")] = None
    """For `wsd`: length of the decay in steps; this or `decay_epochs`."""
    decay_epochs: Annotated[Annotated[float, Field(gt=0)] | None, OnlyWith("name=wsd")] = None
    """For `wsd`: length of the decay in epochs."""
    decay_form: Annotated[Literal["1-sqrt", "linear"], OnlyWith("name=wsd")] = "1-sqrt"
    """For `wsd`: how it decays, by 1 minus the root of the time (timm's default; arXiv 2405.18392)
    or in a line."""
    cooldown_epochs: Annotated[Annotated[float, Field(gt=0)] | None, OnlyWith("name!=constant")] = (
        None
    )
    """Epochs at the end of the run that have `min_lr`, which the shape has reached by then (timm;
    there they come on top of the epochs, here they are part of them)."""
    min_lr: Annotated[float, Field(ge=0), OnlyWith("name!=constant")] = 0.0
    """Learning rate that all but `constant` fall to at the end."""
    final_weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay at the end of the run, by a cosine from `optim.weight_decay` (DINO, BEiT);
    `None`: it stays."""
    image_sizes: tuple[ImageSizeStage, ...] = ()
    """Sizes of training images before the last epochs, which have `model.image_size`, as
    `[{until_epoch: 180, image_size: 160}, {until_epoch: 240, image_size: 192}]` (EfficientNetV2,
    arXiv 2104.00298; docs/training.md). Evaluation has `model.image_size` throughout."""
