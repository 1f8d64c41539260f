"""Test that a run that is interrupted in a given phase and then resumed produces results that are
bit-identical to those of an uninterrupted run.

tests/faults/soak.py interrupts hundreds of runs in the same way.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from extras.deleted_extras import needs
from faults.kills import Whole, broken_and_continued
from faults.phases import PHASES
from servers import S3Server

NUMBERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)
EXTRAS = {"report": ["report"], "upload": ["remote_runs"]}
"""Maps each phase to the extras that it requires."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"), shards)


@pytest.mark.full
@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=needs(*EXTRAS.get(phase, ()))) for phase in PHASES]
)
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_a_run_broken_in_any_phase_resumes_to_the_same_bits(whole, tmp_path, phase, number):
    with S3Server() as s3:
        broken = broken_and_continued(
            whole, tmp_path, phase, number, random.Random(f"{phase} {number}"), s3, ranks=2
        )
    assert not broken.faults


def test_reports_how_metrics_differ_from_the_plan(whole, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "start", "step": 0}\n{"kind": "train", "step": 2}\n'
        '{"kind": "epoch", "step": 5, "first_batch": 0, "last_batch": 4, "exact": true,'
        ' "sample_checksum": "0123456789abcdef"}\n'
    )
    (tmp_path / ".config.yaml.host.0.tmp").touch()
    steps, evaluations, checksum, left = whole.faults_of(tmp_path)
    assert steps == "steps of the record: [2]"
    assert evaluations == "evaluations of the record: []"
    assert f"by brute force {whole.checksum(0, 4)}" in checksum
    assert left.startswith("left over: ")


@pytest.mark.parametrize("script", ["soak.py", pytest.param("fuzz.py", marks=pytest.mark.full)])
def test_make_can_import_all_modules_of_a_script(script, tmp_path):
    """In a new environment, the project's modules can be imported only after the project has been
    installed."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [sys.executable, Path(__file__).with_name(script), "--help"]
    process = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
