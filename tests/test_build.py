"""Test the files of a run that is stopped during setup, and the errors for weights that do not fit
the model."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from processes import TINY, metrics, train
from safetensors.torch import save_file

import vit.compose
from vit.build import build
from vit.config.io import from_dict, load_config
from vit.config.schema import ModelConfig
from vit.distributed.exit import Interrupted
from vit.distributed.process_group import World
from vit.model import create_model
from vit.run import Run
from vit.start import start_record
from vit.start.initial_weights import load_initial_weights
from vit.start.shuffle_quality import measure_shuffle
from vit.system.files import WeightsError

ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_only_preemption_leaves_a_mark_in_a_new_run(config, tmp_path, monkeypatch, number):
    """The test sends the signal immediately after the run folder has been created and locked."""

    def interrupted(*arguments):
        os.kill(os.getpid(), number)
        return measure_shuffle(*arguments)

    monkeypatch.setattr(start_record, "measure_shuffle", interrupted)
    settings = load_config(config, [*TINY, f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(Interrupted):
        vit.compose.build_run(settings, ALONE)
    assert (tmp_path / "run" / "config.yaml").exists()
    mark = tmp_path / "run" / "stopped_early"
    if number == signal.SIGTERM:
        assert json.loads(mark.read_text()) == {"step": 0, "signal": "SIGTERM"}
    else:
        assert not mark.exists()


def start_while_another_trains(config, run_dir, *overrides: str) -> Run:
    """Start a run in a new folder. After the run has looked for a checkpoint, and before it locks
    the folder, a real process trains four steps in this folder and exits."""

    def train_elsewhere(*_: object) -> dict[str, object]:
        train(config, run_dir, "train.steps=4", "checkpoint.every_steps=2")
        return {}

    words = [*TINY, f"run.dir={run_dir}", "train.steps=4", "checkpoint.every_steps=2", *overrides]
    settings = load_config(config, words)
    parts = replace(vit.compose.parts_of(settings), load_weights=train_elsewhere)
    return build(settings, ALONE, (), parts)


@pytest.mark.slow
def test_the_second_of_two_starts_in_a_new_folder_looks_again(config, tmp_path):
    with start_while_another_trains(config, tmp_path / "same") as run:
        assert run.state.step == 4
        assert run.state.restarts == 1
    with pytest.raises(ValueError, match=r"optim\.lr"):
        start_while_another_trains(config, tmp_path / "other", "optim.lr=0.5")
    assert [line["step"] for line in metrics(tmp_path / "other", "start")] == [0]


def test_an_ended_start_leaves_no_mark_in_the_folder_of_another_run(config, tmp_path):
    """The folder did not exist when the run was started, but another process has created it
    since."""
    run_dir = tmp_path / "run"

    def create_elsewhere(*_: object) -> dict[str, object]:
        run_dir.mkdir()
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    settings = load_config(config, [*TINY, f"run.dir={run_dir}"])
    parts = replace(vit.compose.parts_of(settings), load_weights=create_elsewhere)
    with pytest.raises(Interrupted):
        build(settings, ALONE, (), parts)
    assert not any(run_dir.iterdir())


@pytest.mark.parametrize("num_positions", [5, 4])
def test_weights_with_two_sets_of_positions_are_named(tmp_path, num_positions):
    config = ModelConfig(name="vit_ti16", image_size=32)
    model = create_model(config, num_classes=3)
    positions = torch.zeros(2, num_positions, 192)
    path = tmp_path / "two.safetensors"
    save_file({**model.state_dict(), "pos_embed": positions}, path)
    settings = from_dict(
        {
            "model": {"name": "vit_ti16", "image_size": 32},
            "data": {"root": "data"},
            "train": {"steps": 1},
            "init": {"checkpoint": str(path)},
        },
        "test",
    )
    data = SimpleNamespace(class_names=[], num_classes=3)
    with pytest.raises(WeightsError, match=rf"two.safetensors: .*pos_embed \(2, {num_positions}, "):
        load_initial_weights(model, settings, data, ALONE)
