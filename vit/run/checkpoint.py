"""Full state for resuming, complete or absent.

The data's story: `TrainStep` holds everything an update changes; its tensors get flat names and go
into one safetensors file, numbers and the config into `checkpoint.json` beside it. Both are written
into a hidden folder, flushed to disk, and the folder is renamed: what carries the final name is
whole. Only then does `latest` name it and do older ones go.

    runs/<name>/checkpoints/
      step_00012500/
        state.safetensors       model.<name>  ema.<name>  optim.<exp_avg|...>.<name>  scaler.<name>
        checkpoint.json         format_version, step, state, config, size and sha256 of each file
      latest                    "step_00012500"

No pickles. The tensor file is what torch.distributed.checkpoint's `HuggingFaceStorageReader` reads,
which also reads the sharded files that its writer makes under FSDP2, on another number of ranks; so
sharded training keeps this format.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vit.distributed import World
from vit.plan import Plan
from vit.run.folder import CHECKPOINTS, INFO_FILE
from vit.step import TrainStep
from vit.system.files import flush
from vit.system.meter import Meter
from vit.weights import WeightsError, save_weights

FORMAT_VERSION = 1
STATE_FILE = "state.safetensors"
SEEN_WITHIN_S = 120.0
"""Twice what NFS keeps the listing of a folder for at most (acdirmax)."""
SEEN_PAUSE_S = 0.5


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; one line for people."""


class NewerFormatError(CheckpointError):
    """A whole checkpoint that only newer code can read."""


@dataclass
class RunState:
    """Where the run is: the part of a checkpoint that is not tensors."""

    step: int = 0
    """Global batches attempted, which is also the position in the data."""
    updates_skipped: int = 0
    """Updates whose gradient was not finite, over the whole run."""
    updates_skipped_in_a_row: int = 0
    """The same, since the last good one."""
    bad_images: int = 0
    """Training images that could not be decoded and counted nowhere."""
    evaluated_step: int = -1
    """The step of the newest evaluation."""
    best_top1: float = -1.0
    """Best top-1 accuracy on the validation split so far, in percent."""
    best_loss: float | None = None
    """The loss with it; None where it was not finite, or before this was recorded."""
    restarts: int = 0
    """How often the run was resumed."""
    elapsed_s: float = 0.0
    """Time spent on the run over all restarts, evaluation and saving included."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What must be the same after a resume: the data's fingerprint, the model's classes."""

    def is_evaluation_due(self, plan: Plan) -> bool:
        """Return whether an evaluation at this step is planned and was not made yet."""
        return plan.evaluates_at(self.step) and self.evaluated_step < self.step

    def is_finished(self, plan: Plan) -> bool:
        """Return whether nothing is left to train and to evaluate."""
        return self.step == plan.total_steps and not self.is_evaluation_due(plan)

    def take_best(self, *found: tuple[float, float]) -> bool:
        """Take the best of `found`, pairs of top-1 and loss; False if what was found before is as
        good. Of equal accuracies the smaller loss is better, as few images give few different
        accuracies."""

        def rank(top1: float, loss: float | None) -> tuple[float, float]:
            return top1, -loss if loss is not None and math.isfinite(loss) else -math.inf

        top1, loss = max(found, key=lambda pair: rank(*pair))
        if rank(top1, loss) <= rank(self.best_top1, self.best_loss):
            return False
        self.best_top1 = top1
        self.best_loss = loss if math.isfinite(loss) else None
        return True


def tensors_of(train_step: TrainStep) -> dict[str, Tensor]:
    """All tensors of the state by their names in the file. They are the live ones, not copies."""
    tensors = {f"model.{name}": value for name, value in train_step.model.state_dict().items()}
    if train_step.ema is not None:
        tensors |= {
            f"ema.{name}": value for name, value in train_step.ema.module.state_dict().items()
        }
    for name, parameter in train_step.model.named_parameters():
        for key, value in train_step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optim.{key}.{name}"] = value
    tensors["scaler.loss_scale"] = train_step.loss_scale.value
    tensors["scaler.steps_since_overflow"] = train_step.loss_scale.steps_since_overflow
    return {name: value.detach() for name, value in tensors.items()}


def save_checkpoint(
    run_dir: Path,
    train_step: TrainStep,
    state: RunState,
    config: dict[str, Any],
    world: World,
    keep_last: int,
) -> Path:
    """Write `step_<n>` from rank 0 and remove what is older than the newest `keep_last`. Every rank
    calls it; returns the folder.

    Raises CheckpointError where there is no room or no permission; the previous checkpoint stays as
    it was.
    """
    folder = run_dir / CHECKPOINTS / f"step_{state.step:08d}"
    if world.is_main:
        try:
            if folder.exists() and not (folder / INFO_FILE).is_file():
                _set_aside(folder)
            # the same step again, after its evaluation: the tensors are the same
            if folder.exists():
                _write_info(
                    folder, {**json.loads((folder / INFO_FILE).read_text()), **asdict(state)}
                )
                return folder
            _write(folder, tensors_of(train_step), state, config, world.size)
            for old in complete_checkpoints(run_dir)[keep_last:]:
                shutil.rmtree(old)
        except (OSError, WeightsError) as error:
            shutil.rmtree(folder.with_name(f".tmp_{folder.name}"), ignore_errors=True)
            if isinstance(error, WeightsError):
                raise CheckpointError(str(error)) from None
            remedy = "free some space or fix the permissions, and run the same command again"
            raise CheckpointError(
                f"{folder}: cannot be written ({error.strerror}); earlier checkpoints are"
                f" untouched: {remedy}"
            ) from None
    return folder


def _write(
    folder: Path,
    tensors: dict[str, Tensor],
    state: RunState,
    config: dict[str, Any],
    world_size: int,
) -> None:
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    for left_over in parent.glob(".tmp_*"):
        shutil.rmtree(left_over)
    needed = sum(t.nbytes for t in tensors.values())
    free = shutil.disk_usage(parent).free
    if free < needed * 1.01 + 2**20:
        raise CheckpointError(
            f"{folder}: needs {needed / 2**20:,.1f} MiB, the disk has {free / 2**20:,.1f} MiB free;"
            " earlier checkpoints are untouched. Free some space and run the same command again"
        )
    hidden = parent / f".tmp_{folder.name}"
    hidden.mkdir()
    save_weights(hidden / STATE_FILE, tensors, {"format": "pt"})
    info = {
        "format_version": FORMAT_VERSION,
        **asdict(state),
        "world_size": world_size,
        "torch": torch.__version__,
        "files": {
            STATE_FILE: {
                "bytes": (hidden / STATE_FILE).stat().st_size,
                "sha256": _sha256(hidden / STATE_FILE),
            }
        },
        "config": config,
    }
    _write_info(hidden, info)
    os.replace(hidden, folder)
    flush(parent)
    (parent / ".latest").write_text(folder.name + "\n")
    flush(parent / ".latest")
    os.replace(parent / ".latest", parent / "latest")


def _write_info(folder: Path, info: dict[str, Any]) -> None:
    hidden = folder / f".{INFO_FILE}"
    hidden.write_text(json.dumps(info, indent=1))
    flush(hidden)
    os.replace(hidden, folder / INFO_FILE)
    flush(folder)


def _sha256(path: Path, meter: Meter | None = None) -> str:
    """Of a file; `meter` counts MiB."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(2**24):
            digest.update(chunk)
            if meter is not None:
                meter.update(file.tell() >> 20)
    return digest.hexdigest()


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders of a run, newest first."""
    return sorted(
        (p for p in (run_dir / CHECKPOINTS).glob("step_*") if (p / INFO_FILE).is_file()),
        reverse=True,
    )


def read_info(folder: Path, verify: bool = True) -> dict[str, Any]:
    """`checkpoint.json` of a folder, with `verify` after its files were compared with it. Raises
    CheckpointError for a damaged or foreign one."""
    try:
        info = json.loads((folder / INFO_FILE).read_text())
        version = int(info["format_version"])
        files = info["files"]
        info["step"], info["config"], info["facts"]  # what readers rely on
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{folder}: {INFO_FILE} is missing or damaged, so this is not a checkpoint of this"
            " project"
        ) from None
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{folder}: written by a newer release (format {version}, this one reads up to"
            f" {FORMAT_VERSION}): update the code"
        )
    for name, expected in files.items() if verify else ():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{path}: has {size:,} bytes, {INFO_FILE} says {expected['bytes']:,}: it is"
                " truncated or missing"
            )
        with Meter(f"checking {path}", size >> 20, "MiB") as meter:
            found = _sha256(path, meter)
        if found != expected["sha256"]:
            raise CheckpointError(
                f"{path}: its content does not match the sha256 in {INFO_FILE}: it is damaged"
            )
    return info


def newest_checkpoint(
    run_dir: Path, verify: bool = False, say: Callable[[str], None] = print
) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint of a run and its info, None for a run without one.

    With `verify` the files' sizes and hashes are compared; damaged checkpoints are renamed, named
    to `say` and passed over. One rank does that, and the others follow. Raises CheckpointError if
    there are checkpoints and all are damaged.
    """
    candidates = complete_checkpoints(run_dir)
    for folder in candidates:
        try:
            return folder, read_info(folder, verify)
        except CheckpointError as error:
            # which is not damaged: nothing to set aside
            if not verify or isinstance(error, NewerFormatError):
                raise
            say(f"{error}; set aside as {_set_aside(folder).name}, trying the one before")
    if candidates:
        raise CheckpointError(
            f"{run_dir}: all {len(candidates)} checkpoints are damaged and set aside; the same"
            " command again starts over"
        )
    return None


def wait_for_checkpoint(folder: Path, info: dict[str, Any], limit_s: float = SEEN_WITHIN_S) -> None:
    """Until this host sees the whole of a checkpoint that another host has found: caches of network
    file systems may be a minute behind. Raises CheckpointError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    missing = dict(info["files"])
    while missing:
        with contextlib.suppress(OSError):
            os.listdir(folder.parent)  # which makes NFS ask the server
            os.listdir(folder)
        for name, expected in list(missing.items()):
            path = folder / name
            if path.is_file() and path.stat().st_size == expected["bytes"]:
                del missing[name]
        if missing and time.monotonic() > deadline:
            raise CheckpointError(
                f"{folder / next(iter(missing))}: rank 0 goes on from it, but"
                f" {socket.gethostname()} does not see it after {limit_s:.0f} s: run.dir must be"
                " one folder for all hosts"
            )
        if missing:
            time.sleep(SEEN_PAUSE_S)


def _set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that its number is free and a person can still look at it."""
    aside = folder.with_name(f"damaged_{folder.name}_{time.time_ns()}")
    folder.rename(aside)
    return aside


def load_checkpoint(folder: Path, info: dict[str, Any], train_step: TrainStep) -> RunState:
    """Copy a checkpoint's tensors into `train_step`, in place, and return its state. Raises
    CheckpointError if names or shapes differ."""
    targets = tensors_of(train_step)
    try:
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context(safe_open(folder / name, framework="pt"))
                for name in info["files"]
            ]
            where = {name: file for file in files for name in file.keys()}  # noqa: SIM118  # a safetensors file is no dict
            shapes = {name: list(file.get_slice(name).get_shape()) for name, file in where.items()}
            wrong = [f"lacks {name}" for name in sorted(set(targets) - set(where))]
            wrong += [f"has {name}, unknown here" for name in sorted(set(where) - set(targets))]
            wrong += [
                f"has {name} as {shape}, here {list(targets[name].shape)}"
                for name, shape in sorted(shapes.items())
                if name in targets and shape != list(targets[name].shape)
            ]
            if wrong:
                more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
                raise CheckpointError(
                    f"{folder}: does not fit this model and optimizer: it"
                    f" {'; '.join(wrong[:3])}{more}"
                )
            for name, target in targets.items():
                target.copy_(where[name].get_tensor(name))
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    # a younger field has its default
    return RunState(**{key: info[key] for key in RunState.__dataclass_fields__ if key in info})
