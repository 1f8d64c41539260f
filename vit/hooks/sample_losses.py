"""Loss and margin of every training image in every epoch, for 4 bytes each and no time.

    step   both come to the host with the step's other numbers, one step late (vit.step)
    save   ranks add up what they have seen since the last one; the saver's thread writes it,
           before the checkpoint: a complete one never counts on losses that are not on the disk

    runs/<name>/samples/epoch_0003.npy    float16 (steps_per_epoch, 2, global_batch_size)

[step, 0] are the losses of a batch and [step, 1] its margins (`vit.training.metrics.margins`), row
by row. Which sample a row shows is not stored, as the order tells it (vit.data.order). NaN: not
trained on, or not readable. A loss is that of the target that was trained on: mixed where images
mix.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vit.config.schema import Config
from vit.distributed.process_group import World
from vit.run import Hook, Run
from vit.run_folder import SAMPLES_FOLDER, Place
from vit.system.files import replacing
from vit.training.plan import Plan
from vit.training.run_data import Notes, RunData
from vit.training.step_result import StepValues

PIECE = 2**22
"""Rows that ranks add up at a time: 16 MiB on each device."""
BYTES_OF_A_ROW = 4
HEADER_BYTES = 128
"""Of a file, before its values."""


class Written(NamedTuple):
    """Consecutive steps of one epoch, of all ranks."""

    epoch: int
    """Counted from 1."""
    first: int
    """Step within the epoch, from 0."""
    values: NDArray[np.float16]
    """(steps, 2, global_batch_size)."""


def folder_bytes(plan: Plan, every_epochs: int) -> int:
    """Return what a whole run will have in `samples/`. every_epochs: `log.sample_losses`."""
    if not every_epochs:
        return 0
    num_files = -(-plan.total_steps // plan.steps_per_epoch) // every_epochs
    rows = plan.steps_per_epoch * plan.global_batch_size
    return num_files * (rows * BYTES_OF_A_ROW + HEADER_BYTES)


class SampleLosses:
    """Gathers losses and margins of a run in `run_dir`, of every `every_epochs`th epoch."""

    def __init__(self, run_dir: Path, world: World, plan: Plan, every_epochs: int = 1):
        self._folder = run_dir / SAMPLES_FOLDER
        self._world = world
        self._plan = plan
        self._every_epochs = every_epochs
        self._steps: list[tuple[int, NDArray[np.int32]]] = []

    def add(self, step: int, losses: NDArray[np.float32], margins: NDArray[np.float32]) -> None:
        """Take (rows,) of this rank at `step`, counted from 0 over the run."""
        if self._is_kept(step):
            with np.errstate(over="ignore"):  # beyond 65,504 it is infinite
                pairs = np.stack([losses, margins], 1).astype(np.float16)
            self._steps.append((step, pairs.view(np.int32)[:, 0]))

    def pass_over(self, step: int) -> None:
        """Take a step that is not trained on: an attempt that was given up may have written it."""
        nothing = np.full(len(self._plan.rows_of(self._world.rank)), np.nan, np.float32)
        self.add(step, nothing, nothing)

    def drop(self) -> None:
        """Forget what was not collected: those steps are done again."""
        self._steps = []

    def collect(self) -> list[Written]:
        """Return what all ranks have added since the last call, on the main rank.

        Every rank calls it, after the same steps.
        """
        batch_size = self._plan.global_batch_size
        at_once = max(PIECE // batch_size, 1)
        found: list[Written] = []
        for start in range(0, len(self._steps), at_once):
            steps = self._steps[start : start + at_once]
            # Each rank adds its own columns to zeros. As integers, for which no bit is lost.
            bits = np.zeros((len(steps), batch_size), np.int32)
            rows = self._plan.rows_of(self._world.rank)
            bits[:, rows.start : rows.stop] = [own for _, own in steps]
            summed = self._world.sum_(torch.from_numpy(bits).to(self._world.device)).cpu().numpy()
            if self._world.is_main:
                found += self._by_epoch([step for step, _ in steps], summed)
        self._steps = []
        return found

    def _by_epoch(self, steps: list[int], bits: NDArray[np.int32]) -> Iterable[Written]:
        epochs, inside = np.divmod(steps, self._plan.steps_per_epoch)
        values = bits[:, :, None].view(np.float16).transpose(0, 2, 1)
        for epoch in np.unique(epochs).tolist():
            own = np.flatnonzero(epochs == epoch)
            yield Written(epoch + 1, int(inside[own[0]]), values[own])

    def _is_kept(self, step: int) -> bool:
        return (step // self._plan.steps_per_epoch + 1) % self._every_epochs == 0

    def new_bytes(self, collected: list[Written]) -> int:
        """Return by how much the folder grows when `collected` is written."""
        missing = {part.epoch for part in collected if not self._path(part.epoch).exists()}
        steps = self._plan.steps_per_epoch
        return len(missing) * steps * self._plan.global_batch_size * BYTES_OF_A_ROW

    def write(self, collected: list[Written]) -> None:
        """Write what `collect` gave to the disk. Raises OSError, which names the file."""
        for epoch, first, values in collected:
            path = self._path(epoch)
            shape = (self._plan.steps_per_epoch, 2, self._plan.global_batch_size)
            if not path.exists() or _shape_of(path) != shape:
                path.parent.mkdir(exist_ok=True)
                with replacing(path) as file:
                    # Full length from the start: what follows only changes it in place.
                    np.save(file, np.full(shape, np.nan, np.float16))
            content = np.ascontiguousarray(values).tobytes()
            begin = path.stat().st_size - 2 * int(np.prod(shape)) + 4 * shape[2] * first
            with path.open("r+b") as file:
                file.seek(begin)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

    def _path(self, epoch: int) -> Path:
        return self._folder / f"epoch_{epoch:04d}.npy"


class SamplesHook(Hook):
    """Gathers loss and margin of each training image (`log.sample_losses`)."""

    saved: SampleLosses

    def opened(self, config: Config, world: World, data: RunData, place: Place) -> Notes:
        """See `Hook`."""
        self.saved = SampleLosses(place.folder, world, data.plan, config.log.sample_losses)
        return Notes()

    def begin(self, run: Run) -> None:
        """Forget the steps that are done again."""
        self.saved.drop()

    def read(self, step: int, values: StepValues) -> None:
        """See `Hook`."""
        self.saved.add(step, values.losses, values.margins)

    def skipped(self, step: int) -> None:
        """See `Hook`."""
        self.saved.pass_over(step)


def epoch_files(run_dir: Path) -> dict[int, Path]:
    """Return the files of a run by epoch, counted from 1, ascending."""
    found = {}
    for path in (run_dir / SAMPLES_FOLDER).glob("epoch_*.npy"):
        if name := re.fullmatch(r"epoch_(\d+)\.npy", path.name):
            found[int(name[1])] = path
    return dict(sorted(found.items()))


def read_epoch(path: Path, steps_per_epoch: int, global_batch_size: int) -> NDArray[np.float16]:
    """Map the file of an epoch, (steps_per_epoch, 2, global_batch_size).

    Raises ValueError if it is damaged, or of a run with other batches.
    """
    shape = (steps_per_epoch, 2, global_batch_size)
    found = _shape_of(path)
    if found != shape:
        raise ValueError(
            f"{path}: has {found or 'no'} losses and margins, the run {shape}: it is damaged, or"
            " was written with other settings"
        )
    return np.load(path, mmap_mode="r")


def _shape_of(path: Path) -> tuple[int, ...]:
    """Return the shape of a whole file of float16, else ()."""
    try:
        values = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return ()
    return values.shape if values.dtype == np.float16 else ()
