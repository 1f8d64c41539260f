"""Fine-tune weights, and compare the predictions before and after fine-tuning on each validation
image.

The original weights are evaluated on the same validation images, at their own image size and at the
new image size.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch

from vit.checkpoint.checkpoint import newest_checkpoint
from vit.config.base import VAL
from vit.config.io import with_settings
from vit.config.schema import Config
from vit.data.open_data import open_split
from vit.distributed.process_group import World
from vit.evaluation.compare import Result, evaluate_weights
from vit.run import Run
from vit.run_folder.place import local_folder
from vit.run_folder.reading import newest_info
from vit.system.redact import shown
from vit.system.urls import is_url
from vit.train import train
from vit.training.metrics import PairedDifference, paired_difference
from vit.weights.files import LoadedWeights, fingerprint, read_weights
from vit.weights.on_ranks import read_once

VIEW_KEYS = ("crop_pct", "crop_mode", "resizer")
"""The settings in `eval` that depend on the image size."""


def finetune(
    loaded: LoadedWeights,
    base: Config | None,
    problem: str,
    tuned: Config,
    world: World,
    build_run: Callable[[Config, World], Run],
    out: TextIO,
    as_json: bool,
) -> None:
    """Fine-tune `loaded` with the config `tuned`, and print the accuracy before and after
    fine-tuning to `out`.

    Raises ValueError if the run in the run folder started from different weights.

    Args:
        base: The config of `loaded`, or None if the weights cannot be evaluated before training.
        problem: The reason why the weights cannot be evaluated before training, or "" if they can.
        build_run: A function that builds the run for `tuned` (`vit.compose.build_run`).
        as_json: Whether to print one JSON object on stdout as well (see `launch/eval.py`).
    """
    assert tuned.run.dir is not None, "load_config names the run folder"
    with world.fail_together():
        if world.is_main:
            infos = newest_info(tuned.run.dir) if is_url(tuned.run.dir) else Path(tuned.run.dir)
            _check_same_start(infos, loaded, tuned.run.dir)

    split = open_split(tuned, tuned.data.val_split, world)
    has_other_classes = split.num_classes != loaded.num_classes and not tuned.init.select_classes
    if base is not None and has_other_classes:
        problem = (
            f"{loaded.path} has {loaded.num_classes} classes, but {split.root} has"
            f" {split.num_classes}"
        )

    results_before: dict[str, Result] = {}
    if base is not None and not problem:
        results_before = _evaluate_before(loaded, base, tuned, world, out)
    elif world.is_main:
        print(f"accuracy before fine-tuning not measured: {problem}", file=out)

    if train(build_run(tuned, world)) == "stopped":
        if world.is_main:
            print(
                f"fine-tuning was stopped early and saved in {tuned.run.dir}: run the same command"
                " to continue",
                file=out,
            )
            if as_json:
                print(json.dumps({"stopped": True, "run": tuned.run.dir}))
        return

    world.barrier()  # rank 0 may still be writing weights or drawing the report
    trained = read_once(lambda: read_weights(local_folder(tuned.run)), world)
    after = evaluate_weights(trained, tuned, world, out)
    if not world.is_main:
        return

    labels = torch.from_numpy(split.index["label"].astype("int64"))
    is_right = after.evaluation.predictions == labels
    differences = {
        name: paired_difference(result.evaluation.predictions == labels, is_right)
        for name, result in results_before.items()
    }

    if base is not None and results_before:
        _print_differences(differences, base, tuned, split.num_samples, out)
    if as_json:
        summary = after.as_json | {name: result.as_json for name, result in results_before.items()}
        summary["difference"] = {name: asdict(value) for name, value in differences.items()}
        print(json.dumps(summary))


def _print_differences(
    differences: dict[str, PairedDifference],
    base: Config,
    tuned: Config,
    num_images: int,
    out: TextIO,
) -> None:
    """Print the accuracy difference between the fine-tuned weights and each result before
    fine-tuning."""
    size = tuned.model.size_text()
    against = {
        "before": f"base at {base.model.size_text()}",
        "before_resized": f"base at {size}, not trained at this size",
    }
    print(f"fine-tuned at {size}, compared on the same {num_images} images:", file=out)
    for name, difference in differences.items():
        print(f"  compared with the {against[name]}: {difference}", file=out)


def _check_same_start(run_dir: Path, loaded: LoadedWeights, place: str) -> None:
    """Raise ValueError if the run in `run_dir` started from different weights.

    place: the folder or URL to show in the message.
    """
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        return
    _, info = checkpoint
    if info["facts"].get("init_sha256") not in (None, fingerprint(loaded.weights)):
        raise ValueError(
            f"{shown(place)} was fine-tuned from weights that differ from those in {loaded.path}:"
            " set another run.dir, or remove that run"
        )


def _evaluate_before(
    loaded: LoadedWeights, base: Config, tuned: Config, world: World, out: TextIO
) -> dict[str, Result]:
    """Evaluate `loaded` on the validation images of `tuned`, at both configs' image sizes."""
    settings = {
        "data.root": tuned.data.root,
        "data.val_split": tuned.data.val_split,
        "loader.num_workers": tuned.loader.num_workers,
        "eval.batch_size": tuned.eval.batch_size,
        # Omit the evaluation sets of `base`, because their classes differ and the results would not
        # be comparable.
        "eval.sets": {},
        "eval.best_by": VAL,
    }

    selected = tuned.init.select_classes
    results = {
        "before": evaluate_weights(loaded, with_settings(base, settings), world, out, selected)
    }

    if tuned.model.size_text() != base.model.size_text():
        settings["model.image_size"] = tuned.model.image_size
        settings |= {f"eval.{key}": getattr(tuned.eval, key) for key in VIEW_KEYS}
        results["before_resized"] = evaluate_weights(
            loaded, with_settings(base, settings), world, out, selected
        )
    return results
