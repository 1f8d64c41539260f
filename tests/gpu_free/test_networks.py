"""Test the forward pass on a fake GPU with each model option."""

from __future__ import annotations

import pytest
import torch
from gpu_free.fake_gpu import GPU, gpu_without_memory, move_to_fake_gpu

from vit.config.schema import ModelConfig
from vit.layers.precision import autocast
from vit.model import create_model
from vit.training.loss import cross_entropy

TINY = {"name": "vit_ti8", "image_size": 16, "num_classes": 5}
SMALL = {**TINY, "embed_dim": 32, "depth": 2, "num_heads": 2}
SUBSET = {"drop_path_form": "subset", "drop_path_schedule": "constant"}
ROPE = {"no_embed_class": True, "rope_type": "axial"}
ROPE |= {"rope_temperature": 1000.0, "rope_reg_temperature": 100.0}
OPTIONS = {
    "preset": TINY,
    "small": SMALL,
    "drop path": {**SMALL, "drop_path_rate": 0.4},
    "drop path by subsets": {**SMALL, "drop_path_rate": 0.4, **SUBSET},
    "dropout": {**SMALL, "pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1},
    "average of patches": {**SMALL, "class_token": False, "global_pool": "avg"},
    "average after the norm": {**SMALL, "global_pool": "norm_avg", "mlp_layer": "mlp_tanh"},
    "second head": {**SMALL, "dist_token": True},
    "fixed positions": {**SMALL, "pos_embed": "sincos2d", "qkv_bias": False},
    "layer scale": {**SMALL, "init_values": 1e-5, "drop_path_rate": 0.2},
    "pre-training head": {**SMALL, "representation_size": 16, "mlp_ratio": 2.0},
    "ViT-5": {**SMALL, "qk_norm": True, "norm_layer": "rmsnorm", "reg_tokens": 4, **ROPE},
    "turned, patches dropped": {**SMALL, "rope_type": "dinov3", "patch_drop_rate": 0.5},
    "spread over a grid": {**SMALL, "rope_type": "axial", "ref_feat_shape": 4, "head_dim": 8},
    "query as head": {**SMALL, "global_pool": "map", "mlp_layer": "swiglu", "mlp_drop_rate": 0.1},
    "norms of patches": {**SMALL, "dual_patch_norm": True, "init_head_bias": -6.9},
    "drawn as JAX does": {**SMALL, "weight_init": "jax"},
    "gray, not square": {**SMALL, "in_chans": 1, "image_size": (16, 24), "patch_size": (8, 4)},
}


def test_every_option_is_tried():
    defaults = ModelConfig()
    configs = [ModelConfig(**fields) for fields in OPTIONS.values()]
    untried = [
        name
        for name in ModelConfig.model_fields
        if all(getattr(config, name) == getattr(defaults, name) for config in configs)
    ]
    assert not untried, "add values other than the default for these options to OPTIONS"


def forward(model: torch.nn.Module, config: ModelConfig, precision: str) -> list[torch.Tensor]:
    images = torch.empty(4, config.in_chans, *config.height_width(), device=GPU)
    targets = torch.empty(4, 5, device=GPU)
    with autocast(precision, GPU):
        losses = cross_entropy(model.train()(images), targets, 0.1)
    with torch.no_grad(), autocast(precision, GPU):
        return [losses, model.eval()(images)]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_waits_for_the_gpu(name, precision):
    config = ModelConfig(**OPTIONS[name])
    model = create_model(config)
    with gpu_without_memory() as mode:
        move_to_fake_gpu(model)
        losses, logits = forward(model, config, precision)
    assert (losses.shape, losses.dtype, losses.device) == ((4,), torch.float32, GPU)
    assert (logits.shape, logits.dtype, logits.device) == ((4, 5), torch.float32, GPU)
    assert mode.waits == []


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_no_convolutional_network_of_timm_waits_for_the_gpu():
    config = ModelConfig(name="timm/resnet18", image_size=32, num_classes=5)
    model = create_model(config)
    with gpu_without_memory() as mode:
        move_to_fake_gpu(model)
        losses, logits = forward(model, config, "bf16")
    assert losses.device == logits.device == GPU
    assert mode.waits == []
