"""One update against a plain loop of torch, in every precision; accumulation, clipping, skipping."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vit.config import AdamWConfig, AugmentConfig
from vit.data.augment import Augment
from vit.data.draw import draw_table, sample_keys
from vit.data.loader import Batch
from vit.distributed import World
from vit.ema import Ema
from vit.model import create_model
from vit.optim import create_optimizer, parameter_groups
from vit.step import TrainStep

WORLD = World(0, 1, torch.device("cpu"))
CONFIG = AugmentConfig(hflip_prob=0.0)


def make_batch(rows: int = 8, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = np.arange(rows)
    return Batch(
        torch.randint(0, 256, (rows, 3, 16, 16), dtype=torch.uint8, generator=generator),
        torch.randint(0, 5, (rows,), generator=generator),
        torch.ones(rows),
        torch.from_numpy(draw_table(CONFIG, sample_keys(0, 0, ids), np.full(rows, 16), np.full(rows, 16), (16, 16))),
        torch.from_numpy(ids),
    )


def make_step(micro_batch_size: int = 8, precision: str = "fp32", double: bool = False, **options) -> TrainStep:
    torch.manual_seed(0)
    model = create_model("vit_ti8", 16, 5, embed_dim=32, depth=2, num_heads=2)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    augment = Augment(CONFIG, 5, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), WORLD.device)
    if double:
        model.double()
        augment.scale, augment.shift = augment.scale.double(), augment.shift.double()
        augment.normalize = lambda images: torch.addcmul(augment.shift, images.double(), augment.scale)  # type: ignore[method-assign]
    optimizer = create_optimizer(model, AdamWConfig(lr=1e-3, weight_decay=0.1))
    return TrainStep(
        model,
        model,
        optimizer,
        augment,
        WORLD,
        lr_at=lambda step: 1e-3 * (step + 1),
        micro_batch_size=micro_batch_size,
        precision=precision,
        **options,
    )


def weights_of(step: TrainStep) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in step.model.parameters()])


def test_three_updates_equal_a_plain_loop_of_torch():
    ours = make_step(clip_grad_norm=0.1, label_smoothing=0.1)
    model = copy.deepcopy(ours.model)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3, fused=False, foreach=False)
    for number in range(3):
        batch = make_batch(seed=number)
        result = ours(batch, number).read()
        loss = F.cross_entropy(model((batch.images / 255 - 0.5) / 0.25), batch.labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (number + 1)
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    torch.testing.assert_close(weights_of(ours), torch.cat([p.detach().flatten() for p in model.parameters()]), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_micro_steps_add_up_to_the_whole_batch_in_fp64(micro_batch_size):
    whole, parts = make_step(double=True), make_step(micro_batch_size, double=True)
    for number in range(2):
        whole(make_batch(seed=number), number)
        parts(make_batch(seed=number), number)
    torch.testing.assert_close(weights_of(parts), weights_of(whole), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_non_finite_gradient_changes_neither_weights_nor_moments(precision):
    step = make_step(precision=precision, clip_grad_norm=1.0)
    step(make_batch(), 0)
    before, scale = weights_of(step), step.loss_scale.item()
    moments = [s[k].clone() for s in step.optimizer.state.values() for k in ("step", "exp_avg", "exp_avg_sq")]
    bad = make_batch()
    bad.weights[3] = float("nan")
    assert not np.isfinite(step(bad, 1).read().grad_norm)
    assert torch.equal(weights_of(step), before)
    assert all(
        torch.equal(a, b)
        for a, b in zip(moments, [s[k] for s in step.optimizer.state.values() for k in ("step", "exp_avg", "exp_avg_sq")], strict=True)
    )
    assert step.loss_scale.item() == (scale / 2 if precision == "fp16" else 1.0)
    assert np.isfinite(step(make_batch(), 2).read().grad_norm)
    assert not torch.equal(weights_of(step), before)


def test_fp16_unscales_before_it_clips_and_grows_after_good_steps(monkeypatch):
    monkeypatch.setattr("vit.step.FP16_GROWTH_STEPS", 2)
    plain, scaled = make_step(clip_grad_norm=0.05), make_step(precision="fp16", clip_grad_norm=0.05)
    scaled.loss_scale.fill_(2.0**8)
    norms = [(plain(make_batch(), n).read().grad_norm, scaled(make_batch(), n).read().grad_norm) for n in range(2)]
    for expected, got in norms:
        assert got == pytest.approx(expected, rel=0.05)
    assert scaled.loss_scale.item() == 2.0**9


def test_a_row_of_weight_0_gives_no_gradient():
    with_row, without = make_step(), make_step()
    batch = make_batch()
    batch.weights[5] = 0.0
    other = make_batch()
    other.weights[5] = 0.0
    other.images[5] = 255 - other.images[5]
    with_row(batch, 0)
    without(other, 0)
    assert torch.equal(weights_of(with_row), weights_of(without))


def test_the_average_follows_also_when_an_update_is_skipped():
    step = make_step()
    step.ema = Ema(step.model, 0.5)
    start = [p.clone() for p in step.ema.module.parameters()]
    step(make_batch(), 0)
    decay = min(0.5, 2 / 11)
    for averaged, old, new in zip(step.ema.module.parameters(), start, step.model.parameters(), strict=True):
        torch.testing.assert_close(averaged, decay * old + (1 - decay) * new)


def test_dropout_depends_on_seed_rank_and_step_only():
    def losses(order: list[int]) -> dict[int, float]:
        step = make_step(seed=7)
        for module in step.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
        step.optimizer.step = lambda: None  # type: ignore[method-assign]
        return {n: step(make_batch(), n).read().loss for n in order}

    assert losses([0, 1, 2]) == losses([2, 0, 1])
    assert len(set(losses([0, 1, 2]).values())) == 3
