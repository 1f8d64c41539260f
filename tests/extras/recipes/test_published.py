"""Test that published recipes are imported completely.

Each imported setting must be explained, the YAML must load, and the values must match the papers
and READMEs.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from vit.config.io import load_config, to_dict
from vit.extras.recipes.importing import import_recipe
from vit.extras.recipes.summary import account, count, yaml_text

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PUBLISHED = yaml.safe_load((HERE / "published.yaml").read_text())
ONE_EACH = (
    *("deit_b16", "deit3_h14_800ep", "vit5_b16", "rope_b16", "mae_b16_ft", "torchvision_l16"),
    *("jax_deit3_b16_400ep", "bv_augreg_b16"),
)
"""One recipe per program. The recipes of timm are tested in test_timm.py."""


def value(imported, key):
    section, _, name = key.partition(".")
    return to_dict(imported.config())[section][name]


def verdict_of(imported, name):
    (match,) = (f for f in imported.reading.findings if name in f.theirs)
    return match


def test_at_least_forty_recipes_each_name_a_source():
    assert len(PUBLISHED) >= 40
    for name, entry in PUBLISHED.items():
        assert re.match(r"[\w-]+/[\w.-]+(@[0-9a-f]{8})?:[\w/.-]+$", entry["source"]), name


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ONE_EACH else pytest.mark.full) for n in PUBLISHED]
)
def test_each_setting_of_a_recipe_is_explained_and_the_yaml_loads(name, imported, tmp_path):
    imported_recipe = imported(name)
    reading = imported_recipe.reading
    mentions = Counter(argument for f in reading.findings for argument in f.theirs)
    recipe = {a.name for a in reading.table.arguments if a.in_recipe}
    assert recipe <= set(mentions), "an argument is not explained"
    assert set(reading.stated) <= set(mentions), "a stated argument is not explained"
    assert max(mentions.values()) == 1
    text = account(imported_recipe)
    for finding in reading.findings:
        if finding.verdict in ("differs", "cannot"):
            assert finding.text.split()[0] in text, "the report does not explain a difference"
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml_text(imported_recipe, file))
    loaded = load_config(file)
    ours = to_dict(imported_recipe.config())
    read = to_dict(loaded)
    ours["run"] = read["run"]
    assert read == ours, "the YAML differs from the import"
    assert reading.table.source.partition(":")[0] in file.read_text()
    assert max(map(len, file.read_text().splitlines())) <= 100 or "command " in file.read_text()


# The expected values were copied from papers and READMEs, independently of the importer.
STATED: dict[str, dict] = {
    # The DeiT paper states a batch size of 1024 and a learning rate of 5e-4 x 1024 / 512 (Table 9).
    # The README states 83.1 % after 30 epochs of fine-tuning at 5e-6.
    "deit_b16": {
        "data.global_batch_size": 1024,
        "optim.lr": 1e-3,
        "optim.weight_decay": 0.05,
        "optim.no_weight_decay": "timm",
        "optim.clip_grad_norm": None,
        "train.epochs": 300,
        "model.drop_path_rate": 0.1,
        "model.drop_path_schedule": None,
        "augment.erasing_prob": 0.25,
        "augment.color_jitter": [0, 0, 0, 0],
        "order.aug_repeats": 3,
        "loss.label_smoothing": 0.1,
    },
    "deit_b16_ft384": {"optim.lr": 5e-6, "data.global_batch_size": 512, "model.image_size": 384},
    # The DeiT III paper states a batch size of 2048, a learning rate of 3e-3 (4e-3 for S), drop
    # path, no smoothing, and 3-Augment (Table 1).
    "deit3_b16_800ep": {
        "data.global_batch_size": 2048,
        "optim.lr": 3e-3,
        "model.image_size": 192,
        "model.drop_path_rate": 0.2,
        "model.drop_path_schedule": "constant",
        "optim.name": "lamb",
        "loss.name": "bce",
        "loss.bce_target_thresh": 0.0,
        "schedule.interval": "epoch",
        "schedule.warmup_lr": 1e-6,
        "optim.eps": 1e-8,
        "optim.clip_grad_norm": 1.0,
        "augment.auto_augment": "three_augment",
        "augment.randaugment_layers": 0,
        "augment.erasing_prob": 0.0,
        "augment.color_jitter": [0.3, 0.3, 0.3, 0],
        "loss.label_smoothing": 0.0,
        "eval.crop_pct": 1.0,
        "model.init_values": 1e-4,
        "train.seed": 0,
    },
    "deit3_s16_800ep": {"optim.lr": 4e-3, "model.drop_path_rate": 0.05},
    # deit3-jax trains at 160 px, which holds only 11 patches of 14 px, so the effective image size
    # is 154 px.
    "deit3_h14_800ep": {"model.image_size": 154, "model.drop_path_rate": 0.6},
    "deit3_b16_in21k": {"augment.crop": "simple", "order.aug_repeats": 1},
    # ViT-5 has four registers with a RoPE temperature of 100. The learning rate for S is 4e-3.
    "vit5_s16": {
        "optim.lr": 4e-3,
        "model.reg_tokens": 4,
        "model.norm_layer": "rmsnorm",
        "model.rope_reg_temperature": 100.0,
        "train.seed": 42,
    },
    "vit5_b16_ft": {"data.global_batch_size": 512, "augment.mixup_alpha": 0.8},
    # MAE's FINETUNE.md states "the effective batch size is ... 1024", and lr = blr x 1024 / 256.
    "mae_b16_ft": {
        "data.global_batch_size": 1024,
        "optim.lr": 2e-3,
        "schedule.min_lr": 1e-6,
        "optim.layer_decay": 0.65,
        "optim.layer_decay_form": "beit",
        "model.global_pool": "avg",
        "init.reset_head": True,
    },
    "mae_b16_ft_1node": {"data.global_batch_size": 1024, "optim.lr": 2e-3},
    "mae_h14_ft": {"data.global_batch_size": 1024, "optim.lr": 4e-3, "model.name": "vit_h14"},
    # The torchvision recipe uses 64 GPUs with 64 images each, which equals 8 GPUs with 512 images
    # each.
    "torchvision_b16": {
        "data.global_batch_size": 4096,
        "optim.lr": 3e-3,
        "optim.weight_decay": 0.3,
        "augment.randaugment_ops": "torchvision",
        "data.interpolation": "bilinear",
        "eval.crop_pct": 0.875,
        "optim.clip_grad_norm": 1.0,
        # torchvision's train.py uses alpha = (1 - 0.99998) x 4096 x 32 / 300, and copies the
        # weights during the warm-up.
        "ema.decay": pytest.approx(0.99126, abs=1e-5),
        "ema.every_steps": 32,
        "ema.after_epochs": 30,
    },
    "torchvision_b32": {"augment.auto_augment": "imagenet", "augment.randaugment_layers": 0},
    "torchvision_l16": {
        "optim.name": "sgd",
        "augment.auto_augment": "ta_wide",
        "optim.lr": 0.5,
        "data.global_batch_size": 1024,
        "eval.crop_pct": 0.965,
        "augment.erasing_prob": 0.1,
    },
    # The paper "Better plain ViT" uses a weight decay of 0.1 as in torch's AdamW, crops of at least
    # 5 % of the area, and 10,000 warm-up steps.
    "bv_s16_90ep": {
        "data.train_split": "train[:99%]",
        "optim.weight_decay": pytest.approx(0.1),
        "train.epochs": 90,
        "model.pos_embed": "sincos2d",
        "model.class_token": False,
        "model.representation_size": 384,
        "augment.crop_scale": [0.05, 1.0],
        "augment.mixup_alpha": 0.2,
        "schedule.warmup_steps": 10_000,
        "data.mean": [0.5, 0.5, 0.5],
    },
    "bv_s16_300ep": {"train.epochs": 300},
    "bv_augreg_b16": {
        "loss.name": "bce",
        "loss.bce_sum": True,
        "model.init_head_bias": -6.9,
        "augment.randaugment_magnitude": 15.0,
    },
    "bv_augreg_b32_light1": {"model.name": "vit_b32", "augment.randaugment_magnitude": 0.0},
    # The table in deit3-jax states a weight decay of 0.02, a drop path rate of 0.1, and 5 warm-up
    # epochs of 400 with a batch size of 2048.
    "jax_deit3_b16_400ep": {
        "optim.weight_decay": 0.02,
        "model.drop_path_rate": 0.1,
        "augment.color_jitter": [0.3, 0.3, 0.3, 0],
        "train.steps": 1281167 * 400 // 2048,
        "schedule.warmup_steps": 1281167 * 5 // 2048,
    },
}


@pytest.mark.parametrize("name", STATED)
def test_the_values_of_a_recipe_equal_those_of_its_paper(name, imported):
    recipe = imported(name)
    got = {key: value(recipe, key) for key in STATED[name]}
    assert got == STATED[name]


def test_an_argument_without_effect_in_its_program_is_not_imported(imported):
    recipe = imported("deit_b16")
    jitter = verdict_of(recipe, "color_jitter")
    assert (jitter.verdict, jitter.settings) == ("inert", {})
    assert verdict_of(recipe, "cooldown_epochs").verdict == "inert"
    assert verdict_of(imported("deit3_b16_800ep"), "reprob").verdict == "inert"


def test_other_rules_of_weight_decay_are_reported(imported):
    recipe = imported("torchvision_b16")
    assert value(recipe, "optim.no_weight_decay") == "nothing"
    assert value(imported("torchvision_l16"), "optim.no_weight_decay") == "norms"
    assert value(imported("bv_s16_90ep"), "optim.no_weight_decay") == "not_kernels"


def test_weights_at_a_url_become_a_file_with_a_download_comment(imported):
    recipe = imported("deit_b16_ft384")
    assert value(recipe, "init.checkpoint") == "deit_base_patch16_224-b5f2ef4d.pth"
    assert "# download https://dl.fbaipublicfiles.com/deit/" in yaml_text(recipe, None)
    other = import_recipe("python main.py --finetune https://a.b/c.pth --data-set CIFAR")
    assert value(other, "init.reset_head") is True


def test_repeated_augmentation_needs_a_launcher():
    alone = import_recipe("python main.py --model deit_small_patch16_224 --batch-size 256")
    assert value(alone, "order.aug_repeats") == 1
    assert value(alone, "optim.lr") == pytest.approx(5e-4 * 256 / 512)
    assert verdict_of(alone, "repeated_aug").verdict == "inert"
    more = import_recipe(
        "python main.py --model deit_small_patch16_224 --batch-size 256", num_gpus=4
    )
    assert value(more, "order.aug_repeats") == 3
    assert value(more, "data.global_batch_size") == 1024


@pytest.mark.parametrize("flags", ["--batch-size 0", "--epochs 0", "--lr 0"])
def test_a_recipe_that_trains_nothing_is_refused(flags):
    with pytest.raises(ValueError, match="expected a value above 0"):
        import_recipe(f"python main.py --model deit_small_patch16_224 {flags}")


def test_the_counts_of_the_report_equal_those_of_the_findings(imported):
    recipe = imported("deit3_b16_800ep")
    counts = count(recipe.reading)
    arguments = {a.name for a in recipe.reading.table.arguments if a.in_recipe}
    no_argument = sum(not f.theirs for f in recipe.reading.findings)
    assert sum(counts.values()) - counts["place"] - no_argument == len(arguments)
    # Settings that are the same in both recipes come last, because there are many.
    headings = ("differs: ", "no equivalent: ", "the same: ")
    lines = [line for line in account(recipe).splitlines() if line.startswith(headings)]
    verdicts = ("differs", "cannot", "same")
    assert lines == [f"{h}{counts[v]}" for h, v in zip(headings, verdicts, strict=True)]


@pytest.mark.parametrize("name", ["mae_b16_ft", "torchvision_b16", "bv_s16_90ep", "jax_deit_b16"])
def test_the_learning_rate_of_a_recipe_equals_ours(name, imported):
    """tests/extras/recipes/test_rates.py compares the formulas for other programs' learning rates
    with timm and torch."""
    names = {f for finding in imported(name).reading.findings for f in finding.theirs}
    (schedule,) = {
        "warmup_epochs",
        "lr_warmup_epochs",
        "schedule.warmup_steps",
        "warmup_steps",
    } & names
    finding = verdict_of(imported(name), schedule)
    assert (finding.verdict, finding.settings["schedule.name"]) == ("same", "cosine")


def test_deits_schedule_differs_only_by_an_epoch(imported):
    finding = verdict_of(imported("deit3_b16_800ep"), "warmup_epochs")
    assert finding.verdict == "differs"
    assert "at most 20 % of its peak" in finding.text, "one of five epochs of warm-up"
    assert "one epoch late" in finding.text
