"""Test that a model works after its layers are exchanged, as timm's models do. The tests use
another head, adapters, parametrizations and dynamic quantization."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import timm
import torch
from model.random_weights import randomise, relative_difference
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vit.layers.blocks import set_residual_dtype
from vit.layers.precision import autocast
from vit.model import VisionTransformer
from vit.weights.files import load_weights

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5, "class_token": True}


class Adapter(nn.Module):
    """A layer plus a low-rank update, as in LoRA. The adapter has none of the layer's
    attributes."""

    def __init__(self, layer: nn.Module, update: nn.Module):
        super().__init__()
        self.layer = layer
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.update(x)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def low_rank(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False))


def headless(model) -> None:
    model.head = nn.Identity()


def dropout_and_head(model) -> None:
    torch.manual_seed(3)
    model.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 3)).eval()


def parametrized_head(model) -> None:
    parametrize.register_parametrization(model.head, "weight", Doubled())


def adapters(model) -> None:
    for block in model.blocks:
        block.attn.qkv = Adapter(block.attn.qkv, low_rank(32, 96))
        block.mlp.fc1 = Adapter(block.mlp.fc1, low_rank(32, 128))
    model.head = Adapter(model.head, low_rank(32, 5))


def patch_adapter(model) -> None:
    torch.manual_seed(3)
    update = nn.Conv2d(3, 32, 8, stride=8)
    model.patch_embed.proj = Adapter(model.patch_embed.proj, update)


EXCHANGES = [headless, dropout_and_head, parametrized_head, adapters, patch_adapter]


def pair(**fields) -> tuple[nn.Module, nn.Module]:
    """Return our model and timm's model with equal weights, in evaluation mode."""
    theirs = timm.models.VisionTransformer(img_size=32, patch_size=8, **TINY, **fields).eval()
    randomise(theirs)
    ours = VisionTransformer(image_size=32, patch_size=8, **TINY, **fields).eval()
    load_weights(ours, theirs.state_dict())
    return ours, theirs


def images() -> Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanged_layers_give_timms_outputs(exchange: Callable, pool: str):
    both = pair(global_pool=pool)
    for model in both:
        exchange(model)
    ours, theirs = (model(images()) for model in both)
    assert relative_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("exchange", [headless, dropout_and_head, adapters])
def test_outputs_stay_in_the_dtype_of_the_weights(exchange: Callable):
    """bf16 has too few digits to rank logits, so the head must not run under autocast, even if
    its weights have another name."""
    for pool in ("token", "map"):
        model, _ = pair(global_pool=pool)
        exchange(model)
        expected = model(images())
        set_residual_dtype(model, "bf16")
        with autocast("bf16", torch.device("cpu")):
            logits = model(images())
        assert logits.dtype == torch.float32
        assert relative_difference(logits, expected) < 0.05
        assert model.bfloat16()(images().bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("pool", ["token", "map"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dynamic_quantization_works(pool: str, precision: str):
    """The weight of a quantized layer is a method, not a tensor."""
    model, _ = pair(global_pool=pool)
    expected = model(images())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecation
        quantized = torch.ao.quantization.quantize_dynamic(
            copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8
        )
        head_only = torch.ao.quantization.quantize_dynamic(model, {"head"}, dtype=torch.qint8)
    assert relative_difference(quantized(images()), expected) < 0.1
    with autocast(precision, torch.device("cpu")):
        assert relative_difference(head_only(images()), expected) < 0.1


@pytest.mark.parametrize("fields", [{"dual_patch_norm": True}, {"pos_embed": "none"}])
def test_the_patch_embedding_may_be_exchanged(fields: dict):
    """The model reads the weight of the patch embedding with both options."""
    torch.manual_seed(0)
    model = VisionTransformer(image_size=32, patch_size=8, **TINY, **fields).eval()
    randomise(model)
    expected = model(images())
    parametrize.register_parametrization(model.patch_embed.proj, "weight", Doubled())
    with torch.no_grad():
        model.patch_embed.proj.parametrizations.weight.original.div_(2)
    assert torch.equal(model(images()), expected)
    zero = nn.Conv2d(3, 32, 8, stride=8)
    for parameter in zero.parameters():
        nn.init.zeros_(parameter)
    model.patch_embed.proj = Adapter(model.patch_embed.proj, zero)
    assert relative_difference(model(images()), expected) < 1e-5
