"""Test that files of published models are identified, and that their published accuracy is quoted
correctly."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from timm.models import save_for_hf
from transformers import CLIPImageProcessor, ViTConfig, ViTForImageClassification, ViTImageProcessor

from vit.config.io import from_dict
from vit.config.schema import ModelConfig
from vit.data.image_format import ImageFormat
from vit.inference.predictor import load
from vit.model import create_model
from vit.weights.files import find_weights, load_weights, read_weights
from vit.weights.programs import View
from vit.weights.published import describe_published, identify, to_config, with_published_config
from vit.weights.published_models import KNOWN, NO_NUMBER, TIMM, TORCHVISION

ROOT = Path(__file__).parents[2]


TIMM_ROWS = [row for row in KNOWN if row.source == TIMM]


# --- identification -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("vit_base_patch16_224.augreg_in1k.safetensors", "vit_base_patch16_224.augreg_in1k"),
        (
            "vit_base_patch16_224.augreg_in21k_ft_in1k.pth",
            "vit_base_patch16_224.augreg_in21k_ft_in1k",
        ),
        (
            "vit_large_patch16_224.augreg_in21k_ft_in1k-copy.bin",
            "vit_large_patch16_224.augreg_in21k_ft_in1k",
        ),
        ("deit_base_patch16_224-b5f2ef4d.pth", "deit_base_patch16_224.fb_in1k"),
        ("deit_base_patch16_224.pth", "deit_base_patch16_224.fb_in1k"),
        ("deit_base_patch16_224.pth.tar", "deit_base_patch16_224.fb_in1k"),
        ("vgg11.pth.tar", "vgg11.tv_in1k"),  # timm has a model with this exact name
        ("deit_3_huge_224_21k_v1.pth", "deit3_huge_patch14_224.fb_in22k_ft_in1k"),
        ("mae_finetuned_vit_huge.pth", "mae_finetuned_vit_huge"),
        # timm has this model, but it is missing from our table
        ("vit_base_patch16_224.sam_in1k.safetensors", "vit_base_patch16_224.sam_in1k"),
        ("deit_base_distilled_patch16_224-df68dfff.pth", "deit_base_distilled_patch16_224.fb_in1k"),
        (
            "models--timm--vit_base_patch32_224.augreg_in1k/snapshots/0a1b/model.safetensors",
            "vit_base_patch32_224.augreg_in1k",
        ),
    ],
)
def test_a_model_is_identified_by_its_file_name(file, name, tmp_path):
    assert identify(tmp_path / file).name == name


def test_a_model_is_identified_by_the_name_that_the_user_gives(tmp_path):
    row = identify(tmp_path / "mine.pth", "vit_base_patch16_384.augreg_in1k")
    assert (row.top1, row.model) == (81.102, {"name": "vit_b16"})
    assert identify(tmp_path / "mine.pth", "timm/vit_base_patch16_384.augreg_in1k") == row
    assert (
        identify(tmp_path / "vit_tiny_patch16_224.pth", "deit_small_patch16_224").name
        == "deit_small_patch16_224.fb_in1k"
    )
    guest = identify(tmp_path / "mine.pth", "timm/resnet50.a1_in1k")
    assert (guest.model, guest.crop_pct, guest.head, guest.top1) == (
        {"name": "timm/resnet50"},
        0.95,
        "fc",
        None,
    )
    plain = identify(tmp_path / "mine.pth", "vit_base_patch8_224.augreg_in21k_ft_in1k")
    assert (plain.model, plain.mean, plain.source) == (
        {"name": "vit_b8"},
        (0.5, 0.5, 0.5),
        NO_NUMBER,
    )


def test_a_name_without_a_tag_uses_the_default_settings_of_timm_with_a_note(tmp_path):
    """The names of models that users train with timm have no tag."""
    default = timm.get_pretrained_cfg("vit_tiny_patch16_224")
    published = identify(tmp_path / "mine.pth", "vit_tiny_patch16_224")
    assert (published.mean, published.std, published.crop_pct) == (
        default.mean,
        default.std,
        default.crop_pct,
    )
    assert (published.model, published.top1) == ({"name": "vit_ti16"}, None)
    assert (
        describe_published(published, 6, (224, 224), 3, 3)
        == f"vit_tiny_patch16_224.{default.tag}: no published accuracy known; vit_tiny_patch16_224"
        f" has no tag, so timm's default {default.tag} determines the settings"
    )
    guest = identify(tmp_path / "mine.pth", "timm/resnet18")
    tag = guest.name.removeprefix("resnet18.")
    note = f"; timm/resnet18 has no tag, so timm's default {tag} determines the settings"
    assert guest.source == NO_NUMBER + note


@pytest.mark.parametrize(
    "row", [row for row in TIMM_ROWS if row.name.startswith("deit_")], ids=lambda row: row.name
)
def test_names_accepted_without_a_tag_have_only_one_tag(row):
    architecture = row.name.partition(".")[0]
    tagged = [
        name
        for name in timm.list_pretrained(f"{architecture}.*")
        if timm.get_pretrained_cfg(name).num_classes == 1000
    ]
    assert tagged == [identify("x", architecture).name]


def test_a_model_is_identified_by_the_settings_beside_its_weights(tmp_path):
    save_for_hf(
        timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        tmp_path,
        safe_serialization=True,
    )
    assert find_weights(tmp_path) == tmp_path / "model.safetensors"
    expected = next(row for row in KNOWN if row.name.startswith("vit_tiny"))
    assert identify(tmp_path) == identify(tmp_path / "model.safetensors") == expected
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["pretrained_cfg"]["crop_pct"] = 0.95
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert (identify(tmp_path).crop_pct, identify(tmp_path).top1) == (0.95, None), (
        "the published accuracy must not be quoted for another view"
    )
    assert identify(tmp_path, "deit_tiny_patch16_224").name == "deit_tiny_patch16_224.fb_in1k", (
        "the user's name must take precedence over the file's"
    )


@pytest.mark.parametrize(
    ("file", "name", "expected"),
    [
        (
            "vit_base_patch16_224.pth",
            None,
            r"is ambiguous, .* vit_base_patch16_224.augreg_in1k \(79.2 %\), vit_base",
        ),
        (
            "checkpoint-99.pth",
            None,
            r"checkpoint-99.pth: neither its name nor a config.json next to it .* --model NAME",
        ),
        (
            "vit_bas_patch16_224.pth",
            None,
            r"identifies the model: pass its timm name with --model NAME\Z",
        ),
        (
            "deit3_base_patch16_224.pth",
            None,
            r"is ambiguous, .* deit3_base_patch16_224.fb_in1k \(83.8 %\)",
        ),
        (
            "x.pth",
            "vit_base_patch16_224.augreg_in2",
            "in neither .*did you mean vit_base_patch16_224.augreg_in1k",
        ),
        ("x.pth", "timm/vit_bsae_patch16_224", "did you mean .*vit_base_patch16_224"),
        (
            "x.pth",
            "vgg99",
            "vgg99 is in neither the table of vit/weights/published_models.py nor timm 1",
        ),
        ("model.npz", None, r"identifies the model: pass its timm name with --model NAME\Z"),
        ("x.pth", "vit_medium_patch16_gap_384.sw_in12k_ft_in1k", None),
    ],
)
def test_unknown_names_are_reported_in_one_line_with_the_nearest(file, name, expected, tmp_path):
    if expected is None:
        assert identify(tmp_path / file, name).crop_mode == "squash"
        return
    with pytest.raises(ValueError, match=expected) as caught:
        identify(tmp_path / file, name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            '{"architectures": ["BeitForImageClassification"], "model_type": "beit"}',
            "'beit' model of Hugging Face's transformers.*BeitForImageClassification.*timm's copy",
        ),
        (
            '{"architectures": ["ViTForImageClassification"], "model_type": "vit"}',
            "KeyError.'hidden_size'. is missing or wrong",
        ),
        ('{"architecture": ', "cannot be read"),
        (
            '{"architecture": "vit_tiny_patch16_224", "model_args": {"act_layer": "silu"}}',
            "created with act_layer, which this project does not support",
        ),
        (
            '{"architecture": "resnet50", "pretrained_cfg": {"interpolation": "lanczos"}}',
            "resizes with 'lanczos'",
        ),
        ('{"name": "something else"}', "neither its name nor a config.json"),
        ("[1]", "neither its name nor a config.json"),
    ],
)
def test_unsupported_settings_of_other_programs_are_reported(content, expected, tmp_path):
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=expected) as caught:
        identify(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_table_needs_no_timm(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert identify(tmp_path / "deit_3_base_224_1k.pth").top1 == 83.8
    assert identify("x", "vit_large_patch16_384.augreg_in21k_ft_in1k").model == {"name": "vit_l16"}
    with pytest.raises(
        ValueError, match=r"vit_tiny_patch16_224 is ambiguous, .* pass --model with a tag"
    ):
        identify("x", "vit_tiny_patch16_224")
    with pytest.raises(ValueError, match=r"nor timm, which is not installed \(pip install timm\)"):
        identify("x", "resnet50")
    with pytest.raises(ValueError, match="neither its name"):
        identify(tmp_path / "resnet50.pth")


# --- evaluating a published model -----------------------------------------------------------------


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row.name)
def test_the_config_agrees_with_the_row_of_the_table(row):
    values = to_config(row, "data/imagenet", "validation")
    config = from_dict(values, "test")
    assert (config.data.root, config.data.val_split, config.model.num_classes) == (
        "data/imagenet",
        "validation",
        1000,
    )
    assert (config.data.mean, config.data.std, config.data.interpolation) == (
        row.mean,
        row.std,
        row.interpolation,
    )
    assert (
        config.eval.crop_pct,
        ImageFormat.from_config(config.model, config.data).size,
        config.train.precision,
    ) == (row.crop_pct, row.image_size, "fp32")
    assert {"in_chans": 3, **row.model}.items() <= config.model.model_dump().items()


def test_weights_without_a_head_have_no_classes_and_need_data(tmp_path):
    path = tmp_path / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict(), path)
    loaded, published = with_published_config(read_weights(path), None, "data")
    assert (loaded.num_classes, published.top1) == (0, None)
    with pytest.raises(ValueError, match=r"is vit_tiny.*with --data ROOT"):
        with_published_config(read_weights(path), None, None)


def test_the_published_accuracy_is_for_a_thousand_classes(tmp_path):
    path = tmp_path / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=10).state_dict(), path)
    trained, published = with_published_config(read_weights(path), None, "data")
    assert (trained.num_classes, trained.config["model"]["num_classes"], published.top1) == (
        10,
        10,
        None,
    )
    without = f"{published.name}: no published accuracy known for 10 classes"
    assert describe_published(published, 50_000, (224, 224), 10, 10) == without
    mismatch = "; the data have 3 classes, but the model has 10: labels are compared by number"
    assert describe_published(published, 50_000, (224, 224), 3, 10) == without + mismatch, (
        "the mismatch must be reported without a published accuracy as well"
    )


def test_the_published_accuracy_is_described():
    row = next(row for row in KNOWN if row.name == "vit_base_patch16_224.augreg_in1k")
    line = "vit_base_patch16_224.augreg_in1k: top-1 79.15 % (39577), top-5 94.11 % (47054)"
    on = " (published, on the 50,000 of ILSVRC2012 val; here: {} images)"
    assert describe_published(row, 50_000, (224, 224), 1000, 1000) == line + on.format("50,000")
    assert (
        describe_published(row, 3925, (384, 224), 10, 1000)
        == line + on.format("3,925")
        + "; published at 224x224, here 384x224; the data have 10 classes, but the model has"
        " 1000: labels are compared by number"
    )


@pytest.mark.parametrize("row", [row for row in KNOWN if row.source == TORCHVISION])
def test_rows_of_torchvision_models_have_the_settings_of_torchvision(row):
    name = row.files[0].partition("-")[0]
    architecture = re.match(r"vit_[bhl]_\d\d", name)[0]
    kinds = torchvision.models.get_model_weights(architecture)
    weights = next(kind for kind in kinds if kind.url.endswith(f"/{row.files[0]}"))
    measured = weights.meta["_metrics"]["ImageNet-1K"]
    assert (row.top1, row.top5) == (measured["acc@1"], measured["acc@5"])
    view = weights.transforms()
    config = from_dict(to_config(row, "data"), "test")
    ours = View.from_config(config)
    assert ours.cover == (view.resize_size[0],) * 2
    assert ours.size == (view.crop_size[0],) * 2
    assert (ours.mean, ours.std) == (tuple(view.mean), tuple(view.std))
    assert ours.interpolation == view.interpolation.value
    assert identify(f"somewhere/{row.files[0]}") is row


def test_folders_of_transformers_are_identified(tmp_path):
    """Sizes, preprocessing and class names must be read from the files that transformers writes."""
    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        id2label={0: "apple", 1: "bee"},
    )
    ViTForImageClassification(config).save_pretrained(tmp_path)
    size = {"height": 32, "width": 32}
    ViTImageProcessor(size=size, image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)

    loaded, published = with_published_config(read_weights(tmp_path), None, "data")
    assert loaded.class_names == ["apple", "bee"]
    assert (published.mean, published.crop_mode, published.interpolation) == (
        (0.1, 0.2, 0.3),
        "squash",
        "bilinear",
    )

    [note] = load(tmp_path).notes
    norms = "its norms use epsilon 1e-12 (layer_norm_eps), this project's 1e-06"
    assert note == f"{norms}: the last digits of logits differ"

    made = from_dict(loaded.config, "test")
    model = create_model(made.model, num_classes=loaded.num_classes)
    assert load_weights(model, loaded.weights) == []

    size = {"shortest_edge": 40}
    CLIPImageProcessor(size=size, crop_size=32, resample=3).save_pretrained(tmp_path)
    published = identify(tmp_path)
    assert (published.crop_pct, published.crop_mode, published.interpolation) == (
        0.8,
        "center",
        "bicubic",
    )


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu_new", "quick_gelu"])
def test_the_activation_of_transformers_is_kept_or_refused(activation, tmp_path):
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 96}
    sizes |= {"num_hidden_layers": 2, "image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-6}
    network = ViTForImageClassification(ViTConfig(**sizes, hidden_act=activation)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.2)
    network.save_pretrained(tmp_path)
    if activation == "quick_gelu":
        with pytest.raises(ValueError, match="hidden_act is 'quick_gelu', expected 'gelu' or "):
            load(tmp_path)
        return
    inputs = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        theirs = network(inputs).logits
    torch.testing.assert_close(
        load(tmp_path)(inputs), theirs, rtol=0, atol=3e-6 * theirs.abs().max()
    )


def test_a_different_norm_epsilon_is_noted_and_a_large_one_is_rejected(tmp_path):
    """With transformers' initial weights, tokens are small. Epsilon therefore matters more than
    with trained weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 96}
    config = ViTConfig(**sizes, num_hidden_layers=2, image_size=32, patch_size=8)
    inputs = torch.randn(4, 3, 32, 32)
    for eps, share in ((1e-12, 1e-3), (1e-5, 1e-2)):
        config.layer_norm_eps = eps
        network = ViTForImageClassification(config).eval()
        network.save_pretrained(tmp_path)
        trained = load(tmp_path)
        assert f"epsilon {eps:g} (layer_norm_eps), this project's 1e-06" in trained.notes[0]
        with torch.inference_mode():
            theirs = network(inputs).logits
        assert (trained(inputs) - theirs).abs().max() < share * theirs.abs().max()
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"layer_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match=r"config.json: its norms use epsilon 0.001 \(layer_norm"):
        read_weights(tmp_path)


def test_invalid_settings_beside_the_weights_are_named(tmp_path):
    ViTForImageClassification(
        ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    ).save_pretrained(tmp_path)
    for content in ({"image_mean": 0.5}, {"size": {"shortest_edge": "x"}}):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"preprocessor_config.json: a setting has the wrong"):
            identify(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for size in ("32", [32], [32, 32, 3], 32.5, None):
        (tmp_path / "config.json").write_text(json.dumps(config | {"image_size": size}))
        with pytest.raises(ValueError, match=r"config.json: .*is missing or wrong"):
            identify(tmp_path)


@pytest.mark.parametrize(
    ("names", "family"),
    [
        (("visual.conv1.weight", "visual.proj", "logit_scale"), "CLIP"),
        (("embeddings.class_embedding", "pre_layrnorm.weight"), "CLIP"),
        (("encoder.layer.0.layer_scale1.lambda1",), "DINOv2"),
        (("layer1.0.conv1.weight", "fc.weight"), "a ResNet"),
    ],
)
def test_the_error_names_the_unsupported_family(names, family, tmp_path):
    """The error must name the family of the weights, even if the user has specified a timm
    model."""
    path = tmp_path / "weights.pth"
    torch.save({name: torch.ones(1) for name in names}, path)
    loaded = read_weights(path)
    for name in (None, "vit_base_patch16_224.augreg_in1k"):
        with pytest.raises(
            ValueError, match=f"weights.pth: these are probably the weights of {family}"
        ):
            with_published_config(loaded, name, "data")
    model = create_model(ModelConfig(name="vit_ti16", depth=1), num_classes=3)
    with pytest.raises(
        ValueError, match=f"do not fit the model: they are probably the weights of {family}"
    ):
        load_weights(model, loaded.weights)
