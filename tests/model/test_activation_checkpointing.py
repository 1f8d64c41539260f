"""Test that activation checkpointing produces bit-identical weights.

tests/extras/planner/test_memory.py tests how much memory is saved, and tests/test_compile.py tests
the compiled graphs.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from plain_step import plain_step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vit.config.schema import AdamWConfig, AugmentConfig
from vit.data.augment.apply import Augment
from vit.data.augment.table import table_layout
from vit.data.batches import Batch
from vit.distributed.process_group import World
from vit.model import create_model
from vit.optim.optimizer import create_optimizer
from vit.start.compiling import checkpoint_activations, compile_blocks

CPU = torch.device("cpu")
DROPS = {"pos_drop_rate": 0.1, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2, "drop_path_rate": 0.4}


def make_model(recomputed: str | int, **fields) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 4, "num_heads": 2}
    model = create_model("vit_ti8", 16, 5, **sizes, **DROPS, **fields)
    nn.init.normal_(model.head.weight, std=0.1)
    checkpoint_activations(model, recomputed)
    return model.train()


def make_batch(seed: int, rows: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randint(0, 256, (rows, 3, 16, 16), dtype=torch.uint8, generator=generator),
        torch.randint(0, 5, (rows,), generator=generator),
        torch.ones(rows),
        torch.zeros(rows, table_layout(AugmentConfig()).width),
        torch.arange(rows),
    )


def weights_after(model: nn.Module, precision: str = "fp32", in_ddp: bool = False) -> list[Tensor]:
    step = plain_step(
        model,
        DistributedDataParallel(model, gradient_as_bucket_view=True) if in_ddp else model,
        create_optimizer(model, AdamWConfig(eps=1e-5)),
        Augment(AugmentConfig(), 5, (0.5,), (0.25,), CPU),
        World(0, 1, CPU),
        lr_at=lambda step: 1e-3,
        micro_batch_size=4,
        precision=precision,
        clip_grad_norm=1.0,
    )
    for number in range(2):
        step(make_batch(number), number)
    return [parameter.detach().clone() for parameter in model.parameters()]


def count_forward_passes(model: nn.Module) -> list[int]:
    counts = [0] * len(model.blocks)

    def count(number: int) -> None:
        counts[number] += 1

    for number, block in enumerate(model.blocks):
        block.norm1.register_forward_pre_hook(lambda *_, number=number: count(number))
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    return counts


@pytest.mark.parametrize(
    ("recomputed", "passes"),
    [("none", [1, 1, 1, 1]), ("block", [2, 2, 2, 2]), (2, [2, 1, 2, 1]), (3, [2, 1, 1, 2])],
)
def test_recomputes_one_in_n_blocks(recomputed, passes):
    model = make_model(recomputed)
    assert count_forward_passes(model) == passes
    with torch.no_grad():
        model(torch.randn(2, 3, 16, 16))
        model.eval()(torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("form", ["mask", "subset"])
@pytest.mark.parametrize("recomputed", ["block", 2])
def test_updates_are_equal_to_the_bit_with_dropout_and_drop_path(recomputed, form, precision):
    # With patch dropout, each image has different rotary positions.
    fields = {"rope_type": "dinov3", "patch_drop_rate": 0.3, "reg_tokens": 2, "qk_norm": True}
    plain = weights_after(make_model("none", drop_path_form=form, **fields), precision)
    again = weights_after(make_model(recomputed, drop_path_form=form, **fields), precision)
    assert all(map(torch.equal, again, plain))


def test_ddp_changes_no_bit():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        again = weights_after(make_model("block"), in_ddp=True)
        assert all(map(torch.equal, again, weights_after(make_model("none"), in_ddp=True)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("form", "backend"),
    [
        ("mask", "aot_eager"),
        ("subset", "aot_eager"),
        pytest.param("mask", "inductor", marks=pytest.mark.full),
        pytest.param("subset", "inductor", marks=pytest.mark.full),
    ],
)
def test_compiled_blocks_repeat_their_draws(form, backend):
    weights = []
    for recomputed in ("none", "block"):
        torch._dynamo.reset()
        model = make_model(recomputed, drop_path_form=form, drop_path_schedule="constant")
        compile_blocks(model, backend)
        weights.append(weights_after(model))
    torch._dynamo.reset()
    assert all(map(torch.equal, *weights))


def test_timm_models_recompute_all_blocks_or_none():
    gradients = []
    for recomputed in ("none", "block"):
        torch.manual_seed(0)
        fields = {"depth": 2, "embed_dim": 16, "num_heads": 2, "drop_path_rate": 0.5}
        model = create_model("timm/vit_tiny_patch16_224", 32, 5, **fields).train()
        checkpoint_activations(model, recomputed)
        torch.manual_seed(1)
        model(torch.randn(4, 3, 32, 32)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    with pytest.raises(
        ValueError, match="activation_checkpointing=2: timm models can checkpoint only"
    ):
        checkpoint_activations(model, 2)
    with torch.device("meta"):
        other = create_model("timm/dla34", 32, 5)
    with pytest.raises(ValueError, match="timm's DLA does not support it: set none"):
        checkpoint_activations(other, "block")
