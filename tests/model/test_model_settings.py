"""Test that invalid model settings are rejected with an error that suggests valid values."""

import pytest
import torch

from vit.layers.rope import RotaryEmbedding
from vit.model import VisionTransformer, create_model

SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 10, "patch_size": 8}
TINY = {"embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 10}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"image_size": 225},
            "image height 225 .* nearest that work are 224 and 240; image width 225",
        ),
        ({"image_size": (10, 224)}, "image height 10 .* nearest that work are 16"),
        ({"image_size": (224, 224, 3)}, r"image_size is \(224, 224, 3\): expected"),
        (
            {"num_heads": 7},
            "embed_dim 768 is not a multiple of num_heads 7: the nearest number of heads is",
        ),
        ({"class_token": False}, "needs class_token=True: set it, or use 'avg'"),
        (
            {"global_pool": "mean", "pos_embed": "rope"},
            "global_pool is 'mean'.*pos_embed is 'rope'",
        ),
        ({"pos_embed": "sincos2d", "embed_dim": 6, "num_heads": 2}, "not 6"),
        ({"drop_path_rate": 1.0}, "drop_path_rate is 1.0: expected"),
    ],
)
def test_rejects_impossible_settings_and_suggests_working_ones(fields, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        create_model("vit_b16", **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "mixed"}, "rope_type is 'mixed': expected None or 'axial' or 'dinov3'"),
        ({"rope_type": "axial", "head_dim": 6}, "head_dim must be a multiple of 4, not 6"),
        ({"rope_temperature": 10.0}, "rope_temperature has no effect without rope_type"),
        (
            {"rope_type": "axial", "rope_reg_temperature": 100.0, "reg_tokens": 3},
            "set rope_type 'axial' and reg_tokens 4, 9, 16 and so on, not 'axial' and 3",
        ),
        (
            {"rope_type": "axial", "rope_reg_temperature": 100.0, "reg_tokens": 1},
            "set rope_type 'axial' and reg_tokens 4, 9, 16 and so on, not 'axial' and 1",
        ),
        (
            {"rope_type": "axial", "head_dim": 4, "rope_temperature": 100.0},
            "rope_temperature has no effect with heads of 4 channels",
        ),
        (
            {"no_embed_class": True, "pos_embed": "none"},
            "no_embed_class has no effect without positions",
        ),
        (
            {"no_embed_class": True, "global_pool": "avg", "class_token": False},
            "no_embed_class has no effect without class token and registers",
        ),
        (
            {"image_size": 8, "rope_type": "dinov3", "patch_drop_rate": 0.5},
            "rope_type 'dinov3' has no effect on an im.*patch_drop_rate 0.5 has no effect on an im",
        ),
        ({"rope_type": "dinov3", "ref_feat_shape": 14}, "ref_feat_shape has no effect with"),
        ({"mlp_layer": "swiglu_packed", "mlp_ratio": 1.1}, "must give an even width, not 35"),
        ({"patch_drop_rate": 1.0}, "patch_drop_rate is 1.0: expected 0 <= rate < 1"),
        ({"num_heads": 5}, "nearest number of heads is 4, or set head_dim"),
        ({"num_heads": 5, "head_dim": 8, "global_pool": "map"}, "nearest number of heads is 4$"),
        ({"norm_layer": "batchnorm", "mlp_layer": "moe"}, "norm_layer is 'batch.*mlp_layer is 'm"),
    ],
)
def test_rejects_impossible_parts_and_suggests_working_ones(fields, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**{"image_size": (32, 48), **SMALL, **fields})


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({}, {"reg_tokens": 1, "rope_reg_temperature": 100.0}),
        ({"head_dim": 4}, {"rope_temperature": 100.0}),
    ],
)
def test_rejected_rotations_would_have_no_effect(fields, more):
    """If these settings were accepted, all rotation angles would be 0, or the setting would have no
    effect."""
    values = {"rope_temperature": None, "rope_reg_temperature": None, "reg_tokens": 0, **more}
    rope = RotaryEmbedding(
        *(values["rope_temperature"], values["rope_reg_temperature"], None, "axial", (3, 4)),
        *(fields.get("head_dim", 8), 1, values["reg_tokens"]),
    )
    plain = RotaryEmbedding(
        *(None, None, None, "axial", (3, 4), fields.get("head_dim", 8), 1, values["reg_tokens"])
    )
    assert torch.equal(rope.table, plain.table)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_b_16", "did you mean vit_b16"),
        ("ViT-B16", "did you mean .*vit_b16"),
        ("vit_b0", "expected vit_"),
        ("timm/vit_base_patch16_223", "did you mean vit_base_patch16_224"),
        ("timm/vit_tiny_patch16_224.nobody", "cannot create 'vit_tiny_patch16_224.nobody'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        create_model(name)


def test_reports_settings_that_a_timm_model_lacks_with_the_remedy():
    """The config contains ViT settings, but its model.name is not a ViT. One error must list all
    unsupported settings."""
    fields = {"embed_dim": 128, "depth": 4, "num_heads": 4, "drop_path_rate": 0.1}
    with pytest.raises(ValueError, match="resnet18") as caught:
        create_model("timm/resnet18", 32, 10, **fields)
    assert (
        str(caught.value)
        == "timm's resnet18 has no depth, embed_dim, num_heads: set model.depth=null"
        " model.embed_dim=null model.num_heads=null, or remove these settings from the config"
    )
    create_model("timm/resnet18", 32, 10, drop_path_rate=0.1)


def test_reports_all_arguments_that_a_timm_model_rejects_together():
    with pytest.raises(ValueError, match="poolformer_s12 has no depth, num_heads: set "):
        create_model("timm/poolformer_s12", 32, 10, depth=2, num_heads=2)
    assert create_model("timm/poolformer_s12", 32, 10).image_size == (32, 32)


def test_reports_missing_features_of_a_timm_model_before_their_consequences():
    with pytest.raises(ValueError, match="xcit_nano_12_p16_224 has no init_values: set "):
        create_model("timm/xcit_nano_12_p16_224", 60, 10, init_values=0.1)


def test_wrong_images_are_refused():
    model = VisionTransformer(image_size=32, **TINY)
    with pytest.raises(
        ValueError, match=r"images are \(2, 3, 32, 48\), expected \(batch, 3, 32, 32\)"
    ):
        model(torch.zeros(2, 3, 32, 48))
    with pytest.raises(ValueError, match=r"expected \(batch, 3, 32, 32\)"):
        model(torch.zeros(2, 1, 32, 32))


def test_fields_take_precedence_over_the_name():
    with torch.device("meta"):
        model = create_model("vit_s16", 64, 7, depth=3, patch_size=(8, 16), in_chans=1)
    assert (
        model.embed_dim,
        model.depth,
        model.patch_size,
        model.grid_size,
        model.in_chans,
        model.num_classes,
    ) == (384, 3, (8, 16), (8, 4), 1, 7)
    assert model.num_prefix_tokens == 1


def test_timm_models_accept_the_arguments_of_the_project():
    guest = create_model("timm/vit_tiny_patch16_224", (32, 64), 5, in_chans=1, depth=1)
    assert guest(torch.zeros(1, 1, 32, 64)).shape == (1, 5)
    assert guest.image_size == (32, 64)
    convolutional = create_model("timm/resnet10t", 64, 5)
    assert convolutional(torch.zeros(2, 3, 64, 64)).shape == (2, 5)
    with pytest.raises(ValueError, match="representation_size"):
        create_model("timm/vit_tiny_patch16_224", 32, 5, representation_size=8)
