"""Test that configs are read exactly from files and command lines, and that error messages contain
the line and a remedy."""

import re

import pytest
import yaml

from vit.config import optim_section, reference
from vit.config import schema as config_module
from vit.config.base import Selection, SourceConfig
from vit.config.hints import ADVICE, OTHER_NAMES, OTHER_VALUES, all_keys, setting_for
from vit.config.hints import sections as classes_of_sections
from vit.config.io import ConfigError, from_dict, load_config
from vit.config.optim_section import AdamWConfig, OptimizerConfig
from vit.config.schema import Config, EvalSetConfig, ImageSizeStage, Section

MOST_SETTINGS = 174
"""The maximum number of settings in the project. A new setting must replace an existing one that
few users need."""
BASE = """\
data:
  root: shards
train:
  epochs: 3
"""


# --- the settings ---------------------------------------------------------------------------------


def sections() -> list[type[Section]]:
    return [
        c
        for c in {**vars(optim_section), **vars(config_module)}.values()
        if isinstance(c, type) and issubclass(c, Section) and c is not Section
    ]


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_setting_is_a_described_field(section):
    inherited = (base.model_fields for base in (Selection, OptimizerConfig))
    own = set(section.__annotations__).union(
        *(fields for fields in inherited if fields.keys() <= section.model_fields.keys())
    )
    assert own == set(section.model_fields)
    untyped = {
        name
        for name, value in vars(section).items()
        if not name.startswith("_") and not callable(value)
    } - set(section.model_fields)
    assert untyped <= {"model_config"}, "a setting needs a type annotation, or users cannot set it"
    if section is not Config:
        for name, field in section.model_fields.items():
            assert re.match(r"\S.*\.$", field.description or "", re.DOTALL), (
                f"{name}: the description {field.description!r} is not a sentence"
            )


def test_a_file_can_set_every_section():
    config = from_dict(yaml.safe_load(BASE), "test")
    of_optim = classes_of_sections()["optim"]
    assert {type(getattr(config, name)) for name in Config.model_fields} == set(sections()) - {
        Config,
        *(cls for cls in of_optim if cls is not AdamWConfig),
        OptimizerConfig,
        Selection,
        SourceConfig,
        EvalSetConfig,
        ImageSizeStage,
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


def test_the_default_run_folder_has_the_name_of_the_config(load):
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
def test_numbers_are_read_as_numbers(load, written, number):
    assert load(BASE + f"optim: {{lr: {written}}}").config.optim.lr == number
    assert load(BASE, f"optim.lr={written}").config.optim.lr == number


@pytest.mark.parametrize(
    "word",
    ["on", "off", "yes", "no", "012", "1:30", "2024-01-01", ".inf", "0x1f", "1e", "True", "y"],
)
def test_words_are_read_as_strings(load, word):
    assert load(BASE + f"loader: {{cache_dir: {word}}}").config.loader.cache_dir == word
    assert load(BASE, f"loader.cache_dir={word}").config.loader.cache_dir == word


def test_wandb_off_needs_no_quotes(load):
    assert load(BASE + "log:\n  wandb: off\n").config.log.wandb == "off"


def test_a_key_given_twice_is_reported_with_both_lines(problems):
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
def test_a_file_that_is_not_a_config_is_reported_with_the_line(problems, text, expected):
    (line,) = problems(text)
    assert re.match(expected, line), line


def test_the_error_for_a_missing_file_lists_only_similar_names(load, tmp_path):
    load(BASE)
    for number in range(9):
        (tmp_path / f"recipe{number}.yaml").write_text(BASE)
    with pytest.raises(
        ConfigError,
        match=r"; nearest of the 10 files in that folder: recipe5\.yaml, recipe\d\.yaml, ",
    ):
        load_config("recipes5.yaml")


def test_a_file_that_is_not_text_is_refused(tmp_path):
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
        (
            "loss:\n  zzz: 1\n",
            "run.yaml:6: unknown key 'loss.zzz'; known keys: name, label_smoothing",
        ),
        (
            "optim:\n  learning_rate: 1\n",
            "run.yaml:6: unknown key 'optim.learning_rate'; did you mean optim.lr?",
        ),
        (
            "loss:\n  kind: bce\n",
            "run.yaml:6: unknown key 'loss.kind'; known keys: name, label_smooth",
        ),
        (
            "optim:\n  amsgrad: true\n",
            "run.yaml:6: unknown key 'optim.amsgrad'; known keys: name, lr, weight_decay, ",
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
            "run.yaml:6: unknown key 'run.resume'; run the same command again to resume",
        ),
        (
            "optim:\n  name: sgd\n  momentun: 1\n",
            "run.yaml:7: unknown key 'optim.momentun'; did you mean optim.momentum?",
        ),
    ],
)
def test_an_unknown_key_is_reported_with_the_nearest(problems, text, expected):
    (line,) = problems(BASE + text)
    assert line.startswith(expected)


@pytest.mark.parametrize("section", ["data", "train", "optim", "model"])
def test_the_hint_for_batch_size_puts_the_training_batch_first(problems, section):
    """If the error message suggested eval.batch_size first, users would train with the wrong batch
    size."""
    (line,) = problems(BASE, f"{section}.batch_size=64")
    assert (
        line == f"command line ({section}.batch_size=64): unknown key '{section}.batch_size'; "
        "did you mean data.global_batch_size or eval.batch_size?"
    )


def test_the_number_of_settings_does_not_grow():
    assert len(reference.settings()) <= MOST_SETTINGS, "remove a setting before you add one"


def test_names_of_other_programs_map_to_existing_settings():
    other_names = [word for known_as in OTHER_NAMES.values() for word in known_as.split()]
    assert set(OTHER_NAMES) | set(OTHER_VALUES) <= set(all_keys())
    assert len(other_names) == len(set(other_names)), (
        "another program's name must map to a single setting"
    )
    assert not {key.rpartition(".")[2] for key in OTHER_NAMES} & set(other_names) - {
        # Some programs call weight decay `decay`, which is also the name of our setting ema.decay.
        *("batch_size", "decay")
    }, "a setting's own name must not be listed as another program's name"
    assert not set(ADVICE) & set(other_names)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--lr", "1e-3", "did you mean optim.lr=1e-3?"),
        ("--optim.lr", "1e-3", "did you mean optim.lr=1e-3?"),
        ("--batch-size", "64", "did you mean data.global_batch_size=64?"),
        ("-j", "8", "did you mean loader.num_workers=8?"),
        ("--epochs", "300", "did you mean train.epochs=300?"),
        ("--epoch", "", "did you mean train.epochs=VALUE?"),
        ("--weigth-decay", "0.1", "did you mean optim.weight_decay=0.1?"),
        ("--drop-path", "0.1", "did you mean model.drop_path_rate=0.1?"),
        ("--batchsize", "8", "did you mean data.global_batch_size=8?"),
        ("--optim.lrr", "1", "did you mean optim.lr=1?"),
        ("--aa", "rand-m9-mstd0.5-inc1", "did you mean augment.randaugment_layers=VALUE?"),
        ("--eval-interval", "500", "did you mean eval.every_epochs=VALUE?"),
        ("--eval.every_epochs", "5", "did you mean eval.every_epochs=5?"),
        ("--eval.batch_size", "8", "did you mean eval.batch_size=8?"),
        ("--checkpoint.every_steps", "9", "did you mean checkpoint.every_steps=9?"),
        ("--patch-size", "16", "did you mean model.patch_size=16?"),
        ("--optimizer.lr", "1e-3", "did you mean optim.lr=1e-3?"),
        (
            "--accum-iter",
            "4",
            (
                "set data.micro_batch_size, the images per forward pass of a rank, to accumulate"
                " gradients"
            ),
        ),
        ("--resume", "", "run the same command again to resume"),
        ("--gpus", "8", "torchrun --nproc_per_node=N starts N ranks"),
        ("--zzz", "", ""),
    ],
)
def test_the_hint_for_an_option_of_another_program_names_our_setting(option, value, expected):
    assert setting_for(option, value) == expected


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("optim.lr", "fast", '"fast", expected number'),
        ("optim.lr", "0", "0, expected greater than 0"),
        ("optim.lr", "[1, 2]", "[1, 2], expected number"),
        (
            "optim.name",
            "lion",
            (
                "\"lion\", expected 'adamw' or 'sgd' or 'lamb' or 'nadamw' or 'muon' or 'adamuon'"
                " or 'adafactorbv'"
            ),
        ),
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
        ("train.precision", "fp64", "\"fp64\", expected 'auto', 'fp32', 'bf16' or 'fp16'"),
        ("data.global_batch_size", "0", "0, expected greater than 0"),
        ("data.root", "1e3", "1000.0, expected string"),
        ("data.root", "", "null, expected string"),
        ("loss.label_smoothing", "1.0", "1.0, expected less than 1"),
        ("augment.mixup_alpha", "1e999", "Infinity, expected finite number"),
        ("log.wandb", "false", "false, expected 'auto', 'online', 'offline' or 'off'"),
    ],
)
def test_a_wrong_value_is_reported_with_what_is_allowed(problems, key, value, expected):
    override = f"{key}={value}"
    assert problems(BASE, override) == [f"command line ({override}): {key} is {expected}"]


def test_a_wrong_list_element_is_reported_with_its_position(problems):
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
                "run.yaml: data is required: set data.root",
                "run.yaml: train is required: set train.epochs or train.steps",
            ],
        ),
        (
            "data:\ntrain: 3\n",
            [
                "run.yaml:1: data is null, expected a mapping of keys",
                "run.yaml:2: train is 3, expected a mapping of keys",
            ],
        ),
        ("data:\n  val_split: x\ntrain:\n  steps: 3\n", ["run.yaml: data.root is required"]),
    ],
)
def test_missing_sections_and_keys_are_reported(problems, text, expected):
    assert problems(text) == expected


def test_all_problems_are_reported_together(problems):
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


def test_overrides_take_precedence_over_the_file_and_the_file_over_defaults(load):
    text = BASE + "optim:\n  lr: 0.5\n  eps: 1e-7\nmodel:\n  image_size: 64\n"
    config, origins = load(
        text,
        "optim.lr=0.1",
        "optim.lr=0.2",
        "model.image_size=[32, 48]",
        "loader.cache_dir=a=b",
        "model.depth=2",
    )
    assert (config.optim.lr, config.optim.eps, config.optim.weight_decay) == (0.2, 1e-7, 0.05)
    assert (config.model.image_size, config.model.depth, config.loader.cache_dir) == (
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
        "loader.cache_dir",
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


def test_overrides_may_be_any_iterable(load):
    load(BASE)
    config = load_config("run.yaml", iter(["train.steps=3", "optim.lr=0.5"]))
    assert (config.train.steps, config.optim.lr) == (3, 0.5)
