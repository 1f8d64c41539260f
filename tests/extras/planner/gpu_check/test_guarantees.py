"""Test on a CPU that each check of `make gpu-check` fails if its guarantee is deliberately
broken."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import kills
import levers
import numpy as np
import pytest
import torch
from gpu_check_lines import Line, run_part
from proc import is_alive

from vit.data.loader import Loader
from vit.model import Block
from vit.start import compiling
from vit.step import TrainStep

guarantees = pytest.importorskip("guarantees")
CPU = torch.device("cpu")


def verdicts(lines: Iterator[Line]) -> list[bool | None]:
    return [line.passed for line in lines]


def test_a_changed_batch_breaks_the_promise_of_slots(monkeypatch):
    assert verdicts(guarantees.page_locked_slots(CPU)) == [True]
    unchanged = Loader.__next__

    def spoilt(loader: Loader):
        batch = unchanged(loader)
        if batch.labels[0] == 7:
            batch.weights[3] = 8.0
        return batch

    monkeypatch.setattr(Loader, "__next__", spoilt)
    [line] = guarantees.page_locked_slots(CPU)
    assert line.passed is False
    assert "39 of 40" in line.text


@pytest.mark.slow
def test_a_change_of_the_arithmetic_breaks_the_promise_of_equal_steps(monkeypatch):
    """The test scales the input of one of two models by 1.01."""
    monkeypatch.setattr(guarantees, "STEPS", 3)
    assert set(verdicts(guarantees.equals_the_cpu(CPU))) == {True}
    steps: list[TrainStep] = []
    unchanged = guarantees.make_step

    def make_step(*arguments):
        step, batches = unchanged(*arguments)
        steps.append(step)
        # The result of the second step is compared with the result on the CPU.
        if len(steps) == 2:
            plain = step.augment.normalize
            step.augment.normalize = lambda images: plain(images) * 1.01
            block = step.model.blocks[0]
            block.register_forward_hook(lambda module, inputs, output: output * 1.1)
        return step, batches

    monkeypatch.setattr(guarantees, "make_step", make_step)
    passed = {line.what: line.passed for line in guarantees.equals_the_cpu(CPU)}
    assert passed["3 fp32 steps equal the CPU's"] is False
    assert passed["an evaluation's logits in fp32 are close to the CPU's in fp32"] is False


@pytest.mark.full
def test_a_compiled_graph_per_block_breaks_the_promise(monkeypatch):
    captured = partial(compiling.compile_blocks, backend="eager")
    monkeypatch.setattr(compiling, "compile_blocks", captured)
    [line] = guarantees.graphs_as_planned(CPU)
    assert line.numbers == {"training": 1, "evaluation": 1, "later": 0}
    assert line.passed

    factors = itertools.count(1.0, 0.01)
    create = Block.__init__

    def create_with_factor(block: Block, *arguments: object) -> None:
        create(block, *arguments)
        block.factor = next(factors)  # a Python number that differs between blocks

    def add_mlp(block: Block, x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        return x * block.factor

    monkeypatch.setattr(Block, "__init__", create_with_factor)
    monkeypatch.setattr(Block, "add_mlp", add_mlp)
    [line] = guarantees.graphs_as_planned(CPU)
    assert line.passed is False, line.text


# --- levers ---------------------------------------------------------------------------------------


SMALL_LEVERS = ("model.name=vit_ti16", "model.depth=2", "model.image_size=32")


@pytest.mark.full
def test_each_lever_has_a_line_and_missing_kernels_are_not_failures(monkeypatch):
    captured = partial(compiling.compile_blocks, backend=lambda graph, inputs, **_: graph)
    monkeypatch.setattr(compiling, "compile_blocks", captured)
    rows = "data.global_batch_size=8"
    lines = list(levers.on_one_device(CPU, *SMALL_LEVERS, rows, num_steps=4))
    assert [line.what for line in lines] == list(levers.LEVERS)
    passed = {line.what: line.passed for line in lines}
    missing = {"attention: cuDNN", "attention: efficient", "attention: flash3"}
    assert {what for what, verdict in passed.items() if verdict is None} == missing
    assert all(verdict for what, verdict in passed.items() if what not in missing), lines
    for line in lines:
        if line.passed:
            assert line.numbers["on"]["images_per_s"] > 0
            assert " images/s (" in line.text


def test_a_lever_that_changes_the_loss_or_raises_an_error_fails(monkeypatch):
    off = levers.Measured(100.0, 2.0, 0.5)
    assert levers.compare("", off, levers.Measured(110.0, 2.0, 0.55)).text.endswith("turn it on")
    assert levers.compare("", off, levers.Measured(101.0, 1.5, 0.55)).text.endswith("turn it on")
    assert levers.compare("", off, levers.Measured(101.0, 2.0, 0.55)).text.endswith("leave it")
    worse = levers.compare("", off, levers.Measured(200.0, 1.0, 0.65))
    assert worse.passed is False
    assert worse.text.endswith("leave it")

    def measure(*arguments):
        raise RuntimeError("CUDA graphs overwrote a tensor\nStack trace: ...")

    monkeypatch.setattr(levers, "measure", measure)
    lines = list(levers.on_one_device(CPU, num_steps=4))
    assert verdicts(iter(lines)) == [False] * len(levers.LEVERS)
    assert lines[0].text == "RuntimeError: CUDA graphs overwrote a tensor"


def test_the_digits_can_be_learned(monkeypatch):
    settings = (*SMALL_LEVERS, "data.global_batch_size=64", "train.precision=fp32")
    measured = levers.measure(levers._config(*settings), CPU, 60)
    assert measured.loss < 0.9 * np.log(10)


# --- parts of the check ---------------------------------------------------------------------------


def test_errors_overruns_and_crashes_become_lines_and_keep_earlier_lines():
    first = Line("first", True, "kept")

    def fails() -> Iterator[Line]:
        yield first
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    def hangs() -> Iterator[Line]:
        yield first
        time.sleep(3600)

    def crashes() -> Iterator[Line]:
        yield first
        os.kill(os.getpid(), signal.SIGKILL)

    assert run_part("part", fails, 60) == [
        first,
        Line("part", False, "RuntimeError: CUDA error: an illegal memory access"),
    ]
    assert run_part("part", crashes, 60) == [
        first,
        Line("part", False, f"its process ended with status -{signal.SIGKILL.value}"),
    ]
    assert run_part("part", hangs, 2) == [first, Line("part", False, "not done within its 2 s")]
    assert run_part("part", hangs, 60, left_s=2) == [
        first,
        Line("part", None, "not finished within the 2 s that were left"),
    ]


def test_processes_that_a_part_started_end_with_it(tmp_path: Path):
    pid_file = tmp_path / "pid"

    def starts() -> Iterator[Line]:
        child = os.fork()
        if not child:
            time.sleep(3600)
        pid_file.write_text(str(child))
        yield Line("started", True, "")
        time.sleep(3600)

    run_part("part", starts, 3)
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


# --- killed trainings -----------------------------------------------------------------------------

TINY = ("train.device=cpu", "train.precision=fp32", "model.depth=2", "model.image_size=32")


@pytest.mark.full
def test_a_killed_run_is_compared_to_the_bit(tmp_path: Path, monkeypatch):
    place = kills.make_place(tmp_path, *TINY, "loader.num_workers=0")
    [line] = kills.killed_and_resumed(place, deterministic=True, promised=True)
    assert line.passed, str(line)
    assert line.numbers["restarts"] == 1
    name = f"checkpoints/step_{kills.NUM_STEPS:08d}/state.safetensors"
    whole, killed = (tmp_path / f"{kind}_with" / name for kind in ("whole", "killed"))
    data = bytearray(killed.read_bytes())
    data[-1] ^= 1
    killed.write_bytes(data)
    assert len(kills._different_tensors(tmp_path / "whole_with", tmp_path / "killed_with")) == 1
    assert whole.read_bytes() != killed.read_bytes()
