"""What is done about an update that would harm: the section `guard` of a config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vit.config.base import OnlyWith, Positive, Section

Action = Literal["skip", "stop", "rewind"]


class GuardConfig(Section):
    """What is done about a gradient that is not finite, and about a jump of loss or gradient
    (docs/training.md)."""

    on_nonfinite: Action = "skip"
    """For a gradient that is not finite, which never reaches the weights: only leave out the
    update; stop the run; or go back to the newest checkpoint and pass over the batches around this
    one. What fp16's loss scale overflows is always only left out."""
    on_spike: Literal["none"] | Action = "none"
    """The same for an update whose loss or gradient norm is a spike; `none`: it is made."""
    spike_of: Annotated[
        Literal["loss", "grad_norm", "either"], OnlyWith("on_spike=skip|stop|rewind")
    ] = "loss"
    """What has to be above its limit; norms of gradients vary more."""
    spike_sigmas: Annotated[float, Field(gt=0), OnlyWith("on_spike=skip|stop|rewind")] = 10.0
    """The limit: the median of the last `window_steps` steps, and so many of their standard
    deviations (1.4826 times the median distance from the median)."""
    window_steps: Annotated[int, Field(ge=8), OnlyWith("on_spike=skip|stop|rewind")] = 128
    """Steps whose losses and gradient norms are compared with; before so many there is no
    limit."""
    rewind_skip_steps: Annotated[
        int, Field(ge=0), OnlyWith("on_nonfinite=rewind", "on_spike=rewind")
    ] = 100
    """Batches passed over before and after the one in question; 0: this one alone."""
    max_rewinds: Annotated[Positive, OnlyWith("on_nonfinite=rewind", "on_spike=rewind")] = 10
    """A further one stops the run."""

    def rewinds(self) -> bool:
        """Whether a run may go back."""
        return "rewind" in (self.on_nonfinite, self.on_spike)
