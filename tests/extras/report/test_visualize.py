"""Test that every subcommand of `launch/visualize.py` either writes a file and prints the file's
name, or prints why it does not write a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from decoding import pixels
from extras.deleted_extras import needs
from processes import TINY, run_here, write_config

from vit.system import meter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    folder = tmp_path_factory.mktemp("base")
    config = write_config(folder, shards, steps=3)
    settings = [*TINY, f"run.dir={folder / 'run'}", "eval.every_steps=3"]
    run_here("launch/train.py", "--config", config, *settings)
    return folder / "run"


def visualized(capfd, *arguments: object) -> str:
    capfd.readouterr()
    run_here("launch/visualize.py", *arguments)
    return capfd.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        *(["patches"], ["filters"], ["positions"], ["confusion"]),
        *(["attention", "--samples", 1], ["distance", "--samples", 4], ["tokens"]),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_picture_is_written_and_named(arguments, base, tmp_path, capfd):
    out = tmp_path / "new" / "out.png"
    output = visualized(capfd, arguments[0], base, *arguments[1:], "--device", "cpu", "--out", out)
    assert output == f"{out}\n"
    assert pixels(out).shape[1] == 1400
    assert [path.name for path in out.parent.iterdir()] == ["out.png"]


@pytest.mark.parametrize("command", ["distance", "tokens"])
def test_progress_is_shown_with_rate_and_remaining_time(
    command, base, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(meter, "LOG_EVERY_S", 0.0)
    capfd.readouterr()
    arguments = [command, base, "--samples", 4, "--device", "cpu", "--out", tmp_path / "a.png"]
    run_here("launch/visualize.py", *arguments)
    assert re.search(r"4 of 4 images, ETA 0:00:00, [\d,.]+ images/s", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("command", "accepted"),
    [
        ("augment", "section.key=value  settings that override the file"),
        ("curves", "RUN run folders (default: the newest run)"),
        ("compare", "RUN_OR_FILE run folder, checkpoint or weights file options:"),
        (
            "shapes",
            "RUN_OR_FILE run folder, checkpoint or weights file, config, or a model's name"
            " (default: the newest run)",
        ),
        ("filters", "RUN_OR_FILE run folder, checkpoint or weights file (default: the newest run)"),
        ("confusion", "RUN run folder (default: the newest run)"),
    ],
)
def test_the_help_of_a_command_states_what_it_accepts(command, accepted, capfd):
    with pytest.raises(SystemExit):
        run_here("launch/visualize.py", command, "--help")
    assert " ".join(accepted.split()) in " ".join(capfd.readouterr().out.split())


def test_draws_one_picture_per_file(base, shards, tmp_path, capfd):
    folder = shards.parent / "images" / "val" / "class0"
    arguments = ["attention", base, "--image", folder, "--samples", 2, "--device", "cpu"]
    output = visualized(capfd, *arguments, "--out", tmp_path / "a.pdf")
    assert output == f"{tmp_path}/a_1.pdf\n{tmp_path}/a_2.pdf\n"
    output = visualized(capfd, *arguments, "--separate", tmp_path / "each")
    first = sorted(path.stem for path in folder.iterdir())[0]
    names = sorted(path.name for path in (tmp_path / "each" / f"0_{first}").iterdir())
    assert names == ["input.png", *(f"layer0{n // 2}_head0{n % 2 + 1}.png" for n in range(2, 6))]


def test_two_runs_on_the_same_samples(base, tmp_path, capfd):
    arguments = ["compare", base, base / "weights" / "last_ema.safetensors", "--device", "cpu"]
    with pytest.raises(ValueError, match="no difference to draw"):
        visualized(capfd, *arguments, "--out", tmp_path / "a.png")
    printed = capfd.readouterr().out
    assert "A has " in printed
    assert "only A 0, only B 0" in printed


@needs("planner")
@pytest.mark.parametrize("word", ["run", "config", "name"])
def test_prints_the_shapes_for_a_run_config_or_name(word, base, tmp_path, capfd):
    config = write_config(tmp_path, Path("nowhere"))
    named = {"run": base, "config": config, "name": "vit_ti16"}[word]
    printed = visualized(capfd, "shapes", named, "--image-size", 32, "--num-classes", 7)
    assert "-> (B, 7)" in printed
    assert "at 32x32: " in printed


@needs("planner")
def test_the_shapes_of_a_model_by_name_are_those_of_timm(capfd):
    printed = visualized(capfd, "shapes", "vit_h14", "--image-size", 196, 294)
    assert "patch_embed" in printed
    assert "(B, 295, 1280)" in printed
    assert "632,094,440 parameters" in printed


@needs("planner")
def test_costs_of_each_layer(base, capfd):
    printed = visualized(capfd, "summary", base)
    number = printed.partition(" parameters, ")[0].split()[-1]
    assert f" {number} parameters, " in visualized(capfd, "shapes", base)
    assert "blocks.1" in printed
    assert "memory in training (fp32, adamw): " in printed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["attention", "RUN", "--out", "a.gif"], "one of the suffixes png, pdf, svg"),
        (["attention", "RUN", "--image", "nowhere.jpg"], "nowhere.jpg: no such file or folder"),
        (["distance", "RUN", "--samples", "0"], "--samples 0: expected a positive number"),
        pytest.param(
            ["shapes", "vit_b17"], "the nearest that work are 221", marks=needs("planner")
        ),
        pytest.param(["summary", "vit_b"], "unknown model 'vit_b'", marks=needs("planner")),
        (["confusion", "nowhere"], "nowhere: not a run folder"),
        (["filtres", "RUN"], r"invalid choice: 'filtres' .*\(did you mean filters"),
        (["atention", "RUN"], r"invalid choice: 'atention' .*\(did you mean attention"),
        (["patches", "RUN", "--data", "nowhere"], "nowhere: no such directory"),
        (["compare", "RUN"], "the following arguments are required: RUN_OR_FILE"),
        (["filters", "RUN", "other"], "unknown: other"),
    ],
)
def test_reports_a_mistake_in_one_line(arguments, reason, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=reason):
        run_here("launch/visualize.py", *[base if word == "RUN" else word for word in arguments])
    assert not list(tmp_path.iterdir())
