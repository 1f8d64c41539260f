"""Compare one training step with a simple torch loop in every precision, with gradient
accumulation, clipping and skipped updates."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_free.fake_gpu import gpu_without_memory, move_to_fake_gpu
from plain_step import plain_step
from torch.nn.parallel import DistributedDataParallel

from vit.checkpoint.checkpoint import named_tensors
from vit.config.schema import AdamWConfig, AugmentConfig
from vit.data.augment.apply import Augment
from vit.data.augment.draw import draw_table, sample_keys
from vit.data.batches import TENSORS, Batch
from vit.distributed.process_group import World
from vit.model import create_model
from vit.optim.ema import Ema
from vit.optim.groups import parameter_groups
from vit.optim.norms import Norms
from vit.optim.optimizer import create_optimizer
from vit.step import TrainStep
from vit.training.loss import cross_entropy
from vit.training.reduce import DataParallel
from vit.training.step_result import NON_FINITE, SPIKE

WORLD = World(0, 1, torch.device("cpu"))
CONFIG = AugmentConfig(hflip_prob=0.0)
EPS = 1e-5
"""The epsilon of AdamW in these tests. The exact gradient of the key biases is zero, but rounding
errors make it 1e-10 to 1e-9 with a random sign. With the default epsilon of 1e-8, AdamW would turn
this gradient into up to a tenth of a step, so results would depend on the CPU kernels."""


def make_batch(rows: int = 8, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = np.arange(rows)
    return Batch(
        torch.randint(0, 256, (rows, 3, 16, 16), dtype=torch.uint8, generator=generator),
        torch.randint(0, 5, (rows,), generator=generator),
        torch.ones(rows),
        torch.from_numpy(
            draw_table(
                CONFIG, sample_keys(0, 0, ids), np.full(rows, 16), np.full(rows, 16), (16, 16)
            )
        ),
        torch.from_numpy(ids),
    )


def make_step(
    micro_batch_size: int = 8, precision: str = "fp32", double: bool = False, **options
) -> TrainStep:
    torch.manual_seed(0)
    model = create_model("vit_ti8", 16, 5, embed_dim=32, depth=2, num_heads=2)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    augment = Augment(CONFIG, 5, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), WORLD.device)
    if double:
        model.double()
        augment.scale = augment.scale.double()
        augment.shift = augment.shift.double()
        augment.normalize = lambda images: torch.addcmul(
            augment.shift, images.double(), augment.scale
        )
    optimizer = create_optimizer(model, AdamWConfig(lr=1e-3, weight_decay=0.1, eps=EPS))
    return plain_step(
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
    ours = make_step(clip_grad_norm=0.1, loss=partial(cross_entropy, label_smoothing=0.1))
    model = copy.deepcopy(ours.model)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, AdamWConfig(weight_decay=0.1)),
        lr=1e-3,
        eps=EPS,
        fused=False,
        foreach=False,
    )
    for number in range(3):
        batch = make_batch(seed=number)
        result = ours(batch, number).read()
        loss = F.cross_entropy(
            model((batch.images / 255 - 0.5) / 0.25), batch.labels, label_smoothing=0.1
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (number + 1)
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    torch.testing.assert_close(
        weights_of(ours),
        torch.cat([p.detach().flatten() for p in model.parameters()]),
        rtol=1e-4,
        atol=2e-5,
    )


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_micro_steps_add_up_to_the_whole_batch_in_fp64(micro_batch_size):
    whole = make_step(double=True)
    parts = make_step(micro_batch_size, double=True)
    for number in range(2):
        whole(make_batch(seed=number), number)
        parts(make_batch(seed=number), number)
    torch.testing.assert_close(weights_of(parts), weights_of(whole), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_non_finite_gradient_changes_neither_weights_nor_moments(precision):
    step = make_step(precision=precision, clip_grad_norm=1.0)
    step(make_batch(), 0)
    before = weights_of(step)
    scale = step.loss_scale.value.item()
    moments = [
        s[k].clone()
        for s in step.optimizer.state.values()
        for k in ("step", "exp_avg", "exp_avg_sq")
    ]
    bad = make_batch()
    bad.weights[3] = float("nan")
    assert not np.isfinite(step(bad, 1).read().grad_norm)
    assert torch.equal(weights_of(step), before)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            moments,
            [
                s[k]
                for s in step.optimizer.state.values()
                for k in ("step", "exp_avg", "exp_avg_sq")
            ],
            strict=True,
        )
    )
    assert step.loss_scale.value.item() == (scale / 2 if precision == "fp16" else 1.0)
    assert np.isfinite(step(make_batch(), 2).read().grad_norm)
    assert not torch.equal(weights_of(step), before)


@pytest.mark.parametrize(
    ("precision", "limit", "verdict"),
    [("fp32", 0.0, SPIKE), ("bf16", 0.0, SPIKE), ("fp16", 0.0, SPIKE), ("fp32", 1e9, 0)],
)
def test_an_update_above_its_limit_equals_skipping_the_batch(precision, limit, verdict):
    guarded = make_step(4, precision, clip_grad_norm=1.0)
    plain = make_step(4, precision, clip_grad_norm=1.0)
    for step in (guarded, plain) if precision == "fp16" else ():
        step.loss_scale.value.fill_(128.0)  # no kernel overflows with this scale
    for number in range(4):
        batch = make_batch(seed=number)
        result = guarded(batch, number, loss_limit=limit if number == 2 else None).read()
        assert result.verdict == (verdict if number == 2 else 0)
        if number != 2 or not verdict:
            plain(batch, number)
    state = named_tensors(guarded)
    expected = named_tensors(plain)
    # The loss scale must be halved after an overflow, but not after a skipped loss spike.
    different = {name for name in state if not torch.equal(state[name], expected[name])}
    assert different == ({"scaler.steps_since_overflow"} if precision == "fp16" else set())


def test_a_non_finite_gradient_does_not_count_as_a_spike():
    step = make_step(precision="fp16", clip_grad_norm=1.0)
    bad = make_batch()
    bad.weights[3] = float("nan")
    scale = step.loss_scale.value.item()
    result = step(bad, 0, loss_limit=1e9).read()
    assert result.verdict == NON_FINITE
    assert step.loss_scale.value.item() == scale / 2


def test_fp16_unscales_before_clipping_and_increases_the_scale_after_good_steps(monkeypatch):
    monkeypatch.setattr("vit.layers.precision.FP16_GROWTH_STEPS", 2)
    plain = make_step(clip_grad_norm=0.05)
    scaled = make_step(precision="fp16", clip_grad_norm=0.05)
    scaled.loss_scale.value.fill_(2.0**8)
    norms = [
        (plain(make_batch(), n).read().grad_norm, scaled(make_batch(), n).read().grad_norm)
        for n in range(2)
    ]
    for expected, got in norms:
        assert got == pytest.approx(expected, rel=0.05)
    assert scaled.loss_scale.value.item() == 2.0**9


def test_gradients_that_add_up_stay_in_the_buckets_of_ddp():
    """A second copy of the gradients outside the DDP buckets would need 2.5 GB for ViT-H."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours = make_step(micro_batch_size=4)
        plain = make_step(micro_batch_size=4)
        in_ddp = DistributedDataParallel(ours.model, gradient_as_bucket_view=True)
        ours.reduce = DataParallel(ours.model, WORLD, in_ddp)
        buckets = set()
        passes = []

        def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            gradient_addresses = [
                p.grad.untyped_storage().data_ptr() for p in ours.parameters if p.grad is not None
            ]
            passes.append(set(gradient_addresses))

        ours.model.register_forward_pre_hook(note)
        for number in range(3):
            ours(make_batch(seed=number), number)
            plain(make_batch(seed=number), number)
            buckets = {p.grad.untyped_storage().data_ptr() for p in ours.parameters}
        assert len(buckets) == 1, "a small model has one bucket"
        assert passes[-2:] == [buckets, buckets], (
            "the gradients must point into the buckets before both passes of the last step"
        )
        assert torch.equal(weights_of(ours), weights_of(plain))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("form", ["mask", "subset"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_step_waits_for_the_gpu(precision, form, monkeypatch):
    """The test runs an update on a fake GPU without the backward pass, because autograd requires a
    CUDA context."""
    recipe = AugmentConfig(
        randaugment_layers=2, erasing_prob=0.5, mixup_alpha=0.8, cutmix_alpha=1.0, mix_group_size=2
    )
    sizes = np.full(8, 16)
    table = draw_table(recipe, sample_keys(0, 0, np.arange(8)), sizes, sizes, (16, 16))
    gpu = torch.device("cuda", 0)
    fields = {"embed_dim": 32, "depth": 2, "num_heads": 2, "drop_path_rate": 0.5}
    fields["drop_path_form"] = form
    model = create_model("vit_ti8", 16, 5, **fields)
    with gpu_without_memory() as mode:
        move_to_fake_gpu(model)
        step = plain_step(
            model,
            model,
            create_optimizer(model, AdamWConfig()),
            Augment(recipe, 5, (0.5,), (0.25,), gpu),
            World(0, 1, gpu),
            lr_at=lambda step: 1e-3,
            micro_batch_size=4,
            precision=precision,
            clip_grad_norm=1.0,
            norms=Norms(model, 1, 9),
        )
        batch = make_batch()
        batch = replace(batch.to(gpu), table=torch.from_numpy(table), bad_keys=("a", "b"))

        def backward(loss: torch.Tensor) -> None:
            for parameter in step.parameters:
                parameter.grad = torch.empty_like(parameter)

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        change = step.augment.change_batch
        step._queue(change(batch), 0, False, (0.0, 1.0, 2.0))  # the first call may copy constants
        mode.waits.clear()
        values, norm, rows, norms = step._queue(change(batch), 1, True, (0.5, 1.0, 2.0))
    assert {tensor.device for tensor in (values, norm, *rows, norms.values)} == {gpu}
    assert mode.waits == []


def test_a_row_of_weight_0_gives_no_gradient():
    with_row = make_step()
    without = make_step()
    batch = make_batch()
    batch.weights[5] = 0.0
    other = make_batch()
    other.weights[5] = 0.0
    other.images[5] = 255 - other.images[5]
    with_row(batch, 0)
    without(other, 0)
    assert torch.equal(weights_of(with_row), weights_of(without))


@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_the_gradient_of_a_batch_with_excluded_rows_is_the_mean_of_the_others(micro_batch_size):
    """`TrainBatches` gives the other rows a larger weight, so that all weights have the same
    sum."""
    batch = make_batch()
    is_used = torch.tensor([True, False, True, True, False, True, True, False])
    step, plain = (make_step(size, double=True) for size in (micro_batch_size, 5))
    result = step(replace(batch, weights=is_used.double() * 8 / 5), 0)
    used = Batch(*(getattr(batch, name)[is_used] for name in TENSORS))
    expected = plain(replace(used, weights=used.weights.double()), 0)
    for ours, theirs in zip(step.parameters, plain.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert result.read().loss == pytest.approx(expected.read().loss)


def test_the_average_follows_even_when_an_update_is_skipped():
    step = make_step()
    step.ema = Ema(step.model, 0.5)
    start = [p.clone() for p in step.ema.module.parameters()]
    step(make_batch(), 0)
    decay = 0.5
    for averaged, old, new in zip(
        step.ema.module.parameters(), start, step.model.parameters(), strict=True
    ):
        torch.testing.assert_close(averaged, decay * old + (1 - decay) * new)


def test_dropout_depends_only_on_seed_rank_and_step():
    def losses(order: list[int]) -> dict[int, float]:
        step = make_step(seed=7)
        for module in step.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
        step.optimizer.step = lambda: None
        return {n: step(make_batch(), n).read().loss for n in order}

    assert losses([0, 1, 2]) == losses([2, 0, 1])
    assert len(set(losses([0, 1, 2]).values())) == 3


def test_an_update_waits_for_the_copy_of_the_state_and_nothing_before_it_does():
    """The state is copied while the forward and backward passes run. The update must wait until the
    copy is complete."""
    step = make_step()
    step.ema = Ema(step.model, 0.9)
    step(make_batch(), 0)
    before = {name: tensor.clone() for name, tensor in named_tensors(step).items()}
    seen = []

    class Copying:
        def wait(self) -> None:
            state = named_tensors(step)
            equal = all(torch.equal(state[name], before[name]) for name in before)
            seen.append((equal, all(p.grad is not None for p in step.parameters)))

    step.copying = Copying()
    step(make_batch(), 1)
    assert seen == [(True, True)], (
        "expected one wait, after the backward pass and before any change"
    )
    step(make_batch(), 2)
    assert len(seen) == 1
    after = named_tensors(step)
    assert not any(torch.equal(after[f"model.{name}"], before[f"model.{name}"]) for name in HELD)


HELD = ("head.weight", "cls_token")
