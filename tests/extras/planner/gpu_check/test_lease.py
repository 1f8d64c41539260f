"""Run the parts of `lease.sh`, which is meant for a leased GPU, on a CPU with few images."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import kit
import pytest
from kills import make_place
from processes import REPOSITORY, run

FOLDER = REPOSITORY / "benchmarks" / "gpu_check"
TINY = ("model.depth=1", "data.global_batch_size=12", "eval.batch_size=8")


def test_a_kit_has_as_many_images_of_each_class_as_fit(tmp_path):
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(50):
                (folder / f"{number:02d}.jpg").write_bytes(bytes(1_000))
    each = 1_000 + kit.BYTES_AROUND_AN_IMAGE
    assert kit.link_images(tmp_path / "images", tmp_path / "kit", 60.5 * each) == 2 * (25 + 5)
    linked = {path.parent: 0 for path in (tmp_path / "kit").glob("*/*/*")}
    for path in (tmp_path / "kit").glob("*/*/*.jpg"):
        linked[path.parent] += 1
    assert sorted(linked.values()) == [5, 5, 25, 25]


def test_a_kit_replaces_no_files_and_a_failure_leaves_none(tmp_path, monkeypatch):
    for split in ("train", "test"):
        (tmp_path / "images" / split / "cat").mkdir(parents=True)
    arguments = (tmp_path / "images", "--out", tmp_path / "kit")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    done = run(str(FOLDER / "kit.py"), *arguments)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last == (
        "error: no wheels for Python 3.12 from pip's package index: pip ended with status 1, see"
        " above"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["images"]

    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "precious").touch()
    done = run(str(FOLDER / "kit.py"), *arguments)
    assert done.returncode == 2
    assert f"error: --out {tmp_path}/kit: already exists: remove it" in done.stderr
    assert (tmp_path / "kit" / "precious").exists()


def test_the_script_of_a_lease_is_valid_and_names_its_arguments(tmp_path):
    done = subprocess.run(["bash", FOLDER / "lease.sh"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "the folder of make lease-kit" in done.stderr
    line = ["bash", FOLDER / "lease.sh", "kit"]
    done = subprocess.run(
        line, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"OUT": "results"}
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path}/kit: expected folders wheels and shards: run make lease-kit"
        " IMAGES=FOLDER\n"
    )
    assert not (tmp_path / "results").exists()


def test_a_signal_ends_a_lease_with_all_its_processes(tmp_path):
    for name in ("bin", "kit/wheels", "kit/shards"):
        (tmp_path / name).mkdir(parents=True)
    python = tmp_path / "bin" / "python3"  # replaces pip, and a stage that never ends
    python.write_text('#!/bin/sh\n[ "$1" = -m ] || exec sleep 3600\n')
    python.chmod(0o755)
    env = os.environ | {"OUT": "my results", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    line = ["bash", FOLDER / "lease.sh", "kit"]
    with subprocess.Popen(line, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as lease:
        assert lease.stdout is not None
        assert lease.stdout.readline() == "== vit_b16\n"
        lease.terminate()
        # The stream ends when no process writes to it.
        assert lease.stdout.read() == ""
    assert lease.returncode == 143
    assert (tmp_path / "my results" / "log.txt").read_text() == "== vit_b16\n"


@pytest.mark.slow
@pytest.mark.full
def test_a_killed_training_on_images_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path):
    shards = make_place(tmp_path / "place").folder / "shards"
    out = tmp_path / "out"
    arguments = (shards, "--out", out, "--device", "cpu", "--epochs", "8", "--workers", "1")
    # 48 steps. The run is killed at step 24 or later, and saves every third step.
    overrides = (*TINY, "checkpoint.every_steps=3")
    done = run(str(FOLDER / "photos.py"), *arguments, *overrides, timeout_s=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the killed run ends with the bits of the undisturbed run" in done.stdout
    results = json.loads((out / "photos.json").read_text())
    assert results["killed"]["restarts"] == 1
    assert len(results["undisturbed"]["top1"]) == 8
    assert (out / "photos_killed.jsonl").exists()
