"""Parameter groups against timm's, updates against the papers' formulas in float64."""

import copy
import functools

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from vit.config.hints import sections
from vit.config.optim_section import AdamWConfig, SgdConfig
from vit.model import VisionTransformer
from vit.optim.optimizer import create_optimizer, parameter_groups, set_lr, state_bytes

CONFIGS = [
    AdamWConfig(lr=0.02, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-2),
    SgdConfig(name="sgd", lr=0.02, weight_decay=0.3, momentum=0.9),
    SgdConfig(name="sgd", lr=0.02, weight_decay=0.3, momentum=0.7, nesterov=True),
    SgdConfig(name="sgd", lr=0.02, weight_decay=0.3, momentum=0.0),
]
each_config = pytest.mark.parametrize(
    "config", CONFIGS, ids=["adamw", "sgd", "nesterov", "plain sgd"]
)


def our_model(**fields) -> VisionTransformer:
    return VisionTransformer(32, 16, embed_dim=32, depth=2, num_heads=2, num_classes=5, **fields)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


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


# --- groups ---------------------------------------------------------------------------------------


def test_weights_of_linear_maps_decay_and_nothing_else():
    model = our_model(init_values=0.1, class_token=True)
    decayed, free = parameter_groups(model, 0.05)
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.05, 0.0)
    assert {id(p) for p in decayed["params"]} == linear
    names = {
        name for name, p in model.named_parameters() if any(p is other for other in free["params"])
    }
    assert {
        "cls_token",
        "pos_embed",
        "blocks.0.ls1.gamma",
        "blocks.1.norm2.weight",
        "blocks.0.attn.qkv.bias",
    } <= names


@pytest.mark.parametrize(
    "create",
    [
        our_model,
        lambda: our_model(
            class_token=False, global_pool="avg", pos_embed="sincos2d", init_values=1e-4
        ),
    ]
    + [
        lambda name=name: timm.create_model(name, num_classes=5)
        for name in ("test_vit", "test_vit2", "test_resnet", "deit_tiny_distilled_patch16_224")
    ],
    ids=["ours", "ours, no token", "test_vit", "test_vit2", "test_resnet", "distilled"],
)
def test_each_parameter_is_in_the_group_that_timm_puts_it_in(create):
    model = create()
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = {
        group["weight_decay"]: {id(p) for p in group["params"]}
        for group in param_groups_weight_decay(model, 0.05, no_weight_decay_list=exempt)
    }
    ours = parameter_groups(model, 0.05)
    assert {group["weight_decay"]: {id(p) for p in group["params"]} for group in ours} == theirs
    assert sum(len(group["params"]) for group in ours) == len(list(model.parameters()))


def test_frozen_parameters_are_left_out():
    model = our_model()
    model.patch_embed.requires_grad_(False)
    grouped = {id(p) for group in parameter_groups(model, 0.05) for p in group["params"]}
    assert grouped == {id(p) for p in model.parameters() if p.requires_grad}


# --- updates --------------------------------------------------------------------------------------


def adamw_reference(
    config: AdamWConfig,
    weight: torch.Tensor,
    gradients: list[torch.Tensor],
    rates: list[float],
    decay: float,
) -> torch.Tensor:
    """Algorithm 2 of Loshchilov & Hutter 2019, decay multiplied by the learning rate."""
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
    """L2 decay, heavy-ball momentum, Sutskever et al. 2013's Nesterov form as torch writes it."""
    velocity = torch.zeros_like(weight)
    for gradient, lr in zip(gradients, rates, strict=True):
        gradient = gradient + decay * weight
        velocity = config.momentum * velocity + gradient
        weight = weight - lr * (
            gradient + config.momentum * velocity if config.nesterov else velocity
        )
    return weight


@each_config
def test_updates_are_the_formulas(config):
    model = small_model()
    rates = [0.02, 0.01, 0.05, 0.0, 0.03]
    before = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    optimizer = create_optimizer(model, config)
    gradients = {name: [] for name in before}
    for step, lr in enumerate(rates):
        give_gradients(model, step)
        for name, parameter in model.named_parameters():
            gradients[name].append(parameter.grad.double())
        set_lr(optimizer, lr)
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


def test_the_first_learning_rate_is_the_configs():
    for config in CONFIGS:
        assert [group["lr"] for group in create_optimizer(small_model(), config).param_groups] == [
            0.02,
            0.02,
        ]


@each_config
def test_an_update_whose_gradient_is_not_finite_changes_nothing(config):
    model = small_model()
    optimizer = create_optimizer(model, config)
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    weights = copy.deepcopy(model.state_dict())
    state = [t.clone() for t in tensors_of(optimizer)]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(optimizer), state, strict=True))


class UnknownConfig:
    """Not in the union, with every field that SGD reads."""

    weight_decay = 0.0
    lr = 0.1
    momentum = 0.9
    nesterov = False


def test_every_optimizer_of_the_config_is_tested_here():
    assert {type(config) for config in CONFIGS} == set(sections()["optim"])


@pytest.mark.parametrize(
    "use", [create_optimizer, lambda model, config: state_bytes(config, model)]
)
def test_an_optimizer_without_a_branch_of_its_own_is_an_error_and_not_sgd(use):
    with pytest.raises(AssertionError, match="UnknownConfig"):
        use(small_model(), UnknownConfig())


def test_an_optimizer_that_would_apply_a_gradient_that_is_not_finite_is_an_error(monkeypatch):
    unfused = functools.partial(torch.optim.AdamW, foreach=True)
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda groups, fused, **fields: unfused(groups, **fields)
    )
    with pytest.raises(
        AssertionError, match="AdamW does not skip its update when found_inf is set"
    ):
        create_optimizer(small_model(), CONFIGS[0])


# --- state ----------------------------------------------------------------------------------------


@each_config
def test_state_that_exists_from_the_start_changes_nothing(config):
    """Against torch's own optimizer, whose state comes with its first update."""
    plain = small_model()
    allocated = small_model()
    ours = create_optimizer(allocated, config)
    groups = parameter_groups(plain, config.weight_decay)
    if isinstance(config, AdamWConfig):
        theirs: torch.optim.Optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
    else:
        theirs = torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True
        )
    for name, parameter in allocated.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))
        assert parameter.grad is None
    assert [group["lr"] for group in ours.param_groups] == [0.02, 0.02]
    assert all(value.eq(0).all() for value in tensors_of(ours))

    for step in range(3):
        for model, optimizer in ((plain, theirs), (allocated, ours)):
            give_gradients(model, step)
            optimizer.step()
        assert all(
            torch.equal(a, b)
            for a, b in zip(plain.parameters(), allocated.parameters(), strict=True)
        )
    assert len(tensors_of(ours)) == len(tensors_of(theirs))
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(ours), tensors_of(theirs), strict=True))


@each_config
def test_a_first_update_that_is_skipped_leaves_the_state_at_zero(config):
    """Fused SGD of torch would leave uninitialised memory as momentum."""
    model = small_model()
    optimizer = create_optimizer(model, config)
    give_gradients(model, 0)
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert all(value.eq(0).all() for value in tensors_of(optimizer))
