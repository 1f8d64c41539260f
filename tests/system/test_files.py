"""Test that a process never deletes a running process's temporary files, that killed processes'
files are removed, and that a result's parent folder is created."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vit.system.files import (
    check_place,
    link_to,
    remove_leftovers,
    replacing,
    temporary_beside,
    temporary_file,
)

ROOT = Path(__file__).parents[2]
OWN_PIDS = ["unshare", "--pid", "--fork", "--mount-proc"]
"""A command prefix that runs a command in its own process-id namespace. As in containers that use
the host's network, the host name does not change and process ids are small."""


def can_unshare() -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run([*OWN_PIDS, "true"], capture_output=True).returncode
    )


def test_no_two_temporary_names_are_equal(tmp_path):
    assert len({temporary_beside(tmp_path / "a.tar") for _ in range(1000)}) == 1000


@pytest.mark.skipif(not can_unshare(), reason="needs permission to create a process-id namespace")
def test_containers_with_equal_host_names_and_process_ids_leave_each_other_alone(tmp_path):
    writer = f"""
import sys
from pathlib import Path
from vit.system.files import remove_leftovers, replacing
with replacing(Path({str(tmp_path)!r}) / "a.tar") as file:
    file.write(b"whole")
    file.flush()
    print("begun", flush=True)
    sys.stdin.readline()
"""

    processes = [
        subprocess.Popen(
            [*OWN_PIDS, sys.executable, "-c", writer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"

    assert len(list(tmp_path.glob(".a.tar.*.tmp"))) == 2
    subprocess.run(
        [
            *OWN_PIDS,
            sys.executable,
            "-c",
            f"from vit.system.files import *; remove_leftovers(Path({str(tmp_path)!r}))",
        ],
        cwd=ROOT,
    )

    for process in processes:
        process.communicate("\n")
        assert process.returncode == 0
        assert (tmp_path / "a.tar").read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_removes_files_of_killed_processes_and_keeps_files_in_use(tmp_path):
    code = f"""
import os
from pathlib import Path
from vit.system.files import replacing
with replacing(Path({str(tmp_path)!r}) / "a.tar") as file:
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert len(list(tmp_path.iterdir())) == 1
    with temporary_file(tmp_path / "a.tar") as file:
        remove_leftovers(tmp_path, "a.tar")
        assert [str(path) for path in tmp_path.iterdir()] == [file.name]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("before", ["nothing", "the link", "another link", "a file"])
def test_a_link_replaces_whatever_has_its_name(before, tmp_path):
    """If a run was copied by a program that follows links, the copy has a file in place of the
    link."""
    path = tmp_path / "model.safetensors"
    if before == "a file":
        path.touch()
    elif before != "nothing":
        path.symlink_to("last.safetensors" if before == "the link" else "old.safetensors")
    link_to("last.safetensors", path)
    assert path.readlink() == Path("last.safetensors")
    assert list(tmp_path.iterdir()) == [path]


def test_the_folders_of_a_result_are_made_before_it_is_computed(tmp_path):
    check_place(tmp_path / "new" / "deep" / "out.csv")
    assert not list((tmp_path / "new" / "deep").iterdir())


def test_a_failed_write_names_its_file_and_leaves_no_partial_file(tmp_path):
    def fill() -> None:
        with replacing(tmp_path / "a.tar"):
            raise OSError(28, os.strerror(28))

    with pytest.raises(OSError, match="No space left on device") as failed:
        fill()
    assert failed.value.filename == str(tmp_path / "a.tar")
    assert not list(tmp_path.iterdir())
