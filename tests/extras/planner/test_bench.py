"""Test `launch/bench.py` on a CPU with a tiny model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from processes import COMMANDS, TINY, call, environment, run

from vit.extras.planner.benchmark.certificate import proposal
from vit.model import create_model
from vit.training.mfu import train_flops_per_image
from vit.training.step_result import StepPhase

SETTINGS = [word for word in TINY if not word.startswith(("log.", "eval."))]


def bench(config: Path, *arguments: object, ranks: int = 0):
    return run("launch/bench.py", "--config", config, *SETTINGS, *arguments, ranks=ranks)


@pytest.fixture
def no_data(tmp_path: Path) -> Path:
    """Return a recipe whose data does not exist on this machine."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"""
model: {{drop_path_rate: 0.1}}
data: {{root: {tmp_path / "elsewhere"}, global_batch_size: 12, micro_batch_size: 6}}
augment: {{mixup_alpha: 0.8, mix_group_size: 2, randaugment_layers: 1}}
train: {{epochs: 3}}
ema: {{decay: 0.9}}
""")
    return path


def test_measures_the_step_without_data_and_its_numbers_agree(no_data):
    done = bench(no_data, "--steps", 4, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "without data" in done.stderr
    assert report["loading"] is None
    [row] = report["training"]
    assert row["num_steps"] == 4
    assert (row["rank_batch_size"], row["micro_batch_size"]) == (12, 6)
    assert not row["compiled"]
    assert row["images_per_s"] == pytest.approx(12 / row["step_s"])
    peak = report["peak_tflops"] * 1e12
    assert row["mfu"] == pytest.approx(row["flops_per_image"] * row["images_per_s"] / peak)
    assert report["peak_source"] == "measured"
    assert set(row["parts_s"]) == set(StepPhase)
    assert [part for part, seconds in row["parts_s"].items() if not seconds] == [StepPhase.TEACHER]
    assert row["planned_memory_gib"] > 0
    assert row["all_reduce"] is None


def test_measures_the_loader_and_prints_tables_if_data_exist(config, tmp_path):
    done = bench(config, "--steps", 3, "--out", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    for name in ("images/s", "share of the peak", "forward, loss", "loader alone", "as planned"):
        assert name in done.stdout, done.stdout
    [path] = (tmp_path / "results").glob("*.json")
    [loading] = json.loads(path.read_text())["loading"]
    assert loading["loader_images_per_s"] > 0
    assert loading["together_images_per_s"] > 0
    assert 0 <= loading["data_wait_share"] <= 1
    assert path.with_suffix(".md").read_text().count("| loader and step |") == 1


def test_two_ranks_share_gradients(config):
    done = bench(config, "--steps", 3, "--json", ranks=2)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [row] = report["training"]
    assert (row["num_devices"], row["rank_batch_size"]) == (2, 6)
    assert row["images_per_s"] == pytest.approx(12 / row["step_s"])
    assert row["images_per_s_per_gpu"] == pytest.approx(row["images_per_s"] / 2)
    reduced = row["all_reduce"]
    assert reduced["alone_s"] > 0
    assert reduced["exposed_s"] >= 0
    assert reduced["num_bytes"] > 4 * 10_000
    assert report["loading"]["loader_images_per_s"] > 0


def test_reduces_a_batch_that_takes_too_long(no_data):
    """A time limit of one microsecond is too short even for two images, the smallest group that can
    be mixed."""
    done = bench(no_data, "--seconds", 1e-6, "--json", "data.global_batch_size=24")
    [row] = json.loads(done.stdout)["training"]
    assert (row["rank_batch_size"], row["micro_batch_size"], row["num_steps"]) == (2, 2, 3)


def test_the_reduced_batch_divides_by_copies_and_lanes(config):
    """The batch size must be a multiple of both the number of copies per image and the number of
    shard readers. Among the divisors of 12, this is true only for 4 and 12."""
    lanes = ("order.aug_repeats=4", "order.num_lanes=1", "augment.mixup_alpha=0")
    unmixed = ("augment.cutmix_alpha=0", "augment.mix_group_size=4")
    settings = (*lanes, *unmixed, "data.micro_batch_size=2")
    done = bench(config, "--seconds", 1e-6, "--micro-batch", 2, "--json", *settings)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [row] = report["training"]
    assert (row["rank_batch_size"], row["micro_batch_size"]) == (4, 2)
    assert report["loading"]["together_images_per_s"] > 0


def test_counts_operations_for_the_measured_micro_batch(no_data):
    """With a drop path rate of 0.45 and the form `subset`, a block computes one sample of a
    micro-batch of two, but seven samples of a micro-batch of twelve."""
    fields = {"drop_path_rate": 0.45, "drop_path_form": "subset", "drop_path_schedule": "constant"}
    settings = [f"model.{name}={value}" for name, value in fields.items()]
    done = bench(no_data, "--seconds", 1e-6, "--json", *settings, "data.micro_batch_size=12")
    [row] = json.loads(done.stdout)["training"]
    assert row["micro_batch_size"] == 2
    model = create_model("vit_ti8", 16, 1000, embed_dim=32, depth=2, num_heads=2, **fields)
    assert row["flops_per_image"] == train_flops_per_image(model, 2)
    assert row["flops_per_image"] != train_flops_per_image(model, 12)


@pytest.mark.full
def test_sweeps_micro_batches_in_equal_batches_and_proposes_the_fastest(no_data):
    arguments = ("--steps", 3, "--sweep", "data.micro_batch_size=12")
    done = bench(no_data, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = report["training"]
    # Pairs of images are mixed, so odd sizes are impossible.
    assert [row["micro_batch_size"] for row in rows] == [12, 2, 4, 6]
    assert {row["rank_batch_size"] for row in rows} == {12}
    fastest = max(rows, key=lambda row: row["images_per_s"])["micro_batch_size"]
    assert f"data.micro_batch_size={fastest} (" in proposal(report)
    assert proposal(report).startswith("fastest of 12, 2, 4, 6, eager: ")
    assert proposal({"training": rows[:1]}) == ""
    done = bench(no_data, *arguments)
    assert re.search(
        r"^fastest of 12, 2, 4, 6, eager: .*; batches stay the same$", done.stdout, re.M
    )


@pytest.mark.full
def test_compiles_if_the_config_does(no_data):
    done = bench(no_data, "--steps", 3, "--json", "train.compile=true")
    assert done.returncode == 0, done.stderr
    assert [row["compiled"] for row in json.loads(done.stdout)["training"]] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian.steps=3"], "unknown key 'trian'; did you mean train"),
        (
            ["--micro-batch", 5],
            "--micro-batch 5 does not divide a rank's batch of 12 images: use one of 2, 4, 6, 12",
        ),
        (["--data", "/nowhere"], "/nowhere: no such directory"),
        (["train.device=cuda"], "train.device=cuda: 1 of 1 host.* torch sees no GPU"),
        (["--out", "recipe.yaml"], "--out recipe.yaml: cannot be written"),
        (["--steps", 0], "--steps 0: expected 1 or more"),
        (["--seconds", "nan"], "--seconds nan: expected more than 0"),
    ],
)
def test_reports_a_mistake_in_one_line(arguments, message, no_data, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = [str(word).replace("recipe.yaml", str(no_data)) for word in arguments]
    done = bench(no_data, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert re.search(message.replace("recipe.yaml", str(no_data)), errors[0]), errors[0]
    assert done.stdout == ""


@pytest.mark.full
def test_measures_the_configs_and_the_largest_micro_batch_that_fits(no_data):
    """The test simulates a GPU that runs out of memory with more than four images. Everything else
    is real."""
    imitation = """
import runpy, sys, torch, vit.model
from vit.extras.planner.benchmark import bench
from vit.system.gpus import Gpu
bench.Subject.on_gpu = True
bench.gpu_of = lambda device: Gpu("small", 1.0, 1.0, 4.0, 1.0, "small")
bench._memory_gib = lambda subject: 4.0
def forward(model, images):
    if not images.is_meta and type(images) is torch.Tensor and len(images) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return unchanged(model, images)
unchanged = vit.model.VisionTransformer.forward
vit.model.VisionTransformer.forward = forward
"""
    script = COMMANDS / "launch" / "bench.py"
    starts = f"sys.path.insert(0, {str(script.parent)!r})"
    code = f"{imitation}{starts}\nrunpy.run_path({str(script)!r}, run_name='__main__')"
    arguments = ["--steps", "3", "--json", *SETTINGS, "data.micro_batch_size=2"]
    line = [sys.executable, "-c", code, "--config", str(no_data), *arguments]
    done = call(line, environment())
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["training"]
    assert [(row["compiled"], row["micro_batch_size"]) for row in rows] == [
        (False, 2),
        (False, 4),
        (True, 2),
        (True, 4),
    ]
    assert {row["largest_micro_batch_size"] for row in rows} == {4}
    assert {row["rank_batch_size"] for row in rows} == {12}
    assert "eager: does a micro-batch of 6 fit?" in done.stderr
