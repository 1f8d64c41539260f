"""Test that our formulas for other programs' learning rates match the schedulers of timm and
torch."""

from __future__ import annotations

import math

import pytest
import torch
from timm.scheduler import create_scheduler_v2

from vit.extras.recipes.rates import (
    after_warmup,
    distance,
    our_rate,
    timm_cosine,
    timm_step,
    timm_wsd,
)


def optimizer(lr):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


@pytest.mark.parametrize("warmup_prefix", [False, True])
@pytest.mark.parametrize("k_decay", [1.0, 1.5])
def test_our_formula_for_timms_cosine_per_epoch_equals_timms(warmup_prefix, k_decay):
    group = optimizer(3e-3)
    options = {"warmup_lr": 1e-6, "min_lr": 1e-5, "warmup_prefix": warmup_prefix}
    options |= {"k_decay": k_decay}
    scheduler, epochs = create_scheduler_v2(group, "cosine", 40, warmup_epochs=5, **options)
    rate = timm_cosine(3e-3, 40, warmup_epochs=5, **options)
    for epoch in range(epochs):
        assert rate(epoch + 0.3) == pytest.approx(group.param_groups[0]["lr"], rel=1e-12)
        scheduler.step(epoch + 1)
    # After the last epoch, the schedule cools down.
    assert rate(epochs + 3) == pytest.approx(1e-5)


def test_our_formula_for_timms_cosine_per_step_equals_timms():
    group = optimizer(1e-3)
    scheduler, _ = create_scheduler_v2(
        group, "cosine", 10, warmup_epochs=2, warmup_lr=1e-5, step_on_epochs=False,
        updates_per_epoch=7,
    )  # fmt: skip
    rate = timm_cosine(1e-3, 10, warmup_epochs=2, warmup_lr=1e-5, per_step=True)
    for step in range(70):
        assert rate(step / 7) == pytest.approx(group.param_groups[0]["lr"], rel=1e-9)
        scheduler.step_update(step + 1)


def test_the_rate_of_deits_main_lags_by_an_epoch():
    """DeiT calls `lr_scheduler.step(epoch)` after each epoch (facebookresearch/deit@7e160fe4)."""
    group = optimizer(1e-3)
    scheduler, _ = create_scheduler_v2(
        group, "cosine", 30, warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5
    )
    rate = timm_cosine(1e-3, 30, warmup_epochs=5, warmup_lr=1e-6, min_lr=1e-5, late=1)
    for epoch in range(30):
        assert rate(epoch) == pytest.approx(group.param_groups[0]["lr"], rel=1e-12)
        scheduler.step(epoch)


def test_our_formula_for_timms_step_schedule_equals_timms():
    group = optimizer(0.016)
    scheduler, _ = create_scheduler_v2(
        group, "step", 30, decay_epochs=2.4, decay_rate=0.97, warmup_epochs=3, warmup_lr=1e-6
    )
    for epoch in range(30):
        if epoch >= 3:
            ours = timm_step(0.016, epoch, 2.4, 0.97)
            assert ours == pytest.approx(group.param_groups[0]["lr"], rel=1e-12)
        scheduler.step(epoch + 1)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.filterwarnings("ignore:.*epoch parameter.*:UserWarning")
def test_our_formula_for_torchvisions_rate_equals_torchs(linear):
    """The scheduler is built as in torchvision's references/classification/train.py."""
    group = optimizer(0.5)
    kinds = torch.optim.lr_scheduler
    first = (
        kinds.LinearLR(group, start_factor=0.033, total_iters=6)
        if linear
        else kinds.ConstantLR(group, factor=0.033, total_iters=6)
    )
    cosine = kinds.CosineAnnealingLR(group, T_max=24, eta_min=1e-3)
    scheduler = kinds.SequentialLR(group, [first, cosine], milestones=[6])
    rate = after_warmup(
        0.5,
        30,
        warmup_epochs=6,
        warmup_lr=0.5 * 0.033,
        min_lr=1e-3,
        warmup_changes="each epoch" if linear else "never",
        per_epoch=True,
    )
    for epoch in range(30):
        assert rate(epoch + 0.9) == pytest.approx(group.param_groups[0]["lr"], rel=1e-9)
        group.step()
        scheduler.step()


def test_our_formula_for_maes_rate_equals_maes():
    """The expected learning rate comes from adjust_learning_rate in
    facebookresearch/mae@efb2a806:util/lr_sched.py."""
    rate = after_warmup(2e-3, 100, warmup_epochs=5, min_lr=1e-6)
    assert rate(2.5) == pytest.approx(1e-3)
    assert rate(5) == pytest.approx(2e-3)
    middle = 1e-6 + (2e-3 - 1e-6) * 0.5 * (1 + math.cos(math.pi * (52.5 - 5) / 95))
    assert rate(52.5) == pytest.approx(middle)
    linear = after_warmup(1.0, 10, warmup_epochs=2, warmup_lr=0.2, linear=True)
    assert [linear(t) for t in (0, 1, 2, 6)] == pytest.approx([0.2, 0.6, 1.0, 0.5])
    stairs = after_warmup(1.0, 10, warmup_epochs=2, per_epoch=True)
    assert stairs(4.9) == stairs(4.0)


def test_rates_are_compared_as_shares_of_the_peak():
    settings = {"optim.lr": 2e-3, "train.epochs": 100, "schedule.warmup_epochs": 5}
    ours = our_rate({**settings, "schedule.min_lr": 1e-6}, steps_per_epoch=1251)
    same = distance(after_warmup(2e-3, 100, warmup_epochs=5, min_lr=1e-6), ours, 2e-3, 100)
    # The schedules may differ by one step of a warm-up that takes 6,255 steps.
    assert same.largest < 1e-3
    late = timm_cosine(2e-3, 100, warmup_epochs=5, min_lr=1e-6, late=1)
    difference = distance(late, ours, 2e-3, 100)
    # The difference corresponds to two of the five warm-up epochs.
    assert difference.largest == pytest.approx(0.4, abs=0.02)
    assert difference.at_epoch < 6
    assert 0.02 < difference.mean < 0.04


@pytest.mark.parametrize("decay_fn", ["1-sqrt", "linear", "cosine", "power", "exp", None])
@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_our_formula_for_timms_wsd_equals_timms(decay_fn, per_step, prefix):
    group = optimizer(3e-3)
    scheduler, epochs = create_scheduler_v2(
        group, "wsd", 30, decay_epochs=7, warmup_epochs=4, warmup_lr=1e-6, min_lr=1e-5,
        warmup_prefix=prefix, decay_fn=decay_fn, step_on_epochs=not per_step, updates_per_epoch=5,
        cooldown_epochs=2,
    )  # fmt: skip
    rate = timm_wsd(
        3e-3, epochs - 2, decay_epochs=7, decay_fn=decay_fn or "1-sqrt", warmup_epochs=4,
        warmup_lr=1e-6, min_lr=1e-5, per_step=per_step,
    )  # fmt: skip
    for step in range(epochs * 5):
        if per_step:
            scheduler.step_update(step)
        else:
            scheduler.step(step // 5)
        assert rate(step / 5) == pytest.approx(group.param_groups[0]["lr"], rel=1e-9)
