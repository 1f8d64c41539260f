"""Test that `train.deterministic` configures torch, that two runs on a CPU are bit-identical, and
that all operations have deterministic implementations."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest
import torch
import warm_python
from augmenting import POLICIES, mixed_table
from gpu_free.fake_gpu import GPU, Launches, gpu_without_memory, move_to_fake_gpu
from processes import environment, final_state, train

from vit.config.schema import AugmentConfig
from vit.data.augment.apply import Augment
from vit.model import create_model
from vit.training.loss import cross_entropy
from vit.training.metrics import AccuracyCounter, predicted_classes

WITHOUT_ORDER = {
    *("avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("adaptive_max_pool2d_backward", "fractional_max_pool2d_backward"),
    *("fractional_max_pool3d_backward", "max_unpool2d", "max_unpool3d"),
    *("upsample_linear1d_backward", "upsample_bilinear2d_backward"),
    *("upsample_bicubic2d_backward", "upsample_trilinear3d_backward"),
    *("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward"),
    *("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward"),
    *("nll_loss2d_forward", "_ctc_loss_backward", "_embedding_bag_backward", "put_", "histc"),
    *("bincount", "median", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    *("scatter_reduce", "scatter_reduce_"),
}
"""The operations that raise an error on a GPU, according to the documentation of
torch.use_deterministic_algorithms."""
SETTINGS = """
import json, os, torch
from vit.distributed.process_group import join_world
join_world("cpu", deterministic={deterministic})
print(json.dumps([
    torch.are_deterministic_algorithms_enabled(),
    torch.backends.cudnn.deterministic,
    torch._inductor.config.deterministic,
    torch.utils.deterministic.fill_uninitialized_memory,
    os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    os.environ.get("NCCL_ALGO"),
    torch.cuda.is_initialized(),
]))
"""


def settings(deterministic: bool, **variables: str) -> list[object]:
    code = SETTINGS.format(deterministic=deterministic)
    env = environment() | variables
    line = [warm_python.python(environment()), "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, env=env, check=True)
    return json.loads(done.stdout)


def test_libraries_are_configured_before_cuda_starts():
    assert settings(True) == [True, True, True, False, ":4096:8", "^NVLS", False]
    assert settings(True, CUBLAS_WORKSPACE_CONFIG=":16:8", NCCL_ALGO="Ring")[4:6] == [
        ":16:8",
        "Ring",
    ]
    assert settings(True, CUBLAS_WORKSPACE_CONFIG=":0:0")[4] == ":4096:8", (
        "a value that torch would reject must be replaced"
    )
    assert settings(False)[:3] == [False, False, False]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deterministic_cpus_compute_the_same_bits(config, tmp_path, precision):
    """The run uses dropout, drop path, mixing, averaged weights, random erasing and flips."""
    overrides = (
        f"train.precision={precision}",
        "augment.erasing_prob=0.5",
        "augment.hflip_prob=0.5",
    )
    for name in ("false", "true"):
        train(config, tmp_path / name, f"train.deterministic={name}", *overrides)
    assert final_state(tmp_path / "true", 12) == final_state(tmp_path / "false", 12)


def test_a_resumed_run_may_enable_determinism(config, tmp_path):
    constant = ("schedule.name=constant",)
    train(config, tmp_path / "run", *constant, "train.steps=6")
    switched = ("train.deterministic=true", "--allow-change", "train.steps")
    train(config, tmp_path / "run", *constant, *switched)
    train(config, tmp_path / "whole", *constant)
    assert final_state(tmp_path / "run", 12) == final_state(tmp_path / "whole", 12)


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def launched_forward(config: AugmentConfig) -> Launches:
    model = create_model("vit_ti8", (40, 120), 10, depth=1, drop_path_rate=0.1, init_values=0.1)
    table = torch.from_numpy(mixed_table(config, 56, (40, 120)))
    counted = Launches("cuda")
    with gpu_without_memory(), counted:
        move_to_fake_gpu(model)
        augment = Augment(config, 10, (0.5,) * 3, (0.25,) * 3, GPU)
        images = torch.empty(56, 3, 40, 120, dtype=torch.uint8, device=GPU)
        labels = torch.empty(56, dtype=torch.int64, device=GPU)
        inputs, targets = augment(images, labels, table)
        logits = model(inputs)
        cross_entropy(logits, targets, 0.1)
        with torch.no_grad():
            AccuracyCounter(GPU).add(logits, labels, torch.empty(56, device=GPU))
            torch.zeros(60, dtype=torch.int64, device=GPU)[labels] = predicted_classes(logits)
    return counted


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("name", POLICIES)
def test_every_operation_before_the_backward_pass_has_a_deterministic_form(name, deterministic):
    """Even on a fake GPU, torch raises an error for some of the operations without a deterministic
    implementation. The test looks up the names of all other operations in torch's list."""
    counted = launched_forward(POLICIES[name])
    assert counted.total() > 100
    assert not counted.by_name.keys() & WITHOUT_ORDER


FORMS = (
    {"drop_path_rate": 0.2, "init_values": 0.1, "proj_drop_rate": 0.1},
    {"class_token": False, "global_pool": "avg", "pos_embed": "sincos2d"},
    {"representation_size": 16, "attn_drop_rate": 0.1},
    {"drop_path_rate": 0.4, "drop_path_form": "subset"},
)


@pytest.mark.parametrize("fields", FORMS)
def test_every_operation_of_the_backward_pass_has_a_deterministic_form(fields, deterministic):
    """The test runs the backward pass on a CPU, where torch uses the same operations."""
    model = create_model("vit_ti8", 16, 5, embed_dim=32, depth=2, num_heads=2, **fields)
    images = torch.zeros(4, 3, 16, 16)
    with Launches("cpu") as counted, torch.autocast("cpu", torch.bfloat16):
        cross_entropy(model(images), torch.zeros(4, 5), 0.1).sum().backward()
    assert any("backward" in name for name in counted.by_name)
    assert not counted.by_name.keys() & WITHOUT_ORDER


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_an_operation_without_a_deterministic_form_is_detected(deterministic, monkeypatch):
    """The test uses one operation that is only in torch's list, and one for which torch raises an
    error even without a GPU."""
    image = torch.zeros(1, 3, 8, 8, requires_grad=True)
    with Launches("cpu") as counted:
        torch.nn.functional.interpolate(image, scale_factor=2.0, mode="bilinear").sum().backward()
    assert counted.by_name.keys() & WITHOUT_ORDER == {"upsample_bilinear2d_backward"}
    unchanged = AccuracyCounter.add

    def add(counter, logits, labels, weights):
        torch.histc(logits.float())
        unchanged(counter, logits, labels, weights)

    monkeypatch.setattr(AccuracyCounter, "add", add)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        launched_forward(AugmentConfig(hflip_prob=float(np.float32(0.5))))
