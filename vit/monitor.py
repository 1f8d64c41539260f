"""Read each step's result one step late, log metrics, call hooks, and detect when training ends.

The training loop queues a step on the device and passes its result to the monitor. When the next
step is queued, the monitor reads the numbers of the previous step, which are the same on all ranks.
At the end of each log interval, the monitor writes a line to metrics.jsonl. Evaluation and saving
are not counted as training time.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vit.data.loader import Loader, LoaderStats
from vit.data.stages import TALLIED, Stage, Tally, add_up, since
from vit.distributed.process_group import World, local_world_size, peak_memory_gib
from vit.run import Run
from vit.system.host import num_cores
from vit.system.meter import digits, duration
from vit.training.mfu import Utilization, find_peak, train_flops_per_image
from vit.training.step_result import StepResult, StepValues

LOADER_COUNTS = (*TALLIED, "worker_mib", "replaced")
"""The loader statistics that each rank sends to all ranks for a line of metrics."""
ESTIMATE_STEPS = 3
"""After this many steps of an attempt, the estimated remaining time is logged, unless it is
short."""
SHORT_S = 600.0
LONG_ON_CPU_S = 24 * 3600.0
"""If the remaining time on CPUs is longer than this, the log also names the recipes for CPUs."""
NOTABLE_WAIT_SHARE = 0.1
"""Advice is logged if waiting for data takes more than this fraction of an interval, and is logged
again only if the fraction changes by at least this amount."""
ADVICE_STEPS = 10
"""The number of steps without advice at the start of each attempt, while workers are starting."""
NOTABLE_STAGE_SHARE = 0.05
"""The advice names each loader stage that takes at least this fraction of the loader's time."""
REMEDIES = {
    Stage.ORDER: "keep the index on a local disk",
    Stage.STORE: "check the network and the storage, or let loader.cache_gib keep more blocks",
    Stage.LOCK: "put loader.cache_dir on a faster disk of each host",
    Stage.READ: "check the disk and the network",
    Stage.DECODE: "write shards with --resize-short-side 256 or --restart-markers auto",
    Stage.RESIZE: "write shards with --resize-short-side 256",
    Stage.DRAW: "use fewer augmentations (augment.randaugment_layers)",
}
"""Maps each loader stage to the remedy that the advice suggests if the stage is too slow."""
UNEVEN = 1.5
"""The advice names a rank that waited at least this many times as long as the average rank."""


@contextmanager
def collect_garbage_at_log_lines() -> Iterator[None]:
    """Turn off Python's automatic garbage collection. Instead, `Monitor` collects garbage each time
    it writes a line of metrics.

    A full collection of torch's objects takes 0.7 s. If one of 512 ranks collects garbage during a
    step, all ranks wait.
    """
    was_enabled = gc.isenabled()
    frozen_by_others = gc.get_freeze_count() > 0
    gc.disable()
    try:
        yield
    finally:
        # A program may have frozen objects before it forked. Keep them frozen, because collecting
        # them would copy their memory.
        if not frozen_by_others:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _collect_garbage(freeze: bool) -> None:
    """Collect garbage, unless Python's automatic collection is on.

    freeze: whether to exclude the objects that are alive now from later collections.
    """
    if gc.isenabled():
        return
    gc.collect()
    if freeze:
        gc.freeze()


class Interval(NamedTuple):
    """The training since the last line of metrics."""

    loss: float
    """The mean loss of the steps."""
    image_size: tuple[int, int]
    """The (height, width) of the images in the last step."""
    images_per_s: float
    """The number of images that all ranks together train on per second."""
    mfu: float | None
    """The fraction of the devices' peak that training reaches; None if unknown."""
    waiting: Waiting
    wait_share: float
    """The fraction of the time that was spent waiting for data, at most 1."""


class Monitor:
    """Reads the result of each step one step late, logs it, and decides when to `stop`."""

    def __init__(self, run: Run, loader: Loader, utilization: Utilization | None = None):
        """utilization: computes MFU; None on ranks that do not log."""
        self.run = run
        self.loader = loader
        self.utilization = utilization
        self.stop = False
        """Whether training stops at this step. The value is the same on all ranks."""
        self._reported_wait_share = 0.0
        self._timed_steps = 0
        """The number of steps since the start of this attempt."""

        self._tally_before = loader.tally()
        self._wait_before_s = loader.stats.wait_s
        self._pending: tuple[int, StepResult, float, LoaderStats] | None = None
        self._is_paused = False
        self.is_started = False
        """Whether training time is being counted, from the first batch on."""
        self._last_step_at: float
        self._totals_s: NDArray[np.float64]

        # Objects that are alive at the first line of metrics, such as compiled code, usually stay
        # alive. Freezing them once makes later collections take microseconds. Counting frozen
        # objects takes 30 ms, so count them only once.
        self._is_freeze_due = gc.get_freeze_count() == 0
        self._run_began = time.perf_counter() - run.state.elapsed_s
        self._new_interval(time.perf_counter(), loader.stats)

    def elapsed_s(self) -> float:
        """Return the time spent on the run over all attempts, including evaluation and saving."""
        return time.perf_counter() - self._run_began

    def start_clock(self) -> None:
        """Start counting training time when the first batch has arrived."""
        self.is_started = True
        self._wait_before_s = self.loader.stats.wait_s
        self._new_interval(time.perf_counter(), self.loader.stats)

    def pause(self) -> None:
        """Read the result of the queued step, and stop the clock before evaluation or saving."""
        self.flush()
        self._is_paused = True

    def resume(self) -> None:
        """Restart the clock after `pause`."""
        if not self._is_paused:
            return
        self._is_paused = False
        now = time.perf_counter()
        self._began += now - self._last_step_at
        self._last_step_at = now

    def rank_report(self, step: int) -> tuple[float, ...]:
        """Return the numbers that this rank sends to all ranks with `step`.

        The first number is the time that the rank waited for the batch, in seconds. If a line of
        metrics follows, the loader statistics since the last line are appended (`LOADER_COUNTS`).
        """
        waited_s = self.loader.stats.wait_s - self._wait_before_s
        self._wait_before_s = self.loader.stats.wait_s
        if not self._logs_after(step + 1):
            return (waited_s,)

        tally = self.loader.tally()
        done = since(tally, self._tally_before)
        self._tally_before = tally
        counts = (done[name] for name in TALLIED)
        return (waited_s, *counts, self.loader.worker_bytes() / 2**20, self.loader.num_replaced)

    def queue(self, step: int, result: StepResult, bad_keys: tuple[str, ...] = ()) -> None:
        """Read the result of the previous step, and store the result of this step.

        bad_keys: samples of this rank's batch that could not be decoded.
        """
        for key in bad_keys:
            print(
                f"step {step}: {key} could not be decoded and is ignored in loss and metrics",
                file=sys.stderr,
            )
        self.flush(is_next_queued=True)
        self._pending = (step, result, time.perf_counter(), self.loader.stats)

    def flush(self, is_next_queued: bool = False) -> None:
        """Read the stored result. The device becomes idle if no other step is queued.

        Sets `stop` if a rank received a signal. Raises the error that a hook returns.
        """
        if self._pending is None:
            return
        began_at = self._last_step_at
        step, result, self._last_step_at, stats = self._pending
        self._pending = None
        values = result.read()
        if not is_next_queued:  # waiting for the device counts as training time
            self._last_step_at = time.perf_counter()

        self.stop = self.stop or values.stop > 0
        self.run.state.interval_losses.append(values.loss)
        self._timed_steps += 1
        self._num_steps += 1

        waits_s = values.rank_reports[:, 0].astype(np.float64)
        self._waited_s += float(waits_s.max())  # a step waits for its slowest rank
        self._totals_s = self._totals_s + waits_s
        self.run.state.bad_images += values.bad_images

        problems = [hook.read(step, values) for hook in self.run.hooks]
        self._log(step + 1, values, stats, self._last_step_at - began_at)
        if values.norms is not None:
            self.run.record.write("norms", step + 1, **values.norms)

        for problem in filter(None, problems):
            self.run.state.elapsed_s = self.elapsed_s()
            with self.run.world.fail_together():
                raise problem

    def _new_interval(self, began: float, stats_before: LoaderStats) -> None:
        """Start a new interval at the time `began`, and reset its counts."""
        self._began = began
        self._last_step_at = began
        self._stats_before = stats_before
        self._num_steps = 0
        """The number of steps of this attempt in the interval."""
        self._waited_s = 0.0
        self._totals_s = np.zeros(1)

    def _logs_after(self, step: int) -> bool:
        """Return whether a line of metrics is written after `step` steps.

        A line is also written when the image size changes, so that no line reports one speed for
        two image sizes.
        """
        plan = self.run.plan
        stages = self.run.batches.image_format.stages
        is_stage_end = any(step == until * plan.steps_per_epoch for until, _ in stages)
        return step % plan.log_every_steps == 0 or step == plan.total_steps or is_stage_end

    def _log(self, step: int, values: StepValues, stats: LoaderStats, step_s: float) -> None:
        """Update the live line, and write metrics at the end of an interval.

        Args:
            step: The number of finished steps.
            stats: The loader's statistics when the last step was queued.
            step_s: The duration of the last step.
        """
        plan = self.run.plan
        interval = self._measure(step)

        # Steps with larger images take longer.
        steps_left: float = (
            plan.total_steps - step
            if self.utilization is None
            else self.utilization.steps_like(step - 1, step, plan.total_steps)
        )
        if self._timed_steps == ESTIMATE_STEPS and steps_left * step_s >= SHORT_S:
            self._estimate(steps_left * step_s, plan.total_steps - step, step_s)

        line = self._live_line(step, interval, steps_left)
        if not self._logs_after(step):
            self.run.record.progress(step, line)
            return

        _collect_garbage(self._is_freeze_due)
        self._is_freeze_due = False
        self.run.record.train_line(step, line)
        self._write_metrics(step, interval, values, stats)
        self.run.state.interval_losses.clear()
        self._new_interval(self._last_step_at, stats)

    def _measure(self, step: int) -> Interval:
        """Return the loss and the speed of the interval so far, after `step` finished steps."""
        spent_s = max(self._last_step_at - self._began, 1e-9)
        waiting = sum_up(self._waited_s, self._totals_s)
        images_per_s = self._num_steps * self.run.plan.global_batch_size / spent_s
        mfu = (
            None
            if self.utilization is None
            else self.utilization.mfu(images_per_s / self.run.world.size, step - 1)
        )
        losses = self.run.state.interval_losses
        last_epoch = (step - 1) // self.run.plan.steps_per_epoch

        return Interval(
            loss=sum(losses) / len(losses),
            image_size=self.run.batches.image_format.in_epoch(last_epoch).size,
            images_per_s=images_per_s,
            mfu=mfu,
            waiting=waiting,
            wait_share=min(waiting.waited_s / spent_s, 1.0),
        )

    def _live_line(self, step: int, interval: Interval, steps_left: float) -> str:
        """Return the line that shows users the progress and the speed of training.

        steps_left: the number of steps like the last one that would take as long as the rest of the
        run.
        """
        plan = self.run.plan
        height, width = interval.image_size
        size = f" of {height}x{width} px" if self.run.batches.image_format.stages else ""
        mfu = "" if interval.mfu is None else f" MFU {interval.mfu:.0%},"
        has_slow_rank = interval.waiting.is_uneven and interval.wait_share >= NOTABLE_WAIT_SHARE
        slow_rank = f" (rank {interval.waiting.rank})" if has_slow_rank else ""
        eta_s = steps_left * plan.global_batch_size / interval.images_per_s

        return (
            f"step {step}/{plan.total_steps} epoch {step / plan.steps_per_epoch:.2f}"
            f" | {digits(interval.images_per_s)} images/s{size},{mfu}"
            f" data wait {interval.wait_share:.0%}{slow_rank} | loss {interval.loss:.3f}"
            f" | lr {self.run.train_step.lr_at(step - 1):.2e} | ETA {duration(eta_s)}"
        )

    def _write_metrics(
        self, step: int, interval: Interval, values: StepValues, stats: LoaderStats
    ) -> None:
        """Log advice on slow data, and write the line of metrics after `step` finished steps."""
        loader_images_per_s = self._loader_images_per_s(stats)
        loaders = [
            dict(zip(LOADER_COUNTS, counts, strict=True))
            for counts in values.rank_reports[:, 1:].tolist()
            if counts
        ]
        self._advise(interval, loaders, loader_images_per_s)

        weight_decay = self.run.train_step.weight_decay_at(step - 1)
        height, width = interval.image_size
        size = height if height == width else [height, width]
        self.run.record.write(
            "train",
            step,
            epoch=step / self.run.plan.steps_per_epoch,
            loss=interval.loss,
            losses=self.run.state.interval_losses,
            lr=self.run.train_step.lr_at(step - 1),
            **({} if weight_decay is None else {"weight_decay": weight_decay}),
            **({"image_size": size} if self.run.batches.image_format.stages else {}),
            grad_norm=values.grad_norm,
            images_per_s=interval.images_per_s,
            images_per_s_per_gpu=interval.images_per_s / self.run.world.size,
            mfu=interval.mfu,
            data_wait_s=interval.waiting.waited_s,
            data_wait_max_s=interval.waiting.max_s,
            data_wait_mean_s=interval.waiting.mean_s,
            data_wait_rank=interval.waiting.rank,
            data_wait_host=self.run.world.host_of(interval.waiting.rank),
            loader_images_per_s=loader_images_per_s,
            elapsed_s=self.elapsed_s(),
            peak_memory_gib=peak_memory_gib(self.run.world.device),
            updates_skipped=self.run.state.updates_skipped,
            bad_images=self.run.state.bad_images,
            **self._loader_metrics(loaders, interval.waiting),
        )

    def _estimate(self, left_s: float, steps_left: int, step_s: float) -> None:
        """Log the estimated remaining time, and advice if this time is too long for a CPU."""
        self.run.record.log(
            f"about {left_s / 3600:,.1f} h for the remaining {steps_left:,} steps"
            f" ({digits(step_s)} s per step), without evaluations"
        )
        if left_s > LONG_ON_CPU_S and self.run.world.device.type == "cpu":
            self.run.record.log(
                "note: configs/small/cifar10.yaml, configs/photos_scratch.yaml and"
                " configs/demo.yaml are meant for CPUs, and configs/photos.yaml fine-tunes"
                " published weights, which takes far fewer steps"
            )

    def _advise(
        self, interval: Interval, loaders: list[Tally], loader_images_per_s: float | None
    ) -> None:
        """Log advice if the time spent waiting for data is high and has changed."""
        change = abs(interval.wait_share - self._reported_wait_share)
        is_notable = interval.wait_share >= NOTABLE_WAIT_SHARE and change >= NOTABLE_WAIT_SHARE
        if is_notable and self._timed_steps >= ADVICE_STEPS:
            self._reported_wait_share = interval.wait_share
            self.run.record.log(
                advice(
                    interval.wait_share,
                    interval.waiting,
                    loaders,
                    images_per_s=loader_images_per_s,
                    num_workers=self.loader.num_workers,
                    world=self.run.world,
                )
            )

    def _loader_metrics(self, loaders: list[Tally], waiting: Waiting) -> dict[str, Any]:
        """Return the loader statistics summed over all ranks, and the statistics of the slowest
        rank."""
        if not loaders:
            return {}

        return {
            **{f"loader_{name}": round(number, 3) for name, number in add_up(loaders).items()},
            "loader_worker_mib": max(loader["worker_mib"] for loader in loaders),
            "loader_replaced": sum(loader["replaced"] for loader in loaders),
            "loader_slowest": {
                "rank": waiting.rank,
                "host": self.run.world.host_of(waiting.rank),
                **{name: round(number, 3) for name, number in loaders[waiting.rank].items()},
            },
        }

    def _loader_images_per_s(self, stats: LoaderStats) -> float | None:
        """Return how many images per second the workers of all ranks can load, or None if unknown.

        The rate is estimated from the images that this rank's workers loaded in the interval and
        the time they spent on them.
        """
        num_made = stats.num_made - self._stats_before.num_made
        busy_s = stats.busy_s - self._stats_before.busy_s
        if not num_made:
            return None
        return num_made / busy_s * max(self.loader.num_workers, 1) * self.run.world.size


def create_monitor(run: Run, loader: Loader) -> Monitor:
    """Create the monitor of `run`. On rank 0, the monitor also reports the device's utilization."""
    step = run.train_step
    utilization = None
    if run.world.is_main:
        flops = partial(train_flops_per_image, step.model, step.micro_batch_size)
        stage_flops = [
            (until * run.plan.steps_per_epoch, flops(size))
            for until, size in run.batches.image_format.stages
        ]
        utilization = Utilization(
            flops(), find_peak(run.world.device, step.precision), tuple(stage_flops)
        )
    return Monitor(run, loader, utilization)


# --- how long training waits for data, and what to do about it ------------------------------------
# All ranks step together, so each step waits for the slowest rank. The advice names the host of the
# rank that waited longest, the stages on which its loader spends its time, and a remedy.


class Waiting(NamedTuple):
    """The time that ranks waited for their batches in an interval, in seconds."""

    waited_s: float
    """The wait of the slowest rank in each step, summed over the steps."""
    max_s: float
    """The total wait of the rank that waited longest."""
    mean_s: float
    """The total wait, averaged over the ranks."""
    rank: int
    """The rank that waited longest."""

    @property
    def is_uneven(self) -> bool:
        """Whether most ranks wait for one or a few slow ranks."""
        return self.max_s > UNEVEN * self.mean_s


def sum_up(waited_s: float, totals_s: NDArray[np.float64]) -> Waiting:
    """Summarize the waits in an interval. totals_s: (ranks,) each rank's wait, summed over the
    steps."""
    rank = int(totals_s.argmax())
    return Waiting(waited_s, float(totals_s[rank]), float(totals_s.mean()), rank)


def advice(
    share: float,
    waiting: Waiting,
    loaders: list[Tally],
    images_per_s: float | None,
    num_workers: int,
    world: World,
) -> str:
    """Return advice for training that spends the fraction `share` of its time waiting for data.

    Args:
        loaders: The statistics of each rank's loader; [] if unknown.
        images_per_s: The rate that all ranks' loaders together can reach; None if unknown.
    """
    tally = loaders[waiting.rank] if loaders and waiting.is_uneven else add_up(loaders)
    shares = _shares(tally)
    remedies = [REMEDIES[shares[0][1]]] if shares else []
    work = _work(tally, shares)

    waited = f"data-bound: {share:.0%} of the time was spent waiting for images"
    if waiting.is_uneven:
        remedy = ", and ".join([*remedies, "check what else runs on this host"])
        return (
            f"{waited} of rank {waiting.rank} on {world.host_of(waiting.rank)}"
            f" ({waiting.max_s:.1f} s, ranks on average {waiting.mean_s:.1f} s){work}; {remedy}"
        )

    rate = "" if images_per_s is None else f"; the loader can load {digits(images_per_s)} images/s"
    cores = num_cores()
    ranks = local_world_size()
    if max(num_workers, 1) * ranks < cores:
        remedies.insert(
            0,
            f"raise loader.num_workers ({num_workers} for each of {ranks} rank(s), {cores} cores)",
        )
    else:
        remedies.append(f"use more than {cores} cores")

    return f"{waited}{rate}{work}; {' or '.join(remedies)}"


def _shares(tally: Tally) -> list[tuple[float, Stage]]:
    """Return the fraction of the loaders' time that each stage takes, largest first; [] without
    work."""
    stages_s = {stage: tally[f"{stage.name.lower()}_s"] for stage in REMEDIES}
    busy_s = sum(stages_s.values())
    return sorted(((s / busy_s, stage) for stage, s in stages_s.items() if s), reverse=True)


def _work(tally: Tally, shares: list[tuple[float, Stage]]) -> str:
    """Return text about the slow stages, such as "; its time: decode 71%, read 20%, 3 retries"."""
    notable = [(share, stage) for share, stage in shares if share >= NOTABLE_STAGE_SHARE]
    parts = [f"{stage.name.lower()} {share:.0%}" for share, stage in notable]
    if tally["retries"]:
        parts.append(f"{tally['retries']:.0f} retries")
    return f"; its time: {', '.join(parts)}" if parts else ""
