"""Shards at a URL give what the same shards in a folder give, whatever server and network do, or an
error that says what is wrong."""

from __future__ import annotations

import io
import os
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
from vit.config.schema import DataConfig, EvalConfig
from vit.data import open_data
from vit.data.batches import EvalBatches
from vit.data.loader import Loader
from vit.data.shards.data_set import open_split
from vit.data.storage import cached_tars, remote
from vit.distributed.process_group import AlreadyReported
from vit.system.retry import RetryPolicy


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    """Blocks of 4 samples and not of 4,096; no waiting where nothing is learnt by it."""
    monkeypatch.setattr(cached_tars, "BLOCK_BYTES", 16_000)
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (10.0, 0.01, 0.2))


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


# ---- several ranks -------------------------------------------------------------------------------


def test_a_server_is_asked_once_for_each_shard_however_many_ranks_open_them(
    shards, tmp_path, monkeypatch
):
    """And the others, who are told, read the same."""
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
    folder = remote.RemoteFolder(url, RetryPolicy(600, 0.01, 0.2))
    web.away_until_s = time.monotonic() + 600

    def interrupt() -> None:
        while not web.requests:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    began_s = time.monotonic()
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        folder.stats([f"train-{number:05d}.tar" for number in range(40)])
    assert time.monotonic() - began_s < 300, (
        "its threads were waited for, who repeat for as long as patience lasts"
    )


def test_what_was_asked_for_long_ago_is_forgotten(url, cache, monkeypatch):
    """A thousand million samples have 16 million blocks."""
    monkeypatch.setattr(cached_tars, "MAX_ASKED", 3)
    monkeypatch.setattr(cached_tars, "ASK_AGAIN_S", 0.0)
    split = open_split(url, "train", cache)
    for block in range(15):
        split.prefetch(np.arange(4 * block, 4 * block + 4))
    assert isinstance(split.tars, cached_tars.CachedTars)
    assert len(split.tars._asked_at_s) <= 4
