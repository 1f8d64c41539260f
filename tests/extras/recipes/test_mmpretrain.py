"""Test that variants of MMPretrain's ViT are imported: a distillation token, a norm before the
blocks, and the mean of the patches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vit.extras.recipes.importing import import_recipe
from vit.model import create_model

CONFIGS = Path(__file__).parent / "configs" / "mmpretrain"


@pytest.fixture
def import_child(tmp_path):
    """Import a config that changes the `backbone` of a stored config."""

    def importing(base: str, backbone: str):
        child = tmp_path / "child_16xb64.py"
        child.write_text(
            f"_base_ = {str(CONFIGS / base)!r}\nmodel = dict(backbone=dict({backbone}))\n"
        )
        return import_recipe(str(child))

    return importing


def finding(imported, name):
    (match,) = (f for f in imported.reading.findings if name in f.theirs)
    return match


def test_the_distilled_vit_has_the_second_token(import_child):
    """The tested config is configs/deit/deit-base-distilled_16xb64_in1k.py without its type and
    drop path."""
    imported = import_child("deit/deit-base_16xb64_in1k.py", "type='DistilledVisionTransformer'")
    assert imported.config().model.dist_token is True
    assert imported.config().model.name == "vit_b16"
    assert finding(imported, "model.backbone.arch").verdict == "same"


def test_a_norm_before_the_blocks_becomes_timms_clip_model(import_child):
    """The tested config follows configs/clip/vit-base-p16_pt-64xb64_in1k.py, whose patch embedding
    also has no bias."""
    base = "vision_transformer/vit-base-p16_32xb128-mae_in1k.py"
    imported = import_child(base, "pre_norm=True")
    with torch.device("meta"):
        model = create_model(imported.config().model, num_classes=10)
    names = {name for name, _ in model.named_parameters()}
    assert "norm_pre.weight" in names
    assert "patch_embed.proj.bias" not in names
    assert "epsilon" in finding(imported, "model.backbone.pre_norm").text
    plain = import_child(base, "pre_norm=False")
    assert plain.config().model.name == "vit_b16"
    with pytest.raises(ValueError, match="pre_norm"):
        import_child(base, "pre_norm=True, patch_size=8")


@pytest.mark.parametrize(
    ("backbone", "text"),
    [
        ("out_type='avg_featmap', final_norm=False", ""),
        ("out_type='avg_featmap'", "norms before and after the mean of the patches"),
        ("final_norm=False", "no norm after the last block: added"),
    ],
)
def test_the_norms_of_a_mean_are_those_of_mmpretrain(import_child, backbone, text):
    """`avg_featmap` normalizes the mean, and `final_norm`, the default, also each token before it
    (mmpretrain/models/backbones/vision_transformer.py)."""
    base = "vision_transformer/vit-base-p16_32xb128-mae_in1k.py"
    imported = import_child(base, backbone)
    pools = "avg_featmap" in backbone
    assert imported.config().model.global_pool == ("avg" if pools else None)
    found = finding(
        imported, "model.backbone.final_norm" if "final" in backbone else "model.backbone.out_type"
    )
    assert (found.verdict, text in found.text) == ("cannot" if text else "same", True)
