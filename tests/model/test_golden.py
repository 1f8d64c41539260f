"""Compare the network of each shipped recipe with the network in the program from which the recipe
comes.

golden/ holds weights and inputs, and the logits and gradients that the programs' own networks
computed from them (golden/README.md). Each network here is created from the `model` section of a
shipped recipe, so the tests also find a wrong value in a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vit.config.io import load_config
from vit.config.schema import Config
from vit.layers.posemb import sincos2d_posemb
from vit.model import create_model
from vit.optim.groups import parameter_groups
from vit.system.files import WeightsError
from vit.training.loss import create_loss
from vit.weights.files import load_weights, read_weights
from vit.weights.layouts import layout_of, to_ours
from vit.weights.published import identify

ROOT = Path(__file__).parents[2]
RECIPES = {
    "algoperf/vit_s16": "algoperf",
    "augreg/vit_b16_300ep": "augreg",
    "big_vision/vit_s16_300ep": "big_vision",
    "big_vision/vit_s16_90ep": "big_vision",
    "deit/vit_b16_300ep": "deit",
    "deit/vit_b16_distilled_300ep": "deit_distilled",
    "deit3/vit_b16_400ep": "deit3_jax",
    "deit3/vit_b16_800ep": "deit3",
    "mae/vit_b16_ft": "mae",
    "paper/vit_b16_300ep": "vision_transformer",
    "torchvision/vit_b16_300ep": "torchvision",
    "vit5/vit_b16": "vit5",
}
"""Maps each recipe to its program's file in golden/."""
RENAMES = {
    "algoperf": {"conv_patch_extract/": "embedding/", "encoder_layernorm": "encoder_norm"},
    "deit3_jax": {
        "embed/wte/": "embedding/",
        "embed/wpe": "pos_embedding",
        "embed/cls_token": "cls",
        "layer_(\\d+)/scale(\\d)": "blocks.\\1.ls\\2.gamma",
        "layer_(\\d+)/": "Transformer/encoderblock_\\1/",
        "attn/wq": "MultiHeadDotProductAttention_0/query",
        "attn/wk": "MultiHeadDotProductAttention_0/key",
        "attn/wv": "MultiHeadDotProductAttention_0/value",
        "attn/wo": "MultiHeadDotProductAttention_0/out",
        "ff/w1": "MlpBlock_0/Dense_0",
        "ff/w2": "MlpBlock_0/Dense_1",
        "norm1": "LayerNorm_0",
        "norm2": "LayerNorm_1",
        "^norm/": "Transformer/encoder_norm/",
    },
    "deit3": {"gamma_(\\d)": "ls\\1.gamma"},
    "vit5": {"gamma_(\\d)": "ls\\1.gamma"},
}
"""Maps patterns of the programs' weight names to names that our weights readers know."""


def read(recipe: str) -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent / "golden" / f"{RECIPES[recipe]}.npz") as file:
        return dict(file)


def small(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """Return the recipe with the sizes of the small network in the golden files."""
    path = ROOT / "configs" / f"{recipe}.yaml"
    sizes = ["image_size=12", "patch_size=4", "embed_dim=16", "depth=2", "num_heads=2"]
    if load_config(path).model.representation_size is not None:
        sizes.append("representation_size=16")
    return load_config(path, [*(f"model.{size}" for size in sizes), *overrides])


def by_our_names(recipe: str, golden: dict[str, np.ndarray], kind: str) -> dict[str, Tensor]:
    """Return the golden weights ("w") or gradients ("g") under our network's names and in its
    layout. Converting a layout only permutes values, so gradients can be converted like weights."""
    tensors = {}
    for key, value in golden.items():
        if key.startswith(f"{kind}/"):
            name = key.removeprefix(f"{kind}/")
            for pattern, ours in RENAMES.get(RECIPES[recipe], {}).items():
                name = re.sub(pattern, ours, name)
            tensor = torch.from_numpy(value)
            tensors[name] = tensor.view(1, -1, 16) if name == "pos_embedding" else tensor
    layout = layout_of(tensors)
    return to_ours(layout, tensors)[0] if layout else tensors


def outcome(config: Config, weights: dict[str, Tensor], golden: dict[str, np.ndarray]) -> Any:
    """Return our logits, loss and gradients, by name, for the golden images and targets."""
    model: Any = create_model(config.model, num_classes=5)
    load_weights(model, weights)
    model = model.double().eval()
    logits = model(torch.from_numpy(golden["images"]).double())
    loss = create_loss(config.loss, None, torch.device("cpu"))
    mean = loss(logits, torch.from_numpy(golden["targets"])).mean()
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(mean, list(model.parameters()))
    found = dict(zip(names, gradients, strict=True))
    return {"logits": logits.detach(), "loss": mean.detach(), **found}


def largest_difference(recipe: str, overrides: Sequence[str] = ()) -> float:
    """Return the largest relative difference between our logits, loss and gradients and the
    program's."""
    golden = read(recipe)
    weights = by_our_names(recipe, golden, "w")
    theirs = {name: torch.from_numpy(golden[name]) for name in ("logits", "loss")}
    theirs |= by_our_names(recipe, golden, "g")
    if "model.global_pool=avg" in overrides:  # with this fault, the norm has another name
        weights, theirs = (
            {re.sub(r"^norm\.", "fc_norm.", name): value for name, value in tensors.items()}
            for tensors in (weights, theirs)
        )
    ours = outcome(small(recipe, overrides), weights, golden)
    assert ours.keys() == theirs.keys()
    return max(
        ((ours[name] - theirs[name].double()).abs().max() / theirs[name].abs().max()).item()
        for name in theirs
    )


ROUNDING = 1e-6
"""The largest relative difference that rounding may cause. The programs and our network compute in
float64, but gradients are stored in float32, and our loss is computed in float32."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_network_of_a_recipe_computes_what_its_program_computes(recipe):
    assert largest_difference(recipe) < ROUNDING


@pytest.mark.parametrize("begin", ["params/", ""])
def test_a_published_file_of_big_vision_gives_its_programs_logits(begin, tmp_path):
    """The file has the published file's name and big_vision's weight names, but no position
    embeddings. Its network is small."""
    golden = read("big_vision/vit_s16_90ep")
    weights = {key[2:]: value for key, value in golden.items() if key.startswith("w/")}
    path = tmp_path / "vit_s16_i1k_90ep.npz"
    np.savez(path, **{f"{begin}{name}": value for name, value in weights.items()})
    sizes = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    network = identify(path).model | sizes | {"representation_size": 16}
    model = create_model(**network, image_size=12, num_classes=5)
    notes = load_weights(model, read_weights(path).weights)
    assert notes == ["the source has no positions: the model's fixed ones are kept"]
    with torch.no_grad():
        ours = model.double().eval()(torch.from_numpy(golden["images"]).double())
    torch.testing.assert_close(ours, torch.from_numpy(golden["logits"]), rtol=0, atol=ROUNDING)


def test_the_other_order_of_norm_and_mean_is_named():
    golden = read("big_vision/vit_s16_90ep")
    weights = by_our_names("big_vision/vit_s16_90ep", golden, "w")
    wrong = create_model(small("big_vision/vit_s16_90ep", ["model.global_pool=avg"]).model, 12, 5)
    pools = r"the source pools as with model.global_pool="
    with pytest.raises(WeightsError, match=f"{pools}norm_avg, or token; 2 missing .*fc_norm"):
        load_weights(wrong, weights)
    right = create_model(small("big_vision/vit_s16_90ep").model, 12, 5)
    with pytest.raises(WeightsError, match=f"{pools}avg; 2 missing .*norm"):
        load_weights(right, wrong.state_dict())


Plant = Callable[[pytest.MonkeyPatch], list[str]]


def pools_otherwise(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["model.global_pool=avg"]


def has_exact_gelu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["model.mlp_layer=mlp"]


def has_tanh_gelu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["model.mlp_layer=mlp_tanh"]


def has_torchs_eps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("vit.layers.norm.EPS", 1e-5)
    return []


def swaps_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    right = sincos2d_posemb

    def swapped(*args: Any) -> Tensor:
        sin_x, cos_x, sin_y, cos_y = right(*args).chunk(4, -1)
        return torch.cat((sin_y, cos_y, sin_x, cos_x), -1)

    monkeypatch.setattr("vit.model.sincos2d_posemb", swapped)
    return []


def smooths_no_labels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["loss.label_smoothing=0"]


def averages_over_classes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["loss.bce_sum=false"]


@pytest.mark.parametrize(
    ("recipe", "plant"),
    [
        ("big_vision/vit_s16_90ep", pools_otherwise),
        ("algoperf/vit_s16", pools_otherwise),
        ("big_vision/vit_s16_90ep", has_exact_gelu),
        ("deit3/vit_b16_400ep", has_exact_gelu),
        ("deit3/vit_b16_800ep", has_tanh_gelu),
        ("mae/vit_b16_ft", has_tanh_gelu),
        *((recipe, has_torchs_eps) for recipe in RECIPES),
        ("algoperf/vit_s16", swaps_rows_and_columns),
        ("torchvision/vit_b16_300ep", smooths_no_labels),
        ("deit/vit_b16_300ep", smooths_no_labels),
        ("augreg/vit_b16_300ep", averages_over_classes),
    ],
)
def test_a_planted_error_is_found(recipe: str, plant: Plant, monkeypatch: pytest.MonkeyPatch):
    difference = largest_difference(recipe, plant(monkeypatch))
    print(f"{recipe} {plant.__name__}: {difference:.1e}")
    assert difference > 3 * ROUNDING


# --- initial weights, drop path and parameter groups ----------------------------------------------


def sources(recipe: str, golden: dict[str, np.ndarray]) -> dict[str, list[str]]:
    """Map each of our weights to the names of the program's weights that it joins, in their
    order."""
    keys = [key for key in golden if key.startswith("w/")]
    numbered = {key: np.full_like(golden[key], number) for number, key in enumerate(keys)}
    return {
        name: [keys[int(n)].removeprefix("w/") for n in value.flatten().unique_consecutive()]
        for name, value in by_our_names(recipe, numbered, "w").items()
    }


NOTHING = 2e-6
"""Values up to this size count as 0, because some programs draw them with a standard deviation of
1e-6 instead of setting them to 0."""


def is_drawn_like(ours: Tensor, theirs: np.ndarray) -> bool:
    """Return whether `ours` has about the program's mean and standard deviation. The largest
    absolute value is compared only for a large tensor, which shows the bounds of a distribution."""
    mean, std, largest = theirs
    return (
        ours.mean().item() == pytest.approx(mean, abs=0.2 * std + NOTHING)
        and ours.std(correction=0).item() == pytest.approx(std, rel=0.1, abs=NOTHING)
        and (ours.numel() < 100_000 or ours.abs().max().item() == pytest.approx(largest, rel=0.2))
    )


MATRICES = {"attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"}
MATRICES = {f"blocks.0.{name}" for name in MATRICES}
DRAWN_OTHERWISE = {
    "augreg": {"pos_embed"},
    "deit": {"cls_token"},
    "deit_distilled": {"cls_token"},
    "deit3": {"cls_token"},
    "vit5": {"cls_token"},
    "deit3_jax": {"cls_token", "pos_embed", "patch_embed.proj.weight", "head.weight", *MATRICES},
    "torchvision": {"patch_embed.proj.weight", *MATRICES},
}
"""The weights whose initial distribution differs from the program's. `PARTS` in
tests/extras/recipes/test_shipped.py has the sentences in which the importers name these weights."""


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe != "mae/vit_b16_ft"])
def test_the_network_of_a_recipe_starts_like_its_programs(recipe):
    """The distributions are compared at the recipe's width, in the first block and outside the
    blocks. MAE's fine-tuning recipe is excluded, because it starts from a checkpoint."""
    golden = read(recipe)
    torch.manual_seed(0)
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", ["model.depth=1"])
    parameters = dict(create_model(config.model, num_classes=1000).named_parameters())
    unlike = set()
    for name, theirs in sources(recipe, golden).items():
        if "blocks.1." not in name:
            parts = parameters[name].detach().double().chunk(len(theirs))
            facts = [golden[f"drawn/{source}"] for source in theirs]
            if not all(map(is_drawn_like, parts, facts)):
                unlike.add(name)
    assert unlike == DRAWN_OTHERWISE.get(RECIPES[recipe], set())


DROP_PATH = ["deit/vit_b16_300ep", "deit3/vit_b16_800ep", "mae/vit_b16_ft", "vit5/vit_b16"]


@pytest.mark.parametrize("recipe", DROP_PATH)
def test_a_recipe_has_its_programs_drop_path_rates(recipe):
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", ["model.embed_dim=48"])
    rates = create_model(config.model).drop_paths.rates
    theirs = read(recipe)["drop_path"]
    assert rates == pytest.approx(np.repeat(theirs, 2).tolist())


@pytest.mark.parametrize("recipe", [*DROP_PATH, "deit/vit_b16_distilled_300ep"])
def test_a_recipe_decays_and_scales_its_programs_parameters(recipe):
    """The golden files of PyTorch programs contain each parameter's weight decay (0 or 1) and
    factor of the learning rate, as computed by the programs' own functions."""
    golden = read(recipe)
    config = small(recipe)
    model = create_model(config.model, num_classes=5)
    names = {id(value): name for name, value in model.named_parameters()}
    ours = {
        names[id(value)]: [float(group["is_decayed"]), group.get("lr_scale", 1.0)]
        for group in parameter_groups(model, config.optim)
        for value in group["params"]
    }
    theirs = {
        name: golden[f"group/{their}"].tolist() for name, [their] in sources(recipe, golden).items()
    }
    if RECIPES[recipe] == "deit_distilled":
        assert theirs.pop("dist_token") == [1.0, 1.0]  # The importer reports this difference.
        assert ours.pop("dist_token") == [0.0, 1.0]
    assert ours == theirs
