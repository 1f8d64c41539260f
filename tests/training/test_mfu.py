"""Compare the model FLOPS utilization in metrics.jsonl and on the progress line with manual
calculations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import TINY, metrics, run_of, train

from vit.config.io import load_config
from vit.data.batches import Batch, Batches, BatchLayout
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.distributed.process_group import World
from vit.loggers.record import Record
from vit.model import create_model
from vit.monitor import Monitor
from vit.training.mfu import Peak, Utilization, find_peak, measure_peak, train_flops_per_image
from vit.training.plan import make_plan
from vit.training.step_result import StepResult

CPU = torch.device("cpu")
H200 = Peak(989.4, "data sheet")


class Nothing(Batches):
    layout = BatchLayout(4, ImageFormat((4, 4)), 0)

    def fill(self, position: int, first: int, rows: Batch) -> tuple[str, ...]:
        return ()


def test_the_share_of_vit_b16_equals_a_sum_by_hand():
    """A forward pass of ViT-B/16 takes 35.13 GFLOP per image, and training takes three times as
    much. At 3,000 images/s, this is 32 % of an H200's peak performance."""
    with torch.device("meta"):
        model = create_model("vit_b16", 224, 1000)
    flops = train_flops_per_image(model, 128)
    assert flops == pytest.approx(3 * 35.13e9, rel=1e-3)
    assert Utilization(flops, H200).mfu(3000.0) == pytest.approx(0.3196, rel=1e-3)
    assert Utilization(flops, None).mfu(3000.0) is None


def test_the_peak_is_measured_with_products_of_random_numbers(monkeypatch):
    """The measured peak of any machine must be between a million and 10**18 operations per
    second."""
    factors = []

    def multiply(a, b):
        factors.append(a)
        return unchanged(a, b)

    unchanged = torch.mm
    monkeypatch.setattr(torch, "mm", multiply)
    state = torch.get_rng_state()
    peak = measure_peak(CPU, "fp32", size=64)
    assert torch.equal(torch.get_rng_state(), state), (
        "the measurement must not change the random state of training"
    )
    assert 0.8 < factors[0].std() < 1.2, (
        "the measurement must use random numbers, because constants draw less power"
    )
    assert peak.peak_source == "measured"
    assert 1e-6 < peak.peak_tflops < 1e6
    assert find_peak(CPU, "fp32") is None


@given(
    stages=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), max_size=3),
    first=st.integers(0, 60),
    length=st.integers(0, 60),
)
def test_remaining_steps_are_weighted_by_their_operations(stages, first, length):
    ascending = tuple(sorted(dict(stages).items()))
    utilization = Utilization(7, H200, ascending)
    of_step = [utilization.flops_at(step) for step in range(121)]
    for until, flops in reversed(ascending):
        assert of_step[until - 1] == flops
        assert of_step[until] == utilization.flops_at(until)
    expected = sum(of_step[first : first + length]) / of_step[length]
    assert utilization.steps_like(length, first, first + length) == pytest.approx(expected)
    assert utilization.mfu(3.0, 40) == pytest.approx(of_step[40] * 3.0 / 989.4e12)


@pytest.mark.parametrize("peak", [H200, None])
def test_metrics_and_progress_line_have_the_share_of_each_device(peak, config, tmp_path, capsys):
    settings = load_config(config, TINY)
    plan, _ = make_plan(settings, 60, 3)
    record = Record(tmp_path, settings.log, True, total_steps=plan.total_steps)
    flops = 10**15
    with Loader(Nothing(), 0, 3) as loader:
        world = World(0, 3, CPU, hosts=("a", "b", "c"))
        run = run_of(plan, world, record, Nothing.layout.image_format)
        monitor = Monitor(run, loader, Utilization(flops, peak))
        monitor.start_clock()
        for step in range(3):
            next(loader)
            monitor.queue(
                step, StepResult(torch.tensor([1.0, 1, 1, 1, 0, 1, 1, 1]), torch.tensor(1.0))
            )
        monitor.flush()
    record.close()
    lines = metrics(tmp_path, "train")
    assert len(lines) == 3
    for line in lines:
        assert line["images_per_s_per_gpu"] == pytest.approx(line["images_per_s"] / 3)
        if peak is None:
            assert line["mfu"] is None
        else:
            expected = flops * line["images_per_s"] / 3 / 989.4e12
            assert line["mfu"] == pytest.approx(expected)
    assert ("MFU" in capsys.readouterr().err) == (peak is not None)


def test_training_on_cpus_reports_images_per_s_of_each_rank_and_no_share(config, tmp_path):
    train(config, tmp_path / "run", "train.steps=2")
    for line in metrics(tmp_path / "run", "train"):
        assert line["mfu"] is None
        assert line["images_per_s_per_gpu"] == line["images_per_s"]
    assert "peak_tflops" not in metrics(tmp_path / "run", "start")[0]
