"""Test that files never refer to data that a power cut has destroyed.

A power cut destroys all data that has not been flushed to disk, so every file must be flushed
before another file refers to it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from processes import TINY, run_here


class Disk:
    """A simulated disk that loses all unflushed data in a power cut.

    A file contains the bytes of its last fsync. A folder entry exists only if the folder was
    flushed after the entry last changed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path):
        self.run_dir = run_dir
        self.forced: dict[int, bytes] = {}
        self.pending = set[Path]()
        self.checkpoints: list[int] = []
        for function in (self.fsync, self.replace):
            name = function.__name__
            monkeypatch.setattr(self, f"_{name}", getattr(os, name), raising=False)
            monkeypatch.setattr(os, name, function)

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)  # type: ignore[attr-defined]
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.pending.discard(path)
        if path.is_file():
            self.forced[path.stat().st_ino] = path.read_bytes()

    def replace(self, source: Path | str, target: Path | str) -> None:
        source, target = Path(source), Path(target)
        if not source.is_symlink() and target.is_relative_to(self.run_dir):
            for path in source.iterdir() if source.is_dir() else [source]:
                assert self.is_forced(path), f"{path} is renamed before it is flushed"
            if source.is_dir():
                assert source not in self.pending, "a power cut could lose this folder's entries"
                self.look_at_record(int(target.name.removeprefix("step_")))
            elif target.name == "latest":
                assert target.parent not in self.pending, (
                    "a power cut could lose a file that another one refers to"
                )
            self.pending.add(target.parent)
        self._replace(source, target)  # type: ignore[attr-defined]

    def is_forced(self, path: Path) -> bool:
        return self.forced.get(path.stat().st_ino) == path.read_bytes()

    def look_at_record(self, step: int) -> None:
        self.checkpoints.append(step)
        forced = self.forced.get((self.run_dir / "metrics.jsonl").stat().st_ino, b"").splitlines()
        lines = [json.loads(line) for line in forced]
        trained = [line["step"] for line in lines if line["kind"] == "train"]
        assert trained[:step] == [*range(1, step + 1)], (
            "metrics before a checkpoint must be flushed, because no run repeats their steps"
        )
        # A slow save may end after the evaluation at step 6.
        evaluated = [line["step"] for line in lines if line["kind"] == "eval"]
        assert evaluated[: step // 6] == [6][: step // 6]
        for path in (self.run_dir / "samples").iterdir():
            assert self.is_forced(path)


@pytest.mark.skipif(
    not os.path.exists("/proc/self/fd"), reason="needs /proc for the names of open files"
)
def test_files_that_a_checkpoint_refers_to_are_on_the_disk_first(tmp_path, config, monkeypatch):
    disk = Disk(monkeypatch, tmp_path / "run")
    run_here(
        *("launch/train.py", "--config", config, f"run.dir={disk.run_dir}", *TINY), "train.steps=6"
    )
    assert disk.checkpoints == [3, 6]
