"""Test a run at full size: the data, a few steps, an evaluation batch and a checkpoint.

open_data (as in training) -> step (model, loader, DDP, optimizer) -> evaluation -> checkpoint

The test uses the same functions as training and starts from random weights. No metrics are written,
and all test files are removed.
"""

import math
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from vit.checkpoint import checkpoint as checkpoints
from vit.compose import parts_of
from vit.config.schema import Config
from vit.data.loader import Loader
from vit.distributed.host_differences import places
from vit.distributed.process_group import World, now_s
from vit.evaluation.evaluate import create_evaluators
from vit.extras.planner.check import storage
from vit.extras.planner.check.findings import Finding, Verdict
from vit.extras.planner.device_memory import peak_bytes as measured_peak_bytes
from vit.extras.planner.device_memory import reset_peak
from vit.extras.planner.fitting import naming_what_fits
from vit.run_folder.place import Place, local_folder
from vit.start.create_step import create_train_step
from vit.start.host_check import HostCheck, check_host
from vit.step import TrainStep
from vit.system.host import free_memory_bytes
from vit.system.meter import GIB, digits
from vit.training.freeze import create_trained_model
from vit.training.model_summary import count_parameters
from vit.training.run_data import RunData, choose_settings, open_data

STEPS = 3
"""The number of training steps. The first step compiles the model and waits for workers. The last
step is timed."""
LITTLE_MEMORY = 0.03
"""The fraction of GPU memory that should stay free. If less memory is free, fragmentation can cause
an out-of-memory error."""


class _Enough(Exception):
    """An exception that stops an evaluation after one batch."""


class Trial:
    """The objects that the checks share, on one rank."""

    data: RunData
    """The run's data, available after the check `data`."""
    step: TrainStep
    """The run's training step, available after the check `step`."""

    def __init__(self, config: Config, world: World, allow_change: Iterable[str]):
        self.config = choose_settings(config, world)
        self.world = world
        # A run that resumes keeps its precision.
        self.allowed = set(allow_change).union(
            ["train.precision"] if config.train.precision == "auto" else []
        )
        self.run_dir = local_folder(config.run)
        self._read_images_per_s = math.inf
        """The images per second that the slowest host reads. Set on rank 0."""

    # --- data -----------------------------------------------------------------------------------

    def open_data(self) -> dict[str, Any]:
        """Open the data and make the plan as in training. Return host facts for `judge_data`."""
        config, world = self.config, self.world
        self._parts = parts_of(config)
        self.data = data = open_data(config, world, self._parts.reader)
        self._objective = self._parts.create_objective(config, data, world)
        self.facts = {**data.facts, **self._objective.notes.facts}
        for hook in self._parts.hooks:
            if not isinstance(hook, HostCheck):
                # Skip `HostCheck`, because another check covers the disk.
                self.facts |= hook.opened(config, world, data, Place(self.run_dir)).facts
        checked, self.disk = check_host(config, world, data)
        return {"lines": checked.lines, **checked.record}

    def judge_data(self, answers: dict[int, dict[str, Any]]) -> Iterator[Finding]:
        """Yield findings on the config, the data and the hosts. answers: the facts by rank."""
        plan = self.data.plan
        with torch.device("meta"):
            model = create_trained_model(self.config, self.data.num_classes)
        passes = (
            f" in {plan.accumulation_steps} micro-batches" if plan.accumulation_steps > 1 else ""
        )

        yield Finding(
            "config",
            Verdict.OK,
            f"{self.config.model.name}, {count_parameters(model):,} parameters:"
            f" {plan.total_steps:,} steps of {plan.global_batch_size:,} images,"
            f" {plan.rank_batch_size} per rank{passes}; {self.config.train.precision} on"
            f" {self.world.device.type}",
        )
        yield Finding("data", Verdict.OK, answers[0]["lines"][0].removeprefix("data: "))
        yield self._judge_hosts(answers)

    def _judge_hosts(self, answers: dict[int, dict[str, Any]]) -> Finding:
        """Return a finding with the minimum of each resource over all hosts, and with the hosts'
        notes."""

        def least(name: str) -> float | None:
            values = (answer[name] for answer in answers.values())
            return min((value for value in values if value is not None), default=None)

        memory_gib, shm_gib = least("free_memory_gib"), least("free_shm_gib")
        parts = [f"{least('cores'):g} cores"]
        if memory_gib is not None:
            parts.append(f"{memory_gib:,.1f} GiB of memory free")
        if shm_gib is not None:
            parts.append(f"/dev/shm {shm_gib:,.1f} GiB free")
        parts.append(f"{least('open_files'):,.0f} open files")

        notes: dict[str, list[int]] = {}
        for rank, answer in answers.items():
            for note in answer["notes"]:
                notes.setdefault(note, []).append(rank)

        hosts = len(set(self.world.hosts)) or 1
        if hosts > 1:
            lines = [f"minimum of {hosts} hosts: {', '.join(parts)}"]
            lines += [f"{places(ranks, self.world.hosts)}: {note}" for note, ranks in notes.items()]
        else:
            lines = [", ".join(parts), *notes]
        return Finding("hosts", Verdict.NOTE if notes else Verdict.OK, "\n".join(lines))

    def judge_reading(self, rates: dict[int, list[float] | None]) -> Iterator[Finding]:
        """Yield a finding on the reading rate, and store the lowest rate for `judge_step`."""
        images_per_s = (rate[1] for rate in rates.values() if rate is not None)
        self._read_images_per_s = min(images_per_s, default=math.inf)
        yield from storage.judge_reading(rates, self.world)

    # --- a few steps ----------------------------------------------------------------------------

    def try_step(self) -> dict[str, Any]:
        """Create the model and the training step, and run a few steps on real batches."""
        config, data, world = self.config, self.data, self.world
        reset_peak(world.device)
        with naming_what_fits(config, data.plan, data.num_classes, world.device):
            with world.fail_together():
                torch.manual_seed(config.train.seed)
                model = create_trained_model(config, data.num_classes)
            model.to(world.device)

            is_new = not checkpoints.complete_checkpoints(self.run_dir)
            if is_new and self._parts.load_weights is not None:
                self._parts.load_weights(model, config, data, world)
            self.step = step = create_train_step(
                config,
                data.plan,
                num_classes=data.num_classes,
                model=model,
                world=world,
                objective=self._objective,
                create_reduce=self._parts.create_reduce,
            )

            step.model.train()
            return self._do_steps(step)

    def _do_steps(self, step: TrainStep) -> dict[str, Any]:
        """Train on the largest images, and return the loss, times and memory of this rank."""
        config, world = self.config, self.world
        first = self._first_of_largest_images()
        stop = min(first + STEPS, self.data.plan.total_steps)
        ends_s = [time.perf_counter()]
        loss = 0.0

        with Loader(
            self.data.batches,
            first,
            stop,
            num_workers=config.loader.num_workers,
            device=world.device,
            stall_timeout_s=config.loader.stall_timeout_s,
            on_device=step.augment.change_batch,
        ) as loader:
            for position, batch in enumerate(loader, first):
                if position == first:
                    step.prepare(batch)
                loss = step(batch, position).read().loss
                ends_s.append(time.perf_counter())
            left_bytes = self._left_bytes()  # measured while the workers are running

        return {
            "loss": repr(loss),  # JSON has no NaN
            "first_s": ends_s[1] - ends_s[0],
            "last_s": ends_s[-1] - ends_s[-2] if len(ends_s) > 2 else None,
            "peak_gib": (measured_peak_bytes(world.device) or 0) / GIB,
            "left_gib": left_bytes / GIB,
            "size": list(self.data.batches.layout_at(first).image_format.size),
            "why_eager": step.why_eager,
        }

    def _first_of_largest_images(self) -> int:
        """Return the first step of the stage with the largest images."""
        batches, plan = self.data.batches, self.data.plan
        firsts = [0, *(until * plan.steps_per_epoch for until, _ in batches.image_format.stages)]
        return max(firsts, key=lambda step: math.prod(batches.layout_at(step).image_format.size))

    def _left_bytes(self) -> int:
        if self.world.device.type == "cuda":
            return torch.cuda.mem_get_info(self.world.device)[0]
        return free_memory_bytes() or 0

    def judge_step(self, answers: dict[int, dict[str, Any]]) -> Iterator[Finding]:
        """Yield a finding on the time and memory of a step. answers: the measurements by rank."""
        time_line, time_notes = self._judge_time(answers)
        memory_line, memory_notes = self._judge_memory(answers)

        notes = []
        if not math.isfinite(float(answers[0]["loss"])):
            notes.append("the loss is not finite: lower optim.lr, or set train.precision=fp32")
        why_eager = answers[0]["why_eager"]
        if why_eager:
            notes.append(f"not compiled, because torch.compile fails ({why_eager})")
        notes += memory_notes + time_notes

        verdict = Verdict.NOTE if notes else Verdict.OK
        yield Finding("step", verdict, "\n".join([time_line, memory_line, *notes]))

    def _judge_time(self, answers: dict[int, dict[str, Any]]) -> tuple[str, list[str]]:
        """Return a line on the slowest rank's times, and a note if reading is slower."""
        main = answers[0]
        height, width = main["size"]
        num_images = self.data.plan.global_batch_size
        first_s = max(answer["first_s"] for answer in answers.values())
        last_s = max(answer["last_s"] or 0.0 for answer in answers.values())

        speed = f"{last_s:.3g} s each ({digits(num_images / last_s)} images/s), " if last_s else ""
        is_compiled = self.config.train.compile and not main["why_eager"]
        first = "the first with compilation" if is_compiled else "the first"
        line = (
            f"steps of {num_images:,} images of {height}x{width} px: {speed}{first}"
            f" {first_s:.3g} s; loss {float(main['loss']):.4g}"
        )

        hosts = len(set(self.world.hosts)) or 1
        read = self._read_images_per_s
        if not last_s or read >= num_images / last_s / hosts:
            return line, []
        return line, [
            f"training needs {digits(num_images / last_s / hosts)} images/s per host, but a host"
            f" reads {digits(read)}: copy the shards to a local disk (loader.cache_dir)"
        ]

    def _judge_memory(self, answers: dict[int, dict[str, Any]]) -> tuple[str, list[str]]:
        """Return a line on the rank with the least memory left, and a note if it is too little."""
        tightest = min(answers, key=lambda rank: answers[rank]["left_gib"])
        left_gib = answers[tightest]["left_gib"]
        peak_gib = max(answer["peak_gib"] for answer in answers.values())

        on_gpu = self.world.device.type == "cuda"
        device = "on the GPU" if on_gpu else "on the host"
        if self.world.size > 1:
            device += f" of {places([tightest], self.world.hosts)}"
        line = f"peak memory {peak_gib:.2f} GiB per rank, {left_gib:.2f} GiB left {device}"

        is_little = on_gpu and left_gib < LITTLE_MEMORY * (left_gib + peak_gib)
        note = "almost no GPU memory is left: lower data.micro_batch_size"
        return line, [note] if is_little else []

    # --- an evaluation --------------------------------------------------------------------------

    def try_evaluation(self) -> list[float]:
        """Evaluate one batch of each split with new workers. Return the seconds of each split."""
        config, data = self.config, self.data
        taken_s = []
        with naming_what_fits(config, data.plan, data.num_classes, self.world.device):
            for evaluator in create_evaluators(config, data.sets, data.image_format, self.step):
                began_s = time.perf_counter()
                try:
                    evaluator.evaluate({"model": self.step.model}, partial(_stop_after_one))
                except _Enough:
                    pass
                finally:
                    evaluator.close()
                # `now_s` waits for the device, so errors of earlier CUDA operations are raised
                # here.
                taken_s.append(now_s(self.world.device) - began_s)
        return taken_s

    def judge_evaluation(self, rank_seconds: dict[int, list[float]]) -> Iterator[Finding]:
        """Yield a finding on the time of a batch. rank_seconds: seconds per split, by rank."""
        seconds = [max(of_split) for of_split in zip(*rank_seconds.values(), strict=True)]
        more = f", and of {len(seconds) - 1} further splits" if len(seconds) > 1 else ""
        text = (
            f"a batch of {self.config.eval.batch_size} images per rank of"
            f" '{self.config.data.val_split}'{more}: {max(seconds):.3g} s, including the start"
            " of workers"
        )
        yield Finding("evaluation", Verdict.OK, text)


def _stop_after_one(done: int, total: int) -> None:
    raise _Enough
