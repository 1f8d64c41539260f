"""Learning rate and weight decay as pure functions of the step.

They have no state, so a resumed run has the rates of an uninterrupted one.
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
    warmup_lr: float | None = None,
    warmup_prefix: bool = True,
    decay_steps: int = 0,
    decay_form: str = "1-sqrt",
    cooldown_steps: int = 0,
    interval_steps: int = 1,
) -> float:
    """Return the learning rate at `step` in [0, total_steps), constant for `interval_steps`.

    Linear warm-up: the update at step s has (s + 1) / warmup_steps of the peak. With `warmup_lr`
    it begins at that rate, and reaches the peak one step after the warm-up, as in timm. After it:
    `cosine` (Loshchilov & Hutter 2017, equation 5, without restarts) or `linear` from the peak to
    `min_lr` at the beginning of the cool-down; `constant`; or `wsd`, which is constant until
    `decay_steps` before the cool-down (timm:timm/scheduler/wsd_lr.py). The cool-down, the last
    steps, has `min_lr`. Unless `warmup_lr` or `min_lr` with a cool-down is 0, no update has a rate
    of 0.
    """
    time = step - step % interval_steps
    end = total_steps - cooldown_steps
    if time < warmup_steps:
        if warmup_lr is not None:
            return warmup_lr + (peak_lr - warmup_lr) * time / warmup_steps
        return peak_lr * min(time + interval_steps, warmup_steps) / warmup_steps
    if name == "constant":
        return peak_lr
    begin = warmup_steps if warmup_prefix else 0
    if name == "wsd":
        begin = end - decay_steps
    progress = min(max(time - begin, 0) / max(end - begin, 1), 1.0)
    fraction = 1.0 - progress
    if name == "cosine":
        fraction = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif name == "wsd" and decay_form == "1-sqrt":
        fraction = 1.0 - math.sqrt(progress)
    return min_lr + (peak_lr - min_lr) * fraction


def weight_decay_at(step: int, *, first: float, final: float, total_steps: int) -> float:
    """Return the weight decay at `step`: a cosine from `first` to `final` at `total_steps`
    (facebookresearch/dino:utils.py, cosine_scheduler)."""
    return final + 0.5 * (first - final) * (1.0 + math.cos(math.pi * step / total_steps))
