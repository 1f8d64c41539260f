"""Test that weights stay bit-identical when they are converted to another program's layout and
back.

With the same random weights, the other program must compute the same logits.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import _load_weights
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionModel
from transformers import ViTConfig, ViTForImageClassification, ViTMAEConfig, ViTMAEForPreTraining

from vit.model import create_model
from vit.system.files import WeightsError
from vit.weights.files import load_weights, read_weights
from vit.weights.layouts import LAYOUTS, from_ours, layout_of, to_ours

TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3}
SIZES = {
    "tiny": {"name": "vit_ti8", "image_size": 32, "num_classes": 7, **TINY},
    "vit_b16": {"name": "vit_b16", "image_size": 224, "num_classes": 1000},
    "vit_l16": {"name": "vit_l16", "image_size": 224, "num_classes": 1000},
    "vit_h14": {"name": "vit_h14", "image_size": 224, "num_classes": 1000},
}
FULL = [pytest.param(name, marks=pytest.mark.full) for name in list(SIZES)[1:]]
PROGRAMS = ("timm", "torchvision", "huggingface", "npz")


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Fill `model` with weights other than 0 and 1, so that tests notice swapped or missing
    weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.5 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
            parameter.normal_(0, spread, generator=generator)
    return model.eval()


@functools.lru_cache(maxsize=1)
def ours(size: str) -> Any:
    return randomised(create_model(**SIZES[size]))


def theirs(program: str, model: Any) -> torch.nn.Module:
    block = model.blocks[0]
    side, patch = model.image_size[0], model.patch_size[0]
    hidden, heads = block.mlp.fc1.out_features, block.attn.num_heads
    if program == "torchvision":
        return TorchvisionModel(
            *(side, patch, model.depth, heads, model.embed_dim, hidden),
            num_classes=model.num_classes,
        )
    if program == "huggingface":
        config = ViTConfig(
            hidden_size=model.embed_dim,
            num_hidden_layers=model.depth,
            num_attention_heads=heads,
            intermediate_size=hidden,
            image_size=side,
            patch_size=patch,
            layer_norm_eps=1e-6,
        )
        config.num_labels = model.num_classes
        return ViTForImageClassification(config)
    return timm.create_model(
        "vit_base_patch16_224",
        img_size=side,
        patch_size=patch,
        embed_dim=model.embed_dim,
        depth=model.depth,
        num_heads=heads,
        num_classes=model.num_classes,
    )


def logits(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        output = model.eval()(images)
    return getattr(output, "logits", output)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, depth: int) -> None:
    """Check that two results are equal up to one float32 rounding error per block, because the
    kernels of the two programs sum values in different orders."""
    scale = theirs.abs().max()
    assert scale > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=float(scale) * 2**-20 * max(depth, 8))


@pytest.mark.parametrize("size", ["tiny", *FULL])
@pytest.mark.parametrize("program", PROGRAMS)
def test_weights_of_other_programs_give_their_logits(program, size, tmp_path):
    model = ours(size)
    other = randomised(theirs(program, model))
    images = torch.randn(2, 3, *model.image_size, generator=torch.Generator().manual_seed(1))
    if program == "huggingface":
        other.save_pretrained(tmp_path / "saved")
        path = tmp_path / "saved"
    elif program == "npz":  # timm can read but not write this layout
        path = tmp_path / "w.npz"
        weights = {name: value.detach() for name, value in other.state_dict().items()}
        arrays, left = from_ours(LAYOUTS["npz"], weights, model.blocks[0].attn.num_heads)
        assert left == []
        np.savez(path, **arrays)
    else:
        path = tmp_path / "w.pth"
        torch.save(other.state_dict(), path)
    loaded = read_weights(path)
    assert loaded.layout == ("" if program == "timm" else program)
    mine = create_model(**SIZES[size]).eval()
    assert load_weights(mine, loaded.weights) == []
    assert_close(logits(mine, images), logits(other, images), model.depth)


@pytest.mark.parametrize("size", ["tiny", *FULL])
@pytest.mark.parametrize("program", PROGRAMS)
def test_other_programs_load_our_weights_and_give_our_logits(program, size, tmp_path):
    model = ours(size)
    weights = model.state_dict()
    other = theirs(program, model)
    images = torch.randn(2, 3, *model.image_size, generator=torch.Generator().manual_seed(1))
    if program != "timm":
        sent, left = from_ours(LAYOUTS[program], weights, model.blocks[0].attn.num_heads)
        assert left == []
        assert layout_of(sent) is LAYOUTS[program]
        again, notes = to_ours(LAYOUTS[program], sent)
        assert notes == []
        assert again.keys() == weights.keys()
        assert all(torch.equal(again[name], weights[name]) for name in weights), (
            "the weights must be equal bit for bit"
        )
        weights = sent
    if program == "npz":
        np.savez(tmp_path / "w.npz", **weights)
        with torch.no_grad():
            _load_weights(other, str(tmp_path / "w.npz"))
    elif program == "huggingface":
        other = ViTForImageClassification.from_pretrained(
            None, config=other.config, state_dict=dict(weights)
        )
    else:
        other.load_state_dict(weights, strict=True)
    assert_close(logits(model, images), logits(other, images), model.depth)


# ---- variants of layouts ----
def test_variants_of_big_visions_names_are_read(tmp_path):
    """The variants have no class token, store all blocks in one array, or use the same name for
    several heads."""
    model = randomised(create_model(**SIZES["tiny"], class_token=False, global_pool="avg"))
    weights = model.state_dict()
    arrays, left = from_ours(LAYOUTS["npz"], weights, 3)
    assert left == ["fc_norm.weight", "fc_norm.bias"], "big_vision normalizes before it pools"
    renamed = {}
    for name, value in arrays.items():
        name = name.replace("Transformer/posembed_input/pos_embedding", "pos_embedding")
        name = name.replace("MultiHeadDotProductAttention_1", "MultiHeadDotProductAttention_0")
        name = name.replace("MlpBlock_3", "MlpBlock_0").replace("LayerNorm_2", "LayerNorm_1")
        renamed[f"params/{name}"] = value
    stacked = {name: value for name, value in renamed.items() if "encoderblock_" not in name}
    for name in renamed:
        if "encoderblock_0/" in name:
            every = [renamed[name.replace("block_0/", f"block_{n}/")] for n in range(2)]
            stacked[name.replace("block_0/", "block/")] = torch.stack(every)
    for names in (renamed, stacked):
        np.savez(tmp_path / "w.npz", **names)
        loaded = read_weights(tmp_path / "w.npz")
        assert loaded.weights.keys() == weights.keys() - {"fc_norm.weight", "fc_norm.bias"}
        assert all(torch.equal(loaded.weights[name], weights[name]) for name in loaded.weights)


def test_half_precision_of_every_kind_is_read(tmp_path):
    model = ours("tiny")
    for dtype in (torch.float16, torch.bfloat16):
        half = {name: value.to(dtype) for name, value in model.state_dict().items()}
        sent, _ = from_ours(LAYOUTS["npz"], half, 3)
        raw = {name: value.view(torch.int16).numpy() for name, value in sent.items()}
        kind = np.dtype("V2") if dtype == torch.bfloat16 else np.float16
        np.savez(tmp_path / "w.npz", **{name: value.view(kind) for name, value in raw.items()})
        loaded = read_weights(tmp_path / "w.npz")
        assert {value.dtype for value in loaded.weights.values()} == {dtype}
        mine = create_model(**SIZES["tiny"])
        load_weights(mine, loaded.weights)
        assert all(torch.equal(mine.state_dict()[name], half[name].float()) for name in half)
        assert str(dtype).removeprefix("torch.") in loaded.report([])[0]


def test_pre_training_by_mae_starts_a_model_that_pools(tmp_path):
    """The test covers the parameter names of MAE and of Hugging Face. The decoder and the mask
    token must be dropped, and the norm must be initialized."""
    shape = {"embed_dim": 48, "depth": 2, "num_heads": 3, "class_token": True}
    pools = {"name": "vit_ti8", "image_size": 32, "global_pool": "avg", **shape}

    encoder = randomised(create_model("vit_ti8", 32, 5, **shape)).state_dict()
    decoder = {"mask_token": torch.ones(1, 1, 16), "decoder_pos_embed": torch.ones(1, 17, 16)}
    saved = {name: value for name, value in encoder.items() if not name.startswith("head")}
    torch.save({"model": saved | decoder}, tmp_path / "mae.pth")

    config = ViTMAEConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=192,
        image_size=32,
        patch_size=8,
        decoder_hidden_size=16,
        decoder_num_attention_heads=2,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=32,
    )
    ViTMAEForPreTraining(config).save_pretrained(tmp_path / "hf")

    for path, layout in ((tmp_path / "mae.pth", "mae"), (tmp_path / "hf", "huggingface")):
        loaded = read_weights(path)
        assert loaded.layout == layout
        assert any(n.startswith("dropped, not used for classification: ") for n in loaded.notes)

        model = create_model(**pools, num_classes=7)
        notes = load_weights(model, loaded.weights, reset_head=True)
        assert notes == [
            "the head is new: the source has none",
            "fc_norm is new: dropped norm.weight, norm.bias",
        ]
        assert torch.equal(
            model.state_dict()["blocks.1.attn.qkv.weight"],
            loaded.weights["blocks.1.attn.qkv.weight"],
        )

        with pytest.raises(WeightsError, match="the head is different"):
            load_weights(model, loaded.weights)


def test_an_unsupported_family_is_refused_by_name(tmp_path: Path):
    torch.save(timm.create_model("resnet10t", num_classes=7).state_dict(), tmp_path / "w.pth")
    loaded = read_weights(tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"the weights of a ResNet; no name fits: the source"):
        load_weights(ours("tiny"), loaded.weights)
