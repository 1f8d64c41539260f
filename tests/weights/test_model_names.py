"""Test that model names are recognized both as timm's documentation writes them and as training
programs save them."""

from __future__ import annotations

import argparse

import pytest
import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN
from timm.utils import CheckpointSaver

import vit
from vit.config.schema import ModelConfig
from vit.model import create_model
from vit.weights.files import read_weights
from vit.weights.published import identify, with_published_config


@pytest.mark.parametrize("prefix", ["hf_hub:timm/", "hf-hub:timm/"])
def test_a_name_may_have_the_prefixes_used_on_pages_of_timm(prefix, tmp_path):
    name = "vit_base_patch16_384.augreg_in1k"
    assert identify(tmp_path / "mine.pth", prefix + name) == identify("mine.pth", name)
    guest = ModelConfig(name=f"{prefix}vit_base_patch16_224.augreg_in21k")
    assert guest.name == "timm/vit_base_patch16_224.augreg_in21k"


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "hf_hub:timm/vit_tiny_patch16_224"])
def test_the_model_of_a_timm_checkpoint_is_read_from_the_file(model, tmp_path):
    args = argparse.Namespace(model=model, lr=0.1)
    network = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    optimizer = torch.optim.SGD(network.parameters())
    saver = CheckpointSaver(network, optimizer, args, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=1.0)
    loaded, published = with_published_config(
        read_weights(tmp_path / "model_best.pth.tar"), None, "."
    )
    assert published.model == {"name": "vit_ti16"}
    assert (published.top1, loaded.num_classes) == (None, 3)


def test_a_published_accuracy_is_not_assigned_to_weights_trained_by_the_user(tmp_path):
    """DeiT's program saves the model's name, and torchvision's example saves the name of the
    model's class."""
    weights = create_model("vit_ti16", num_classes=1000).state_dict()
    path = tmp_path / "checkpoint.pth"
    torch.save({"model": weights, "args": {"model": "deit_tiny_patch16_224"}}, path)
    _, published = with_published_config(read_weights(path), None, "data")
    assert (published.name, published.top1) == ("deit_tiny_patch16_224.fb_in1k", None)
    torch.save({"model": weights, "arch": "visiontransformer"}, path)
    with pytest.raises(ValueError, match=r"pass its timm name with --model NAME\Z"):
        with_published_config(read_weights(path), None, "data")


@pytest.mark.parametrize(
    ("arch", "pools", "options", "view"),
    [
        ("vit_base_patch16", True, {"input_size": 224}, (224, 256, "bicubic")),  # MAE
        ("vit_large_patch16", True, {"input_size": 256}, (256, 256, "bicubic")),  # RETFound
        ("RETFound_mae", False, {"input_size": 224}, (224, 256, "bicubic")),
        ("vit_huge_patch14", True, {}, (224, 256, "bicubic")),
        (
            "vit_b_32",
            False,
            {"val_crop_size": 384, "val_resize_size": 391, "interpolation": "bicubic"},
            (384, 391, "bicubic"),
        ),
        ("vit_l_16", False, {"val_crop_size": 224, "val_resize_size": 242}, (224, 242, "bilinear")),
    ],
)
@pytest.mark.parametrize("is_named", [False, True])
def test_the_model_of_maes_and_torchvisions_own_checkpoints_is_read(
    arch, pools, options, view, is_named, tmp_path
):
    """A weight named `fc_norm` means that MAE averages the patches. The sizes come from the
    training programs, whose transforms are `Resize(resized)` and `CenterCrop(side)`."""
    side, *_ = view
    name = {"RETFound_mae": "vit_l16"}.get(arch, f"vit_{arch[4]}{arch[-2:]}")
    parts = {"global_pool": "avg"} if pools else {}
    weights = {"head.weight": torch.zeros(5, 8)} | (
        {"fc_norm.weight": torch.ones(8)} if pools else {}
    )
    args = argparse.Namespace(**({} if is_named else {"model": arch}), **options)
    torch.save({"model": weights, "epoch": 9, "args": args}, tmp_path / "checkpoint-best.pth")
    loaded, published = with_published_config(
        read_weights(tmp_path / "checkpoint-best.pth"), arch if is_named else None, "data"
    )
    assert published.model == {"name": name, **parts}
    assert (published.mean, loaded.num_classes) == (IMAGENET_DEFAULT_MEAN, 5)
    cover = int(side / published.crop_pct)
    assert (*published.image_size, cover, published.interpolation) == (side, side, *view[1:])


@pytest.mark.slow
def test_a_checkpoint_of_maes_fine_tuning_has_timms_logits(tmp_path):
    network = timm.create_model("vit_base_patch16_224", global_pool="avg", num_classes=5).eval()
    args = argparse.Namespace(model="vit_base_patch16", input_size=224, global_pool=True)
    torch.save({"model": network.state_dict(), "args": args}, tmp_path / "checkpoint-best.pth")
    images = torch.rand(2, 3, 224, 224)
    trained = vit.load(tmp_path / "checkpoint-best.pth")
    assert torch.equal(trained(images), network(images).detach())
    # MAE publishes its encoder without a head. Its model names contain a patch size or omit it.
    encoder = timm.create_model("vit_base_patch16_224", num_classes=0).eval()
    torch.save({"model": encoder.state_dict()}, tmp_path / "mae_pretrain_vit_base.pth")
    features = vit.load(tmp_path / "mae_pretrain_vit_base.pth")(images)
    assert torch.equal(features, encoder(images).detach())
