"""Test that after loading a checkpoint, a model created without random initialization equals an
initialized model."""

import pytest
import timm
import torch
from torch import nn

from vit.layers.image_sizes import take_sizes
from vit.layers.init import undrawn
from vit.model import VisionTransformer

TINY = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def ours(**fields) -> nn.Module:
    model = VisionTransformer(16, 4, **{**TINY, **fields})
    take_sizes(model, [(24, 24)])
    return model


CREATE = {
    "learned": lambda: ours(class_token=True, reg_tokens=2, weight_init="jax"),
    "sincos": lambda: ours(pos_embed="sincos2d", drop_path_rate=0.2, init_values=1e-5),
    "rope": lambda: ours(pos_embed="none", rope_type="axial", weight_init="timm"),
    "timm": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=5),
}


@pytest.mark.parametrize("name", CREATE)
def test_only_parameters_are_uninitialized(name):
    create = CREATE[name]
    drawn = create()
    with undrawn():
        model = create()
    model.load_state_dict(drawn.state_dict())
    for (key, one), (_, other) in zip(
        [*drawn.named_parameters(), *drawn.named_buffers()],
        [*model.named_parameters(), *model.named_buffers()],
        strict=True,
    ):
        assert torch.equal(one, other), key


def test_draws_no_random_number_and_later_calls_draw_again():
    torch.manual_seed(0)
    first = torch.rand(4)
    torch.manual_seed(0)
    with undrawn():
        ours()
    assert torch.equal(torch.rand(4), first), "a random number was drawn"
    torch.manual_seed(0)
    again = ours().state_dict()
    torch.manual_seed(0)
    assert all(torch.equal(value, again[name]) for name, value in ours().state_dict().items())
    assert again["blocks.0.attn.qkv.weight"].std() > 0.01
