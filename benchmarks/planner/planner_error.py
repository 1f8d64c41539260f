"""Print the tables of docs/planner_error.md, which compare the planner with published numbers.

    python benchmarks/planner/planner_error.py

`timm_vit_throughput.csv` has the rows for plain ViTs from timm's tables
(huggingface/pytorch-image-models@aa4b5850, results/benchmark-*.csv). The work per image
(`vit.extras.planner.roofline.Work`) and the number of attention scores are added, as counted on
timm's models. `vit/extras/planner/published.json` contains the speeds of published trainings.
`fit_rates` fits the roofline's constants.
"""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from vit.config.schema import Config
from vit.extras.planner.forecast import usable_bytes
from vit.extras.planner.memory import step_memory
from vit.extras.planner.roofline import Work, training_work
from vit.extras.planner.speed import WITHIN, published_runs
from vit.model import create_model
from vit.system.gpus import Gpu, find_gpu
from vit.system.meter import GIB
from vit.training.plan import make_plan

TABLE = Path(__file__).parent / "timm_vit_throughput.csv"
SCORE_ELEMENTS = 1.5
"""The number of elements that torch 1.12 moves for each attention score, because it lacks fused
attention."""
BRACKETS = (
    ("vit_ti16", 384, 128, 192),
    ("vit_s16", 224, 384, 512),
    ("vit_s16", 384, 64, 96),
    ("vit_b16", 224, 192, 256),
    ("vit_b16", 384, 32, 48),
    ("vit_l16", 224, 64, 96),
    ("vit_l16", 384, 12, 16),
    ("vit_h14", 224, 16, 24),
)
"""Each row contains a model, an image size, the largest batch size in timm's table that fits into
an RTX 3090's memory, and the next larger batch size that was tried."""
SCORE_BYTES = 6
"""The number of bytes that torch 1.12 stored for each attention score, for the softmax in fp32 and
its copy in fp16."""
REFERENCE_MODEL = "vit_base_patch16_224 at 224"
MAX_Q = replace(find_gpu("RTX-PRO-6000"), name="RTX-PRO-6000 Max-Q", bf16_tflops=438.9)
Numbers = list[float] | np.ndarray[Any, np.dtype[np.float64]]
Measured = list[tuple[str, Work, float]]
"""Tuples of the model with its image size, the work per image, and the measured images per
second."""


def read_column(column: str) -> Measured:
    """Return the rows of `TABLE` that have a number in `column`."""
    rows = []
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            if row[column]:
                work = Work(
                    1e6 * float(row["linear_mflop"]),
                    1e6 * float(row["attention_mflop"]),
                    float(row["elements"]),
                )
                if column.endswith("train"):
                    with_scores = work.elements + SCORE_ELEMENTS * float(row["scores"])
                    work = Work(work.linear_flops, work.attention_flops, with_scores)
                    work = training_work(work, work)
                name = f"{row['model']} at {row['image_size']}"
                rows.append((name, work, float(row[column])))
    return rows


def fit_rates(rows: list[tuple[Work, float, Gpu]]) -> tuple[float, float]:
    """Return the fraction of peak performance, and the bytes per element, that fit the rows best.

    rows: (work, measured images per second of one GPU, GPU). Large relative errors count by their
    square root, so that outliers do not dominate (iteratively reweighted least squares).
    """
    terms = np.array([_terms(work, gpu) for work, _, gpu in rows])
    measured_s = np.array([1 / rate for _, rate, _ in rows])
    weights = 1 / measured_s
    for _ in range(30):
        factors, _ = nnls(terms * weights[:, None], measured_s * weights)
        error = np.abs(terms @ factors / measured_s - 1) + 0.01
        weights = 1 / measured_s / np.sqrt(error)
    return 1 / factors[0], factors[1]


def _terms(work: Work, gpu: Gpu) -> tuple[float, float]:
    return work.flops / (gpu.bf16_tflops * 1e12), work.elements / (gpu.bandwidth_gbs * 1e9)


def predict(work: Work, gpu: Gpu, rates: tuple[float, float]) -> float:
    """Return the images per second of one GPU. rates: the result of `fit_rates`."""
    at_peak_s, per_byte_s = _terms(work, gpu)
    return 1 / (at_peak_s / rates[0] + per_byte_s * rates[1])


def compiled_training() -> list[tuple[Work, float, Gpu]]:
    """Return the published compiled trainings that load no data, for `fit_rates`."""
    return [
        _as_row(run) for run in published_runs() if run["kind"] == "compute" and run["compiled"]
    ]


def _as_row(run: dict[str, Any]) -> tuple[Work, float, Gpu]:
    forward = Work(*run["work"])
    work = training_work(forward, forward)
    return work, run["images_per_s"] / run["num_gpus"], find_gpu(run["gpu"])


def eager_training() -> list[tuple[Work, float, Gpu]]:
    """Return timm's table of eager training on an RTX 3090, for `fit_rates`."""
    gpu = find_gpu("RTX-3090")
    return [(work, rate, gpu) for _, work, rate in read_column("rtx3090_train")]


def as_markdown(*rows: tuple[object, ...]) -> str:
    """Return a Markdown table. The first row is the header, and all columns but the first contain
    numbers."""
    head, *body = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([head, "|---|" + "---:|" * (len(rows[0]) - 1), *body])


def errors(name: str, predicted: Numbers, measured: Numbers) -> tuple[object, ...]:
    """Return a row with the median and the 90 % quantile of the errors, and the share of errors
    within a limit."""
    error = np.abs(np.log(np.array(predicted) / np.array(measured)))
    median, most = (100 * (math.exp(np.quantile(error, q)) - 1) for q in (0.5, 0.9))
    share = 100 * (error <= math.log(WITHIN)).mean()
    return name, len(error), f"{median:.1f} %", f"{most:.0f} %", f"{share:.0f} %"


ERROR_HEAD = ("", "rows", "median error", "nine of ten below", f"within {WITHIN}x")


def published_table() -> str:
    """Return a table of published trainings."""
    rows = [
        (
            f"{run['run']} ({run['source']})",
            f"{run['num_gpus']} {run['gpu']}",
            f"{run['precision']}, {'compiled' if run['compiled'] else 'eager'}",
            f"{run['predicted']:,.0f}",
            f"{run['images_per_s']:,}",
            f"{run['predicted'] / run['images_per_s']:.2f}",
        )
        for kind in ("compute", "end to end", "other precision")
        for run in published_runs()
        if run["kind"] == kind
    ]

    return as_markdown(
        ("training", "GPUs", "precision", "predicted, images/s", "published", "ratio"), *rows
    )


def training_errors() -> str:
    """Return a table of errors for trainings that only compute and load no data."""
    runs = [run for run in published_runs() if run["kind"] == "compute"]
    compiled = [run for run in runs if run["compiled"]]
    alone = []
    for run in compiled:
        others = [row for row in compiled if row is not run]
        rates = fit_rates([_as_row(row) for row in others])
        work, _, gpu = _as_row(run)
        alone.append(run["num_gpus"] * predict(work, gpu, rates))

    rtx3090 = eager_training()
    rates = fit_rates(rtx3090)
    eager = [predict(work, gpu, rates) for work, _, gpu in rtx3090]
    measured = [rate for _, rate, _ in rtx3090]
    predicted = [run["predicted"] for run in runs]
    published = [run["images_per_s"] for run in runs]

    return as_markdown(
        ERROR_HEAD,
        errors(
            "compiled, each predicted from the others", alone, [r["images_per_s"] for r in compiled]
        ),
        errors("published trainings without data", predicted, published),
        errors("timm's eager training, RTX 3090", eager, measured),
        errors("both together", [*predicted, *eager], [*published, *measured]),
    )


def inference_errors() -> str:
    """Return a table of errors for inference, with rates fitted to timm's tables of an RTX 5090.

    The RTX 4090 and the RTX PRO 6000 are predicted from their data sheets.
    """
    rows = []
    for software in ("compiled", "eager"):
        rates = fit_rates(
            [(w, r, find_gpu("RTX-5090")) for _, w, r in read_column(f"rtx5090_{software}")]
        )

        others = {"rtx5090": find_gpu("RTX-5090")}
        if software == "compiled":
            others |= {"rtx4090": find_gpu("RTX-4090"), "rtx_pro_6000_maxq": MAX_Q}
        for column, gpu in others.items():
            measured = read_column(f"{column}_{software}")
            predicted = np.array([predict(work, gpu, rates) for _, work, _ in measured])
            rate = np.array([rate for _, _, rate in measured])
            rows.append(errors(f"{gpu.name}, {software}", predicted, rate))
            if column != "rtx5090":
                [reference] = [
                    position
                    for position, (name, _, _) in enumerate(measured)
                    if name == REFERENCE_MODEL
                ]
                scaled = predicted * rate[reference] / predicted[reference]
                name = f"{gpu.name}, {software}, after {REFERENCE_MODEL} was measured"
                rows.append(errors(name, scaled, rate))
    return as_markdown(ERROR_HEAD, *rows)


def memory_table() -> str:
    """Return a table of timm's largest batches on 24 GB, with the bytes that the planner counts.

    torch 1.12 stored attention scores in fp32 and fp16, and kept gradients between steps.
    """
    usable_gib = usable_bytes(find_gpu("RTX-3090")) / GIB
    rows = []
    for name, image_size, *batch_sizes in BRACKETS:
        needed_gib = [_train_gib(name, image_size, size) for size in batch_sizes]
        fits = [f"{size}: {gib:.1f}" for size, gib in zip(batch_sizes, needed_gib, strict=True)]
        is_right = needed_gib[0] <= usable_gib < needed_gib[1]
        rows.append((f"{name} at {image_size}", *fits, "yes" if is_right else "no"))
    head = ("", "fits: GiB", "does not fit: GiB", f"{usable_gib:.1f} GiB lies between")
    return as_markdown(head, *rows)


def _train_gib(name: str, image_size: int, batch_size: int) -> float:
    """Return the memory of training with SGD under torch 1.12, without attention dropout."""
    config = Config.model_validate(
        {
            "model": {"name": name, "image_size": image_size},
            "data": {"root": "none", "global_batch_size": batch_size},
            "train": {"steps": 1, "precision": "fp16"},
        }
    )

    plan, _ = make_plan(config, batch_size, 1)
    memory = step_memory(config, plan, 1000)
    with torch.device("meta"):
        model: Any = create_model(config.model, num_classes=1000)
    num_tokens = model.pos_embed.shape[1]
    num_scores = len(model.blocks) * model.blocks[0].attn.num_heads * num_tokens**2
    return (memory.activations + 3 * memory.weights + SCORE_BYTES * batch_size * num_scores) / GIB


if __name__ == "__main__":
    for table in (published_table, training_errors, inference_errors, memory_table):
        print(table(), end="\n\n")
