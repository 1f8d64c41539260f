"""Every recipe fits the schema, says where it comes from, and does its first steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import metrics, run

from vit.config_io import load_config, to_dict
from vit.model import create_model

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
HEADER = ("source", "command")

# He et al. 2022 (arXiv 2111.06377), Table 11, "Training ViT from scratch on ImageNet".
MAE_TABLE_11 = {
    "optim.name": "adamw",
    "optim.lr": 1e-4 * 4096 / 256,
    "optim.weight_decay": 0.3,
    "optim.betas": [0.9, 0.95],
    "data.global_batch_size": 4096,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 20,
    "train.epochs": 300,
    "augment.randaugment_layers": 2,
    "augment.randaugment_magnitude": 9,
    "augment.randaugment_magnitude_std": 0.5,
    "loss.label_smoothing": 0.1,
    "augment.mixup_alpha": 0.8,
    "augment.cutmix_alpha": 1.0,
    "model.drop_path_rate": 0.1,
    "train.ema_decay": 0.9999,
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_the_schema_builds_and_names_its_source(path):
    import torch

    config = load_config(path).config
    with torch.device("meta"):
        create_model(config.model.name, config.model.image_size, config.model.num_classes or 10, **config.model.fields())
    header = re.match(r"(#.*\n)+", path.read_text())
    assert header, "a recipe opens with a header"
    for word in HEADER:
        assert re.search(rf"^# {word}\s+\S", header[0], re.M), f"the header lacks '{word}'"
    assert re.search(r"^# (result|published)\s+\S", header[0], re.M)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_command_in_a_recipe_names_that_recipe(path):
    assert re.search(rf"^# command .*(--config|--finetune) configs/{path.name}", path.read_text(), re.M)


def test_vit_b16_is_the_table_of_its_source():
    values = to_dict(load_config(ROOT / "configs" / "vit_b16.yaml").config)
    for key, expected in MAE_TABLE_11.items():
        section, name = key.split(".")
        assert values[section][name] == pytest.approx(expected), key


@pytest.mark.slow
def test_vit_b16_does_its_first_steps_on_a_cpu_over_any_shards(shards, tmp_path):
    done = run("launch/train.py", "--config", "configs/vit_b16.yaml", f"data.root={shards}", "train.steps=2", "data.global_batch_size=8",
               f"run.dir={tmp_path / 'run'}", "log.wandb=off", "log.every_steps=1", ranks=2, timeout_s=500)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert losses[0] == pytest.approx(1.0986, abs=2e-3), "a zero head of three classes starts at ln 3"
    assert len(losses) == 2
