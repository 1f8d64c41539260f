"""Write and read checkpoints of the full training state, which are either complete or absent.

The tensors of `TrainStep` are written to one safetensors file. `RunState` and the config are
written to `checkpoint.json`. Both files are written to a hidden folder and flushed to disk. Then
the folder is renamed, so a folder with its final name is complete. Finally `latest` is updated, and
older checkpoints are removed. `vit.checkpoint.saver` decides when and in which thread to write.

    runs/<name>/checkpoints/
      step_00012500/
        state.safetensors       model.<name>  ema.<name>  optim.<exp_avg|...>.<name>  scaler.<name>
        checkpoint.json         format_version, RunState, config, size and sha256 of each file,
                                and of itself (vit/checkpoint/seal.py)
      latest                    "step_00012500"

Checkpoints contain no pickles. torch.distributed.checkpoint's `HuggingFaceStorageReader` can read
the tensor file. This reader can also read sharded files, written under FSDP2, on a different number
of ranks, so sharded training could use the same format.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vit.checkpoint.seal import (
    INFO_FILE,
    CheckpointError,
    UnreadableCheckpoint,
    check_files,
    read_info_file,
    reading,
    sealed,
)
from vit.checkpoint.state import RunState
from vit.config.schema import CheckpointConfig
from vit.distributed.world import World
from vit.run_folder.lock import RunLock
from vit.run_folder.paths import (
    CHECKPOINTS,
    LATEST_FILE,
    complete_checkpoints,
    mark_stopped,
    remove_unfinished,
    surplus_checkpoints,
)
from vit.step import TrainStep
from vit.system.files import WeightsError, flush, remove_leftovers, replacing
from vit.system.spelling import few
from vit.weights.save import save_weights

FORMAT_VERSION = 1
STATE_FILE = "state.safetensors"


def named_tensors(train_step: TrainStep) -> dict[str, Tensor]:
    """Return all tensors of the state, keyed by their names in the file, without copying them.

    With DDP, rank 0 has all tensors. Parameters sharded by FSDP2 would have to be gathered.
    """
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


# --- writing --------------------------------------------------------------------------------------


def check_room(run_dir: Path, step: int, needed_bytes: int) -> None:
    """Raise CheckpointError if less than `needed_bytes` of disk space are free for a save at
    `step`.

    Unfinished files of killed processes are removed first.
    """
    folder = checkpoint_folder(run_dir, step)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(run_dir)
        free_bytes = shutil.disk_usage(folder.parent).free
    except OSError as error:
        raise _unwritable(folder, error) from None

    # The margin is for `checkpoint.json` and for partly filled blocks of the file system.
    if free_bytes < needed_bytes * 1.01 + 2**20:
        raise CheckpointError(
            f"{folder}: needs {needed_bytes / 2**20:,.1f} MiB, but the disk has only"
            f" {free_bytes / 2**20:,.1f} MiB free; earlier checkpoints are unchanged. Free some"
            " space and run the same command again"
        )


def write_checkpoint(
    run_dir: Path,
    tensors: Mapping[str, Tensor],
    state: dict[str, Any],
    config: dict[str, Any],
    world_size: int,
    kept: CheckpointConfig,
) -> tuple[Path, str]:
    """Write `step_<n>`, remove the checkpoints that `kept` does not keep, and return the folder and
    the sha256 of its tensors.

    Args:
        tensors: The tensors, keyed by their names in the file.
        state: The fields of `RunState`.

    Raises:
        CheckpointError: The folder cannot be written. The previous checkpoint is then unchanged.
    """
    folder = checkpoint_folder(run_dir, state["step"])
    try:
        if folder.exists() and not (folder / INFO_FILE).is_file():
            _set_aside(folder)
        if folder.exists():
            info = update_info(folder, state)
        else:
            info = _write(folder, tensors, state, config, world_size)
            names = [path.name for path in complete_checkpoints(run_dir)]
            for name in surplus_checkpoints(names, kept):
                _remove(folder.with_name(name))
    except (OSError, WeightsError) as error:
        shutil.rmtree(_hidden(folder), ignore_errors=True)
        if isinstance(error, WeightsError):
            raise CheckpointError(str(error)) from None
        raise _unwritable(folder, error) from None

    return folder, info["files"][STATE_FILE]["sha256"]


def _remove(folder: Path) -> None:
    """Remove a checkpoint in a way that leaves it either complete or absent at any time."""
    # If the process is killed now, the next save removes the hidden folder. A partly removed folder
    # with its final name would look complete, or take disk space forever.
    hidden = _hidden(folder)
    folder.rename(hidden)
    shutil.rmtree(hidden)


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint at `step`."""
    return run_dir / CHECKPOINTS / f"step_{step:08d}"


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{folder}: cannot be written ({error.strerror}); earlier checkpoints are unchanged: free"
        " some space or fix the permissions, and run the same command again"
    )


def update_info(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Replace the state in a checkpoint's `checkpoint.json` at the same step, and keep its tensors.

    A resumed run calls this function after it repeats an interrupted evaluation.
    """
    info = read_info(folder, verify=False)
    _write_info(folder, info | state)
    return info


def _write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    state: dict[str, Any],
    config: dict[str, Any],
    world_size: int,
) -> dict[str, Any]:
    """Write the files of a checkpoint into its hidden folder, and return `checkpoint.json`."""
    hidden = _hidden(folder)
    hidden.mkdir(parents=True)
    written = save_weights(hidden / STATE_FILE, tensors, {"format": "pt"})

    info = {
        "format_version": FORMAT_VERSION,
        **state,
        "world_size": world_size,
        "torch": torch.__version__,
        "files": {STATE_FILE: {"bytes": written.num_bytes, "sha256": written.sha256}},
        "config": config,
    }
    _write_info(hidden, info)

    os.replace(hidden, folder)
    flush(folder.parent)
    _replace_text(folder.parents[1] / LATEST_FILE, folder.name + "\n")
    return info


def _write_info(folder: Path, info: dict[str, Any]) -> None:
    _replace_text(folder / INFO_FILE, json.dumps(sealed(info), indent=1))
    flush(folder)


def _replace_text(path: Path, text: str) -> None:
    remove_leftovers(path.parent, path.name)
    with replacing(path) as file:
        file.write(text.encode())


def _hidden(folder: Path) -> Path:
    """Return the path of `folder` while it is incomplete."""
    return folder.with_name(f".tmp_{folder.name}")


def _set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint for inspection, so that its step can be saved again."""
    aside = folder.with_name(f"damaged_{folder.name}_{time.time_ns()}")
    folder.rename(aside)
    return aside


# --- reading --------------------------------------------------------------------------------------


def read_info(folder: Path, verify: bool = True) -> dict[str, Any]:
    """Return the content of `checkpoint.json`. With `verify`, check the sizes and hashes of files.

    Raises CheckpointError if the checkpoint is damaged or was not written by this project.
    """
    info = read_info_file(folder)
    if info["format_version"] > FORMAT_VERSION:
        raise UnreadableCheckpoint(
            f"{folder}: written by a newer release (format {info['format_version']}, but this"
            f" release reads formats up to {FORMAT_VERSION}): update the code"
        )
    if verify:
        check_files(folder, info)
    return info


class FoundCheckpoint(NamedTuple):
    """A complete checkpoint of a run."""

    folder: Path
    info: dict[str, Any]
    """The content of `checkpoint.json`."""


def newest_checkpoint(
    run_dir: Path, verify: bool = False, log_line: Callable[[str], None] = print
) -> FoundCheckpoint | None:
    """Return the newest checkpoint of a run, or None.

    verify: whether to compare sizes and hashes, rename damaged checkpoints, report them through
    `log_line` and try the next older checkpoint. Only one rank may do this. Raises CheckpointError
    if all checkpoints are damaged. The error is repeated at each start until a user acts, because
    an automatic restart must not start the run over.
    """
    with reading(run_dir / CHECKPOINTS):
        # `listdir` raises an error for a folder without permission and for a broken link.
        # `glob` would return nothing, and the run would start over.
        names = os.listdir(run_dir / CHECKPOINTS) if os.path.lexists(run_dir / CHECKPOINTS) else []
        candidates = complete_checkpoints(run_dir)

    for folder in candidates:
        try:
            return FoundCheckpoint(folder, read_info(folder, verify))
        except CheckpointError as error:
            if not folder.exists():  # a running job has replaced it with a newer checkpoint
                return newest_checkpoint(run_dir, verify, log_line)
            # The checkpoint was not verified or may be intact, so do not rename it.
            if not verify or isinstance(error, UnreadableCheckpoint):
                raise
            log_line(
                f"{error}; renamed to {_set_aside(folder).name}, trying the previous checkpoint"
            )

    is_begun = verify and Path(LATEST_FILE).name in names
    if candidates or is_begun:
        raise CheckpointError(
            f"{run_dir / CHECKPOINTS}: all checkpoints are damaged or missing; restore a good one,"
            " or remove this folder and run the same command to start over"
        )
    return None


def load_checkpoint(folder: Path, train_step: TrainStep) -> None:
    """Copy a checkpoint's tensors into `train_step`, in place, on all ranks.

    Rank 0 reads the checkpoint. Raises CheckpointError on rank 0 if names or shapes differ, and
    AlreadyReported on the other ranks.
    """
    targets = named_tensors(train_step)
    world = train_step.world
    with world.fail_together():  # reading may exceed the timeout of a collective
        if world.is_main:
            _read_into(targets, folder)
    world.broadcast_(targets.values())


def state_of(info: dict[str, Any]) -> RunState:
    """Return the run's state from `info`, the content of `checkpoint.json`."""
    return RunState(**{field.name: info[field.name] for field in fields(RunState)})


def _read_into(targets: dict[str, Tensor], folder: Path) -> None:
    """Copy the tensors of a checkpoint into `targets`. Raises CheckpointError if names or shapes
    differ."""
    try:
        with safe_open(folder / STATE_FILE, framework="pt") as file:
            # safetensors' file object has `keys` but is not a dict.
            names = file.keys()
            shapes = {name: file.get_slice(name).get_shape() for name in names}
            _check_fit(folder, targets, shapes)
            for name, target in targets.items():
                target.copy_(file.get_tensor(name))
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _check_fit(folder: Path, targets: dict[str, Tensor], shapes: dict[str, list[int]]) -> None:
    """Raise CheckpointError if names or `shapes` in a checkpoint differ from `targets`."""
    wrong = [f"lacks {name}" for name in sorted(targets.keys() - shapes)]
    wrong += [f"has {name} but the run does not" for name in sorted(shapes.keys() - targets)]
    for name in sorted(shapes.keys() & targets):
        target_shape = list(targets[name].shape)
        if list(shapes[name]) != target_shape:
            wrong.append(f"has {name} as {list(shapes[name])} instead of {target_shape}")

    if wrong:
        raise CheckpointError(
            f"{folder}: does not fit this model and optimizer: it {few(wrong, limit=3)}:"
            " restore the settings, or use another run.dir; if its model is the same,"
            f" init.checkpoint={folder.parents[1]} starts it from these weights"
        )


def mark_interrupted(
    folder: Path, number: signal.Signals, lock: RunLock, world: World, is_new: bool
) -> None:
    """Mark the run as stopped if this process owns the folder. The Slurm script then queues the job
    again."""
    # After one rank is killed, torchrun sends SIGTERM to the other ranks. Such a run has failed and
    # must not be marked. Otherwise a job whose ranks always run out of memory would be queued again
    # forever.
    if world.has_killed_rank():
        return

    # A new run that is preempted (SIGTERM) is marked, although its folder may not exist yet. A new
    # run that a user stops with Ctrl-C is not marked, although it may already have the lock. The
    # folder of a new run may by now belong to another process.
    owns_folder = lock.is_held or (is_new and not folder.is_dir())
    is_stopped_new_run = is_new and number != signal.SIGTERM
    if is_stopped_new_run or not owns_folder:
        return

    with suppress(OSError, CheckpointError):  # report only the signal
        folder.mkdir(parents=True, exist_ok=True)
        newest = newest_checkpoint(folder)
        mark_stopped(folder, newest.info["step"] if newest else 0, number.name)
