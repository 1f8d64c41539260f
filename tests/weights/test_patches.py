"""Test that weights are adapted to gray images and other patch sizes as in timm."""

from __future__ import annotations

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.weights.test_layouts import randomised
from vit.model import create_model
from vit.weights.files import load_weights, read_weights

SHAPE = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7}


@pytest.mark.parametrize("is_gray", [False, True])
@pytest.mark.parametrize("patch", [16, 8, 32, (8, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gray_images_and_other_patches_have_timms_logits(is_gray, patch, dtype, tmp_path):
    color = randomised(timm.create_model("vit_base_patch16_224", **SHAPE)).to(dtype)
    save_file(color.state_dict(), tmp_path / "w.safetensors")
    wanted = {"patch_size": patch, **({"in_chans": 1} if is_gray else {})}
    theirs = timm.create_model(
        "vit_base_patch16_224",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(tmp_path / "w.safetensors"), "num_classes": 7},
        **SHAPE,
        **wanted,
    ).eval()
    sizes = {name: SHAPE[name] for name in ("embed_dim", "depth", "num_heads", "num_classes")}
    mine = create_model("vit_b16", 64, **sizes, **wanted).eval()
    loaded = read_weights(tmp_path / "w.safetensors")
    notes = load_weights(mine, loaded.weights)
    assert ("the filters of the three colors are added for gray images" in notes) == is_gray
    assert (sum("patches resampled from 16x16" in note for note in notes) > 0) == (patch != 16)
    images = torch.rand(2, 1 if is_gray else 3, 64, 64)
    if dtype == torch.float32:
        assert torch.equal(mine(images), theirs(images))
    # timm rounds to fp16 after each of the two changes.
    torch.testing.assert_close(mine(images), theirs(images), rtol=1e-3, atol=1e-3)


def test_a_gray_image_has_the_logits_of_its_color_image():
    color = randomised(create_model("vit_b16", 32, 7, embed_dim=48, depth=2, num_heads=3))
    gray = create_model("vit_b16", 32, 7, in_chans=1, embed_dim=48, depth=2, num_heads=3).eval()
    load_weights(gray, color.state_dict())
    images = torch.rand(2, 1, 32, 32)
    expected = color(images.expand(-1, 3, -1, -1))
    torch.testing.assert_close(gray(images), expected, rtol=1e-4, atol=1e-4)


def test_the_first_convolution_of_a_timm_network_is_fitted_to_gray_images(tmp_path):
    color = timm.create_model("resnet10t", num_classes=7)
    save_file(color.state_dict(), tmp_path / "w.safetensors")
    theirs = timm.create_model(
        "resnet10t",
        pretrained=True,
        pretrained_cfg_overlay={"file": str(tmp_path / "w.safetensors"), "num_classes": 7},
        num_classes=7,
        in_chans=1,
    ).eval()
    mine = create_model("timm/resnet10t", 64, 7, in_chans=1).eval()
    load_weights(mine, read_weights(tmp_path / "w.safetensors").weights)
    images = torch.rand(2, 1, 64, 64)
    assert torch.equal(mine(images), theirs(images))
