"""Test the writer in real processes that are killed, are interrupted, run at the same time or fill
the disk."""

import filecmp
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checksums import digests
from prep_place import wait_for_end_of_group
from small_shards import image_bytes

# ---- kills and full disks ------------------------------------------------------------------------


BEHIND_US = ["nice", "-n", "5"]
"""A prefix that lowers the priority of a command, so that a test can stop the command midway."""


@pytest.fixture(scope="module")
def prepare(tmp_path_factory) -> list[str]:
    """Return a command, without --out, that writes 120 training images to 12 shards and 30
    validation images to 3 shards. Each image takes some milliseconds."""
    folder = tmp_path_factory.mktemp("large") / "images"
    for split, each in (("train", 12), ("val", 3)):
        for label in range(10):
            name = f"class{label}"
            (folder / split / name).mkdir(parents=True)
            for number in range(each):
                (folder / split / name / f"{number}.jpg").write_bytes(
                    image_bytes(20 * label + number, size=(400, 400))
                )
    options = ["--num-shards", "12", "--resize-short-side", "300"]
    return [sys.executable, "-m", "data_prep.imagefolder", str(folder), *options]


@pytest.fixture(scope="module")
def undisturbed(prepare, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed") / "root"
    subprocess.run([*prepare, "--out", root, "--workers", "2"], check=True)
    return root


def test_a_dry_run_prints_the_plan_and_writes_nothing(prepare, undisturbed, tmp_path):
    done = subprocess.run(
        [*prepare, "--out", tmp_path / "root", "--dry-run"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert not (tmp_path / "root").exists()
    info = json.loads((undisturbed / "_info.json").read_text())
    for split, described in info["splits"].items():
        assert (
            f"{split}: {described['num_samples']:,} images in {len(described['filenames'])} shards"
            in done.stdout
        )
    size = float(re.search(r"disk: about ([\d.]+) MB", done.stdout)[1]) * 1e6
    assert size == pytest.approx(
        sum(sum(described["shard_bytes"]) for described in info["splits"].values()), rel=0.5
    )


@pytest.mark.parametrize("num_tars", [pytest.param(0, marks=pytest.mark.full), 4])
def test_a_killed_command_is_continued(prepare, undisturbed, tmp_path, num_tars):
    root = tmp_path / "root"
    process = subprocess.Popen(
        [*BEHIND_US, *prepare, "--out", root, "--workers", "2"], start_new_session=True
    )
    while len(list(root.glob("*.tar"))) < num_tars or not list(root.glob(".*.tar.*.tmp")):
        assert process.poll() is None, "the command finished before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # Workers must die with their parent. Otherwise, they would write concurrently with the next
    # run.
    wait_for_end_of_group(process.pid)
    for tar in root.glob("*.tar"):
        assert filecmp.cmp(tar, undisturbed / tar.name, shallow=False), f"{tar.name} is damaged"
    assert not (root / "_info.json").exists()
    again = subprocess.run(
        [*prepare, "--out", root, "--workers", "1"], check=True, capture_output=True, text=True
    )
    assert num_tars == 0 or "that already exist" in again.stdout
    assert digests(root) == digests(undisturbed)


@pytest.mark.parametrize(
    "ranges", [["8-12", "0-3", "4-14"], ["2/3", "0/3", "1/3"]], ids=["overlapping", "equal"]
)
def test_several_processes_write_the_same_files_as_one(prepare, undisturbed, tmp_path, ranges):
    root = tmp_path / "root"
    parts = [
        subprocess.Popen(
            [*prepare, "--out", root, "--workers", "1", "--shards", part], stdout=subprocess.PIPE
        )
        for part in ranges
    ]
    outputs = [part.communicate()[0].decode() for part in parts]
    assert [part.returncode for part in parts] == [0, 0, 0], outputs
    assert any(": complete, 10 classes" in output for output in outputs)
    assert digests(root) == digests(undisturbed)
