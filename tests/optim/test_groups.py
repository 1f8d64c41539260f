"""Compare parameter groups with those of timm and torchvision, and test that each parameter is in
exactly one group."""

import itertools

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torchvision.ops._utils import split_normalization_params

from vit.config.optim_section import AdamWConfig, MuonConfig, NAdamWConfig
from vit.model import VisionTransformer
from vit.optim.groups import layer_numbers, parameter_groups
from vit.optim.optimizer import create_optimizer, set_rates

CONFIG = AdamWConfig(weight_decay=0.05)
AVG = {"class_token": False, "global_pool": "avg", "pos_embed": "sincos2d", "init_values": 1e-4}


def our_model(**fields) -> VisionTransformer:
    return VisionTransformer(32, 16, embed_dim=32, depth=2, num_heads=2, num_classes=5, **fields)


def names_of(model: nn.Module, parameters) -> set[str]:
    ids = {id(p) for p in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def decayed_names(model: nn.Module, rule: str) -> set[str]:
    groups = parameter_groups(model, AdamWConfig(no_weight_decay=rule))
    assert {bool(g["weight_decay"]) for g in groups if g["is_decayed"]} == {True}
    return names_of(model, [p for g in groups if g["is_decayed"] for p in g["params"]])


# --- which parameters are decayed -----------------------------------------------------------------


def test_only_weights_of_linear_maps_decay():
    model = our_model(init_values=0.1, class_token=True)
    decayed, free = parameter_groups(model, CONFIG)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.05, 0.0)
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert {id(p) for p in decayed["params"]} == {id(p) for p in linear}
    assert names_of(model, free["params"]) > {
        "cls_token",
        "pos_embed",
        "blocks.0.ls1.gamma",
        "blocks.1.norm2.weight",
        "blocks.0.attn.qkv.bias",
    }


@pytest.mark.parametrize(
    "create",
    [our_model, lambda: our_model(**AVG)]
    + [
        lambda name=name: timm.create_model(name, num_classes=5)
        for name in ("test_vit", "test_vit2", "test_resnet", "deit_tiny_distilled_patch16_224")
    ],
    ids=["ours", "ours, no token", "test_vit", "test_vit2", "test_resnet", "distilled"],
)
def test_each_parameter_is_in_the_same_group_as_in_timm(create):
    model = create()
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = {
        group["weight_decay"]: {id(p) for p in group["params"]}
        for group in param_groups_weight_decay(model, 0.05, no_weight_decay_list=exempt)
    }
    ours = parameter_groups(model, CONFIG)
    assert {group["weight_decay"]: {id(p) for p in group["params"]} for group in ours} == theirs
    assert sum(len(group["params"]) for group in ours) == len(list(model.parameters()))


@pytest.mark.parametrize(
    "create",
    [
        lambda: our_model(reg_tokens=2, init_values=0.1),
        lambda: our_model(norm_layer="rmsnorm", qk_norm=True),
        lambda: timm.create_model("test_resnet"),
    ],
    ids=["ours", "rmsnorm", "test_resnet"],
)
def test_exempts_the_same_norms_as_torchvision(create):
    model = create()
    kinds = {type(m) for m in model.modules() if "Norm" in type(m).__name__}
    norms, other_parameters = split_normalization_params(model, list(kinds))
    assert decayed_names(model, "norms") == names_of(model, other_parameters)
    assert names_of(model, norms)


def test_kernels_are_the_same_as_in_flax():
    """Flax does not treat the query of the attention-pooling head as a kernel, although it has at
    least two dimensions."""
    model = our_model(class_token=False, global_pool="map", reg_tokens=2)
    kernels = {n for n, p in model.named_parameters() if n.endswith(".weight") and p.ndim > 1}
    assert decayed_names(model, "not_kernels") == kernels
    assert "attn_pool.latent" not in kernels


def test_exempts_the_same_embeddings_as_timm_if_vectors_decay():
    model = our_model(reg_tokens=2, init_values=0.1)
    exempt = model.no_weight_decay()
    without, decayed = param_groups_weight_decay(
        model, 0.05, no_weight_decay_list=exempt, weight_decay_exclude_1d=False
    )
    assert decayed_names(model, "embeddings") == names_of(model, decayed["params"])
    assert names_of(model, without["params"]) == {"pos_embed", "cls_token", "reg_token"}


def test_can_decay_all_parameters():
    model = our_model()
    assert decayed_names(model, "nothing") == {name for name, _ in model.named_parameters()}


def test_omits_frozen_parameters():
    model = our_model()
    model.patch_embed.requires_grad_(False)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    for config in (CONFIG, AdamWConfig(layer_decay=0.5), MuonConfig(name="muon")):
        groups = parameter_groups(model, config)
        grouped = [id(p) for group in groups for p in group["params"]]
        assert set(grouped) == trained
        assert len(grouped) == len(trained)


# --- learning rates that depend on depth ----------------------------------------------------------


def scales(groups: list[dict], model: nn.Module) -> dict[str, tuple[float, float]]:
    name_of = {id(p): name for name, p in model.named_parameters()}
    pairs = [
        (name_of[id(p)], (group["lr_scale"], group["weight_decay"]))
        for group in groups
        for p in group["params"]
    ]
    assert len(pairs) == len(dict(pairs)) == len(name_of), (
        "each parameter must be in exactly one group"
    )
    return dict(pairs)


@pytest.mark.parametrize("fields", [{}, AVG, {"reg_tokens": 2}], ids=["token", "avg", "registers"])
def test_layers_are_the_same_as_in_timm(fields):
    ours = our_model(**fields)
    theirs = timm.models.VisionTransformer(
        32, 16, embed_dim=32, depth=2, num_heads=2, num_classes=5, fc_norm="avg" in fields.values(),
        **{name: value for name, value in fields.items() if name != "pos_embed"},
    )  # fmt: skip
    expected = scales(
        param_groups_layer_decay(
            theirs, 0.05, no_weight_decay_list=theirs.no_weight_decay(), layer_decay=0.7
        ),
        theirs,
    )
    for form in ("timm", "beit"):
        config = AdamWConfig(weight_decay=0.05, layer_decay=0.7, layer_decay_form=form)
        scales_of_ours = scales(parameter_groups(ours, config), ours)
        assert scales_of_ours.keys() <= expected.keys()
        differ = {
            name for name in scales_of_ours if scales_of_ours[name] != pytest.approx(expected[name])
        }
        # BEiT and MAE treat the last norm as part of the head. MAE's norm after pooling is
        # equivalent to timm's.
        has_norm = form == "beit" and "avg" not in fields.values()
        assert differ == ({"norm.weight", "norm.bias"} if has_norm else set())
        assert all(scales_of_ours[name][0] == 1 for name in differ)


def test_networks_with_stages_have_the_same_layers_as_in_timm():
    model = timm.create_model("test_resnet", num_classes=5)
    config = AdamWConfig(weight_decay=0.05, layer_decay=0.7, layer_decay_form="timm")
    expected = scales(param_groups_layer_decay(model, 0.05, layer_decay=0.7), model)
    assert scales(parameter_groups(model, config), model) == expected
    with pytest.raises(ValueError, match=r"has no list of blocks: set optim\.layer"):
        parameter_groups(model, AdamWConfig(layer_decay=0.7))


def test_each_lower_block_learns_slower_by_the_factor():
    """BEiT gives the number 0 to the embedding, n to block n, and depth + 1 to the head."""
    model = our_model()
    numbers = layer_numbers(model, "beit")
    assert {numbers[n] for n in ("cls_token", "pos_embed", "patch_embed.proj.weight")} == {0}
    assert [numbers[f"blocks.{i}.attn.qkv.weight"] for i in range(2)] == [1, 2]
    assert {numbers[name] for name in ("norm.weight", "head.weight")} == {3}
    optimizer = create_optimizer(model, AdamWConfig(layer_decay=0.5))
    set_rates(optimizer, 0.8, 0.3)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    factors = [rates[id(p)] for p in (model.cls_token, model.blocks[1].norm1.bias, model.head.bias)]
    assert factors == pytest.approx([0.1, 0.4, 0.8])
    decays = {g["is_decayed"]: g["weight_decay"] for g in optimizer.param_groups}
    assert decays == {True: 0.3, False: 0.0}


# --- the parameters that Muon updates -------------------------------------------------------------


@pytest.mark.parametrize("name", ["test_vit", "test_vit2", "test_resnet"])
def test_matrices_are_the_same_as_in_timm(name):
    model = timm.create_model(name, num_classes=5)
    theirs = create_optimizer_v2(model, opt="muon", lr=1e-3, weight_decay=0.05)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    theirs.step()
    expected = {id(p) for p in model.parameters() if theirs.state[p]["use_muon"]}
    groups = parameter_groups(model, MuonConfig(name="muon", matrices="timm"))
    assert {id(p) for g in groups if g["use_muon"] for p in g["params"]} == expected


def test_matrices_of_a_block_are_its_linear_maps():
    model = our_model(reg_tokens=2, qk_norm=True, init_values=0.1)
    groups = parameter_groups(model, MuonConfig(name="muon", layer_decay=0.9))
    taken = names_of(model, itertools.chain(*(g["params"] for g in groups if g["use_muon"])))
    parts = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert taken == {f"blocks.{i}.{part}.weight" for i in range(2) for part in parts}


def test_a_network_without_matrices_is_an_error():
    with pytest.raises(ValueError, match=r"set optim\.matrices=timm, or use another optim\.name"):
        parameter_groups(timm.create_model("test_resnet"), MuonConfig(name="muon"))


def test_rejects_an_unknown_depth():
    with pytest.raises(
        ValueError, match=r"Sequential has no list of blocks: set optim\.layer_decay=null"
    ):
        parameter_groups(
            nn.Sequential(nn.Linear(2, 2)), NAdamWConfig(name="nadamw", layer_decay=0.5)
        )
