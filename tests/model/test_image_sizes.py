"""Test a model on images of different sizes. The results must be correct for each size. For the
model's own size, they must not change."""

from __future__ import annotations

import pytest
import timm
import torch
from model.random_weights import randomise, relative_difference
from torch import nn

from vit.layers.image_sizes import take_sizes
from vit.layers.posemb import resample_posemb
from vit.model import VisionTransformer, create_model
from vit.weights.files import load_weights

OWN = (32, 48)
OTHERS = [(16, 24), (48, 40), (8, 8)]
TINY = {"embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 10, "patch_size": 8}
REGISTERS = {"reg_tokens": 4, "rope_reg_temperature": 100.0}


def images(size: tuple[int, int], rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 3, *size, generator=torch.Generator().manual_seed(1))


def with_others(**fields) -> nn.Module:
    model = randomise(VisionTransformer(OWN, **TINY, **fields))
    take_sizes(model, OTHERS)
    return model


@pytest.mark.parametrize(
    "fields",
    [{}, {"no_embed_class": True, "reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}],
)
@pytest.mark.parametrize("size", OTHERS)
def test_logits_and_gradients_equal_timm_with_dynamic_img_size(fields, size):
    """timm resizes its position embeddings in each forward pass as well. Because timm uses torch's
    resize, gradients flow through the resize."""
    model = with_others(**fields)
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=OWN, dynamic_img_size=True, **TINY, **fields
    ).eval()
    theirs.load_state_dict(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    results = []
    for network in (model, theirs):
        logits = network(images(size))
        parameters = dict(network.named_parameters())
        gradients = torch.autograd.grad(logits.square().sum(), [parameters[n] for n in names])
        results.append([logits.detach(), *gradients])
    for name, ours, expected in zip(["logits", *names], *results, strict=True):
        # The tolerance covers the rounding of float32 sums with several hundred terms.
        assert relative_difference(ours, expected) < 1e-5, name


@pytest.mark.parametrize(
    "fields",
    [
        {"pos_embed": "sincos2d"},
        {"pos_embed": "none", "rope_type": "dinov3"},
        {"rope_type": "axial", **REGISTERS},
        {"rope_type": "axial", "ref_feat_shape": 4, "pos_embed": "none"},
        {"patch_drop_rate": 0.5, "rope_type": "dinov3", "dual_patch_norm": True},
    ],
)
def test_equals_a_model_of_that_size_with_the_same_weights(fields):
    model = with_others(**fields).train()
    for size in OTHERS[:2]:
        of_size = VisionTransformer(size, **TINY, **fields).train()
        load_weights(of_size, model.state_dict(), model.grid_size)
        results = []
        for network in (model, of_size):
            torch.manual_seed(0)
            results.append(network(images(size)))
        assert relative_difference(*results) < 1e-5, size


def test_weights_and_results_at_its_own_size_do_not_change():
    plain = randomise(VisionTransformer(OWN, **TINY, rope_type="axial"))
    model = with_others(rope_type="axial")
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(model(images(OWN)), plain(images(OWN)))
    assert model.image_size == OWN
    with pytest.raises(ValueError, match=r"expected \(batch, 3, 32, 48\)"):
        model(images((24, 24)))


def test_positions_equal_those_of_the_file_reader_up_to_rounding():
    model = with_others()
    at_size = model.other_sizes.find(images((48, 40)))
    expected = resample_posemb(model.pos_embed, model.grid_size, (6, 5), 1)
    assert (at_size.positions(model.pos_embed) - expected).abs().max() < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        seen = []
        hook = model.pos_drop.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        model(images((48, 40)) * 0)
        hook.remove()
    # The input images are black, so the output is the sum of the position and the bias.
    shown = seen[0][:, 1:] - model.patch_embed.proj.bias
    # Positions stay in float32, because bfloat16 would round them to 3 digits. Only the patch
    # embedding, which equals its bias for black images, is rounded to bfloat16.
    bias_rounding = model.patch_embed.proj.bias.abs().max() * 2**-8
    assert (shown - expected[:, 1:]).abs().max() <= bias_rounding + 1e-5


def test_a_model_on_the_meta_device_gets_its_matrices_and_tables():
    with torch.device("meta"):
        model = VisionTransformer(OWN, **TINY, rope_type="axial")
        take_sizes(model, OTHERS)
    model.to_empty(device="cpu").init_weights()
    expected = VisionTransformer(OWN, **TINY, rope_type="axial")
    take_sizes(expected, OTHERS)
    buffers = dict(model.named_buffers())
    assert len(buffers) == len(dict(expected.named_buffers())) == 2 + 3 * len(OTHERS)
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def test_rejects_indivisible_sizes_and_timm_models():
    with pytest.raises(ValueError, match="image height 20 is not a multiple of patch height 8"):
        take_sizes(VisionTransformer(OWN, **TINY), [(20, 24)])
    guest = create_model("timm/vit_tiny_patch16_224", 32, 10, depth=1)
    with pytest.raises(ValueError, match="timm's VisionTransformer accepts only images of 32x32"):
        take_sizes(guest, [(16, 16)])
