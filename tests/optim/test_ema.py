"""Compare the exponential moving average of the weights with its closed form."""

import copy

import pytest
import torch
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel

from vit.layers.drop_path import DropPaths
from vit.optim.ema import Ema


def model_with_buffers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@torch.no_grad()
def train(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.train()
    model(torch.randn(8, 3, generator=generator))


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize(("decay", "first_step"), [(0.99, 0), (0.5, 0), (0.999, 5000)])
def test_average_is_the_weighted_sum_of_all_weights(decay, first_step, warmup):
    model = model_with_buffers()
    ema = Ema(model, decay, warmup)
    history = [copy.deepcopy(model).double().state_dict()]
    decays = []
    for step in range(first_step, first_step + 30):
        train(model, step)
        ema.update(step)
        history.append(copy.deepcopy(model).double().state_dict())
        updates = step + 1
        decays.append(min(decay, (1 + updates) / (10 + updates)) if warmup else decay)

    shares = [1.0]
    for value in decays:
        shares = [share * value for share in shares] + [1 - value]
    assert sum(shares) == pytest.approx(1)
    for name, parameter in ema.module.named_parameters():
        expected = sum(
            share * weights[name] for share, weights in zip(shares, history, strict=True)
        )
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_average_follows_as_in_timm():
    """The expected values come from timm's averaging class. DeiT uses this class with a constant
    decay from the first update on."""
    model = model_with_buffers()
    ours = Ema(model, 0.9)
    theirs = ModelEmaV2(model, decay=0.9)
    for step in range(20):
        train(model, step)
        ours.update(step)
        theirs.update(model)
    for averaged, expected in zip(
        ours.module.parameters(), theirs.module.parameters(), strict=True
    ):
        torch.testing.assert_close(averaged, expected)


def test_a_constant_buffer_is_not_copied_each_step():
    model = nn.Sequential(DropPaths(0.1, 1, "constant", "mask"), nn.BatchNorm1d(4))
    copied = [id(averaged) for averaged, _ in Ema(model, 0.9)._buffers]
    assert len(copied) == 3, "the average must copy the batch norm's counters"


def test_buffers_are_copied_not_averaged():
    model = model_with_buffers()
    ema = Ema(model, 0.9)
    for step in range(3):
        train(model, step)
        ema.update(step)
    for name, buffer in model.named_buffers():
        assert torch.equal(ema.module.get_buffer(name), buffer), name
    assert ema.module[1].num_batches_tracked == 3
    assert ema.module[1].num_batches_tracked.dtype == torch.int64


def test_average_is_a_model_in_fp32_for_evaluation():
    model = model_with_buffers().train()
    ema = Ema(model, 0.9)
    assert not ema.module.training
    ema.update(0)
    # The average can use a compiled graph of the model only if its parameters require gradients,
    # too.
    assert all(
        parameter.dtype == torch.float32 and parameter.requires_grad and parameter.is_leaf
        for parameter in ema.module.parameters()
    )
    assert not {p.data_ptr() for p in ema.module.parameters()} & {
        p.data_ptr() for p in model.parameters()
    }
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_average_of_an_untrained_model_is_the_model():
    model = model_with_buffers().eval()
    inputs = torch.randn(5, 3)
    torch.testing.assert_close(Ema(model, 0.9).module(inputs), model(inputs))


def test_a_resumed_average_equals_an_uninterrupted_one():
    uninterrupted = model_with_buffers()
    model = model_with_buffers()
    ema = Ema(uninterrupted, 0.9)
    for step in range(4):
        train(uninterrupted, step)
        ema.update(step)
        if step == 1:
            saved = copy.deepcopy((uninterrupted.state_dict(), ema.module.state_dict()))

    resumed = Ema(model, 0.9)
    model.load_state_dict(saved[0])
    resumed.module.load_state_dict(saved[1])
    for step in (2, 3):
        train(model, step)
        resumed.update(step)
    for name, value in ema.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], value), name


def test_an_average_every_few_steps_after_warm_up_equals_torchvision():
    """torchvision's train.py updates the average if i % 3 == 0 in each epoch, and resets its update
    count during the two warm-up epochs."""
    model = model_with_buffers()
    ours = Ema(model, 0.9, every_steps=3, after_steps=2 * 8, steps_per_epoch=8)
    theirs = AveragedModel(model, avg_fn=lambda average, value, _: 0.9 * average + 0.1 * value)
    for step in range(5 * 8):
        train(model, step)
        ours.update(step)
        if step % 8 % 3 == 0:
            theirs.update_parameters(model)
            if step < 2 * 8:
                theirs.n_averaged.fill_(0)
        pairs = zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
        for averaged, expected in pairs:
            torch.testing.assert_close(averaged, expected)


def test_an_average_that_begins_later_equals_timm():
    model = model_with_buffers()
    ours = Ema(model, 0.9, after_steps=7)
    theirs = ModelEmaV3(model, decay=0.9, update_after_step=7)
    for step in range(20):
        train(model, step)
        ours.update(step)
        theirs.update(model, step + 1)  # timm expects the number of completed updates
        pairs = zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
        for averaged, expected in pairs:
            torch.testing.assert_close(averaged, expected)


@pytest.mark.parametrize(("power", "after"), [(2 / 3, 0), (0.75, 0), (1.0, 7)])
def test_warm_up_with_a_power_equals_timm(power, after):
    model = model_with_buffers()
    ours = Ema(model, 0.9, power, after_steps=after)
    theirs = ModelEmaV3(
        model, decay=0.9, update_after_step=after, use_warmup=True, warmup_power=power
    )
    decays = [ours.decay_at(step) for step in range(60)]
    assert decays == pytest.approx([theirs.get_decay(step + 1) for step in range(60)])
    assert decays[0] == 0 < decays[after + 1] < decays[59] == 0.9
    for step in range(12):
        train(model, step)
        ours.update(step)
        theirs.update(model, step + 1)
    pairs = zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
    for averaged, expected in pairs:
        torch.testing.assert_close(averaged, expected)
