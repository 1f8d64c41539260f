"""Test that the fields of `ModelConfig` match the arguments of the model's constructor."""

import inspect
from typing import get_args

from vit.config.hints import sections, union_tags
from vit.config.schema import ModelConfig
from vit.model import VisionTransformer, create_model

SMALL = {"embed_dim": 32, "depth": 1, "num_heads": 2, "patch_size": 8}


def test_the_settings_are_exactly_the_arguments_of_the_model():
    arguments = set(inspect.signature(VisionTransformer).parameters)
    assert arguments == set(ModelConfig.model_fields) - {"name"}


def test_a_section_gives_image_size_classes_and_fields():
    model = create_model(ModelConfig(image_size=16, num_classes=7, **SMALL))
    assert isinstance(model, VisionTransformer)
    assert (model.image_size, model.num_classes, model.embed_dim) == ((16, 16), 7, 32)
    assert create_model(ModelConfig(image_size=16, **SMALL), num_classes=5).num_classes == 5
    assert create_model(ModelConfig(image_size=16, **SMALL)).num_classes == 1000


def test_an_argument_takes_precedence_over_the_section():
    section = ModelConfig(image_size=16, num_classes=7, **SMALL)
    model = create_model(section, image_size=32, num_classes=5, depth=1)
    assert (model.image_size, model.num_classes, model.depth) == ((32, 32), 5, 1)


def test_the_tags_of_a_union_are_the_names_of_its_members():
    names = [get_args(cls.model_fields["name"].annotation) for cls in sections()["optim"]]
    assert union_tags("optim") == [name for each in names for name in each]
    assert union_tags("model") == []
    assert union_tags("no_section") == []
