"""Test launch/train.py with train.device=cuda. The tests cover two workers, saves, resuming, and a
compiled step.

Kernels on the fake GPU write nothing. The evaluation therefore counts no images, and each run ends
with an error at its first evaluation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from fake_gpu import log
from processes import TINY, last_checkpoint, metrics

pytestmark = pytest.mark.slow
SETTINGS = (
    *(each for each in TINY if not each.startswith(("loader.num_workers", "train.precision"))),
    *("train.device=cuda", "train.precision=auto", "loader.num_workers=2"),
    *("optim.clip_grad_norm=1.0", "eval.every_steps=12"),
)
END = "RuntimeError: evaluated 0 images, but 'val' has 23: this is a bug in the loader"
EXPECTED_WAITS = {
    "vit/training/step_result.py read": "for the result of the previous step",
    "vit/data/to_gpu.py __call__": "for the step before the previous one, whose slot is reused",
    "vit/data/to_gpu.py synchronize": "at the end, before the slots are unlocked",
    "vit/checkpoint/snapshot.py wait": "for the copy of a checkpoint, in the saver's thread",
}
COMPILERS = ("torch/_dynamo/", "torch/_inductor/")


class Run(NamedTuple):
    """The calls and the error output of a run that ended in its first evaluation."""

    calls: list[log.Call]
    stderr: str


def place(call: log.Call) -> str:
    """Return the innermost file and function in vit/ on the stack of `call`, or ""."""
    for frame in call.stack:
        if frame.startswith("vit/"):
            file, _, function = frame.partition(":")
            return f"{file} {function.split()[1]}"
    return ""


def find_early_reads(calls: list[log.Call]) -> list[log.Call]:
    """Return the waits in which `_do_step` reads the result of a step before it has queued another
    step."""
    early = []
    newest: set[str] = set()  # the events after which no matrix product has been queued
    for call in calls:
        if call.kind in ("gemm", "graph"):
            newest.clear()
        elif call.kind == "event":
            newest.add(call.what)
        elif call.kind == "wait" and place(call).endswith(" read"):
            in_step = any(frame.endswith(" _do_step") for frame in call.stack)
            if in_step and call.fields[1] in newest:
                early.append(call)
    return early


def check_waits(calls: list[log.Call]) -> set[str]:
    """Return the places where training waits for the GPU after the first step.

    Raises AssertionError if training waits at a place that is not in `EXPECTED_WAITS`. Waits in the
    evaluation and allocations of page-locked memory are ignored.
    """
    begin = next(number for number, call in enumerate(calls) if place(call).endswith(" read"))
    waits = [
        call
        for call in log.blocking(calls[begin:])
        if call.kind != "host allocation"
        and not any(compiler in frame for frame in call.stack for compiler in COMPILERS)
        and not any(frame.endswith(" evaluate") for frame in call.stack)
    ]
    early = find_early_reads(calls)
    wrong = [str(call) for call in waits if place(call) not in EXPECTED_WAITS or call in early]
    assert not wrong, "training waits for the GPU:\n" + "\n".join(wrong)
    return {place(call) for call in waits}


def train(rehearse, config: Path, folder: Path, *overrides: str, **options) -> Run:
    path = folder / "calls.log"
    arguments = ("--config", config, f"run.dir={folder / 'run'}", *SETTINGS, *overrides)
    done = rehearse("launch/train.py", *arguments, log=path, zeros=True, **options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert END in done.stderr, done.stdout + done.stderr
    calls = log.read(path)
    assert not [str(call) for call in calls if call.kind == "missing"]
    return Run(calls, done.stderr)


def test_a_step_is_compiled_once_and_replayed_as_a_graph(rehearse, config, tmp_path):
    overrides = ("train.compile=reduce-overhead",)
    run = train(rehearse, config, tmp_path, *overrides)
    check_waits(run.calls)
    reasons = [line for line in run.stderr.splitlines() if re.search(r"\]     - \d+/\d+: ", line)]
    # The evaluation needs its own graph, because it computes no gradients.
    wrong = [line for line in reasons if "grad_mode" not in line]
    assert not wrong, "a step is compiled again:\n" + "\n".join(wrong)
    assert run.stderr.count("[__recompiles] Recompiling") == 1
    kernels = {call.what for call in run.calls if call.kind == "launch"}
    assert any("triton" in name and "native_layer_norm_backward" in name for name in kernels)
    graphs = [call.what for call in run.calls if call.kind == "graph"]
    assert graphs.count("replay") > graphs.count("capture") > 0


def test_saves_and_resumes_and_names_the_attention_kernel(rehearse, config, tmp_path):
    first = train(rehearse, config, tmp_path, "train.compile=false")
    assert check_waits(first.calls) == set(EXPECTED_WAITS)
    assert last_checkpoint(tmp_path / "run") == 9
    assert " on cuda, bf16, cudnn attention; " in first.stderr
    [start] = metrics(tmp_path / "run", "start")
    assert start["attention"] == "cudnn"

    resumed = train(rehearse, config, tmp_path, "train.compile=false")
    assert check_waits(resumed.calls) <= set(EXPECTED_WAITS)
    steps = [line["step"] for line in metrics(tmp_path / "run", "train")]
    assert steps == [*range(1, 13), 10, 11, 12]


def test_a_result_that_is_read_at_once_is_found(rehearse, config, tmp_path):
    fault = "a result that is read at once"
    run = train(rehearse, config, tmp_path, "train.compile=false", fault=fault)
    place = r"wait cudaEventSynchronize at vit/training/step_result.py:\d+ read"
    with pytest.raises(AssertionError, match=rf"training waits for the GPU:\n\s*{place}"):
        check_waits(run.calls)


def test_a_save_that_waits_is_found_and_named(rehearse, config, tmp_path):
    run = train(rehearse, config, tmp_path, "train.compile=false", fault="a save that waits")
    place = r"wait cudaDeviceSynchronize at tests/fake_gpu/faults.py:\d+ wait_for_the_device"
    with pytest.raises(AssertionError, match=rf"training waits for the GPU:\n\s*{place}"):
        check_waits(run.calls)
