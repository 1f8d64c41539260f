"""Run trainings in processes, and compare them with paired intervals.

    config, settings -> a forked process trains -> its folder: `found.json` (curve, CPU seconds),
    `right.npz` (correct images)
    right of A, right of B, over seeds -> `Difference`

If a folder contains both files, its training is finished, and a repeated command skips it. An
interrupted training resumes from its checkpoint, or restarts if there is none. Its CPU seconds are
then incomplete and are excluded from median times.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from vit.compose import build_run
from vit.config.io import load_config
from vit.config.schema import Config
from vit.data.storage.opening import open_split
from vit.distributed.process_group import join_world
from vit.loggers.lines import read_metrics
from vit.train import train

FOUND_FILE = "found.json"
RIGHT_FILE = "right.npz"


@dataclass(frozen=True)
class Figures:
    cpu_s: float
    """The CPU seconds of all threads, including evaluations and excluding imports."""
    wall_s: float
    was_cut: bool
    """Whether the training was resumed, so that `cpu_s` covers only its last part."""
    curve: list[tuple[float, float]]
    """A pair (epoch, top-1 in percent) for each evaluation."""

    @property
    def top1(self) -> float:
        return self.curve[-1][1]


def read_command_line(
    description: str, num_seeds: int
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return the parser, which can report later errors, and the flags shared by all comparisons."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--seeds", type=int, default=num_seeds, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")

    args = parser.parse_intermixed_args()
    if args.seeds < 2:
        parser.error(f"--seeds {args.seeds}: expected at least 2, for an interval over seeds")
    return parser, args


class Outcome(NamedTuple):
    """The result of training one contestant."""

    curve: list[tuple[float, float]]
    right: dict[str, NDArray[np.bool_]]
    """A mask of correct evaluation images for `model`, and for `ema` if there is an average."""
    was_cut: bool


class Training(NamedTuple):
    figures: Figures
    right: dict[str, NDArray[np.bool_]]


def ours(config: Config) -> Outcome:
    """Train in this process with this project's loop, and evaluate on the last set."""
    world = join_world(config.train.device)
    run = build_run(config, world)
    if train(run) != "finished":
        raise SystemExit(1)  # A signal stopped the run. The same command resumes it.

    evaluator = run.evaluators[-1]
    [results] = evaluator.evaluate(run.models()).values()
    evaluator.close()
    labels = evaluator.split.index["label"]
    right = {name: result.predictions.numpy() == labels for name, result in results.items()}

    record = run.folder / "metrics.jsonl"
    lines = [line for line in read_metrics(record) if line["kind"] == "eval"]
    per_epoch = run.plan.steps_per_epoch
    curve = [(line["step"] / per_epoch, line["top1"]) for line in lines]
    return Outcome(curve, right, run.state.restarts > 0)


def trained(
    config_file: Path,
    settings: Sequence[str],
    folder: Path,
    contestant: Callable[[Config], Outcome] = ours,
) -> Training:
    """Train in a separate process, unless `folder` contains the result.

    The output of the process goes to `folder`.log. Raises SystemExit if the process fails.
    """
    overrides = [*settings, f"run.dir={folder}", "log.wandb=off", "log.report=false"]
    if not (folder / RIGHT_FILE).exists():
        config = load_config(config_file, overrides)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Import before the fork, because imports take seconds and training only a minute.
        # Otherwise, each process imports these two modules when it creates an optimizer.
        importlib.import_module("torch._dynamo")
        importlib.import_module("timm.optim")
        process = multiprocessing.get_context("fork").Process(
            target=_in_child, args=(contestant, config, folder)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{folder} failed: see {folder}.log")

    values = json.loads((folder / FOUND_FILE).read_text())
    values["curve"] = [(epoch, top1) for epoch, top1 in values["curve"]]
    with np.load(folder / RIGHT_FILE) as right:
        return Training(Figures(**values), dict(right))


def _in_child(contestant: Callable[[Config], Outcome], config: Config, folder: Path) -> None:
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    began_s = time.perf_counter()
    cpu_began_s = time.process_time()
    curve, right, was_cut = contestant(config)
    cpu_s = time.process_time() - cpu_began_s
    figures = Figures(cpu_s, time.perf_counter() - began_s, was_cut, curve)
    folder.mkdir(exist_ok=True)
    (folder / FOUND_FILE).write_text(json.dumps(asdict(figures)))
    np.savez(folder / "unfinished.npz", allow_pickle=False, **right)
    (folder / "unfinished.npz").rename(folder / RIGHT_FILE)  # Written last, to mark completion.


# ---- intervals -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The difference in top-1 points, second minus first, with its 95 % interval."""

    points: float
    low: float
    high: float
    by_seed: list[float]

    def __str__(self) -> str:
        return f"{self.points:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def rights(trainings: Sequence[Training], weights: str = "model") -> NDArray[np.bool_]:
    """Return masks (S, N) of each training's correct images, for its last weights or its `ema`."""
    return np.stack([each.right[weights] for each in trainings])


def difference(
    first: NDArray[np.bool_], second: NDArray[np.bool_], groups: NDArray[np.int64]
) -> Difference:
    """Compare the accuracies of two sides over seeds and images. first, second: (S, N) masks of
    correct images.

    groups: (N,) the original of each image. Seeds and originals are both random samples, because
    the mean would change with other seeds and other digits. The differences form a table of seeds
    by originals with two random effects (Cornfield & Tukey 1956, Annals of Mathematical Statistics
    27, 907-949). The mean has the variance (MS_seeds + MS_originals - MS_rest) / (S O), with
    Satterthwaite's degrees of freedom (1946, Biometrics Bulletin 2, 110-114). This estimate can be
    below the variance of seeds or the variance of originals, so the largest of the three is used.
    """
    table = second.astype(np.float64) - first
    num_seeds, num_images = table.shape
    _, group = np.unique(groups, return_inverse=True)
    num_groups = int(group.max()) + 1

    sums = np.zeros((num_seeds, num_groups))
    for row, values in zip(sums, table, strict=True):
        np.add.at(row, group, values)
    # Scale so that the mean over originals equals the mean over images, because originals may have
    # different numbers of images.
    cells = sums * num_groups / num_images

    mean = cells.mean()
    by_seed = cells.mean(1)
    by_group = cells.mean(0)
    rest = cells - by_seed[:, None] - by_group + mean
    free = np.array([num_seeds - 1, num_groups - 1, (num_seeds - 1) * (num_groups - 1)])

    squares = np.array(
        [
            num_groups * ((by_seed - mean) ** 2).sum(),
            num_seeds * ((by_group - mean) ** 2).sum(),
            (rest**2).sum(),
        ]
    )

    seeds, originals, left = squares / free
    both = seeds + originals - left
    spread = (np.array([seeds, originals, left]) ** 2 / free).sum()
    parts = [(seeds, free[0]), (originals, free[1])]
    if both > 0:
        parts.append((both, both**2 / spread))

    widths = [
        stats.t.ppf(0.975, max(freedom, 1)) * math.sqrt(part / (num_seeds * num_groups))
        for part, freedom in parts
    ]

    half = 100 * max(widths)
    points = 100 * float(mean)
    return Difference(points, points - half, points + half, (100 * by_seed).tolist())


def originals(root: str | Path, split_name: str) -> NDArray[np.int64]:
    """Return the index (N,) of each image's original. `digit0012_03` belongs to `digit0012`.

    A key without such an ending names its own original.
    """
    split = open_split(root, split_name)
    names = [re.sub(r"_\d+$", "", split.key(i)) for i in range(len(split))]
    return np.unique(names, return_inverse=True)[1].astype(np.int64)
