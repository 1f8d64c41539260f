"""Test that parameters in `init.freeze` stay bit-identical and take no training time, and that the
estimates for a run take frozen parameters into account."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
from plain_step import plain_step
from processes import final_state, metrics, train, write_config
from test_step import WORLD, make_batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from vit.config.io import from_dict
from vit.config.schema import (
    AdamWConfig,
    AugmentConfig,
    Config,
    DataConfig,
    InitConfig,
    ModelConfig,
    TrainConfig,
)
from vit.data.augment.apply import Augment
from vit.model import create_model
from vit.optim.ema import Ema
from vit.optim.optimizer import create_optimizer, state_bytes
from vit.start.compiling import checkpoint_activations, compile_blocks
from vit.training.freeze import freeze
from vit.training.mfu import train_flops_per_image
from vit.training.model_summary import flops_per_image
from vit.training.plan import Plan
from vit.weights.files import read_weights

SHAPE = {"embed_dim": 32, "depth": 3, "num_heads": 2}
OPTIM = AdamWConfig(lr=0.1, weight_decay=0.5)
HEAD = {"head.weight", "head.bias"}


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_of(**fields) -> nn.Module:
    torch.manual_seed(0)
    model = create_model("vit_ti8", 16, 5, **{**SHAPE, **fields})
    nn.init.normal_(model.head.weight, std=0.1)
    return model


def trained_names(frozen: str | int, **fields) -> set[str]:
    model = model_of(**fields)
    freeze(model, frozen)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_selects_trained_parameters_by_name():
    every = {name for name, _ in model_of().named_parameters()}
    assert trained_names("none") == every
    assert trained_names("backbone") == HEAD
    assert trained_names(3) == HEAD | {"norm.weight", "norm.bias"}
    assert (
        trained_names(2)
        == {name for name in every if name.startswith(("blocks.2.", "norm."))} | HEAD
    )
    assert every - trained_names(0) == {
        *("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")
    }
    pooled = trained_names("backbone", global_pool="avg", representation_size=8)
    assert pooled == HEAD | {"pre_logits.fc.weight", "pre_logits.fc.bias"}
    assert "fc_norm.weight" in trained_names(3, global_pool="avg")


@pytest.mark.parametrize("frozen", ["backbone", 2])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_step_changes_trained_parameters_as_a_plain_loop_does(frozen, recomputed):
    model = model_of()
    freeze(model, frozen)
    before = copy.deepcopy(model)
    checkpoint_activations(model, "block" if recomputed else "none")
    ema = Ema(model, 0.5)
    optimizer = create_optimizer(model, OPTIM)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in optimizer.state} == {id(p) for p in trained}
    assert sum(p.nbytes for p in trained) * 2 + 4 * len(trained) == sum(state_bytes(OPTIM, model))
    augment = Augment(AugmentConfig(hflip_prob=0.0), 5, (0.5,) * 3, (0.25,) * 3, WORLD.device)
    step = plain_step(
        *(model, model, optimizer, augment, WORLD),
        lr_at=lambda step: 0.1,
        micro_batch_size=4,
        ema=ema,
    )
    batch = make_batch()
    model.train()
    step(batch, 0)

    plain = copy.deepcopy(before).train()
    inputs = (batch.images / 255 - 0.5) / 0.25
    nn.functional.cross_entropy(plain(inputs), batch.labels).backward()
    free = [p for p in plain.parameters() if p.requires_grad]
    groups = [[p for p in free if p.ndim > 1], [p for p in free if p.ndim <= 1]]
    decays = zip(groups, (0.5, 0.0), strict=True)
    torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in decays],
        lr=0.1,
        betas=OPTIM.betas,
        eps=OPTIM.eps,
    ).step()
    old, new, expected, average = (
        dict(m.named_parameters()) for m in (before, model, plain, ema.module)
    )
    for name, parameter in new.items():
        if parameter.requires_grad:
            assert not torch.equal(parameter, old[name]), name
            # The size of AdamW's first update equals the learning rate and does not depend on the
            # gradient. If a gradient is only rounding noise, the sign of the update is random.
            clear = plain.get_parameter(name).grad.abs() > 1e-6
            torch.testing.assert_close(
                parameter[clear], expected[name][clear], rtol=1e-3, atol=1e-3
            )
            torch.testing.assert_close(average[name], (old[name] + parameter) / 2)
        else:
            assert parameter.grad is None, name
            assert torch.equal(parameter, old[name]), name
            assert torch.equal(average[name], old[name]), name


def gradients_of(
    frozen: str | int, compiled: bool, recomputed: bool, wrapped: bool
) -> dict[str, torch.Tensor | None]:
    torch._dynamo.reset()
    model = model_of(drop_path_rate=0.0, proj_drop_rate=0.0).train()
    freeze(model, frozen)
    checkpoint_activations(model, "block" if recomputed else "none")
    if compiled:
        compile_blocks(model, backend="aot_eager")
    outer = DistributedDataParallel(model) if wrapped else model
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        images = torch.randn(4, 3, 16, 16, generator=generator)
        outer(images).square().mean().backward()
    torch._dynamo.reset()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("frozen", ["backbone", 2])
@pytest.mark.parametrize(
    ("compiled", "recomputed", "wrapped"),
    [
        pytest.param(True, False, False, id="compiled", marks=pytest.mark.full),
        pytest.param(False, True, True, id="checkpointed under DDP"),
        pytest.param(True, True, True, id="all three"),
    ],
)
def test_freezing_combines_with_all_other_changes_of_a_step(
    frozen, compiled, recomputed, wrapped, process_group
):
    plain = gradients_of(frozen, False, False, False)
    gradients = gradients_of(frozen, compiled, recomputed, wrapped)
    assert {name for name, gradient in gradients.items() if gradient is not None} == trained_names(
        frozen
    )
    for name, gradient in gradients.items():
        assert (gradient is None) == (plain[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", ["none", "backbone", 0, 1, 3])
def test_counts_the_same_operations_as_torch(frozen):
    """torch counts the operations of a real backward pass. The test excludes the gradient of the
    images, and excludes attention because torch counts the recomputation in the backward pass."""
    model = model_of(depth=3)
    freeze(model, frozen)
    images = torch.randn(2, 3, 16, 16)
    with FlopCounterMode(display=False) as forward:
        logits = model(images)
    with FlopCounterMode(display=False) as both:
        logits = model(images)
        logits.sum().backward()

    def products(counter) -> int:
        counts = counter.get_flop_counts()["Global"]
        return sum(n for op, n in counts.items() if "attention" not in str(op)) // 2

    done = products(both) - products(forward)
    all_forward = flops_per_image(model, 2)
    attention = all_forward - products(forward)
    backward = train_flops_per_image(model, 2) - all_forward
    depth = {"none": 3, "backbone": 0, 0: 3, 1: 2, 3: 0}[frozen]
    # If the first linear layer is trained, the gradient of its input is not needed. By convention,
    # FLOP counts still include this gradient.
    patches = 2 * 3 * 8 * 8 * 32 * 4
    head = 2 * 32 * 5
    not_needed = {"none": patches, "backbone": head}.get(frozen, 0)
    assert backward == done + not_needed + 2 * attention * depth // 3


def test_the_planner_counts_less_memory():
    step_memory = pytest.importorskip("vit.extras.planner.memory").step_memory
    plan = Plan(1, 8, 8, 1, 1, 0, 8, 1, 0, 1, 1)
    config = Config(
        model=ModelConfig(name="vit_ti8", image_size=32, **SHAPE),
        data=DataConfig(root="none", global_batch_size=8),
        optim=OPTIM,
        train=TrainConfig(steps=1, precision="bf16"),
    )
    counted = {
        frozen: step_memory(config.model_copy(update={"init": InitConfig(freeze=frozen)}), plan, 5)
        for frozen in ("none", 1, "backbone")
    }
    everything, one, extractor = counted.values()
    assert everything.weights == extractor.weights
    head = sum(p.nbytes for n, p in model_of().named_parameters() if n in HEAD)
    assert extractor.gradients <= head
    assert extractor.optimizer == 2 * head + 2 * 4
    assert extractor.activations < one.activations < everything.activations
    assert extractor.activations < everything.activations / 3


def test_rejects_parts_that_cannot_be_frozen():
    with pytest.raises(
        ValueError, match=r"init.freeze=4: the model has only 3 blocks: set at most 3"
    ):
        freeze(model_of(), 4)
    with pytest.raises(
        ValueError, match=r"conv1.1 is a batch norm layer, whose statistics would change"
    ):
        freeze(create_model("timm/resnet10t", 32, 5), "backbone")
    with pytest.raises(ValueError, match=r"init.freeze=1: the model has no blocks: set backbone"):
        freeze(create_model("timm/resnet10t", 32, 5), 1)
    with pytest.raises(ValueError, match=r"init.freeze has no effect with init.checkpoint=null"):
        from_dict(
            {"data": {"root": "-"}, "train": {"steps": 1}, "init": {"freeze": "backbone"}}, "test"
        )


@pytest.mark.slow
def test_a_frozen_run_on_two_ranks_resumes_exactly(tmp_path, shards):
    config = write_config(tmp_path, shards)
    base = tmp_path / "base"
    train(config, base, "train.steps=2", "ema.decay=null")
    source = read_weights(base).weights
    frozen = (f"init.checkpoint={base}", "init.freeze=1", "checkpoint.every_steps=3")
    whole = tmp_path / "whole"
    train(config, whole, *frozen, "train.steps=6", ranks=2)
    parts = tmp_path / "parts"
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step_00000006")
    shutil.rmtree(parts / "weights")
    (parts / "checkpoints" / "latest").write_text("step_00000003\n")
    train(config, parts, *frozen, "train.steps=6", ranks=2)
    assert metrics(parts, "start")[-1]["step"] == 3
    assert final_state(parts, 6) == final_state(whole, 6)
    names = read_weights(whole).weights.keys()
    for averaged in ("last", "last_ema"):
        weights = read_weights(whole / "weights" / f"{averaged}.safetensors").weights
        unchanged = {name for name in names if torch.equal(weights[name], source[name])}
        expected = {n for n in names if n.startswith(("patch_embed.", "pos_", "cls_", "blocks.0."))}
        assert unchanged == expected
