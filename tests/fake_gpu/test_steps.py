"""Test that no step waits for the GPU. The tests run torch's real host code for the forward and
backward passes, the update, and the copy of the result."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from fake_gpu import log
from fake_gpu.steps import GROUPS, LOGGED_STEPS

from vit.config.optim_section import OptimConfig

pytestmark = pytest.mark.slow
STEPS = "tests/fake_gpu/steps.py"


def check_steps(path: Path) -> list[log.Call]:
    """Return the calls in the step log at `path`. Raises AssertionError if a call blocks the
    host."""
    calls = log.read(path)
    found = [str(call) for call in log.blocking(calls)]
    assert not found, f"{path.stem}: the host waits in {LOGGED_STEPS} steps:\n" + "\n".join(found)
    missing = {call.what for call in calls if call.kind == "missing"}
    assert not missing, f"{path.stem}: not implemented in tests/fake_gpu/cuda: {missing}"
    return calls


def kernels(calls: list[log.Call]) -> str:
    return " ".join(call.what for call in calls if call.kind == "launch")


def test_every_optimizer_is_tried():
    names = {
        name
        for option in get_args(get_args(OptimConfig)[0])
        for name in get_args(get_args(option)[0].model_fields["name"].annotation)
    }
    assert names - {"adamw"} <= set(GROUPS["optimizers"])


@pytest.mark.parametrize("group", GROUPS)
def test_no_setting_makes_a_step_wait(group, rehearse, tmp_path):
    done = rehearse(STEPS, tmp_path, group)
    assert done.returncode == 0, done.stderr
    for case in GROUPS[group]:
        calls = check_steps(tmp_path / f"{case}.log")
        assert sum(call.kind == "launch" for call in calls) > 100 * LOGGED_STEPS
        assert sum(call.kind == "gemm" for call in calls) >= 2 * LOGGED_STEPS
        copies = [call.what for call in calls if call.kind == "copy"]
        assert copies.count("device to page-locked") == LOGGED_STEPS, "the result of each step"
        assert not [call for call in calls if call.kind == "malloc"], "memory is reused"
        if case in ("flash", "dropouts"):
            assert "flash_bwd" in kernels(calls)
        if case in ("efficient", "fp32"):
            assert "fmha_cutlassB" in kernels(calls)


@pytest.mark.parametrize(
    ("fault", "call", "function"),
    [
        ("a value that is read", "wait cudaStreamSynchronize", "read_a_value"),
        ("a pageable copy", "copy pageable to device", "copy_pageable_memory"),
    ],
)
def test_a_planted_wait_is_found_and_named(fault, call, function, rehearse, tmp_path):
    done = rehearse(STEPS, tmp_path, "number formats", "bf16", fault=fault)
    assert done.returncode == 0, done.stderr
    place = rf"{call} at tests/fake_gpu/faults.py:\d+ {function} < .* < vit/training/objective.py:"
    with pytest.raises(AssertionError, match=rf"bf16: the host waits in 2 steps:\n\s*{place}"):
        check_steps(tmp_path / "bf16.log")


def test_a_tensor_on_the_wrong_device_is_an_error(rehearse, tmp_path):
    done = rehearse(STEPS, tmp_path, "number formats", "bf16", fault="a tensor of the host")
    assert done.returncode == 1
    assert "in use_a_tensor_of_the_host" in done.stderr
    assert "Expected all tensors to be on the same device" in done.stderr
