"""Test runs on selected samples and on several sources: their reports, resumes after kills, and
rejected changes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from processes import TINY, Background, final_state, run, train

from vit.config.io import load_with_origins
from vit.data.storage.opening import open_split
from vit.start.print_config import describe
from vit.system.files import ShardError


@pytest.fixture(scope="module")
def other(shards, tmp_path_factory) -> Path:
    """Copy the shards to another folder, and write a file that excludes one sample."""
    root = shutil.copytree(shards, tmp_path_factory.mktemp("other") / "set")
    (root.parent / "exclude.txt").write_text(open_split(shards, "train").key(4) + "\n")
    return root


def sources(other: Path, weight: int = 1) -> str:
    second = f"{{root: {other}, weight: {weight}, exclude: {other.parent / 'exclude.txt'}}}"
    return f"data.sources=[{{weight: 3, samples_per_class: 5}}, {second}]"


def lines(run_dir: Path, kind: str) -> list[dict]:
    return [
        line
        for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == kind
    ]


@pytest.mark.slow
def test_a_killed_and_resumed_run_on_sources_equals_an_uninterrupted_run(tmp_path, config, other):
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    first, second = re.findall(
        r"chosen: (.*)", train(config, whole, sources(other), ranks=2).stderr
    )
    assert re.fullmatch(
        r"56 images per epoch \(74\.7%, 3\.73 times each\) of 15 of 60 samples of .* 'train'"
        r"; excluded: 45 by .*",
        first,
    )
    assert re.fullmatch(
        r"19 images per epoch \(25\.3%, 0\.317 times each\) of 59 of 60 samples of .*set 'train'"
        r"; excluded: 1 by .*exclude \(rows without weight\)",
        second,
    )
    [start] = lines(whole, "start")
    assert re.fullmatch(
        r"56 draws of 15 of 60 samples \([0-9a-f]{16}\); 19 draws of 60 samples, 1 changed"
        r" \([0-9a-f]{16}\)",
        start["chosen"],
    )

    background = Background(config, killed, sources(other), ranks=2)
    background.wait_for_checkpoint(3)
    background.wait_for_step(7)
    background.kill_all()
    # The resumed run reads the same samples from a different folder.
    moved = shutil.copytree(other.parent, tmp_path / "moved") / "set"
    train(config, killed, sources(moved), ranks=2)
    assert lines(killed, "start")[-1]["restarts"] == 1
    expected = final_state(whole, 12)
    state = final_state(killed, 12)
    assert not [name for name in expected if state[name] != expected[name]], (
        "some tensors differ from those of the uninterrupted run"
    )

    done = run(
        "launch/train.py",
        "--config",
        config,
        f"run.dir={killed}",
        *TINY,
        sources(other, weight=2),
        "train.steps=13",
    )
    assert done.returncode == 2
    assert re.search(
        r"data: chosen 56 draws of 15 .*; 19 draws of .* there, \d+ draws of 15 .*; \d+ draws of .*"
        r" here",
        done.stderr,
    )


def test_a_choice_is_reported_by_print_config_and_may_not_change(tmp_path, config, shards):
    (tmp_path / "label_2.txt").write_text("label=2\n")
    chosen = ["data.fraction=0.5", f"data.exclude={tmp_path / 'label_2.txt'}"]
    shown = run("launch/train.py", "--config", config, *TINY, *chosen, "--print-config").stdout
    assert re.search(r"#   training_images: 20\n", shown)
    assert re.search(
        rf"#   chosen: 20 of 60 samples of {shards} 'train'; excluded: 20 by data\.exclude"
        r" \(which changes all batches\), 20"
        r" by data\.fraction=0\.5; no image is left in 1 of \d classes\n",
        shown,
    )
    short = ["train.steps=2", "eval.every_steps=2"]
    train(config, tmp_path / "run", *short, *chosen)
    for other_choice, problem in (
        ([], "all samples here"),
        ([*chosen, "data.subset_seed=1"], r"20 of 60 samples \([0-9a-f]{16}\) here"),
    ):
        done = run(
            "launch/train.py",
            "--config",
            config,
            f"run.dir={tmp_path / 'run'}",
            *TINY,
            *short,
            *other_choice,
        )
        assert done.returncode == 2
        assert re.search(
            rf"data: chosen 20 of 60 samples \([0-9a-f]{{16}}\) there, {problem}", done.stderr
        ), done.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.exclude={shards}/nofile", r"data\.exclude=.*nofile: cannot be read \(No such file"),
        ("data.exclude={shards}/_info.json", r"data\.exclude=.*_info.json: none of its .* keys"),
    ],
)
def test_print_config_reports_mistakes_in_the_selection(config, shards, override, message):
    loaded = load_with_origins(config, [*TINY, "run.dir=unused", override.format(shards=shards)])
    with pytest.raises(ShardError, match=message):
        describe(*loaded, world_size=1)


def test_print_config_assumes_imagenet_if_the_data_are_missing(config, tmp_path):
    loaded = load_with_origins(
        config, [*TINY, "run.dir=unused", f"data.root={tmp_path}/none", "data.exclude=none.txt"]
    )
    assert "1,281,167 (assumed" in describe(*loaded, world_size=1)
