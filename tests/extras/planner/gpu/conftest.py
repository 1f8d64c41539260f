from __future__ import annotations

from pathlib import Path

import pytest
import torch

WITHOUT = "needs a GPU: `make gpu-check` on a machine that has one tries all of it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests in this folder on a machine without a GPU, and run the GPU check only once."""
    gpu_items = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in gpu_items:
        item.add_marker(pytest.mark.gpu)
        if torch.cuda.device_count() == 0:
            item.add_marker(pytest.mark.skip(reason=WITHOUT))
