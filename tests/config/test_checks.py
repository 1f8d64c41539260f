"""Test that contradictory settings are rejected, including contradictory settings that select
samples."""

import re
import textwrap
from pathlib import Path

import pytest

from vit.config.io import from_dict, to_dict
from vit.config.optim_section import AdamWConfig, SgdConfig

BASE = """\
data:
  root: shards
train:
  epochs: 3
"""


# --- settings that depend on each other -----------------------------------------------------------


PAIRS = [
    ("train", "epochs", "steps"),
    ("schedule", "warmup_epochs", "warmup_steps"),
    ("eval", "every_epochs", "every_steps"),
]


@pytest.mark.parametrize(("section", "epochs", "steps"), PAIRS)
def test_one_form_on_the_command_line_replaces_the_other_form_in_the_file(
    load, section, epochs, steps
):
    for in_file, overriding in ((epochs, steps), (steps, epochs)):
        text = (
            "data: {root: a}\n"
            + ("" if section == "train" else "train: {epochs: 1}\n")
            + f"{section}: {{{in_file}: 5}}\n"
        )
        config, origins = load(text, f"{section}.{overriding}=7")
        assert getattr(getattr(config, section), in_file) is None
        assert getattr(getattr(config, section), overriding) == 7
        assert f"{section}.{in_file}" not in origins
        assert load(text, f"{section}.{overriding}=null").config == load(text).config, (
            "null on the command line must not replace a value from the file"
        )


@pytest.mark.parametrize(("section", "epochs", "steps"), PAIRS)
def test_both_forms_in_one_place_are_refused(problems, section, epochs, steps):
    text = BASE if section == "train" else BASE + f"{section}:\n  {epochs}: 3\n"
    line_number = 4 if section == "train" else 6
    complaint = f"{section}.{epochs} and {section}.{steps} are both given: keep one of them"
    assert problems(text + f"  {steps}: 3\n") == [f"run.yaml:{line_number}: {complaint}"]
    assert problems(BASE, f"{section}.{epochs}=1", f"{section}.{steps}=2") == [
        f"command line ({section}.{epochs}=1): {complaint}"
    ]


def test_a_run_needs_a_length(problems):
    assert problems("data: {root: a}\ntrain: {seed: 1}\n") == [
        "run.yaml: neither train.epochs nor train.steps is given: give one of them"
    ]


def test_settings_of_the_other_optimizer_are_refused(load, problems):
    assert problems(BASE + "optim:\n  momentum: 0.9\n") == [
        "run.yaml:6: optim.momentum has no effect with optim.name=adamw: remove optim.momentum, or"
        " set optim.name=sgd or muon or adamuon or adafactorbv"
    ]
    assert problems(BASE + "optim:\n  name: sgd\n  betas: [0.9, 0.99]\n") == [
        "run.yaml:7: optim.betas has no effect with optim.name=sgd: remove optim.betas, or set"
        " optim.name=adamw or lamb or nadamw or muon or adamuon"
    ]
    assert load(BASE + "optim:\n  name: sgd\n  momentum: 0.8\n").config.optim == SgdConfig(
        name="sgd", momentum=0.8
    )
    assert load(BASE + "optim:\n  betas: [0.9, 0.95]\n").config.optim == AdamWConfig(
        betas=(0.9, 0.95)
    )


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (
            "schedule: {warmup_lr: 1, warmup_steps: 3}",
            "schedule.warmup_lr=1.0 exceeds optim.lr=0.001: lower schedule.warmup_lr",
        ),
        (
            "schedule: {cooldown_epochs: 1}",
            "schedule.cooldown_epochs trains with schedule.min_lr, which is 0: raise"
            " schedule.min_lr, or set schedule.cooldown_epochs=null",
        ),
        (
            "schedule: {final_weight_decay: 0.05}",
            "schedule.final_weight_decay=0.05 equals optim.weight_decay: set"
            " schedule.final_weight_decay=null",
        ),
        (
            "loss: {name: bce, bce_target_thresh: 0, label_smoothing: 0.1}",
            "loss.bce_target_thresh=0.0 is below the target that loss.label_smoothing gives every"
            " class: raise it, or set loss.label_smoothing=0",
        ),
        (
            "augment: {mixup_alpha: 0.8, mixup_off_epoch: 3}",
            "augment.mixup_off_epoch=3 has no effect with train.epochs=3.0: lower it, or set"
            " augment.mixup_off_epoch=null",
        ),
        (
            "schedule: {image_sizes: [{until_epoch: 3, image_size: 160}]}",
            "schedule.image_sizes[0].until_epoch=3 is not before train.epochs=3.0, but the last"
            " epochs use model.image_size: lower it, or set schedule.image_sizes=[]",
        ),
        (
            "schedule: {image_sizes: [{until_epoch: 1, image_size: 224}]}",
            "schedule.image_sizes[0].image_size=224 is also the size of the epochs after it: merge"
            " the stages",
        ),
        (
            "model: {name: timm/vit_tiny_patch16_224}\n"
            "schedule: {image_sizes: [{until_epoch: 1, image_size: 160}]}",
            "schedule.image_sizes does not work with timm's models, such as"
            " model.name=timm/vit_tiny_patch16_224: set schedule.image_sizes=[], or use a model of"
            " this project, such as vit_s16",
        ),
        (
            "model: {patch_size: [16, 8]}\n"
            "schedule: {image_sizes: [{until_epoch: 1, image_size: [160, 164]}]}",
            "schedule.image_sizes[0].image_size=[160, 164] is not a multiple of the patch size"
            " [16, 8]: the nearest multiples are 160 and [160, 168]",
        ),
        (
            "loss: {class_weights: [0, 0]}",
            "loss.class_weights are all 0: give at least one class a weight",
        ),
    ],
)
def test_settings_of_schedule_and_loss_that_contradict_each_other_are_refused(
    problems, section, problem
):
    lines = problems(BASE + section + "\n")
    assert [line.partition(": ")[2] for line in lines] == [problem]


def test_all_problems_of_image_size_stages_are_reported_together(problems):
    lines = problems(
        BASE + "schedule:\n  image_sizes:\n"
        "    - {until_epoch: 2, image_size: 100}\n"
        "    - {until_epoch: 1, image_size: 160}\n"
        "    - {until_epoch: 5, image_size: 160}\n"
    )
    assert [line.partition("schedule.image_sizes")[2].partition(" is ")[0] for line in lines] == [
        "[0].image_size=100",
        "[1].until_epoch=1",
        "[1].image_size=160",
        "[2].until_epoch=5",
    ]


@pytest.mark.parametrize(
    ("element", "problem"),
    [
        ("{until_epoch: 1}", "schedule.image_sizes[0].image_size is required"),
        (
            "{until_epoch: x, image_size: 160}",
            'schedule.image_sizes[0].until_epoch is "x", expected integer',
        ),
        (
            "{until_epoch: 1, image_size: 160, crop: 1}",
            "schedule.image_sizes[0]: unknown key 'crop'; known keys: until_epoch, image_size",
        ),
    ],
)
def test_a_stage_has_an_epoch_and_a_size(problems, element, problem):
    [line] = problems(BASE + f"schedule:\n  image_sizes: [{element}]\n")
    assert line.partition(": ")[2] == problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "schedule:\n  min_lr: 0.1\n",
            "run.yaml:6: schedule.min_lr=0.1 exceeds optim.lr=0.001: lower schedule.min_lr",
        ),
        (
            "augment:\n  crop_ratio: [2.0, 0.5]\n",
            "run.yaml:6: augment.crop_ratio is [2.0, 0.5]: the first must not exceed the second",
        ),
        (
            "optim: {name: adamuon, adjust_lr_fn: original}\n",
            (
                "run.yaml:5: optim.adjust_lr_fn=original needs optim.name=muon: set"
                " optim.adjust_lr_fn=match_rms_adamw or rms_to_rms"
            ),
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(problems, text, expected):
    assert problems(BASE + text) == [expected]


def test_members_of_streamed_samples_are_named_by_settings(load, problems):
    text = BASE.replace("data:\n", "stream:\n  urls: a.tar\n  num_samples: 9\ndata:\n")
    assert text != BASE
    overrides = ("stream.image=image.jpg", "stream.label=json:meta.label")
    assert load(text, *overrides).config.stream.label == "json:meta.label"
    assert "stream.label=none: training needs labels: give the label's member" in str(
        problems(text, "stream.label=none")
    )
    assert [line.split(": ", 1)[1] for line in problems(BASE, *overrides)] == [
        "stream.image has no effect with stream.urls=null: set stream.urls, or stream.image=null",
        "stream.label has no effect with stream.urls=null: set stream.urls, or stream.label=cls",
    ]
    assert [
        line.split(": ", 1)[1] for line in problems(text, "stream.label=.cls", "stream.image=a/b")
    ] == [
        "stream.image=a/b: expected the text after the key's dot, such as jpg or json:label",
        "stream.label=.cls: expected the text after the key's dot, such as jpg or json:label",
    ]


def test_gray_images_need_one_mean_and_no_color_operations(load, problems):
    gray = (
        "model: {in_chans: 1}\naugment: {randaugment_layers: 2}\ntrain: {steps: 1}\ndata:\n  root:"
        " a\n  mean: [0.5]\n  std: [1, 2]\n"
    )
    assert problems(gray) == [
        "run.yaml:7: data.std has 2 values, but model.in_chans is 1: give 1",
        (
            "run.yaml:2: augment.randaugment_layers needs color images (model.in_chans=3): set"
            " augment.randaugment_layers=0"
        ),
    ]
    assert load(gray, "data.std=[1]", "augment.randaugment_layers=0").config.data.std == (1.0,)


# --- settings that select samples -----------------------------------------------------------------


def test_sources_are_a_list_in_the_file_and_on_the_command_line(load):
    text = BASE.replace(
        "root: shards",
        "root: shards\n  sources:\n  - {root: a, weight: 3}\n  - root: b\n    weight: 1\n   "
        " fraction: 0.5",
    )
    config, _ = load(text)
    overridden, _ = load(
        BASE, "data.sources=[{root: a, weight: 3}, {root: b, weight: 1, fraction: 0.5}]"
    )
    assert config.data.sources == overridden.data.sources
    assert [
        (source.root, source.weight, source.fraction) for source in overridden.data.sources
    ] == [("a", 3.0, None), ("b", 1.0, 0.5)]
    assert from_dict(to_dict(config), "test") == config


def test_invalid_choices_of_samples_are_reported(problems):
    message = "; ".join(
        problems(
            BASE,
            "data.fraction=0.5",
            "data.samples_per_class=3",
            "data.sources=[{root: a, weight: 1}, {root: b, fraction_of: class}]",
        )
    )
    for expected in (
        "data.fraction has no effect with data.sources: set it in each source",
        "data.fraction and data.samples_per_class are both given: keep one of them",
        (
            "data.sources[1].fraction_of has no effect with data.sources[1].fraction=null: set"
            " data.sources[1].fraction, or remove data.sources[1].fraction_of"
        ),
        "data.sources: only some sources have a weight: give a weight to all of them, or to none",
    ):
        assert expected in message
    lines = problems(
        BASE, "data.sources=[{root: a, weight: 0}, {root: b, weight: x, samples_per_class: 0}]"
    )
    assert [line.rpartition("): ")[2] for line in lines] == [
        "data.sources[0].weight is 0, expected greater than 0",
        "data.sources[1].samples_per_class is 0, expected greater than 0",
        'data.sources[1].weight is "x", expected number',
    ]
    [line] = problems(BASE, "data.sources=[{rooot: a}]")
    assert "data.sources[0]: unknown key 'rooot'; known keys: exclude, relabel" in line


def test_all_unset_variables_are_named_beside_other_problems(load, problems, monkeypatch):
    monkeypatch.setenv("THERE", "x")
    for name in ("GONE", "LOST", "FAR"):
        monkeypatch.delenv(name, raising=False)
    sources = (
        "data.sources=[{root: 'https://host/${THERE}${LOST}'}, {root: 's3://${FAR}/b', fraction:"
        " 0.5}]"
    )
    lines = problems(BASE, "data.root=https://${GONE}@host/${GONE}", sources, "model.depth=none")
    assert [line.partition("): ")[2].partition(": export")[0] for line in lines] == [
        'model.depth is "none", expected integer',
        "data.root: ${GONE} not set in the environment",
        "data.sources: ${LOST}, ${FAR} not set in the environment",
    ]
    assert load(BASE, "data.root=$${GONE}").config.data.root == "$${GONE}", (
        "the config must not expand the variable"
    )


def test_the_login_in_the_header_of_a_stream_command_is_not_recorded(load):
    command = 'pipe:curl -H "Authorization: Bearer $TOKEN" https://host/train-{0..9}.tar'
    number = "stream.num_samples=10"
    config, _ = load(BASE, f"stream.urls={command}", number)
    assert config.stream.urls == command
    assert to_dict(config)["stream"]["urls"] == command, (
        "the name of a shell variable must not be hidden as a secret"
    )
    config, origins = load(BASE, f"stream.urls={command.replace('$TOKEN', 'a5ecret')}", number)
    assert "a5ecret" in str(config.stream.urls)
    assert "a5ecret" not in f"{to_dict(config)} {origins}"


def test_the_examples_of_the_data_page_load(load):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    examples = re.findall(r"(?m)^    [a-z]+:\n(?:      .*\n)+", page)
    assert examples
    for example in examples:
        config = load(textwrap.dedent(example) + "train: {epochs: 3}\n").config
        assert config.data.sources[1].exclude == "small.txt"
