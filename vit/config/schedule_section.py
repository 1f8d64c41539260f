"""The section `schedule` of the config: learning rate over the steps (`vit.optim.schedule`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vit.config.base import Section


class ScheduleConfig(Section):
    """Learning rate over the steps: linear warm-up from 0, then one of three shapes."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Length of the warm-up in steps; this, `warmup_epochs`, or neither for none."""
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None
    """Length of the warm-up in epochs."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate that `cosine` and `linear` fall to at the end of the run."""
