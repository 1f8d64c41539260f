"""Estimate how fast a GPU trains, by correcting the roofline with measurements on the same GPU.

results of launch/bench.py -> `choose_speed` -> `Speed`: a factor, and how wrong it may be
published.json -> `end_to_end` -> how much longer published runs took than their computation
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vit.extras.planner.roofline import Work, forward_work, seconds, training_work
from vit.model import create_model
from vit.system.gpus import Gpu, find_gpu
from vit.training.mfu import PASSES

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
"""The folder of `*-gpu-*.json` files that `launch/bench.py` writes. An installed package does not
have this folder."""
WITHIN = 1.3
"""The factor by which the roofline may be wrong (docs/planner_error.md)."""
WITHIN_MEASURED = 1.15
"""The factor by which predictions may be wrong once any model has been measured on the same GPU.
Nine of ten predictions for an RTX 4090 are within it (docs/planner_error.md)."""
SAME_NETWORK = 0.1
"""The maximum relative difference in FLOPs between two measurements of the same network. The number
of classes and the drop-path rate cause smaller differences."""
HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class Speed:
    """How measurements correct the roofline."""

    factor: float
    """The measured time divided by the roofline's time, or 1."""
    within: float
    """The factor by which the corrected time may be wrong, or 1 if this network was measured."""
    source: str


@dataclass(frozen=True)
class EndToEnd:
    """How many times longer complete published runs took than the roofline's computation."""

    low: float
    high: float
    source: str


def choose_speed(
    model_name: str, precision: str, flops: float, gpu: Gpu, compiled: bool, results: Path = RESULTS
) -> Speed:
    """Return the correction for a network on `gpu`, from the measurements in `results`.

    flops: the FLOPs of training on one image. They distinguish networks with the same name but
    different image sizes or depths. Measurements of the same network are preferred, then those with
    the same `compiled`, then the fastest.
    """
    choices: list[tuple[tuple[float, bool, float], Speed]] = []
    for path in sorted(results.glob("*-gpu-*.json")):
        measured = json.loads(path.read_text())
        for row in measured["training"]:
            if (measured["gpu"], row["precision"]) != (gpu.name, precision):
                continue
            if row.get("activation_checkpointing", "none") != "none":
                continue  # the row's FLOPs do not include recomputed ones

            is_same_size = abs(row["flops_per_image"] / flops - 1) <= SAME_NETWORK
            is_same = row["model"] == model_name and is_same_size
            within = 1.0 if is_same else WITHIN_MEASURED

            reached_flops_per_s = row["mfu"] * gpu.peak_tflops(precision) * 1e12
            factor = row["flops_per_image"] / (reached_flops_per_s * _row_seconds(row, gpu))
            source = f"{row['model']} measured, benchmarks/results/{path.name}"
            rank = (within, row["compiled"] != compiled, factor)
            choices.append((rank, Speed(factor, within, source)))

    if not choices:
        return Speed(1.0, WITHIN, "not measured on this GPU, see docs/planner_error.md")
    return min(choices, key=lambda choice: choice[0])[1]


def _row_seconds(row: dict[str, Any], gpu: Gpu) -> float:
    """Return the roofline's time for the network of a row of results."""
    with torch.device("meta"):
        model = create_model(row["model"], tuple(row["image_size"]))
    forward, trained = forward_work(model)
    scale = row["flops_per_image"] / (PASSES * forward.flops)  # for another depth or drop path
    return scale * seconds(training_work(forward, trained), gpu, row["precision"], row["compiled"])


@cache
def published_runs() -> list[dict[str, Any]]:
    """Return the published trainings, with the roofline's images per second as `predicted`."""
    runs: list[dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_bytes())
    for run in runs:
        forward = Work(*run["work"])
        precision = run["precision"] if run["precision"] in HALF else "bf16"
        image_s = seconds(
            training_work(forward, forward), find_gpu(run["gpu"]), precision, run["compiled"]
        )
        run["predicted"] = run["num_gpus"] / image_s
    return runs


def end_to_end(forward: Work) -> EndToEnd:
    """Return the range of the factors of the three published runs whose forward pass is nearest to
    `forward` in FLOPs."""

    def distance(run: dict[str, Any]) -> float:
        return abs(math.log(Work(*run["work"]).flops / forward.flops))

    runs = [run for run in published_runs() if run["kind"] == "end to end"]
    nearest = sorted(runs, key=distance)[:3]
    factors = [run["predicted"] / run["images_per_s"] for run in nearest]
    names = "; ".join(f"{run['run']}, {run['num_gpus']} {run['gpu']}" for run in nearest)
    return EndToEnd(min(factors), max(factors), names)
