"""Test that each mistake on the command line of a launch/ command prints one line that suggests the
correct argument."""

from __future__ import annotations

import re
import sys

import pytest
from extras.deleted_extras import needs_of
from processes import call, environment, run_here

from vit.system.command_line import as_typed

CONFIG = ["--config", "configs/demo.yaml"]


@pytest.fixture
def refusal(capsys):
    def refused(script: str, *arguments: str) -> str:
        typed = re.escape(as_typed(f"python launch/{script}.py"))
        with pytest.raises(ValueError, match=rf"\({typed} .*--help lists the options\)") as caught:
            run_here(f"launch/{script}.py", *arguments)
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == ("", ""), "argparse's usage must not be printed"
        assert "\n" not in str(caught.value)
        return str(caught.value).rpartition(" (")[0]

    return refused


MISTAKES: list[tuple[str, list[str], str]] = [
    (
        "train",
        ["--confg", "configs/demo.yaml"],
        "unknown: --confg configs/demo.yaml; did you mean --config?",
    ),
    ("train", [*CONFIG, "--prin-config"], "unknown: --prin-config; did you mean --print-config?"),
    ("train", [*CONFIG, "--lr", "1e-3"], "unknown: --lr 1e-3; did you mean optim.lr=1e-3?"),
    (
        "train",
        [*CONFIG, "--optim.lr=1e-3"],
        "unknown: --optim.lr=1e-3; did you mean optim.lr=1e-3?",
    ),
    ("train", [*CONFIG, "--resume"], "unknown: --resume; run the same command again to resume"),
    (
        "train",
        ["--batch-size", "64", "--epochs=5", *CONFIG, "train.seed=1"],
        (
            "unknown: --batch-size 64 --epochs=5; did you mean data.global_batch_size=64?; did"
            " you mean train.epochs=5?"
        ),
    ),
    (
        "train",
        [*CONFIG, "--amp", "optim.lr=1"],
        "unknown: --amp; did you mean train.precision=VALUE?",
    ),
    ("train", [], "the following arguments are required: --config"),
    (
        "train",
        ["configs/demo.yaml", "optim.lr=1"],
        "the following arguments are required: --config",
    ),
    ("train", ["optim.lr=1", "--config"], "argument --config: expected one argument"),
    (
        "eval",
        ["--chekpoint", "runs/demo"],
        "unknown: --chekpoint runs/demo; did you mean --checkpoint?",
    ),
    (
        "eval",
        ["runs/demo", "runs/demo"],
        "runs/demo and runs/demo: a checkpoint is listed twice: remove one",
    ),
    (
        "eval",
        ["runs/demo", "--checkpoint", "runs/b16", "--finetune", "a.yaml"],
        "runs/demo and runs/b16: pass one run or file to fine-tune",
    ),
    (
        "eval",
        ["runs/demo", "data.root=a", "eval.batch_size=3"],
        "data.root=a: only eval.* settings are allowed without --finetune",
    ),
    ("eval", ["runs/demo", "--lr", "1"], "unknown: --lr 1; did you mean optim.lr=1?"),
    ("report", ["runs/demo", "more"], "unknown: more"),
    ("report", ["--devise", "cpu"], "unknown: --devise; did you mean --device?"),
    (
        "visualize",
        ["augment", *CONFIG, "--image", "3"],
        "unknown: --image 3; did you mean --images?",
    ),
    ("visualize", ["augment", "--confg", "x"], "unknown: --confg x; did you mean --config?"),
]


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [pytest.param(*mistake, marks=needs_of(f"launch/{mistake[0]}.py")) for mistake in MISTAKES],
)
def test_reports_an_unknown_option_with_the_probable_one(refusal, script, arguments, expected):
    assert refusal(script, *arguments) == expected


def test_evaluation_and_prediction_reject_numbers_with_the_same_message():
    flags = ["--batch-size", "0", "--num-workers", "-1", "--image-size", "0"]
    messages = []
    for command in (["launch/eval.py", "runs/none"], ["launch/predict.py", "none.jpg"]):
        with pytest.raises(ValueError, match="expected at least") as caught:
            run_here(command[0], command[1], *flags)
        messages.append(re.sub(r" \([^()]* lists the options\)$", "", str(caught.value)))
    assert messages[0] == messages[1]
    assert messages[0].split("; ") == [
        "--batch-size 0: expected at least 1",
        "--num-workers -1: expected at least 0",
        "--image-size: expected a side, or height and width, in pixels",
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"),
    [
        (["trian"], 2, "", r"error: unknown command 'trian' \(did you mean train\b.*\?\): run vit"),
        (["prep", "mnits"], 2, "", r"error: unknown command 'prep mnits' \(did you mean mnist"),
        (["prep", "--help"], 0, r"python -m data_prep\.imagenet ", ""),
        (
            ["xyz123"],
            2,
            "",
            r"error: unknown command 'xyz123': run vitline --help to list the commands",
        ),
        (["--version"], 0, r"vitline 0\.\d+\.\d+\n", ""),
        (["--help"], 0, r"usage: vitline COMMAND", ""),
        ([], 2, r"usage: vitline COMMAND", ""),
    ],
)
def test_vitline_lists_its_commands_and_version(arguments, status, out, err):
    done = call([sys.executable, "-m", "vit", *arguments], environment())
    assert done.returncode == status, done.stderr
    assert re.match(out or "$", done.stdout), done.stdout
    assert re.match(err or "$", done.stderr), done.stderr
