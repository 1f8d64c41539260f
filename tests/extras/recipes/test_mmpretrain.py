"""Test that MMPretrain's ViT with two tokens is imported, and that unsupported variants are
reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from vit.extras.recipes.importing import import_recipe

CONFIGS = Path(__file__).parent / "configs" / "mmpretrain"


@pytest.fixture
def import_child(tmp_path):
    """Import a config that inherits from a stored config and overrides fields of its `backbone`."""

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
    """The config is configs/deit/deit-base-distilled_16xb64_in1k.py without its type and drop
    path."""
    imported = import_child("deit/deit-base_16xb64_in1k.py", "type='DistilledVisionTransformer'")
    assert imported.config().model.dist_token is True
    assert imported.config().model.name == "vit_b16"
    assert finding(imported, "model.backbone.arch").verdict == "same"


def test_a_norm_before_the_blocks_is_reported_as_unsupported(import_child):
    base = "vision_transformer/vit-base-p16_32xb128-mae_in1k.py"
    for value, verdict in (("True", "cannot"), ("False", "same")):
        imported = import_child(base, f"pre_norm={value}")
        assert finding(imported, "model.backbone.pre_norm").verdict == verdict
