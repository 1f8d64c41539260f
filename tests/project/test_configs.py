"""Test that every recipe is a valid config, names its source, uses the values of its source, and
can train for a few steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from extras.deleted_extras import NO_REPORT
from processes import metrics, run

from vit.compose import build_run
from vit.config.io import ConfigError, load_config, load_with_origins, recipe_name, to_dict
from vit.distributed.process_group import World
from vit.model import create_model
from vit.system.gpus import find_gpu
from vit.train import train

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))
HEADER = ("source", "command")

# The table is from He et al. 2022 (arXiv 2111.06377), Table 11, "Training ViT from scratch on
# ImageNet", column ViT-B.
MAE_TABLE_11 = {
    "optim.name": "adamw",
    "optim.lr": 1e-4 * 4096 / 256,
    "optim.weight_decay": 0.3,
    "optim.betas": [0.9, 0.95],
    "optim.clip_grad_norm": None,
    "data.global_batch_size": 4096,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 20,
    "train.epochs": 300,
    "augment.randaugment_layers": 2,
    "augment.randaugment_magnitude": 9,
    "augment.magnitude_std": 0.5,
    "loss.label_smoothing": 0.1,
    "augment.mixup_alpha": 0.8,
    "augment.cutmix_alpha": 1.0,
    "model.drop_path_rate": 0.1,
    "ema.decay": 0.9999,
}
# The values for ViT-L and ViT-H are from the same table.
MAE_TABLE_11_LARGE = {**MAE_TABLE_11, "train.epochs": 200, "model.drop_path_rate": 0.2}
# The options are from the commands in facebookresearch/deit@7e160fe4:README_revenge.md, "finetuning
# for ViT-S, B and L at resolution 384x384". For options that the commands omit, the values are the
# defaults in main.py and timm.
DEIT3_FINETUNE_384 = {
    "optim.name": "adamw",  # --opt adamw
    "optim.lr": 1e-5,  # --lr 1e-5 --unscale-lr
    "optim.weight_decay": 0.1,  # --weight-decay 0.1
    "optim.betas": [0.9, 0.999],
    "optim.eps": 1e-8,
    "optim.clip_grad_norm": None,
    "data.global_batch_size": 512,  # --batch 32 --nodes 2 --ngpus 8, or 16 on 4 nodes
    "data.interpolation": "bicubic",
    "schedule.name": "cosine",  # --sched cosine
    "schedule.min_lr": 1e-5,
    "schedule.warmup_epochs": 5,  # --warmup-epochs 5
    "train.epochs": 20,  # --epochs 20
    "ema.decay": None,  # main.py computes averaged weights, but never evaluates them
    "augment.randaugment_layers": 2,  # --aa rand-m9-mstd0.5-inc1
    "augment.randaugment_magnitude": 9,
    "augment.magnitude_std": 0.5,
    "augment.crop_scale": [0.08, 1.0],
    "augment.hflip_prob": 0.5,
    "augment.mixup_alpha": 0.8,  # --mixup .8
    "augment.cutmix_alpha": 1.0,  # --cutmix 1.0
    "augment.mix_prob": 1.0,
    "augment.cutmix_switch_prob": 0.5,
    "loss.label_smoothing": 0.1,  # --smoothing 0.1
    "model.proj_drop_rate": None,  # --drop 0.0
    "eval.crop_pct": 1.0,  # --eval-crop-ratio 1.0
    "init.reset_head": False,  # main.py drops the head only if its shape differs
}
TABLES = {
    "vit_b16": MAE_TABLE_11,
    "vit_l16": MAE_TABLE_11_LARGE,
    "vit_h14": MAE_TABLE_11_LARGE,
    # The drop-path rate matches the base model, as in
    # affjljoo3581/deit3-jax@753d01ba:config/deit3/in1k.
    "vit_b16_ft384": {**DEIT3_FINETUNE_384, "model.drop_path_rate": 0.1, "model.image_size": 384},
    "vit_l16_ft384": {**DEIT3_FINETUNE_384, "model.drop_path_rate": 0.2, "model.image_size": 384},
    # 392 = 28 * 14
    "vit_h14_ft392": {**DEIT3_FINETUNE_384, "model.drop_path_rate": 0.2, "model.image_size": 392},
}
PUBLISHED = [path for path in RECIPES if recipe_name(path) in TABLES]


def all_sizes(paths: Iterable[Path]) -> list[Any]:
    """Return recipes as parameters of a test that only `make test-all` runs for all sizes."""
    return [
        pytest.param(path, id=path.stem, marks=[pytest.mark.full] * ("b16" not in path.stem))
        for path in paths
    ]


# In addition to the settings of its source, a recipe may set paths, hardware options, and the
# frequency of logs and evaluations. Recipes without a source in this file are tested in
# tests/extras/recipes/test_shipped.py.
OURS = {
    "model.name",
    "model.image_size",
    "init.checkpoint",
    "data.root",
    "data.micro_batch_size",
    "loader.num_workers",
    "train.precision",
    "train.compile",
    "eval.every_epochs",
    "eval.batch_size",
    "checkpoint.every_steps",
}


@pytest.mark.parametrize("path", RECIPES, ids=recipe_name)
def test_a_recipe_fits_the_schema_builds_and_names_its_source(path):
    config = load_config(path)
    with torch.device("meta"):
        create_model(config.model, num_classes=config.model.num_classes or 10)
    header = re.match(r"(#.*\n)+", path.read_text())
    assert header, "a recipe must start with a comment header"
    for word in HEADER:
        assert re.search(rf"^# {word}\s+\S", header[0], re.M), f"the header lacks '{word}'"
    assert re.search(r"^# (result|published)\s+\S", header[0], re.M)


@pytest.mark.parametrize("name", ["deit3/vit_b16_800ep", "configs/deit3/vit_b16_800ep.yaml"])
def test_a_recipe_in_a_folder_is_loaded_by_its_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(name)
    assert config.model.image_size == 192
    assert config.run.dir == "runs/deit3_vit_b16_800ep", "vit5/vit_b16 must not share runs/vit_b16"


def test_the_error_for_a_misspelled_recipe_lists_similar_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"recipe has this name; .*: deit3/vit_b16_800ep, "):
        load_config("deit3/vit_b16_80ep")


@pytest.mark.parametrize("path", RECIPES, ids=recipe_name)
def test_the_command_in_a_recipe_names_that_recipe(path):
    assert re.search(
        rf"^# command .*(--config|--finetune) configs/{recipe_name(path)}.yaml",
        path.read_text(),
        re.M,
    )


@pytest.mark.parametrize("path", PUBLISHED, ids=recipe_name)
def test_a_recipe_has_exactly_the_values_in_the_table_of_its_source(path):
    config, origins = load_with_origins(path)
    values = to_dict(config)
    table = TABLES[path.stem]
    for key, expected in table.items():
        section, name = key.split(".")
        assert values[section][name] == (
            pytest.approx(expected) if isinstance(expected, float) else expected
        ), key
    keys = {key for key, origin in origins.items() if origin.startswith(str(path))}
    assert keys <= table.keys() | OURS, "these values have no source"


@pytest.mark.parametrize("path", all_sizes(PUBLISHED))
def test_derived_values_in_a_header_follow_from_the_recipe(path):
    """The header of a recipe contains the number of steps on ImageNet, and the hours and memory
    that `launch/plan.py` predicts for 8 H200 GPUs."""
    make_forecast = pytest.importorskip("vit.extras.planner.forecast").make_forecast
    config = load_config(path, ["data.root=/none"])
    text = path.read_text()
    header = " ".join(re.match(r"(#.*\n)+", text)[0].split())
    forecast = make_forecast(config, 8, find_gpu("H200"))
    if stated := re.search(r"are ([\d,]+) steps", header):
        assert int(stated[1].replace(",", "")) == forecast.plan.total_steps
    if stated := re.search(r"# fits an 80 GB GPU.*, (\d+) micro-steps", text):
        assert int(stated[1]) == forecast.plan.accumulation_steps
    hours = " to ".join(f"{end:.3g}" for end in forecast.compute_h)
    assert f"8 H200: {hours} h of compute (launch/plan.py)" in header
    assert f"about {forecast.memory.total / 2**30:.0f} GiB (launch/plan.py)" in text
    page = (ROOT / "docs" / "plans.md").read_text()
    assert f"| `{path.stem}` | H200 | {forecast.memory.total / 2**30:.1f} |" in page
    assert f"| {forecast.largest_micro_batch_size} | {hours} |" in page


def test_the_page_of_plans_agrees_with_every_header():
    page = (ROOT / "docs" / "plans.md").read_text()
    stated = []
    for path in RECIPES:
        text = path.read_text()
        if hours := re.search(r"8 H200: (\S+ to \S+) h", text):
            (memory,) = re.findall(r"about (\d+) GiB \(launch/plan.py\)", text)
            stated.append(f"| `{recipe_name(path)}` | {memory} | {hours[1]} |")
    assert re.findall(r"^\| `\S+` \| \d+ \| \S+ to \S+ \|$", page, re.M) == stated
    assert len(stated) > 30


FINETUNED = [path for path in PUBLISHED if "_ft" in path.stem]


@pytest.mark.parametrize("path", FINETUNED, ids=recipe_name)
def test_a_finetuning_recipe_starts_from_the_run_of_its_base(path):
    config = load_config(path)
    base = load_config(ROOT / "configs" / f"{path.stem.partition('_ft')[0]}.yaml")
    assert config.init.checkpoint == base.run.dir
    assert (config.model.name, config.model.drop_path_rate) == (
        base.model.name,
        base.model.drop_path_rate,
    )
    assert f"--checkpoint {base.run.dir} --finetune configs/{path.name}" in path.read_text()
    assert config.model.image_size == int(path.stem.partition("_ft")[2])


SMALL = [
    "model.embed_dim=32",
    "model.depth=2",
    "model.num_heads=2",
    "data.global_batch_size=8",
    "loader.num_workers=0",
    "train.steps=2",
    "train.precision=fp32",
    "train.compile=false",
    "train.device=cpu",
    "eval.every_steps=2",
    "eval.batch_size=8",
    "log.every_steps=1",
    "log.wandb=off",
    *NO_REPORT,
]


def patches(name: str, side: int) -> str:
    patch_size = int(re.search(r"_[blh](\d+)", name)[1])
    return f"model.image_size={side * patch_size}"


@pytest.fixture(scope="module")
def bases(tmp_path_factory, shards):
    made: dict[str, Path] = {}

    def base(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("bases") / name
            overrides = [*SMALL, patches(name, 2), f"data.root={shards}", f"run.dir={folder}"]
            assert (
                train(
                    build_run(
                        load_config(ROOT / "configs" / f"{name}.yaml", overrides),
                        World(0, 1, torch.device("cpu")),
                    )
                )
                == "finished"
            )
            made[name] = folder
        return made[name]

    return base


@pytest.mark.parametrize("path", all_sizes(path for path in PUBLISHED if path not in FINETUNED))
def test_a_small_recipe_trains_and_is_evaluated(path, bases):
    folder = bases(path.stem)
    losses = [line["loss"] for line in metrics(folder, "train")]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(1.0986, abs=2e-3), (
        "a zero head of three classes starts at a loss of ln 3"
    )
    (last,) = metrics(folder, "eval")
    assert last["num_images"] == last["num_images_ema"] == 23


@pytest.mark.parametrize("path", all_sizes(FINETUNED))
def test_a_small_recipe_is_finetuned_from_its_base(path, bases, tmp_path, shards, capsys):
    base = bases(path.stem.partition("_ft")[0])
    overrides = [
        *SMALL,
        patches(path.stem, 3),
        f"data.root={shards}",
        f"run.dir={tmp_path / 'run'}",
        f"init.checkpoint={base}",
    ]
    capsys.readouterr()
    assert (
        train(build_run(load_config(path, overrides), World(0, 1, torch.device("cpu"))))
        == "finished"
    )
    assert (
        f"{base}/weights/last_ema.safetensors: positions resampled from 2x2 to 3x3"
        in capsys.readouterr().err
    )
    assert [line["num_images"] for line in metrics(tmp_path / "run", "eval")] == [23]
    assert len(metrics(tmp_path / "run", "train")) == 2


@pytest.mark.slow
def test_the_second_command_of_a_finetuning_recipe_evaluates_before_and_after(
    bases, tmp_path, shards
):
    base = bases("vit_b16")
    name = "vit_b16_ft384"
    overrides = [*SMALL, patches(name, 3), f"data.root={shards}", f"run.dir={tmp_path / 'run'}"]
    done = run(
        "launch/eval.py",
        "--checkpoint",
        base,
        "--finetune",
        f"configs/{name}.yaml",
        "--json",
        *overrides,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_images"] == 23
    assert (tmp_path / "run" / "weights" / "last.safetensors").exists()


@pytest.mark.full
@pytest.mark.slow
def test_vit_b16_does_its_first_steps_on_a_cpu_over_any_shards(shards, tmp_path):
    """If the CPU has no bf16 instructions, the test uses fp32, because a bf16 step would take
    minutes."""
    precision = "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"
    done = run(
        "launch/train.py",
        "--config",
        "configs/vit_b16.yaml",
        f"data.root={shards}",
        "train.steps=2",
        "data.global_batch_size=8",
        f"run.dir={tmp_path / 'run'}",
        f"train.precision={precision}",
        "train.compile=false",
        "log.wandb=off",
        "log.every_steps=1",
        *NO_REPORT,
        ranks=2,
        timeout_s=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert losses[0] == pytest.approx(1.0986, abs=2e-3), (
        "a zero head of three classes starts at a loss of ln 3"
    )
    assert len(losses) == 2
