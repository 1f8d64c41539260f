"""Save the loss and margin of every training image in every epoch, in 4 bytes per image.

    step   the numbers reach the host with the step's other results, one step late (vit.step)
    save   the ranks combine their numbers since the last save; the saver's thread writes them
           before the checkpoint, so a complete checkpoint never refers to missing losses

    runs/<name>/samples/epoch_0003.npy    float16 (steps_per_epoch, 2, global_batch_size)

In this array, [step, 0] contains the losses of a batch and [step, 1] its margins
(`vit.training.metrics.margins`), row by row. The file does not store which sample a row belongs to,
because this follows from the sample order (vit.data.order). NaN marks rows that were not reached or
could not be read. The loss uses the training target, which is mixed if images are mixed.
"""

import math
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
from vit.run import Hook
from vit.run_folder.paths import SAMPLES_FOLDER
from vit.run_folder.place import Place
from vit.system.files import replacing
from vit.training.plan import Plan
from vit.training.run_data import Notes, RunData
from vit.training.step_result import StepValues

PIECE = 2**22
"""The number of rows that the ranks combine in one call. These rows take 16 MiB on each device."""
BYTES_OF_A_ROW = 4
HEADER_BYTES = 128
"""The size of an .npy file's header."""


class WrittenLosses(NamedTuple):
    """The losses and margins of all ranks for consecutive steps of one epoch."""

    epoch: int
    """The epoch, counted from 1."""
    first: int
    """The first step within the epoch, counted from 0."""
    values: NDArray[np.float16]
    """The losses and margins, (steps, 2, global_batch_size)."""


def folder_bytes(plan: Plan, every_epochs: int) -> int:
    """Return the size of `samples/` after a whole run. every_epochs: `log.sample_losses`."""
    if not every_epochs:
        return 0
    num_files = math.ceil(plan.total_steps / plan.steps_per_epoch) // every_epochs
    rows = plan.steps_per_epoch * plan.global_batch_size
    return num_files * (rows * BYTES_OF_A_ROW + HEADER_BYTES)


class SampleLosses:
    """Collects the losses and margins in every `every_epochs`-th epoch of the run in `run_dir`."""

    def __init__(self, run_dir: Path, world: World, plan: Plan, every_epochs: int = 1):
        self._folder = run_dir / SAMPLES_FOLDER
        self._world = world
        self._plan = plan
        self._every_epochs = every_epochs
        self._steps: list[tuple[int, NDArray[np.int32]]] = []

    def add(self, step: int, losses: NDArray[np.float32], margins: NDArray[np.float32]) -> None:
        """Add this rank's losses and margins, (rows,), at `step`, counted from 0 over the run."""
        epoch = step // self._plan.steps_per_epoch + 1
        if epoch % self._every_epochs == 0:
            with np.errstate(over="ignore"):  # values above 65,504 become infinite
                pairs = np.stack([losses, margins], 1).astype(np.float16)
            self._steps.append((step, pairs.view(np.int32)[:, 0]))

    def collect(self) -> list[WrittenLosses]:
        """Return the values of all ranks since the last call on rank 0, and [] on the other ranks.

        All ranks must call this after the same steps.
        """
        batch_size = self._plan.global_batch_size
        steps_per_piece = max(PIECE // batch_size, 1)
        collected: list[WrittenLosses] = []
        for start in range(0, len(self._steps), steps_per_piece):
            steps = self._steps[start : start + steps_per_piece]
            # Each rank fills its own columns of an array of zeros. Summing the values' bits as
            # integers preserves every bit, even of NaN.
            bits = np.zeros((len(steps), batch_size), np.int32)
            rows = self._plan.rows_of(self._world.rank)
            bits[:, rows.start : rows.stop] = [pairs for _, pairs in steps]
            if self._world.size > 1:  # a single rank need not wait for its GPU
                bits = self._world.sum_(torch.from_numpy(bits).to(self._world.device)).cpu().numpy()
            if self._world.is_main:
                collected += self._by_epoch([step for step, _ in steps], bits)
        self._steps = []
        return collected

    def _by_epoch(self, steps: list[int], bits: NDArray[np.int32]) -> Iterable[WrittenLosses]:
        epochs, inside = np.divmod(steps, self._plan.steps_per_epoch)
        values = bits[:, :, None].view(np.float16).transpose(0, 2, 1)
        for epoch in np.unique(epochs).tolist():
            positions = np.flatnonzero(epochs == epoch)
            yield WrittenLosses(epoch + 1, int(inside[positions[0]]), values[positions])

    def new_bytes(self, collected: list[WrittenLosses]) -> int:
        """Return the number of bytes by which the folder grows when `collected` is written."""
        missing = {part.epoch for part in collected if not self._path(part.epoch).exists()}
        return BYTES_OF_A_ROW * (
            len(missing) * self._plan.steps_per_epoch * self._plan.global_batch_size
        )

    def write(self, collected: list[WrittenLosses]) -> None:
        """Write the result of `collect` to disk. Raises OSError, which names the file."""
        for epoch, first_step, values in collected:
            path = self._path(epoch)
            shape = (self._plan.steps_per_epoch, 2, self._plan.global_batch_size)
            if not path.exists() or _shape_of(path) != shape:
                path.parent.mkdir(exist_ok=True)
                with replacing(path) as file:
                    # Allocate the full length, so that later writes need no more disk space.
                    np.save(file, np.full(shape, np.nan, np.float16))

            # The file consists of a header and `steps_per_epoch` blocks of the same size.
            step_bytes = self._plan.global_batch_size * BYTES_OF_A_ROW
            header_bytes = path.stat().st_size - self._plan.steps_per_epoch * step_bytes
            with path.open("r+b") as file:
                file.seek(header_bytes + first_step * step_bytes)
                file.write(np.ascontiguousarray(values).tobytes())
                file.flush()
                os.fsync(file.fileno())

    def _path(self, epoch: int) -> Path:
        return self._folder / f"epoch_{epoch:04d}.npy"


class SamplesHook(Hook):
    """Collects the loss and margin of each training image (`log.sample_losses`)."""

    saved: SampleLosses

    def opened(self, config: Config, world: World, data: RunData, place: Place) -> Notes:
        """See `Hook`."""
        self.saved = SampleLosses(place.folder, world, data.plan, config.log.sample_losses)
        return Notes()

    def read(self, step: int, values: StepValues) -> None:
        """See `Hook`."""
        self.saved.add(step, values.losses, values.margins)


def epoch_files(run_dir: Path) -> dict[int, Path]:
    """Return a run's files, keyed by epoch (counted from 1), in ascending order."""
    paths = {}
    for path in (run_dir / SAMPLES_FOLDER).glob("epoch_*.npy"):
        if match := re.fullmatch(r"epoch_(\d+)\.npy", path.name):
            paths[int(match[1])] = path
    return dict(sorted(paths.items()))


def read_epoch(path: Path, steps_per_epoch: int, global_batch_size: int) -> NDArray[np.float16]:
    """Map the file of an epoch into memory, (steps_per_epoch, 2, global_batch_size).

    Raises ValueError if the file is damaged or has a different shape.
    """
    shape = (steps_per_epoch, 2, global_batch_size)
    file_shape = _shape_of(path)
    if file_shape != shape:
        raise ValueError(
            f"{path}: its shape is {file_shape or 'unreadable'}, but the run needs {shape}: the"
            " file is damaged, or was written with different settings"
        )
    return np.load(path, mmap_mode="r")


def _shape_of(path: Path) -> tuple[int, ...]:
    """Return the shape of a complete float16 file, else ()."""
    try:
        values = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return ()
    return values.shape if values.dtype == np.float16 else ()
