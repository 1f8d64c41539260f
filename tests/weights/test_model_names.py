"""Test that model names are recognized both as timm's documentation writes them and as training
programs save them."""

from __future__ import annotations

import argparse

import pytest
import timm
import torch
from timm.utils import CheckpointSaver

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
    """DeiT's program saves the name of the model, and torchvision's example saves the name of a
    class."""
    weights = create_model("vit_ti16", num_classes=1000).state_dict()
    path = tmp_path / "checkpoint.pth"
    torch.save({"model": weights, "args": {"model": "deit_tiny_patch16_224"}}, path)
    _, published = with_published_config(read_weights(path), None, "data")
    assert (published.name, published.top1) == ("deit_tiny_patch16_224.fb_in1k", None)
    torch.save({"model": weights, "arch": "visiontransformer"}, path)
    with pytest.raises(ValueError, match=r"pass its timm name with --model NAME\Z"):
        with_published_config(read_weights(path), None, "data")
