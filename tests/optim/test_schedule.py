"""Compare learning rates and weight decay with those of torch's and timm's schedulers, including
edge cases."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.scheduler import CosineLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.scheduler.wsd_lr import WSDLRScheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from vit.config.io import from_dict
from vit.optim.schedule import lr_at, weight_decay_at
from vit.training.plan import make_plan, rates

PEAK = 0.3


def torch_rates(num_steps: int, scheduler: type[LRScheduler], **options) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=PEAK)
    schedule = scheduler(optimizer, **options)
    rates = [PEAK * options.get("start_factor", 1.0)]
    for _ in range(num_steps):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("min_lr", [0.0, 0.02])
@pytest.mark.parametrize("warmup_steps", [0, 7])
def test_cosine_equals_torch_after_warm_up(warmup_steps, min_lr):
    total = 50
    theirs = torch_rates(
        total - warmup_steps, CosineAnnealingLR, T_max=total - warmup_steps, eta_min=min_lr
    )
    ours = [
        lr_at(step, peak_lr=PEAK, total_steps=total, warmup_steps=warmup_steps, min_lr=min_lr)
        for step in range(warmup_steps, total + 1)
    ]
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("min_lr", [0.0, 0.02])
def test_linear_equals_torch(min_lr):
    theirs = torch_rates(40, LinearLR, start_factor=1.0, end_factor=min_lr / PEAK, total_iters=40)
    assert [
        lr_at(step, peak_lr=PEAK, total_steps=40, name="linear", min_lr=min_lr)
        for step in range(41)
    ] == pytest.approx(theirs)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_warm_up_equals_linear_lr_of_torch_and_ends_at_the_peak(name):
    theirs = torch_rates(9, LinearLR, start_factor=0.1, total_iters=9)
    ours = [
        lr_at(step, peak_lr=PEAK, total_steps=30, warmup_steps=10, name=name) for step in range(10)
    ]
    assert ours == pytest.approx(theirs)
    assert ours[-1] == PEAK


@given(
    st.sampled_from(["cosine", "linear", "constant"]),
    st.integers(1, 500),
    st.integers(0, 600),
    st.floats(1e-6, 10),
    st.floats(0, 1),
)
def test_the_rate_rises_to_the_peak_and_falls_to_the_minimum_when_the_run_ends(
    name, total_steps, warmup_steps, peak_lr, share
):
    min_lr = 0.0 if name == "constant" else share * peak_lr
    rates = [
        lr_at(
            s,
            peak_lr=peak_lr,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            name=name,
            min_lr=min_lr,
        )
        for s in range(total_steps + 1)
    ]
    top = min(warmup_steps, total_steps)
    assert rates[:top] == sorted(rates[:top])
    assert all(
        a >= b - 1e-12 * peak_lr for a, b in zip(rates[top:], rates[top + 1 :], strict=False)
    )
    assert all(0 <= rate <= peak_lr * (1 + 1e-12) for rate in rates)
    if warmup_steps < total_steps:
        assert math.isclose(
            rates[-1], peak_lr if name == "constant" else min_lr, abs_tol=1e-12 * peak_lr
        )
    assert all(rate > 0 for rate in rates[:total_steps]), "no update may be wasted on a rate of 0"


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_the_decay_is_half_done_half_way(name):
    assert lr_at(
        15, peak_lr=1.0, total_steps=25, warmup_steps=5, name=name, min_lr=0.2
    ) == pytest.approx(0.6)


# --- schedules of other programs ------------------------------------------------------------------


def timm_rates(num_steps: int, scheduler: type[Scheduler], in_epochs: int = 0, **options):
    """Return the learning rates of timm's train.py, which change after each update or, if
    `in_epochs` is set, after each epoch of `in_epochs` steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=PEAK)
    schedule = scheduler(optimizer, t_in_epochs=bool(in_epochs), **options)
    rates = []
    for step in range(num_steps):
        if in_epochs and step and step % in_epochs == 0:
            schedule.step(step // in_epochs)
        if not in_epochs and step:
            schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def our_rates(num_steps: int, **options) -> list[float]:
    return [lr_at(s, peak_lr=PEAK, total_steps=num_steps, **options) for s in range(num_steps)]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("cooldown", [0, 2])
@pytest.mark.parametrize("per_epoch", [True, False])
def test_cosine_with_warm_up_and_cool_down_equals_timm(per_epoch, cooldown, prefix):
    """DeiT's schedule has no warm-up prefix, starts at 1e-6 and changes once per epoch."""
    epochs, length, warmup = 12, 5, 3
    unit = 1 if per_epoch else length
    theirs = timm_rates(
        epochs * length,
        CosineLRScheduler,
        in_epochs=length if per_epoch else 0,
        # With a prefix, timm counts epochs from the end of the warm-up.
        t_initial=(epochs - cooldown - (warmup if prefix else 0)) * unit,
        warmup_t=warmup * unit,
        warmup_lr_init=1e-6,
        warmup_prefix=prefix,
        lr_min=0.01,
    )
    ours = our_rates(
        epochs * length,
        warmup_steps=warmup * length,
        warmup_lr=1e-6,
        warmup_prefix=prefix,
        min_lr=0.01,
        cooldown_steps=cooldown * length,
        interval_steps=length if per_epoch else 1,
    )
    assert ours == pytest.approx(theirs)
    assert ours[-1] == pytest.approx(0.01) or not cooldown


@pytest.mark.parametrize("form", ["linear", "1-sqrt"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_warm_up_stable_decay_equals_timm(warmup, form):
    theirs = timm_rates(
        40,
        WSDLRScheduler,
        t_initial=38 - warmup,
        decay_t=10,
        decay_fn=form,
        lr_min=0.02,
        warmup_t=warmup,
        warmup_lr_init=0.001,
    )
    ours = our_rates(
        40,
        name="wsd",
        decay_steps=10,
        decay_form=form,
        min_lr=0.02,
        warmup_steps=warmup,
        warmup_lr=0.001,
        cooldown_steps=2,
    )
    assert ours == pytest.approx(theirs)


def test_warm_up_per_epoch_equals_torchvision():
    """In each epoch, torchvision's references/classification/train.py first steps LinearLR and then
    CosineAnnealingLR."""
    epochs, warmup, length = 12, 4, 3
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=PEAK)
    linear = LinearLR(optimizer, start_factor=0.033, total_iters=warmup)
    cosine = CosineAnnealingLR(optimizer, T_max=epochs - warmup)
    schedule = SequentialLR(optimizer, [linear, cosine], milestones=[warmup])
    theirs = []
    for _ in range(epochs):
        theirs += [optimizer.param_groups[0]["lr"]] * length
        optimizer.step()
        schedule.step()
    ours = our_rates(
        epochs * length, warmup_steps=warmup * length, warmup_lr=0.033 * PEAK, interval_steps=length
    )
    assert ours == pytest.approx(theirs)


def test_weight_decay_follows_the_cosine_of_torch():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.04)
    schedule = CosineAnnealingLR(optimizer, T_max=30, eta_min=0.4)
    theirs = []
    for _ in range(30):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ours = [weight_decay_at(s, first=0.04, final=0.4, total_steps=30) for s in range(30)]
    assert ours == pytest.approx(theirs)


def test_a_config_and_its_plan_give_the_rates(tmp_path):
    values = {
        "data": {"root": "shards", "global_batch_size": 10},
        "train": {"epochs": 8},
        "optim": {"lr": PEAK, "weight_decay": 0.04},
        "schedule": {
            "interval": "epoch",
            "warmup_epochs": 2,
            "warmup_lr": 1e-6,
            "warmup_prefix": False,
            "cooldown_epochs": 1,
            "min_lr": 0.01,
            "final_weight_decay": 0.4,
        },
    }
    config = from_dict(values, "test")
    plan, _ = make_plan(config, num_samples=50, world_size=1)
    learning_rate, weight_decay = rates(config, plan)
    options = {"t_initial": 7, "warmup_t": 2, "warmup_lr_init": 1e-6, "lr_min": 0.01}
    expected = timm_rates(40, CosineLRScheduler, in_epochs=5, **options)
    assert [learning_rate(step) for step in range(40)] == pytest.approx(expected)
    assert (weight_decay(0), weight_decay(20)) == pytest.approx((0.04, 0.22))
    values["schedule"]["cooldown_epochs"] = 7
    with pytest.raises(
        ValueError, match=r"\(warm-up 10, cool-down 35 steps\) exceed the 40 steps of the run"
    ):
        make_plan(from_dict(values, "test"), num_samples=50, world_size=1)


def test_a_decay_at_the_end_takes_a_fraction_of_the_run():
    values = {"data": {"root": "shards", "global_batch_size": 10}, "train": {"steps": 33}}
    for schedule, expected in (
        ({"name": "cosine"}, 0),
        ({"name": "wsd"}, 7),
        ({"name": "wsd", "decay_fraction": 0.01}, 1),
        ({"name": "wsd", "decay_fraction": 0.5, "decay_form": "linear"}, 16),
    ):
        config = from_dict({**values, "schedule": schedule}, "test")
        plan, _ = make_plan(config, num_samples=50, world_size=1)
        assert plan.decay_steps == expected
    learning_rate, _ = rates(config, plan)
    peak = config.optim.lr
    assert [learning_rate(step) for step in (16, 17, 25)] == [peak, peak, peak / 2]
