"""Limit the launches and bytes of a compiled step, so that an additional kernel or copy is noticed.

`benchmarks/step_bytes.py` compares full-size models with timm's. If a change saves launches or
bytes, lower the limits in this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
COUNTING = "tests/fake_gpu/counting.py"
SETTINGS = (
    *("model.depth=3", "train.compile=true"),
    *("data.global_batch_size=256", "data.micro_batch_size=256"),
)
LAUNCHES = 359
GIGABYTES = 34.64


def count(rehearse: Any, folder: Path, *settings: str, **options: Any) -> tuple[int, float]:
    """Return a step's launches, and the gigabytes that its blocks, stem, head and loss move."""
    path = folder / "count.json"
    done = rehearse(COUNTING, path, "vit_b16", *SETTINGS, *settings, **options)
    assert done.returncode == 0, done.stderr
    counts = json.loads(path.read_text())
    causes = counts["causes"]
    return counts["launches"], sum(cause["bytes"] for cause in causes.values()) / 1e9


def test_a_step_of_three_blocks(rehearse, tmp_path):
    launches, gigabytes = count(rehearse, tmp_path)
    assert launches <= LAUNCHES
    assert gigabytes == pytest.approx(GIGABYTES, abs=0.01)


@pytest.mark.full
def test_a_copy_in_each_block_is_noticed(rehearse, tmp_path):
    launches, gigabytes = count(rehearse, tmp_path, fault="a copy in each block")
    assert launches > LAUNCHES
    # A copy of bf16 tokens reads and writes 77 MB in each of the forward and backward passes.
    assert gigabytes > GIGABYTES + 3 * 0.15
