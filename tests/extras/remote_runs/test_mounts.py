"""Test the note that is printed if the kernel's mount list shows that the run folder is on a
mounted bucket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vit.run_folder.lock import mount_note


@pytest.mark.parametrize(
    ("kind", "is_told"), [("fuse.gcsfuse", True), ("ext4", False), ("fuse.juicefs", False)]
)
def test_only_a_mounted_bucket_gets_a_note(tmp_path: Path, kind, is_told):
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.parent.mkdir(parents=True)
    mounts.write_text(f"36 35 {number} / / rw,noatime - {kind} bucket rw\n")
    note = mount_note(tmp_path, tmp_path)
    assert (f"it is mounted ({kind}): use the URL of the bucket" in note) == is_told
    assert (f"run.dir=file://{tmp_path}" in note) == is_told
