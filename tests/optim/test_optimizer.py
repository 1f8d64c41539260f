"""Compare optimizer updates with the formulas of the papers in float64, and with the optimizers of
the original libraries."""

import copy
import functools
import sys
from collections import OrderedDict

import pytest
import timm.optim
import torch
from torch import nn

from vit.config.hints import sections
from vit.config.optim_section import (
    AdafactorConfig,
    AdamWConfig,
    LambConfig,
    MuonConfig,
    NAdamWConfig,
    SgdConfig,
)
from vit.optim.groups import parameter_groups
from vit.optim.optimizer import create_optimizer, set_rates, state_bytes

BOTH = {"lr": 0.02, "weight_decay": 0.3}
FORMULAS = [
    AdamWConfig(betas=(0.8, 0.95), eps=1e-2, **BOTH),
    SgdConfig(name="sgd", momentum=0.9, **BOTH),
    SgdConfig(name="sgd", momentum=0.7, nesterov=True, **BOTH),
    SgdConfig(name="sgd", momentum=0.0, **BOTH),
]
NAMES = ["adamw", "sgd", "nesterov", "plain sgd"]
OF_LIBRARIES = {
    "lamb": LambConfig(name="lamb", betas=(0.8, 0.95), **BOTH),
    "nadamw": NAdamWConfig(name="nadamw", betas=(0.8, 0.95), eps=1e-2, **BOTH),
    "muon": MuonConfig(name="muon", fallback_lr_scale=0.1, **BOTH),
    "nmuon": MuonConfig(name="muon", nesterov=True, adjust_lr_fn="original", **BOTH),
    "adamuon": MuonConfig(name="adamuon", **BOTH),
    "adafactorbv": AdafactorConfig(name="adafactorbv", min_dim_size_to_factor=6, **BOTH),
}
CONFIGS = [*FORMULAS, *OF_LIBRARIES.values()]
each_formula = pytest.mark.parametrize("config", FORMULAS, ids=NAMES)
each_config = pytest.mark.parametrize("config", CONFIGS, ids=[*NAMES, *OF_LIBRARIES])


def small_model() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
    parts = {"patch_embed": nn.Linear(5, 6), "blocks": nn.Sequential(block)}
    return nn.Sequential(OrderedDict(**parts, head=nn.Linear(8, 2, bias=False)))


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


# --- updates --------------------------------------------------------------------------------------


def adamw_reference(
    config: AdamWConfig,
    weight: torch.Tensor,
    gradients: list[torch.Tensor],
    rates: list[float],
    decay: float,
) -> torch.Tensor:
    """Return the weights after updates with Algorithm 2 of Loshchilov & Hutter 2019, in which the
    weight decay is multiplied by the learning rate."""
    first = torch.zeros_like(weight)
    second = torch.zeros_like(weight)
    beta1, beta2 = config.betas
    for t, (gradient, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        weight = weight - lr * (
            first / (1 - beta1**t) / ((second / (1 - beta2**t)).sqrt() + config.eps)
            + decay * weight
        )
    return weight


def sgd_reference(
    config: SgdConfig,
    weight: torch.Tensor,
    gradients: list[torch.Tensor],
    rates: list[float],
    decay: float,
) -> torch.Tensor:
    velocity = torch.zeros_like(weight)
    for gradient, lr in zip(gradients, rates, strict=True):
        gradient = gradient + decay * weight
        velocity = config.momentum * velocity + gradient
        weight = weight - lr * (
            gradient + config.momentum * velocity if config.nesterov else velocity
        )
    return weight


@each_formula
def test_updates_equal_the_formulas(config):
    model = small_model()
    rates = [0.02, 0.01, 0.05, 0.0, 0.03]
    before = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    optimizer = create_optimizer(model, config)
    gradients = {name: [] for name in before}
    for step, lr in enumerate(rates):
        give_gradients(model, step)
        for name, parameter in model.named_parameters():
            gradients[name].append(parameter.grad.double())
        set_rates(optimizer, lr, None)
        optimizer.step()
    reference = adamw_reference if isinstance(config, AdamWConfig) else sgd_reference
    for name, parameter in model.named_parameters():
        decay = config.weight_decay if parameter.ndim > 1 else 0.0
        torch.testing.assert_close(
            parameter.double(),
            reference(config, before[name], gradients[name], rates, decay),
            rtol=1e-5,
            atol=1e-6,
        )


def test_the_first_learning_rate_is_that_of_the_config():
    for config in CONFIGS:
        groups = create_optimizer(small_model(), config).param_groups
        assert {group["lr"] for group in groups} == {0.02}


@each_config
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_leaves_no_trace(config, bad):
    """Weights and optimizer state must remain bit-identical, and later updates must not be
    affected."""
    models = [small_model(), small_model()]
    skipped, plain = (create_optimizer(model, config) for model in models)
    for step in range(5):
        tries = step == 2
        if tries:
            before = [t.clone() for t in (*models[0].parameters(), *tensors_of(skipped))]
            models[0].blocks[0][0].weight.grad[0, 0] = bad
            update(skipped, 1.0)
            after = (*models[0].parameters(), *tensors_of(skipped))
            same = [bits_equal(a, b) for a, b in zip(before, after, strict=True)]
            # Adafactor's step counter is part of its schedule, so it advances even if an update is
            # skipped.
            counts = len(list(models[0].parameters())) if config.name == "adafactorbv" else 0
            assert same.count(False) == counts
        for model, optimizer in zip(models, (skipped, plain), strict=True):
            give_gradients(model, step)
            if tries and config.name == "adafactorbv" and optimizer is plain:
                for state in optimizer.state.values():
                    state["step"] += 1
            update(optimizer, 0.0)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert bits_equal(a, b)


@pytest.mark.parametrize("name", ["lamb", "nadamw", "muon", "nmuon"])
def test_updating_all_tensors_together_gives_the_same_update(name, monkeypatch):
    """On a CPU, timm uses a different code path. Two of the six updates in this test are
    skipped."""
    models = [small_model(), small_model()]
    one_by_one, at_once = (create_optimizer(model, OF_LIBRARIES[name]) for model in models)
    num_taken = 0

    def on_a_gpu(*arguments, **options):
        nonlocal num_taken
        num_taken += 1
        return True

    for step in range(6):
        is_bad = step in (1, 3)
        for model in models:
            give_gradients(model, step)
            if is_bad:
                model.head.weight.grad[0, 0] = float("nan")
        update(one_by_one, float(is_bad))
        with monkeypatch.context() as patched:
            for module in (timm.optim.lamb, timm.optim.nadamw, timm.optim.adamw):
                patched.setattr(module, "_resolve_foreach", on_a_gpu)
            update(at_once, float(is_bad))
    assert num_taken >= 6, "timm must call the patched function"
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        # The tolerance covers the rounding errors of four updates, each with a few operations on
        # numbers around 1.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for one, other in zip(*map(tensors_of, (one_by_one, at_once)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def update(optimizer: torch.optim.Optimizer, found_inf: float) -> None:
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(found_inf)  # type: ignore[attr-defined]
    optimizer.step()


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.detach().view(integers), b.detach().view(integers))


class UnknownConfig(SgdConfig):
    """A config that has all fields of SGD but is not one of the known config classes."""


def test_every_optimizer_of_the_config_is_tested_here():
    assert {type(config) for config in CONFIGS} == set(sections()["optim"])


@pytest.mark.parametrize(
    "use", [create_optimizer, lambda model, config: state_bytes(config, model)]
)
def test_an_optimizer_without_its_own_branch_raises_and_does_not_become_sgd(use):
    with pytest.raises(AssertionError, match="UnknownConfig"):
        use(small_model(), UnknownConfig(name="sgd"))


@pytest.mark.parametrize("name", ["lamb", "muon", "adafactorbv", "nadamw"])
def test_without_timm_its_optimizers_are_refused(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    monkeypatch.delitem(sys.modules, "vit.optim.lamb", raising=False)
    with pytest.raises(ValueError, match=rf"optim.name={name} needs timm 1.0.31 or newer"):
        create_optimizer(small_model(), OF_LIBRARIES[name])


def test_an_optimizer_that_would_apply_a_non_finite_gradient_is_an_error(monkeypatch):
    unfused = functools.partial(torch.optim.AdamW, foreach=True)
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda groups, fused, **fields: unfused(groups, **fields)
    )
    with pytest.raises(
        AssertionError, match="AdamW does not skip its update when found_inf is set"
    ):
        create_optimizer(small_model(), CONFIGS[0])


# --- state ----------------------------------------------------------------------------------------


def of_the_library(model: nn.Module, config) -> list[torch.optim.Optimizer]:
    groups = parameter_groups(model, config)
    common = {"lr": config.lr}
    if isinstance(config, SgdConfig):
        plain = {"momentum": config.momentum, "nesterov": config.nesterov, "fused": True}
        return [torch.optim.SGD(groups, **common, **plain)]
    if isinstance(config, AdafactorConfig):
        size = config.min_dim_size_to_factor
        return [timm.optim.AdafactorBigVision(groups, min_dim_size_to_factor=size, **common)]
    common |= {"betas": config.betas, "eps": config.eps}
    if isinstance(config, AdamWConfig):
        return [torch.optim.AdamW(groups, fused=True, **common)]
    if isinstance(config, LambConfig):
        return [timm.optim.Lamb(groups, max_grad_norm=None, **common)]
    if isinstance(config, NAdamWConfig):
        return [timm.optim.NAdamW(groups, **common)]
    options = {
        name: getattr(config, name) for name in ("nesterov", "adjust_lr_fn", "fallback_lr_scale")
    }
    if config.adjust_lr_fn == "original":
        options["ns_coefficients"] = "original"
    return [timm.optim.Muon(groups, algo=config.name, **common, **options)]


@each_config
def test_state_that_exists_from_the_start_changes_nothing(config):
    plain = small_model()
    allocated = small_model()
    ours = create_optimizer(allocated, config)
    [theirs] = of_the_library(plain, config)
    for name, parameter in allocated.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))
        assert parameter.grad is None
    assert all(value.eq(0).all() for value in tensors_of(ours))

    for step in range(3):
        for model, optimizer in ((plain, theirs), (allocated, ours)):
            give_gradients(model, step)
            optimizer.step()
    # LAMB's bias corrections are computed in float32 on the device, so updates differ by a few
    # units in the last place.
    tolerance = {"rtol": 2e-6, "atol": 2e-7} if config.name == "lamb" else {"rtol": 0, "atol": 0}
    for a, b in zip(plain.parameters(), allocated.parameters(), strict=True):
        torch.testing.assert_close(b, a, **tolerance)
    for p, q in zip(allocated.parameters(), plain.parameters(), strict=True):
        values = {k: v for k, v in ours.state[p].items() if k != "step" or config.name != "lamb"}
        assert values.keys() == theirs.state[q].keys()
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == theirs.state[q][name].dtype
                torch.testing.assert_close(value, theirs.state[q][name], rtol=0, atol=0)


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_equals_its_definition_with_a_separate_adam(nesterov):
    """Compare with the Newton-Schulz iteration of Jordan 2024 (kellerjordan.github.io/posts/muon)
    in float64. In bf16, weights would differ by 1e-3."""
    model = small_model()
    theirs = copy.deepcopy(model)
    config = MuonConfig(name="muon", nesterov=nesterov, adjust_lr_fn="original", **BOTH)
    ours = create_optimizer(model, config)
    name_of_matrix = "blocks.0.0.weight"
    expected = theirs.get_parameter(name_of_matrix).detach().double()
    momentum = torch.zeros_like(expected)
    others = {name: p for name, p in theirs.named_parameters() if name != name_of_matrix}
    adam = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.3 * (p.ndim > 1)} for p in others.values()],
        lr=0.02,
        betas=(0.9, 0.95),
        eps=1e-7,
    )
    for step in range(4):
        for each in (model, theirs):
            give_gradients(each, step)
        gradient = theirs.get_parameter(name_of_matrix).grad.double()
        momentum = 0.95 * momentum + 0.05 * gradient
        update = 0.95 * momentum + 0.05 * gradient if nesterov else momentum
        x = update / update.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        expected = expected * (1 - 0.02 * 0.3) - 0.02 * (8 / 6) ** 0.5 * x
        ours.step()
        adam.step()
    matrix = model.get_parameter(name_of_matrix)
    torch.testing.assert_close(matrix.double(), expected, rtol=0, atol=1e-6)
    if not nesterov:  # with Nesterov momentum, NAdamW instead of AdamW updates the other parameters
        for name, parameter in others.items():
            torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-5, atol=1e-6)


@each_config
def test_a_first_update_that_is_skipped_leaves_the_state_at_zero(config):
    """If the first update were skipped without special handling, the momentum of torch's fused SGD
    would be uninitialized memory."""
    model = small_model()
    optimizer = create_optimizer(model, config)
    give_gradients(model, 0)
    update(optimizer, 1.0)
    counts = [] if config.name != "adafactorbv" else list(model.parameters())
    assert sum(bool(value.ne(0).any()) for value in tensors_of(optimizer)) == len(counts)


@each_config
def test_predicts_the_bytes_of_the_state(config):
    model = small_model()
    state = tensors_of(create_optimizer(model, config))
    assert sorted(state_bytes(config, model)) == sorted(value.nbytes for value in state)
