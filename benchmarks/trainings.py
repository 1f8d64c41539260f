"""What the comparisons of whole trainings share: a training as a process, and paired intervals.

    config, settings -> a forked process trains -> its folder: `found.json` (curve, processor
    seconds), `right.npz` (which images are right)
    right of A, right of B, over seeds -> `Difference`

A folder with both files is done, and the same command again continues with the next. A training
that was cut off goes on from its checkpoint, or begins again where it has none; its processor
seconds are then not all its own, and it is left out of medians of time.
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

from vit.config.io import load_config
from vit.config.schema import Config
from vit.data.shards.data_set import open_split
from vit.distributed.process_group import join_world
from vit.extras.compose import build_run
from vit.loggers.record import read_metrics
from vit.train import train

FOUND_FILE = "found.json"
RIGHT_FILE = "right.npz"


@dataclass(frozen=True)
class Found:
    """What a training has come to."""

    cpu_s: float
    """Processor seconds of all its threads, with evaluations and without imports."""
    wall_s: float
    was_cut: bool
    """Whether it was continued, so that its seconds are those of its last part."""
    curve: list[tuple[float, float]]
    """(epoch, top-1 in percent) of each evaluation."""

    @property
    def top1(self) -> float:
        """Percent, at the end."""
        return self.curve[-1][1]


def read_command_line(
    description: str, num_seeds: int
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return the flags of a comparison, and the parser, for mistakes that show later."""
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
        parser.error(f"--seeds {args.seeds}: at least 2, for an interval over seeds")
    return parser, args


class Outcome(NamedTuple):
    """What a contestant's function gives of one training."""

    curve: list[tuple[float, float]]
    right: dict[str, NDArray[np.bool_]]
    """Which of the images to evaluate on are right: `model`, and `ema` if there is an average."""
    was_cut: bool


class Training(NamedTuple):
    """A training that is done."""

    found: Found
    right: dict[str, NDArray[np.bool_]]


def ours(config: Config) -> Outcome:
    """Train by this project's loop, in this process."""
    world = join_world(config.train.device)
    run = build_run(config, world)
    if train(run) != "finished":
        raise SystemExit(1)  # a signal: the same command continues
    results = run.evaluators[0].evaluate(run.models())["val"]
    run.evaluators[0].close()
    labels = np.load(run.folder / "predictions.npz")["labels"]
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
    """Train in a process of its own, unless `folder` has its result already.

    What it prints is in `folder`.log. Raises SystemExit if it fails.
    """
    overrides = [*settings, f"run.dir={folder}", "log.wandb=off", "log.report=false"]
    if not (folder / RIGHT_FILE).exists():
        config = load_config(config_file, overrides)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A fork has imported everything already: seconds, where a training takes a minute. These
        # two are imported where optimizers are made.
        importlib.import_module("torch._dynamo")
        importlib.import_module("timm.optim")
        process = multiprocessing.get_context("fork").Process(
            target=_in_child, args=(contestant, config, folder)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{folder} failed: see {folder}.log")
    found = json.loads((folder / FOUND_FILE).read_text())
    found["curve"] = [(epoch, top1) for epoch, top1 in found["curve"]]
    with np.load(folder / RIGHT_FILE) as right:
        return Training(Found(**found), dict(right))


def _in_child(contestant: Callable[[Config], Outcome], config: Config, folder: Path) -> None:
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    began_s = time.perf_counter()
    cpu_began_s = time.process_time()
    curve, right, was_cut = contestant(config)
    cpu_s = time.process_time() - cpu_began_s
    found = Found(cpu_s, time.perf_counter() - began_s, was_cut, curve)
    folder.mkdir(exist_ok=True)
    (folder / FOUND_FILE).write_text(json.dumps(asdict(found)))
    np.savez(folder / "unfinished.npz", allow_pickle=False, **right)
    (folder / "unfinished.npz").rename(folder / RIGHT_FILE)  # last: its presence means done


# ---- intervals -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How much more top-1 the second of two has, in points, with its 95 % interval."""

    points: float
    low: float
    high: float
    by_seed: list[float]

    def __str__(self) -> str:
        return f"{self.points:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def rights(trainings: Sequence[Training], weights: str = "model") -> NDArray[np.bool_]:
    """Return which images each training has right, (S, N), with its last weights or `ema`."""
    return np.stack([each.right[weights] for each in trainings])


def difference(
    first: NDArray[np.bool_], second: NDArray[np.bool_], groups: NDArray[np.int64]
) -> Difference:
    """Compare two over seeds and images; `first`, `second`: (S, N), whether an image is right.

    groups: (N,) which original an image is a rendering of. Seeds and originals are both a sample:
    another seed, and other digits, would have given another mean. So the differences are a table of
    seeds by originals with both effects random (Cornfield & Tukey 1956, Annals of Mathematical
    Statistics 27, 907-949), whose mean has the variance (MS_seeds + MS_originals - MS_rest) / (S O)
    and Satterthwaite's degrees of freedom (1946, Biometrics Bulletin 2, 110-114). It is taken as at
    least that of seeds alone and that of originals alone, which the estimate can fall below.
    """
    table = second.astype(np.float64) - first
    num_seeds, num_images = table.shape
    _, group = np.unique(groups, return_inverse=True)
    num_groups = int(group.max()) + 1
    sums = np.zeros((num_seeds, num_groups))
    for row, values in zip(sums, table, strict=True):
        np.add.at(row, group, values)
    # Scaled so that the mean over originals is the mean over images, however many each has.
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
    """Return which original each image is of, (N,), by its key: `digit0012_03` is of `digit0012`.

    Without such an ending each image is its own.
    """
    split = open_split(root, split_name)
    names = [re.sub(r"_\d+$", "", split.key(i)) for i in range(len(split))]
    return np.unique(names, return_inverse=True)[1].astype(np.int64)
