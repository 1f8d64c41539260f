"""What a checkpoint keeps besides tensors: which evaluation is the best one."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from vit.run.state import RunState


@pytest.mark.parametrize(
    ("before", "found", "expected"),
    [
        (-1.0, [(0.0, 2.3)], True),
        (90.0, [(95.0, 1.35)], True),
        (100.0, [(100.0, 1.0)], False),  # the same again
        (100.0, [(100.0, 0.43)], True),
        (100.0, [(100.0, 1.2)], False),
        (100.0, [(99.0, 0.1), (100.0, 0.5)], True),  # weights and their average
        (100.0, [(100.0, math.nan)], False),
    ],
)
def test_of_equal_accuracies_the_smaller_loss_wins(before, found, expected):
    state = RunState(best_top1=before, best_loss=1.0)
    assert state.take_best(*found) == expected


def test_progress_of_an_older_checkpoint_takes_part():
    """It has no loss: the next evaluation as good takes its place."""
    older = {
        key: value for key, value in asdict(RunState(best_top1=100.0)).items() if key != "best_loss"
    }
    state = RunState(**older)
    assert not state.take_best((99.0, 0.1))
    assert state.take_best((100.0, 2.0))
    assert (state.best_top1, state.best_loss) == (100.0, 2.0)


def test_a_loss_that_is_not_a_number_can_be_stored():
    state = RunState()
    assert state.take_best((10.0, math.nan))
    assert (state.best_top1, state.best_loss) == (10.0, None)
