"""Test that streams endlessly yield complete samples with their labels, and that runs on streams
are reported as not exact."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import webdataset
from processes import TINY, run
from servers import WebServer

from vit.config.schema import AugmentConfig
from vit.data.decode.crops import decode_views
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.storage import http
from vit.data.storage.opening import open_split
from vit.extras.stream.batches import StreamBatches, open_stream
from vit.system.files import ShardError
from vit.system.retry import RetryPolicy

FORMAT = ImageFormat((16, 16), 3, "bilinear")
PATIENCE = RetryPolicy(0.5, 0.01, 0.05)
WHOLE = AugmentConfig(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), hflip_prob=0.0)


def batches(
    stream: str, *, num_samples=60, workers=0, ranks=1, rank=0, augment=WHOLE, **options
) -> StreamBatches:
    order = make_order(num_samples, 12, seed=3)
    opened = open_stream(stream, num_samples, 3, [], retry=PATIENCE)
    return StreamBatches(
        opened, order, augment, FORMAT, rank=rank, world_size=ranks, num_workers=workers, **options
    )


def read(made: StreamBatches, *, steps=5, workers=0, start=0) -> list:
    with Loader(made, start, start + steps, num_workers=workers) as loader:
        return [batch.clone() for batch in loader]


def tars(shards: Path) -> str:
    return f"{shards}/train-{{00000..00002}}.tar"


@pytest.mark.parametrize(("workers", "ranks"), [(0, 1), (3, 1), (2, 2)])
def test_all_samples_are_read_with_their_own_labels(workers, ranks, shards):
    """One or three readers divide the three shards among themselves. If there are four readers,
    each one reads every fourth sample."""
    seen = Counter()
    for rank in range(ranks):
        for batch in read(
            batches(tars(shards), workers=workers, ranks=ranks, rank=rank),
            steps=15,
            workers=workers,
        ):
            assert batch.images.shape == (12 // ranks, 3, 16, 16)
            assert (batch.weights == 1).all()
            seen.update(zip(batch.ids.tolist(), batch.labels.tolist(), strict=True))
    split = open_split(shards, "train")
    numbers = [
        int.from_bytes(hashlib.blake2b(split.key(i).encode(), digest_size=8).digest()) >> 1
        for i in range(60)
    ]
    assert seen.keys() <= set(zip(numbers, split.index["label"].tolist(), strict=True))
    if not workers:
        assert len(seen) == 60
        assert max(seen.values()) <= 4, (
            "in three epochs of one reader, only samples in the buffer may be delayed"
        )


def test_images_belong_to_the_samples_of_their_keys(shards):
    split = open_split(shards, "train")
    keys = {}
    made = batches(tars(shards))
    for i in range(split.num_samples):
        keys.setdefault(split.index["label"][i], []).append(i)
    for batch in read(made, steps=2):
        for image, label in zip(batch.images, batch.labels.tolist(), strict=True):
            views = [
                decode_views(split.read(i), [(0, 2, 20, 20)], FORMAT.size, FORMAT.interpolation)[0]
                for i in keys[label]
            ]
            near = min((view.float() - image.float()).abs().mean() for view in views)
            assert near < 12, "the image does not match its class"


def test_passes_differ_and_a_later_start_gives_another_pass(shards):
    ids = [
        torch.cat([b.ids for b in read(batches(tars(shards)), steps=5, start=start)]).tolist()
        for start in (0, 0, 5)
    ]
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]
    long = torch.cat([b.ids for b in read(batches(tars(shards)), steps=10)])
    assert long[:60].tolist() != long[60:].tolist()


@pytest.mark.parametrize("kind", ["http", "pipe", "several"])
def test_streams_from_the_web_without_ranges_and_from_commands_are_read(kind, shards):
    with WebServer({f"/{path.name}": path.read_bytes() for path in shards.glob("*.tar")}) as server:
        server.ranges = False
        streams = {
            "http": f"{server.url}/train-{{00000..00002}}.tar",
            "pipe": f"pipe:cat {tars(shards)}",
            "several": f"{shards}/train-00000.tar::pipe:cat {shards}/train-{{00001,00002}}.tar",
        }
        ids = torch.cat(
            [batch.ids for batch in read(batches(streams[kind], workers=2), steps=20, workers=2)]
        )
        assert len(set(ids.tolist())) == 60


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ("pipe:exit 3", "pipe:exit 3: the stream was interrupted"),
        (
            "pipe:head -c 5000 {shards}/train-00000.tar",
            "head -c 5000 .*: the stream was interrupted .*truncated: .* at byte",
        ),
        (
            "pipe:cat {folder}/empty.tar",
            "empty.tar: no samples found, expected tars of <key>.jpg and <key>.cls",
        ),
        ("{folder}/nowhere.tar", "nowhere.tar: the stream was interrupted .*No such file"),
        (
            "http://127.0.0.1:9/train.tar",
            (
                r"http://127.0.0.1:9/train.tar: no server listens at this port \(connection"
                r" refused\); correct"
            ),
        ),
        (
            "{folder}/unlabeled.tar",
            (
                "unlabeled.tar: sample 'a' has no .cls with the label .* describe other layouts"
                " with stream.image=SUFFIX"
            ),
        ),
        ("{folder}/labels.tar", "labels.tar: sample 'a': the label is 7, expected 0 to 2"),
        (
            "{folder}/broken.tar",
            ("image 'a' of the stream: .*; set loader.on_bad_image=skip to train without this"),
        ),
    ],
)
def test_an_invalid_stream_is_reported(stream, message, workers, shards, tmp_path):
    image = open_split(shards, "train").read(0)
    write_tar(tmp_path / "empty.tar", {"README": b""})
    write_tar(tmp_path / "unlabeled.tar", {"a.jpg": image})
    write_tar(tmp_path / "labels.tar", {"a.jpg": image, "a.cls": b"7"})
    write_tar(tmp_path / "broken.tar", {"a.jpg": b"no image", "a.cls": b"1"})
    made = batches(stream.format(shards=shards, folder=tmp_path), workers=workers)
    with pytest.raises(ShardError, match=message):
        read(made, steps=1, workers=workers)


@pytest.fixture
def twenty(shards, tmp_path) -> Path:
    """Write a tar of 20 samples, and corrupt copies.

    `<folder>/first.tar` ends before the 11th sample. In `damaged.tar` and `hole.tar`, the header of
    the 11th sample is corrupt.
    """
    image = open_split(shards, "train").read(0)
    path = write_tar(
        tmp_path / "twenty.tar",
        {f"{i:02}.{ext}": data for i in range(20) for ext, data in (("jpg", image), ("cls", b"1"))},
    )
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        cut = tar.getmember("10.jpg").offset
    (tmp_path / "first.tar").write_bytes(data[:cut])
    (tmp_path / "damaged.tar").write_bytes(data[:cut] + b"x" + data[cut + 1 :])
    (tmp_path / "hole.tar").write_bytes(data[:cut] + bytes(512) + data[cut + 512 :])
    (tmp_path / "first.tar.gz").write_bytes(gzip.compress(data[:cut]))
    return path


BROKEN = [
    (
        "{folder}/first.tar",
        r"interrupted \(truncated: a header or the end marker is missing at byte \d+\)",
    ),
    (
        "{folder}/first.tar.gz",
        "first.tar.gz: the stream was interrupted .*the end marker is missing at byte",
    ),
    (
        "pipe:cat {folder}/first.tar",
        "first.tar: the stream was interrupted .*the end marker is missing at byte",
    ),
    (
        "pipe:cat {folder}/first.tar; exit 3",
        r"exit 3: the stream was interrupted \(the command exited with status 3\)",
    ),
    (
        "pipe:cat {folder}/first.tar; sleep 0.2; kill -9 $$",
        "the stream was interrupted .*status -9",
    ),
    (
        "pipe:cat {folder}/twenty.tar; sleep 0.2; exit 3",
        r"exit 3: the stream was interrupted \(the command exited with status 3\)",
    ),
    (
        "{folder}/damaged.tar",
        r"damaged.tar: the stream was interrupted \(damaged: no tar header \(bad checksum\) at byte"
        r" \d+\)",
    ),
    (
        "pipe:cat {folder}/damaged.tar",
        "damaged.tar: the stream was interrupted .*bad checksum.* at byte",
    ),
    (
        "{folder}/hole.tar",
        "hole.tar: the stream was interrupted .*data follow the end marker .* at byte",
    ),
    (
        "pipe:cat {folder}/twenty.tar {folder}/twenty.tar",
        "the stream was interrupted .*or several tars were concatenated",
    ),
]


@pytest.mark.parametrize(("stream", "message"), BROKEN, ids=[stream for stream, _ in BROKEN])
def test_an_incomplete_tar_is_reported(stream, message, twenty):
    with pytest.raises(ShardError, match=message):
        read(batches(stream.format(folder=twenty.parent)))


@pytest.mark.parametrize(
    "kind", ["gz", "bz2", "xz", "gnu tar", "webdataset", "long names", "a mark behind"]
)
def test_complete_tars_of_all_writers_are_read_to_the_end(kind, twenty, tmp_path):
    stream = str(tmp_path / "other.tar")
    folder = tmp_path / "files"
    count = 20
    with tarfile.open(twenty) as tar:
        tar.extractall(folder)
    names = sorted(path.name for path in folder.iterdir())
    if kind == "gnu tar":
        subprocess.run(["tar", "-C", folder, "-cf", stream, *names], check=True)
    elif kind == "webdataset":
        with webdataset.TarWriter(stream) as writer:
            for key in sorted({name[:2] for name in names}):
                writer.write(
                    {"__key__": key, "jpg": (folder / f"{key}.jpg").read_bytes(), "cls": b"1"}
                )
    elif kind == "a mark behind":
        stream = f"pipe:cat {tmp_path}/first.tar && head -c 1024 /dev/zero"
        count = 10
    else:
        with tarfile.open(stream, "w") as tar:
            for name in names:
                tar.add(folder / name, f"{'long/' * 30}{name}")
    ids = torch.cat([batch.ids for batch in read(batches(stream))])
    assert len(set(ids.tolist())) == count


@pytest.mark.parametrize("ranges", [True, False])
def test_each_sample_is_read_once_despite_interrupted_transfers(ranges, twenty, monkeypatch):
    """The server refuses requests, interrupts transfers, and stalls in the middle of a tar. A
    server without support for ranges sends the whole tar again."""
    monkeypatch.setattr(http, "SILENCE_S", 0.2)
    data = twenty.read_bytes()
    with WebServer({"/a.tar": data}) as server:
        server.ranges = ranges
        server.statuses = [503, 500]
        server.cuts = [100, 5000, 0, len(data) // 2]
        made = batches(f"{server.url}/a.tar", num_samples=20)
        samples = list(itertools.islice(made._passes(0, 0), 20))
        requests = list(server.requests)
    assert sorted(sample.key for sample in samples) == [f"{i:02}" for i in range(20)]
    assert all(sample.data == samples[0].data for sample in samples)
    starts = (
        [100, 5100, 5100, 5100 + len(data) // 2] if ranges else [100, 5000, 5000, len(data) // 2]
    )
    assert [byte_range for _, _, byte_range in requests] == [
        None,
        None,
        None,
        *(f"bytes={start}-{len(data) - 1}" for start in starts),
    ]


def test_a_permanent_web_fault_is_reported(twenty):
    with WebServer({"/a.tar": b"no tar"}) as server:
        with pytest.raises(
            ShardError, match=r"b.tar: the stream was interrupted \(no such file on the server\)"
        ):
            read(batches(f"{server.url}/b.tar"))
        server.statuses = [503] * 1000
        with pytest.raises(
            ShardError,
            match=(
                r"a.tar: the server answers 503 Service Unavailable, \d+ times in \d+ s: check the"
                r" address"
            ),
        ):
            read(batches(f"{server.url}/a.tar"))
        server.statuses = []
        server.requests[:] = []
        with pytest.raises(ShardError, match=r"a.tar: the stream was interrupted \("):
            read(batches(f"{server.url}/a.tar"))
        assert len(server.requests) == 1, "a complete but damaged transfer must not be repeated"


def test_bad_images_are_skipped_if_the_settings_say_so(shards, tmp_path):
    image = open_split(shards, "train").read(0)
    path = write_tar(
        tmp_path / "some.tar",
        {
            "a.jpg": b"no image",
            "a.cls": b"1",
            "b.jpg": image[:300],
            "b.cls": b"1",
            "c.jpg": image,
            "c.cls": b"2",
        },
    )
    [batch] = read(batches(str(path), on_bad_image="skip"), steps=1)
    assert {"a", "b"} == set(batch.bad_keys)
    assert ((batch.weights == 1) == (batch.labels == 2)).all()


def test_fewer_samples_than_readers_are_an_error(shards, tmp_path):
    path = write_tar(
        tmp_path / "one.tar", {"a.jpg": open_split(shards, "train").read(0), "a.cls": b"1"}
    )
    with pytest.raises(
        ShardError,
        match=r"1 samples found, .* for each of the 2 readers \(ranks times loader.num_workers\)",
    ):
        # Read so many batches that both workers must prepare at least one.
        read(batches(str(path), workers=2), steps=1000, workers=2)


def test_braces_are_expanded_and_a_missing_package_is_reported(shards, monkeypatch):
    assert open_stream("a-{0..2}.tar::pipe:x {1,2}", 1, 1, []).filenames == [
        "a-0.tar",
        "a-1.tar",
        "a-2.tar",
        "pipe:x 1",
        "pipe:x 2",
    ]
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(ShardError, match=r"pip install webdataset"):
        open_stream("a.tar", 1, 1, [])


@pytest.mark.slow
def test_training_on_a_stream_reports_that_it_is_not_exact_and_evaluates_exactly(
    config, shards, tmp_path
):
    streamed = [f"stream.urls={tars(shards)}", "stream.num_samples=60", "loader.num_workers=1"]
    done = run(
        "launch/train.py", "--config", config, f"run.dir={tmp_path / 'run'}", *TINY, *streamed
    )
    assert done.returncode == 0, done.stderr
    assert (
        "not exact: samples may repeat or be missed, and resuming starts a new pass" in done.stderr
    )
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["exact"] for line in lines if line["kind"] in ("start", "epoch")] == [False] * 4
    assert [line["num_images"] for line in lines if line["kind"] == "eval"] == [23, 23]
    shown = run("launch/train.py", "--config", config, "--print-config", *TINY, *streamed)
    assert "order: not exact" in shown.stdout
