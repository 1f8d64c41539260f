"""Test that the samples of each step are compared with the plan before the model is evaluated or
saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import TINY, metrics

import vit.train
from vit.compose import build_run
from vit.config.io import load_config
from vit.data.batches import Batch
from vit.distributed.process_group import World
from vit.hooks.order_check import OrderHook
from vit.loggers.lines import read_metrics
from vit.monitor import Monitor
from vit.run import Run


def one_epoch(config: Path, folder: Path, *overrides: str) -> Run:
    often = ["train.steps=5", "eval.every_steps=5", "checkpoint.every_steps=5"]
    settings = load_config(config, [*TINY, f"run.dir={folder}", *often, *overrides])
    return build_run(settings, World(0, 1, torch.device("cpu")))


def test_compares_an_epochs_samples_before_evaluating_or_saving(config, tmp_path):
    vit.train.train(one_epoch(config, tmp_path / "run", "log.every_steps=5"))
    kinds = [line["kind"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert kinds == ["start", "ready", "epoch", "train", "eval", "checkpoint", "end"]


def test_does_not_evaluate_or_save_after_unplanned_rows(config, tmp_path, monkeypatch):
    queued = OrderHook.queued

    def miscount(self: OrderHook, batch: Batch) -> None:
        queued(self, batch)
        self._seen += 1

    monkeypatch.setattr(OrderHook, "queued", miscount)
    with pytest.raises(RuntimeError, match="batches 0 to 4, rows of rank 0: sample checksum"):
        vit.train.train(one_epoch(config, tmp_path / "run", "log.every_steps=5"))
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not left & {"predictions.npz", "weights", "checkpoints"}
    kinds = [line["kind"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert kinds == ["start", "ready", "end"]


@pytest.mark.parametrize("interrupted_at", [3, 5])
def test_after_an_interrupted_evaluation_each_batch_has_been_compared_once(
    config, tmp_path, monkeypatch, interrupted_at
):
    def interrupt(run: Run, monitor: Monitor) -> set[str]:
        run.signals.received = "SIGTERM"
        monitor.stop = True
        return set()

    monkeypatch.setattr(vit.train, "evaluate", interrupt)
    run = one_epoch(config, tmp_path / "run", f"eval.every_steps={interrupted_at}")
    assert vit.train.train(run) == "stopped"
    (line,) = metrics(tmp_path / "run", "epoch")
    assert (line["first_batch"], line["last_batch"]) == (0, interrupted_at - 1)
    assert metrics(tmp_path / "run", "checkpoint")[-1]["step"] == interrupted_at
