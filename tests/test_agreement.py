"""Test that ranks compare the samples on which they have trained, and the checkpoint from which
they resume."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import TINY, run
from ranks import together

from vit.checkpoint import resume
from vit.checkpoint.checkpoint import named_tensors, newest_checkpoint
from vit.checkpoint.state import RunState
from vit.compose import build_run
from vit.config import io as config_io
from vit.data.batches import Batch, TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.order import make_order, sample_checksum
from vit.distributed.process_group import World
from vit.hooks.order_check import OrderHook
from vit.run import Run
from vit.train import train

ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_rows_of_all_ranks_form_the_batch(repeats):
    order = make_order(300_000, 96, num_lanes=8, aug_repeats=repeats)
    for world_size in (1, 2, 3, 8, 32):
        rows = 96 // world_size
        for position in (0, 7, order.steps_per_epoch):
            parts = [order.rows(position, r * rows, (r + 1) * rows) for r in range(world_size)]
            total = sum(map(sample_checksum, parts)) % 2**64
            assert total == sample_checksum(order.batch(position))


def finished_run(config: Path, folder: Path, *overrides: str) -> Run:
    short = ("train.steps=3", "eval.every_steps=100", f"run.dir={folder}")
    run = build_run(config_io.load_config(config, [*TINY, *short, *overrides]), ALONE)
    train(run)
    return run


def test_names_a_rank_with_unplanned_rows_and_ends_all(config, tmp_path):
    run = finished_run(config, tmp_path / "run")
    assert isinstance(run.batches, TrainBatches)
    split = run.batches.split
    augment = run.config.augment
    image = ImageFormat.from_config(run.config.model, run.config.data)

    def function(world: World, wrong_rank: int | None, wrong_batch: int) -> None:
        plan = replace(run.plan, world_size=world.size, micro_batch_size=2)
        rows = plan.rows_of(world.rank)
        batches = TrainBatches(split, run.batches.order, augment, image, rows=rows, num_batches=3)
        state = RunState()
        check = OrderHook()
        simulated: Any = SimpleNamespace(
            world=world, batches=run.batches, plan=plan, record=run.record, state=state
        )
        check.begin(simulated)
        with Loader(batches, 0, 3) as loader:
            for position, batch in enumerate(loader):
                is_wrong = world.rank == wrong_rank and position == wrong_batch
                check.queued(shifted(batch) if is_wrong else batch)
                state.step += 1
        check.compare()

    for wrong_rank in (0, 1):
        ended = together(2, lambda world, wrong=wrong_rank: function(world, wrong, 1))
        message = f"batches 0 to 2, rows of rank {wrong_rank}: sample checksum "
        assert isinstance(ended[wrong_rank], RuntimeError)
        assert str(ended[wrong_rank]).startswith(message)
        assert str(ended[1 - wrong_rank]).startswith(f"RuntimeError: {message}")


def shifted(batch: Batch) -> Batch:
    ids = batch.ids.clone()
    ids[-1] = (ids[-1] + 1) % 60
    return replace(batch, ids=ids)


ONE_READS = """
import hashlib, json, sys, torch
from dataclasses import replace
from vit.compose import build_run
from vit.config import io as config_io
import vit.distributed.process_group as distributed
from vit.distributed.exit import leave_world, run_command
from vit.checkpoint.checkpoint import named_tensors
from vit.weights.files import read_weights
from vit.weights.on_ranks import read_once

def main():
    world = distributed.join_world("cpu")
    folder, *overrides = sys.argv[1:]
    # The other ranks have neither a run folder nor weights: they could not read anything.
    own = [word.replace("RANK", str(world.rank)) for word in overrides]
    settings = config_io.load_config(f"{folder}/tiny.yaml", own)
    run = build_run(settings, world)
    digest = hashlib.sha256()
    for name, tensor in named_tensors(run.train_step).items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    state = json.dumps([run.state.step, run.state.facts], sort_keys=True)

    def read():
        loaded = read_weights(settings.init.checkpoint or settings.run.dir)
        others = {"bits": torch.tensor([True, False]), "half": torch.ones(3).bfloat16()}
        others |= {"none": torch.zeros(0, 2), "turned": torch.eye(2, 3).t()}
        return replace(loaded, weights=loaded.weights | others)

    loaded = read_once(read, world)
    state += f" {replace(loaded, weights={})}"
    for name, tensor in loaded.weights.items():
        words = f"{name} {tensor.shape} {tensor.dtype} {tensor.tolist()}"
        state += hashlib.sha256(words.encode()).hexdigest()
    sys.stdout.write(f"rank {world.rank}: {digest.hexdigest()} {state}\\n")
    run.__exit__(None, None, None)
    return world

run_command(main)
"""


@pytest.mark.slow
def test_one_rank_reads_checkpoint_and_initial_weights_and_all_have_them(config, tmp_path):
    base = finished_run(config, tmp_path / "run0", "ema.decay=0.9", "model.depth=1")
    script = tmp_path / "one_reads.py"
    script.write_text(ONE_READS)
    (tmp_path / "init0").symlink_to(tmp_path / "run0")
    short = ("ema.decay=0.9", "model.depth=1", "train.steps=3", "eval.every_steps=100")

    def lines(*overrides: str) -> list[str]:
        done = run(script, config.parent, *TINY, *short, *overrides, ranks=3)
        assert done.returncode == 0, done.stderr
        return sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))

    resumed = lines(f"run.dir={tmp_path}/runRANK")
    assert len(resumed) == 3
    assert len({line.partition(": ")[2] for line in resumed}) == 1, (
        "all ranks must have the same state"
    )
    expected = {name: value.clone() for name, value in named_tensors(base.train_step).items()}
    digest = hashlib.sha256()
    for name, tensor in expected.items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert digest.hexdigest() in resumed[0], "the state must equal the saved state"
    begun = lines(f"run.dir={tmp_path}/newRANK", f"init.checkpoint={tmp_path}/initRANK")
    assert len({line.partition(": ")[2] for line in begun}) == 1
    assert "init_sha256" in begun[0]
    assert begun[0].split()[2] != resumed[0].split()[2]
    assert not (tmp_path / "run1").exists()
    assert not (tmp_path / "new1").exists()


def test_a_run_does_not_resume_with_different_class_names(config, tmp_path):
    run = finished_run(config, tmp_path / "run")
    [(_, info)] = [newest_checkpoint(run.folder)]
    facts = {key: info["facts"][key] for key in ("num_samples", "index_sha256", "num_classes")}
    names = info["facts"]["class_names"]
    for same in (names, []):  # an empty list means that the names are unknown
        assert (
            resume.find_checkpoint(
                run.folder,
                config_io.to_dict(run.config),
                {**facts, "class_names": same},
                set(),
                ALONE,
            )
            is not None
        )
    with pytest.raises(
        ValueError,
        match=rf"data: class 0 is '{names[0]}' there, '{names[2]}' here \(2 of 3 names differ\)",
    ):
        resume.find_checkpoint(
            run.folder,
            config_io.to_dict(run.config),
            {**facts, "class_names": names[::-1]},
            set(),
            ALONE,
        )
    with pytest.raises(
        ValueError, match="belongs to a run with different settings:\n  data: class 0 is"
    ):
        build_run(_with_names(run.config, tmp_path, names[::-1]), ALONE)


def _with_names(config, tmp_path, names):
    root = shutil.copytree(config.data.root, tmp_path / "other")
    info = json.loads((root / "_info.json").read_text())
    (root / "_info.json").write_text(json.dumps({**info, "class_names": names}))
    return config.model_copy(update={"data": config.data.model_copy(update={"root": str(root)})})
