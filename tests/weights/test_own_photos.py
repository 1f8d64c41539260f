"""Test that the command in docs/weights.md for a user's own photos trains a model that loads with
`vit.load` and performs better than chance."""

from __future__ import annotations

import shlex

import pytest
import torch
from processes import REPOSITORY, TINY, run_here, write_config

import vit
from vit.data.storage.opening import open_split

HERE = ["data.global_batch_size=12", "data.micro_batch_size=null", "train.compile=false"]


def command_of_the_page() -> list[str]:
    page = (REPOSITORY / "docs" / "weights.md").read_text().splitlines()
    [line] = [line for line in page if "launch/train.py" in line and "init.freeze" in line]
    return shlex.split(line.partition("launch/train.py")[2])


@pytest.mark.full
def test_the_command_for_own_photos_yields_a_model_better_than_chance(shards, tmp_path, capfd):
    config = write_config(tmp_path, shards, steps=12)
    run_here("launch/train.py", "--config", config, *TINY, f"run.dir={tmp_path / 'base'}")
    capfd.readouterr()
    _, recipe, *page_overrides = command_of_the_page()
    places = [f"data.root={shards}", f"run.dir={tmp_path / 'probe'}"]
    places.append(f"init.checkpoint={tmp_path / 'base'}")
    settings = dict(word.split("=", 1) for word in [*page_overrides, *TINY, *HERE, *places])
    overrides = [f"{key}={value}" for key, value in settings.items()]
    run_here("launch/train.py", "--config", REPOSITORY / recipe, *overrides)
    assert "in the EMA, which" not in capfd.readouterr().err
    trained = vit.load(tmp_path / "probe")
    split = open_split(shards, "val")
    images = [split.read(number) for number in range(split.num_samples)]
    probabilities = trained(trained.preprocess(*images)).softmax(1)
    assert probabilities.amax(1).mean() > 0.45, (
        "the accuracy must exceed 0.33, which guessing among three classes gives"
    )
    right = probabilities.argmax(1) == torch.from_numpy(split.index["label"].astype("int64"))
    assert right.float().mean() > 0.6
