"""Test `launch/eval.py` in this process, with the path of a run and with data whose classes differ
from the run's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from extras.deleted_extras import is_deleted
from PIL import Image
from processes import TINY, as_by_another_program, make_shards, run_here, write_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vit
from vit.weights.files import read_weights


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    folder = tmp_path_factory.mktemp("base")
    run_here(
        "launch/train.py",
        "--config",
        write_config(folder, shards, steps=3),
        *TINY,
        f"run.dir={folder / 'run'}",
    )
    return folder / "run"


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """Copy the images into classes that are named after colors."""
    root = shutil.copytree(shards, tmp_path_factory.mktemp("colors") / "shards")
    info = json.loads((root / "_info.json").read_text())
    (root / "_info.json").write_text(json.dumps({**info, "class_names": ["red", "green", "blue"]}))
    return root


def evaluated(capfd, *arguments: object) -> tuple[dict, str]:
    """Return the JSON object that was printed to stdout, and the messages that were printed to
    stderr."""
    capfd.readouterr()
    run_here("launch/eval.py", *arguments, "--num-workers", 0, "--device", "cpu", "--json")
    printed = capfd.readouterr()
    return json.loads(printed.out), printed.err


def test_accepts_a_run_without_its_flag(base, capfd):
    plain, messages = evaluated(capfd, "--checkpoint", base)
    assert evaluated(capfd, base)[0] == plain
    assert set(plain) == {
        "num_images",
        "correct_top1",
        "correct_top5",
        "top1",
        "top5",
        "loss",
        "ece",
        "top1_low",
        "top1_high",
    }
    assert plain["top1_low"] < plain["top1"] < plain["top1_high"]
    assert (
        f"({plain['correct_top1']} of 23; 95 % interval {plain['top1_low']:.1f} to"
        f" {plain['top1_high']:.1f})" in messages
    )
    assert "note" not in messages
    assert "last_ema.safetensors (step 3, averaged weights) on" in messages


def test_data_of_other_classes_are_reported(base, colors, capfd):
    result, messages = evaluated(capfd, base, "--data", colors)
    assert result["note"].startswith(
        "the classes of data and model differ: label 0 is 'red' in the data, 'class0' in the"
        " model, label 1 is 'green' in the data, "
    )
    assert result["note"].endswith(
        "(0 of 3 names agree): the accuracy is meaningless, unless only the names differ"
    )
    lines = messages.splitlines()
    first = lines.index(f"note: {result['note']}")
    assert lines[first + 1].endswith("23 images at 16x16")
    assert lines[first + 2].startswith("  top-1 ")
    assert not any("top-1" in line for line in lines[:first]), (
        "the note must come before the numbers"
    )


def test_fewer_classes_of_the_same_names_are_reported_as_such(base, tmp_path, capfd):
    root = make_shards(tmp_path, num_train=6, num_val=6, num_classes=2)
    assert (
        evaluated(capfd, base, "--data", root)[0]["note"]
        == "the data have the first 2 of the model's 3 classes"
    )


def test_reads_classes_from_a_checkpoint(base):
    [folder] = (base / "checkpoints").glob("step_*3")
    assert (
        read_weights(folder).class_names
        == read_weights(base).class_names
        == ["class0", "class1", "class2"]
    )


@pytest.mark.parametrize("reset_head", ["false", "true"])
def test_fine_tuning_on_other_classes_with_the_old_head_is_reported(
    reset_head, base, colors, tmp_path, capfd
):
    config = write_config(tmp_path, colors, steps=1)
    settings = [
        *TINY,
        f"run.dir={tmp_path / 'run'}",
        f"init.checkpoint={base}",
        f"init.reset_head={reset_head}",
    ]
    run_here("launch/train.py", "--config", config, *settings)
    is_reported = (
        "unless only the names differ; init.reset_head=true starts with a new head\n"
        in capfd.readouterr().err
    )
    assert is_reported == (reset_head == "false")


def test_checks_all_weights_before_evaluating_the_first(base, tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    missing = [tmp_path / "no.safetensors", tmp_path / "empty"]
    with pytest.raises(ValueError, match="does not exist") as caught:
        run_here("launch/eval.py", base, *missing, "--num-workers", 0, "--device", "cpu")
    lines = str(caught.value).splitlines()
    assert [str(path) in line for path, line in zip(missing, lines, strict=True)] == [True, True]
    assert "top-1" not in "".join(capfd.readouterr())


def changed(base: Path, path: Path, name: str, value: float, number: int = 1) -> Path:
    """Write the weights of `base` to `path` with the first `number` values of one tensor
    replaced."""
    source = base / "weights" / "last.safetensors"
    with safe_open(source, framework="pt") as file:
        metadata = as_by_another_program(file.metadata())
    tensors = load_file(source)
    tensors[name].view(-1)[:number] = value
    save_file(tensors, path, metadata)
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_each_command_refuses_weights_that_are_not_finite(value, base, shards, tmp_path):
    path = changed(base, tmp_path / "broken.safetensors", "blocks.0.attn.qkv.weight", value, 3)
    Image.new("RGB", (9, 9)).save(tmp_path / "photo.png")
    config = write_config(tmp_path, shards, steps=1)
    start = [*TINY, f"run.dir={tmp_path / 'run'}", f"init.checkpoint={path}"]
    commands = (
        ["launch/eval.py", path, "--device", "cpu"],
        ["launch/predict.py", "--checkpoint", path, tmp_path / "photo.png", "--device", "cpu"],
        ["launch/export.py", path, "--to", "timm", "--out", tmp_path / "out"],
        ["launch/train.py", "--config", config, *start],
    )
    for arguments in (line for line in commands if not is_deleted(line[0])):
        with pytest.raises(ValueError, match=r"broken\.safetensors: 3 values in 1 of 32 weights"):
            run_here(*arguments)
    with pytest.raises(ValueError, match=r"are NaN or infinite \(blocks\.0\.attn\.qkv\.weight\)"):
        vit.load(path)
    assert not (tmp_path / "out").exists()


def test_logits_that_are_not_finite_end_an_evaluation(base, tmp_path, capfd):
    path = changed(base, tmp_path / "huge.safetensors", "head.weight", 3e38, 32)
    with pytest.raises(ValueError, match=r"huge\.safetensors: logits on val are NaN or infinite"):
        evaluated(capfd, path)
    assert not capfd.readouterr().out
