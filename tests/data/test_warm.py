"""Test that `python -m vit.data.warm` fills the cache before a job starts."""

from __future__ import annotations

import subprocess
from collections import Counter

import numpy as np
import pytest
import warm_python
from processes import call, environment
from remote_shards import files_of, parts_asked
from servers import WebServer

from vit.config.schema import AugmentConfig
from vit.data import warm
from vit.data.batches import TrainBatches
from vit.data.image_format import ImageFormat
from vit.data.order import make_order
from vit.data.storage import cached_tars
from vit.data.storage.block_cache import GIB
from vit.data.storage.opening import open_split
from vit.start.preflight import filling_notes
from vit.training.plan import Plan


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(cached_tars, "BLOCK_BYTES", 16_000)


@pytest.fixture
def web(shards):
    with WebServer(files_of(shards)) as server:
        yield server


def test_after_warming_a_job_requests_no_blocks(web, tmp_path, shards, capsys):
    url = f"{web.url}/set"
    cache = tmp_path / "cache"
    assert warm.main([url, "--cache-dir", str(cache)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["train", "val"]
    assert all(line.endswith("of them fetched now") for line in lines)
    requests = len(parts_asked(web))
    assert requests == len(set(parts_asked(web))) == len(list(cache.rglob("*.block")))
    for name in ("train", "val"):
        local, remote = open_split(shards, name), open_split(url, name, cache)
        assert [remote.read(i) for i in range(len(remote))] == [
            local.read(i) for i in range(len(local))
        ]
    assert len(parts_asked(web)) == requests
    assert warm.main([url, "--cache-dir", str(cache), "--split", "val"]) == 0
    assert capsys.readouterr().out.endswith(f"are in {cache}, 0.0 MB of them fetched now\n")
    assert len(parts_asked(web)) == requests


def test_a_config_selects_shards_of_a_mounted_folder(shards, tmp_path, config):
    cache = tmp_path / "near"
    settings = ["--config", str(config), f"data.root={shards}", f"loader.cache_dir={cache}"]
    assert warm.main([*settings, "--split", "train", "--shards", "1-2"]) == 0
    assert sorted({path.name.split(".")[0] for path in cache.rglob("*.block")}) == [
        "train-00001",
        "train-00002",
    ]
    assert len(list(cache.rglob("*.block"))) == 10


def test_warming_stops_when_the_cache_is_full_and_removes_nothing(
    web, tmp_path, capsys, monkeypatch
):
    cache = tmp_path / "cache"
    arguments = [f"{web.url}/set", "--cache-dir", str(cache), "--split", "train"]
    assert warm.main([*arguments, "--cache-gib", "0"]) == 0
    assert not list(cache.rglob("*.block")), "a cache without free space must stay empty"
    capsys.readouterr()
    limited = [*arguments, "--cache-gib", str(60_000 / GIB)]
    monkeypatch.setattr(warm, "NUM_THREADS", 2)
    assert warm.main(limited) == 0
    blocks = set(cache.rglob("*.block"))
    assert 2 <= len(blocks) <= 6
    assert (
        "; the cache is full (0.1 MB): enlarge it with --cache-gib or loader.cache_gib"
        in capsys.readouterr().out
    )
    requests = len(parts_asked(web))
    monkeypatch.setattr(warm, "NUM_THREADS", 1)
    assert warm.main(limited) == 0
    assert blocks <= set(cache.rglob("*.block"))
    assert len(parts_asked(web)) <= requests + 1


def test_damaged_blocks_are_counted_and_all_others_are_fetched(web, tmp_path, shards, capsys):
    name = "train-00001.tar"
    row = open_split(shards, "train").index[25]
    data = bytearray(web.files[f"/set/{name}"])
    data[int(row["offset"]) + 50] ^= 1
    web.files[f"/set/{name}"] = bytes(data)
    cache = tmp_path / "cache"
    assert warm.main([f"{web.url}/set", "--cache-dir", str(cache)]) == 2
    out, error = capsys.readouterr()
    assert out.startswith("val: "), "blocks after the damaged one must be fetched"
    assert error.count("error: ") == 1
    assert (
        f"; bytes differ from the index in {web.url}/set/{name}; copy the damaged shards again"
        " (`python -m data_prep.verify" in error
    )
    assert len(list(cache.rglob("train*.block"))) == 14


def test_a_shard_replaced_during_warming_is_reported_without_waiting_for_other_threads(
    web, tmp_path
):
    code = """
import runpy
from vit.data.shards.reader import Version
from vit.data.storage import cached_tars
from vit.system import retry
cached_tars.BLOCK_BYTES = 16_000
retry.NUM_REFUSALS = 1
real = cached_tars.CachedTars.blocks
def blocks(self, shards):
    self.versions[0] = Version(5, "another")
    return real(self, shards)
cached_tars.CachedTars.blocks = blocks
runpy.run_module("vit.data.warm", run_name="__main__")
"""
    arguments = [f"{web.url}/set", "--cache-dir", str(tmp_path / "cache"), "--split", "train"]
    done = call([warm_python.python(environment()), "-c", code, *arguments])
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"error: {web.url}/set/train-00000.tar: the file was replaced at its URL while in use"
    )


def test_several_warming_processes_share_the_work(web, tmp_path):
    web.delay_s = 0.1
    code = """
import sys
from vit.data import warm
from vit.data.storage import cached_tars
cached_tars.BLOCK_BYTES = 16_000
sys.exit(warm.main(sys.argv[1:]))
"""
    arguments = [f"{web.url}/set", "--cache-dir", str(tmp_path / "cache"), "--split", "train"]
    env = environment()
    command = [warm_python.python(env), "-c", code, *arguments]
    processes = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert set(Counter(parts_asked(web)).values()) == {1}
    assert len(parts_asked(web)) == 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["ROOT"],
            "is a folder and is read in place: set --cache-dir to copy its blocks to a cache",
        ),
        ([], "expected one data set: a folder, a URL, or --config FILE"),
        (
            ["ROOT", "--cache-dir", "CACHE", "--shards", "5"],
            "--shards 5: expected a shard number or a range, such as 0-2 for all 3 shards",
        ),
        (
            # An unset shell variable results in an empty argument.
            ["ROOT", "--cache-dir", "CACHE", "--shards", ""],
            "--shards : expected a shard number or a range, such as 0-2 for all 3 shards",
        ),
        (
            ["ROOT", "--cache-dir", "CACHE", "--split", "trian"],
            "no split 'trian', only train, val (did you mean train?)",
        ),
        (["ROOT", "--cache", "CACHE"], "unknown: --cache; did you mean --cache-gib?"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(arguments, message, shards, tmp_path, capsys):
    places = {"ROOT": str(shards), "CACHE": str(tmp_path / "cache")}
    assert warm.main([places.get(word, word) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1


def test_a_run_with_an_empty_cache_reports_the_amount_to_fetch(web, tmp_path, monkeypatch):
    monkeypatch.setattr("vit.start.preflight.MISSING_BYTES", 10_000)
    split = open_split(f"{web.url}/set", "train", tmp_path / "cache")
    batches = TrainBatches(
        split, make_order(60, 12), AugmentConfig(), ImageFormat((16, 16), 3, "bilinear")
    )
    plan = Plan(**{**dict.fromkeys(Plan.__dataclass_fields__, 1), "total_steps": 50})
    [note] = filling_notes(batches, 3, plan)
    assert isinstance(split.tars, cached_tars.CachedTars)
    all_bytes = sum(block.num_bytes for block in split.tars.blocks(range(3)))
    gb = f"{all_bytes / 1e9:.2f} GB"
    expected = (
        f"filling the cache: the next 8 batches of a rank need {gb} of blocks, of which {gb} are"
        f" not in {tmp_path}/cache yet"
    )
    assert note.startswith(expected)
    assert not list(filling_notes(batches, 50, plan))
    split.prefetch(np.arange(60))
    for i in range(60):
        split.read(i)
    assert not list(filling_notes(batches, 3, plan))
