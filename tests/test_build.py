"""Test the files of a run that is stopped during setup, and the errors for weights that do not fit
the model."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from processes import TINY
from safetensors.torch import save_file

import vit.extras.compose
from vit.config.io import from_dict, load_config
from vit.config.schema import ModelConfig
from vit.data.shuffle_quality import measure_shuffle
from vit.distributed.exit import Interrupted
from vit.distributed.process_group import World
from vit.hooks import start_record
from vit.model import create_model
from vit.system.files import WeightsError
from vit.training.initial_weights import load_initial_weights

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
        vit.extras.compose.build_run(settings, ALONE)
    assert (tmp_path / "run" / "config.yaml").exists()
    mark = tmp_path / "run" / "stopped_early"
    if number == signal.SIGTERM:
        assert json.loads(mark.read_text()) == {"step": 0, "signal": "SIGTERM"}
    else:
        assert not mark.exists()


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
