"""The learning rate against torch's schedulers and at its corners."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler

from vit.optim.schedule import lr_at

PEAK = 0.3


def torch_rates(num_steps: int, scheduler: type[LRScheduler], **options) -> list[float]:
    """Learning rates of a stateful scheduler of torch, from before its first step to after its
    last."""
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
def test_cosine_is_torchs_from_the_end_of_the_warm_up_on(warmup_steps, min_lr):
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
def test_linear_is_torchs(min_lr):
    theirs = torch_rates(40, LinearLR, start_factor=1.0, end_factor=min_lr / PEAK, total_iters=40)
    assert [
        lr_at(step, peak_lr=PEAK, total_steps=40, name="linear", min_lr=min_lr)
        for step in range(41)
    ] == pytest.approx(theirs)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_warm_up_is_torchs_linear_one_and_ends_at_the_peak(name):
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
def test_rate_rises_to_the_peak_then_falls_to_the_minimum_where_the_run_ends(
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
    assert all(rate > 0 for rate in rates[:total_steps]), "no update is lost on a rate of 0"


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_half_way_is_half_way(name):
    assert lr_at(
        15, peak_lr=1.0, total_steps=25, warmup_steps=5, name=name, min_lr=0.2
    ) == pytest.approx(0.6)
