"""Test a run in an emulated Google Cloud Storage (`pip install gcsfs gcp-storage-emulator`).

The test is skipped if the emulator is not installed. The emulator does not support conditional
writes.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import TINY, Background, final_state, run, run_here, write_config

STEPS = 12


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
    # Prevent gcsfs from using gRPC.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield "gs://bucket"
    server.stop()


@pytest.mark.full
def test_a_killed_run_resumes_on_an_empty_machine_to_the_same_bits(
    bucket: str, tmp_path: Path, shards: Path
):
    config = write_config(tmp_path, shards, steps=STEPS)
    run_here("launch/train.py", "--config", config, *TINY, f"run.dir={tmp_path / 'whole'}")

    def words(local: Path) -> list[str]:
        return [f"run.dir={bucket}/runs/x", f"run.local_dir={local}", "run.lease_s=2"]

    one = tmp_path / "one"
    first = Background(config, one, *words(one), ranks=0, cold=True)
    first.wait_for_checkpoint(6)
    first.kill_all()
    shutil.rmtree(one)
    two = tmp_path / "two"
    done = run("launch/train.py", "--config", config, *TINY, *words(two), cold=True)
    assert done.returncode == 0, done.stderr
    assert "resumed at step " in done.stderr
    assert final_state(two, STEPS) == final_state(tmp_path / "whole", STEPS)
    done = run("launch/eval.py", f"{bucket}/runs/x", cold=True)
    assert "23 images" in done.stdout, done.stderr


@pytest.mark.parametrize("script", ["train", "job"])
def test_a_bucket_that_does_not_exist_is_refused(
    script: str, bucket: str, tmp_path: Path, shards: Path
):
    config = write_config(tmp_path, shards, steps=STEPS)
    arguments = [f"run.dir={bucket}-of-nobody/runs/x", f"run.local_dir={tmp_path / 'local'}"]
    done = run(f"launch/{script}.py", "--config", config, *TINY, *arguments, cold=True)
    assert done.returncode == 2, done.stderr
    assert f"error: {bucket}-of-nobody/runs/x: " in done.stderr
    assert "the bucket does not exist" in done.stderr
