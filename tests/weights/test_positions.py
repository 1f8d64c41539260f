"""Test that positions are copied where they fit, and that a grid is guessed only if neither the
model nor the file states it. The results are compared with timm's `checkpoint_path=`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import timm
import torch
from model.random_weights import randomise, relative_difference
from safetensors.torch import save_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

import vit
from vit.model import VisionTransformer
from vit.system.files import WeightsError
from vit.weights.files import load_weights, read_weights

PATCH = 4
TINY = {"embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5, "patch_size": PATCH}
# The first four grids have (n-1) x (n+1) positions, which become a square number with a class
# token. All other grids have a square number of positions.
GRIDS = [(3, 5), (6, 8), (14, 16), (8, 6), (2, 8), (4, 16), (9, 16), (18, 32), (8, 32), (7, 7)]
TOKENS = {
    "class token": {"class_token": True},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "registers": {"class_token": True, "reg_tokens": 4},
    "no_embed_class": {"class_token": True, "no_embed_class": True},
    "no_embed_class and registers": {"class_token": True, "no_embed_class": True, "reg_tokens": 4},
}
NAME = "vit_tiny_patch16_224"


def px(grid: tuple[int, int], patch: int = PATCH) -> tuple[int, int]:
    return grid[0] * patch, grid[1] * patch


def timm_model(grid: tuple[int, int], seed: int = 0, **fields) -> nn.Module:
    model = timm.create_model(NAME, img_size=px(grid), **{**TINY, **fields})
    return randomise(model, seed)


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_positions_of_the_models_shape_are_copied_as_in_timm(grid, tokens, tmp_path: Path):
    path = tmp_path / "w.pth"
    torch.save(timm_model(grid, **tokens).state_dict(), path)
    theirs = timm.create_model(
        NAME, img_size=px(grid), checkpoint_path=str(path), **{**TINY, **tokens}
    ).eval()
    ours = VisionTransformer(image_size=px(grid), **TINY, **tokens).eval()
    notes = load_weights(ours, read_weights(path).weights)
    assert not any("resampled" in note or "zeros" in note for note in notes)
    assert torch.equal(ours.pos_embed, theirs.pos_embed)
    images = torch.randn(2, 3, *px(grid))
    assert relative_difference(ours(images), theirs(images)) < 1e-6


@pytest.mark.parametrize("old", [(7, 7), (4, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("new", [(6, 8), (4, 12), (9, 9)], ids=str)
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_a_square_is_guessed_for_other_sizes_as_in_timm(old, new, tokens, tmp_path: Path):
    path = tmp_path / "w.pth"
    source = timm_model(old, **tokens).state_dict()
    torch.save(source, path)
    theirs = checkpoint_filter_fn(dict(source), timm_model(new, **tokens))
    ours = VisionTransformer(image_size=px(new), **TINY, **tokens)
    *_, note = load_weights(ours, read_weights(path).weights)
    resampled = f"positions resampled from {old[0]}x{old[1]} to {new[0]}x{new[1]}"
    assert note.startswith(resampled)
    assert torch.equal(ours.pos_embed, theirs["pos_embed"])


def test_the_models_grid_precedes_a_square_for_tokens_without_positions():
    """64 positions may form a grid of 8x8 or 4x16, and the model's grid is 4x16."""
    source = timm_model((4, 16), no_embed_class=True).state_dict()
    source["pos_embed"] = source["pos_embed"].clone()
    model = VisionTransformer(image_size=px((4, 16)), **TINY)
    notes = load_weights(model, source)
    assert torch.equal(model.pos_embed[:, 1:], source["pos_embed"])
    assert not model.pos_embed[:, 0].any()
    assert notes == [
        "nothing states the grid of the source's 64 positions: read as 4x16, but 8x8 also fits; to"
        ' state the grid, put a config.json with {"image_size": [HEIGHT, WIDTH]} next to the'
        " weights",
        "the source has no positions for the class token: zeros are used",
    ]
    folded = VisionTransformer(image_size=px((4, 16)), no_embed_class=True, **TINY)
    embedding = timm_model((4, 16)).state_dict()
    notes = load_weights(folded, embedding)
    assert torch.equal(folded.pos_embed, embedding["pos_embed"][:, 1:])
    assert "read as 4x16 and 1 for prefix tokens, but 8x8 and 1 for prefix tokens" in notes[0]


@pytest.mark.parametrize(
    ("grid", "tokens", "other"),
    [
        ((3, 5), "class token", "read as 3x5 and 1 for prefix tokens, but 4x4 also fits"),
        ((2, 8), "no class token", "read as 2x8, but 4x4 also fits"),
        ((7, 7), "class token", ""),
        ((2, 6), "class token", ""),
        ((4, 5), "registers", "read as 4x5 and 5 for prefix tokens, but 5x5 also fits"),
    ],
)
def test_a_second_possible_grid_is_noted(grid, tokens, other):
    source = timm_model(grid, **TOKENS[tokens]).state_dict()
    notes = load_weights(VisionTransformer(image_size=px(grid), **TINY, **TOKENS[tokens]), source)
    assert len(notes) == bool(other)
    assert not other or other in notes[0]


STATED = {
    "timm's --img-size": {"img_size": 64, "input_size": None},
    "timm's --input-size": {"img_size": None, "input_size": [3, 32, 128]},
    "timm's --model-kwargs": {"input_size": None, "model_kwargs": {"img_size": [32, 128]}},
    "DeiT's --input-size": argparse.Namespace(input_size=64),
}


@pytest.mark.parametrize("args", STATED.values(), ids=STATED)
def test_the_command_line_in_the_file_states_the_grid(args, tmp_path: Path):
    """Both 4x4 and 2x8 patches of 16 px have 16 positions."""
    options = args if isinstance(args, dict) else vars(args)
    is_square = 64 in options.values()
    size = (64, 64) if is_square else (32, 128)
    theirs = randomise(timm.create_model(NAME, img_size=size, num_classes=5))
    torch.save({"arch": NAME, "args": args, "state_dict": theirs.state_dict()}, tmp_path / "c.pth")
    assert read_weights(tmp_path / "c.pth").grid_size == ((4, 4) if is_square else (2, 8))
    trained = vit.load(tmp_path / "c.pth")
    assert trained.preprocess.image_format.size == size
    images = torch.randn(2, 3, *size)
    assert relative_difference(trained(images), theirs(images)) < 1e-6
    other_size = {"model.image_size": [32, 128] if is_square else 64}
    resampled = vit.load(tmp_path / "c.pth", settings=other_size)
    theirs.set_input_size(img_size=(32, 128) if is_square else (64, 64))
    assert torch.equal(resampled.model.pos_embed, theirs.pos_embed)


def test_a_config_without_a_model_states_the_grid(tmp_path: Path):
    """The remedy in the messages must work even for weights whose grid cannot be guessed."""
    theirs = randomise(timm.create_model(NAME, img_size=(32, 112), num_classes=5))
    path = tmp_path / f"{NAME}.augreg_in21k_ft_in1k.safetensors"
    save_file(theirs.state_dict(), path)
    with pytest.raises(WeightsError, match=r"15 positions, which do not form a square.*to state"):
        vit.load(path)
    (tmp_path / "config.json").write_text(json.dumps({"image_size": [32, 112]}))
    trained = vit.load(path)
    images = torch.randn(2, 3, 32, 112)
    assert relative_difference(trained(images), theirs(images)) < 1e-6
    for number in (64, [48, 48], ["a", 1], None, {"height": 1}):
        (tmp_path / "config.json").write_text(json.dumps({"image_size": number}))
        assert read_weights(path).grid_size is None


def test_registers_without_a_class_token_do_not_hide_the_stated_grid(tmp_path: Path):
    fields = {"class_token": False, "reg_tokens": 4, "global_pool": "avg"}
    torch.save(timm_model((2, 8), **fields).state_dict(), tmp_path / "w.pth")
    (tmp_path / "config.json").write_text(json.dumps({"image_size": list(px((2, 8)))}))
    assert read_weights(tmp_path / "w.pth").grid_size == (2, 8)


@pytest.mark.parametrize(
    ("name", "tokens", "token"),
    [("deit_tiny_distilled_patch16_224", {}, "dist_token"), (NAME, {"reg_tokens": 4}, "reg_token")],
)
def test_tokens_that_the_model_lacks_are_named_instead_of_a_wrong_grid(name, tokens, token):
    """No config.json could state a grid of 4x4 patches that fits 18 or 21 positions."""
    theirs = timm.create_model(name, img_size=px((4, 4)), **{**TINY, **tokens})
    ours = VisionTransformer(image_size=px((4, 4)), **TINY)
    with pytest.raises(WeightsError, match=rf"unknown to the model: .*{token}") as caught:
        load_weights(ours, theirs.state_dict())
    assert "state the grid" not in str(caught.value)
