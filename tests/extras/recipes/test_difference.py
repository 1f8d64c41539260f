"""Test that `launch/recipe.py` compares two recipes, explains each difference, and shows a single
recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from extras.deleted_extras import needs
from PIL import Image
from processes import run_here, write_config

from vit.config.hints import all_keys
from vit.config.io import load_config
from vit.extras.recipes.difference import compare, deviations, read_recipe
from vit.extras.recipes.effects import KINDS, KNOWN, effect_of
from vit.extras.recipes.preview import in_words

ROOT = Path(__file__).parents[3]
B16 = ROOT / "configs" / "vit_b16.yaml"


def with_(*overrides):
    return load_config(B16, overrides)


def test_every_setting_has_a_kind_and_known_effects_are_settings_with_a_source():
    kinds = {kind for kind, _ in KINDS}
    assert {effect_of(key).kind for key in all_keys()} <= kinds
    assert set(KNOWN) <= set(all_keys())
    for key, text in KNOWN.items():
        assert re.search(r"arXiv \d{4}\.\d{5}|[\w-]+/[\w.-]+[@#]|timm's results", text), key
        assert re.search(r"\d\d\.\d", text) or "fails" in text, key


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("augment.cutmix_alpha=0", "known"),
        ("model.qk_norm=true", "network"),
        ("optim.weight_decay=0.1", "optimization"),
        ("loss.label_smoothing=0", "optimization"),
        ("augment.hflip_prob=0", "images"),
        ("schedule.image_sizes=[{until_epoch: 9, image_size: 160}]", "images"),
        ("train.seed=1", "order"),
        ("order.num_lanes=8", "order"),
        ("data.fraction=0.1", "images"),
        ("data.sources=[{root: a}, {root: b}]", "images"),
        ("eval.crop_mode=squash", "evaluation"),
        ("init.checkpoint=x.pth", "start"),
        ("loader.num_workers=2", "harmless"),
        ("log.wandb=off", "harmless"),
        ("eval.reference=demo", "harmless"),
        ("train.compile=false", "harmless"),
        ("checkpoint.every_steps=7", "harmless"),
    ],
)
def test_a_difference_has_the_kind_of_its_effect(override, kind):
    (difference,) = compare(with_(), with_(override))
    assert (difference.key, difference.kind) == (override.partition("=")[0], kind)


def test_differences_are_sorted_by_importance_and_name_their_source():
    text = in_words(
        with_(),
        with_(
            "loader.num_workers=2", "augment.cutmix_alpha=0", "model.qk_norm=true", "train.seed=3"
        ),
        ("a.yaml", "b.yaml"),
    )
    order = ["augment.cutmix_alpha: 1 -> 0", "model.qk_norm", "train.seed", "loader.num_workers"]
    places = [text.index(phrase) for phrase in order]
    assert places == sorted(places)
    assert "80.0 without CutMix" in text
    assert "arXiv 2012.12877" in text
    assert "learning rates" not in text
    assert in_words(with_(), with_(), ("a", "b")).endswith("no setting differs")
    stages = "[{until_epoch: 9, image_size: 160}, {until_epoch: 20, image_size: 192}]"
    text = in_words(with_(), with_(f"schedule.image_sizes={stages}"), ("a", "b"))
    expected = "none -> until_epoch 9, image_size 160; until_epoch 20, image_size 192"
    assert expected in " ".join(text.split())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.stem)
def test_each_shipped_recipe_is_compared_with_another(path):
    other = read_recipe(path)
    printed = " ".join(in_words(with_(), other, ("a", "b")).split())
    for difference in compare(with_(), other):
        assert f"{difference.key}: " in printed


def test_an_evaluation_set_of_only_one_recipe_is_a_difference():
    printed = in_words(with_(), with_("eval.sets={v2: {split: train}}"), ("a", "b"))
    assert "eval.sets.v2.split: none -> train" in printed


def test_an_unset_model_setting_is_shown_with_the_value_of_the_size():
    assert not compare(with_(), with_("model.dist_token=false", "model.depth=12"))
    text = in_words(with_(), with_("model.depth=6", "optim.clip_grad_norm=1"), ("a", "b"))
    assert "model.depth: 12 -> 6" in text
    assert "optim.clip_grad_norm: none (no clipping) -> 1" in text


def test_deviations_of_a_run_from_its_recipe_are_listed():
    """A different choice of training samples must be listed, but an additional evaluation set must
    not be listed."""
    config = with_("data.samples_per_class=13", "eval.sets={v2: {split: train}}", "eval.best_by=v2")
    assert deviations(config, "vit_b16", {}) == ["data.samples_per_class none -> 13"]


def test_the_source_of_an_ablation_is_quoted_only_for_its_own_comparison():
    both = compare(with_(), with_("model.drop_path_rate=0.2", "optim.name=lamb"))
    by_key = {difference.key: difference for difference in both}
    dropped = by_key["model.drop_path_rate"]
    assert (dropped.kind, dropped.text) == ("network", "")
    assert by_key["optim.name"].text == ""
    (without,) = compare(with_(), with_("model.drop_path_rate=0"))
    assert without.kind == "known"
    assert not compare(with_(), with_("augment.magnitude_std=0.5"))
    ends = in_words(with_(), with_("schedule.min_lr=0.0016"), ("a", "b"))
    assert "at most 100 % of the larger peak (100 % into the run)" in " ".join(ends.split())


def test_learning_rates_are_compared_over_the_finished_part_of_a_run():
    longer = in_words(with_(), with_("train.epochs=600", "schedule.warmup_epochs=40"), ("a", "b"))
    assert "learning rates" not in longer, "schedules of the same shape must not be reported"
    halved = in_words(with_(), with_("optim.lr=0.8e-3"), ("a", "b"))
    assert "at most 50 % of the larger peak" in halved


def test_run_folders_and_names_are_accepted_as_recipes(tmp_path, shards):
    config = write_config(tmp_path, shards, steps=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(config.read_text())
    assert not compare(read_recipe(config), read_recipe(tmp_path / "run"))
    assert read_recipe(Path("vit_b16")).model.name == "vit_b16"
    with pytest.raises(ValueError, match="not a run folder"):
        read_recipe(tmp_path)


@needs("report")
def test_show_prints_the_groups_of_the_optimizer_and_draws_the_rates(
    tmp_path, shards, capsys, monkeypatch
):
    config = write_config(tmp_path, shards, steps=12)
    settings = ["optim.layer_decay=0.5", "model.depth=2", "model.embed_dim=32", "model.num_heads=2"]
    settings += ["model.image_size=16", "model.name=vit_ti8"]
    settings += ["schedule.image_sizes=[{until_epoch: 1, image_size: 24}]"]
    picture = tmp_path / "shown.png"
    run_here("launch/recipe.py", "show", config, "--out", picture, "--images-per-epoch", 60,
             *settings)  # fmt: skip
    printed = capsys.readouterr().out
    assert "(0.5 x)" in printed
    assert "vit_ti8 at 24x24 until epoch 1, then 16x16: 12 steps" in printed
    assert "(0.125 x)" in printed
    assert Image.open(picture).width == 1400
    assert Image.open(tmp_path / "shown_augment.png").width == 1400
    run_here("launch/recipe.py", "show", "vit_b16", "--out", picture)
    shown = capsys.readouterr()
    # torchvision reports the same number of parameters for B/16 with 1,000 classes.
    assert "86,567,656" in shown.out
    assert "no contact sheet" in shown.err
