"""Saves without a stop: training waits for a copy in memory, and a thread of rank 0 writes it.

    training   ... step | save: wait for the thread, test the disk's room, copy | step | step ...
    thread                                                \\- losses, weights, state,
                                                             checkpoint.json, rename, `latest`,
                                                             remove older ones

The thread then uploads what is new, if the run's place has a URL (`vit.run_folder.Place`). One save
is written at a time, in the order in which they were asked for, and each in this order: weights
first. So a complete checkpoint never tells of a best accuracy, or of the end of the run, whose
weights are not there. After an error of the thread all ranks stop at the next step, by the flag
that a signal also sets (`has_failed`), and meet where rank 0 raises it.
"""

from __future__ import annotations

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
from vit.loggers.record import Record
from vit.run_folder import TIMM_CONFIG_FILE, Place, weights_file
from vit.step import TrainStep
from vit.system.files import link_to, write_json
from vit.weights.programs import Subject, timm_config
from vit.weights.save import HUB_FILES, cannot_write, save_weights


class SavedBeside(Protocol):
    """Something that each save writes before its checkpoint, such as losses of images."""

    def collect(self) -> Any:
        """Return what all ranks have gathered since the last call; every rank calls it."""

    def new_bytes(self, collected: Any) -> int:
        """Return by how much the run folder grows when `collected` is written."""

    def write(self, collected: Any) -> None:
        """Write it, on rank 0, in the saver's thread. Raises OSError, which names the file."""


class Saver:
    """Writes checkpoints and weights of a run on rank 0; every rank makes the same calls.

    config: as `config_io.to_dict` gives it. class_names: of the training data. record: gets a line
    for each checkpoint that is complete. beside: what else each save writes.
    """

    def __init__(
        self,
        place: Place,
        train_step: TrainStep,
        config: dict[str, Any],
        class_names: list[str],
        keep_last: int,
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
        self._keep_last = keep_last
        self._record = record
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._complete: deque[tuple[int, dict[str, Any]]] = deque()
        """Step and values of lines that the record has yet to get."""

    @property
    def has_failed(self) -> bool:
        """Whether the thread has met an error, or another job has the run, which the next call of
        `save` or `finish` raises."""
        return self._error is not None or self._place.is_lost

    def prepare(self) -> None:
        """Begin to get memory for the copy, once, so that the first save does not wait for it."""
        if self._world.is_main and self._snapshot is None:
            self._snapshot = Snapshot(named_tensors(self._train_step), self._world.device)
            self._start(self._snapshot.prepare)

    def save(self, state: RunState, with_checkpoint: bool, weights: tuple[str, ...] = ()) -> None:
        """Begin to write a checkpoint, and the files `weights` (last, best) in `weights/`.

        Waits for the save before. Raises CheckpointError if that one failed, or if the disk has no
        room for this one, and ValueError if the folder is not there any more; on all ranks, as
        `World.fail_together` says.
        """
        began = time.perf_counter()
        collected = [each.collect() for each in self._beside]
        self.prepare()  # a save before the first step
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
        changing = [name for name in buffers if name in tensors]
        self._train_step.copying = self._snapshot.take(tensors, changing)
        blocked_s = time.perf_counter() - began
        self._start(
            partial(self._write, asdict(state), with_checkpoint, weights, collected, blocked_s)
        )

    def report(self) -> None:
        """Write a line for each checkpoint that has become complete since the last call; called
        behind each step."""
        self.prepare()  # not before a step: gigabytes of new pages would slow a resumed run's first
        self._tell_complete()

    def _tell_complete(self) -> None:
        while self._complete:
            step, values = self._complete.popleft()
            self._record.write("checkpoint", step, **values)

    def finish(self) -> None:
        """Wait until all is written, on all ranks; raises what `save` raises."""
        with self._world.fail_together():
            self._wait()

    def close(self, at_once: bool = False) -> None:
        """Let the thread complete what it has begun, and give the memory back; raises nothing of
        what the thread meets: something else ended the run.

        at_once: leave the thread, and what it has not completed, to the end of the process.
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
        # A daemon: a process that is to end at once does not wait for it.
        self._thread = threading.Thread(target=self._run, args=(work,), name="saver", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again where training waits
            self._error = error

    def _wait(self) -> None:
        """Wait for the thread; raise its error, if it has one."""
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
        """Write the copy; in the thread."""
        assert self._snapshot is not None, "it was taken"
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
            self._world.size,
            self._keep_last,
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
        """Make `weights/` a folder that timm and transformers open: the model's config, and the
        name that they look for as a link to the last weights, averaged if there are such."""
        config = config_io.from_dict(self._config, "the run's config")
        model = self._train_step.model
        content = timm_config(Subject(model, config, num_classes, self._class_names))
        if content is None:  # timm has no such model
            return
        last = weights_file(self._run_dir, "last", self._train_step.ema is not None)
        path = last.with_name(TIMM_CONFIG_FILE)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, content)
        except OSError as error:
            raise cannot_write(path, error) from error
        # A link costs no second copy. It is there before the file that it leads to.
        with suppress(OSError):  # a file system without links: timm then takes another file
            link_to(last.name, last.with_name(HUB_FILES[0]))

    def _write_lines(self, collected: list[Any]) -> None:
        """Bring to the disk what a checkpoint counts on, such as the lines of the record."""
        try:
            for each, values in zip(self._beside, collected, strict=True):
                each.write(values)
            self._record.flush()
        except OSError as error:
            raise cannot_write(Path(error.filename or self._run_dir), error) from None

    def _files(self, names: tuple[str, ...]) -> Iterator[tuple[Path, bool, dict[str, Tensor]]]:
        """Yield path, whether it is averaged, and tensors of each file of weights."""
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
        """Return what describes model, data and step, so that a file of weights can be used without
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
        """Return by how much the run folder will grow at most while this is written."""
        assert self._snapshot is not None, "the main rank has one"
        grown = replaced = 0
        for path, _, tensors in self._files(weights):
            size = sum(tensor.nbytes for tensor in tensors.values())
            old = path.stat().st_size if path.exists() else 0
            grown += max(size - old, 0)
            replaced = max(replaced, min(size, old))  # the old file goes when the new one is there
        is_new = with_checkpoint and not checkpoint_folder(self._run_dir, state.step).exists()
        return grown + max(self._snapshot.num_bytes if is_new else 0, replaced)
