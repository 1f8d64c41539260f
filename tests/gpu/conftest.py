"""Where there is a GPU: the marker, and a word where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

WITHOUT = "needs a GPU: `make gpu-check` on a machine that has one tries all of it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Asking for the GPU here, and not in each test, costs a machine without one nothing more."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if torch.cuda.device_count() == 0:
            item.add_marker(pytest.mark.skip(reason=WITHOUT))
