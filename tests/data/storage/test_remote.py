"""Shards at a URL give what the same shards in a folder give, whatever server and network do, or an
error that says what is wrong."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from error_rows import leave_free, small_disk
from fsspec.implementations.ftp import FTPFileSystem
from fsspec.registry import _registry
from ranks import together
from servers import FtpServer, S3Server, WebServer

from data_prep import imagefolder, index
from vit import open_data
from vit.config.schema import AugmentConfig, DataConfig, EvalConfig
from vit.data import stages
from vit.data.batches import EvalBatches, ImageFormat, TrainBatches
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.shards.data_set import open_split
from vit.data.storage import cached_tars, http, remote
from vit.data.storage.block_cache import GIB, BlockCache, Fetched
from vit.data.storage.file_lock import locked_part
from vit.data.storage.retry import RetryPolicy
from vit.ranks.distributed import AlreadyReported
from vit.system.files import ShardError

FORMAT = ImageFormat((16, 16), 3, "bilinear")


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    """Blocks of 4 samples and not of 4,096; no waiting where nothing is learnt by it."""
    monkeypatch.setattr(cached_tars, "BLOCK_BYTES", 16_000)
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (1.0, 0.01, 0.2))


@pytest.fixture
def web(shards):
    with WebServer(files_of(shards)) as server:
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


def files_of(shards: Path) -> dict[str, bytes]:
    return {f"/set/{path.name}": path.read_bytes() for path in shards.iterdir() if path.is_file()}


def samples(split) -> list[tuple[str, bytes]]:
    return [(split.key(i), split.read(i)) for i in range(split.num_samples)]


def parts_asked(web) -> list[tuple[str, str]]:
    """(shard, range) of the requests for blocks."""
    return [
        (path, wanted)
        for _, path, wanted in web.requests
        if path.endswith(".tar") and wanted != "bytes=0-0"
    ]


def upload(shards: Path, url: str) -> str:
    fs, place = fsspec.core.url_to_fs(url)
    for path in shards.iterdir():
        if path.is_file():
            fs.pipe_file(f"{place}/set/{path.name}", path.read_bytes())
    return f"{url}/set"


# ---- the same samples ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["http", "s3", "memory", "file"])
def test_samples_keys_and_labels_are_those_of_the_folder(kind, shards, cache, request):
    if kind == "http":
        root = request.getfixturevalue("url")
    elif kind == "file":
        root = str(shards)
    else:
        root = upload(
            shards,
            request.getfixturevalue("s3").new_bucket() if kind == "s3" else "memory://remote",
        )
    for name in ("train", "val"):
        here, there = open_split(shards, name), open_split(root + "/", name, cache)
        assert samples(there) == samples(here)
        assert (there.num_classes, there.class_names) == (here.num_classes, here.class_names)
        assert (there.index == here.index).all()
    assert any(cache.rglob("*.block"))
    if kind == "file":
        assert samples(open_split(f"file://{shards}", "val")) == samples(here), (
            "a folder like any other, and needs no cache"
        )


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
    batches = TrainBatches(
        split, make_order(split.num_samples, 12, seed=3), AugmentConfig(), FORMAT
    )
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
def test_batches_are_the_same_from_a_server_with_troubles(
    trouble, workers, web, url, cache, local_epoch
):
    if trouble == "fails":
        web.fails_each = 10
    web.delay_s = 0.05 if trouble == "slow" else 0.0
    assert_same(epoch(url, cache, workers=workers), local_epoch)
    answered = Counter(parts_asked(web))
    assert set(answered.values()) == {1} or trouble == "fails", (
        "a block is fetched once, whoever needs it"
    )


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


class KeptFtp(FTPFileSystem):
    """As fsspec's clients for sftp and smb are: one connection, kept for a thread until the process
    ends."""

    protocol = "keptftp"
    cachable = True


@pytest.mark.parametrize("commands_each", [None, 15])
@pytest.mark.parametrize("scheme", ["ftp", "keptftp"])
def test_clients_that_are_not_for_several_threads(
    scheme, commands_each, shards, cache, monkeypatch
):
    """Eight threads fetch at once, and connections end every now and then."""
    monkeypatch.setitem(_registry, "keptftp", KeptFtp)
    KeptFtp.clear_instance_cache()
    with FtpServer(files_of(shards), commands_each) as server:
        split = open_split(f"{scheme}://{server.address}/set", "train", cache)
        split.prefetch(np.arange(60))
        assert samples(split) == samples(open_split(shards, "train"))


# ---- requests and the cache ----------------------------------------------------------------------


def test_a_cache_that_holds_all_asks_once_for_each_block_and_never_again(web, url, cache):
    epoch(url, cache)
    asked = parts_asked(web)
    assert len(asked) == len(set(asked)) == 15, "60 samples in blocks of 4"
    web.requests.clear()
    epoch(url, cache, epochs=3, workers=2)
    assert not parts_asked(web)
    assert not [
        path for _, path, wanted in web.requests if path.endswith(".npy") and wanted != "bytes=0-0"
    ], "the index is there already"


def test_the_limit_holds_and_what_was_not_read_for_longest_goes(
    web, url, cache, monkeypatch, local_epoch
):
    monkeypatch.setattr("vit.data.storage.block_cache.TOUCH_AFTER_S", 0)
    split = open_split(url, "train", cache, 40_000 / GIB)
    used = lambda: sum(path.stat().st_size for path in cache.rglob("*.block"))  # noqa: E731
    largest = 0
    for i in range(0, 60, 4):
        split.read(i)
        split.read(0)
        largest = max(largest, used())
    assert 20_000 < largest <= 40_000
    assert (
        len(
            [
                path
                for path, wanted in parts_asked(web)
                if "train-00000" in path and wanted.startswith("bytes=0-")
            ]
        )
        == 1
    ), "0 was in use"
    web.requests.clear()
    batches = TrainBatches(split, make_order(60, 12, seed=3), AugmentConfig(), FORMAT)
    with Loader(batches, 0, 5, num_workers=2) as loader:
        assert_same(
            [[t.clone() for t in (b.ids, b.images, b.labels, b.table)] for b in loader], local_epoch
        )
    assert len(parts_asked(web)) > 15, "not all of them fit"
    assert used() <= 40_000
    assert not list(cache.rglob("*.part"))


def test_the_default_limit_leaves_half_of_the_disk(cache):
    free = shutil.disk_usage(cache.parent).free
    assert 0.4 * free < BlockCache(cache).limit_bytes < 0.6 * free
    with pytest.raises(
        ShardError,
        match=(
            r"data.cache_gib=1e\+09: the disk of .* has room for [\d.]+; give less, or another disk"
        ),
    ):
        BlockCache(cache, 1e9)


def _read_all(root, cache, say):
    say.send(samples(open_split(root, "train", cache)))


def test_processes_that_share_a_cache_fetch_each_block_once(web, url, shards, cache):
    web.delay_s = 0.02
    expected = samples(open_split(shards, "train"))
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    processes = [
        multiprocessing.Process(target=_read_all, args=(url, cache, say)) for _, say in pipes
    ]
    [process.start() for process in processes]
    assert all(told.recv() == expected for told, _ in pipes)
    [process.join() for process in processes]
    assert set(Counter(parts_asked(web)).values()) == {1}
    whole = [
        path
        for _, path, wanted in web.requests
        if path.endswith("train.index.npy") and wanted != "bytes=0-0"
    ]
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
    again = open_split(url, "train", cache)
    here = open_split(shards, "train")
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


def test_what_finds_no_room_on_the_disk_is_used_and_not_kept(
    web, url, shards, tmp_path, monkeypatch
):
    with small_disk(tmp_path / "disk") as disk:
        split = open_split(url, "train", disk / "cache", 0.003)
        leave_free(disk, 4)
        assert samples(split) == samples(open_split(shards, "train"))
        assert not list(disk.rglob("*.part"))
        web.requests.clear()
        assert all(split.read(i) for i in range(len(split)))
        ranges = [wanted.removeprefix("bytes=").split("-") for _, wanted in parts_asked(web)]
        fetched = sum(int(last) + 1 - int(first) for first, last in ranges)
        assert fetched < 1.5 * split.tars.stored_bytes, (
            "a block that cannot be kept is not fetched for each of its samples"
        )
        for path in disk.iterdir():
            if path.is_file():
                path.unlink()
        monkeypatch.setattr("vit.data.storage.block_cache.TRY_AGAIN_S", 0.0)
        web.requests.clear()
        assert all(split.read(i) for i in [*range(len(split))] * 2)
        assert len(parts_asked(web)) <= 16, "kept again"


def test_a_cache_without_place_for_names_is_told_once(url, shards, tmp_path, caplog):
    with small_disk(tmp_path / "disk", "size=8m,nr_inodes=12") as disk:
        assert samples(open_split(url, "train", disk / "cache", 0.003)) == samples(
            open_split(shards, "train")
        )
    assert [
        record.message.partition(": ")[2]
        for record in caplog.records
        if "not kept" in record.message
    ] == ["cannot be written (No space left on device); blocks are used and not kept"]


def test_a_cache_that_becomes_read_only_is_read(web, url, shards, tmp_path, monkeypatch):
    monkeypatch.setattr("vit.data.storage.block_cache.TOUCH_AFTER_S", 0)
    with small_disk(tmp_path / "disk") as disk:
        split = open_split(url, "train", disk / "cache", 0.003)
        split.read(0)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        web.requests.clear()
        assert samples(split) == samples(open_split(shards, "train"))
    assert not [
        path
        for path, wanted in parts_asked(web)
        if "train-00000" in path and wanted.startswith("bytes=0-")
    ]


@pytest.mark.parametrize("options", ["size=8m", "size=8m,nr_inodes=4"])
def test_an_error_of_the_server_is_not_taken_for_one_of_the_disk(options, tmp_path):
    with small_disk(tmp_path / "disk", options) as disk:
        cache = BlockCache(disk / "cache", 0.003)
        for n in range(3):

            def get() -> Fetched:
                raise OSError(errno.ESTALE, "of the server")

            with pytest.raises(OSError, match="of the server"):
                cache.fetch(f"set/{n}.block", get)


def _fill(folder, process):
    cache = BlockCache(folder, 1)
    for n in range(200):
        cache.fetch(f"set/{process}.{n}.block", lambda: Fetched(bytes(100), [100]))


def test_no_process_finds_the_count_half_written(cache):
    """Who does, counts all blocks anew: minutes for a large cache, and the million below, of which
    there are no blocks, is gone."""
    cache.mkdir()
    (cache / "used_bytes").write_text("1000000\n")
    processes = [multiprocessing.Process(target=_fill, args=(cache, number)) for number in range(4)]
    [process.start() for process in processes]
    [process.join() for process in processes]
    assert int((cache / "used_bytes").read_text()) == 1_000_000 + 4 * 200 * 104


@pytest.mark.parametrize("damage", ["zeros", "zeros inside", "truncated", "empty"])
def test_a_damaged_index_in_the_cache_is_fetched_again(damage, web, url, shards, cache):
    """`zeros inside` are rows that look sound: shard 0, label 0, nothing at the beginning."""
    open_split(url, "train", cache)
    [path] = cache.rglob("*.npy")
    data = path.read_bytes()
    spoilt = {
        "zeros": bytes(len(data)),
        "zeros inside": data[:200] + bytes(100) + data[300:],
        "truncated": data[:-100],
        "empty": b"",
    }
    path.write_bytes(spoilt[damage])
    assert samples(open_split(url, "train", cache)) == samples(open_split(shards, "train"))
    assert path.read_bytes() == data


def test_an_index_whose_fetcher_is_stopped_is_fetched_once_more(url, cache, caplog, monkeypatch):
    open_split(url, "train", cache)
    (path,) = cache.rglob("train.index.*.npy")
    expected = path.read_bytes()
    path.unlink()
    monkeypatch.setattr("vit.data.storage.file_lock.LOCK_WAIT_S", 0.3)
    with locked_part(path):
        open_split(url, "train", cache)
        assert path.read_bytes() == expected
    assert f"{path.name}.part is locked by process {os.getpid()}" in caplog.text
    assert ", and it does not grow; the index is fetched once more" in caplog.text
    assert [other.name for other in path.parent.iterdir() if "index" in other.name] == [path.name]


def test_travels_to_workers_as_a_few_bytes(url, cache, shards):
    split = open_split(url, "train", cache)
    split.read(0)
    state = pickle.dumps(split)
    assert len(state) < 4000, "index and connections must stay behind"
    assert samples(pickle.loads(state)) == samples(open_split(shards, "train"))


# ---- what can be wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [lambda data: data + bytes(512), lambda data: data[:600]], ids=["longer", "shorter"]
)
def test_a_shard_replaced_in_training_is_told(change, web, url, shards, cache):
    """Another version by its ETag; from then on nothing of it is mixed in, and the old blocks go
    on."""
    split = open_split(url, "train", cache)
    kept = split.read(0)
    web.files["/set/train-00000.tar"] = change(web.files["/set/train-00000.tar"])
    with pytest.raises(
        ShardError,
        match=(
            r"/set/train-00000.tar: sample 12 \(key unknown\): reading \d+ bytes at offset \d+"
            r" failed: it was replaced at its URL "
            r"while it was in use \(it had \d+ bytes with the tag .*, now it has \d+ bytes.*\);"
            r" restore the shard and start again"
        ),
    ):
        split.read(12)
    assert split.read(0) == kept
    with pytest.raises(
        ShardError, match=r"train-00000.tar: \d+ bytes, expected \d+ \(truncated or replaced\)"
    ):
        open_split(url, "train", cache)


@pytest.mark.parametrize("kind", ["s3", "memory"])
def test_a_shard_replaced_at_a_store_is_told_and_not_kept(kind, shards, cache, request):
    """By one of its size, with images of the same sizes in the same places."""
    root = upload(
        shards, request.getfixturevalue("s3").new_bucket() if kind == "s3" else "memory://exchanged"
    )
    split = open_split(root, "train", cache)
    kept = split.read(0)
    # as if from another machine
    fs, place = fsspec.core.url_to_fs(f"{root}/train-00000.tar", skip_instance_cache=True)
    data = fs.cat_file(place)
    row = split.index[12]
    at = int(row["offset"])
    size = int(row["size"])
    fs.pipe_file(place, data[:at] + bytes(size) + data[at + size :])
    blocks = list(cache.rglob("*.block"))
    with pytest.raises(
        ShardError,
        match=r"set/train-00000.tar: sample 12 .* it was replaced at its URL while it was in use",
    ):
        split.read(12)
    assert split.read(0) == kept
    assert list(cache.rglob("*.block")) == blocks


def test_a_shard_replaced_where_no_version_is_told_is_seen_in_its_headers(shards, cache):
    with FtpServer(files_of(shards)) as server:
        root = f"ftp://{server.address}/set"
        split = open_split(root, "train", cache)
        data = server.files["/set/train-00000.tar"]
        server.files["/set/train-00000.tar"] = data[:1024] + data[:-1024]
        with pytest.raises(
            ShardError,
            match=(
                rf"{root}/train-00000.tar: sample 8 .* the shard is not the indexed one; restore"
                r" the shard"
            ),
        ):
            split.read(8)
        assert not list(cache.rglob("*.block")), (
            "bytes of another shard must not be kept under this one's name"
        )
        server.files["/set/train-00000.tar"] = data
        assert split.read(8) == open_split(shards, "train").read(8)


def test_a_bit_flipped_on_the_way_is_fetched_again_and_never_kept(shards, cache, caplog):
    with FtpServer(files_of(shards)) as server:
        split = open_split(f"ftp://{server.address}/set", "train", cache)
        name = "/set/train-00000.tar"
        whole = server.files[name]
        at = int(split.index["offset"][8]) + 200
        flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        server.files[name] = flipped
        with pytest.raises(
            ShardError,
            match=(
                r"sample 8 \(key .*\): reading .* gave others than were indexed, twice: a bit"
                r" flipped"
            ),
        ):
            split.read(8)
        assert not list(cache.rglob("*.block"))
        forget = split.tars.forget

        def mend(*place):
            server.files[name] = whole
            forget(*place)

        split.tars.forget = mend
        assert split.read(8) == open_split(shards, "train").read(8)
        assert "were read wrongly once, and rightly the second time" in caplog.text
        assert list(cache.rglob("*.block"))


class Growing(dict):
    """Files of a server; those with this ending are replaced after each request."""

    ending = ""

    def get(self, path):
        found = super().get(path)
        if found is not None and path.endswith(self.ending):
            self[path] = found + b"x"
        return found


@pytest.mark.parametrize("name", ["_info.json", "train.index.npy"])
def test_what_is_replaced_while_it_is_fetched_is_told(name, web, url, cache):
    web.files = Growing(web.files)
    web.files.ending = name
    with pytest.raises(
        ShardError,
        match=rf"{url}/{name}: reading failed: it was replaced at its URL .*; start again",
    ):
        open_split(url, "train", cache)


def test_no_room_for_the_index(url, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        cache = BlockCache(disk / "cache", 0.003)
        leave_free(disk, 0)
        with pytest.raises(
            ShardError,
            match=(
                r"cannot be written \(No space left on device\); make room, or choose another"
                r" data.cache_dir"
            ),
        ):
            remote.RemoteFolder(url).fetch_index("train", cache)


def test_a_server_that_is_gone_ends_the_attempts_with_an_error(web, url, cache):
    split = open_split(url, "train", cache)
    web._server.shutdown()
    web._server.server_close()
    with pytest.raises(
        ShardError,
        match=(
            r"/set/train-00000.tar: cannot be reached \(.*refused.*\), \d+ times in \d s; check the"
            r" address"
        ),
    ):
        split.read(0)


def test_a_server_that_hangs_ends_with_an_error_in_bounded_time(web, url, cache, monkeypatch):
    monkeypatch.setattr(http, "SILENCE_S", 0.1)
    split = open_split(url, "train", cache)
    web.hang_after = 0
    split.prefetch(np.arange(60))
    start_s = time.monotonic()
    with pytest.raises(
        ShardError,
        match=(
            r"train-00000.tar: the connection broke \(timed out\) after 0 of [\d,]+ bytes, \d+"
            r" times in \d s"
        ),
    ):
        split.read(0)
    assert time.monotonic() - start_s < 20
    web.hang_after = None


def test_a_server_that_only_drips_ends_with_an_error(web, url, cache, monkeypatch):
    split = open_split(url, "train", cache)
    monkeypatch.setattr(http, "SILENCE_S", 0.1)
    web.hang_after = 10  # each answer stops there, so 100 bytes come in a second
    with pytest.raises(
        ShardError, match=r"train-00000.tar: only \d+ bytes came in \d s; check the network"
    ):
        split.read(0)
    web.hang_after = None


def test_who_waits_for_a_block_comes_before_what_is_read_ahead(web, url, cache, monkeypatch):
    split = open_split(url, "train", cache)
    monkeypatch.setattr(split.tars, "most_threads", 1)
    web.delay_s = 0.05
    blocks = [block.name for block in split.tars.blocks([0])]
    web.requests.clear()
    split.prefetch(np.arange(split.tars.firsts[1]))
    split.read(int(split.tars.firsts[1]) - 1)
    assert len(blocks) > 3
    assert len(web.requests) <= 3


def test_who_waits_for_a_block_that_comes_slowly_makes_progress(web, url, cache, monkeypatch):
    monkeypatch.setattr(cached_tars, "BEAT_S", 0.1)
    split = open_split(url, "train", cache)
    changes = []
    web.drip = (1000, 0.1)
    waiting = threading.Thread(target=split.read, args=(0,))
    waiting.start()
    while waiting.is_alive():
        changes.append(stages.current.num_changes)
        time.sleep(0.25)
    assert len(changes) >= 3
    assert changes == sorted(set(changes)), "each look finds a change"


@pytest.mark.parametrize("status", [429, 500, 503, 507, 520, 524])
def test_answers_that_may_pass_are_asked_again(status, web, url, cache):
    split = open_split(url, "train", cache)
    web.statuses = [status] * 5
    assert split.read(0)


def test_without_ranges_streaming_is_advised(web, url, cache):
    web.ranges = False
    with pytest.raises(
        ShardError,
        match=r"does not give parts of files .* data.reader: webdataset, which is not exact",
    ):
        open_split(url, "train", cache)


def missing(web, *names):
    for name in names:
        del web.files[f"/set/{name}"]


def test_the_index_of_foreign_shards_is_made_by_a_command(web, url, cache, tmp_path, shards):
    """And then the folder with it trains from the URL."""
    names = [name.removeprefix("/set/") for name in web.files]
    missing(web, *(name for name in names if not name.endswith(".tar")))
    with pytest.raises(
        ShardError,
        match=(
            r"no _info.json there; `python -m data_prep.index '.*/set/train-\{0000..0099\}.tar'"
            r" --out ROOT`"
        ),
    ):
        open_split(url, "train", cache)
    root = tmp_path / "root"
    assert (
        index.main(
            [*(f"{url}/{name}" for name in names if name.endswith(".tar")), "--out", str(root)]
        )
        == 0
    )
    for name in ("train", "val"):
        assert samples(open_split(root, name, cache)) == samples(open_split(shards, name))
    assert any(cache.rglob("*.block"))
    (root / "train.index.npy").unlink()
    with pytest.raises(
        ShardError,
        match=r"train.index.npy: unreadable .*; make it again with `python -m data_prep.index",
    ):
        open_split(root, "train", cache)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda web: missing(web, "train.index.npy"),
            "no train.index.npy there; `python -m data_prep.index",
        ),
        (
            lambda web: missing(web, "train-00001.tar", "train-00002.tar"),
            "train-00002.tar: no such file; copy it again",
        ),
        (
            lambda web: web.files.update({"/set/train-00001.tar": b"x" * 512}),
            "train-00001.tar: 512 bytes, expected",
        ),
        (
            lambda web: web.files.update({"/set/train.index.npy": b"x" * 512}),
            r"train.index.npy: unreadable \(",
        ),
        (
            lambda web: web.files.update({"/set/train.index.npy": web.files["/set/val.index.npy"]}),
            r"npy: stale \(other shard lengths",
        ),
        (lambda web: web.files.update({"/set/_info.json": b"{"}), "_info.json: not valid JSON"),
        (
            lambda web: setattr(web, "statuses", [403]),
            "the server answers 403 Forbidden; it wants a login",
        ),
        (
            lambda web: setattr(web, "statuses", [503] * 1000),
            r"answers 503 Service Unavailable, \d+ times in \d s",
        ),
        (
            lambda web: setattr(web, "statuses", [501]),
            "the server answers 501 Not Implemented; correct the address",
        ),
    ],
)
def test_what_is_wrong_at_the_url_is_told_before_the_start(change, told, web, url, cache):
    change(web)
    with pytest.raises(ShardError, match=told) as raised:
        open_split(url, "train", cache)
    assert url in str(raised.value)


@pytest.mark.parametrize("whole_if_empty", [False, True])
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("_info.json", "_info.json: not valid JSON"),
        ("train.index.npy", "an empty train.index.npy there; `python -m data_prep.index"),
        ("train-00001.tar", "train-00001.tar: 0 bytes, expected"),
    ],
)
def test_empty_files(name, told, whole_if_empty, web, url, cache):
    web.files[f"/set/{name}"] = b""
    web.whole_if_empty = whole_if_empty
    with pytest.raises(ShardError, match=told):
        open_split(url, "train", cache)


def test_no_bucket_no_permission_no_scheme_no_package(s3, shards, cache, monkeypatch):
    with pytest.raises(ShardError, match=r"s3://nowhere: no _info.json there"):
        open_split("s3://nowhere", "train", cache)
    root = upload(shards, s3.new_bucket())
    with s3.only("s3:GetObject"):
        assert samples(open_split(root, "val", cache)), "reading does not need the right to list"
    with (
        s3.only("s3:PutObject"),
        pytest.raises(
            ShardError, match=r"no permission to do this \(.*\); credentials come from AWS_"
        ),
    ):
        open_split(root, "train", cache)
    with pytest.raises(
        ShardError,
        match=r"nosuch://a/b/_info.json: .*nosuch.*; expected a folder or a URL such as s3://",
    ):
        open_split("nosuch://a/b", "train", cache)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3")
    with pytest.raises(ShardError, match=r"s3://.*: pip install s3fs"):
        open_split(root, "train", cache)


def test_a_cache_folder_that_cannot_be_is_told(url, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ShardError, match=r"cannot hold a cache of shards \(.*\); choose a folder .* data.cache_dir"
    ):
        open_split(url, "train", tmp_path / "file" / "cache")


def test_shards_at_holds_for_an_index_at_a_url_too(web, url, cache, shards):
    for path in shards.iterdir():
        if path.suffix in (".json", ".npy"):
            web.files[f"/elsewhere/{path.name}"] = path.read_bytes()
    info = json.loads(web.files["/elsewhere/_info.json"])
    web.files["/elsewhere/_info.json"] = json.dumps({**info, "shards_at": url}).encode()
    assert samples(open_split(f"{web.url}/elsewhere", "train", cache)) == samples(
        open_split(shards, "train")
    )


# ---- several ranks -------------------------------------------------------------------------------


def test_a_server_is_asked_once_for_each_shard_however_many_ranks_open_them(
    shards, tmp_path, monkeypatch
):
    """And the others, who are told, read the same."""
    monkeypatch.setattr("vit.ranks.world.POLL_S", 0.01)
    arguments = [
        str(shards.parent / "images"),
        "--out",
        str(tmp_path / "many"),
        "--num-shards",
        "30",
        "--workers",
        "1",
    ]
    assert imagefolder.main(arguments) == 0
    with WebServer(files_of(tmp_path / "many")) as server:
        data = DataConfig(root=f"{server.url}/set", cache_dir=str(tmp_path / "cache"))
        opened = together(4, lambda world: open_data.open_split(data, "train", world))
        asked = Counter(
            path
            for _, path, wanted in server.requests
            if wanted == "bytes=0-0" and path.endswith(".tar")
        )
        assert set(asked.values()) == {1}, "one rank asks"
        assert len(asked) == 30
        assert len(server.requests) < 30 + 4 * 6
        assert opened[1].versions == opened[0].versions
        assert samples(opened[3]) == samples(opened[0])
        del server.files["/set/train-00003.tar"]
        found = together(3, lambda world: open_data.open_split(data, "train", world))
    assert ["no such file" in str(error) for error in found] == [True] * 3
    assert [isinstance(error, AlreadyReported) for error in found] == [False, True, True]


def test_a_signal_is_heard_while_a_server_is_asked_about_shards(web, url):
    folder = remote.RemoteFolder(url, RetryPolicy(60, 0.01, 0.2))
    web.away_until_s = time.monotonic() + 60
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        folder.stats([f"train-{number:05d}.tar" for number in range(40)])
    assert time.monotonic() - began_s < 30, (
        "its threads were waited for, who repeat for as long as patience lasts"
    )


def test_what_was_asked_for_long_ago_is_forgotten(url, cache, monkeypatch):
    """A thousand million samples have 16 million blocks."""
    monkeypatch.setattr(cached_tars, "MAX_ASKED", 3)
    monkeypatch.setattr(cached_tars, "ASK_AGAIN_S", 0.0)
    split = open_split(url, "train", cache)
    for block in range(15):
        split.prefetch(np.arange(4 * block, 4 * block + 4))
    assert len(split.tars._asked_at_s) <= 4
