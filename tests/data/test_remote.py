"""Shards at a URL give what the same shards in a folder give, whatever server and network do, or an error that says what is wrong."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from error_rows import leave_free, small_disk
from fsspec.registry import _registry
from servers import S3Server, WebServer

from data_prep import index
from vit.config import AugmentConfig, EvalConfig
from vit.data import remote, storage
from vit.data.block_cache import GIB, BlockCache
from vit.data.files import ShardError
from vit.data.loader import EvalBatches, ImageFormat, TrainBatches
from vit.data.order import make_order
from vit.data.shards import open_split
from vit.data.workers import Loader

FORMAT = ImageFormat((16, 16), 3, "bilinear")


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    """Blocks of 4 samples and not of 4,096; no waiting where nothing is learnt by it."""
    monkeypatch.setattr(storage, "BLOCK_BYTES", 16_000)
    monkeypatch.setattr(remote, "PAUSES_S", (0.01, 0.02, 0.05, 0.1, 0.2))


@pytest.fixture
def web(shards):
    with WebServer({f"/set/{path.name}": path.read_bytes() for path in shards.iterdir() if path.is_file()}) as server:
        yield server


@pytest.fixture(scope="module")
def s3():
    with S3Server() as server:
        yield server


@pytest.fixture
def url(web) -> str:
    return f"{web.url}/set"


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def samples(split) -> list[tuple[str, bytes]]:
    return [(split.key(i), split.read(i)) for i in range(split.num_samples)]


def parts_asked(web) -> list[tuple[str, str]]:
    """(shard, range) of the requests for blocks."""
    return [(path, wanted) for _, path, wanted in web.requests if path.endswith(".tar") and wanted != "bytes=0-0"]


def upload(shards: Path, url: str) -> str:
    fs, place = fsspec.core.url_to_fs(url)
    for path in shards.iterdir():
        if path.is_file():
            fs.pipe_file(f"{place}/set/{path.name}", path.read_bytes())
    return f"{url}/set"


# ---- the same samples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["http", "s3", "memory", "file"])
def test_samples_keys_and_labels_are_those_of_the_folder(kind, shards, cache, request):
    if kind == "http":
        root = request.getfixturevalue("url")
    elif kind == "file":
        root = f"file://{shards}"
    else:
        root = upload(shards, request.getfixturevalue("s3").new_bucket() if kind == "s3" else "memory://remote")
    for name in ("train", "val"):
        here, there = open_split(shards, name), open_split(root + "/", name, cache)
        assert samples(there) == samples(here)
        assert (there.num_classes, there.class_names) == (here.num_classes, here.class_names)
        assert (there.index == here.index).all()
    assert any(cache.rglob("*.block")) == (kind != "file"), "file:// is a folder like any other, and needs no copy"


def test_long_keys_stand_in_headers_of_their_own(tmp_path, shards, cache):
    """Names above 100 bytes: what is in front of an image's header comes with it."""
    image = open_split(shards, "train").read(0)
    long = [f"n01/{n}{'x' * 120}" for n in range(5)]
    (tmp_path / "root").mkdir()
    with tarfile.open(tmp_path / "root" / "train-0.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for key in long:
            for extension, data in (("jpg", image), ("cls", b"1")):
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    assert index.main([str(tmp_path / "root")]) == 0
    fs = fsspec.filesystem("memory")
    for path in (tmp_path / "root").iterdir():
        fs.pipe_file(f"/long/{path.name}", path.read_bytes())
    for root in (tmp_path / "root", "memory://long"):
        assert samples(open_split(root, "train", cache)) == [(key, image) for key in long]


def epoch(root, cache, *, workers=0, epochs=1) -> list[list[torch.Tensor]]:
    split = open_split(root, "train", cache)
    batches = TrainBatches(split, make_order(split.num_samples, 12, seed=3), AugmentConfig(), FORMAT)
    with Loader(batches, 0, 5 * epochs, num_workers=workers) as loader:
        return [[tensor.clone() for tensor in (b.ids, b.images, b.labels, b.table)] for b in loader]


def assert_same(ours, expected):
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def local_epoch(shards):
    return epoch(shards, None)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("trouble", ["none", "fails", "slow"])
def test_batches_are_the_same_from_a_server_with_troubles(trouble, workers, web, url, cache, local_epoch):
    if trouble == "fails":
        web.fails_each = 10
    web.delay_s = 0.05 if trouble == "slow" else 0.0
    assert_same(epoch(url, cache, workers=workers), local_epoch)
    answered = Counter(parts_asked(web))
    assert set(answered.values()) == {1} or trouble == "fails", "a block is fetched once, whoever needs it"


def test_batches_are_the_same_from_s3_through_forked_workers(s3, shards, cache, local_epoch):
    """The parent has used its client before the fork."""
    root = upload(shards, s3.new_bucket())
    assert_same(epoch(root, cache, workers=2), local_epoch)


def test_evaluation_sees_each_image_once(url, shards, cache):
    seen = []
    for root in (shards, url):
        batches = EvalBatches(open_split(root, "val", cache), FORMAT, EvalConfig(), 8)
        with Loader(batches, 0, len(batches), num_workers=1) as loader:
            seen.append([(b.ids.clone(), b.images.clone(), b.labels.clone()) for b in loader])
    assert_same(*seen)


# ---- requests and the cache -----------------------------------------------------------------------------------------


def test_a_cache_that_holds_all_asks_once_for_each_block_and_never_again(web, url, cache):
    epoch(url, cache)
    asked = parts_asked(web)
    assert len(asked) == len(set(asked)) == 15, "60 samples in blocks of 4"
    web.requests.clear()
    epoch(url, cache, epochs=3, workers=2)
    assert not parts_asked(web)
    assert not [path for _, path, wanted in web.requests if path.endswith(".npy") and wanted != "bytes=0-0"], "the index is there already"


def test_the_limit_holds_and_what_was_not_read_for_longest_goes(web, url, cache, monkeypatch, local_epoch):
    monkeypatch.setattr("vit.data.block_cache.TOUCH_AFTER_S", 0)
    split = open_split(url, "train", cache, 40_000 / GIB)
    used = lambda: sum(path.stat().st_size for path in cache.rglob("*.block"))  # noqa: E731
    largest = 0
    for i in range(0, 60, 4):
        split.read(i)
        split.read(0)
        largest = max(largest, used())
    assert 20_000 < largest <= 40_000
    assert len([path for path, wanted in parts_asked(web) if "train-00000" in path and wanted.startswith("bytes=0-")]) == 1, "0 was in use"
    web.requests.clear()
    batches = TrainBatches(split, make_order(60, 12, seed=3), AugmentConfig(), FORMAT)
    with Loader(batches, 0, 5, num_workers=2) as loader:
        assert_same([[t.clone() for t in (b.ids, b.images, b.labels, b.table)] for b in loader], local_epoch)
    assert len(parts_asked(web)) > 15, "not all of them fit"
    assert used() <= 40_000
    assert not list(cache.rglob("*.part"))


def test_the_default_limit_leaves_half_of_the_disk(cache):
    free = shutil.disk_usage(cache.parent).free
    assert 0.4 * free < BlockCache(cache).limit_bytes < 0.6 * free
    with pytest.raises(ShardError, match=r"data.cache_gib=1e\+09: the disk of .* has room for [\d.]+; give less, or another disk"):
        BlockCache(cache, 1e9)


def _read_all(root, cache, say):
    say.send(samples(open_split(root, "train", cache)))


def test_processes_that_share_a_cache_fetch_each_block_once(web, url, shards, cache):
    web.delay_s = 0.02
    expected = samples(open_split(shards, "train"))
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    processes = [multiprocessing.Process(target=_read_all, args=(url, cache, say)) for _, say in pipes]
    [process.start() for process in processes]
    assert all(told.recv() == expected for told, _ in pipes)
    [process.join() for process in processes]
    assert set(Counter(parts_asked(web)).values()) == {1}
    whole = [path for _, path, wanted in web.requests if path.endswith("train.index.npy") and wanted != "bytes=0-0"]
    assert len(whole) == 1, "one process fetches the index, the others wait for it"


@pytest.mark.parametrize("damage", ["zeros", "truncated", "flipped", "longer"])
def test_a_damaged_block_is_fetched_again(damage, web, url, shards, cache):
    first = open_split(url, "train", cache)
    first.read(0)
    [path] = cache.rglob("*.block")
    data = path.read_bytes()
    at = int(first.index["offset"][1]) + 50
    spoilt = {"zeros": bytes(len(data)), "truncated": data[:-10], "longer": data + b"x"}
    path.write_bytes(spoilt.get(damage, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]))
    web.requests.clear()
    again, here = open_split(url, "train", cache), open_split(shards, "train")
    assert [again.read(i) for i in range(4)] == [here.read(i) for i in range(4)]
    assert len(parts_asked(web)) == 1
    assert path.read_bytes() == data


def test_a_killed_process_leaves_nothing_that_others_wait_for(web, url, cache, shards):
    web.hang_after = 100
    child = os.fork()
    if child == 0:
        try:
            web.hang_after = None
            split = open_split(url, "train", cache)
            split.read(0)
        finally:
            os._exit(1)
    web.hang_after = None
    deadline = time.monotonic() + 20
    while not parts_asked(web) and time.monotonic() < deadline:
        time.sleep(0.002)
    web.hang_after = 100
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    web.hang_after = None
    assert open_split(url, "train", cache).read(0) == open_split(shards, "train").read(0)


def test_what_finds_no_room_on_the_disk_is_used_and_not_kept(url, shards, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        split = open_split(url, "train", disk / "cache", 0.003)
        leave_free(disk, 4)
        assert samples(split) == samples(open_split(shards, "train"))
        assert not list(disk.rglob("*.part"))


def test_travels_to_workers_as_a_few_bytes(url, cache, shards):
    split = open_split(url, "train", cache)
    split.read(0)
    state = pickle.dumps(split)
    assert len(state) < 4000, "index and connections must stay behind"
    assert samples(pickle.loads(state)) == samples(open_split(shards, "train"))


# ---- what can be wrong ----------------------------------------------------------------------------------------------


def test_a_shard_replaced_in_training_is_told(web, url, shards, cache):
    """Another version by its ETag; from then on nothing of it is mixed in, and the old blocks go on."""
    split = open_split(url, "train", cache)
    kept = split.read(0)
    web.files["/set/train-00000.tar"] += bytes(512)
    with pytest.raises(
        ShardError, match=r"/set/train-00000.tar: sample 12 \(key unknown\): .* it was replaced at its URL while it was in use"
    ):
        split.read(12)
    assert split.read(0) == kept
    with pytest.raises(ShardError, match=r"train-00000.tar: \d+ bytes, expected \d+ \(truncated or replaced\)"):
        open_split(url, "train", cache)


def test_a_shard_replaced_where_no_version_is_told_is_seen_in_its_headers(shards, cache):
    root = upload(shards, "memory://replaced")
    split, fs = open_split(root, "train", cache), fsspec.filesystem("memory")
    data = fs.cat_file("/replaced/set/train-00000.tar")
    fs.pipe_file("/replaced/set/train-00000.tar", data[:1024] + data)
    with pytest.raises(
        ShardError, match=r"memory://replaced/set/train-00000.tar: sample 8 .* the shard is not the indexed one; restore the shard"
    ):
        split.read(8)
    assert not list(cache.rglob("*.block")), "bytes of another shard must not be kept under this one's name"
    fs.pipe_file("/replaced/set/train-00000.tar", data)
    assert split.read(8) == open_split(shards, "train").read(8)


def test_a_server_that_is_gone_ends_the_attempts_with_an_error(web, url, cache):
    split = open_split(url, "train", cache)
    web._server.shutdown()
    web._server.server_close()
    with pytest.raises(ShardError, match=r"/set/train-00000.tar: cannot be reached \(.*refused.*\), 6 times in a row; check the address"):
        split.read(0)


def test_a_server_that_hangs_ends_with_an_error_in_bounded_time(web, url, cache, monkeypatch):
    monkeypatch.setattr(remote, "SILENCE_S", 0.1)
    split = open_split(url, "train", cache)
    web.hang_after = 50
    split.prefetch(np.arange(60))
    start_s = time.monotonic()
    with pytest.raises(ShardError, match=r"train-00000.tar: .*[Tt]ime.*, 6 times in a row"):
        split.read(0)
    assert time.monotonic() - start_s < 20
    web.hang_after = None


def test_a_server_that_only_drips_ends_with_an_error(web, url, cache, monkeypatch):
    split = open_split(url, "train", cache)
    monkeypatch.setattr(remote, "ATTEMPT_S", -1.0)
    with pytest.raises(ShardError, match=r"train-00000.tar: \d+ of \d+ bytes came in .* s, 6 times in a row"):
        split.read(0)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_answers_that_may_pass_are_asked_again(status, web, url, cache):
    split = open_split(url, "train", cache)
    web.statuses = [status] * 5
    assert split.read(0)


def test_without_ranges_streaming_is_advised(web, url, cache):
    web.ranges = False
    with pytest.raises(ShardError, match=r"does not give parts of files .* data.reader: webdataset, which is not exact"):
        open_split(url, "train", cache)


def missing(web, *names):
    for name in names:
        del web.files[f"/set/{name}"]


def test_the_index_of_foreign_shards_is_made_by_a_command(web, url, cache, tmp_path, shards):
    """And then the folder with it trains from the URL."""
    names = [name.removeprefix("/set/") for name in web.files]
    missing(web, *(name for name in names if not name.endswith(".tar")))
    with pytest.raises(ShardError, match=r"no _info.json there; `python -m data_prep.index '.*/set/train-\{0000..0099\}.tar' --out ROOT`"):
        open_split(url, "train", cache)
    root = tmp_path / "root"
    assert index.main([*(f"{url}/{name}" for name in names if name.endswith(".tar")), "--out", str(root)]) == 0
    for name in ("train", "val"):
        assert samples(open_split(root, name, cache)) == samples(open_split(shards, name))
    assert any(cache.rglob("*.block"))
    (root / "train.index.npy").unlink()
    with pytest.raises(ShardError, match=r"train.index.npy: unreadable .*; make it again with `python -m data_prep.index"):
        open_split(root, "train", cache)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda web: missing(web, "train.index.npy"), "no train.index.npy there; `python -m data_prep.index"),
        (lambda web: missing(web, "train-00001.tar", "train-00002.tar"), "train-00002.tar: no such file; copy it again"),
        (lambda web: web.files.update({"/set/train-00001.tar": b"x" * 512}), "train-00001.tar: 512 bytes, expected"),
        (lambda web: web.files.update({"/set/train.index.npy": b"x" * 512}), r"train.index.npy: unreadable \("),
        (lambda web: web.files.update({"/set/train.index.npy": web.files["/set/val.index.npy"]}), r"npy: stale \(other shard lengths"),
        (lambda web: web.files.update({"/set/_info.json": b"{"}), "_info.json: not valid JSON"),
        (lambda web: setattr(web, "statuses", [403]), "the server answers 403 Forbidden; it wants a login"),
        (lambda web: setattr(web, "statuses", [503] * 6), "answers 503 Service Unavailable, 6 times in a row"),
    ],
)  # fmt: skip
def test_what_is_wrong_at_the_url_is_told_before_the_start(change, told, web, url, cache):
    change(web)
    with pytest.raises(ShardError, match=told) as raised:
        open_split(url, "train", cache)
    assert url in str(raised.value)


def test_no_bucket_no_permission_no_scheme_no_package(s3, shards, cache, monkeypatch):
    with pytest.raises(ShardError, match=r"s3://nowhere: no _info.json there"):
        open_split("s3://nowhere", "train", cache)
    root = upload(shards, s3.new_bucket())
    with s3.only("s3:GetObject"):
        assert samples(open_split(root, "val", cache)), "reading does not need the right to list"
    with s3.only("s3:PutObject"), pytest.raises(ShardError, match=r"may not be read \(.*\); give this machine credentials"):
        open_split(root, "train", cache)
    with pytest.raises(ShardError, match=r"nosuch://a/b: .*nosuch.*; expected a folder or a URL such as s3://"):
        open_split("nosuch://a/b", "train", cache)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3")
    with pytest.raises(ShardError, match=r"needs another package: pip install s3fs"):
        open_split(root, "train", cache)


def test_a_cache_folder_that_cannot_be_is_told(url, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ShardError, match=r"cannot hold a cache of remote shards \(.*\); choose a folder .* data.cache_dir"):
        open_split(url, "train", tmp_path / "file" / "cache")


def test_shards_at_holds_for_an_index_at_a_url_too(web, url, cache, shards):
    for path in shards.iterdir():
        if path.suffix in (".json", ".npy"):
            web.files[f"/elsewhere/{path.name}"] = path.read_bytes()
    info = json.loads(web.files["/elsewhere/_info.json"])
    web.files["/elsewhere/_info.json"] = json.dumps({**info, "shards_at": url}).encode()
    assert samples(open_split(f"{web.url}/elsewhere", "train", cache)) == samples(open_split(shards, "train"))
