"""Trace two steps: write a file for chrome://tracing or Perfetto, and a table of operators.

In the trace, each part of the step is labeled by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from vit.data.batches import Batch
from vit.extras.planner.benchmark.step_time import run_steps
from vit.step import TrainStep
from vit.training.step_result import StepPhase

TRACE_FILE = "trace.json"
OPERATORS_FILE = "operators.txt"
TRACED_STEPS = 2
NUM_OPERATORS = 40


def write_trace(train_step: TrainStep, batches: Iterable[Batch], folder: Path) -> None:
    """Trace two steps, and write the files on the main rank."""
    on_gpu = train_step.world.device.type == "cuda"
    # Suppress the tracer's log lines about its start and about missing GPUs.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    label = ExitStack()
    """The label of the current part of a step."""

    def mark(part: StepPhase | None) -> None:
        label.close()
        if part is not None:
            label.enter_context(record_function(f"step: {part}"))

    before = train_step.mark
    train_step.mark = mark
    try:
        with profile(activities=activities) as profiler:
            # Close the label of the last part of each step.
            run_steps(train_step, batches, TRACED_STEPS, lambda done, total: label.close())
    finally:
        train_step.mark = before
    if not train_step.world.is_main:
        return
    profiler.export_chrome_trace(str(folder / TRACE_FILE))
    table = profiler.key_averages().table(
        sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total",
        row_limit=NUM_OPERATORS,
        max_name_column_width=60,
    )
    (folder / OPERATORS_FILE).write_text(f"{TRACED_STEPS} steps\n{table}\n", "utf-8")
