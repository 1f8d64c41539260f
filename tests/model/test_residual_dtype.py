"""Test a model whose tokens are stored in bf16 between blocks (`train.residual_dtype=bf16`)."""

from __future__ import annotations

import json

import pytest
import timm
import torch
from model.random_weights import randomise, relative_difference
from plain_step import plain_step
from processes import TINY as TINY_RUN
from processes import metrics, run, train
from torch import Tensor, nn

from vit.config.schema import AdamWConfig, AugmentConfig
from vit.data.augment.apply import Augment
from vit.data.augment.table import table_layout
from vit.data.batches import Batch
from vit.distributed.exact.leaves import Leaves
from vit.distributed.process_group import World
from vit.inference.predictor import load
from vit.layers.blocks import set_residual_dtype
from vit.model import create_model
from vit.optim.ema import Ema
from vit.optim.optimizer import create_optimizer
from vit.start.compiling import checkpoint_activations, compile_blocks

CPU = torch.device("cpu")
TINY = {"embed_dim": 64, "depth": 6, "num_heads": 4}
FORMS = {
    "plain": {},
    "LayerScale": {"init_values": 0.1},
    "RMSNorm": {"norm_layer": "rmsnorm", "qk_norm": True, "rope_type": "axial", "reg_tokens": 4},
    "mean of patches": {"global_pool": "avg", "class_token": False},
    "MAP head": {"global_pool": "map"},
    "patch norms": {"dual_patch_norm": True, "pos_embed": "none", "rope_type": "dinov3"},
}
UNIT = 2.0**-8
"""The largest relative error of rounding to bf16."""


def make_model(dtype: str, **fields) -> nn.Module:
    model = randomise(create_model("vit_ti8", 32, 10, **TINY, **fields))
    set_residual_dtype(model, dtype)
    return model


def images(rows: int = 4) -> Tensor:
    return torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def in_bf16(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(inputs)


@pytest.mark.parametrize("form", FORMS)
def test_all_blocks_pass_on_bf16_and_the_head_computes_in_fp32(form):
    model = make_model("bf16", **FORMS[form])
    dtypes = []
    for block in model.blocks:
        block.register_forward_hook(
            lambda block, inputs, x: dtypes.append((inputs[0].dtype, x.dtype))
        )
    logits = in_bf16(model, images())
    assert dtypes == [(torch.bfloat16, torch.bfloat16)] * TINY["depth"]
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("form", FORMS)
def test_logits_and_gradients_are_as_close_to_fp32_as_two_roundings_per_block_allow(form):
    """Each block rounds the tokens twice. Roundings are independent, so their errors grow with the
    square root of their number. The factor 4 covers the layers after the blocks, and matrix
    products in bf16, which also round in the plain path."""
    bound = 4 * UNIT * (2 * TINY["depth"]) ** 0.5
    expected = make_model("fp32", **FORMS[form])
    tried = make_model("bf16", **FORMS[form])
    weights = torch.randn(4, 10, generator=torch.Generator().manual_seed(2))
    exact_logits = expected(images())
    (exact_logits * weights).sum().backward()
    logits = in_bf16(tried, images())
    (logits * weights).sum().backward()
    assert relative_difference(logits, exact_logits) < bound
    gradients = [
        torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        for model in (expected, tried)
    ]
    assert (gradients[1] - gradients[0]).norm() / gradients[0].norm() < bound


def test_logits_are_close_to_timms_in_bf16():
    expected = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=10, **TINY
    )
    model = make_model("bf16")
    expected.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = in_bf16(model, images())
        theirs = in_bf16(expected.eval(), images()).float()
        exact = expected(images())
    assert relative_difference(logits, theirs) < 0.05
    # The tolerance is useful only if timm's own error in bf16 is of the same size.
    assert relative_difference(logits, exact) < 2 * relative_difference(theirs, exact) + UNIT


def test_checkpoints_have_the_same_keys_and_dtypes():
    plain, tried = (make_model(dtype).state_dict() for dtype in ("fp32", "bf16"))
    assert {key: value.dtype for key, value in plain.items()} == {
        key: value.dtype for key, value in tried.items()
    }


def test_the_average_has_the_same_tokens():
    model = make_model("bf16")
    average = Ema(model, 0.9).module
    with torch.no_grad():
        assert torch.equal(in_bf16(average, images()), in_bf16(model, images()))
        plain = in_bf16(make_model("fp32"), images())
    assert not torch.equal(in_bf16(average, images()), plain)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_evaluation_equals_the_eager_one(backend):
    torch._dynamo.reset()
    model = make_model("bf16", init_values=0.1).eval()
    with torch.no_grad():
        expected = in_bf16(model, images())
        compile_blocks(model, backend)
        assert relative_difference(in_bf16(model, images()), expected) < UNIT
    torch._dynamo.reset()


def make_batch(seed: int, rows: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randint(0, 256, (rows, 3, 32, 32), dtype=torch.uint8, generator=generator),
        torch.randint(0, 10, (rows,), generator=generator),
        torch.ones(rows),
        torch.zeros(rows, table_layout(AugmentConfig()).width),
        torch.arange(rows),
    )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("form", ["mask", "subset"])
def test_trains_with_drop_path_checkpointing_and_exact_sums(form, exact):
    """Activation checkpointing repeats the same roundings, so it must not change any bit of the
    results."""
    weights = []
    for recomputed in ("none", 2):
        torch.manual_seed(0)
        drops = {"drop_path_rate": 0.4, "drop_path_form": form, "proj_drop_rate": 0.1}
        model = make_model("bf16", init_values=0.1, **drops).train()
        checkpoint_activations(model, recomputed)
        world = World(0, 1, CPU)
        step = plain_step(
            model,
            model,
            create_optimizer(model, AdamWConfig(eps=1e-5)),
            Augment(AugmentConfig(), 10, (0.5,), (0.25,), CPU),
            world,
            leaves=Leaves(model, 2, 4, world, 0) if exact else None,
            lr_at=lambda step: 1e-3,
            micro_batch_size=4,
            precision="bf16",
        )
        losses = [step(make_batch(0), number).read().loss for number in range(4)]
        assert losses[-1] < losses[0]
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_launch_eval_equals_the_evaluation_of_the_run(config, tmp_path):
    run_dir = tmp_path / "run"
    settings = ("train.precision=bf16", "train.residual_dtype=bf16", "ema.decay=null")
    train(config, run_dir, *settings)
    of_run = metrics(run_dir, "eval")[-1]
    results = {}
    for name, arguments in {"run": (), "fp32": ("--precision", "fp32")}.items():
        done = run("launch/eval.py", run_dir, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        results[name] = json.loads(done.stdout)["loss"]
    assert results["run"] == pytest.approx(of_run["loss"], abs=1e-6)
    assert results["fp32"] != results["run"]
    inputs = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    plain = load(run_dir, settings={"train.residual_dtype": "fp32"})
    assert not torch.equal(load(run_dir)(inputs), plain(inputs))
    refused = run(
        "launch/train.py",
        "--config",
        config,
        *TINY_RUN,
        "train.residual_dtype=bf16",
        "train.precision=fp32",
        f"run.dir={run_dir}",
    )
    assert refused.returncode == 2
    assert "train.residual_dtype has no effect with train.precision=fp32" in refused.stderr


def test_timm_models_are_refused():
    model = create_model("timm/vit_tiny_patch16_224", 32, 5, depth=1, embed_dim=16, num_heads=2)
    set_residual_dtype(model, "fp32")
    with pytest.raises(ValueError, match="residual_dtype=bf16 does not work with timm's VisionTr"):
        set_residual_dtype(model, "bf16")
