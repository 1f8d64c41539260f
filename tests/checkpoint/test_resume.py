"""Test which weights files a resumed run keeps, and that its metrics continue without a gap."""

from __future__ import annotations

import shutil

import pytest
import torch
from processes import TINY, Background, metrics
from processes import train as train_elsewhere
from torch import Tensor

from vit.compose import build_run
from vit.config.io import load_config
from vit.distributed.process_group import World
from vit.loggers.lines import read_metrics
from vit.run_folder.paths import complete_checkpoints
from vit.train import train
from vit.weights.files import read_weights


def test_metrics_of_intervals_and_epochs_split_by_a_kill_equal_the_uninterrupted_ones(
    config, tmp_path
):
    """The run is killed after the checkpoint at step 9, in the middle of a logging interval and in
    the middle of an epoch."""
    folder = tmp_path / "run"
    often = ("train.steps=12", "log.every_steps=5", "checkpoint.every_steps=3")

    def go_on() -> list[tuple]:
        settings = load_config(config, [*TINY, *often, f"run.dir={folder}"])
        with build_run(settings, World(0, 1, torch.device("cpu"))) as run:
            train(run)
        names = ("kind", "step", "loss", "first_batch", "last_batch", "sample_checksum", "exact")
        lines = read_metrics(folder / "metrics.jsonl")
        return [
            tuple(line.get(name) for name in names)
            for line in lines
            if line["kind"] in ("train", "epoch")
        ]

    whole = go_on()
    assert [line[1] for line in whole] == [5, 5, 10, 10, 12, 12]
    shutil.rmtree(folder / "checkpoints" / "step_00000012")
    assert go_on() == whole
    assert [line["step"] for line in metrics(folder, "start")] == [0, 9]


@pytest.mark.parametrize("present", ["discarded", "gone"])
def test_the_best_weights_never_come_from_an_abandoned_branch(config, tmp_path, capfd, present):
    """The test removes the checkpoint at step 6 but keeps the weights, as a kill could. The second
    attempt trains with a different learning rate, so its weights differ."""
    folder = tmp_path / "run"
    settings_of_run = ("ema.decay=null", "train.steps=6", "eval.every_steps=3", f"run.dir={folder}")

    def weights_of(name: str) -> tuple[int, dict[str, Tensor]]:
        loaded = read_weights(folder / "weights" / f"{name}.safetensors")
        assert loaded.step is not None
        return loaded.step, loaded.weights

    def go_on(*overrides: str) -> None:
        settings = load_config(config, [*TINY, *settings_of_run, *overrides])
        changed = [override.partition("=")[0] for override in overrides]
        with build_run(settings, World(0, 1, torch.device("cpu")), changed) as run:
            train(run)

    go_on("optim.lr=1e-2")
    assert weights_of("best")[0] == 6, "the best evaluation of the first attempt must be at step 6"
    shutil.rmtree(folder / "checkpoints" / "step_00000006")
    if present == "gone":
        (folder / "weights" / "best.safetensors").unlink()
    # With a learning rate of 1e-30, the evaluations at steps 3 and 6 are equal, so step 6 is not a
    # new best.
    go_on("optim.lr=1e-30")
    assert "resumed at step 3 of 6" in (messages := capfd.readouterr().err)
    step, best = weights_of("best")
    last = weights_of("last")[1]
    assert step == 6
    assert best.keys() == last.keys()
    assert all(torch.equal(best[name], value) for name, value in last.items())
    reason = (
        "from step 6, which the run has not" if present == "discarded" else "missing or damaged"
    )
    assert f"best.safetensors is {reason}" in messages


@pytest.mark.slow
def test_keep_every_keeps_its_checkpoints_after_kills(config, tmp_path):
    folder = tmp_path / "run"
    often = ("checkpoint.every_steps=1", "checkpoint.keep_last=1", "checkpoint.keep_every=4")
    for step in (5, 9):
        killed = Background(config, folder, *often)
        killed.wait_for_checkpoint(step)
        killed.kill_all()
    train_elsewhere(config, folder, *often, ranks=2)
    names = [path.name for path in complete_checkpoints(folder)]
    assert names == ["step_00000012", "step_00000008", "step_00000004"]
