"""Learning rate as a pure function of the step.

Without state a resumed run has the learning rates of the uninterrupted one.
"""

from __future__ import annotations

import math


def lr_at(
    step: int,
    *,
    peak_lr: float,
    total_steps: int,
    warmup_steps: int = 0,
    name: str = "cosine",
    min_lr: float = 0.0,
) -> float:
    """Learning rate of the update at `step` in [0, total_steps).

    Linear warm-up: the update at step s has (s + 1) / warmup_steps of the peak. Then `cosine`
    (Loshchilov & Hutter 2017, equation 5, without restarts) or `linear` from the peak towards
    `min_lr`, which would be reached at `total_steps`, or `constant`. No update has a rate of 0.
    """
    if step < warmup_steps:
        return peak_lr * (step + 1) / warmup_steps
    if name == "constant":
        return peak_lr
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    fraction = 1.0 - progress
    if name == "cosine":
        fraction = 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr + (peak_lr - min_lr) * fraction
