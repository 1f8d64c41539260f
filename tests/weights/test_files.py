"""Test weights files from other programs. Position embeddings are resampled as in timm, no code is
run, and loading is strict. Files are written completely or not at all."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data import ImageNetInfo
from timm.layers import resample_abs_pos_embed

from vit.config.io import from_dict
from vit.config.schema import InitConfig, ModelConfig
from vit.distributed.process_group import World
from vit.layers.posemb import resample_posemb
from vit.model import VisionTransformer, create_model
from vit.start.initial_weights import load_initial_weights
from vit.system.files import WeightsError
from vit.weights.class_names import class_mismatch
from vit.weights.files import LoadedWeights, load_weights, read_weights
from vit.weights.layouts import LAYOUTS, from_ours

TINY = {"image_size": 64, "embed_dim": 32, "depth": 1, "num_heads": 2}


def tiny(seed: int = 0, **fields) -> VisionTransformer:
    """Return a model without zero weights, so that tests notice if the head is not copied."""
    model = VisionTransformer(**{"num_classes": 10, **TINY, **fields})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1, generator=generator)
    return model


def equal(model: torch.nn.Module, weights: dict, names=None) -> bool:
    return all(torch.equal(model.state_dict()[name], weights[name]) for name in names or weights)


def test_equal_models_load_without_notes():
    source = tiny(0).state_dict()
    model = tiny(1)
    assert load_weights(model, source) == []
    assert equal(model, source)


def test_positions_are_resampled_and_all_other_weights_are_copied():
    source = tiny(0).state_dict()
    model = tiny(1, image_size=(96, 128))
    before = {name: tensor.clone() for name, tensor in source.items()}
    assert load_weights(model, source) == [
        "positions resampled from 4x4 to 6x8 (bicubic, antialiased)"
    ]
    assert torch.equal(model.pos_embed, resample_posemb(source["pos_embed"], (4, 4), (6, 8), 1))
    assert equal(model, source, source.keys() - {"pos_embed"})
    assert all(torch.equal(source[name], before[name]) for name in before)


def test_fixed_positions_are_resampled():
    source = tiny(0, pos_embed="sincos2d").state_dict()
    model = tiny(1, pos_embed="sincos2d", image_size=128)
    load_weights(model, source)
    assert torch.equal(model.pos_embed, resample_posemb(source["pos_embed"], (4, 4), (8, 8), 1))


def test_positions_of_grids_that_are_not_square_are_resampled():
    source = tiny(0, image_size=(32, 96)).state_dict()
    same = tiny(1, image_size=(32, 96))
    other = tiny(1)
    assert load_weights(same, source) == []
    assert equal(same, source)
    with pytest.raises(
        WeightsError, match=r"13 positions, which do not form a square grid .* to state the grid"
    ):
        load_weights(other, source)
    with pytest.raises(WeightsError, match="do not form a grid of 5x3"):
        load_weights(other, source, grid=(5, 3))
    assert load_weights(other, source, grid=(2, 6)) == [
        "positions resampled from 2x6 to 4x4 (bicubic, antialiased)"
    ]
    # Both grids have 16 positions and differ only in their shapes.
    flat = tiny(0, image_size=(32, 128)).state_dict()
    assert load_weights(other, flat, grid=(2, 8)) == [
        "positions resampled from 2x8 to 4x4 (bicubic, antialiased)"
    ]


def test_a_class_token_without_position_gets_zeros():
    guest = create_model(
        "timm/deit3_small_patch16_224", 64, 10, embed_dim=32, depth=1, num_heads=2
    ).eval()
    model = VisionTransformer(num_classes=10, init_values=1.0, **TINY).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in guest.parameters():
            parameter.normal_(0, 0.1)
    assert load_weights(model, guest.state_dict()) == [
        "the source has no positions for the class token: zeros are used"
    ]
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), guest(images))


@pytest.mark.parametrize(
    ("form", "registers"),
    [("ours", 0), ("ours", 2), ("npz", 0), ("huggingface", 0), ("another size", 2)],
)
def test_positions_of_prefix_tokens_are_folded_into_tokens_that_have_none(
    form, registers, tmp_path
):
    """A model adds positions to tokens, so the sum of a token and its position must stay
    bit-identical."""
    source = tiny(0, reg_tokens=registers)
    size = 96 if form == "another size" else 64
    model = VisionTransformer(
        num_classes=10, reg_tokens=registers, no_embed_class=True, **{**TINY, "image_size": size}
    )
    with_position = tiny(1, reg_tokens=registers, image_size=size)
    weights = source.state_dict()
    if form in LAYOUTS:
        written, _ = from_ours(LAYOUTS[form], weights, num_heads=2)
        if form == "npz":
            np.savez(tmp_path / "w.npz", **{n: value.numpy() for n, value in written.items()})
            weights = read_weights(tmp_path / "w.npz").weights
        else:
            save_file(written, tmp_path / "w.safetensors")
            weights = read_weights(tmp_path / "w.safetensors").weights
    load_weights(with_position, weights)
    notes = load_weights(model, weights)
    tokens = "class token" if not registers else f"{1 + registers} prefix tokens"
    assert notes[0] == (
        f"the model has no positions for the {tokens}: added the source's to the tokens"
    )
    assert len(notes) == (2 if form == "another size" else 1)
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        assert torch.equal(model(images), with_position(images))
    assert not torch.equal(model.cls_token, source.cls_token)


def test_half_precision_sources_become_float32():
    source = {name: tensor.half() for name, tensor in tiny(0).state_dict().items()}
    model = tiny(1)
    load_weights(model, source)
    assert all(
        tensor.dtype == torch.float32 and torch.equal(tensor, source[name].float())
        for name, tensor in model.state_dict().items()
    )


@pytest.mark.parametrize("representation_size", [None, 16])
def test_reset_head_keeps_the_models_zero_head(representation_size):
    source = tiny(0, representation_size=representation_size).state_dict()
    model = VisionTransformer(num_classes=3, **TINY)
    with pytest.raises(WeightsError, match=r"init.reset_head=true"):
        load_weights(model, source)
    notes = load_weights(model, source, reset_head=True)
    assert len(notes) == 1
    assert notes[0].startswith("the head is new: dropped ")
    assert not model.head.weight.any()
    assert not model.head.bias.any()
    assert equal(
        model, source, [name for name in source if not name.startswith(("head.", "pre_logits."))]
    )


def test_reset_head_takes_sources_without_a_head():
    source = {
        name: tensor
        for name, tensor in tiny(0).state_dict().items()
        if not name.startswith("head.")
    }
    with pytest.raises(
        WeightsError,
        match=r"init.reset_head=true.*2 missing from the source: head.weight, head.bias",
    ):
        load_weights(tiny(1), source)
    assert load_weights(tiny(1), source, reset_head=True) == [
        "the head is new: the source has none"
    ]


def test_other_classes_are_named_in_the_error():
    with pytest.raises(
        WeightsError,
        match=r"the source has 10 classes, but the model has 3: for a new head set init.reset",
    ):
        load_weights(tiny(1, num_classes=3), tiny(0).state_dict())


@pytest.mark.parametrize("reset_head", [False, True])
def test_loading_is_strict_and_all_or_nothing(reset_head):
    source = tiny(0).state_dict()
    model = tiny(1)
    del source["blocks.0.norm1.bias"]
    source |= {f"extra.{i}": torch.ones(1) for i in range(6)} | {"norm.weight": torch.ones(3)}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(WeightsError) as caught:
        load_weights(model, source, reset_head=reset_head)
    message = str(caught.value)
    assert "\n" not in message
    assert "1 missing from the source: blocks.0.norm1.bias" in message
    assert (
        "6 unknown to the model: extra.0, extra.1, extra.2, extra.3, extra.4 and 1 more" in message
    )
    assert "1 of a different shape: norm.weight (3,), expected (32,)" in message
    assert equal(model, before)


def test_timm_models_are_resampled_and_reset():
    source = create_model("timm/vit_tiny_patch16_224", 64, 10, depth=1).state_dict()
    guest = create_model("timm/vit_tiny_patch16_224", (64, 96), 3, depth=1)
    assert load_weights(guest, source, reset_head=True) == [
        "the head is new: dropped head.weight, head.bias",
        "positions resampled from 4x4 to 4x6 (bicubic, antialiased)",
    ]
    assert torch.equal(guest.pos_embed, resample_abs_pos_embed(source["pos_embed"], [4, 6]))
    convolutional = create_model("timm/resnet10t", 64, 3)
    notes = load_weights(
        convolutional, create_model("timm/resnet10t", 64, 10).state_dict(), reset_head=True
    )
    assert notes == ["the head is new: dropped fc.weight, fc.bias"]


# ---- data with classes that differ from the head's ----
MODEL = ["cat", "dog", "cow", "hen", "pig"]


def trained_on(names: list[str] | None, num_classes: int | None = None) -> LoadedWeights:
    return LoadedWeights(
        Path("run"), {}, num_classes=num_classes or len(names or []), class_names=names
    )


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        (MODEL, MODEL, ""),
        (MODEL, MODEL[:3], "the data have the first 3 of the model's 5 classes"),
        (
            MODEL,
            ["red", "blue"],
            (
                "the classes of data and model differ: label 0 is 'red' in the data, 'cat' in the"
                " model, label 1 is 'blue' in the data, 'dog' in the model (0 of 2 names agree; 2"
                " classes in the data, 5 in the model): the accuracy is meaningless, unless only"
                " the names differ"
            ),
        ),
        (
            MODEL[:2],
            ["n1", "n2"],
            (
                "the classes of data and model differ: label 0 is 'n1' in the data, 'cat' in the"
                " model, label 1 is 'n2' in the data, 'dog' in the model (0 of 2 names agree): the"
                " accuracy is meaningless, unless only the names differ"
            ),
        ),
        (
            MODEL,
            [*MODEL[:4], "sow"],
            (
                "the classes of data and model differ: label 4 is 'sow' in the data, 'pig' in the"
                " model (4 of 5 names agree): the accuracy treats these labels as the model's"
            ),
        ),
        (
            MODEL,
            sorted(MODEL),
            (
                "the classes of data and model differ: label 1 is 'cow' in the data, 'dog' in the"
                " model, label 2 is 'dog' in the data, 'cow' in the model (3 of 5 names agree): the"
                " accuracy is meaningless: match the classes by name with --select-classes or"
                " init.select_classes=true"
            ),
        ),
    ],
)
def test_classes_are_compared_by_name(model, data, expected):
    assert class_mismatch(trained_on(model), data, len(data)) == expected


def test_classes_without_names_are_counted():
    counted = (
        "2 classes in the data, 5 in the model, and no class names to compare: labels are"
        " compared by number"
    )
    assert class_mismatch(trained_on(MODEL), [], 2) == counted
    assert class_mismatch(trained_on([], 5), ["a", "b"], 2) == counted
    assert class_mismatch(trained_on([], 5), [], 5) == ""
    unnamed = "the model has class names, but the data do not: labels are compared by number"
    # Even if the data and the head have the same number of classes, the classes may differ.
    assert class_mismatch(trained_on(MODEL), [], 5) == unnamed
    assert class_mismatch(trained_on(MODEL[:3], 7), MODEL[:3], 3) == "", (
        "a head with unused classes gets no note on its own data"
    )
    assert class_mismatch(trained_on(None, 7), ["a", "b"], 2) == "", (
        "weights of another program have no class names to compare"
    )


def test_classes_of_imagenet_at_other_labels_are_noted():
    """ImageNet-A and ImageNet-R have 200 of ImageNet's 1,000 classes."""
    info = ImageNetInfo("imagenet-1k")
    wnids = [info.index_to_label_name(label) for label in range(1000)]
    published = trained_on(None, 1000)
    assert class_mismatch(published, wnids[6:400:7], 57) == (
        "the model has the data's 57 classes, but at other labels (label 0 is 'n01498041' in the"
        " data, 'n01440764' in the model), so the accuracy is meaningless: match the classes by"
        " name with --select-classes or init.select_classes=true"
    )
    for names in (wnids, wnids[:40], []):
        assert class_mismatch(published, names, len(names)) == ""
    assert class_mismatch(published, [*wnids[6:400:7], "dog"], 58).startswith(
        "label 0 is 'n01498041' in the data, but probably 'n01440764' or"
    )


@pytest.mark.parametrize("name", ["timm/cait_xxs24_224", "timm/beit_base_patch16_224"])
def test_models_with_layers_named_as_in_deit3s_files_keep_their_names(name):
    with torch.device("meta"):
        weights = create_model(name, 224, 10).state_dict()
    assert any(".gamma_1" in key for key in weights)
    with torch.device("meta"):
        load_weights(create_model(name, 224, 10), weights)


def test_the_note_names_settings_that_change_a_timm_model(tmp_path):
    torch.save(timm.create_model("vit_tiny_patch16_224", depth=1).state_dict(), tmp_path / "w.pth")
    named = ModelConfig(name="timm/vit_tiny_patch16_224", embed_dim=96, num_heads=2, depth=1)
    init = InitConfig(checkpoint=str(tmp_path / "w.pth"))
    world = World(0, 1, torch.device("cpu"))
    settings = from_dict(
        {"data": {"root": "data"}, "train": {"steps": 1}, "model": {"name": "vit_ti16"}}, "test"
    ).model_copy(update={"model": named, "init": init})
    data = SimpleNamespace(class_names=[], num_classes=1000)
    with pytest.raises(WeightsError, match="of a different shape") as caught:
        load_initial_weights(create_model(named), settings, data, world)
    assert str(caught.value).endswith(
        "; the config's model.embed_dim, model.depth, model.num_heads override the settings of"
        " timm/vit_tiny_patch16_224: to use that model unchanged, set model.embed_dim=null"
        " model.depth=null model.num_heads=null"
    )
