"""Test that whole runs end with the same weight hashes on any number of ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import (
    TINY,
    Background,
    call,
    command,
    environment,
    final_state,
    make_shards,
    run,
    train,
    write_config,
)
from ranks import together

from vit.config.io import load_config
from vit.distributed.exact.leaves import check_leaves, same_kernels
from vit.distributed.process_group import KERNEL_LIMITS
from vit.distributed.world import World
from vit.training.plan import make_plan

STEPS = 60

EXACT = (
    *("train.exact_over_ranks=true", "data.micro_batch_size=4", "augment.randaugment_layers=2"),
    *("guard.on_spike=skip", "guard.window_steps=8", "guard.spike_sigmas=1"),
    "log.norms_every_steps=6",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """Return a config with six micro-batches per step, dropout, drop path, mixing and averaged
    weights."""
    folder = tmp_path_factory.mktemp("exact")
    return write_config(folder, make_shards(folder), steps=STEPS, batch=24)


def record(run_dir: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def hashes(run_dir: Path) -> dict[int, str]:
    return {line["step"]: line["sha256"] for line in record(run_dir, "checkpoint")}


def losses(run_dir: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in record(run_dir, "train")]


def measured(run_dir: Path) -> list[dict]:
    return [{**line, "time": 0} for line in record(run_dir, "norms")]


def faults(run_dir: Path) -> list[tuple]:
    """Return the faults in the metrics: the skipped updates, and the samples with the largest
    losses across all ranks."""
    return [(line["step"], line["reason"], line["samples"]) for line in record(run_dir, "fault")]


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(config, folder / "run", *EXACT)
    return folder / "run"


def test_any_number_of_ranks_gives_the_same_bits_even_with_unequal_shares(config, alone, tmp_path):
    train(config, tmp_path / "4", *EXACT, ranks=4)
    assert list(hashes(alone)) == [*range(3, STEPS + 1, 3)]
    assert hashes(tmp_path / "4") == hashes(alone)
    assert losses(tmp_path / "4") == losses(alone)
    assert measured(tmp_path / "4") == measured(alone)
    assert faults(tmp_path / "4") == faults(alone) != []


def test_no_bit_changes_when_killed_on_three_ranks_and_finished_on_two(config, alone, tmp_path):
    killed = Background(config, tmp_path / "run", *EXACT, ranks=3)
    killed.wait_for_checkpoint(3)
    killed.kill_all()
    train(config, tmp_path / "run", *EXACT, ranks=2)
    first, second = record(tmp_path / "run", "start")
    assert (first["world_size"], second["world_size"]) == (3, 2)
    assert 0 < second["step"] < STEPS
    assert hashes(tmp_path / "run").items() <= hashes(alone).items()
    assert STEPS in hashes(tmp_path / "run")


# ---- long runs -----------------------------------------------------------------------------------

MANY_RANKS = (1, 2, 3, 4, 6, 8)
SELDOM = "checkpoint.every_steps=20"


@pytest.fixture(scope="module")
def eight_leaves(tmp_path_factory) -> Path:
    """Return a config for 200 steps with eight micro-batches each, which can run on up to eight
    ranks."""
    folder = tmp_path_factory.mktemp("eight")
    return write_config(folder, make_shards(folder), steps=200, batch=32)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_hundred_steps_on_one_to_eight_ranks(eight_leaves, tmp_path, precision):
    """The runs use dropout, drop path, mixing, RandAugment, averaged weights and a guard that skips
    updates."""
    for ranks in MANY_RANKS:
        run_dir = tmp_path / str(ranks)
        precision_too = (f"train.precision={precision}", SELDOM)
        train(eight_leaves, run_dir, *EXACT, *precision_too, ranks=ranks)
    hashes_by_ranks = {ranks: hashes(tmp_path / str(ranks)) for ranks in MANY_RANKS}
    assert len(hashes_by_ranks[1]) == 10
    assert all(of == hashes_by_ranks[1] for of in hashes_by_ranks.values())
    assert {str(faults(tmp_path / str(ranks))) for ranks in MANY_RANKS} == {
        str(faults(tmp_path / "1"))
    }


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_hundred_steps_of_the_demo_on_one_to_eight_ranks(tmp_path, precision):
    digits = tmp_path / "digits"
    subprocess.run([sys.executable, "-m", "data_prep.digits", "--out", digits], check=True)
    settings = (
        *("--config", "configs/demo.yaml", f"data.root={digits}", "data.micro_batch_size=8"),
        *("train.exact_over_ranks=true", f"train.precision={precision}", "train.epochs=null"),
        *("train.steps=200", "eval.every_epochs=null", "eval.every_steps=100", "log.wandb=off"),
        *("eval.reference=null", "log.report=false"),
    )
    results = {}
    for ranks in MANY_RANKS:
        run_dir = tmp_path / str(ranks)
        done = run("launch/train.py", *settings, f"run.dir={run_dir}", ranks=ranks, timeout_s=3600)
        assert done.returncode == 0, done.stderr
        results[ranks] = (hashes(run_dir), losses(run_dir))
    assert list(results[1][0]) == [100, 200]
    assert all(of == results[1] for of in results.values())


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_killed_on_four_two_three_and_eight_ranks_and_finished_on_one(eight_leaves, tmp_path):
    train(eight_leaves, tmp_path / "whole", *EXACT, SELDOM)
    run_dir = tmp_path / "run"
    for number, ranks in enumerate((4, 2, 3, 8)):
        killed = Background(eight_leaves, run_dir, *EXACT, SELDOM, ranks=ranks)
        killed.wait_for_checkpoint(36 * (number + 1))
        killed.kill_all()
    train(eight_leaves, run_dir, *EXACT, SELDOM)
    starts = record(run_dir, "start")
    assert [start["world_size"] for start in starts] == [4, 2, 3, 8, 1]
    assert [start["step"] for start in starts] == sorted({start["step"] for start in starts})
    assert hashes(run_dir).items() <= hashes(tmp_path / "whole").items()
    assert final_state(run_dir, 200) == final_state(tmp_path / "whole", 200)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("precision", "compiled"),
    [("fp32", False), ("bf16", False), ("fp16", False), ("fp32", True), ("bf16", True)],
)
def test_exact_runs_share_one_hash_and_plain_runs_differ(config, tmp_path, precision, compiled):
    options = (f"train.precision={precision}", f"train.compile={str(compiled).lower()}")
    for name, settings in (("exact", EXACT), ("plain", EXACT[1:])):
        for ranks in (1, 2, 3, 6):
            train(config, tmp_path / f"{name}{ranks}", *settings, *options, ranks=ranks)
    distinct = {
        name: {hashes(tmp_path / f"{name}{ranks}")[STEPS] for ranks in (1, 2, 3, 6)}
        for name in ("exact", "plain")
    }
    assert (len(distinct["exact"]), len(distinct["plain"])) == (1, 4)


# ---- user mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        (
            (),
            2,
            r"needs a data\.micro_batch_size .* for world size 2, set one of \[2, 4, 6, 8, 12\]",
        ),
        (
            ("data.micro_batch_size=12",),
            3,
            r"=12 makes 2 micro-batches, for 3 ranks .* \[2, 4, 6, 8\]",
        ),
        (
            ("data.micro_batch_size=1",),
            2,
            r"=1 is smaller than a group of images that are mixed, .* \[2, 4, 6, 8, 12\]",
        ),
        (("data.micro_batch_size=2",), 13, r"at most 12 micro-batches for 13 ranks: use fewer"),
    ],
)
def test_rejects_an_indivisible_batch_and_names_valid_ones(config, settings, ranks, message):
    loaded = load_config(config, ["train.exact_over_ranks=true", *settings])
    with pytest.raises(ValueError, match=message):
        make_plan(loaded, 60, ranks)


def test_a_batch_norm_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"exact_over_ranks: 1 \(BatchNorm1d\) keeps"):
        check_leaves(model)
    with pytest.raises(ValueError, match=r"0 \(InstanceNorm1d\) keeps"):
        check_leaves(torch.nn.Sequential(torch.nn.InstanceNorm1d(2, track_running_stats=True)))
    check_leaves(torch.nn.Sequential(torch.nn.BatchNorm1d(2, track_running_stats=False)))


@pytest.fixture
def no_limits(monkeypatch):
    for name in KERNEL_LIMITS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_limits")
def test_limited_instructions_count_as_a_different_kind_of_host(monkeypatch):
    alone = World(0, 1, torch.device("cpu"))
    usual = same_kernels(alone)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert same_kernels(alone) == f"{usual}, ONEDNN_MAX_CPU_ISA=AVX2"


@pytest.mark.parametrize("threads", ["", "0", "many"])
def test_rejects_a_number_of_threads_that_is_not_a_number(monkeypatch, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with pytest.raises(ValueError, match=f"OMP_NUM_THREADS='{threads}', expected a number"):
        same_kernels(World(0, 1, torch.device("cpu")))


@pytest.mark.usefixtures("no_limits")
def test_hosts_of_two_kinds_are_refused():
    """Rank 0 sends the description of a different host, so the other rank must refuse to start."""

    def rank(world):
        if not world.is_main:
            return same_kernels(world)
        with world.fail_together():
            pass
        world.broadcast_from_main(lambda: "torch 2.11.0 on AMD EPYC 9654 with AVX512, 1 thread(s)")
        with world.fail_together():
            pass

    other, refused = together(2, rank)
    assert re.fullmatch(
        r"train\.exact_over_ranks: \S+ computes with torch \S+ on .+ with \w+, 1 thread\(s\), but"
        r" rank 0 computes with torch 2\.11\.0 on AMD EPYC 9654 with AVX512, 1 thread\(s\): use"
        " identical hosts with the same OMP_NUM_THREADS",
        str(refused),
    )
    assert isinstance(other, Exception)


@pytest.mark.full
def test_exactness_can_be_switched_on_during_a_run(config, tmp_path):
    run_dir = tmp_path / "run"
    train(config, run_dir, "train.steps=3")
    more = ("train.steps=6", "train.exact_over_ranks=true", "data.micro_batch_size=4")
    changes = ("--allow-change", "train.exact_over_ranks", "--allow-change", "train.steps")
    train(config, run_dir, *more, *changes)
    assert [line["step"] for line in record(run_dir, "start")] == [0, 3]
    arguments = [
        "launch/train.py",
        "--config",
        config,
        f"run.dir={run_dir}",
        *TINY,
        "train.steps=9",
    ]
    # While exact_over_ranks is on, checkpoints contain the number of micro-batches.
    refused = run(*arguments, *more[1:2], "data.micro_batch_size=2", *changes[2:])
    assert "data.micro_batch_size: 4 there, 2 here" in refused.stderr
    train(config, run_dir, "train.steps=7", *changes)
    train(config, run_dir, "train.steps=9", more[1], "data.micro_batch_size=2", *changes)
    assert [line["step"] for line in record(run_dir, "start")] == [0, 3, 6, 7]


def test_a_resume_with_another_number_of_micro_batches_is_rejected(config, alone):
    arguments = ["launch/train.py", "--config", config, f"run.dir={alone}", *TINY, *EXACT]
    done = run(*arguments, "data.micro_batch_size=2")
    assert done.returncode == 2
    assert "data.micro_batch_size: 4 there, 2 here" in done.stderr
    assert "train.exact_over_ranks=false --allow-change train.exact_over_ranks" in done.stderr


@pytest.mark.full
def test_a_compiled_exact_run_cannot_continue_or_start_uncompiled(config, tmp_path):
    """Without compilation, the run would silently continue with results that are not
    bit-identical."""
    train(config, tmp_path / "run", *EXACT, "train.steps=3")
    arguments = ["--config", config, *TINY, *EXACT, "train.compile=true"]
    resumed = run("launch/train.py", *arguments, f"run.dir={tmp_path / 'run'}")
    assert resumed.returncode == 2
    assert re.search(r"computed by torch .+ there, torch .+, compiled here", resumed.stderr)
    # A new interpreter is needed, because the current one has already found the compiler.
    env = {**environment(), "CXX": "/nonexistent"}
    arguments += [f"run.dir={tmp_path / 'new'}", "train.steps=3"]
    new = call(command("launch/train.py", *arguments, ranks=0), env)
    assert new.returncode == 2
    assert "exact_over_ranks: torch.compile does not work on this host (" in new.stderr
    assert not (tmp_path / "new").exists()
