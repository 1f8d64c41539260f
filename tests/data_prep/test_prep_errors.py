"""Test the section "Data preparation" of errors/rows.yaml. The commands must print the text of each
row when they run on files in the real format.

The first cell of a row names its scenario. The test checks the output, the exit status and the
remaining files. A problem found before the first shard is written must leave no files. A later
problem must leave complete shards. If the row contains "continues", the same command runs again.
Commands run in this process unless they need a signal, another user or a second call.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import fsspec  # noqa: F401 (its registry is emptied)
import numpy as np
import pytest
from error_rows import WITHOUT_PRIVILEGES, Row, leave_free, pattern_of, rows, small_disk, snapshot
from fake_imagenet import make_fake, tar_of, write_train_tar
from prep_place import (
    BEGUN,
    SCENARIOS,
    TRAIN_TAR,
    Place,
    command,
    images,
    official,
    scenario,
    wait_for_end_of_group,
    whole_shards_only,
)
from prep_sources import Change, Files, below, edit, without, write
from prep_wrong_sources import Wrong, add_rows, filled
from proc import children, command_line
from processes import REPOSITORY, environment, jpeg
from servers import S3Server, WebServer

from data_prep import imagefolder
from vit.data.shards.index_file import left_out
from vit.data.shards.tar import scan_tar

# ---- the output folder ---------------------------------------------------------------------------


@scenario("a folder with shards of unknown origin")
def _(place):
    place.out.mkdir()
    (place.out / "train-00000.tar").write_bytes(tar_of([("a.jpg", b"x"), ("a.cls", b"0")]))
    place.prepare("imagefolder", images(place))


@scenario("a folder that holds another data set, or was written with other options")
def _(place):
    place.prepare("imagefolder", images(place))
    place.prepare("imagefolder", place.folder / "images", "--seed", 1, "--resize-short-side", 16)


@scenario("images that were added since")
def _(place):
    folder = images(place)
    place.prepare("imagefolder", folder)
    shutil.copy(folder / "cat" / "0.jpg", folder / "cat" / "new.jpg")
    place.prepare("imagefolder", folder, alone=True)


@scenario("another archive than the one with which the folder was begun")
def _(place):
    place.prepare("imagenet", official(place), "--partial", "--shards", "0-2")
    write_train_tar(
        make_fake(num_classes=10, train_per_class=5, seed=1), place.folder / "downloads" / TRAIN_TAR
    )
    place.prepare("imagenet", place.folder / "downloads", "--partial")


@scenario("two commands with other options into one folder: the first one goes on", begun=True)
def _(place):
    first = Background(place)
    first.wait_for("train-*.json", ".train-*.tar.*.tmp")
    place.prepare("imagefolder", first.source, "--seed", 1)
    assert first.process.wait(timeout=240) == 0
    whole_shards_only(place.out, complete=True)


@scenario("no permission to write the shards")
def _(place):
    (place.folder / "mine").mkdir(mode=0o555)
    place.out = place.folder / "mine" / "shards"
    place.prepare("imagefolder", images(place), prefix=WITHOUT_PRIVILEGES)


@scenario("a disk that is mounted read-only")
def _(place):
    folder = images(place)
    with small_disk(place.folder / "disk", "ro") as disk:
        place.out = disk / "shards"
        place.prepare("imagefolder", folder)


@scenario("the disk fills up: complete shards stay, the same command continues", begun=True)
def _(place):
    folder = images(place, each=60, side=100)
    with small_disk(place.folder / "disk") as disk:
        filler = leave_free(disk, 900)
        place.out = disk / "shards"
        place.prepare("imagefolder", folder, "--num-shards", 6)
        assert list(place.out.glob("*.tar")), "the shards that fitted on the disk must remain"
        whole_shards_only(place.out)
        filler.unlink()
        place.continues()


@scenario("a URL to which nothing can be written")
def _(place):
    place.run("imagefolder", images(place), "--out", "https://example.org/shards")


@scenario("a URL whose package is not installed")
def _(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "s3fs", None)
        # An earlier test in this process may have imported the s3 file system.
        patch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
        place.run("imagefolder", images(place), "--out", "s3://bucket/shards")


@scenario("`--shards` out of range")
def _(place):
    place.prepare("imagefolder", images(place), "--shards", "5-12")


@scenario("more shards than images")
def _(place):
    place.prepare("imagefolder", images(place), "--num-shards", 30)


@scenario("a value that is none")
def _(place):
    place.prepare("imagefolder", images(place), "--jpeg-quality", 101)


@scenario("`--restart-markers auto` without the C part")
def _(place):
    place.prepare(
        "imagefolder", images(place), "--restart-markers", "auto", prefix=("env", "VIT_NATIVE=0")
    )


# ---- images, and events during the work ----------------------------------------------------------


@scenario("an unreadable image: it is left out, reported and listed", begun=True)
def _(place):
    (images(place, each=60) / "cat" / "7.jpg").write_bytes(b"no image")
    place.prepare("imagefolder", place.folder / "images", "--num-shards", 2)
    [entry] = map(json.loads, (place.out / "quarantine.jsonl").read_text().splitlines())
    assert entry["key"] == "cat_7"
    assert re.fullmatch(
        r"not an image; expected one of JPEG, .*, but the data begin with b'no image'",
        entry["reason"],
    )


@scenario(
    "too many unreadable images: complete shards stay; after a repair, the same command continues",
    begun=True,
)
def _(place):
    folder = images(place)
    names = [f"{name}/{number}.jpg" for name in ("cat", "dog") for number in (3, 5, 8)]
    for name in names:
        shutil.move(folder / name, place.folder / name.replace("/", "_"))
        (folder / name).write_bytes(b"no image")
    place.prepare("imagefolder", folder, "--num-shards", 2)
    for name in names:
        shutil.move(place.folder / name.replace("/", "_"), folder / name)
    place.continues()


@scenario("all images of a shard are unreadable", begun=True)
def _(place):
    folder = images(place)
    for path in folder.glob("cat/*.jpg"):
        path.write_bytes(b"no image")
    place.prepare("imagefolder", folder, "--max-unreadable", 0.9, "--num-shards", 20)


class Background:
    """A command that takes a while to write shards of large images with two workers."""

    def __init__(self, place: Place):
        self.place = place
        self.source = place.folder / "photos"
        for name, number in itertools.product(("cat", "dog"), range(10)):
            path = self.source / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photograph())
        place.before = snapshot(place.folder)
        arguments = [
            self.source,
            "--resize-short-side",
            800,
            "--num-shards",
            10,
            "--workers",
            2,
            "--out",
            place.out,
        ]
        self.line = [*command("imagefolder"), *map(str, arguments)]
        piped = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        # The command must not finish before the test sees its files, even on a busy machine.
        self.process = subprocess.Popen(
            ["nice", "-n", "5", *self.line],
            cwd=REPOSITORY,
            env=environment(),
            text=True,
            start_new_session=True,
            **piped,
        )

    def wait_for(self, *patterns: str) -> None:
        """Wait until each pattern matches an existing file, for example a complete shard and a
        shard that is being written."""
        while not all(any(self.place.out.glob(pattern)) for pattern in patterns):
            assert self.process.poll() is None, f"ended too early: {self.process.communicate()[1]}"
            time.sleep(0.001)

    def end(self) -> None:
        self.place.stdout, self.place.stderr = "", self.process.communicate(timeout=240)[1]
        self.place.status = self.process.returncode
        self.place.after = snapshot(self.place.folder)

    def again(self) -> None:
        done = subprocess.run(
            self.line,
            cwd=REPOSITORY,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr


@functools.cache
def photograph() -> bytes:
    return jpeg(np.full((1000, 1000, 3), 90, np.uint8))


def continues(background: Background) -> None:
    background.end()
    wait_for_end_of_group(background.process.pid)
    whole_shards_only(background.place.out)
    background.again()
    whole_shards_only(background.place.out, complete=True)


@scenario("Ctrl-C", begun=True)
def _(place):
    """A terminal sends the signal to all processes. In this scenario, the workers have just begun
    to start."""
    background = Background(place)
    background.wait_for("_writing.json")
    time.sleep(0.1)
    os.killpg(background.process.pid, signal.SIGINT)
    continues(background)


@scenario("SIGTERM, as batch systems send it", begun=True)
def _(place):
    background = Background(place)
    background.wait_for("train-*.json", ".train-*.tar.*.tmp")
    background.process.send_signal(signal.SIGTERM)
    continues(background)


@scenario("a worker process was killed, which Linux does when memory runs out", begun=True)
def _(place):
    if sys.platform != "linux":
        pytest.skip("finds the worker in /proc")
    background = Background(place)
    background.wait_for("train-*.json", ".train-*.tar.*.tmp")
    os.kill(
        next(
            child
            for child in children(background.process.pid)
            if "spawn_main" in command_line(child)
        ),
        signal.SIGKILL,
    )
    background.end()
    # Sidecars are written last. The next command removes the files that the killed worker has left
    # behind.
    for sidecar in place.out.glob("train-*.json"):
        assert (
            len(
                scan_tar(
                    sidecar.with_suffix(".tar"), left_out=left_out(sidecar.with_suffix(".tar"))
                )
            )
            == json.loads(sidecar.read_text())["num_samples"]
        )
    background.again()
    whole_shards_only(place.out, complete=True)


# ---- index ---------------------------------------------------------------------------------------
IMAGE = jpeg(np.zeros((8, 8, 3), np.uint8))
WITH_LABEL = {"a.jpg": IMAGE, "a.cls": b"0"}


def shards(members: Files = WITH_LABEL, name: str = "train-00000.tar", **more: bytes) -> Any:
    """Return a function that returns a folder with a shard and other files."""
    files = {f"out/{name}": tar_of(members.items())} | below("out/", more)
    return lambda: files


index = partial(Wrong, "index", at="out")
add_rows(
    {
        "a folder without tars": index(lambda: {"out/": b""}),
        "a folder of compressed tars": index(lambda: {"out/train-0.tar.gz": b""}),
        "image and label of a sample that are not neighbors in the tar": index(
            shards({"a.jpg": IMAGE, "b.jpg": IMAGE, "a.cls": b"0", "b.cls": b"1"})
        ),
        "no split in a shard's name": index(shards(name="00000.tar")),
        "keys with dots": index(
            shards({f"a.{n}.{suffix}": IMAGE for n in range(3000) for suffix in ("jpg", "cls")})
        ),
        "samples without a label": index(shards({"a.jpg": IMAGE, "a.txt": b"a cat"})),
        "image and label under other names": index(
            shards({"a.image.jpg": IMAGE, "a.json": b'{"label": 3}'})
        ),
        "labels that are names": index(shards({"a.jpg": IMAGE, "a.cls": b"cat"})),
        "a label that would make more classes than there are samples": index(
            shards({"a.jpg": IMAGE, "a.cls": b"999999999"}), begun=True
        ),
        "samples that do not fit, more than may be left out": index(
            shards({**WITH_LABEL, "b.jpg": b"", "b.cls": b"0"}),
            flags=("--max-unreadable", "0"),
            begun=True,
        ),
        "labels beyond the class names": index(
            lambda: shards({"a.jpg": IMAGE, "a.cls": b"3"})() | {"names.txt": b"cat\ndog\n"},
            flags=("--classes", "{folder}/names.txt"),
            begun=True,
        ),
        "a shard to index is cut off": index(
            lambda: {name: data[:700] for name, data in shards()().items()}
        ),
        "the folder of a writer that has not finished": index(
            shards(**{"_writing.json": b'{"source": "imagefolder"}'})
        ),
    }
)


@scenario("an index of other members than before")
def _(place):
    write(shards()(), place.folder)
    place.run("index", place.out, "--workers", 1)
    place.run("index", place.out, "--label", "json:label", "--workers", 1)


@scenario("a folder on the web without `_info.json`")
def _(place):
    with WebServer({}) as server:
        place.run("index", f"{server.url}/shards", "--out", place.folder / "index")


@scenario("shards on the web and no folder for their index")
def _(place):
    with WebServer({}) as server:
        place.run("index", f"{server.url}/train-{{0000..0001}}.tar")


@scenario("a bucket in which one may not write")
def _(place):
    with S3Server() as server:
        bucket = server.new_bucket()
        with server.only("s3:ListBucket", "s3:GetObject"):
            place.run("index", bucket)


@scenario("a shard on the web that needs a login")
def _(place):
    with WebServer({"/train-0000.tar": b"x"}) as server:
        server.statuses = [403]
        place.run("index", f"{server.url}/train-0000.tar", "--out", place.folder / "index")


# ---- verify --------------------------------------------------------------------------------------


@functools.cache
def finished() -> Files:
    """Return a small dataset."""
    with tempfile.TemporaryDirectory() as folder:
        write(filled("cat", "dog")(), Path(folder))
        line = [f"{folder}/in", "--out", f"{folder}/out", "--num-shards", "2", "--workers", "1"]
        assert imagefolder.main([*line, "--val-fraction", "0"]) == 0
        return {f"out/{path.name}": path.read_bytes() for path in Path(folder, "out").iterdir()}


def verify(change: Change) -> Wrong:
    return Wrong("verify", lambda: change(finished()), at="out")


LAST = "train-00001.tar"
add_rows(
    {
        "a shard was deleted": verify(without(LAST)),
        "a byte was changed": verify(
            edit(LAST, lambda data: data[:700] + bytes([data[700] ^ 1]) + data[701:])
        ),
        "a shard was cut off": verify(edit(LAST, lambda data: data[:5000])),
        "a shard was replaced by another of its size": verify(
            lambda files: files | {"out/train-00000.tar": files[f"out/{LAST}"]}
        ),
        "`_info.json` is missing": verify(without("_info.json")),
        "a data set that is not finished": verify(
            lambda files: (
                without("_info.json")(files) | {"out/_writing.json": files["out/_info.json"]}
            )
        ),
        "class names that were altered by hand": verify(
            edit("_info.json", lambda data: data.replace(b'"cat"', b'"cad"'))
        ),
    }
)


@scenario("a data set at a URL that needs a login")
def _(place):
    place.run("verify", "s3://bucket/shards")


# ---- the table and its scenarios -----------------------------------------------------------------


ROWS = rows("Data preparation")


@pytest.mark.parametrize("row", [pytest.param(row, id=row.what) for row in ROWS])
def test_the_command_prints_the_row(row: Row, place: Place):
    assert row.what in SCENARIOS, "this row has no scenario"
    SCENARIOS[row.what](place)
    is_error = row.printed.startswith("error: ")
    output = place.stderr if is_error else place.stdout + place.stderr
    assert place.status == row.status, place.stdout + place.stderr
    assert re.search(f"^{pattern_of(row.printed)}$", output, re.MULTILINE), (
        f"expected\n{row.printed}\nbut this was printed:\n{output}"
    )
    assert "Traceback" not in place.stderr
    if is_error:
        assert len(re.findall("^error: ", output, re.MULTILINE)) == 1, output
        assert re.search(f"^{pattern_of(row.printed)}\\s*\\Z", output, re.MULTILINE), (
            f"more was printed after it:\n{output}"
        )
    if row.what not in BEGUN:
        assert place.after == place.before, "files were written or changed"
        return
    changed = {
        name
        for name in place.before.keys() | place.after.keys()
        if place.before.get(name) != place.after.get(name)
    }
    assert all((place.folder / name).is_relative_to(place.out) for name in changed), (
        "files outside the output folder have changed"
    )
    whole_shards_only(place.out)


def test_every_scenario_has_a_row_and_every_row_a_scenario():
    listed = [row.what for row in ROWS]
    assert len(set(listed)) == len(listed)
    assert set(listed) == set(SCENARIOS)
