"""Test that every field in other programs' configs is honored, rejected or reported, and never
silently ignored.

The results are compared with transformers' own image processors and pipelines.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from processes import TINY, run_here, write_config
from safetensors.torch import save_file
from transformers import (
    AutoImageProcessor,
    CLIPImageProcessor,
    DeiTImageProcessor,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    pipeline,
)

import vit
from vit.config.io import from_dict, to_dict
from vit.weights.fields import IMAGE_PROCESSOR, TIMM_CONFIG, VIT_CONFIG
from vit.weights.files import read_weights
from vit.weights.published import identify, normalization_notes

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
    "layer_norm_eps": 1e-6,
}
SQUARE = {"height": 32, "width": 32}


def folder(path: Path, **config: Any) -> ViTForImageClassification:
    torch.manual_seed(0)
    network = ViTForImageClassification(ViTConfig(**{**SIZES, **config})).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.2)
    network.save_pretrained(path)
    return network


def processor(path: Path, content: dict[str, Any]) -> None:
    (path / "preprocessor_config.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def vit_folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("vit")
    folder(path, num_labels=3)
    return path


def photo(width: int = 50, height: int = 36) -> bytes:
    """Return a smooth picture. Its margins have an even number of pixels, so that all programs crop
    the same pixels."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 4, y * 5, (x + y) * 2], axis=2).astype(np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


HONORED = {
    "plain": {"size": SQUARE},
    "no do_normalize": {"size": SQUARE, "do_normalize": False},
    "no do_rescale": {"size": SQUARE, "do_rescale": False},
    "neither": {"size": SQUARE, "do_rescale": False, "do_normalize": False},
    "rescale_factor": {"size": SQUARE, "rescale_factor": 1 / 127.5},
    "rescale_factor only": {"size": SQUARE, "rescale_factor": 1 / 127.5, "do_normalize": False},
    "an integer size": {"size": 32, "resample": 3},
    "DeiT, older": {
        "feature_extractor_type": "DeiTFeatureExtractor",
        "size": 40,
        "crop_size": 32,
        "do_center_crop": True,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    "a crop from a square": {
        "size": {"height": 40, "width": 40},
        "do_center_crop": True,
        "crop_size": SQUARE,
    },
    "CLIP, older": {"feature_extractor_type": "CLIPFeatureExtractor", "size": 36, "crop_size": 32},
    "CLIP": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 36},
        "crop_size": SQUARE,
        "do_convert_rgb": True,
    },
    "Siglip": {"image_processor_type": "SiglipImageProcessor", "size": SQUARE},
}


@pytest.mark.parametrize("content", HONORED.values(), ids=HONORED)
def test_inputs_equal_those_of_transformers_processors(content, vit_folder):
    processor(vit_folder, content)
    theirs = AutoImageProcessor.from_pretrained(vit_folder, backend="pil")(
        Image.open(io.BytesIO(photo())), return_tensors="pt"
    )["pixel_values"]
    trained = vit.load(vit_folder)
    ours = trained.preprocess(photo())
    assert ours.shape == theirs.shape
    level = theirs.new_tensor(trained.config.data.std).view(3, 1, 1).reciprocal() / 255
    assert ((ours - theirs).abs() <= 1.01 * level).all(), "pixels may differ by one level of 255"
    assert (ours - theirs).abs().mean() < 0.1 * level.mean()


REFUSED = {
    "do_resize": ({"do_resize": False}, "do_resize is False, expected True"),
    "do_resize and crop": (
        {"do_resize": False, "do_center_crop": True, "crop_size": SQUARE},
        "do_resize is False",
    ),
    "do_pad": ({"size": SQUARE, "do_pad": True}, "do_pad is True, expected False or None"),
    "unknown step": ({"size": SQUARE, "do_flip_channel_order": True}, "do_flip_channel_order is"),
    "another size": ({"size": {"height": 48, "width": 48}}, "no center crop do not give .* 32x32"),
    "default size": ({}, "size 224 and no center crop do not give images of 32x32"),
    "another crop": ({"size": 48, "do_center_crop": True, "crop_size": 40}, "crop of 40 do not"),
    "padding": ({"size": 24, "do_center_crop": True, "crop_size": 32}, "center crop of 32 do not"),
    "no crop": ({"size": {"shortest_edge": 32}}, "no center crop do not give"),
    "not square": (
        {"size": {"height": 40, "width": 60}, "do_center_crop": True, "crop_size": 32},
        "do not give",
    ),
    "longest_edge": ({"size": {"shortest_edge": 32, "longest_edge": 64}}, "only shortest_edge"),
    "only longest_edge": ({"size": {"longest_edge": 32}}, "expected height and width"),
    "ConvNext": (
        {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.9, "size": SQUARE},
        "crop_pct is 0.9, expected None",
    ),
    "unknown defaults": (
        {"image_processor_type": "MyImageProcessor", "size": SQUARE},
        "resample, .* missing, and the defaults of 'My' are unknown",
    ),
    "nearest": ({"size": SQUARE, "resample": 0}, "resample is 0, expected 2 or 3"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_preprocessing_that_this_project_lacks_is_refused(content, message, vit_folder):
    processor(vit_folder, content)
    with pytest.raises(ValueError, match=message) as caught:
        vit.load(vit_folder)
    assert "preprocessor_config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_fields_are_named(tmp_path):
    folder(tmp_path, num_labels=3, soft_cap=3.0)
    processor(tmp_path, {"size": SQUARE, "sharpness": 2, "do_sharpen": False})
    assert vit.load(tmp_path).notes == (
        "config.json: unknown fields are not used: soft_cap",
        "preprocessor_config.json: unknown fields are not used: sharpness",
    )


@pytest.mark.parametrize("saved", [ViTImageProcessor, CLIPImageProcessor, DeiTImageProcessor])
def test_the_tables_know_all_fields_that_the_programs_write(saved, tmp_path):
    saved(size=SQUARE if saved is ViTImageProcessor else None).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert written.keys() <= IMAGE_PROCESSOR.keys()
    assert ViTConfig(**SIZES).to_diff_dict().keys() <= VIT_CONFIG.keys()
    assert {*timm.models._pretrained.PretrainedCfg.__dataclass_fields__} - {
        "state_dict",  # never in a file
        "test_input_size",  # this and the next change predictions if a program uses them
        "test_crop_pct",
    } <= TIMM_CONFIG.keys()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu', expected 'gelu' or 'gelu_pyth"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        ({"quantization_config": {"bits": 8}}, "quantization_config is"),
    ],
)
def test_networks_that_compute_something_else_are_refused_by_all_readers(config, message, tmp_path):
    folder(tmp_path, num_labels=3)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | config))
    with pytest.raises(ValueError, match=message):
        read_weights(tmp_path)  # as `init.checkpoint` reads weights


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"problem_type": "multi_label_classification", "num_labels": 3}, "problem_type 'multi_"),
        ({"problem_type": "regression", "num_labels": 3}, "problem_type 'regression'"),
        ({"num_labels": 1}, "its head has one output, whose softmax is always 100 %"),
    ],
)
def test_models_without_a_softmax_are_refused(config, message, tmp_path):
    folder(tmp_path, **config)
    processor(tmp_path, {"size": SQUARE})
    with pytest.raises(ValueError, match=message):
        vit.load(tmp_path)


def test_probabilities_equal_those_of_transformers_pipeline(tmp_path):
    network = folder(tmp_path, num_labels=3, problem_type="single_label_classification")
    processor(tmp_path, {"size": SQUARE})
    theirs = pipeline(
        "image-classification",
        network,
        image_processor=AutoImageProcessor.from_pretrained(tmp_path, backend="pil"),
    )(Image.open(io.BytesIO(photo())))
    ours = vit.load(tmp_path).classify(photo())
    expected = {int(each["label"].removeprefix("LABEL_")): each["score"] for each in theirs}
    found = {int(name.removeprefix("class ")): value for name, value in ours}
    assert found == pytest.approx(expected, abs=0.01)


# --- timm -----------------------------------------------------------------------------------------


def test_timms_label_offset_is_refused_and_test_sizes_are_named(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    content = {
        "architecture": "vit_tiny_patch16_224",
        "model_args": {"img_size": 32},
        "pretrained_cfg": {"input_size": [3, 32, 32], "test_crop_pct": 0.9},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert vit.load(tmp_path).notes == ("config.json: unknown fields are not used: test_crop_pct",)
    content["pretrained_cfg"]["label_offset"] = 1
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"label_offset is 1, expected None or 0"):
        vit.load(tmp_path)


def test_the_command_line_in_timms_checkpoint_is_used(tmp_path):
    """timm's checkpoint stores the command line. With it, `vit.load` must evaluate as timm's
    validate.py does."""
    made_with = {"img_size": 32, "num_heads": 6, "init_values": 0.1}
    name = "vit_tiny_patch16_224"
    theirs = timm.create_model(name, num_classes=3, **made_with).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.1)
    args = {
        "model": name,
        "model_kwargs": made_with,
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
        "crop_pct": 0.8,
        "interpolation": "bilinear",
        "crop_mode": None,
    }
    path = tmp_path / "last.pth.tar"
    torch.save({"arch": name, "args": args, "state_dict": theirs.state_dict()}, path)
    trained = vit.load(path)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(trained(images), theirs(images))
    config = trained.config
    assert (config.data.mean, config.data.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (config.eval.crop_pct, config.data.interpolation) == (0.8, "bilinear")
    for options, message in (
        ({"interpolation": "lanczos"}, "resizes with 'lanczos', not with bilinear or bicubic"),
        ({"model_kwargs": {"act_layer": "relu"}}, "created with act_layer, which"),
    ):
        torch.save({"arch": name, "args": args | options, "state_dict": theirs.state_dict()}, path)
        with pytest.raises(ValueError, match=message):
            vit.load(path)


# --- init.checkpoint ------------------------------------------------------------------------------


def test_another_mean_than_that_of_the_weights_is_noted(tmp_path):
    data = {"root": "data", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
    config = from_dict({"model": {"name": "vit_ti16"}, "data": data, "train": {"steps": 1}}, "test")
    folder(tmp_path, num_labels=3, problem_type="multi_label_classification")
    processor(tmp_path, {"size": SQUARE})
    loaded = read_weights(tmp_path)
    assert normalization_notes(loaded, config.data) == [
        "the weights were trained with mean [0.5, 0.5, 0.5] and std [0.5, 0.5, 0.5], but this"
        " config has mean [0.485, 0.456, 0.406] and std [0.229, 0.224, 0.225]: set"
        ' "data.mean=[0.5, 0.5, 0.5]" "data.std=[0.5, 0.5, 0.5]"'
    ]
    for same in ([0.5], [0.5, 0.5, 0.5], [0.5, 0.501, 0.5]):
        half = from_dict(to_dict(config) | {"data": {"root": "x", "mean": same, "std": same}}, "t")
        assert normalization_notes(loaded, half.data) == []
    weights = {"blocks.0.norm1.weight": torch.ones(3)}
    torch.save(weights, tmp_path / "deit_base_patch16_224-b5f2ef4d.pth")
    torch.save(weights, tmp_path / "mine.pth")
    (tmp_path / "config.json").unlink()
    assert not normalization_notes(read_weights(tmp_path / "mine.pth"), config.data)
    published = read_weights(tmp_path / "deit_base_patch16_224-b5f2ef4d.pth")
    assert not normalization_notes(published, config.data)
    assert identify(published.path).mean == config.data.mean
    assert len(normalization_notes(published, half.data)) == 1


@pytest.mark.slow
def test_training_prints_the_note_for_the_weights_of_a_run(shards, tmp_path, capfd):
    config = write_config(tmp_path, shards, steps=1)
    base = ["launch/train.py", "--config", config, *TINY, "ema.decay=null"]
    run_here(*base, f"run.dir={tmp_path / 'a'}")
    half = ["data.mean=[0.5]", "data.std=[0.5]"]
    started = [f"init.checkpoint={tmp_path / 'a'}", f"run.dir={tmp_path / 'b'}"]
    run_here(*base, *started, *half)
    assert (
        "last.safetensors: the weights were trained with mean [0.485, 0.456, 0.406] and std [0.229,"
        " 0.224, 0.225], but this config has mean [0.5] and std [0.5]: set"
        ' "data.mean=[0.485, 0.456, 0.406]" "data.std=[0.229, 0.224, 0.225]"'
    ) in capfd.readouterr().err
