"""Test that each row of the error table has exactly one scenario."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

from error_rows import TRAINING_ROWS


def test_every_scenario_has_a_row_and_every_row_a_scenario():
    listed = Counter(row.what for row in TRAINING_ROWS)
    files = Path(__file__).parent.glob("test_*_errors.py")
    provoked = Counter(
        problem for file in files for problem in runpy.run_path(str(file))["scenario"].of
    )
    assert max(listed.values()) == max(provoked.values()) == 1
    assert listed == provoked
