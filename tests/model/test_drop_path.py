"""Compare drop path on subsets of samples with the formula of a block, and with the exact mean over
all possible drops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from vit.config.schema import ModelConfig
from vit.layers.drop_path import choose_rows, num_kept
from vit.model import VisionTransformer, create_model
from vit.training.model_summary import flops_per_image

SUBSET = {"drop_path_form": "subset", "drop_path_schedule": "constant"}


def small(depth: int = 2, **fields) -> VisionTransformer:
    """Return a model without zero weights. If the head were zero, errors in all other parts would
    go unnoticed."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 8, "num_heads": 2, "depth": depth}
    model = create_model("vit_ti8", 16, 3, **sizes, **fields)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.train()


def images(rows: int) -> Tensor:
    return torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("batch_size", "rate", "expected"),
    [(32, 0.45, 18), (10, 0.45, 6), (4, 0.1, 4), (8, 0.0, 8), (2, 0.9, 1), (1, 0.5, 1)],
)
def test_the_number_kept_is_the_rounded_share_and_never_zero(batch_size, rate, expected):
    assert num_kept(batch_size, rate) == expected
    torch.manual_seed(0)
    (rows,) = choose_rows(batch_size, [rate], torch.device("cpu"))
    assert len(rows) == len(set(rows.tolist())) == expected
    assert set(rows.tolist()) <= set(range(batch_size))


def test_keeps_each_row_equally_often_and_draws_separately_for_branches():
    torch.manual_seed(0)
    draws = 4000
    counts = torch.zeros(2, 6)
    both = torch.zeros(6)
    for _ in range(draws):
        first, second = (
            torch.zeros(6).index_fill(0, rows, 1.0)
            for rows in choose_rows(6, [0.5, 1 / 3], torch.device("cpu"))
        )
        counts += torch.stack([first, second])
        both += first * second
    for count, share in ((counts[0], 1 / 2), (counts[1], 2 / 3), (both, 1 / 3)):
        deviation = math.sqrt(share * (1 - share) / draws)
        assert (count / draws - share).abs().max() < 4.5 * deviation


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fields", [{}, {"init_values": 0.5}])
def test_kept_rows_follow_the_formula_and_other_rows_pass_unchanged(precision, fields):
    block = small(1, **fields).blocks[0]
    x = torch.randn(10, 5, 8, generator=torch.Generator().manual_seed(2))
    attn_rows = torch.tensor([7, 0, 3, 9, 4, 1])
    mlp_rows = torch.tensor([2, 7, 4])
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        output = block(x, None, (attn_rows, mlp_rows))
        middle = x.clone()
        branch = block.ls1(block.attn(block.norm1(x[attn_rows])))
        middle[attn_rows] = torch.add(x[attn_rows], branch.float(), alpha=10 / 6)
        expected = middle.clone()
        branch = block.ls2(block.mlp(block.norm2(middle[mlp_rows])))
        expected[mlp_rows] = torch.add(middle[mlp_rows], branch.float(), alpha=10 / 3)
    assert output.dtype == torch.float32
    assert torch.equal(output, expected)
    changed = (output != x).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 7, 9]


def outcomes(model: VisionTransformer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits averaged over the images, and the gradient of the mean loss as a flat
    vector."""
    logits = model(x)
    loss = logits.square().sum(1).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return logits.detach().mean(0), torch.cat([each.flatten() for each in gradients])


def exact_means(rate: float) -> tuple[Tensor, Tensor]:
    """Return the expected `outcomes` for one image, which are the probability-weighted sum over all
    possible drops."""
    model = small().eval()
    branches = [branch for block in model.blocks for branch in (block.attn, block.mlp)]
    factors = [0.0] * len(branches)
    for number, branch in enumerate(branches):
        branch.register_forward_hook(lambda _, __, output, n=number: output * factors[n])
    sums = [torch.zeros(()), torch.zeros(())]
    for choices in itertools.product([False, True], repeat=len(branches)):
        factors[:] = [1 / (1 - rate) if is_kept else 0.0 for is_kept in choices]
        share = math.prod(1 - rate if is_kept else rate for is_kept in choices)
        for position, value in enumerate(outcomes(model, images(1))):
            sums[position] = sums[position] + share * value
    return sums[0], sums[1]


@pytest.mark.parametrize("form", ["subset", "mask"])
def test_mean_outputs_and_gradients_equal_the_exact_expectation(form):
    """The means over many independent passes with 64 identical images must be within 5 standard
    errors of the exact means."""
    rate = 0.375
    passes = 60
    model = small(**{**SUBSET, "drop_path_form": form}, drop_path_rate=rate)
    torch.manual_seed(3)
    drawn = [outcomes(model, images(1).expand(64, -1, -1, -1)) for _ in range(passes)]
    for values, expected in zip(zip(*drawn, strict=True), exact_means(rate), strict=True):
        stacked = torch.stack(values).double()
        error = stacked.std(0) / math.sqrt(passes)
        # Add a tolerance for rounding, because the exact gradients of the key biases are zero.
        allowed = 5 * error + 1e-4 * expected.abs().max()
        assert ((stacked.mean(0) - expected).abs() < allowed).all()
        assert error.max() < 0.1 * expected.abs().max(), (
            "the errors are too large to reveal a wrong factor"
        )


@pytest.mark.parametrize("schedule", ["linear", "constant"])
@pytest.mark.parametrize("form", ["mask", "subset"])
def test_a_schedule_gives_each_block_its_rate(schedule, form):
    fields = {"drop_path_rate": 0.4, "drop_path_schedule": schedule, "drop_path_form": form}
    rates = small(5, **fields).drop_paths.rates
    expected = [0.0, 0.1, 0.2, 0.3, 0.4] if schedule == "linear" else [0.4] * 5
    assert rates[::2] == rates[1::2] == pytest.approx(expected)


def test_a_probability_is_rounded_once():
    paths = small(12, drop_path_rate=0.1).drop_paths
    expected = torch.tensor([1.0 - rate for rate in paths.rates])
    assert torch.equal(paths.keep_probs.flatten(), expected)


def test_evaluation_computes_all_rows_and_parameters_keep_their_names():
    plain = small()
    model = small(**SUBSET, drop_path_rate=0.9)
    assert list(model.state_dict()) == list(plain.state_dict())
    x = images(4)
    assert torch.equal(model.eval()(x), plain.eval()(x))
    assert not torch.equal(model.train()(x), plain.train()(x))


def test_a_single_image_is_never_dropped():
    x = images(1)
    assert torch.equal(small(**SUBSET, drop_path_rate=0.9)(x), small()(x))


def test_counts_only_operations_on_kept_rows():
    with torch.device("meta"):
        fields = {"embed_dim": 64, "num_heads": 2, "num_classes": 10}
        plain = create_model("vit_ti8", 64, depth=6, **fields)
        blocks = flops_per_image(plain) - flops_per_image(
            create_model("vit_ti8", 64, depth=0, **fields)
        )
        model = create_model("vit_ti8", 64, depth=6, drop_path_rate=0.5, **SUBSET, **fields)
    assert flops_per_image(model) == flops_per_image(plain), "evaluation must drop nothing"
    assert flops_per_image(model, 8) == flops_per_image(plain) - blocks // 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drop_path_form": "batch"}, "drop_path_form is 'batch': expected 'mask' or 'subset'"),
        ({"drop_path_schedule": "flat"}, "drop_path_schedule is 'flat': expected 'linear' or"),
    ],
)
def test_unknown_words_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        create_model("vit_ti16", drop_path_rate=0.1, **fields)


def test_the_settings_reach_the_model():
    fields = {"name": "vit_ti16", "drop_path_rate": 0.5, **SUBSET}
    with torch.device("meta"):
        subset = create_model(ModelConfig(**fields)).drop_paths
        mask = create_model(ModelConfig(name="vit_ti16", drop_path_rate=0.5)).drop_paths
        assert create_model(ModelConfig(name="vit_ti16")).drop_paths.rates == []
    assert (subset.form, subset.rates) == ("subset", [0.5] * 24)
    assert mask.form == "mask"
