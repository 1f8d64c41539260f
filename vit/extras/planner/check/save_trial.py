"""The checkpoint of a run, tried: where a start would go on, and a save of the whole state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vit.checkpoint import checkpoint as checkpoints
from vit.checkpoint.resume import check_belongs
from vit.checkpoint.snapshot import Snapshot
from vit.checkpoint.state import RunState
from vit.config import io as config_io
from vit.extras.planner.check.collectives import rate_text
from vit.extras.planner.check.findings import Finding, Verdict
from vit.extras.planner.check.storage import passing_folder
from vit.extras.planner.check.trial import Trial
from vit.hooks.preflight import Preflight, check_disk, size_text
from vit.layers.parts import grid_size
from vit.system.by_name import load
from vit.system.urls import is_url


class SaveTrial:
    """The parts of a check that concern checkpoints, on one rank."""

    def __init__(self, trial: Trial):
        self._trial = trial
        self._config = trial.config
        self._world = trial.world
        self.run_dir = trial.run_dir

    def look_at_checkpoint(self) -> list[str] | None:
        """Return where a start would go on, and what it needs of the disk; rank 0 tells.

        Raises ValueError where a start would, also for a damaged checkpoint, which is left as it
        is.
        """
        if not self._world.is_main:
            return None
        place = self._config.run.dir
        is_away = is_url(place)
        # Of a run at a URL no more than what each checkpoint says of itself.
        where: Any = self.run_dir
        if is_away:
            where = load("vit.extras.remote_runs.reading:newest_info", f"run.dir={place}")(
                str(place)
            )
        found = checkpoints.newest_checkpoint(where, verify=False)
        if found is None:
            lines = ["a new run"]
        else:
            folder, info = found
            settings = config_io.to_dict(self._config)
            check_belongs(folder, info, settings, self._trial.facts, self._trial.allowed)
            if not is_away:
                checkpoints.read_info(folder, verify=True)
            state = "at its URL, not fetched here" if is_away else "whose files are whole"
            step = checkpoints.state_of(info).step
            lines = [f"goes on at step {step:,} from {folder.name}, {state}"]
        keep_last = self._config.checkpoint.keep_last
        if found is None or found[1]["step"] < self._trial.data.plan.total_steps:
            lines += check_disk(Preflight((), {}), self._trial.disk, self.run_dir, keep_last).lines
        return lines

    def judge_checkpoint(self, found: dict[int, list[str] | None]) -> Iterator[Finding]:
        """Yield what `look_at_checkpoint` returns."""
        yield Finding("start", Verdict.OK, "\n".join(found[0] or []))

    def try_checkpoint(self) -> dict[str, float] | None:
        """Write a checkpoint beside the run's, verify it, load it on all ranks, remove it."""
        world = self._world
        tensors = checkpoints.named_tensors(self._trial.step)
        written: dict[str, float] = {}
        if not world.is_main:
            with world.fail_together():
                pass
            checkpoints.load_checkpoint(self.run_dir, self._trial.step)  # rank 0 reads it
            return None
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with passing_folder(self.run_dir) as place:
            with world.fail_together():
                began_s = time.perf_counter()
                checkpoints.check_room(place, 0, num_bytes)
                folder = self._write(place, tensors)
                written["write_s"] = time.perf_counter() - began_s
                began_s = time.perf_counter()
                checkpoints.read_info(folder, verify=True)
            checkpoints.load_checkpoint(folder, self._trial.step)
            return {**written, "read_s": time.perf_counter() - began_s, "bytes": float(num_bytes)}

    def _write(self, place: Path, tensors: dict[str, torch.Tensor]) -> Path:
        snapshot = Snapshot(tensors, self._world.device)
        try:
            snapshot.prepare()
            snapshot.take(tensors)
            snapshot.wait()
            state = RunState(
                facts={**self._trial.facts, "grid_size": grid_size(self._trial.step.model)}
            )
            settings = config_io.to_dict(self._config)
            folder, _ = checkpoints.write_checkpoint(
                place, snapshot.tensors, asdict(state), settings, self._world.size, keep_last=1
            )
        finally:
            snapshot.close()
        return folder

    def judge_write(self, found: dict[int, dict[str, float] | None]) -> Iterator[Finding]:
        """Yield size and rates of the checkpoint."""
        own = found[0]
        assert own is not None, "rank 0 wrote it"
        num_bytes = own["bytes"]
        said = (
            f"{size_text(round(num_bytes))} written in {own['write_s']:.3g} s"
            f" ({rate_text(num_bytes / own['write_s'])}), read back in {own['read_s']:.3g} s"
            f" ({rate_text(num_bytes / own['read_s'])}), loaded on all ranks, removed"
        )
        yield Finding("checkpoint", Verdict.OK, said)
