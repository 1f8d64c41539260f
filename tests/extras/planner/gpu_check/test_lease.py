"""Run the parts of a short lease of a GPU on a CPU, with few images."""

from __future__ import annotations

import json
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


def test_the_script_of_a_lease_is_valid_and_names_its_arguments(tmp_path):
    done = subprocess.run(["bash", FOLDER / "lease.sh"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "the folder of make lease-kit" in done.stderr


@pytest.mark.slow
@pytest.mark.full
def test_a_killed_training_on_images_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path):
    shards = make_place(tmp_path / "place").folder / "shards"
    out = tmp_path / "out"
    arguments = (shards, "--out", out, "--device", "cpu", "--epochs", "8", "--workers", "1")
    # 48 steps. The run is killed at step 24 or later, and saves every third step.
    overrides = (*TINY, "checkpoint.every_steps=3")
    done = run(str(FOLDER / "real_images.py"), *arguments, *overrides, timeout_s=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the killed run ends with the bits of the undisturbed run" in done.stdout
    results = json.loads((out / "real_images.json").read_text())
    assert results["killed"]["restarts"] == 1
    assert len(results["undisturbed"]["top1"]) == 8
    assert (out / "real_images_killed.jsonl").exists()
