"""Test that results match those of timm and torch even with kernels for other CPUs.

`ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA` make a CPU run the kernels that are meant for older
CPUs.
"""

from __future__ import annotations

import os
import re
import sys

import pytest
import torch
from extras.deleted_extras import DELETED
from processes import REPOSITORY, call, environment

ONEDNN = {"default": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
"""Maps each set of torch kernels to the set of oneDNN kernels for the same CPUs."""
OURS = torch.backends.cpu.get_cpu_capability().lower()
PLAINER = [*ONEDNN][: [*ONEDNN].index(OURS)] if OURS in ONEDNN else []
NUMERIC = [
    *([] if "report" in DELETED else ["tests/extras/report/test_model_plots.py"]),
    "tests/evaluation/test_evaluate.py",
    "tests/training/test_loss.py",
    "tests/training/test_metrics.py",
    "tests/test_step.py",
    "tests/inference/test_predictor.py",
    *(f"tests/{folder}" for folder in ("data/augment", "model", "optim")),
    *(
        f"tests/data/decode/test_{name}.py"
        for name in ("views", "windows", "center_view", "native", "jpeg_cut")
    ),
    "tests/weights/test_published.py",
]
CORE = [
    "tests/distributed/exact/test_exact_runs.py::test_limited_instructions_count_as_a_different_kind_of_host",
    "tests/distributed/exact/test_exact_runs.py::test_hosts_of_two_kinds_are_refused",
    "tests/model/test_model.py::test_state_dict_logits_and_gradients_equal_timm",
    "tests/training/test_loss.py",
    "tests/test_step.py",
    "tests/inference/test_predictor.py::test_inputs_and_logits_are_those_of_launch_eval",
    "tests/weights/test_published.py::test_a_timm_file_gives_timms_logits_and_predictions[resnet10t]",
]
"""Tests that cover one case of each kind and take several seconds per set of kernels."""


def passed_with_kernels(capability: str, *tests: str) -> int:
    """Run tests with the kernels for `capability`, check that no test fails, and return the number
    of tests that passed."""
    env = {
        **environment(),
        "ATEN_CPU_CAPABILITY": capability,
        "ONEDNN_MAX_CPU_ISA": ONEDNN[capability],
    }
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not full",
        *tests,
    ]
    done = call(line, env, REPOSITORY, timeout_s=550)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@pytest.mark.parametrize(
    "capability",
    [pytest.param(each, marks=[pytest.mark.full] * (each != PLAINER[-1])) for each in PLAINER],
)
def test_the_core_agrees_with_the_kernels_of_other_cpus(capability):
    assert passed_with_kernels(capability, *CORE) > 50


@pytest.mark.full
@pytest.mark.parametrize("capability", PLAINER)
def test_all_comparisons_hold_with_the_kernels_of_other_cpus(capability):
    assert passed_with_kernels(capability, *NUMERIC) > 500


@pytest.mark.parametrize(
    "capability",
    [pytest.param(each, marks=[pytest.mark.full] * (each != PLAINER[0])) for each in PLAINER],
)
def test_a_process_uses_the_selected_kernels(capability):
    """If the environment variables had no effect, the tests in this file would always run the same
    kernels."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    env = {**environment(), "ATEN_CPU_CAPABILITY": capability}
    done = call([sys.executable, "-c", code], env)
    assert done.stdout.strip().lower() == capability, os.environ.get("ATEN_CPU_CAPABILITY")
