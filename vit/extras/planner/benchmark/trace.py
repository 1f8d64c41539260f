"""Trace two steps: write a file for chrome://tracing or Perfetto, and a table of operators.

In the trace, each part of the step is labeled by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
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
    labels = _Labels()
    before = train_step.mark
    train_step.mark = labels.mark
    try:
        with profile(activities=activities) as profiler:
            run_steps(train_step, batches, TRACED_STEPS, on_step=labels.on_step)
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
    (folder / OPERATORS_FILE).write_text(f"{TRACED_STEPS} steps\n{table}\n")


class _Labels:
    """The labels for the parts of a step in a trace."""

    def __init__(self) -> None:
        self._open: record_function | None = None

    def mark(self, part: StepPhase | None) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if part is not None:
            self._open = record_function(f"step: {part}")
            self._open.__enter__()

    def on_step(self, done: int, total: int) -> None:
        """Close the label of the last part of a step."""
        self.mark(None)
