"""The names of the files in a run folder, and functions that list or remove them.

    runs/<name>/
      config.yaml            the resolved config, with command, commit and versions in a header
      metrics.jsonl          metrics and events, see vit.loggers.record
      predictions.npz        predicted class of each validation image in the newest evaluation
      samples/               loss of each training image in each epoch, see vit.hooks.sample_losses
      checkpoints/           full training state, see vit.checkpoint.checkpoint
      weights/               last, best (and last_ema, best_ema), for evaluation and other tools;
                             config.json and a link model.safetensors, which timm opens
      export/                folders for other programs, see launch/export.py
      report/                index.html and its pictures, see vit.extras.report
      stopped_early          exists while the run is stopped but not finished
      .lock                  locked by the training process

This package does not import torch, because it is used by batch scripts and by programs that copy
runs.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from vit.checkpoint.seal import INFO_FILE
from vit.config.schema import CheckpointConfig
from vit.distributed.launcher import is_main_process
from vit.system.files import remove_leftovers, replacing

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
PREDICTIONS_FILE = "predictions.npz"
SAMPLES_FOLDER = "samples"
CHECKPOINTS = "checkpoints"
LATEST_FILE = f"{CHECKPOINTS}/latest"
TIMM_CONFIG_FILE = "config.json"
"""The file in `weights/` from which timm and transformers create the model."""
REPORT_FOLDER = "report"
STOPPED_FILE = "stopped_early"
LOCK_FILE = ".lock"


def weights_file(run_dir: Path, name: str, averaged: bool = False) -> Path:
    """Return the path of the weights file `name` ("last" or "best"), or of its EMA version."""
    return run_dir / "weights" / f"{name}{'_ema' if averaged else ''}.safetensors"


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoint folders of a run, newest first."""
    previous_folders: list[Path] | None = None
    while True:
        folders = sorted((run_dir / CHECKPOINTS).glob("step_*"), reverse=True)
        complete = [folder for folder in folders if (folder / INFO_FILE).is_file()]
        # A live run may have replaced all listed checkpoints with newer ones, so list them again.
        if complete or folders == previous_folders:
            return complete
        previous_folders = folders


def surplus_checkpoints(names: Sequence[str], settings: CheckpointConfig) -> list[str]:
    """Return those of `names`, newest first, that neither `keep_last` nor `keep_every` keeps."""
    every = (settings.keep_every or 0) * settings.every_steps
    older = names[settings.keep_last :]
    return [name for name in older if not every or int(name.removeprefix("step_")) % every]


def newest_run(argument: str, *names: str) -> Path:
    """Find the run in runs/ whose files `names` changed most recently, print its path and return
    it.

    argument: the missing argument, shown in messages. Raises ValueError if no run has these files.
    """
    paths = [path for name in names for path in Path("runs").glob(f"*/{name}")]
    if not paths:
        raise ValueError(
            f"no {argument} was given, and runs/ contains none: train one first, or pass a run"
            " folder"
        )

    newest = max(paths, key=lambda path: path.stat().st_mtime)
    run_dir = Path(*newest.parts[:2])
    if is_main_process():
        print(f"{argument} not given: using the newest run, {run_dir}", file=sys.stderr)
    return run_dir


def mark_stopped(run_dir: Path, step: int, signal_name: str) -> None:
    """Write the file that marks a run as stopped at `step` but not finished. The Slurm script reads
    this file."""
    text = json.dumps({"step": step, "signal": signal_name})
    with replacing(run_dir / STOPPED_FILE) as file:
        file.write(f"{text}\n".encode())


def remove_unfinished(run_dir: Path) -> None:
    """Remove unfinished files left by killed processes from a run folder. The caller must hold the
    lock. Raises OSError."""
    for checkpoint in (run_dir / CHECKPOINTS).glob(".tmp_*"):
        shutil.rmtree(checkpoint)
    for name in (".", "weights", SAMPLES_FOLDER, REPORT_FOLDER):
        remove_leftovers(run_dir / name)
