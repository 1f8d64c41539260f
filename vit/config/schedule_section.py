"""The section `schedule` of the config: rates over the steps (`vit.optim.schedule`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vit.config.base import Positive, Section


class ScheduleConfig(Section):
    """Learning rate over the steps: linear warm-up, a shape, and a cool-down; and weight decay."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up. `wsd`: constant, then a decay at the end (warm-up, stable, decay:
    MiniCPM, arXiv 2404.06395)."""
    interval: Literal["step", "epoch"] = "step"
    """When the rate changes; `epoch`: at the beginning of each, as in DeiT, torchvision, and timm
    without --sched-on-updates."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Length of the warm-up in steps; this, `warmup_epochs`, or neither for none."""
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None
    """Length of the warm-up in epochs."""
    warmup_lr: Annotated[float, Field(ge=0)] | None = None
    """Learning rate of the first update, from which the warm-up rises to the peak right behind it
    (timm, DeiT: 1e-6; torchvision: a part of the peak; 0: big_vision, MAE). `None`: the first has
    one part of as many as the warm-up has steps, the last of them the peak."""
    warmup_prefix: bool = True
    """`cosine` and `linear` begin behind the warm-up (MAE, big_vision, torchvision); `false`: with
    the run, so that the warm-up ends with a jump to where they have come (timm, DeiT)."""
    decay_steps: Positive | None = None
    """For `wsd`: length of the decay in steps; this or `decay_epochs`."""
    decay_epochs: Annotated[float, Field(gt=0)] | None = None
    """For `wsd`: length of the decay in epochs."""
    decay_form: Literal["1-sqrt", "linear"] = "1-sqrt"
    """For `wsd`: how it decays, by 1 minus the root of the time (timm's default; arXiv 2405.18392)
    or in a line."""
    cooldown_epochs: Annotated[float, Field(gt=0)] | None = None
    """Epochs at the end of the run that have `min_lr`, which the shape has reached by then (timm;
    there they come on top of the epochs, here they are part of them)."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate that all but `constant` fall to at the end."""
    final_weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay at the end of the run, by a cosine from `optim.weight_decay` (DINO, BEiT);
    `None`: it stays."""
