"""Test that docs/planner_error.md is correct, and that the planner's errors are as small as the
page promises."""

from __future__ import annotations

import re
from pathlib import Path

import planner_error
import pytest
import torch

from vit.config.schema import Config
from vit.extras.planner import roofline
from vit.extras.planner.roofline import forward_work
from vit.extras.planner.speed import published_runs
from vit.model import create_model

PAGE = Path(__file__).parents[3].joinpath("docs", "planner_error.md").read_text()


def shares(table: str) -> list[float]:
    """Return the last column of a table of errors, in percent."""
    return [float(share) for share in re.findall(r"(\d+) % \|$", table, re.M)]


def test_the_page_has_the_errors_of_training_and_most_are_within_a_factor():
    assert planner_error.published_table() in PAGE
    table = planner_error.training_errors()
    assert table in PAGE
    _, *predicted_by_the_planner = shares(table)
    assert min(predicted_by_the_planner) >= 80


def test_rates_of_one_gpu_predict_another_within_a_factor_once_a_model_was_measured():
    table = planner_error.inference_errors()
    assert table in PAGE
    after = [line for line in table.splitlines() if "was measured" in line]
    assert len(after) == 2
    assert min(shares("\n".join(after))) >= 98


@pytest.mark.full
def test_the_counted_memory_separates_batches_that_fit_from_those_that_do_not():
    table = planner_error.memory_table()
    assert table in PAGE
    assert table.count("| yes |") == len(planner_error.BRACKETS)


def test_the_rates_of_the_planner_are_those_that_fit_best():
    share, bytes_compiled = planner_error.fit_rates(planner_error.compiled_training())
    assert share == pytest.approx(roofline.SHARE_OF_PEAK, rel=0.02)
    assert bytes_compiled == pytest.approx(roofline.BYTES_COMPILED, rel=0.02)
    share, bytes_eager = planner_error.fit_rates(planner_error.eager_training())
    assert share == pytest.approx(roofline.SHARE_OF_PEAK_GEFORCE, rel=0.02)
    assert bytes_eager == pytest.approx(roofline.BYTES_EAGER, rel=0.02)


@pytest.mark.parametrize("run", published_runs(), ids=lambda run: run["run"])
def test_the_stored_work_of_a_published_run_is_that_of_our_model(run):
    config = Config.model_validate(
        {
            "model": run["model"],
            "data": {"root": "none", "global_batch_size": 2},
            "train": {"steps": 1},
        }
    )
    with torch.device("meta"):
        work, trained = forward_work(create_model(config.model, num_classes=1000))
    assert [work.linear_flops, work.attention_flops, work.elements] == run["work"]
    assert trained == work
