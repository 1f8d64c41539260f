"""Test the recipes in configs/ that reproduce published ones.

Each recipe must equal its imported source except for the differences listed in its header, start
from the stage that it names, and complete its first steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from processes import metrics

from vit.compose import build_run
from vit.config.io import load_config, load_with_origins, recipe_name, to_dict
from vit.distributed.process_group import World
from vit.system.gpus import find_gpu
from vit.train import train

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
PUBLISHED = yaml.safe_load((HERE / "published.yaml").read_text())
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
BY_RUN = {load_config(path).run.dir: path for path in CONFIGS}
"""Maps each run folder to its recipe."""
CHEAPEST = "big_vision/vit_s16_90ep"
"""The only recipe of which `make test` trains a small version. The tests of all other recipes are
marked `full`."""
# Settings for paths, hardware and the frequency of evaluations may differ from the published
# recipe.
PLACES = {
    "data.root",
    "data.micro_batch_size",
    "loader.num_workers",
    "train.compile",
    "eval.every_epochs",
    "eval.every_steps",
    "eval.batch_size",
    "eval.reference",
    "checkpoint.every_steps",
    "log.every_steps",
    "init.checkpoint",
    "run.dir",
}


# Sources: Dosovitskiy et al. 2021 (arXiv 2010.11929), Table 3 ("ImageNet, ViT-*"), B.1, and Table
# 4; google-research/vision_transformer@c6de1e53: vit_jax/input_pipeline.py and configs/.
PAPER = {
    "model.name": "vit_b16",
    "model.image_size": 224,
    "model.mlp_layer": "mlp_tanh",  # Flax's GELU, in vit_jax/models_vit.py
    "model.representation_size": 768,
    "model.weight_init": "jax",
    "model.pos_drop_rate": 0.1,
    "model.proj_drop_rate": 0.1,
    "data.global_batch_size": 4096,
    "data.mean": [0.5, 0.5, 0.5],
    "data.std": [0.5, 0.5, 0.5],
    "data.interpolation": "bilinear",
    "augment.crop_scale": [0.05, 1.0],
    "optim.name": "adamw",
    "optim.lr": 3e-3,
    "optim.weight_decay": 0.3,
    "optim.betas": [0.9, 0.999],
    "optim.clip_grad_norm": 1.0,
    "schedule.name": "cosine",
    "schedule.warmup_steps": 10_000,
    "train.epochs": 300,
    "loss.label_smoothing": 0.0,
}
PAPER_FINETUNE = {
    **{key: PAPER[key] for key in ("data.mean", "data.std", "data.interpolation")},
    "augment.crop_scale": [0.05, 1.0],
    "model.name": "vit_b16",
    "model.mlp_layer": "mlp_tanh",
    "model.image_size": 384,
    "model.representation_size": None,
    "model.proj_drop_rate": None,
    "data.global_batch_size": 512,
    "optim.name": "sgd",
    "optim.lr": 0.03,
    "optim.momentum": 0.9,
    "optim.nesterov": False,
    "optim.weight_decay": 0.0,
    "optim.clip_grad_norm": 1.0,
    "schedule.name": "cosine",
    "schedule.warmup_steps": 500,
    "train.steps": 20_000,
    "init.reset_head": True,
    "eval.crop_pct": 1.0,
    "eval.crop_mode": "squash",
}
# Sources: mlcommons/algorithmic-efficiency@2c90454f: tuning_search_space.json, jax_nadamw.py,
# cosine_warmup.py; workload.py and models.py of imagenet_vit, workload.py of imagenet_resnet.
ALGOPERF = {
    "model.name": "vit_s16",
    "model.image_size": 224,
    "model.class_token": False,
    "model.global_pool": "norm_avg",
    "model.mlp_layer": "mlp_tanh",
    "model.pos_embed": "sincos2d",
    "model.representation_size": 384,
    "model.weight_init": "jax",
    "data.global_batch_size": 1024,
    "data.mean": [0.485, 0.456, 0.406],
    "data.std": [0.229, 0.224, 0.225],
    "data.interpolation": "bicubic",
    "augment.crop_scale": [0.08, 1.0],
    "augment.randaugment_layers": 2,
    "augment.randaugment_ops": "big_vision",
    "augment.randaugment_magnitude": 10.0,
    "augment.mixup_alpha": 0.2,
    "loss.label_smoothing": 0.0,
    "optim.name": "nadamw",
    "optim.lr": 0.0008445074561975979,
    "optim.betas": [0.8895758153482813, 0.9978504782314613],
    "optim.eps": 1e-8,
    "optim.weight_decay": 0.08135402759553023,
    "optim.no_weight_decay": "nothing",
    "optim.clip_grad_norm": None,
    "schedule.name": "cosine",
    "schedule.min_lr": 0.0,
    "schedule.warmup_steps": 6_999,
    "train.steps": 167_999,
    "eval.crop_pct": 0.875,
}
# Source: TanayPratapSingh/distributed-vit-cifar10@2e788b10: src/dvit/model.py, data.py, engine.py,
# train.py, configs/experiments.yaml (kaggle: t4-ws1-fp32).
DISTRIBUTED_VIT = {
    "model.name": "vit_ti4",
    "model.image_size": 32,
    "model.embed_dim": 192,
    "model.depth": 6,
    "model.num_heads": 3,
    "model.mlp_ratio": 2.0,
    "model.drop_path_rate": 0.1,
    "model.weight_init": "mha",
    "data.global_batch_size": 128,
    "data.mean": [0.4914, 0.4822, 0.4465],
    "data.std": [0.2470, 0.2435, 0.2616],
    "augment.crop": "padded",
    "augment.hflip_prob": 0.5,
    "loss.label_smoothing": 0.1,
    "optim.name": "adamw",
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.95],
    "optim.weight_decay": 0.05,
    "optim.clip_grad_norm": 1.0,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 2.0,
    "schedule.warmup_lr": 0.0,
    "schedule.min_lr": 0.0,
    "train.epochs": 30.0,
    "train.precision": "fp32",
    "eval.crop_pct": 1.0,
}
TABLES = {
    "small/distributed_vit_cifar10": DISTRIBUTED_VIT,
    "paper/vit_b16_300ep": PAPER,
    "paper/vit_b16_300ep_ft384": PAPER_FINETUNE,
    "algoperf/vit_s16": ALGOPERF,
}


def entry(path: Path, word: str) -> str:
    """Return the text that follows `word` in a recipe's header, as one line. Return "" if the
    header does not contain `word`."""
    match = re.search(rf"^# {word}\s((?:.*\n)(?:#   .*\n)*)", path.read_text(), re.M)
    return " ".join(re.sub(r"^# ", "", match[1], flags=re.M).split()) if match else ""


# Maps each recipe to its source: a command in published.yaml, or another recipe. The recipe may
# differ from its source only as its header states.
EQUALS = {
    "augreg/vit_b16_300ep": "bv_augreg_b16_strong2",
    "big_vision/vit_s16_300ep": "bv_s16_300ep",
    "big_vision/vit_s16_90ep": "bv_s16_90ep",
    "deit/vit_b16_300ep": "deit_b16",
    "deit/vit_b16_300ep_ft384": "deit_b16_ft384",
    "deit/vit_b16_distilled_300ep": "deit_b16_distilled",
    "deit3/vit_b16_400ep": "jax_deit3_b16_400ep",
    "deit3/vit_b16_400ep_ft224": "jax_deit3_b16_ft",
    "deit3/vit_b16_800ep": "deit3_b16_800ep",
    "deit3/vit_b16_800ep_ft224": "deit3_b16_ft224",
    "deit3/vit_b16_800ep_ft384": "deit3_b16_ft384",
    "deit3/vit_h14_400ep": "jax_deit3_h14_400ep",
    "deit3/vit_h14_400ep_ft224": "jax_deit3_h14_ft",
    "deit3/vit_h14_800ep": "deit3_h14_800ep",
    "deit3/vit_h14_800ep_ft224": "deit3_h14_ft224",
    "deit3/vit_l16_400ep": "jax_deit3_l16_400ep",
    "deit3/vit_l16_400ep_ft224": "jax_deit3_l16_ft",
    "deit3/vit_l16_800ep": "deit3_l16_800ep",
    "deit3/vit_l16_800ep_ft224": "deit3_l16_ft224",
    "deit3/vit_l16_800ep_ft384": "deit3_l16_ft384",
    "deit3/vit_s16_400ep": "jax_deit3_s16_400ep",
    "deit3/vit_s16_800ep": "deit3_s16_800ep",
    "deit3/vit_s16_800ep_ft384": "deit3_s16_ft384",
    "mae/vit_b16_ft": "mae_b16_ft",
    "muon/vit_b16": "configs/vit_b16.yaml",
    "torchvision/vit_b16_300ep": "torchvision_b16",
    "vit5/vit_b16": "vit5_b16",
    "vit5/vit_b16_ft224": "vit5_b16_ft",
    "vit5/vit_l16": "vit5_l16",
    "vit5/vit_l16_ft224": "vit5_l16_ft",
    "vit5/vit_s16": "vit5_s16",
}


def flat(config) -> dict:
    return {
        f"{section}.{key}": value
        for section, values in to_dict(config).items()
        for key, value in values.items()
    }


@pytest.mark.parametrize("name", EQUALS)
def test_a_recipe_equals_its_source_except_for_the_differences_in_its_header(name, imported):
    path = ROOT / "configs" / f"{name}.yaml"
    differences = entry(path, "differs")
    source = EQUALS[name]
    if source.startswith("configs/"):
        theirs = flat(load_config(ROOT / source))
        assert differences.startswith(f"from {source} in ")
    else:
        theirs = flat(imported(source).config())
        assert entry(path, "source").startswith(PUBLISHED[source]["source"])
    ours = flat(load_config(path))
    unlike = {key: ours[key] for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}
    unlike = {key: value for key, value in unlike.items() if key not in PLACES}
    stated = {
        key: yaml.safe_load(value)
        for key, value in re.findall(r"(\w+\.\w+) (\[[^]]*\]|\S+): ", differences)
    }
    assert unlike == stated
    assert ours.keys() == theirs.keys() or "optim.name" in stated


# Maps each recipe to the importer's sentences about the parts in which our network differs from the
# original program's. tests/model/test_golden.py finds these parts.
PARTS = {
    "augreg/vit_b16_300ep": "learned positions of std 1 / sqrt(width)",
    "deit/vit_b16_300ep": "a class token of std 0.02",
    "deit/vit_b16_distilled_300ep": "DeiT decays the distillation token, this project does not",
    "deit3/vit_b16_400ep": "normal values of std 0.02, truncated",
    "deit3/vit_b16_800ep": "a class token of std 0.02",
    "torchvision/vit_b16_300ep": "Xavier's in MLPs and attention",
    "vit5/vit_b16": "a class token of std 0.02",
}


@pytest.mark.parametrize("name", PARTS)
def test_the_importer_names_the_parts_that_differ(name, imported):
    findings = imported(EQUALS[name]).reading.findings
    texts = [finding.text for finding in findings if finding.verdict == "differs"]
    assert [text for text in texts if PARTS[name] in text], texts


@pytest.mark.parametrize("name", TABLES)
def test_a_recipe_has_exactly_the_values_of_its_sources_table(name):
    path = ROOT / "configs" / f"{name}.yaml"
    config, origins = load_with_origins(path)
    values = flat(config)
    assert {key: values[key] for key in TABLES[name]} == TABLES[name]
    set_keys = {key for key, origin in origins.items() if origin.startswith(str(path))}
    assert set_keys <= TABLES[name].keys() | PLACES, "a setting has no source"


def test_every_recipe_is_compared_with_a_source():
    """Each recipe either states the source `none`, or is listed in `EQUALS`, in `TABLES` or in
    tests/project/test_configs.py."""
    config_tests = (ROOT / "tests" / "project" / "test_configs.py").read_text()
    for path in CONFIGS:
        name = recipe_name(path)
        if name not in EQUALS and not entry(path, "source").startswith("none"):
            assert name in TABLES or f'    "{name}": ' in config_tests, name


@pytest.mark.parametrize(
    "path",
    [path for path in CONFIGS if (load_config(path).init.checkpoint or "")[:5] == "runs/"],
    ids=recipe_name,
)
def test_a_stage_starts_from_the_run_of_a_recipe_with_its_network(path):
    config = load_config(path)
    base_path = BY_RUN[config.init.checkpoint]
    base = load_config(base_path)
    changes = {
        "model.image_size",
        "model.drop_path_rate",
        "model.drop_path_schedule",
        "model.weight_init",
        *("model.representation_size", "model.pos_drop_rate", "model.proj_drop_rate"),
    }
    ours, theirs = flat(config), flat(base)
    assert not [
        key
        for key in ours
        if key.startswith("model.") and key not in changes and ours[key] != theirs[key]
    ]
    if config.model.representation_size != base.model.representation_size:
        assert config.init.reset_head
    assert (ours["data.mean"], ours["data.std"]) == (theirs["data.mean"], theirs["data.std"])
    assert f"configs/{recipe_name(base_path)}.yaml" in path.read_text().partition("\n\n")[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if "8 H200:" in path.read_text()], ids=recipe_name
)
def test_hours_and_memory_in_a_header_equal_the_planners(path):
    make_forecast = pytest.importorskip("vit.extras.planner.forecast").make_forecast
    config = load_config(path, ["data.root=/none"])
    forecast = make_forecast(config, 8, find_gpu("H200"))
    hours = " to ".join(f"{end:.3g}" for end in forecast.compute_h)
    assert f"8 H200: {hours} h of compute" in entry(path, "here")
    assert f"about {forecast.memory.total / 2**30:.0f} GiB (launch/plan.py)" in path.read_text()
    steps = forecast.plan.accumulation_steps
    assert ("no accumulation" if steps == 1 else f"{steps} micro-steps a step") in path.read_text()


SMALL = [
    "model.embed_dim=32",
    "model.depth=2",
    "model.num_heads=2",
    "data.global_batch_size=12",
    "data.micro_batch_size=null",
    "schedule.image_sizes=[]",
    "loader.num_workers=0",
    "train.epochs=null",
    "train.steps=3",
    "train.precision=fp32",
    "train.compile=false",
    "train.device=cpu",
    "eval.every_epochs=null",
    "eval.every_steps=3",
    "eval.batch_size=8",
    "log.every_steps=1",
    "log.wandb=off",
    "log.report=false",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards) -> Callable[[str], Path]:
    """Train a small version of the stages on which a recipe builds, and then the recipe itself for
    three steps. Return the folder of the last run."""
    made: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name in made:
            return made[name]
        folder = tmp_path_factory.mktemp("runs") / name
        config = load_config(ROOT / "configs" / f"{name}.yaml")
        patch = int(re.search(r"\d+$", config.model.name)[0])
        stage = 3 if re.search(r"_ft\d", name) else 2
        overrides = [f"model.image_size={stage * patch}", f"data.root={shards}"]
        checkpoint = config.init.checkpoint
        if checkpoint is not None:
            base = recipe_name(BY_RUN.get(checkpoint, ROOT / "configs" / "vit_b16.yaml"))
            overrides.append(f"init.checkpoint={run(base)}")
        if config.distill.teacher is not None:
            overrides += [f"distill.teacher={run('vit_b16')}", "distill.teacher_model=null"]
        overrides += [*SMALL, f"run.dir={folder}"]
        small = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
        assert train(build_run(small, World(0, 1, torch.device("cpu")))) == "finished"
        made[name] = folder
        return folder

    return run


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == CHEAPEST else pytest.mark.full)
        for name in map(recipe_name, CONFIGS)
    ],
)
def test_a_small_version_does_three_steps_and_an_evaluation(name, trained):
    folder = trained(name)
    losses = [line["loss"] for line in metrics(folder, "train")]
    assert len(losses) == 3
    config = load_config(ROOT / "configs" / f"{name}.yaml")
    starts_at_zeros = config.init.checkpoint is None or config.init.reset_head
    starts_at_zeros &= config.model.weight_init not in ("timm", "mha")
    if starts_at_zeros and config.model.init_head_bias is None:
        # Before training, softmax assigns a probability of 1/3 to each of three classes, and a
        # sigmoid assigns 1/2.
        first = 0.6931 if config.loss.name == "bce" else 1.0986
        assert losses[0] == pytest.approx(first, abs=2e-3)
    assert all(0 < loss < 30 for loss in losses)
    (last,) = metrics(folder, "eval")
    assert last["num_images"] == 23
    assert ("num_images_ema" in last) == (config.ema.decay is not None)
