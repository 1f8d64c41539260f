"""Compute learning rate and weight decay as pure functions of the step.

The functions have no state, so a resumed run gets the same values as an uninterrupted run.
"""

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
    """Return the learning rate at `step` in [0, total_steps), which changes only every
    `interval_steps` steps.

    Warmup is linear: the update at step s uses (s + 1) / warmup_steps of the peak. With
    `warmup_lr`, the warmup starts at that rate and reaches the peak one step after the warmup, as
    in timm. After the warmup, `cosine` (Loshchilov & Hutter 2017, equation 5, without restarts) and
    `linear` decay from the peak to `min_lr`; `constant` keeps the peak; `wsd` keeps the peak until
    the last `decay_steps` before the cooldown (timm:timm/scheduler/wsd_lr.py). The last
    `cooldown_steps` use `min_lr`. The rate is 0 only if `warmup_lr` is 0, or if `min_lr` is 0 and a
    cooldown is set.
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
    """Return the weight decay at `step`, which follows a cosine from `first` to `final` at
    `total_steps` (facebookresearch/dino:utils.py, cosine_scheduler)."""
    return final + 0.5 * (first - final) * (1.0 + math.cos(math.pi * step / total_steps))
