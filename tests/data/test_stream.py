"""Streams give whole samples with their own labels, without end, and say that they are not exact."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from processes import TINY, run
from servers import WebServer

from vit.config import AugmentConfig
from vit.data.decode import decode_views
from vit.data.files import ShardError
from vit.data.loader import ImageFormat
from vit.data.order import make_order
from vit.data.shards import open_split
from vit.data.stream import StreamBatches, open_stream
from vit.data.workers import Loader

FORMAT = ImageFormat((16, 16), 3, "bilinear")
WHOLE = AugmentConfig(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), hflip_prob=0.0)


def batches(stream: str, *, num_samples=60, workers=0, ranks=1, rank=0, augment=WHOLE, **options) -> StreamBatches:
    order, opened = make_order(num_samples, 12, seed=3), open_stream(stream, num_samples, 3, [])
    return StreamBatches(opened, order, augment, FORMAT, rank=rank, world_size=ranks, num_workers=workers, **options)


def read(made: StreamBatches, *, steps=5, workers=0, start=0) -> list:
    with Loader(made, start, start + steps, num_workers=workers) as loader:
        return [batch.clone() for batch in loader]


def tars(shards: Path) -> str:
    return f"{shards}/train-{{00000..00002}}.tar"


@pytest.mark.parametrize(("workers", "ranks"), [(0, 1), (3, 1), (2, 2)])
def test_all_samples_come_with_their_own_labels(workers, ranks, shards):
    """3 shards for 1 and 3 readers, and for 4, which take each fourth sample of all."""
    seen = Counter()
    for rank in range(ranks):
        for batch in read(batches(tars(shards), workers=workers, ranks=ranks, rank=rank), steps=15, workers=workers):
            assert batch.images.shape == (12 // ranks, 3, 16, 16)
            assert (batch.weights == 1).all()
            seen.update(zip(batch.ids.tolist(), batch.labels.tolist(), strict=True))
    split = open_split(shards, "train")
    numbers = [int.from_bytes(hashlib.blake2b(split.key(i).encode(), digest_size=8).digest()) >> 1 for i in range(60)]
    assert seen.keys() <= set(zip(numbers, split.index["label"].tolist(), strict=True))
    if not workers:
        assert len(seen) == 60
        assert max(seen.values()) <= 4, "three epochs of one reader: only what waits in the buffer comes too late"


def test_images_are_those_of_the_samples_with_that_key(shards):
    split, keys = open_split(shards, "train"), {}
    made = batches(tars(shards))
    for i in range(split.num_samples):
        keys.setdefault(split.index["label"][i], []).append(i)
    for batch in read(made, steps=2):
        for image, label in zip(batch.images, batch.labels.tolist(), strict=True):
            views = [decode_views(split.read(i), [(0, 2, 20, 20)], FORMAT.size, FORMAT.interpolation)[0] for i in keys[label]]
            near = min((view.float() - image.float()).abs().mean() for view in views)
            assert near < 12, "the image is none of its class"


def test_passes_differ_and_a_later_start_is_another_pass(shards):
    ids = [torch.cat([b.ids for b in read(batches(tars(shards)), steps=5, start=start)]).tolist() for start in (0, 0, 5)]
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]
    long = torch.cat([b.ids for b in read(batches(tars(shards)), steps=10)])
    assert long[:60].tolist() != long[60:].tolist()


@pytest.mark.parametrize("kind", ["http", "pipe", "several"])
def test_streams_over_the_web_without_ranges_and_from_commands(kind, shards):
    with WebServer({f"/{path.name}": path.read_bytes() for path in shards.glob("*.tar")}) as server:
        server.ranges = False
        streams = {
            "http": f"{server.url}/train-{{00000..00002}}.tar",
            "pipe": f"pipe:cat {tars(shards)}",
            "several": f"{shards}/train-00000.tar::pipe:cat {shards}/train-{{00001,00002}}.tar",
        }
        ids = torch.cat([batch.ids for batch in read(batches(streams[kind], workers=2), steps=20, workers=2)])
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
    ("stream", "told"),
    [
        ("pipe:exit 3", "pipe:exit 3: the stream broke"),
        ("pipe:head -c 5000 {shards}/train-00000.tar", "head -c 5000 .*: the stream broke .*end of data"),
        ("pipe:cat {folder}/empty.tar", "empty.tar: no samples came, expected tars of <key>.jpg and <key>.cls"),
        ("{folder}/nowhere.tar", "nowhere.tar: the stream broke .*No such file"),
        ("http://127.0.0.1:9/train.tar", "http://127.0.0.1:9/train.tar: the stream broke"),
        ("{folder}/unlabelled.tar", "unlabelled.tar: sample 'a' has jpg; expected an image .* and a .cls"),
        ("{folder}/labels.tar", "labels.tar: sample 'a': label '7'; expected 0 to 2"),
        ("{folder}/broken.tar", "image 'a' of the stream: .*; data.on_bad_image=skip trains without it"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_stream_is_told(stream, told, workers, shards, tmp_path):
    image = open_split(shards, "train").read(0)
    write_tar(tmp_path / "empty.tar", {"README": b""})
    write_tar(tmp_path / "unlabelled.tar", {"a.jpg": image})
    write_tar(tmp_path / "labels.tar", {"a.jpg": image, "a.cls": b"7"})
    write_tar(tmp_path / "broken.tar", {"a.jpg": b"no image", "a.cls": b"1"})
    made = batches(stream.format(shards=shards, folder=tmp_path), workers=workers)
    with pytest.raises(ShardError, match=told):
        read(made, steps=1, workers=workers)


def test_bad_images_are_skipped_where_that_is_asked_for(shards, tmp_path):
    image = open_split(shards, "train").read(0)
    path = write_tar(
        tmp_path / "some.tar", {"a.jpg": b"no image", "a.cls": b"1", "b.jpg": image[:300], "b.cls": b"1", "c.jpg": image, "c.cls": b"2"}
    )
    [batch] = read(batches(str(path), on_bad_image="skip"), steps=1)
    assert {"a", "b"} == set(batch.bad_keys)
    assert ((batch.weights == 1) == (batch.labels == 2)).all()


def test_fewer_samples_than_readers(shards, tmp_path):
    path = write_tar(tmp_path / "one.tar", {"a.jpg": open_split(shards, "train").read(0), "a.cls": b"1"})
    with pytest.raises(ShardError, match=r"1 samples came, .*; its 2 readers \(ranks times data.num_workers\) need one each"):
        read(batches(str(path), workers=2), steps=2, workers=2)


def test_braces_and_the_package(shards, monkeypatch):
    assert open_stream("a-{0..2}.tar::pipe:x {1,2}", 1, 1, []).filenames == ["a-0.tar", "a-1.tar", "a-2.tar", "pipe:x 1", "pipe:x 2"]
    monkeypatch.setitem(sys.modules, "braceexpand", None)
    with pytest.raises(ShardError, match=r"pip install webdataset"):
        open_stream("a.tar", 1, 1, [])


@pytest.mark.slow
def test_training_on_a_stream_says_that_it_is_not_exact_and_evaluates_exactly(config, shards, tmp_path):
    streamed = ["data.reader=webdataset", f"data.stream={tars(shards)}", "data.num_samples=60", "data.num_workers=1"]
    done = run("launch/train.py", "--config", config, f"run.dir={tmp_path / 'run'}", *TINY, *streamed)
    assert done.returncode == 0, done.stderr
    assert "not exact: samples may repeat or be missed, resume starts a new pass" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["exact"] for line in lines if line["kind"] in ("start", "epoch")] == [False] * 4
    assert [line["num_images"] for line in lines if line["kind"] == "eval"] == [23, 23]
    shown = run("launch/train.py", "--config", config, "--print-config", *TINY, *streamed)
    assert "order: not exact" in shown.stdout
