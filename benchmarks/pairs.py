"""Compare techniques in pairs over seeds and images, with a tuned learning rate on each side.

    python -m data_prep.digits --out data/digits
    python benchmarks/pairs.py --data data/digits --work build/pairs

Both sides of a pair use the same small ViT (`inputs/digits_adamw.yaml` with `SETTINGS`) and differ
only in the technique (`ARMS`). All learning rates are tuned with the same budget. Each rate in an
arm's grid is tried once with `TUNING_SEED`. The result is scored on a fifth of the *training*
originals, which are left out of this training. The comparison then trains on all training images
with other seeds, and uses the evaluation images only at the end. Drop path and averaging use the
learning rate of the arm that they modify.

The interval treats both seeds and originals as random (`inputs.trainings.difference`). Run the same
command again to resume an interrupted comparison.

FILE.json contains all figures, FILE.md the tables, and FILE.png the differences.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from inputs.trainings import (
    Difference,
    Training,
    difference,
    originals,
    read_command_line,
    rights,
    trained,
)
from measure import default_out, keep, machine

from vit.config.io import load_config
from vit.data.storage.opening import open_split
from vit.extras.report.drawing import BLUE, GRAY, drawing

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "benchmarks" / "inputs" / "digits_adamw.yaml"
SETTINGS = (
    "model.embed_dim=64",
    "model.depth=2",
    "model.num_heads=2",
    "model.drop_path_rate=0.2",
    "train.epochs=3",
    "schedule.warmup_epochs=0.5",
    "eval.every_epochs=null",
    "ema.decay=0.98",
    "train.device=cpu",
)
TUNING_SEED = 1000
"""The seed for tuning. It differs from the seeds of the comparison, which start at 0."""
TUNING_PART = 5
"""For tuning, one in this many training originals is held out."""


class Arm(NamedTuple):
    settings: tuple[str, ...]
    lrs: tuple[float, ...] = ()
    """The learning rates to try. If empty, the arm uses the learning rate of `like`."""
    like: str = ""


class Pair(NamedTuple):
    """Two sides to compare, each given by an arm and the type of its weights."""

    name: str
    first: tuple[str, str]
    second: tuple[str, str]


ARMS = {
    "AdamW": Arm((), (1.5e-3, 3e-3, 6e-3, 12e-3)),
    "Muon": Arm(("optim.name=muon",), (1.5e-3, 3e-3, 6e-3, 12e-3)),
    # The bias to which the sigmoids of ten classes converge, like big_vision's bias for a thousand
    # classes. Without this bias, such short runs learn little else.
    "LAMB + BCE": Arm(
        ("optim.name=lamb", "loss.name=bce", "model.init_head_bias=-2.2"), (1e-2, 2e-2, 4e-2, 8e-2)
    ),
    "constant drop path": Arm(
        ("model.drop_path_rate=0.1", "model.drop_path_schedule=constant"), like="AdamW"
    ),
}
PAIRS = (
    Pair("Muon - AdamW", ("AdamW", "model"), ("Muon", "model")),
    Pair("LAMB + BCE - AdamW + CE", ("AdamW", "model"), ("LAMB + BCE", "model")),
    Pair(
        "drop path constant .1 - linear to .2", ("AdamW", "model"), ("constant drop path", "model")
    ),
    Pair("average of weights (EMA) - last weights", ("AdamW", "model"), ("AdamW", "ema")),
)


class Bench:
    """The training runs of all arms on one data set."""

    def __init__(self, data: Path, work: Path, overrides: Sequence[str]):
        self.data = data
        self.work = work
        self.settings = (*SETTINGS, f"data.root={data}", *overrides)

    def train(self, arm: str, lr: float, seed: int, *further: str) -> Training:
        """Train unless the result exists already, and print the result."""
        settings = [*self.settings, *ARMS[arm].settings, f"optim.lr={lr:g}", f"train.seed={seed}"]
        name = "".join(letter if letter.isalnum() else "_" for letter in arm)
        folder = self.work / f"{name}_lr{lr:g}_seed{seed}"
        done = trained(CONFIG, [*settings, *further], folder)
        print(
            f"{arm}, lr {lr:g}, seed {seed}: {done.figures.top1:.2f} %, {done.figures.cpu_s:.0f} s",
            flush=True,
        )
        return done

    def tune(self) -> dict[str, dict[float, float]]:
        """Return the top-1 accuracy on held-out originals for each arm and learning rate."""
        split = open_split(self.data, "train")
        held_out = originals(self.data, "train") % TUNING_PART == 0
        keys = [split.key(int(i)) for i in np.flatnonzero(held_out)]

        self.work.mkdir(parents=True, exist_ok=True)
        exclude = self.work / "held_out.txt"
        exclude.write_text("\n".join(keys) + "\n")
        further = (f"data.exclude={exclude}", "eval.sets={held_out: {split: train}}")

        top1s: dict[str, dict[float, float]] = {}
        for name, arm in ARMS.items():
            for lr in arm.lrs:
                done = self.train(name, lr, TUNING_SEED, *further)
                right = done.right["model"][held_out]
                top1s.setdefault(name, {})[lr] = 100 * float(right.mean())

        return top1s

    def compare(
        self, chosen: Mapping[str, float], num_seeds: int
    ) -> tuple[dict[str, list[Training]], list[Difference]]:
        """Return each arm's training results, and the difference for each pair."""
        done: dict[str, list[Training]] = {name: [] for name in ARMS}
        for seed in range(num_seeds):
            for name in ARMS:
                done[name].append(self.train(name, chosen[ARMS[name].like or name], seed))

        groups = originals(self.data, "val")
        gaps = [
            difference(
                rights(done[pair.first[0]], pair.first[1]),
                rights(done[pair.second[0]], pair.second[1]),
                groups,
            )
            for pair in PAIRS
        ]

        return done, gaps


def main() -> None:
    assert __doc__ is not None
    parser, args = read_command_line(__doc__, num_seeds=5)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    bench = Bench(args.data, args.work, args.overrides)

    try:
        load_config(CONFIG, bench.settings)
    except ValueError as error:
        parser.error(str(error))

    tuned = bench.tune()
    chosen = {name: max(top1s, key=lambda lr: top1s[lr]) for name, top1s in tuned.items()}
    done, gaps = bench.compare(chosen, args.seeds)

    report: dict[str, Any] = {
        "machine": machine(args.work, ["torch", "timm"]),
        "data": f"{args.data.name}: {' '.join([*SETTINGS, *args.overrides])} over"
        " benchmarks/inputs/digits_adamw.yaml, one thread, no workers.",
        "rounds": args.seeds,
        "load": load,
        "tuned": tuned,
        "trainings": {name: [asdict(t.figures) for t in all_] for name, all_ in done.items()},
        "differences": {pair.name: asdict(gap) for pair, gap in zip(PAIRS, gaps, strict=True)},
    }

    out = args.out or default_out("pairs", report["machine"]["cpu"])
    draw(gaps, out.with_suffix(".png"))
    keep(out, "pairs", report, tables(tuned, chosen, done, gaps))


def tables(
    tuned: Mapping[str, Mapping[float, float]],
    chosen: Mapping[str, float],
    done: Mapping[str, Sequence[Training]],
    gaps: Sequence[Difference],
) -> dict[str, list[list[str]]]:
    """Return tables of differences, arms and tuning."""
    pairs = [["pair", "points, 95 %", *(f"seed {i}" for i in range(len(gaps[0].by_seed)))]]
    for pair, gap in zip(PAIRS, gaps, strict=True):
        pairs.append([pair.name, str(gap), *(f"{each:+.2f}" for each in gap.by_seed)])

    arms = [["arm", "lr", "top-1, mean", "from", "to", "of the average", "CPU-s"]]
    for name, trainings in done.items():
        top1s = [100 * float(each.right["model"].mean()) for each in trainings]
        averaged = [100 * float(each.right["ema"].mean()) for each in trainings]
        seconds = [each.figures.cpu_s for each in trainings if not each.figures.was_cut]
        arms.append(
            [
                name,
                f"{chosen[ARMS[name].like or name]:g}",
                *(f"{value:.2f}" for value in (statistics.mean(top1s), min(top1s), max(top1s))),
                f"{statistics.mean(averaged):.2f}",
                f"{statistics.median(seconds):.0f}" if seconds else "cut off",
            ]
        )

    most = max(len(top1_by_lr) for top1_by_lr in tuned.values())
    rates = [["rate: top-1 on held-out training originals", *([""] * most)]]
    for name, top1_by_lr in tuned.items():
        rates.append([name, *(f"{lr:g}: {top1:.2f}" for lr, top1 in top1_by_lr.items())])

    return {"Differences": pairs, "Arms": arms, "Learning rates": rates}


def draw(gaps: Sequence[Difference], picture: Path) -> None:
    """Draw each pair's difference: seeds as dots, and mean and interval as a bar."""
    with drawing(picture, 1.1 + 0.5 * len(gaps), layout="constrained") as figure:
        axes = figure.subplots()
        axes.axvline(0, color=GRAY, linewidth=1)
        for row, gap in enumerate(gaps):
            axes.plot(gap.by_seed, [row + 0.18] * len(gap.by_seed), ".", color=GRAY)
            axes.plot([gap.low, gap.high], [row, row], color=BLUE, linewidth=2.5)
            axes.plot([gap.points], [row], "D", color=BLUE)
        axes.set_yticks(range(len(gaps)), [pair.name for pair in PAIRS])
        axes.set_ylim(len(gaps) - 0.5, -0.5)
        axes.set_title("Points of top-1")
        axes.set_xlabel("bar: 95 %, over seeds and digits; dots: seeds")
        axes.grid(True, axis="x")


if __name__ == "__main__":
    main()
