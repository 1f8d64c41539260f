"""The same weights on any number of ranks: whole runs, their hashes compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import TINY, Background, make_shards, run, train, write_config

from vit.config.io import load_config
from vit.plan import make_plan

STEPS = 60

EXACT = ("train.exact_over_ranks=true", "data.micro_batch_size=4", "augment.randaugment_layers=2")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """Six leaves a step, with dropout, drop path, mixing and an average."""
    folder = tmp_path_factory.mktemp("exact")
    return write_config(folder, make_shards(folder), steps=STEPS, batch=24)


def record(run_dir: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def hashes(run_dir: Path) -> dict[int, str]:
    """sha256 of the state at each checkpoint."""
    return {line["step"]: line["sha256"] for line in record(run_dir, "checkpoint")}


def losses(run_dir: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in record(run_dir, "train")]


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory) -> Path:
    """The run without torchrun."""
    folder = tmp_path_factory.mktemp("alone")
    train(config, folder / "run", *EXACT)
    return folder / "run"


def test_any_number_of_ranks_also_of_unequal_shares_gives_the_same_bits(config, alone, tmp_path):
    """Four ranks have 1, 2, 1 and 2 leaves."""
    train(config, tmp_path / "4", *EXACT, ranks=4)
    assert list(hashes(alone)) == [*range(3, STEPS + 1, 3)]
    assert hashes(tmp_path / "4") == hashes(alone)
    assert losses(tmp_path / "4") == losses(alone)


def test_killed_on_three_ranks_and_finished_on_two_no_bit_changes(config, alone, tmp_path):
    killed = Background(config, tmp_path / "run", *EXACT, ranks=3)
    killed.wait_for_checkpoint(3)
    killed.kill_all()
    train(config, tmp_path / "run", *EXACT, ranks=2)
    first, second = record(tmp_path / "run", "start")
    assert (first["world_size"], second["world_size"]) == (3, 2)
    assert 0 < second["step"] < STEPS
    assert hashes(tmp_path / "run").items() <= hashes(alone).items()
    assert STEPS in hashes(tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_one_hash_for_all_ranks_where_plain_runs_have_one_for_each(
    config, tmp_path, precision, compiled
):
    """Else the comparisons above would show nothing."""
    options = (f"train.precision={precision}", f"train.compile={str(compiled).lower()}")
    for name, settings in (("exact", EXACT), ("plain", EXACT[1:])):
        for ranks in (1, 2, 3, 6):
            train(config, tmp_path / f"{name}{ranks}", *settings, *options, ranks=ranks)
    found = {
        name: {hashes(tmp_path / f"{name}{ranks}")[STEPS] for ranks in (1, 2, 3, 6)}
        for name in ("exact", "plain")
    }
    assert (len(found["exact"]), len(found["plain"])) == (1, 4)


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        ((), 2, r"needs data\.micro_batch_size, .* for 2 rank\(s\) one of \[2, 4, 6, 8, 12\]"),
        (
            ("data.micro_batch_size=12",),
            3,
            r"=12 makes 2 micro-batches, for 3 ranks .* \[2, 4, 6, 8\]",
        ),
        (
            ("data.micro_batch_size=1",),
            2,
            r"=1 is below what mixes together, .* \[2, 4, 6, 8, 12\]",
        ),
        (("data.micro_batch_size=2",), 13, r"at most 12 micro-batches for 13 ranks: use fewer"),
    ],
)
def test_what_cannot_be_divided_names_what_can(config, settings, ranks, message):
    loaded, _ = load_config(config, ["train.exact_over_ranks=true", *settings])
    with pytest.raises(ValueError, match=message):
        make_plan(loaded, 60, ranks)


def test_a_resume_with_other_leaves_is_refused(config, alone):
    words = ["launch/train.py", "--config", config, f"run.dir={alone}", *TINY, *EXACT]
    done = run(*words, "data.micro_batch_size=2")
    assert done.returncode == 2
    assert "data.micro_batch_size: 4 there, 2 here" in done.stderr
