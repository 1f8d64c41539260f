"""What the training loop does at its side: read each step one step late, count, log, and notice
that it is time to stop.

The data's story: the loop hands over what a step did while the device still works on it; once the
next step is queued, its numbers are read, on every rank the same sums; a line of metrics goes to
the record at the end of each interval. Time spent on evaluation and saving is no training time.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from vit.config import Config
from vit.data.loader import Loader, LoaderStats
from vit.data.stages import TALLIED, Stage, Tally, add_up, since
from vit.distributed import World, local_world_size, peak_memory_gib
from vit.plan import Plan
from vit.run.checkpoint import RunState
from vit.run.record import Record
from vit.step import StepResult, StepValues
from vit.system.host import num_cores
from vit.system.meter import duration

TELL_WAIT_SHARE = 0.1
"""Share of an interval spent on waiting for data from which on people are told, and by which it
must change to be told again."""

UNEVEN = 1.5
"""A rank that has waited so many times as long as ranks do on average is named."""


TELL_STAGE_SHARE = 0.05
"""Share of the loader's work from which on a stage is named."""


class Waiting(NamedTuple):
    """How long ranks waited for their batches in an interval.

    Ranks go on together, so that each step waits for the slowest: `waited_s` adds up its waits.
    """

    waited_s: float
    max_s: float
    """Of the rank that waited longest in all."""
    mean_s: float
    rank: int
    """The one that waited longest in all."""

    @property
    def is_uneven(self) -> bool:
        """Whether it is one rank, or a few, that the others wait for."""
        return self.max_s > UNEVEN * self.mean_s


def sum_up(waits_s: list[tuple[float, ...]]) -> Waiting:
    """Of steps, how long each rank waited for its batch."""
    totals = [sum(rank) for rank in zip(*waits_s, strict=True)]
    longest = max(totals)
    mean_s = sum(totals) / len(totals)
    return Waiting(sum(map(max, waits_s)), longest, mean_s, totals.index(longest))


@contextmanager
def collecting_at_log_lines() -> Iterator[None]:
    """Keep Python's garbage collector from running at moments of its own choice.

    A full collection among the objects of torch takes .7 s, and where one of 512 ranks has it in a
    step, all wait. `Monitor` collects at each line of metrics; at the first it sets aside what
    lives by then, compiled code included, so that the others look at what came since: under a
    millisecond.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _collect() -> None:
    """Where Python does not collect by itself."""
    if gc.isenabled():
        return
    gc.collect()
    if not gc.get_freeze_count():
        gc.freeze()


def _work(tally: Tally) -> str:
    """What loaders spent their time on, and what went wrong there: "; its time: decode 71%, read
    20%, 3 retries"."""
    seconds = {
        stage.name.lower(): tally[f"{stage.name.lower()}_s"]
        for stage in Stage
        if stage != Stage.IDLE
    }
    busy_s = max(sum(seconds.values()), 1e-9)
    shares = sorted(((spent_s / busy_s, name) for name, spent_s in seconds.items()), reverse=True)
    parts = [f"{name} {share:.0%}" for share, name in shares if share >= TELL_STAGE_SHARE]
    parts += [f"{tally['retries']:.0f} retries"] if tally["retries"] else []
    return f"; its time: {', '.join(parts)}" if parts else ""


class Monitor:
    """Reads what each step did, one step late, counts and logs it, and knows when to `stop`."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        world: World,
        state: RunState,
        record: Record,
        loader: Loader,
        lr_at: Callable[[int], float],
    ):
        self.config = config
        self.plan = plan
        self.world = world
        self.state = state
        self.record = record
        self.loader = loader
        self.lr_at = lr_at
        self.stop = False
        self._told_wait_share = 0.0
        self._tally_before = loader.tally()
        self._pending: tuple[int, StepResult, float, LoaderStats] | None = None
        self._last_step_at: float
        self._run_began = time.perf_counter() - state.elapsed_s
        self._new_interval(time.perf_counter(), loader.stats)

    def elapsed_s(self) -> float:
        """Time spent on this run, evaluation and saving included, over all restarts."""
        return time.perf_counter() - self._run_began

    def tell(self, step: int) -> tuple[float, ...]:
        """What this rank's loader has done since it was told last, where a line of metrics follows
        on `step`; else ()."""
        if not self._logs_after(step + 1):
            return ()
        before = self._tally_before
        self._tally_before = self.loader.tally()
        done = since(self._tally_before, before)
        return (
            *(done[name] for name in TALLIED),
            self.loader.worker_bytes() / 2**20,
            self.loader.num_replaced,
        )

    def take(self, step: int, result: StepResult) -> None:
        """Read the step before this one, which the device has done by now, and keep this one for
        the next call."""
        self.read(queued_behind=True)
        self._pending = (step, result, time.perf_counter(), self.loader.stats)

    def start_clock(self) -> None:
        """Training time begins now: what came before the first step, with the wait for its batch,
        was the start of the process."""
        self._new_interval(time.perf_counter(), self.loader.stats)

    def resume_clock(self) -> None:
        """Evaluation and saving are no training time."""
        now = time.perf_counter()
        self._began += now - self._last_step_at
        self._last_step_at = now

    def read(self, queued_behind: bool = False) -> None:
        """Read the step that was kept, with another `queued_behind` it or not. Raises ValueError
        once too many updates in a row were skipped."""
        if self._pending is None:
            return
        step, result, self._last_step_at, stats = self._pending
        self._pending = None
        values = result.read()
        state = self.state
        config = self.config
        if not queued_behind:  # the wait for this step is training time, too
            self._last_step_at = time.perf_counter()
        self.stop = self.stop or values.stop > 0
        self._losses.append(values.loss)
        self._waits_s.append(values.waits_s)
        state.bad_images += values.bad_images
        finite = math.isfinite(values.grad_norm)
        state.updates_skipped += not finite
        state.updates_skipped_in_a_row = 0 if finite else state.updates_skipped_in_a_row + 1
        if not finite:
            self.record.write(
                "fault", step + 1, reason="gradient not finite, update skipped", loss=values.loss
            )
        self._log(step + 1, values, stats)
        if state.updates_skipped_in_a_row >= config.train.max_skipped_steps:
            with self.world.fail_together():
                raise ValueError(
                    f"step {step}: the gradient was not finite {state.updates_skipped_in_a_row}"
                    f" times in a row (loss {values.loss:.4g}): training has diverged. Lower"
                    " optim.lr, lengthen the warm-up, or use train.precision=bf16; the last"
                    " checkpoint is from before"
                )

    def _new_interval(self, began: float, stats_before: LoaderStats) -> None:
        self._began = began
        self._last_step_at = began
        self._stats_before = stats_before
        self._losses = list[float]()
        self._waits_s = list[tuple[float, ...]]()

    def _log(self, step: int, values: StepValues, stats: LoaderStats) -> None:
        """Move the live line to `step` steps done; at the end of an interval also write a line of
        metrics."""
        plan = self.plan
        batch_size = self.config.data.global_batch_size
        spent_s = max(self._last_step_at - self._began, 1e-9)
        waiting = sum_up(self._waits_s)
        share = min(waiting.waited_s / spent_s, 1.0)
        images_per_s = len(self._losses) * batch_size / spent_s
        loss = sum(self._losses) / len(self._losses)
        lr = self.lr_at(step - 1)
        epoch = step / plan.steps_per_epoch
        eta_s = (plan.total_steps - step) * batch_size / images_per_s
        whose = f" (rank {waiting.rank})" if waiting.is_uneven and share >= TELL_WAIT_SHARE else ""
        text = (
            f"step {step}/{plan.total_steps} epoch {epoch:.2f} | {images_per_s:.0f} images/s, "
            f"data wait {share:.0%}{whose} | loss {loss:.3f} | lr {lr:.2e} | ETA {duration(eta_s)}"
        )
        if not self._logs_after(step):
            self.record.progress(step, text)
            return
        _collect()
        loader_images_per_s = self._loader_images_per_s(stats)
        self.record.train_line(step, text)
        loaders = [
            dict(zip((*TALLIED, "worker_mib", "replaced"), told, strict=True))
            for told in values.told
        ]
        self._tell_of_waiting(share, waiting, loader_images_per_s, loaders)
        self.record.write(
            "train",
            step,
            epoch=epoch,
            loss=loss,
            lr=lr,
            grad_norm=values.grad_norm,
            images_per_s=images_per_s,
            data_wait_s=waiting.waited_s,
            data_wait_max_s=waiting.max_s,
            data_wait_mean_s=waiting.mean_s,
            data_wait_rank=waiting.rank,
            data_wait_host=self.world.host_of(waiting.rank),
            loader_images_per_s=loader_images_per_s,
            elapsed_s=self.elapsed_s(),
            peak_memory_gib=peak_memory_gib(self.world.device),
            updates_skipped=self.state.updates_skipped,
            bad_images=self.state.bad_images,
            **self._of_loaders(loaders, waiting.rank),
        )
        self._new_interval(self._last_step_at, stats)

    def _logs_after(self, step: int) -> bool:
        """Whether a line of metrics is written when `step` steps are done."""
        return step % self.plan.log_every_steps == 0 or step == self.plan.total_steps

    def _of_loaders(self, loaders: list[Tally], slowest: int) -> dict[str, Any]:
        """For the record: what the loaders of all ranks did in the interval, and that of the rank
        that waited longest."""
        if not loaders:
            return {}
        values: dict[str, Any] = {
            f"loader_{name}": round(number, 3) for name, number in add_up(loaders).items()
        }
        values["loader_worker_mib"] = max(loader["worker_mib"] for loader in loaders)
        values["loader_replaced"] = sum(loader["replaced"] for loader in loaders)
        of_slowest = {name: round(number, 3) for name, number in loaders[slowest].items()}
        return values | {
            "loader_slowest": {"rank": slowest, "host": self.world.host_of(slowest), **of_slowest}
        }

    def _loader_images_per_s(self, stats: LoaderStats) -> float | None:
        """What the workers of all ranks can make in a second, from the time that this rank's spent
        on what they made in the interval; None if they made nothing."""
        made = stats.num_made - self._stats_before.num_made
        busy_s = stats.busy_s - self._stats_before.busy_s
        return made / busy_s * max(self.loader.num_workers, 1) * self.world.size if made else None

    def _tell_of_waiting(
        self,
        share: float,
        waiting: Waiting,
        loader_images_per_s: float | None,
        loaders: list[Tally],
    ) -> None:
        """Say that training waits for data, when it does and it was not said before."""
        if share < TELL_WAIT_SHARE or abs(share - self._told_wait_share) < TELL_WAIT_SHARE:
            return
        self._told_wait_share = share
        waited = f"data-bound: {share:.0%} of the time was spent on waiting for images"
        if waiting.is_uneven:
            host = self.world.host_of(waiting.rank)
            self.record.say(
                f"{waited} of rank {waiting.rank} on {host} ({waiting.max_s:.1f} s, ranks on"
                f" average {waiting.mean_s:.1f}"
                f" s){_work(loaders[waiting.rank]) if loaders else ''}; look at its disk, its"
                " network and what else runs there"
            )
            return
        workers = self.loader.num_workers
        cores = num_cores()
        ranks = local_world_size()
        rate = (
            f"; the loader makes {loader_images_per_s:.0f} images/s"
            if loader_images_per_s is not None
            else ""
        )
        rate += _work(add_up(loaders)) if loaders else ""
        if max(workers, 1) * ranks < cores:
            remedy = (
                f"raise data.num_workers ({workers} for each of {ranks} rank(s), {cores} cores)"
            )
        else:
            remedy = (
                f"all {cores} core(s) have work: cheaper images help (docs/data.md), or more cores"
            )
        self.record.say(f"{waited}{rate}; {remedy}")
