"""Test the messages about waiting for data. The loader in these tests has a known speed."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import warm_python
from proc import children, environment_of
from processes import TINY, Background, last_step, metrics, run_of

from vit.build import build
from vit.compose import parts_of
from vit.config.io import load_config
from vit.data.batches import Batch, Batches, BatchLayout
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.stages import TALLIED, Tally
from vit.distributed.process_group import World
from vit.loggers.record import Record
from vit.monitor import (
    ADVICE_STEPS,
    Monitor,
    Waiting,
    _collect_garbage,
    advice,
    collect_garbage_at_log_lines,
    sum_up,
)
from vit.run import Hook
from vit.system.host import num_cores
from vit.train import train
from vit.training.plan import make_plan
from vit.training.step_result import StepResult

ALONE = World(0, 1, torch.device("cpu"))
ROWS = 12
PAUSE_S = 0.05


class Slow(Batches):
    layout = BatchLayout(ROWS, ImageFormat((4, 4)), 0)

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        time.sleep(PAUSE_S)
        return ()


needs_two_cores = pytest.mark.skipif(
    num_cores() < 2, reason="on one core, the remedy for a slow loader is more cores"
)


@needs_two_cores
@pytest.mark.parametrize(
    ("computing_s", "num_steps", "is_told"),
    [(0.0, ADVICE_STEPS + 1, True), (0.0, ADVICE_STEPS - 1, False), (0.6, ADVICE_STEPS + 1, False)],
)
def test_training_reports_waits_for_data_and_records_the_rate_of_the_loader(
    computing_s, num_steps, is_told, config, tmp_path, capsys
):
    settings = load_config(config, TINY)
    plan, _ = make_plan(settings, 60, 1)
    record = Record(tmp_path, settings.log, True, total_steps=plan.total_steps)

    with Loader(Slow(), 0, num_steps) as loader:
        world = World(0, 1, torch.device("cpu"))
        monitor = Monitor(run_of(plan, world, record, Slow.layout.image_format), loader)
        monitor.start_clock()
        for step in range(num_steps):
            waited_before_s = loader.stats.wait_s
            next(loader)
            waited_s = loader.stats.wait_s - waited_before_s
            if computing_s:  # use a lower bound, because waits are longer on a busy machine
                waited_s = PAUSE_S
            sums = torch.tensor([1.0, ROWS, 0, 0, 0, waited_s])
            time.sleep(computing_s)
            monitor.queue(step, StepResult(sums, torch.tensor(1.0)))
        monitor.flush()
    record.close()

    line = (
        r"^data-bound: (\d+)% of the time was spent waiting for images; the loader can load"
        r" ([\d.]+) images/s; (.*)"
    )
    messages = re.findall(line, capsys.readouterr().err, re.MULTILINE)

    lines = metrics(tmp_path, "train")
    assert len(lines) == num_steps
    for line in lines[1:]:
        assert line["data_wait_s"] >= PAUSE_S
        assert line["data_wait_max_s"] == line["data_wait_mean_s"] == line["data_wait_s"]
        assert (line["data_wait_rank"], line["data_wait_host"]) == (0, socket.gethostname())
        assert 0 < line["loader_images_per_s"] <= ROWS / PAUSE_S

    if is_told:
        shares = [int(share) for share, *_ in messages]
        assert all(abs(a - b) >= 9 for a, b in pairwise(shares)), "the same message was repeated"
        for _, rate, remedy in messages:
            assert 0 < float(rate) <= ROWS / PAUSE_S
            assert (
                remedy == f"raise loader.num_workers (0 for each of 1 rank(s), {num_cores()} cores)"
            )
    else:
        assert not messages


DAY_S = 24 * 3600
ADVICE = (
    "note: configs/small/cifar10.yaml, configs/photos_scratch.yaml and configs/demo.yaml"
    " are meant for CPUs, and configs/photos.yaml fine-tunes published weights, which takes far"
    " fewer steps"
)


@pytest.mark.parametrize(
    ("step_s", "total_steps", "kind", "expected"),
    [
        (60.0, 29_003, "cpu", ["about 483.3 h for the remaining 29,000 steps (60.0 s", ADVICE]),
        (60.0, 29_003, "cuda", ["about 483.3 h for the remaining 29,000 steps (60.0 s"]),
        (0.29, 300_003, "cpu", ["about 24.2 h for the remaining 300,000 steps (0.29 s", ADVICE]),
        (0.28, 300_003, "cpu", ["about 23.3 h for the remaining 300,000 steps (0.28 s"]),
        (2.01, 303, "cpu", ["about 0.2 h for the remaining 300 steps (2.01 s"]),
        (1.99, 303, "cpu", []),
    ],
)
def test_the_length_of_a_run_is_logged_after_three_steps(
    step_s, total_steps, kind, expected, config, tmp_path, capsys, monkeypatch
):
    """The first step and an evaluation after the second step take a long time, but must not
    count."""
    now = [1000.0]
    monkeypatch.setattr("vit.monitor.time", SimpleNamespace(perf_counter=lambda: now[0]))
    settings = load_config(config, [*TINY, f"train.steps={total_steps}", "log.every_steps=100"])
    plan, _ = make_plan(settings, 60, 1)
    record = Record(tmp_path, settings.log, True, total_steps=plan.total_steps)
    with Loader(Slow(), 0, 1) as loader:
        run = run_of(plan, World(0, 1, torch.device("cpu")), record, Slow.layout.image_format)
        run.world = SimpleNamespace(device=torch.device(kind), size=1)
        monitor = Monitor(run, loader)
        monitor.start_clock()
        printed = []
        for step in range(6):
            monitor.resume()
            now[0] += 3600.0 if step == 0 else step_s
            sums = torch.tensor([1.0, ROWS, 0, 0, 0, 0])
            monitor.queue(step, StepResult(sums, torch.tensor(1.0)))
            if step == 1:
                monitor.pause()
                now[0] += 7 * DAY_S
            printed.append(capsys.readouterr().err.splitlines())
    record.close()
    # The result of each step is read when the next step is queued.
    length = " per step), without evaluations"
    expected = [each + length if each.startswith("about") else each for each in expected]
    assert printed == [[], [], [], expected, [], []]


def test_garbage_is_collected_at_log_lines_only():
    gc.unfreeze()
    assert gc.isenabled()
    _collect_garbage(freeze=True)
    assert gc.get_freeze_count() == 0, "outside the block, garbage must be collected as usual"
    with collect_garbage_at_log_lines():
        assert not gc.isenabled()
        _collect_garbage(freeze=True)
        set_aside = gc.get_freeze_count()
        assert set_aside > 0
        born = [[] for _ in range(10_000)]
        _collect_garbage(freeze=False)
        # Other threads may have freed some of the frozen objects.
        assert gc.get_freeze_count() < set_aside + len(born) // 2, (
            "only the first collection must freeze objects"
        )
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with collect_garbage_at_log_lines():
        _collect_garbage(freeze=False)
    assert gc.get_freeze_count() > 0, "objects frozen by other code must stay frozen"


class Frozen(Hook):
    """Counts the frozen objects before each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def loss_limit(self, step: int) -> None:
        self.counts.append(gc.get_freeze_count())


def test_training_freezes_objects_at_its_first_line_of_metrics_only(config, tmp_path):
    settings = load_config(config, [f"run.dir={tmp_path / 'run'}", *TINY, "log.every_steps=2"])
    parts = parts_of(settings)
    frozen = Frozen()
    gc.unfreeze()
    train(build(settings, ALONE, (), replace(parts, hooks=(*parts.hooks, frozen))))
    assert gc.get_freeze_count() == 0
    before, after = frozen.counts[:2], frozen.counts[4:]
    assert before == [0, 0]
    assert min(after) > 100_000
    assert max(after) == after[0], "later lines must not freeze objects"
    gc.freeze()


def test_waits_of_all_ranks_are_summed_up():
    """The message must name the rank that is the slowest in most steps."""
    waiting = sum_up(1.75, np.array([0.25, 1.25, 0.75]))
    assert waiting == Waiting(waited_s=1.75, max_s=1.25, mean_s=0.75, rank=1)
    assert waiting.is_uneven
    assert not sum_up(1.5, np.array([1.25, 1.25])).is_uneven
    assert not sum_up(0.5, np.array([0.5])).is_uneven


@needs_two_cores
@pytest.mark.parametrize("num_workers", [0, 1000])
@pytest.mark.parametrize("max_s", [1.0, 3.0])
@pytest.mark.parametrize(
    ("slowest", "remedy"),
    [
        ("decode_s", "--resize-short-side 256"),
        ("resize_s", "--resize-short-side 256"),
        ("read_s", "check the disk and the network"),
        ("store_s", "check the network and the storage"),
    ],
)
def test_the_remedy_fits_the_slowest_part(slowest, remedy, max_s, num_workers):
    """If all ranks wait for one slow rank, the message must suggest a fix for the slowest part of
    this rank, even if other ranks spend more time on a different part."""

    def tally(name: str, seconds: float) -> Tally:
        return {**dict.fromkeys(TALLIED, 0.0), "order_s": 0.1, "idle_s": 99.0, name: seconds}

    other_loader = tally("draw_s", 20.0) if max_s > 1.0 else tally(slowest, 1.0)
    waiting = Waiting(waited_s=3.0, max_s=max_s, mean_s=1.0, rank=1)
    loaders = [other_loader, tally(slowest, 0.9)]
    world = World(0, 2, torch.device("cpu"), hosts=("near", "far"))
    line = advice(0.5, waiting, loaders, 10.0, num_workers, world)
    assert f"; its time: {slowest.removesuffix('_s')} 9" in line
    assert remedy in line
    assert ("network" in line) == ("network" in remedy)
    assert ("raise loader.num_workers" in line) == (max_s == 1.0 and num_workers == 0)


@pytest.mark.parametrize(("others_s", "suffix"), [(0.0, "of rank 2 on far"), (0.3, "; the loader")])
def test_names_the_slow_rank_with_its_host(others_s, suffix, config, tmp_path, capsys):
    settings = load_config(config, TINY)
    plan, _ = make_plan(settings, 60, 3)
    record = Record(tmp_path, settings.log, True, total_steps=plan.total_steps)
    world = World(0, 3, torch.device("cpu"), hosts=("near", "near", "far"))
    with Loader(Slow(), 0, ADVICE_STEPS) as loader:
        monitor = Monitor(run_of(plan, world, record, Slow.layout.image_format), loader)
        monitor.start_clock()
        for step in range(ADVICE_STEPS):
            next(loader)
            time.sleep(0.4)
            sums = torch.tensor([1.0, ROWS, 0, 0, 0, others_s, others_s, 0.3])
            monitor.queue(step, StepResult(sums, torch.tensor(1.0)))
        monitor.flush()
    record.close()
    for line in metrics(tmp_path, "train"):
        assert line["data_wait_s"] == line["data_wait_max_s"] == pytest.approx(0.3)
        assert line["data_wait_mean_s"] == pytest.approx(0.1 + others_s * 2 / 3)
        if not others_s:
            assert (line["data_wait_rank"], line["data_wait_host"]) == (2, "far")
    messages = capsys.readouterr().err
    assert f"spent waiting for images{'' if suffix[0] == ';' else ' '}{suffix}" in messages
    assert ("(rank 2) |" in messages) == (not others_s)


def test_records_which_of_three_ranks_has_a_stalled_loader(config, tmp_path):
    """While one rank's loader is stalled, the other ranks wait in the all-reduce. The time in the
    all-reduce must not be recorded as waiting for data."""
    run_dir = tmp_path / "run"
    settings = [
        "train.steps=1000000",
        "eval.every_steps=1000000",
        "checkpoint.every_steps=1000000",
        "log.every_steps=10",
        "loader.num_workers=1",
        "loader.stall_timeout_s=28",  # waits are reported after a quarter of this time
    ]
    background = Background(config, run_dir, *settings, ranks=3)
    background.wait_for_step(20)
    [rank] = [pid for pid in background.trainers() if environment_of(pid).get("RANK") == "2"]
    [worker] = children(warm_python.fork_of(rank))
    os.kill(worker, signal.SIGSTOP)
    output = background.wait_for_output(f"(process {worker}, stopped)")
    standing = last_step(run_dir)
    os.kill(worker, signal.SIGCONT)
    background.wait_for_step(standing + 20)
    background.process.send_signal(signal.SIGTERM)
    output += background.end()
    lines = metrics(run_dir, "train")
    slowest = max(lines, key=lambda line: line["data_wait_s"])
    for line in lines[1:]:
        assert line["loader_slowest"]["rank"] == line["data_wait_rank"]
        for name in TALLIED:
            assert line[f"loader_{name}"] >= line["loader_slowest"][name] >= 0, (
                "the totals of all ranks must include those of the slowest rank"
            )
    # The ranks read equal amounts of data, but their times depend on the machine's load.
    read_bytes = sum(line["loader_read_bytes"] for line in lines)
    assert read_bytes > 1.3 * sum(line["loader_slowest"]["read_bytes"] for line in lines) > 0
    assert sum(line["loader_slowest"]["decode_s"] for line in lines) > 0
    assert max(line["loader_worker_mib"] for line in lines) > 1
    assert [line["loader_replaced"] for line in lines] == [0] * len(lines)
    assert (slowest["data_wait_rank"], slowest["data_wait_host"]) == (2, socket.gethostname())
    assert slowest["data_wait_max_s"] > 6.9, "the wait must last at least until it was reported"
    assert slowest["data_wait_s"] >= slowest["data_wait_max_s"] > 1.5 * slowest["data_wait_mean_s"]
    pattern = (
        r"data-bound: \d+% of the time was spent waiting for images of rank 2 on .* s\); its"
        r" time: .*check what else runs on this host"
    )
    assert re.search(pattern, output), output
    assert re.search(r"data wait \d+% \(rank 2\) \| loss", output), output
