"""Configs from files and command lines: what is read is what was written, and every mistake is told
with its place and its remedy."""

import copy
import re
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vit.config import schema as config_module
from vit.config.base import Selection, SourceConfig
from vit.config.hints import ADVICE, OTHER_NAMES, OTHER_VALUES, all_keys, setting_for
from vit.config.hints import sections as classes_of_sections
from vit.config.io import (
    ConfigError,
    LoadedConfig,
    differences,
    dump_yaml,
    from_dict,
    load_config,
    to_dict,
)
from vit.config.schema import AdamWConfig, Config, Section, SgdConfig

BASE = """\
data:
  root: shards
train:
  epochs: 3
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a text, as the file `run.yaml` of the current directory."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str) -> LoadedConfig:
        Path("run.yaml").write_text(text)
        return load_config("run.yaml", overrides)

    return load_text


@pytest.fixture
def problems(load):
    """The lines of the error that a text gives."""

    def problems_of(text: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        return str(caught.value).splitlines()

    return problems_of


# --- the settings ---------------------------------------------------------------------------------


def sections() -> list[type[Section]]:
    return [
        c
        for c in vars(config_module).values()
        if isinstance(c, type) and issubclass(c, Section) and c is not Section
    ]


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_setting_is_a_field_with_a_sentence(section):
    own = set(section.__annotations__) | (
        set(Selection.model_fields) if issubclass(section, Selection) else set()
    )
    assert own == set(section.model_fields)
    others = {
        name
        for name, value in vars(section).items()
        if not name.startswith("_") and not callable(value)
    } - set(section.model_fields)
    assert others <= {"model_config"}, "an attribute without a type is no field and cannot be set"
    if section is not Config:
        for name, field in section.model_fields.items():
            assert re.match(r"\S.*\.$", field.description or "", re.DOTALL), (
                f"{name}: {field.description!r} is no sentence"
            )


def test_every_section_can_be_reached_from_a_file():
    config = from_dict(yaml.safe_load(BASE), "test")
    of_optim = classes_of_sections()["optim"]
    assert {type(getattr(config, name)) for name in Config.model_fields} == set(sections()) - {
        Config,
        *(cls for cls in of_optim if cls is not AdamWConfig),
        Selection,
        SourceConfig,
    }
    assert {key.partition(".")[0] for key in all_keys()} == set(Config.model_fields)
    assert {f"optim.{key}" for cls in of_optim for key in cls.model_fields} <= set(all_keys())


def test_defaults_are_complete(load):
    config, origins = load(BASE)
    assert (config.data.root, config.train.epochs, config.optim.lr, config.model.name) == (
        "shards",
        3.0,
        1e-3,
        "vit_b16",
    )
    assert origins == {
        "data.root": "run.yaml:2",
        "train.epochs": "run.yaml:4",
        "run.dir": "name of the config file",
    }
    with pytest.raises(ValueError, match="frozen"):
        config.train.epochs = 4


def test_a_run_lives_in_the_folder_of_its_configs_name_unless_told_otherwise(load):
    assert load(BASE).config.run.dir == "runs/run"
    assert load(BASE + "run:\n  dir: elsewhere\n").config.run.dir == "elsewhere"
    config, origins = load(BASE, "run.dir=there")
    assert (config.run.dir, origins["run.dir"]) == ("there", "command line (run.dir=there)")


# --- strict YAML ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("1e-3", 1e-3),
        ("1E-3", 1e-3),
        ("1.e2", 100.0),
        (".5", 0.5),
        ("+0.25", 0.25),
        ("2", 2.0),
        ("1_000.5", 1000.5),
        ("1e+1", 10.0),
    ],
)
def test_numbers_are_numbers(load, written, number):
    assert load(BASE + f"optim: {{lr: {written}}}").config.optim.lr == number
    assert load(BASE, f"optim.lr={written}").config.optim.lr == number


@pytest.mark.parametrize(
    "word",
    ["on", "off", "yes", "no", "012", "1:30", "2024-01-01", ".inf", "0x1f", "1e", "True", "y"],
)
def test_words_stay_words(load, word):
    assert load(BASE + f"log: {{wandb_project: {word}}}").config.log.wandb_project == word
    assert load(BASE, f"log.wandb_project={word}").config.log.wandb_project == word


def test_wandb_off_needs_no_quotes(load):
    assert load(BASE + "log:\n  wandb: off\n").config.log.wandb == "off"


def test_a_key_given_twice_is_told_with_both_lines(problems):
    assert problems("data:\n  root: a\n  root: b\ntrain:\n  epochs: 1\ndata:\n  root: c\n") == [
        "run.yaml:3: data.root is given twice (first in line 2): keep one",
        "run.yaml:6: data is given twice (first in line 1): keep one",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data:\n  root: [a\ntrain:\n", r"run\.yaml:3: not valid YAML: expected ',' or '\]'"),
        ("data:\n\troot: a\n", r"run\.yaml:2: not valid YAML: found character '\\t'"),
        ("data:\n  root: a\n bad\n", r"run\.yaml:[34]: not valid YAML: "),
        (BASE + "---\n" + BASE, r"run\.yaml:5: not valid YAML: but found another document"),
        ("data:\n  root: a\x07b\n", r"run\.yaml: not valid YAML: unacceptable character #x0007"),
        (
            "data:\n  root: !!python/name:os.system x\n",
            r"run\.yaml:2: not valid YAML: .*os\.system",
        ),
        ("data:\n  root: !!binary aGVsbG8=\n", r"run\.yaml:2: not valid YAML: .*binary"),
        (
            "- data\n",
            r"run\.yaml:1: expected sections such as 'data:' with keys below them, found a list",
        ),
        ("hello", r"run\.yaml:1: expected sections .* found 'hello'"),
    ],
)
def test_what_is_no_config_is_told_with_its_line(problems, text, expected):
    (line,) = problems(text)
    assert re.match(expected, line), line


def test_a_missing_file_names_those_that_are_there(load):
    load(BASE)
    with pytest.raises(
        ConfigError,
        match=(
            r"runs\.yaml: cannot read the config file \(No such file or directory\); there are:"
            r" run\.yaml"
        ),
    ):
        load_config("runs.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        load_config(tmp_path / "run.yaml")


# --- unknown keys and wrong values ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model:\n  dept: 3\n", "run.yaml:6: unknown key 'model.dept'; did you mean model.depth?"),
        (
            "model:\n  depth: 3\n  img_size: 3\n",
            "run.yaml:7: unknown key 'model.img_size'; did you mean model.image_size?",
        ),
        (
            "eval:\n  crop_pcts: 1\n",
            "run.yaml:6: unknown key 'eval.crop_pcts'; did you mean eval.crop_pct?",
        ),
        (
            "augment:\n  crop_ratios: 1\n",
            "run.yaml:6: unknown key 'augment.crop_ratios'; did you mean augment.crop_ratio?",
        ),
        ("modle:\n  depth: 3\n", "run.yaml:5: unknown key 'modle'; did you mean model?"),
        ("lr: 0.1\n", "run.yaml:5: unknown key 'lr'; did you mean optim.lr?"),
        ("model:\n  lr: 0.1\n", "run.yaml:6: unknown key 'model.lr'; did you mean optim.lr?"),
        ("loss:\n  zzz: 1\n", "run.yaml:6: unknown key 'loss.zzz'; there are: label_smoothing"),
        (
            "optim:\n  learning_rate: 1\n",
            "run.yaml:6: unknown key 'optim.learning_rate'; did you mean optim.lr?",
        ),
        ("loss:\n  name: bce\n", "run.yaml:6: unknown key 'loss.name'; there are: label_smoothing"),
        (
            "optim:\n  layer_decay: 0.7\n",
            "run.yaml:6: unknown key 'optim.layer_decay'; there are: name, lr, weight_decay, ",
        ),
        (
            "batch_size: 64\n",
            (
                "run.yaml:5: unknown key 'batch_size'; did you mean data.global_batch_size or"
                " eval.batch_size?"
            ),
        ),
        ("num_epochs: 3\n", "run.yaml:5: unknown key 'num_epochs'; did you mean train.epochs?"),
        (
            "run:\n  resume: true\n",
            (
                "run.yaml:6: unknown key 'run.resume'; the same command again resumes, nothing else"
                " is needed"
            ),
        ),
        (
            "optim:\n  name: sgd\n  momentun: 1\n",
            "run.yaml:7: unknown key 'optim.momentun'; did you mean optim.momentum?",
        ),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest(problems, text, expected):
    (line,) = problems(BASE + text)
    assert line.startswith(expected)


@pytest.mark.parametrize("section", ["data", "train", "optim", "model"])
def test_the_batch_size_of_training_is_meant_first(problems, section):
    """Who followed a hint at eval.batch_size would train with another batch than meant."""
    (line,) = problems(BASE, f"{section}.batch_size=64")
    assert (
        line == f"command line ({section}.batch_size=64): unknown key '{section}.batch_size'; "
        "did you mean data.global_batch_size or eval.batch_size?"
    )


def test_words_of_other_programs_lead_to_settings_that_there_are():
    words = [word for known_as in OTHER_NAMES.values() for word in known_as.split()]
    assert set(OTHER_NAMES) | set(OTHER_VALUES) <= set(all_keys())
    assert len(words) == len(set(words)), "a word with two meanings"
    assert not {key.rpartition(".")[2] for key in OTHER_NAMES} & set(words) - {"batch_size"}, (
        "a setting's own name needs no row"
    )
    assert not set(ADVICE) & set(words)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--lr", "1e-3", "did you mean optim.lr=1e-3?"),
        ("--optim.lr", "1e-3", "did you mean optim.lr=1e-3?"),
        ("--batch-size", "64", "did you mean data.global_batch_size=64?"),
        ("-j", "8", "did you mean data.num_workers=8?"),
        ("--epochs", "300", "did you mean train.epochs=300?"),
        ("--epoch", "", "did you mean train.epochs=VALUE?"),
        ("--weigth-decay", "0.1", "did you mean optim.weight_decay=0.1?"),
        ("--drop-path", "0.1", "did you mean model.drop_path_rate=0.1?"),
        ("--batchsize", "8", "did you mean data.global_batch_size=8?"),
        ("--optim.lrr", "1", "did you mean optim.lr=1?"),
        ("--aa", "rand-m9-mstd0.5-inc1", "did you mean augment.randaugment_layers=VALUE?"),
        ("--eval-interval", "500", "did you mean eval.every_epochs=VALUE?"),
        ("--eval.every_epochs", "5", "did you mean eval.every_epochs=5?"),
        (
            "--accum-iter",
            "4",
            (
                "accumulation follows from data.micro_batch_size, the images in one forward pass of"
                " a rank"
            ),
        ),
        ("--resume", "", "the same command again resumes, nothing else is needed"),
        ("--gpus", "8", "torchrun --nproc_per_node=N starts N ranks"),
        ("--zzz", "", ""),
    ],
)
def test_an_option_of_other_programs_is_the_setting_that_it_means(option, value, expected):
    assert setting_for(option, value) == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("optim.lr", "fast", '"fast", expected number'),
        ("optim.lr", "0", "0, expected greater than 0"),
        ("optim.lr", "[1, 2]", "[1, 2], expected number"),
        ("optim.name", "lamb", "\"lamb\", expected 'adamw' or 'sgd'"),
        ("optim.betas", "[0.9]", "[0.9], expected at least 2 values"),
        ("optim.betas", "[0.9, 0.9, 0.9]", "[0.9, 0.9, 0.9], expected at most 2 values"),
        ("model.qkv_bias", "yes", '"yes", expected boolean'),
        ("model.qkv_bias", "1", "1, expected boolean"),
        ("model.in_chans", "2", "2, expected 1 or 3"),
        ("model.image_size", "big", '"big", expected integer or array'),
        ("model.image_size", "[224]", "[224], expected integer or at least 2 values"),
        ("train.seed", "1.5", "1.5, expected integer"),
        (
            "train.seed",
            "9223372036854775808",
            "9223372036854775808, expected less than 9223372036854775808",
        ),
        ("train.precision", "fp64", "\"fp64\", expected 'fp32', 'bf16' or 'fp16'"),
        ("data.global_batch_size", "0", "0, expected greater than 0"),
        ("data.root", "1e3", "1000.0, expected string"),
        ("data.root", "", "null, expected string"),
        ("loss.label_smoothing", "1.0", "1.0, expected less than 1"),
        ("augment.mixup_alpha", "1e999", "Infinity, expected finite number"),
        ("log.wandb", "false", "false, expected 'auto', 'online', 'offline' or 'off'"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(problems, key, value, expected):
    override = f"{key}={value}"
    assert problems(BASE, override) == [f"command line ({override}): {key} is {expected}"]


def test_an_element_of_a_list_is_told_with_its_place(problems):
    assert problems(BASE + "augment:\n  crop_scale: [0, 5]\n") == [
        "run.yaml:6: augment.crop_scale[0] is 0, expected greater than 0",
        "run.yaml:6: augment.crop_scale[1] is 5, expected less than or equal to 1",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "",
            [
                "run.yaml: data is required; data.root, for one",
                "run.yaml: train is required; train.epochs or train.steps, for one",
            ],
        ),
        (
            "data:\ntrain: 3\n",
            [
                "run.yaml:1: data is null, expected keys below it",
                "run.yaml:2: train is 3, expected keys below it",
            ],
        ),
        ("data:\n  val_split: x\ntrain:\n  steps: 3\n", ["run.yaml: data.root is required"]),
    ],
)
def test_missing_sections_and_keys_are_told(problems, text, expected):
    assert problems(text) == expected


def test_all_problems_come_at_once(problems):
    text = BASE + "optm:\n  lr: 1\nmodel:\n  depth: x\n  heads: 3\nloss:\n  label_smoothing: 2\n"
    lines = problems(text, "train.steps", "train.stepz=3", "optim.lr=-1", "data.root=[")
    for expected in (
        "run.yaml:5: unknown key 'optm'",
        "run.yaml:8: model.depth",
        "run.yaml:9: unknown key 'model.heads'",
        "run.yaml:11: loss.label_smoothing",
        "command line: 'train.steps' is not of the form section.key=value",
        "command line (train.stepz=3): unknown key",
        "command line (optim.lr=-1): optim.lr is -1",
        "command line (data.root=[): '[' is not a YAML value",
    ):
        assert sum(line.startswith(expected) for line in lines) == 1, f"{expected} in {lines}"
    assert len(lines) == 8


# --- overrides ------------------------------------------------------------------------------------


def test_overrides_win_over_the_file_which_wins_over_the_defaults(load):
    text = BASE + "optim:\n  lr: 0.5\n  eps: 1e-7\nmodel:\n  image_size: 64\n"
    config, origins = load(
        text,
        "optim.lr=0.1",
        "optim.lr=0.2",
        "model.image_size=[32, 48]",
        "log.wandb_project=a=b",
        "model.depth=2",
    )
    assert (config.optim.lr, config.optim.eps, config.optim.weight_decay) == (0.2, 1e-7, 0.05)
    assert (config.model.image_size, config.model.depth, config.log.wandb_project) == (
        (32, 48),
        2,
        "a=b",
    )
    assert origins["optim.lr"] == "command line (optim.lr=0.2)"
    assert origins["optim.eps"] == "run.yaml:7"
    given_keys = {
        "data.root",
        "train.epochs",
        "optim.lr",
        "optim.eps",
        "model.image_size",
        "log.wandb_project",
        "model.depth",
    }
    assert set(origins) - {"run.dir"} == given_keys


@pytest.mark.parametrize(
    "override", ["train.steps", "steps=3", "=3", "lr=1", "train={steps: 3}", ""]
)
def test_an_override_of_another_form_is_refused(problems, override):
    assert problems(BASE, override)[0].startswith(
        f"command line: {override!r} is not of the form section.key=value"
    )


def test_any_iterable_of_overrides_will_do(load):
    load(BASE)
    config, _ = load_config("run.yaml", iter(["train.steps=3", "optim.lr=0.5"]))
    assert (config.train.steps, config.optim.lr) == (3, 0.5)


# --- settings that depend on each other -----------------------------------------------------------

PAIRS = [
    ("train", "epochs", "steps"),
    ("schedule", "warmup_epochs", "warmup_steps"),
    ("eval", "every_epochs", "every_steps"),
]


@pytest.mark.parametrize(("section", "epochs", "steps"), PAIRS)
def test_one_form_on_the_command_line_replaces_the_other_of_the_file(load, section, epochs, steps):
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
            "null gives nothing, so it replaces nothing"
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
    without_effect = "has no effect with this optim.name: remove it, or change optim.name"
    assert problems(BASE + "optim:\n  momentum: 0.9\n") == [
        f"run.yaml:6: optim.momentum {without_effect}"
    ]
    assert problems(BASE + "optim:\n  name: sgd\n  betas: [0.9, 0.99]\n") == [
        f"run.yaml:7: optim.betas {without_effect}"
    ]
    assert load(BASE + "optim:\n  name: sgd\n  momentum: 0.8\n").config.optim == SgdConfig(
        name="sgd", momentum=0.8
    )
    assert load(BASE + "optim:\n  betas: [0.9, 0.95]\n").config.optim == AdamWConfig(
        betas=(0.9, 0.95)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "schedule:\n  name: constant\n  min_lr: 1e-4\n",
            "run.yaml:7: schedule.min_lr has no effect with schedule.name=constant: remove it",
        ),
        (
            "schedule:\n  min_lr: 0.1\n",
            "run.yaml:6: schedule.min_lr=0.1 exceeds optim.lr=0.001: the rate falls towards it",
        ),
        (
            "augment:\n  crop_ratio: [2.0, 0.5]\n",
            "run.yaml:6: augment.crop_ratio is [2.0, 0.5]: the first must not exceed the second",
        ),
        (
            "optim: {name: sgd, momentum: 0.0, nesterov: true}\n",
            "run.yaml:5: optim.nesterov needs optim.momentum above 0",
        ),
        (
            "eval:\n  crop_pct: 0.9\n  resize_px: 256\n",
            "run.yaml:6: eval.crop_pct and eval.resize_px are both given: keep one of them",
        ),
        (
            "eval:\n  resize_px: 200\n",
            (
                "run.yaml:6: eval.resize_px=200 is below model.image_size=224: the crop would not"
                " be filled"
            ),
        ),
        (
            "eval:\n  resize_px: 256\nmodel:\n  image_size: [224, 192]\n",
            (
                "run.yaml:6: eval.resize_px needs square images, model.image_size is [224, 192]:"
                " use eval.crop_pct"
            ),
        ),
        (
            "init:\n  reset_head: true\n",
            (
                "run.yaml:6: init.reset_head has no effect without init.checkpoint: give one, or"
                " remove init.reset_head"
            ),
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(problems, text, expected):
    assert problems(BASE + text) == [expected]


def test_members_of_streamed_samples(load, problems):
    text = BASE.replace(
        "data:\n", "data:\n  reader: webdataset\n  stream: a.tar\n  num_samples: 9\n"
    )
    assert text != BASE
    given = ("data.stream_image=image.jpg", "data.stream_label=json:meta.label")
    assert load(text, *given).config.data.stream_label == "json:meta.label"
    assert [line.split(": ", 1)[1] for line in problems(BASE, *given)] == [
        "data.stream_image has no effect with data.reader=index: remove it",
        "data.stream_label has no effect with data.reader=index: remove it",
    ]
    assert [
        line.split(": ", 1)[1]
        for line in problems(text, "data.stream_label=.cls", "data.stream_image=a/b")
    ] == [
        "data.stream_image=a/b: expected what follows the key's dot, as jpg or json:label",
        "data.stream_label=.cls: expected what follows the key's dot, as jpg or json:label",
    ]


def test_grey_images_need_one_mean_and_no_colour_operations(load, problems):
    grey = (
        "model: {in_chans: 1}\naugment: {randaugment_layers: 2}\ntrain: {steps: 1}\ndata:\n  root:"
        " a\n  mean: [0.5]\n  std: [1, 2]\n"
    )
    assert problems(grey) == [
        "run.yaml:7: data.std has 2 values, model.in_chans is 1: give 1",
        (
            "run.yaml:2: augment.randaugment_layers needs colour images (model.in_chans=3): set it"
            " to 0"
        ),
    ]
    assert load(grey, "data.std=[1]", "augment.randaugment_layers=0").config.data.std == (1.0,)


# --- round trips ----------------------------------------------------------------------------------

words = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=12
)
traps = st.sampled_from(
    [
        "null",
        "Null",
        "~",
        "true",
        "off",
        ".5",
        "1e3",
        "12",
        "#",
        "-",
        "'",
        '"',
        "=",
        "<<",
        "a#b",
        "a: b",
        " a ",
        "\n",
    ]
)
numbers = st.floats(min_value=1e-12, max_value=1e9)


@given(
    root=words | traps,
    project=traps,
    lr=numbers,
    epochs=numbers,
    seed=st.integers(0, 2**63 - 1),
    size=st.integers(1, 4096) | st.tuples(st.integers(1, 99), st.integers(1, 99)).map(list),
    checkpoint=st.none() | words,
    optimizer=st.sampled_from(
        [{}, {"name": "sgd", "nesterov": True}, {"betas": [0.5, 0.25], "clip_grad_norm": None}]
    ),
)
def test_what_is_dumped_is_read_back(
    tmp_path_factory, root, project, lr, epochs, seed, size, checkpoint, optimizer
):
    values = {
        "data": {"root": root},
        "run": {"dir": project},
        "log": {"wandb_project": project},
        "optim": {"lr": lr, **optimizer},
        "train": {"epochs": epochs, "seed": seed},
        "model": {"image_size": size},
        "init": {"checkpoint": checkpoint},
    }
    config = from_dict(values, "test")
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(
        dump_yaml(to_dict(config), {"data.root": "run.yaml:2", "optim.lr": "command line"}),
        encoding="utf-8",
    )
    assert load_config(path).config == config
    assert from_dict(to_dict(config), "test") == config
    assert yaml.safe_load(path.read_text("utf-8"))["train"]["seed"] == seed


def test_comments_stand_at_the_ends_of_their_lines():
    text = dump_yaml(
        {"train": {"steps": 3, "seed": 0}, "log": {"wandb": "off"}}, {"train.steps": "run.yaml:4"}
    )
    assert re.fullmatch(r"train:\n  steps: 3 +# run\.yaml:4\n  seed: 0\nlog:\n  wandb: off\n", text)


def test_the_fields_of_an_older_run_are_checked_too():
    values = to_dict(from_dict(yaml.safe_load(BASE), "test"))
    values["train"]["sead"] = 3
    with pytest.raises(
        ConfigError,
        match=r"^runs/old/config\.yaml: unknown key 'train\.sead'; did you mean train\.seed\?$",
    ):
        from_dict(values, "runs/old/config.yaml")


def test_differences_are_told_by_dotted_key():
    old = to_dict(from_dict(yaml.safe_load(BASE), "test"))
    new = copy.deepcopy(old)
    assert differences(old, new) == {}
    new["train"]["epochs"] = 4.0
    new["model"]["image_size"] = [32, 32]
    new["optim"] = to_dict(
        from_dict({**yaml.safe_load(BASE), "optim": {"name": "sgd", "lr": 1e-3}}, "test")
    )["optim"]
    changed = differences(old, new)
    assert changed["train.epochs"] == (3.0, 4.0)
    assert changed["model.image_size"] == (224, [32, 32])
    assert changed["optim.name"] == ("adamw", "sgd")
    assert changed["optim.betas"] == ([0.9, 0.999], None), "sgd has no betas"
    assert changed["optim.momentum"] == (None, 0.9)
    assert "optim.lr" not in changed


# --- what chooses samples -------------------------------------------------------------------------


def test_sources_are_a_list_in_the_file_and_on_the_command_line(load):
    text = BASE.replace(
        "root: shards",
        "root: shards\n  sources:\n  - {root: a, weight: 3}\n  - root: b\n    weight: 1\n   "
        " fraction: 0.5",
    )
    config, _ = load(text)
    given, _ = load(
        BASE, "data.sources=[{root: a, weight: 3}, {root: b, weight: 1, fraction: 0.5}]"
    )
    assert config.data.sources == given.data.sources
    assert [(source.root, source.weight, source.fraction) for source in given.data.sources] == [
        ("a", 3.0, None),
        ("b", 1.0, 0.5),
    ]
    assert from_dict(to_dict(config), "test") == config


def test_what_cannot_be_chosen_is_told(problems):
    told = "; ".join(
        problems(
            BASE,
            "data.filter=widht > 3",
            "data.fraction=0.5",
            "data.samples_per_class=3",
            "data.sources=[{root: a, weight: 1}, {root: b, fraction_of: class}]",
        )
    )
    for expected in (
        "data.filter has no effect with data.sources: give it in each source",
        "data.filter: 'widht' at character 1 of 'widht > 3': no column, did you mean width?",
        "data.fraction and data.samples_per_class are both given: keep one of them",
        (
            "data.sources[1].fraction_of has no effect without data.sources[1].fraction: give one,"
            " or remove it"
        ),
        "data.sources: some have a weight and some have none: give all of them one, or none",
    ):
        assert expected in told
    told = problems(
        BASE, "data.sources=[{root: a, weight: 0}, {root: b, weight: x, samples_per_class: 0}]"
    )
    assert [line.rpartition("): ")[2] for line in told] == [
        "data.sources[0].weight is 0, expected greater than 0",
        "data.sources[1].samples_per_class is 0, expected greater than 0",
        'data.sources[1].weight is "x", expected number',
    ]
    [told] = problems(BASE, "data.sources=[{rooot: a}]")
    assert "data.sources[0]: unknown key 'rooot'; there are: exclude, filter" in told
    [told] = problems(BASE, "data.subset_seed=3")
    assert (
        "data.subset_seed has no effect without data.fraction or data.samples_per_class: remove it"
        in told
    )


def test_all_variables_that_are_not_set_are_named_with_what_else_is_wrong(
    load, problems, monkeypatch
):
    monkeypatch.setenv("THERE", "x")
    for name in ("GONE", "LOST", "FAR"):
        monkeypatch.delenv(name, raising=False)
    sources = (
        "data.sources=[{root: 'https://host/${THERE}${LOST}'}, {root: 's3://${FAR}/b', fraction:"
        " 0.5}]"
    )
    lines = problems(BASE, "data.root=https://${GONE}@host/${GONE}", sources, "model.depth=none")
    assert [line.partition("): ")[2].partition(";")[0] for line in lines] == [
        'model.depth is "none", expected integer',
        "data.root: ${GONE} not set in the environment",
        "data.sources: ${LOST}, ${FAR} not set in the environment",
    ]
    assert load(BASE, "data.root=$${GONE}").config.data.root == "$${GONE}", (
        "as it was written: what it stands for is used and not kept"
    )


def test_a_command_with_a_header_is_a_text_whose_login_is_not_recorded(load):
    command = 'pipe:curl -H "Authorization: Bearer $TOKEN" https://host/train-{0..9}.tar'
    streams = ("data.reader=webdataset", "data.num_samples=10")
    config, _ = load(BASE, f"data.stream={command}", *streams)
    assert config.data.stream == command
    assert to_dict(config)["data"]["stream"] == command, (
        "the shell's name of a variable is no secret"
    )
    config, origins = load(BASE, f"data.stream={command.replace('$TOKEN', 'a5ecret')}", *streams)
    assert "a5ecret" in str(config.data.stream)
    assert "a5ecret" not in f"{to_dict(config)} {origins}"


def test_the_examples_of_the_page_on_data_can_be_loaded(load):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    found = re.findall(r"(?m)^    [a-z]+:\n(?:      .*\n)+", page)
    assert found
    for example in found:
        config = load(textwrap.dedent(example) + "train: {epochs: 3}\n").config
        assert config.data.sources[1].filter == "min(width, height) >= 64"
