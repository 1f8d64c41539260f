"""Measure the cost of logging each image's loss and margin, in CPU seconds per step.

    python benchmarks/sample_losses.py [--rounds 12] [--steps 6]

The models are the demo's, and a ViT-Ti/16 at 64 px with 1,000 classes, on one thread. One process
alternates between the real step, whose losses and margins go to `SampleLosses`, and a step without
margins that returns only sums. The command prints medians over rounds, and medians of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from vit.config.schema import AdamWConfig, AugmentConfig
from vit.data.augment.apply import Augment
from vit.data.augment.table import table_layout
from vit.data.batches import Batch
from vit.distributed.process_group import World
from vit.hooks.sample_losses import SampleLosses
from vit.model import create_model
from vit.optim.optimizer import create_optimizer
from vit.step import TrainStep
from vit.training.loss import cross_entropy
from vit.training.objective import Objective
from vit.training.plan import Plan
from vit.training.reduce import DataParallel
from vit.training.step_result import StepResult

CPU = torch.device("cpu")
CONFIG = AugmentConfig(hflip_prob=0.0)
CASES = {
    "demo: 64 images of 32 px, 10 classes": (
        ("vit_ti8", 32, 10, {"embed_dim": 128, "depth": 4, "num_heads": 4}),
        64,
    ),
    "ViT-Ti/16: 16 images of 64 px, 1,000 classes": (("vit_ti16", 64, 1000, {}), 16),
}


@contextmanager
def without_losses() -> Iterator[None]:
    """Make steps return only sums, without the losses of individual images."""
    plain = StepResult.__init__

    def sums_only(result: StepResult, sums, norm, size=1, rows=()) -> None:  # type: ignore[no-untyped-def]
        plain(result, sums, norm, size)

    with (
        mock.patch.object(StepResult, "__init__", sums_only),
        mock.patch("vit.step.margins", lambda logits, labels: labels),
    ):
        yield


def measure(
    step: TrainStep, batch: Batch, steps: int, samples: SampleLosses | None, first: int
) -> float:
    """Return the CPU seconds of a step. samples: also record the losses of each image."""
    began_s = time.process_time()
    for number in range(first, first + steps):
        values = step(batch, number).read()
        if samples is not None:
            samples.add(number, values.losses, values.margins)

    if samples is not None:
        samples.write(samples.collect())
    return (time.process_time() - began_s) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)

    for name, ((model_name, size, classes, fields), rows) in CASES.items():
        model = create_model(model_name, size, classes, **fields)
        step = TrainStep(
            model,
            create_optimizer(model, AdamWConfig()),
            Augment(CONFIG, classes, (0.5,), (0.25,), CPU),
            Objective(cross_entropy),
            DataParallel(model, World(0, 1, CPU)),
            lr_at=lambda step: 1e-4,
            micro_batch_size=rows,
        )

        images = torch.randint(0, 256, (rows, 3, size, size), dtype=torch.uint8)
        labels = torch.randint(0, classes, (rows,))
        table = torch.zeros(rows, table_layout(CONFIG).width)
        table[:, 1] = 1.0
        batch = Batch(images, labels, torch.ones(rows), table, torch.arange(rows))

        total = args.rounds * args.steps * 2
        plan = Plan(1, rows, rows, 1, total, 0, total * rows, total, 0, total, 1)
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        with tempfile.TemporaryDirectory() as folder:
            samples = SampleLosses(Path(folder), World(0, 1, CPU), plan)
            for round_number in range(args.rounds + 1):
                first = round_number % args.rounds * args.steps
                recorded = measure(step, batch, args.steps, samples, first)
                with without_losses():
                    plain = measure(step, batch, args.steps, None, first)
                if round_number:
                    seconds["with"].append(recorded)
                    seconds["without"].append(plain)

        ratios = sorted(a / b for a, b in zip(seconds["with"], seconds["without"], strict=True))
        print(
            f"{name}: {1e3 * statistics.median(seconds['with']):.2f} ms with,"
            f" {1e3 * statistics.median(seconds['without']):.2f} ms without; ratio"
            f" {statistics.median(ratios):.4f} (quartiles {ratios[len(ratios) // 4]:.4f} to"
            f" {ratios[3 * len(ratios) // 4]:.4f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
