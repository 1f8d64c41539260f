"""Test that the checkpoints of training programs load, with their containers, prefixes and
averages.

Each test saves the weights of timm's or torchvision's model as a training program does, and
compares logits with that model.
"""

from __future__ import annotations

import argparse
import copy
import re
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import checkpoint_filter_fn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.weights.test_layouts import SIZES, ours, randomised, theirs
from vit.model import create_model
from vit.system.files import WeightsError
from vit.weights.files import load_weights, read_weights

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def timm_model(**arguments: Any) -> torch.nn.Module:
    """Return timm's tiny ViT with random weights."""
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    arguments = {**shape, "num_classes": 7, **arguments}
    return randomised(timm.create_model("vit_base_patch16_224", **arguments))


def loaded_from(path, **arguments: Any) -> tuple[torch.nn.Module, list[str]]:
    """Return our tiny ViT with the weights at `path`, and all notes about loading them."""
    loaded = read_weights(path)
    model = create_model(**{**SIZES["tiny"], **arguments}).eval()
    return model, [*loaded.notes, *load_weights(model, loaded.weights, loaded.grid_size)]


def test_the_average_of_torchvisions_references_is_preferred(tmp_path):
    """With --model-ema, references/classification/train.py saves the weights and their average."""
    model = randomised(theirs("torchvision", ours("tiny")))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    average.update_parameters(model)
    average.update_parameters(randomised(copy.deepcopy(model)))
    content = {"model": model.state_dict(), "model_ema": average.state_dict(), "epoch": 3}
    args = argparse.Namespace(model="vit_b_16")
    torch.save({**content, "optimizer": {}, "args": args}, tmp_path / "checkpoint.pth")
    mine, notes = loaded_from(tmp_path / "checkpoint.pth")
    expected = average.module.eval()(IMAGES)
    torch.testing.assert_close(mine(IMAGES), expected, rtol=1e-5, atol=1e-5)
    assert (mine(IMAGES) - model.eval()(IMAGES)).abs().max() > 1e-3
    assert notes == [
        "model_ema is used, model in the same file is ignored",
        "the average of 2 updates (torch.optim.swa_utils.AveragedModel)",
    ]


@pytest.mark.parametrize("in_sequence", [False, True])
def test_the_head_that_replaces_torchvisions_is_read(in_sequence, tmp_path):
    """Tutorials write `model.heads = torch.nn.Linear(...)`, or use a Sequential with such a
    layer."""
    model = theirs("torchvision", ours("tiny"))
    head = torch.nn.Linear(model.hidden_dim, 7)
    model.heads = torch.nn.Sequential(head) if in_sequence else head
    model = randomised(model)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    mine, _ = loaded_from(tmp_path / "w.pth")
    torch.testing.assert_close(mine(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-4)


PREFIXES = ["model.", "net.", "backbone.", "module._orig_mod.", "model.module.net.backbone.", "v."]


@pytest.mark.parametrize("program", ["timm", "torchvision", "huggingface"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_of_all_names_is_removed(prefix, program, tmp_path):
    """Lightning, solo-learn and classes that wrap a model add such prefixes."""
    model = randomised(theirs(program, ours("tiny")))
    weights = {prefix + name: value for name, value in model.state_dict().items()}
    torch.save({"state_dict": weights, "pytorch-lightning_version": "2.5"}, tmp_path / "l.ckpt")
    mine, notes = loaded_from(tmp_path / "l.ckpt")
    expected = getattr(model(IMAGES), "logits", None)
    expected = model(IMAGES) if expected is None else expected
    torch.testing.assert_close(mine(IMAGES), expected, rtol=1e-4, atol=1e-4)
    left = prefix.replace("module.", "").replace("_orig_mod.", "")
    assert notes == ([f"the prefix {left} of all names is removed"] if left else [])


@pytest.mark.parametrize("outer", ["", "model.", "net.vit."])
def test_a_prefix_of_some_names_is_removed_and_others_are_named(outer, tmp_path):
    """In a class with a backbone and a head, only the backbone's names have an additional
    prefix."""
    model = timm_model()
    weights = {
        outer + (name if name.startswith("head") else f"backbone.{name}"): value
        for name, value in model.state_dict().items()
    }
    path = tmp_path / "w.pth"
    torch.save(weights, path)
    mine, notes = loaded_from(path)
    assert torch.equal(mine(IMAGES), model(IMAGES))
    assert notes == [f"the prefix {outer}backbone. of 30 of 32 names is removed"]
    torch.save({**weights, "criterion.weight": torch.ones(7)}, path)
    with pytest.raises(WeightsError, match=r"model: 1 unknown to the model: criterion.weight\Z"):
        loaded_from(path)
    torch.save({**weights, f"{outer}backbone.head.bias": torch.ones(7)}, path)
    with pytest.raises(WeightsError, match=r"duplicate weights after prefixes are removed: 33"):
        read_weights(path)


def test_the_average_is_preferred_among_networks_of_one_file(tmp_path):
    """A Lightning module may contain the average of its weights. A model for self-supervised
    training contains two networks."""
    model, average = timm_model(), timm_model()
    with torch.no_grad():
        average.head.bias.add_(1)
    networks = {"model.": model, "ema_model.module.": average}
    weights = {
        prefix + name: value
        for prefix, network in networks.items()
        for name, value in network.state_dict().items()
    }
    count = {"ema_model.n_averaged": torch.tensor(9)}
    torch.save({"state_dict": {**count, **weights}}, tmp_path / "w.ckpt")
    mine, notes = loaded_from(tmp_path / "w.ckpt")
    assert torch.equal(mine(IMAGES), average(IMAGES))
    assert notes == [
        "the average of 9 updates (torch.optim.swa_utils.AveragedModel)",
        "ema_model. is used, model. in the same file is ignored",
    ]
    torch.save({f"student.{name}": value for name, value in weights.items()}, tmp_path / "w.ckpt")
    mine, _ = loaded_from(tmp_path / "w.ckpt")
    two = {name.replace("ema_model", "encoder_k"): value for name, value in weights.items()}
    torch.save({"state_dict": two}, tmp_path / "w.ckpt")
    with pytest.raises(
        WeightsError, match=r"contains 2 networks \(encoder_k\., model\.\): save only"
    ):
        read_weights(tmp_path / "w.ckpt")


def in_mmpretrains_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename DeiT III's weights as tools/model_converters/deit3_to_mmpretrain.py does."""
    replacements = [
        ("blocks.", "layers."),
        ("norm1", "ln1"),
        ("norm2", "ln2"),
        ("mlp.fc1", "ffn.layers.0.0"),
        ("mlp.fc2", "ffn.layers.1"),
        ("ls1.gamma", "attn.gamma1.weight"),
        ("ls2.gamma", "ffn.gamma2.weight"),
        ("patch_embed.proj.", "patch_embed.projection."),
    ]
    renamed = {}
    for name, value in weights.items():
        if name.startswith("head"):
            renamed[name.replace("head.", "head.layers.head.")] = value
            continue
        name = "ln1" + name[4:] if name.startswith("norm.") else name
        name = "ln2" + name[7:] if name.startswith("fc_norm.") else name
        for old, new in replacements:
            name = name.replace(old, new)
        renamed[f"backbone.{name}"] = value
    return renamed


@pytest.mark.parametrize(
    "parts", [{}, {"init_values": 1e-2}, {"global_pool": "avg"}], ids=["vit", "deit3", "mae"]
)
def test_mmpretrains_names_are_read(parts, tmp_path):
    model = timm_model(**parts)
    renamed = in_mmpretrains_names(model.state_dict())
    if "global_pool" in parts:  # MAE's configs have a LinearClsHead
        renamed = {n.replace("head.layers.head", "head.fc"): v for n, v in renamed.items()}
    meta = {"mmpretrain_version": "1.2.0"}
    torch.save({"meta": meta, "state_dict": renamed}, tmp_path / "epoch_300.pth")
    mine, _ = loaded_from(tmp_path / "epoch_300.pth", **parts)
    assert torch.equal(mine(IMAGES), model(IMAGES))
    assert read_weights(tmp_path / "epoch_300.pth").layout == "mmpretrain"


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("side", [28, 42])
def test_dinov2s_own_names_are_read_as_by_timm(registers, side, tmp_path):
    """facebookresearch/dinov2 stores a mask token, but no positions for registers."""
    arguments = {"embed_dim": 48, "depth": 2, "num_heads": 3, "init_values": 1e-2}
    if registers:
        arguments |= {"reg_tokens": registers, "no_embed_class": True}
    name = "vit_small_patch14_dinov2"
    weights = timm_model(img_size=28, patch_size=14, num_classes=0, **arguments).state_dict()
    weights["mask_token"] = torch.zeros(1, 48)
    if registers:
        weights["register_tokens"] = weights.pop("reg_token")
        weights["pos_embed"] = torch.cat([weights["cls_token"] / 2, weights["pos_embed"]], 1)
    torch.save(weights, tmp_path / "dinov2_vits14_pretrain.pth")
    images = torch.rand(2, 3, side, side)
    expected = timm.create_model(name, img_size=side, num_classes=0, **arguments).eval()
    expected.load_state_dict(checkpoint_filter_fn(dict(weights), expected))
    parts = {**arguments, "image_size": side, "num_classes": 0}
    for ours_ in ({"name": "vit_s14"}, {"name": f"timm/{name}"}):
        mine, notes = loaded_from(tmp_path / "dinov2_vits14_pretrain.pth", **parts, **ours_)
        torch.testing.assert_close(mine(images), expected(images), rtol=1e-5, atol=1e-5)
        assert "dropped, not used for classification: mask_token" in notes


def test_an_error_about_names_says_first_that_none_fits():
    """The whole network differs and not only its head, so the error must not suggest a new head."""
    weights = timm.create_model("resnet10t", num_classes=7).state_dict()
    message = (
        "the weights do not fit the model: they are probably the weights of a ResNet; no name fits:"
        " the source has conv1.0.weight, conv1.1.weight, conv1.1.bias, conv1.1.running_mean,"
        " conv1.1.running_var and 92 more, but the model cls_token, pos_embed,"
        " patch_embed.proj.weight, patch_embed.proj.bias, blocks.0.norm1.weight"
        " and 28 more: choose the model of these weights, or rename them"
    )
    with pytest.raises(WeightsError) as caught:
        load_weights(create_model(**SIZES["tiny"]), weights)
    assert re.sub(r" and \d+ more", " and more", str(caught.value)) == re.sub(
        r" and \d+ more", " and more", message
    )


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        (["model_state_dict"], []),  # PyTorch's tutorial
        (["net"], []),
        (["model", "ema"], ["ema is used, model in the same file is ignored"]),
        (["swa_model", "model"], ["swa_model is used, model in the same file is ignored"]),
        (["state_dict", "raw"], ["state_dict is used, raw in the same file is ignored"]),
        (["target_encoder", "encoder"], ["target_encoder is used, encoder in the same file"]),
    ],
)
def test_other_containers_are_opened(keys, note, tmp_path):
    model = timm_model()
    other = {name: value + 1 for name, value in model.state_dict().items()}
    used = "ema" if "ema" in keys else keys[0]
    rest = {"epoch": 3, "rng": {"cpu": torch.ones(9)}, "opt": {"state": {0: torch.ones(2, 2)}}}
    content = {key: model.state_dict() if key == used else other for key in keys}
    torch.save({**rest, **content}, tmp_path / "w.pth")
    mine, notes = loaded_from(tmp_path / "w.pth")
    assert torch.equal(mine(IMAGES), model(IMAGES))
    assert [text[: len(start)] for text, start in zip(notes, note, strict=True)] == note
    torch.save({"a": other, "b": other}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"also contains a \(OrderedDict\)|\(dict\), b \(dict\)"):
        read_weights(tmp_path / "w.pth")


def test_the_teacher_of_dinos_training_has_timms_features(tmp_path):
    """facebookresearch/dino:main_dino.py saves the student and the teacher with their projection
    heads."""
    model = timm_model(num_classes=0)
    heads = {
        "head.mlp.0.weight": torch.ones(9, 48),
        "head.last_layer.weight_g": torch.ones(9, 1),
        "head.last_layer.weight_v": torch.ones(9, 9),
    }
    teacher = {f"backbone.{name}": value for name, value in model.state_dict().items()}
    student = {f"module.{name}": value + 1 for name, value in teacher.items()}
    content = {"student": student, "teacher": {**teacher, **heads}, "epoch": 9}
    torch.save({**content, "dino_loss": {"center": torch.zeros(1, 9)}}, tmp_path / "c.pth")
    mine, notes = loaded_from(tmp_path / "c.pth", num_classes=0)
    assert torch.equal(mine(IMAGES), model(IMAGES))
    assert notes[0] == "teacher is used, student, dino_loss in the same file is ignored"
