"""What training says about waiting for data, from a loader whose speed is known."""

from __future__ import annotations

import gc
import re
import time
from itertools import pairwise

import pytest
import torch
from processes import TINY, metrics

from vit.checkpoint import Progress
from vit.config_io import load_config
from vit.data.loader import Batch, ImageFormat, Layout
from vit.data.workers import Loader
from vit.distributed import World
from vit.host import num_cores
from vit.monitor import Monitor, collecting_at_log_lines
from vit.plan import make_plan
from vit.record import Record
from vit.step import StepResult

ROWS, PAUSE_S = 12, 0.05


class Slow:
    """Batches of nothing that take their time."""

    layout, row_unit = Layout(ROWS, ImageFormat((4, 4)), 0), 1

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        time.sleep(PAUSE_S)
        return ()


@pytest.mark.parametrize(("computing_s", "is_told"), [(0.0, True), (0.6, False)])
def test_training_says_that_it_waits_for_data_and_records_what_the_loader_can_do(computing_s, is_told, config, tmp_path, capsys):
    settings = load_config(config, TINY)[0]
    plan, _ = make_plan(settings, 60, 1)
    record = Record(tmp_path, settings.log, True, total_steps=plan.total_steps)
    with Loader(Slow(), 0, 5) as loader:
        world, progress = World(0, 1, torch.device("cpu")), Progress(facts={})
        monitor = Monitor(settings, plan, world, progress, record, loader, lambda step: 0.1)
        monitor.start_clock()
        for step, _batch in enumerate(loader):
            time.sleep(computing_s)
            monitor.take(step, StepResult(torch.tensor([1.0, ROWS, 0, 0, 1.0])))
        monitor.read()
    record.close()
    line = r"^data-bound: (\d+)% of the time was spent on waiting for images; the loader makes (\d+) images/s; (.*)"
    told = re.findall(line, capsys.readouterr().err, re.MULTILINE)
    lines = metrics(tmp_path, "train")
    assert len(lines) == 5
    for line in lines[1:]:
        assert line["data_wait_s"] >= PAUSE_S
        assert 0 < line["loader_images_per_s"] <= ROWS / PAUSE_S
    if is_told:
        shares = [int(share) for share, *_ in told]
        assert shares[0] > 50
        assert all(abs(a - b) >= 9 for a, b in pairwise(shares)), "the same was said again"
        for _, rate, remedy in told:
            assert 0 < int(rate) <= ROWS / PAUSE_S
            assert remedy == f"raise data.num_workers (0 for each of 1 rank(s), {num_cores()} cores)"
    else:
        assert not told


def test_garbage_is_collected_at_log_lines_only():
    assert gc.isenabled()
    with collecting_at_log_lines():
        assert not gc.isenabled()
        gc.freeze()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
