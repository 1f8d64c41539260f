"""Save in a thread while training continues. Training waits only for a copy in memory.

    training   ... step | save: wait for the thread, check disk space, copy | step | step ...
    thread                                                                  \\- losses, weights,
                                  state, checkpoint.json, rename, `latest`, remove older ones

If `run.dir` is a URL, the thread then uploads the new files (`vit.run_folder.place.Place`).
Saves are written one at a time, in the order of the calls. Each save writes the weights first, so a
complete checkpoint never refers to missing weights. If the thread fails, `has_failed` makes all
ranks stop at the next step, as after a signal. Rank 0 then raises the error while the other ranks
wait for it.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from vit.checkpoint.checkpoint import check_room, checkpoint_folder, named_tensors, write_checkpoint
from vit.checkpoint.snapshot import Snapshot
from vit.checkpoint.state import RunState
from vit.config import io as config_io
from vit.config.schema import CheckpointConfig
from vit.loggers.record import Record
from vit.run_folder.paths import TIMM_CONFIG_FILE, weights_file
from vit.run_folder.place import Place
from vit.step import TrainStep
from vit.system.files import link_to, write_json
from vit.weights.programs import ProgramModel, lacking, timm_config
from vit.weights.save import HUB_FILES, cannot_write, save_weights


class SavedBeside(Protocol):
    """Data that each save writes before its checkpoint, such as sample losses."""

    def collect(self) -> Any:
        """Return the data of all ranks since the last call. All ranks must call this."""

    def new_bytes(self, collected: Any) -> int:
        """Return the number of bytes by which the run folder grows when `collected` is written."""

    def write(self, collected: Any) -> None:
        """Write `collected` on rank 0, in the saver's thread. Raises OSError with the file name."""


class Saver:
    """Writes checkpoints and weights of a run on rank 0. All ranks must make the same calls.

    Args:
        config: The result of `config_io.to_dict`.
        class_names: The class names of the training data.
        kept: The checkpoints to keep.
        record: The record that receives a line for each complete checkpoint.
        beside: Other data to write at each save.
    """

    def __init__(
        self,
        place: Place,
        train_step: TrainStep,
        config: dict[str, Any],
        class_names: list[str],
        kept: CheckpointConfig,
        record: Record,
        beside: Sequence[SavedBeside] = (),
    ):
        self._beside = beside
        self._place = place
        self._run_dir = place.folder
        self._train_step = train_step
        self._world = train_step.world
        self._config = config
        self._class_names = class_names
        self._kept = kept
        self._record = record

        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._complete: deque[tuple[int, dict[str, Any]]] = deque()
        """The step and values of each line that is not yet in metrics.jsonl."""

    @property
    def has_failed(self) -> bool:
        """Whether the thread has failed, or another job writes to the run. The next call to `save`
        or `finish` raises the error."""
        return self._error is not None or self._place.is_lost

    def prepare(self) -> None:
        """Start allocating memory for the copy, so that the first save does not wait for it."""
        if self._world.is_main and self._snapshot is None:
            self._snapshot = Snapshot(named_tensors(self._train_step), self._world.device)
            self._start(self._snapshot.prepare)

    def save(self, state: RunState, with_checkpoint: bool, weights: tuple[str, ...] = ()) -> None:
        """Start writing a checkpoint, and the files `weights` ("last", "best") in `weights/`.

        Waits for the previous save. Raises CheckpointError if that save failed or the disk is too
        full for this one, and ValueError if the folder was removed or replaced. Errors are raised
        on all ranks (`World.fail_together`).
        """
        began = time.perf_counter()
        collected = [each.collect() for each in self._beside]
        self.prepare()  # allocates memory only for a save before the first step

        with self._world.fail_together():
            if self._world.is_main:
                self._wait()
                self._place.check()
                self._record.lock.check_in_place()
                needed_bytes = self._needed_bytes(state, with_checkpoint, weights)
                for each, values in zip(self._beside, collected, strict=True):
                    needed_bytes += each.new_bytes(values)
                check_room(self._run_dir, state.step, needed_bytes)
        if self._snapshot is None:
            return

        tensors = named_tensors(self._train_step)
        buffers = (f"model.{name}" for name, _ in self._train_step.model.named_buffers())
        self._train_step.copying = self._snapshot.take(
            tensors, changing=[name for name in buffers if name in tensors]
        )
        blocked_s = time.perf_counter() - began
        self._start(
            partial(self._write, asdict(state), with_checkpoint, weights, collected, blocked_s)
        )

    def report(self) -> None:
        """Write a line for each checkpoint completed since the last call. Called after each
        step."""
        # Allocating gigabytes would slow down the first step of a resumed run, so `prepare` is
        # called only after that step.
        self.prepare()
        self._tell_complete()

    def _tell_complete(self) -> None:
        while self._complete:
            step, values = self._complete.popleft()
            self._record.write("checkpoint", step, **values)

    def finish(self) -> None:
        """Wait on all ranks until everything is written. Raises the errors of `save`."""
        with self._world.fail_together():
            self._wait()

    def close(self, at_once: bool = False) -> None:
        """Wait for the thread, and free the memory. Errors of the thread are ignored, because
        another error has already ended the run.

        at_once: do not wait; the thread and its unfinished save end with the process.
        """
        if self._thread is not None and not at_once:
            self._thread.join()
            self._thread = None

        with suppress(ValueError):
            self._tell_complete()
        if self._snapshot is not None and self._thread is None:
            self._snapshot.close()
            self._snapshot = None

    def _start(self, work: Callable[[], None]) -> None:
        # Use a daemon thread, because a process that must exit immediately does not wait for it.
        self._thread = threading.Thread(target=self._run, args=(work,), name="saver", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # `_wait` raises it in the main thread
            self._error = error

    def _wait(self) -> None:
        """Wait for the thread, and raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._tell_complete()
        if self._error is not None:
            raise self._error

    def _write(
        self,
        state: dict[str, Any],
        with_checkpoint: bool,
        weights: tuple[str, ...],
        collected: list[Any],
        blocked_s: float,
    ) -> None:
        """Write the copied state. Runs in the thread."""
        assert self._snapshot is not None, "save has made it"
        began = time.perf_counter()

        self._write_lines(collected)
        self._snapshot.wait()
        if weights:
            self._describe_weights(state["facts"]["num_classes"])
        for path, averaged, tensors in self._files(weights):
            save_weights(path, tensors, self._metadata(state, averaged), is_sealed=True)
        if not with_checkpoint:
            self._place.push()
            return

        folder, sha256 = write_checkpoint(
            self._run_dir,
            self._snapshot.tensors,
            state,
            self._config,
            world_size=self._world.size,
            kept=self._kept,
        )
        values = {
            "folder": folder.name,
            "blocked_s": round(blocked_s, 4),
            "written_s": round(time.perf_counter() - began, 4),
            "sha256": sha256,
        }

        uploaded_s = self._place.push()
        if uploaded_s is not None:
            values["uploaded_s"] = round(uploaded_s, 4)
        self._complete.append((state["step"], values))

    def _describe_weights(self, num_classes: int) -> None:
        """Make `weights/` readable by timm and transformers: write the model's config, and link the
        file name that they expect to the last weights (the EMA if it exists)."""
        config = config_io.from_dict(self._config, "the run's config")
        if lacking("timm", config):
            return

        content = timm_config(
            ProgramModel(self._train_step.model, config, num_classes, self._class_names)
        )
        last = weights_file(self._run_dir, "last", self._train_step.ema is not None)
        path = last.with_name(TIMM_CONFIG_FILE)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, content)
        except OSError as error:
            raise cannot_write(path, error) from error

        # A link needs no second copy, and may point to a file that does not exist yet. Without
        # the link, timm would open another file.
        with suppress(OSError):
            link_to(last.name, last.with_name(HUB_FILES[0]))

    def _write_lines(self, collected: list[Any]) -> None:
        """Write everything to which the checkpoint refers, such as lines of metrics.jsonl."""
        try:
            for each, values in zip(self._beside, collected, strict=True):
                each.write(values)
            self._record.flush()
        except OSError as error:
            raise cannot_write(Path(error.filename or self._run_dir), error) from None

    def _files(self, names: tuple[str, ...]) -> Iterator[tuple[Path, bool, dict[str, Tensor]]]:
        """Yield the path, `averaged` and the tensors of each weights file."""
        assert self._snapshot is not None, "the main rank has one"
        for prefix, averaged in (("model.", False), ("ema.", True)):
            tensors = {
                name.removeprefix(prefix): tensor
                for name, tensor in self._snapshot.tensors.items()
                if name.startswith(prefix)
            }
            for name in names if tensors else ():
                yield weights_file(self._run_dir, name, averaged), averaged, tensors

    def _metadata(self, state: dict[str, Any], averaged: bool) -> dict[str, str]:
        """Return a description of model, data and step, which makes a weights file usable without
        the run folder."""
        return {
            "format": "pt",
            "config": json.dumps(self._config),
            "num_classes": str(state["facts"]["num_classes"]),
            "grid_size": json.dumps(state["facts"]["grid_size"]),
            "class_names": json.dumps(self._class_names),
            "step": str(state["step"]),
            "averaged": json.dumps(averaged),
        }

    def _needed_bytes(
        self, state: RunState, with_checkpoint: bool, weights: tuple[str, ...]
    ) -> int:
        """Return the maximum growth of the run folder during this save, in bytes."""
        assert self._snapshot is not None, "the main rank has one"
        grown = replaced = 0
        for path, _, tensors in self._files(weights):
            size = sum(tensor.nbytes for tensor in tensors.values())
            old = path.stat().st_size if path.exists() else 0
            grown += max(size - old, 0)
            # The old file is removed only when the new one is complete, so both exist for a while.
            replaced = max(replaced, min(size, old))

        is_new = with_checkpoint and not checkpoint_folder(self._run_dir, state.step).exists()
        return grown + max(self._snapshot.num_bytes if is_new else 0, replaced)
