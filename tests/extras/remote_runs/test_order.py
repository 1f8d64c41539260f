"""Test the order of writes to a run at a URL.

A kill between any two operations must leave the newest checkpoint complete, with all metrics up to
its step.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

from processes import TINY, run_here

from vit.data.storage.object_store import ObjectStore


def assert_whole(bucket: Path) -> None:
    """Assert that each listed checkpoint has its tensors and the metrics of all steps before it."""
    record = b"".join(path.read_bytes() for path in sorted(bucket.glob("record/part_*")))
    lines = [json.loads(line) for line in record.splitlines()]
    trained = {line["step"] for line in lines if line["kind"] == "train"}
    for path in bucket.glob("checkpoints/step_*/checkpoint.json"):
        info = json.loads(path.read_text())
        for name, expected in info["files"].items():
            content = (path.parent / name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == expected["sha256"]
        assert trained >= set(range(1, info["step"] + 1))


def test_the_run_is_complete_between_any_two_operations(tmp_path, config, monkeypatch):
    bucket = tmp_path / "bucket"
    done = list[str]()

    def watched(name: str) -> None:
        real = getattr(ObjectStore, name)

        def operate(store: ObjectStore, *arguments, **options):
            assert_whole(bucket)
            done.append(f"{name} {arguments[0] if name != 'upload' else arguments[1]}")
            return real(store, *arguments, **options)

        monkeypatch.setattr(ObjectStore, name, operate)

    for name in ("upload", "write", "remove"):
        watched(name)
    run_here(
        *("launch/train.py", "--config", config, *TINY, "train.steps=6", "checkpoint.keep_last=1"),
        *(f"run.dir=file://{bucket}", f"run.local_dir={tmp_path / 'here'}", "run.lease_s=600"),
    )
    assert_whole(bucket)
    places = [number for number, each in enumerate(done) if each.endswith("/checkpoint.json")]
    assert [done[number].split()[0] for number in places] == ["upload", "upload", "remove"]
    for before, now in pairwise(done):
        begins_save = now.startswith("upload") and before.startswith(
            ("remove", "write checkpoints")
        )
        assert not begins_save, (
            "the lease must be confirmed first, because another job may hold the run"
        )
        if now.startswith("upload checkpoints") and now.endswith(".json"):
            assert before == "write lease.json", "the previous upload may have outlasted the lease"
