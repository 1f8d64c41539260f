"""Test that any recipe can be overridden from the command line.

If a setting in the file has no effect because of the command line, it is dropped with a note. If
one source contradicts itself, it is rejected, and the remedies in the error message are accepted.
"""

from __future__ import annotations

import json
import re

import pytest

from vit.config.hints import all_keys, union_tags
from vit.config.io import ConfigError, load_config, recipes_folder, with_settings
from vit.config.reference import recipes

RECIPES = list(
    {(*values, values.get("optim.name")): name for name, values in recipes().items()}.values()
)
"""One recipe for each set of settings and each optimizer of the shipped recipes."""
CHOICES = [
    *([f"optim.name={name}"] for name in union_tags("optim")),
    *([f"schedule.name={name}"] for name in ("cosine", "linear", "constant", "wsd")),
    *([f"loss.name={name}"] for name in ("cross_entropy", "bce")),
    *([f"train.precision={name}"] for name in ("fp32", "bf16", "fp16")),
    *([f"augment.auto_augment={name}"] for name in ("null", "ta_wide", "three_augment", "v0")),
    *([f"augment.randaugment_layers={number}"] for number in (0, 2)),
    *([f"model.name={name}"] for name in ("vit_ti16", "timm/resnet18")),
    ["augment.mixup_alpha=0", "augment.cutmix_alpha=0"],
    ["augment.mixup_alpha=0.8"],
    ["augment.crop=simple"],
    ["augment.erasing_prob=0"],
    ["data.fraction=0.1"],
    ["data.samples_per_class=5"],
    ["data.sources=[{root: a}, {root: b}]"],
    ["distill.teacher=null"],
    ["distill.teacher=runs/teacher"],
    ["ema.decay=null"],
    ["ema.decay=0.999"],
    ["guard.on_spike=none"],
    ["init.checkpoint=null"],
    ["init.checkpoint=runs/vit_b16"],
    ["init.freeze=backbone", "init.checkpoint=runs/vit_b16"],
    ["init.select_classes=true"],
    ["model.in_chans=1"],
    ["model.pos_embed=none"],
    ["model.rope_type=null"],
    ["model.class_token=false", "model.global_pool=avg"],
    ["model.drop_path_rate=0"],
    ["optim.lr=1e-6"],
    ["optim.layer_decay=null"],
    ["optim.weight_decay=0"],
    ["order.aug_repeats=1"],
    ["run.dir=runs/elsewhere"],
    ["schedule.image_sizes=[]"],
    ["schedule.min_lr=0"],
    ["schedule.warmup_epochs=0"],
    ["stream.urls=https://host/train-{0..9}.tar", "stream.num_samples=1000"],
    ["train.device=cpu"],
    ["train.epochs=1"],
    ["train.exact_over_ranks=true", "data.micro_batch_size=8"],
    ["train.steps=7"],
]  # fmt: skip
"""Command lines that a user may add to any recipe."""


def remedies(line: str) -> list[str]:
    """Return the arguments `section.key=value` that an error message suggests after the problem."""
    text = line.rpartition(": ")[2]
    found = re.findall(r"(\w+\.\w+)=((?:\[[^\]]*\]|[^\s,]+)(?: or [\w.]+(?![\w.]*[.=]))*)", text)
    keys = set(all_keys())
    return [f"{key}={value}" for key, many in found if key in keys for value in many.split(" or ")]


def problems_of(recipe: str, choice: list[str]) -> list[str]:
    try:
        load_config(recipe, choice)
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_choice_loads_or_is_refused_with_remedies_that_work(recipe, capsys):
    for choice in CHOICES:
        try:
            config = load_config(recipe, choice)
        except ConfigError as error:
            for line in str(error).splitlines():
                if " has no effect " in line:  # only settings on the command line itself
                    assert re.match(r"command line \((\w+\.\w+).*\): \1 has no", line), line
                for remedy in remedies(line):
                    assert line not in problems_of(recipe, [*choice, remedy]), (choice, remedy)
            continue
        for argument in choice:
            key, _, value = argument.partition("=")
            section, _, name = key.partition(".")
            given = getattr(getattr(config, section), name)
            assert (
                value.startswith("[")
                or json.dumps(given).strip('"') == value
                or given == float(value)
            ), f"{argument} became {given}"
        for note in capsys.readouterr().err.splitlines():
            assert re.fullmatch(r"note: .* has no effect with \S+: dropped", note), note
            for key in re.findall(r"(\w+\.\w+) of ", note):
                section, _, name = key.partition(".")
                fields = type(getattr(config, section)).model_fields
                assert name not in fields or getattr(getattr(config, section), name) == (
                    fields[name].default
                ), f"{key} was not dropped"


@pytest.mark.parametrize(
    ("recipe", "choice", "note"),
    [
        (
            "demo",
            ["optim.name=adamw"],
            "optim.nesterov of {file}:38 has no effect with optim.name=adamw",
        ),
        (
            "photos",
            ["init.checkpoint=null"],
            "init.reset_head of {file}:20 has no effect with init.checkpoint=null",
        ),
    ],
)
def test_what_the_command_line_makes_void_is_dropped_with_a_note(recipe, choice, note, capsys):
    load_config(recipe, choice)
    file = recipes_folder() / f"{recipe}.yaml"
    assert capsys.readouterr().err == f"note: {note.format(file=file)}: dropped\n"


def test_settings_that_need_a_dropped_one_are_dropped_too(load, capsys):
    text = "data: {root: a}\ntrain: {steps: 9}\ninit: {checkpoint: c, reset_head: true}\n"
    text += "model: {init_head_bias: -3}\n"
    config, origins = load(text, "init.checkpoint=null", "model.weight_init=timm")
    assert config.init.reset_head is False
    assert config.model.init_head_bias == -3, "a new model may have it"
    assert origins["init.reset_head"] == "default, run.yaml:3 was dropped"
    load(text, "init.reset_head=false")
    assert "model.init_head_bias of run.yaml:4 has no effect with init.reset_head=false" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "overrides", "problem"),
    [
        ("optim: {nesterov: true}", (), "run.yaml:3: optim.nesterov has no effect"),
        (
            "optim: {name: muon}",
            ("optim.name=adamw", "optim.nesterov=true"),
            "command line (optim.nesterov=true): optim.nesterov has no effect",
        ),
        (
            "augment: {auto_augment: ta_wide, randaugment_layers: 2}",
            (),
            "run.yaml:3: augment.auto_augment=ta_wide replaces RandAugment",
        ),
        (
            "schedule: {name: wsd}",
            ("augment.mix_prob=0.5",),
            "command line (augment.mix_prob=0.5): augment.mix_prob has no effect",
        ),
    ],
)
def test_a_contradiction_within_one_source_is_refused(problems, text, overrides, problem, capsys):
    (line,) = problems(f"data: {{root: a}}\ntrain: {{steps: 9}}\n{text}\n", *overrides)
    assert line.startswith(problem)
    assert not capsys.readouterr().err


def test_only_rank_0_prints_the_note(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert load_config("demo", ["optim.name=sgd", "optim.nesterov=false"]).optim.name == "sgd"
    load_config("photos", ["init.checkpoint=null"])
    assert not capsys.readouterr().err


def test_settings_of_a_run_are_dropped_like_those_of_a_file(capsys):
    config = with_settings(load_config("demo"), {"optim.name": "sgd"})
    assert config.optim.name == "sgd"
    assert config.optim.nesterov is True
    assert "optim.matrices of the run" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"optim\.betas has no effect with optim.name=sgd"):
        with_settings(config, {"optim.betas": [0.9, 0.95]})
