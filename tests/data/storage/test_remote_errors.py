"""Test faults while reading shards from a URL: either a retry succeeds, or an error describes the
fault."""

from __future__ import annotations

import json
import re
import sys
import threading
import time

import fsspec
import numpy as np
import pytest
from error_rows import leave_free, small_disk
from fsspec.registry import _registry
from remote_shards import claim_encoding, files_of, samples, upload
from servers import FtpServer

from data_prep import index
from vit.data import stages
from vit.data.storage import cached_tars, http, remote
from vit.data.storage.block_cache import BlockCache
from vit.data.storage.opening import open_split
from vit.system.files import ShardError
from vit.system.retry import RetryPolicy


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    """Use short pauses, and blocks of 4 instead of 4,096 samples, to keep the tests fast."""
    monkeypatch.setattr(cached_tars, "BLOCK_BYTES", 16_000)
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (10.0, 0.01, 0.2))


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(RetryPolicy.__init__, "__defaults__", (1.0, 0.01, 0.2))


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [lambda data: data + bytes(512), lambda data: data[:600]], ids=["longer", "shorter"]
)
def test_a_shard_replaced_during_training_is_reported(change, web, url, shards, cache):
    """The server reports a new ETag for the replaced shard. The reader must not mix old and new
    bytes, and cached blocks of the old shard must remain usable."""
    split = open_split(url, "train", cache)
    sample = split.read(0)
    web.files["/set/train-00000.tar"] = change(web.files["/set/train-00000.tar"])
    with pytest.raises(
        ShardError,
        match=(
            r"/set/train-00000.tar: sample 12 \(key unknown\): reading \d+ bytes at offset \d+"
            r" failed: the file was replaced at its URL while in use \(before: \d+ bytes with the"
            r" tag .*, now: \d+ bytes.*\); restore the shard and start again"
        ),
    ):
        split.read(12)
    assert split.read(0) == sample
    with pytest.raises(
        ShardError, match=r"train-00000.tar: \d+ bytes, expected \d+ \(truncated or replaced\)"
    ):
        open_split(url, "train", cache)


@pytest.mark.parametrize("kind", ["s3", "memory"])
def test_a_shard_replaced_at_a_store_is_reported_and_not_kept(kind, shards, cache, request):
    """The new shard and its images have the same sizes and offsets as before."""
    root = upload(
        shards, request.getfixturevalue("s3").new_bucket() if kind == "s3" else "memory://exchanged"
    )
    split = open_split(root, "train", cache)
    sample = split.read(0)
    # Replace the shard through a second client, which simulates another machine.
    fs, place = fsspec.core.url_to_fs(f"{root}/train-00000.tar", skip_instance_cache=True)
    data = fs.cat_file(place)
    row = split.index[12]
    at = int(row["offset"])
    size = int(row["size"])
    fs.pipe_file(place, data[:at] + bytes(size) + data[at + size :])
    blocks = list(cache.rglob("*.block"))
    with pytest.raises(
        ShardError,
        match=r"set/train-00000.tar: sample 12 .* the file was replaced at its URL while in use",
    ):
        split.read(12)
    assert split.read(0) == sample
    assert list(cache.rglob("*.block")) == blocks


def test_a_replaced_shard_without_a_version_is_detected_by_its_headers(shards, cache):
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
            "bytes of another shard must not be cached under this shard's name"
        )
        server.files["/set/train-00000.tar"] = data
        assert split.read(8) == open_split(shards, "train").read(8)


def test_a_bit_flipped_in_transit_is_fetched_again_and_never_kept(shards, cache, caplog):
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
                r"sample 8 \(key .*\): reading .* twice returned other bytes than the indexed"
                r" ones, so a bit flipped"
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
        assert "were wrong in the first read and right in the second" in caplog.text
        assert list(cache.rglob("*.block"))


class Growing(dict):
    """The files of a web server on which all files whose names end with `ending` are replaced after
    each request."""

    ending = ""

    def get(self, path):
        content = super().get(path)
        if content is not None and path.endswith(self.ending):
            self[path] = content + b"x"
        return content


@pytest.mark.parametrize("name", ["_info.json", "train.index.npy"])
def test_a_file_replaced_while_it_is_fetched_is_reported(name, web, url, cache):
    web.files = Growing(web.files)
    web.files.ending = name
    with pytest.raises(
        ShardError,
        match=rf"{url}/{name}: reading failed: the file was replaced at its URL .*; start again",
    ):
        open_split(url, "train", cache)


def test_a_disk_without_space_for_the_index_is_reported(url, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        cache = BlockCache(disk / "cache", 0.003)
        leave_free(disk, 0)
        with pytest.raises(
            ShardError,
            match=(
                r"cannot be written \(No space left on device\); free some space, or choose another"
                r" loader.cache_dir"
            ),
        ):
            remote.RemoteFolder(url).fetch_index("train", cache)


def test_a_server_that_is_gone_is_an_error_after_the_retries(web, url, cache, impatient):
    split = open_split(url, "train", cache)
    web._server.shutdown()
    web._server.server_close()
    with pytest.raises(
        ShardError,
        match=(
            r"/set/train-00000.tar: cannot be reached \(.*refused.*\), \d+ times in \d+ s:"
            r" check the address"
        ),
    ):
        split.read(0)


@pytest.mark.timeout(120)
def test_a_hanging_server_is_an_error_in_bounded_time(web, url, cache, monkeypatch, impatient):
    monkeypatch.setattr(http, "SILENCE_S", 0.1)
    split = open_split(url, "train", cache)
    web.hang_after = 0
    split.prefetch(np.arange(60))
    with pytest.raises(
        ShardError,
        match=(
            r"train-00000.tar: the connection broke \(timed out\) at byte [\d,]+ of [\d,]+"
            r"(, \d+ times in \d+ s|, after \d+ s in which nothing came)"
        ),
    ):
        split.read(0)
    web.hang_after = None


def test_a_server_that_only_drips_bytes_is_an_error(web, url, cache, monkeypatch, impatient):
    split = open_split(url, "train", cache)
    monkeypatch.setattr(http, "SILENCE_S", 0.1)
    # The server pauses for 0.1 s after every 10 bytes.
    web.hang_after = 10
    with pytest.raises(
        ShardError, match=r"train-00000.tar: only \d+ bytes arrived in \d+ s; check the network"
    ):
        split.read(0)
    web.hang_after = None


def test_a_block_that_a_reader_waits_for_is_fetched_before_prefetched_blocks(
    web, url, cache, monkeypatch
):
    split = open_split(url, "train", cache)
    monkeypatch.setattr(split.tars, "most_threads", 1)
    web.delay_s = 0.05
    assert isinstance(split.tars, cached_tars.CachedTars)
    blocks = [block.name for block in split.tars.blocks([0])]
    web.requests.clear()
    split.prefetch(np.arange(split.tars.firsts[1]))
    split.read(int(split.tars.firsts[1]) - 1)
    assert len(blocks) > 3
    assert len(web.requests) <= 3


def test_waiting_for_a_slow_block_counts_as_progress(web, url, cache, monkeypatch):
    monkeypatch.setattr(cached_tars, "BEAT_S", 0.1)
    split = open_split(url, "train", cache)
    changes = set()
    web.drip = (1000, 0.1)
    waiting = threading.Thread(target=split.read, args=(0,))
    waiting.start()
    while waiting.is_alive():
        changes.add(stages.current.num_changes)
        time.sleep(0.01)
    assert len(changes) >= 5, "the progress counter must keep changing"


@pytest.mark.parametrize("status", [429, 500, 503, 507, 520, 524])
def test_temporary_http_errors_are_retried(status, web, url, cache):
    split = open_split(url, "train", cache)
    web.statuses = [status] * 5
    assert split.read(0)


def test_streaming_is_advised_if_the_server_does_not_support_ranges(web, url, cache):
    web.ranges = False
    with pytest.raises(
        ShardError, match=r"does not serve parts of files .* stream.urls, which is not exactly"
    ):
        open_split(url, "train", cache)


def missing(web, *names):
    for name in names:
        del web.files[f"/set/{name}"]


def test_a_command_makes_the_index_of_foreign_shards(web, url, cache, tmp_path, shards):
    names = [name.removeprefix("/set/") for name in web.files]
    missing(web, *(name for name in names if not name.endswith(".tar")))
    with pytest.raises(
        ShardError,
        match=(
            r"no _info.json at this URL; run `python -m data_prep.index"
            r" '.*/set/train-\{0000..0099\}.tar' --out ROOT`"
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
        ShardError, match=r"train.index.npy: absent; rebuild it with `python -m data_prep\.index"
    ):
        open_split(root, "train", cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda web: missing(web, "train.index.npy"),
            "no train.index.npy at this URL; run `python -m data_prep.index",
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
            r"npy: outdated \(its shard lengths",
        ),
        (lambda web: web.files.update({"/set/_info.json": b"{"}), "_info.json: not valid JSON"),
        (
            lambda web: setattr(web, "statuses", [403]),
            "the server answers 403 Forbidden; a login is required",
        ),
        (
            lambda web: setattr(web, "statuses", [503] * 1000),
            r"answers 503 Service Unavailable, \d+ times in \d+ s",
        ),
        (
            lambda web: setattr(web, "statuses", [501]),
            "the server answers 501 Not Implemented; correct the address",
        ),
    ],
)
def test_faults_at_the_url_are_reported_before_the_start(
    change, message, web, url, cache, impatient
):
    change(web)
    with pytest.raises(ShardError, match=message) as raised:
        open_split(url, "train", cache)
    assert url in str(raised.value)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_server_that_compresses_is_named(has_ranges, web, url, cache, tmp_path, capsys):
    web.ranges = has_ranges
    claim_encoding(web, "gzip")
    message = "_info.json: the server compresses the file (Content-Encoding: gzip)"
    with pytest.raises(ShardError, match=re.escape(message)):
        open_split(url, "train", cache)
    assert index.main([url, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_the_encoding_aws_chunked_is_not_treated_as_compression(web, url, cache, shards):
    claim_encoding(web, "aws-chunked")
    assert samples(open_split(url, "val", cache)) == samples(open_split(shards, "val"))


@pytest.mark.parametrize("whole_if_empty", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("_info.json", "_info.json: not valid JSON"),
        ("train.index.npy", "an empty train.index.npy at this URL; run `python -m data_prep.index"),
        ("train-00001.tar", "train-00001.tar: 0 bytes, expected"),
    ],
)
def test_empty_files_are_reported(name, message, whole_if_empty, web, url, cache):
    web.files[f"/set/{name}"] = b""
    web.whole_if_empty = whole_if_empty
    with pytest.raises(ShardError, match=message):
        open_split(url, "train", cache)


def test_a_missing_bucket_permission_scheme_or_package_is_reported(s3, shards, cache, monkeypatch):
    with pytest.raises(
        ShardError, match=r"s3://nowhere/a: the bucket does not exist \(.*\): correct"
    ):
        open_split("s3://nowhere/a", "train", cache)
    bucket = s3.new_bucket()
    with pytest.raises(ShardError, match=f"{bucket}/a: no _info.json at this URL"):
        open_split(f"{bucket}/a", "train", cache)
    root = upload(shards, bucket)
    with s3.only("s3:GetObject"):
        assert samples(open_split(root, "val", cache)), "reading must not need permission to list"
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


def test_an_impossible_cache_folder_is_reported(url, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ShardError,
        match=r"cannot store the shard cache \(.*\); choose a folder .* loader.cache_dir",
    ):
        open_split(url, "train", tmp_path / "file" / "cache")


def test_an_index_at_a_url_may_use_shards_at(web, url, cache, shards):
    for path in shards.iterdir():
        if path.suffix in (".json", ".npy"):
            web.files[f"/elsewhere/{path.name}"] = path.read_bytes()
    info = json.loads(web.files["/elsewhere/_info.json"])
    web.files["/elsewhere/_info.json"] = json.dumps({**info, "shards_at": url}).encode()
    assert samples(open_split(f"{web.url}/elsewhere", "train", cache)) == samples(
        open_split(shards, "train")
    )
