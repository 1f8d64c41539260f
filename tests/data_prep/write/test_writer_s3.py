"""Test the writer on a real S3 server. The stored bytes must equal those in a folder, even after
kills during uploads."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checksums import digest, digests
from processes import jpeg
from servers import S3Server

from data_prep import imagefolder

OPTIONS = ["--num-shards", "6", "--resize-short-side", "300", "--workers", "2"]


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Write 60 training images and 20 validation images of ten classes. Each image takes some
    milliseconds to prepare."""
    folder = tmp_path_factory.mktemp("large") / "images"
    for split, each in (("train", 6), ("val", 2)):
        for number in range(10 * each):
            path = folder / split / f"class{number % 10}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(np.full((400, 400, 3), 3 * number, np.uint8)))
    return folder


def prepare(images: Path, out: Path | str, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "data_prep.imagefolder",
        str(images),
        *OPTIONS,
        "--out",
        str(out),
        *more,
    ]


@pytest.fixture(scope="module")
def s3():
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def local(images, tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("local") / "root"
    subprocess.run(prepare(images, root), check=True)
    return digests(root)


def found(s3: S3Server, bucket: str) -> dict[str, str]:
    """Return the digests of the bucket's objects by name. The names are relative to the root
    folder, as in `local`."""
    objects = s3.objects(bucket).items()
    return {key.removeprefix("root/"): digest(data) for key, data in objects}


@pytest.mark.full
def test_a_store_equals_a_folder_after_any_kill(s3, images, local, tmp_path):
    bucket = s3.new_bucket()
    moments = random.Random(0)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for _ in range(2):
        process = subprocess.Popen(
            prepare(images, f"{bucket}/root"),
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )
        time.sleep(moments.uniform(0.5, 3))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for name, content in found(s3, bucket).items():
            until_the_end = name == "_writing.json" or name.endswith(".rows.npy")
            assert until_the_end or name.startswith(".writable") or content == local[name], (
                f"{name}: the object is partial or has different content"
            )
    done = subprocess.run(
        prepare(images, f"{bucket}/root"),
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    # A fast machine may finish before the second kill.
    assert re.search("complete, 10 classes|already complete", done.stdout)
    objects = found(s3, bucket).items()
    assert {name: content for name, content in objects if not name.startswith(".writable")} == local
    assert list(tmp_path.iterdir()) == [], "temporary files of killed processes remain"


def test_parts_written_to_a_store_form_one_dataset(s3, images, local, tmp_path):
    bucket = s3.new_bucket()
    parts = [
        subprocess.Popen(
            prepare(images, f"{bucket}/root", "--shards", part), stdout=subprocess.PIPE, text=True
        )
        for part in ("0/2", "1/2")
    ]
    printed = [part.communicate()[0] for part in parts]
    assert [part.returncode for part in parts] == [0, 0]
    assert any("complete, 10 classes" in text for text in printed), printed
    assert found(s3, bucket) == local


def test_the_plan_of_a_store_is_in_the_messages(s3, images, capsys):
    bucket = s3.new_bucket()
    assert imagefolder.main([str(images), *OPTIONS, "--out", f"{bucket}/root", "--dry-run"]) == 0
    assert f"nothing was written to {bucket}/root" in capsys.readouterr().out
    assert s3.objects(bucket) == {}
