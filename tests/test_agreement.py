"""What ranks check among themselves: which rows they trained on, and from which checkpoint they go
on."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import TINY
from ranks import together

from vit.build import Run, build
from vit.config import io as config_io
from vit.data.batches import Batch, ImageFormat, TrainBatches
from vit.data.loader import Loader
from vit.data.order import make_order, sample_checksum
from vit.ranks.distributed import World
from vit.run import resume
from vit.run.checkpoint import CheckpointError, newest_checkpoint, wait_for_checkpoint
from vit.run.order_check import OrderCheck
from vit.train import train

ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_rows_of_all_ranks_are_the_batch(repeats):
    """So it suffices that each rank checks its own."""
    order = make_order(300_000, 96, num_lanes=8, aug_repeats=repeats)
    for world_size in (1, 2, 3, 8, 32):
        rows = 96 // world_size
        for position in (0, 7, order.steps_per_epoch):
            parts = [order.rows(position, r * rows, (r + 1) * rows) for r in range(world_size)]
            total = sum(map(sample_checksum, parts)) % 2**64
            assert total == sample_checksum(order.batch(position))


def finished_run(config: Path, folder: Path, *overrides: str) -> Run:
    """A run of three steps on one rank, after its end."""
    short = ("train.steps=3", "eval.every_steps=100", f"run.dir={folder}")
    run = build(config_io.load_config(config, [*TINY, *short, *overrides]).config, ALONE)
    train(run)
    return run


def test_a_rank_with_other_rows_than_planned_is_named_and_all_end(config, tmp_path):
    run = finished_run(config, tmp_path / "run")
    assert isinstance(run.batches, TrainBatches)
    split = run.batches.split
    augment = run.config.augment
    image = ImageFormat.from_config(run.config.model, run.config.data)

    def function(world: World, wrong_rank: int | None, wrong_batch: int) -> None:
        placed = {"rank": world.rank, "world_size": world.size}
        batches = TrainBatches(split, run.batches.order, augment, image, num_batches=3, **placed)
        check = OrderCheck(world, run.batches.order, run.plan, run.record, 0)
        with Loader(batches, 0, 3) as loader:
            for position, batch in enumerate(loader):
                is_wrong = world.rank == wrong_rank and position == wrong_batch
                check.add(shifted(batch) if is_wrong else batch)
        check.compare(3)

    for wrong_rank in (0, 1):
        ended = together(2, lambda world, wrong=wrong_rank: function(world, wrong, 1))
        told = f"batches 0 to 2, rows of rank {wrong_rank}: sample checksum "
        assert isinstance(ended[wrong_rank], RuntimeError)
        assert str(ended[wrong_rank]).startswith(told)
        assert str(ended[1 - wrong_rank]).startswith(f"RuntimeError: {told}")


def shifted(batch: Batch) -> Batch:
    """With one sample exchanged for its neighbour."""
    ids = batch.ids.clone()
    ids[-1] = (ids[-1] + 1) % 60
    return replace(batch, ids=ids)


def test_other_ranks_go_on_from_what_the_main_rank_found_as_soon_as_they_see_it(config, tmp_path):
    """Over NFS a host may see an old listing of the folder for a minute: here with none of it."""
    run = finished_run(config, tmp_path / "run", "checkpoint.every_steps=1")
    seen = tmp_path / "seen"
    shutil.copytree(run.folder, seen)
    newest = seen / "checkpoints" / "step_00000003"
    newest.rename(tmp_path / "not yet")
    assert newest_checkpoint(seen)[0].name == "step_00000002", "what it would have gone on from"
    facts = {key: run.state.facts[key] for key in ("num_samples", "index_sha256", "num_classes")}

    def show() -> None:
        time.sleep(1.0)
        newest.mkdir()
        shutil.copy(tmp_path / "not yet" / "state.safetensors", newest)  # all that is read there

    showing = threading.Thread(target=show)
    showing.start()
    found = together(
        2,
        lambda world: resume.find_checkpoint(
            seen if world.rank else run.folder, config_io.to_dict(run.config), facts, set(), world
        ),
    )
    showing.join()
    assert [path for path, _ in found] == [run.folder / "checkpoints" / newest.name, newest]
    assert found[0][1] == found[1][1]
    assert found[0][1]["step"] == 3


def test_a_checkpoint_from_before_a_setting_goes_on_only_as_it_was_made(config, tmp_path):
    """The average once always had its warm-up; now it is a setting, whose default is none."""
    run = finished_run(config, tmp_path / "run", "train.ema_decay=0.9")
    [(path, info)] = [newest_checkpoint(run.folder)]
    del info["config"]["train"]["ema_warmup"]
    (path / "checkpoint.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"train\.ema_warmup: True there, False here"):
        resume.find_checkpoint(run.folder, config_io.to_dict(run.config), {}, set(), ALONE)
    train_config = run.config.train.model_copy(update={"ema_warmup": True})
    as_made = run.config.model_copy(update={"train": train_config})
    assert resume.find_checkpoint(run.folder, config_io.to_dict(as_made), {}, set(), ALONE) == (
        path,
        info,
    )
    none = run.config.train.model_copy(update={"ema_decay": None})
    without = run.config.model_copy(update={"train": none})
    assert (
        resume.find_checkpoint(
            run.folder, config_io.to_dict(without), {}, {"train.ema_decay"}, ALONE
        )
        is not None
    )


def test_a_checkpoint_that_one_host_never_sees_is_an_error_that_names_host_and_path(tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step_00000003"
    info = {"files": {"state.safetensors": {"bytes": 10, "sha256": ""}}}
    with pytest.raises(CheckpointError) as caught:
        wait_for_checkpoint(folder, info, limit_s=0.1)
    told = f"{folder}/state.safetensors: rank 0 goes on from it, but "
    assert str(caught.value).startswith(told)
    assert "run.dir must be one folder for all hosts" in str(caught.value)
    folder.mkdir(parents=True)
    (folder / "state.safetensors").write_bytes(bytes(9))
    with pytest.raises(CheckpointError):
        wait_for_checkpoint(folder, info, limit_s=0.1)
    (folder / "state.safetensors").write_bytes(bytes(10))
    wait_for_checkpoint(folder, info, limit_s=0.1)


def test_a_run_does_not_go_on_with_other_class_names(config, tmp_path):
    run = finished_run(config, tmp_path / "run")
    [(_, info)] = [newest_checkpoint(run.folder)]
    facts = {key: info["facts"][key] for key in ("num_samples", "index_sha256", "num_classes")}
    names = info["facts"]["class_names"]
    for same in (names, []):  # none were known
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
        ValueError, match="belongs to a run with other settings:\n  data: class 0 is"
    ):
        build(_with_names(run.config, tmp_path, names[::-1]), ALONE)


def _with_names(config, tmp_path, names):
    root = shutil.copytree(config.data.root, tmp_path / "other")
    info = json.loads((root / "_info.json").read_text())
    (root / "_info.json").write_text(json.dumps({**info, "class_names": names}))
    return config.model_copy(update={"data": config.data.model_copy(update={"root": str(root)})})
