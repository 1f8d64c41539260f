"""Test that our tables of other programs' arguments match the flags, types and defaults in the
programs' parsers.

`parsers.json` contains the flags and the default of each `add_argument` call. A script extracted
them from the sources of the other programs.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from vit.config.hints import all_keys
from vit.extras.recipes import big_vision, deit, deit3_jax, mae, timm_train, torchvision_references
from vit.extras.recipes.arguments import make_table, read_words, read_yaml
from vit.extras.recipes.timm_table import OLDER_DEFAULTS

PARSERS = json.loads(Path(__file__).with_name("parsers.json").read_text())
TABLES = {
    "deit": deit.TABLE,
    "deit_submitit": deit.SUBMITIT,
    "vit5": deit.VIT5,
    "rope": deit.ROPE,
    "timm": timm_train.TABLE,
    "mae": mae.TABLE,
    "mae_submitit": mae.SUBMITIT,
    "deit3_jax": deit3_jax.TABLE,
}
ONLY_OURS = {
    # The published commands of DeiT III contain nb_classes, but its main.py derives the value from
    # the data.
    "deit": {"nb_classes"},
    "deit_submitit": {"nb_classes"},
    "vit5": {"nb_classes"},
    "rope": {"nb_classes"},
    # The arguments of earlier timm versions occur in published YAML files.
    "timm": {
        *("amp_impl", "apex_amp", "native_amp", "force_cpu", "aot_autograd"),
        *("dynamo", "dynamo_backend"),
        # since timm 1.0.29.dev0, whose parser is in parsers.json
        *("lr_decay_fn", "lr_stable_timescale", "stop_epoch", "save_epochs"),
        *("task", "target_format", "multilabel_threshold", "pretrained_cfg_overlay"),
        *("loss", "loss_pos_weight", "loss_class_weight", "loss_weight_power", "class_stats"),
        *("poly_epsilon", "poly_gamma", "sweep_locks", "sweep_attempt"),
    },
}
KINDS = {"int": "int", "float": "float", "str": "str", "eval": "str"}


def name_of(argument):
    if "dest" in argument:
        return argument["dest"]
    long = [flag for flag in argument["flags"] if flag.startswith("--")] or argument["flags"]
    return long[0].lstrip("-").replace("-", "_")


@pytest.mark.parametrize("program", TABLES)
def test_a_table_has_the_flags_and_defaults_of_the_programs_parser(program):
    theirs = [a for a in PARSERS[program]["arguments"] if a["flags"] != ["-c", "--config"]]
    ours = TABLES[program]
    their_flags = {flag: name_of(a) for a in theirs for flag in a["flags"]}
    our_flags = {flag: a.name for a in ours.arguments for flag in a.flags}
    extra = ONLY_OURS.get(program, set())
    assert {f: n for f, n in our_flags.items() if n not in extra} == their_flags
    defaults = {}
    for argument in theirs:
        absent = argument.get("action") == "store_false"
        default = argument["default"]
        if argument.get("action") == "store_true" and default is None:
            default = False
        defaults.setdefault(name_of(argument), True if absent else default)
    if program == "timm":
        defaults["decay_epochs"] = None  # since timm 1.0.31, it depends on the schedule
    defaults |= PARSERS[program]["set_defaults"]
    our_defaults = ours.defaults()
    for name, default in defaults.items():
        assert (our_defaults[name] or None) == (default or None), name


@pytest.mark.parametrize("day", OLDER_DEFAULTS)
def test_earlier_defaults_of_timm_equal_those_of_its_earlier_parsers(day):
    of_then = PARSERS[f"timm_until_{day}"]["defaults"]
    now = timm_train.TABLE.defaults()
    changed = {
        name: default
        for name, default in of_then.items()
        if name in now and (default or None) != (now[name] or None)
    }
    # Skip arguments for step schedules and batch norm, which are reported as unavailable.
    for name in ("model", "decay_milestones", "dist_bn"):
        changed.pop(name, None)
    words = list(chain.from_iterable(OLDER_DEFAULTS[day].items()))
    older = read_words(timm_train.TABLE, words)
    assert {name: older.values[name] for name in older.stated} == changed


@pytest.mark.parametrize("program", TABLES)
def test_a_table_has_the_types_of_the_programs_parser(program):
    theirs = {name_of(a): a for a in PARSERS[program]["arguments"]}
    for argument in TABLES[program].arguments:
        source = theirs.get(argument.name)
        if source is None or argument.type in ("on", "pairs", "word"):
            continue
        if argument.type.startswith("off:"):
            continue
        kind = source.get("type", "str")
        many = "s" if source.get("nargs") not in (None, "?") else ""
        assert argument.type == KINDS[kind.rpartition(".")[2]] + many, argument.name


def test_each_key_of_a_config_has_a_function_or_a_rule():
    for argument in big_vision.RULES:
        is_rule = argument.rule.startswith(("-", "{", "differs: "))
        if argument.name not in big_vision.PROGRAM.handlers and not is_rule:
            assert set(argument.rule.strip("[]?").split(", ")) <= set(all_keys()), argument.name


def test_commands_are_parsed_as_by_argparse():
    arguments = read_words(deit.TABLE, ["--batch", "32", "--unscale", "--opt-betas", ".9", ".95"])
    # --batch is an abbreviation of --batch-size.
    assert arguments.values["batch_size"] == 32
    assert arguments.values["unscale_lr"] is True
    assert arguments.values["opt_betas"] == [0.9, 0.95]
    assert arguments.stated == {"batch_size", "unscale_lr", "opt_betas"}
    assert arguments.values["model_ema"] is True, "this default is true, and a flag switches it off"
    assert read_words(deit.TABLE, ["--no-model-ema"]).values["model_ema"] is False


def test_all_unknown_flags_are_reported_together_with_the_nearest_flags():
    with pytest.raises(ValueError, match="has no") as raised:
        read_words(timm_train.TABLE, ["--bath-size", "3", "--wieght-decay=1", "--model", "x"])
    message = str(raised.value)
    assert "--bath-size (did you mean --batch-size?)" in message
    assert "--wieght-decay (did you mean --weight-decay?)" in message
    assert "as of timm 1.0.31" in message
    with pytest.raises(ValueError, match=r"lr_bsae \(did you mean lr_base\?\)"):
        read_yaml(timm_train.TABLE, "lr_bsae: 1", Path("args.yaml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "many"], "--epochs many: expected a whole number"),
        (["--lr"], "expected one argument"),
        (["--lr", "nan"], "--lr nan: expected a number"),
        (["--weight-decay=-inf", "--epochs", "3"], "--weight-decay -inf: expected a number"),
        (["--lr-warmup", "3"], "ambiguous option"),
    ],
)
def test_values_that_the_program_would_refuse_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        read_words(torchvision_references.TABLE, arguments)
    assert str(raised.value).startswith("torchvision's train.py: ")


def test_a_table_accepts_numbers():
    table = make_table("p", "s", "--lr  float  5e-4\n--betas  floats  [1, 2e-1]", "--out  str  -")
    assert table.defaults() == {"lr": 5e-4, "betas": [1.0, 0.2], "out": None}
    assert [a.in_recipe for a in table.arguments] == [True, True, False]
