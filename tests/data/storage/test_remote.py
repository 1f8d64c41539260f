"""Test that shards at a URL return the same samples as shards in a folder.

A fault of the server or the network must either have no effect, or raise an error that describes
the fault.
"""

from __future__ import annotations

import io
import signal
import tarfile
import threading
import time
from collections import Counter

import fsspec
import numpy as np
import pytest
from fsspec.implementations.ftp import FTPFileSystem
from fsspec.registry import _registry
from ranks import together
from remote_shards import FORMAT, assert_same, epoch, files_of, parts_asked, samples, upload
from servers import FtpServer, WebServer

from data_prep import imagefolder, index
from vit.config.schema import Config, EvalConfig
from vit.data import open_data
from vit.data.batches import EvalBatches
from vit.data.loader import Loader
from vit.data.storage import cached_tars, remote
from vit.data.storage.opening import open_split
from vit.distributed.process_group import AlreadyReported
from vit.system.retry import RetryPolicy


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    """Use short pauses, and blocks of 4 instead of 4,096 samples, to keep the tests fast."""
    monkeypatch.setattr(cached_tars, "BLOCK_BYTES", 16_000)
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (10.0, 0.01, 0.2))


# ---- the same samples as in a folder -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["http", "s3", "memory", "file"])
def test_samples_keys_and_labels_equal_those_in_the_folder(kind, shards, cache, request):
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
        local, fetched = open_split(shards, name), open_split(root + "/", name, cache)
        assert samples(fetched) == samples(local)
        assert (fetched.num_classes, fetched.class_names) == (local.num_classes, local.class_names)
        assert (fetched.index == local.index).all()
    assert any(cache.rglob("*.block"))
    if kind == "file":
        assert samples(open_split(f"file://{shards}", "val")) == samples(local), (
            "a file:// URL is a folder and needs no cache"
        )


def test_long_keys_in_separate_headers_are_read(tmp_path, shards, cache):
    """A file name of more than 100 bytes is stored in a separate tar header, which the reader must
    fetch together with the image."""
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("trouble", ["none", "fails", "slow"])
def test_batches_are_the_same_from_a_faulty_or_slow_server(
    trouble, workers, web, url, cache, local_epoch
):
    if trouble == "fails":
        web.fails_each = 10
    web.delay_s = 0.05 if trouble == "slow" else 0.0
    assert_same(epoch(url, cache, workers=workers), local_epoch)
    answered = Counter(parts_asked(web))
    assert set(answered.values()) == {1} or trouble == "fails", (
        "each block must be fetched only once"
    )


def test_batches_are_the_same_from_s3_through_forked_workers(s3, shards, cache, local_epoch):
    """The parent process uses its S3 clients before it forks. The clients of the workers must still
    work."""
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
    """A file system that keeps one connection per thread until the process exits, like fsspec's
    sftp and smb clients."""

    protocol = "keptftp"
    cachable = True


@pytest.mark.parametrize("commands_each", [None, 15])
@pytest.mark.parametrize("scheme", ["ftp", "keptftp"])
def test_clients_that_are_not_thread_safe_are_used_by_one_thread_each(
    scheme, commands_each, shards, cache, monkeypatch
):
    monkeypatch.setitem(_registry, "keptftp", KeptFtp)
    KeptFtp.clear_instance_cache()
    with FtpServer(files_of(shards), commands_each) as server:
        split = open_split(f"{scheme}://{server.address}/set", "train", cache)
        split.prefetch(np.arange(60))
        assert samples(split) == samples(open_split(shards, "train"))


# ---- several ranks -------------------------------------------------------------------------------


def test_one_rank_asks_the_server_about_each_shard(shards, tmp_path, monkeypatch):
    """Rank 0 requests information about each shard and sends it to the other ranks. All ranks must
    read the same samples."""
    monkeypatch.setattr("vit.distributed.world.POLL_S", 0.01)
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
        config = Config(
            data={"root": f"{server.url}/set"},
            loader={"cache_dir": str(tmp_path / "cache")},
            train={"steps": 1},
        )
        opened = together(4, lambda world: open_data.open_split(config, "train", world))
        requests = Counter(
            path
            for _, path, byte_range in server.requests
            if byte_range == "bytes=0-0" and path.endswith(".tar")
        )
        assert set(requests.values()) == {1}, "several ranks requested the size of a shard"
        assert len(requests) == 30
        assert len(server.requests) < 30 + 4 * 6
        assert opened[1].versions == opened[0].versions
        assert samples(opened[3]) == samples(opened[0])
        del server.files["/set/train-00003.tar"]
        opened = together(3, lambda world: open_data.open_split(config, "train", world))
    assert ["no such file" in str(error) for error in opened] == [True] * 3
    assert [isinstance(error, AlreadyReported) for error in opened] == [False, True, True]


def test_ctrl_c_interrupts_the_requests_about_shards(web, url):
    folder = remote.RemoteFolder(url, RetryPolicy(600, 0.01, 0.2))
    web.away_until_s = time.monotonic() + 600

    def interrupt() -> None:
        while len(web.requests) < 2 * remote.NUM_CONNECTIONS:
            time.sleep(0.01)
        # Send the signal to this thread, as the operating system may do. The signal then does not
        # wake the main thread, which waits for a lock.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    began_s = time.monotonic()
    # A shell's `&` makes a command ignore Ctrl-C, and pytest inherits this setting.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        folder.stats([f"train-{number:05d}.tar" for number in range(40)])
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began_s < 300, (
        "the interrupt waited for threads that retry until their time limit"
    )


def test_old_prefetch_requests_are_forgotten(url, cache, monkeypatch):
    """A dataset of a billion samples has 16 million blocks, so the reader cannot remember every
    prefetch request."""
    monkeypatch.setattr(cached_tars, "MAX_REQUESTED", 3)
    monkeypatch.setattr(cached_tars, "ASK_AGAIN_S", 0.0)
    split = open_split(url, "train", cache)
    for block in range(15):
        split.prefetch(np.arange(4 * block, 4 * block + 4))
    assert isinstance(split.tars, cached_tars.CachedTars)
    assert len(split.tars._requested_at_s) <= 4
