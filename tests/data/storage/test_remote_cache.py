"""Test the cache for shards at a URL: which blocks are fetched, how often they are fetched, and
which blocks are retained."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import time
from collections import Counter

import pytest
from error_rows import leave_free, small_disk
from remote_shards import FORMAT, assert_same, epoch, parts_asked, samples

from vit.config.schema import AugmentConfig
from vit.data.batches import TrainBatches
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.storage import cached_tars
from vit.data.storage.block_cache import GIB, BlockCache, Fetched
from vit.data.storage.file_lock import locked_part
from vit.data.storage.opening import open_split
from vit.system.files import ShardError
from vit.system.retry import RetryPolicy


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    """Use short pauses, and blocks of 4 instead of 4,096 samples, to keep the tests fast."""
    monkeypatch.setattr(cached_tars, "BLOCK_BYTES", 16_000)
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (10.0, 0.01, 0.2))


# ---- requests and the cache ----------------------------------------------------------------------


def test_a_large_enough_cache_fetches_each_block_once(web, url, cache):
    epoch(url, cache)
    requested = parts_asked(web)
    assert len(requested) == len(set(requested)) == 15, "60 samples in blocks of 4 are 15 blocks"
    web.requests.clear()
    epoch(url, cache, epochs=3, workers=2)
    assert not parts_asked(web)
    assert not [
        path
        for _, path, byte_range in web.requests
        if path.endswith(".npy") and byte_range != "bytes=0-0"
    ], "the cached index must not be fetched again"


def test_the_cache_stays_below_its_limit_and_removes_the_least_recently_used_blocks(
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
                for path, byte_range in parts_asked(web)
                if "train-00000" in path and byte_range.startswith("bytes=0-")
            ]
        )
        == 1
    ), "block 0 was in use and must not be removed"
    web.requests.clear()
    batches = TrainBatches(split, make_order(60, 12, seed=3), AugmentConfig(), FORMAT)
    with Loader(batches, 0, 5, num_workers=2) as loader:
        assert_same(
            [[t.clone() for t in (b.ids, b.images, b.labels, b.table)] for b in loader], local_epoch
        )
    assert len(parts_asked(web)) > 15, (
        "not all blocks fit into the cache, so some must be fetched again"
    )
    # While one worker makes room, the other may store a block of 4 images.
    assert used() <= 40_000 + 12_000
    assert not list(cache.rglob("*.part"))


def test_the_default_limit_leaves_half_of_the_disk(cache):
    free = shutil.disk_usage(cache.parent).free
    assert 0.4 * free < BlockCache(cache).limit_bytes < 0.6 * free
    with pytest.raises(
        ShardError,
        match=(
            r"loader.cache_gib=1e\+09: the disk of .* has room for only [\d.]+; set a smaller"
            r" size, or choose another disk"
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
    assert all(connection.recv() == expected for connection, _ in pipes)
    [process.join() for process in processes]
    assert set(Counter(parts_asked(web)).values()) == {1}
    whole = [
        path
        for _, path, byte_range in web.requests
        if path.endswith("train.index.npy") and byte_range != "bytes=0-0"
    ]
    assert len(whole) == 1, "only one process may fetch the index, while the others wait"


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
    local = open_split(shards, "train")
    assert [again.read(i) for i in range(4)] == [local.read(i) for i in range(4)]
    assert len(parts_asked(web)) == 1
    assert path.read_bytes() == data


def test_a_killed_process_does_not_block_other_processes(web, url, cache, shards):
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
    deadline = time.monotonic() + 60
    while not parts_asked(web) and time.monotonic() < deadline:
        time.sleep(0.002)
    web.hang_after = 100
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    web.hang_after = None
    assert open_split(url, "train", cache).read(0) == open_split(shards, "train").read(0)


def test_on_a_full_disk_blocks_are_used_but_not_stored(web, url, shards, tmp_path, monkeypatch):
    with small_disk(tmp_path / "disk") as disk:
        split = open_split(url, "train", disk / "cache", 0.003)
        leave_free(disk, 4)
        assert samples(split) == samples(open_split(shards, "train"))
        assert not list(disk.rglob("*.part"))
        web.requests.clear()
        assert all(split.read(i) for i in range(len(split)))
        ranges = [
            byte_range.removeprefix("bytes=").split("-") for _, byte_range in parts_asked(web)
        ]
        fetched = sum(int(last) + 1 - int(first) for first, last in ranges)
        assert isinstance(split.tars, cached_tars.CachedTars)
        assert fetched < 1.5 * split.tars.stored_bytes, (
            "a block that cannot be stored must not be fetched for each of its samples"
        )
        for path in disk.iterdir():
            if path.is_file():
                path.unlink()
        monkeypatch.setattr("vit.data.storage.block_cache.TRY_AGAIN_S", 0.0)
        web.requests.clear()
        assert all(split.read(i) for i in [*range(len(split))] * 2)
        assert len(parts_asked(web)) <= 16, "blocks must be stored again once writing works"


def test_a_disk_without_free_inodes_is_reported_once(url, shards, tmp_path, caplog):
    with small_disk(tmp_path / "disk", "size=8m,nr_inodes=12") as disk:
        assert samples(open_split(url, "train", disk / "cache", 0.003)) == samples(
            open_split(shards, "train")
        )
    assert [
        record.message.partition(": ")[2]
        for record in caplog.records
        if "not stored" in record.message
    ] == ["cannot be written (No space left on device); blocks are used but not stored"]


def test_a_cache_that_becomes_read_only_is_still_read(web, url, shards, tmp_path, monkeypatch):
    monkeypatch.setattr("vit.data.storage.block_cache.TOUCH_AFTER_S", 0)
    with small_disk(tmp_path / "disk") as disk:
        split = open_split(url, "train", disk / "cache", 0.003)
        split.read(0)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        web.requests.clear()
        assert samples(split) == samples(open_split(shards, "train"))
    assert not [
        path
        for path, byte_range in parts_asked(web)
        if "train-00000" in path and byte_range.startswith("bytes=0-")
    ]


@pytest.mark.parametrize("options", ["size=8m", "size=8m,nr_inodes=4"])
def test_a_server_error_is_not_reported_as_a_disk_error(options, tmp_path):
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


def test_processes_never_read_a_half_written_count(cache):
    """A process that reads a partial count must count all blocks again, which takes minutes in a
    large cache. The test stores a wrong initial count of one million bytes, so a recount would
    change the number."""
    cache.mkdir()
    (cache / "used_bytes").write_text("1000000\n")
    processes = [multiprocessing.Process(target=_fill, args=(cache, number)) for number in range(4)]
    [process.start() for process in processes]
    [process.join() for process in processes]
    assert int((cache / "used_bytes").read_text()) == 1_000_000 + 4 * 200 * 104


@pytest.mark.parametrize("damage", ["zeros", "zeros inside", "truncated", "empty"])
def test_a_damaged_index_in_the_cache_is_fetched_again(damage, web, url, shards, cache):
    """Rows that contain only zeros look valid: shard 0, label 0, offset 0."""
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


def test_an_index_is_fetched_again_if_the_process_that_fetches_it_is_stopped(
    url, cache, caplog, monkeypatch
):
    open_split(url, "train", cache)
    (path,) = cache.rglob("train.index.*.npy")
    expected = path.read_bytes()
    path.unlink()
    monkeypatch.setattr("vit.data.storage.file_lock.LOCK_WAIT_S", 0.3)
    with locked_part(path):
        open_split(url, "train", cache)
        assert path.read_bytes() == expected
    assert f"{path.name}.part is locked by process {os.getpid()}" in caplog.text
    assert ", and does not grow; this process fetches the index itself" in caplog.text
    assert [other.name for other in path.parent.iterdir() if "index" in other.name] == [path.name]


def test_a_pickled_split_is_small(url, cache, shards):
    split = open_split(url, "train", cache)
    split.read(0)
    state = pickle.dumps(split)
    assert len(state) < 4000, "the pickle must not contain the index or connections"
    assert samples(pickle.loads(state)) == samples(open_split(shards, "train"))
