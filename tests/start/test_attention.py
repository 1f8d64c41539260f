"""Test that `train.attention` selects the kernel that computes attention."""

from __future__ import annotations

import pytest
import torch
from model.random_weights import randomise, relative_difference
from processes import run
from torch import nn
from torch.profiler import ProfilerActivity, profile

from vit.config.schema import TrainConfig
from vit.layers.precision import has_bf16
from vit.model import create_model
from vit.start.attention import attention_kernel, choose_attention
from vit.start.compiling import compile_blocks

CPU = torch.device("cpu")
KERNELS = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}
"""Maps each kernel that torch has on CPUs to its name in a profile."""
HAS_BF16 = has_bf16(CPU)
TOLERANCE = {"fp32": 1e-5, "bf16": 0.03}


@pytest.fixture(autouse=True)
def torchs_choice():
    torch._dynamo.reset()
    yield
    choose_attention(nn.Identity(), TrainConfig(steps=1), CPU)
    torch._dynamo.reset()


def make_model(**fields) -> nn.Module:
    return randomise(create_model("vit_ti8", 32, 10, embed_dim=64, depth=2, num_heads=4, **fields))


def choose(model: nn.Module, attention: str, precision: str = "fp32") -> None:
    choose_attention(model, TrainConfig(steps=1, attention=attention, precision=precision), CPU)


def used(model: nn.Module, precision: str) -> tuple[set[str], torch.Tensor]:
    """Return the kernels in the profile of a forward and backward pass, and return the logits."""
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(images)
        logits.sum().backward()
    names = {event.key for event in profiler.key_averages()}
    return {kernel for kernel, name in KERNELS.items() if name in names}, logits.detach()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_uses_only_the_chosen_kernel_and_gives_the_same_logits(precision):
    model = make_model()
    logits = {}
    for chosen in ("auto", "math", "flash", "auto"):
        choose(model, chosen, precision)
        kernels, logits[chosen] = used(model, precision)
        automatic = set() if precision == "bf16" and HAS_BF16 else {"flash"}
        assert kernels == (automatic if chosen == "auto" else {chosen})
    for chosen in ("math", "auto"):
        assert relative_difference(logits[chosen], logits["flash"]) < TOLERANCE[precision]


@pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bf16 instructions")
@pytest.mark.parametrize("head_dim", [16, 24])
def test_unfused_attention_is_as_close_to_float64_as_the_fused_kernel(head_dim):
    model = create_model("vit_ti8", 32, 10, embed_dim=4 * head_dim, depth=1, num_heads=4)
    layer = randomise(model).blocks[0].attn
    x = torch.randn(3, 17, 4 * head_dim, generator=torch.Generator().manual_seed(1))

    def gradients(trains_unfused, dtype):
        layer.to(dtype).trains_unfused = trains_unfused
        layer.zero_grad()
        inputs = x.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            output = layer(inputs)
        output.square().sum().backward()
        return [output.detach(), inputs.grad, layer.qkv.weight.grad.clone()]

    exact = gradients(False, torch.float64)
    fused = gradients(False, torch.float32)
    unfused = gradients(True, torch.float32)
    for found, other, expected in zip(unfused, fused, exact, strict=True):
        error = relative_difference(found.double(), expected)
        assert 0 < error < 2 * relative_difference(other.double(), expected)


@pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bf16 instructions")
def test_only_training_is_unfused():
    model = make_model()
    choose(model, "auto", "bf16")
    assert used(model, "bf16")[0] == set()
    assert attention_kernel(model, TrainConfig(steps=1, precision="bf16"), CPU) == "unfused"

    images = torch.randn(2, 3, 32, 32)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(images)
    assert KERNELS["flash"] in {event.key for event in profiler.key_averages()}

    dropping = make_model(attn_drop_rate=0.1).train()
    choose(dropping, "auto", "bf16")
    assert used(dropping, "bf16")[0] == {"math"}, "the layer has no dropout of its own"


def test_a_compiled_graph_uses_the_chosen_kernel():
    model = make_model()
    for chosen in KERNELS:
        torch._dynamo.reset()
        choose(model, chosen)
        compile_blocks(model, "aot_eager")
        # The graph of `math` contains the operations of this kernel, and no fused kernel.
        assert ("flash" in used(model, "fp32")[0]) == (chosen == "flash")


@pytest.mark.parametrize(
    ("chosen", "fields", "message"),
    [
        ("cudnn", {}, "attention=cudnn does not work in fp32 on this cpu: use auto or flash, math"),
        ("efficient", {}, "efficient does not work in fp32 on this cpu: use auto or flash, math"),
        # torch's kernel for CPUs has no dropout.
        ("flash", {"attn_drop_rate": 0.1}, "flash does not work .*: use auto or math$"),
        ("flash3", {}, r"\(No module named 'flash_attn_interface': install FlashAttention 3"),
    ],
)
def test_a_kernel_that_does_not_work_here_is_an_error_that_lists_the_others(
    chosen, fields, message
):
    model = make_model(**fields)
    with pytest.raises(ValueError, match=message) as error:
        choose(model, chosen)
    assert "\n" not in str(error.value)
    assert used(model.eval(), "fp32")[0] == {"flash"}, "a refused choice must not remain"


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match=r"train\.attention=math has no effect on ResNet"):
        choose(create_model("timm/resnet10t", 32, 5), "math")


def test_all_ranks_end_with_one_line(config, tmp_path):
    arguments = ("launch/train.py", "--config", config, f"run.dir={tmp_path / 'run'}")
    done = run(*arguments, "train.attention=efficient", ranks=2)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: train.attention=efficient does not work in bf16 on")
