"""Test the index of shards at a URL: on a web server, in an object store, and in read-only
places."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from braceexpand import braceexpand
from checksums import digest, digests
from servers import S3Server, WebServer

from data_prep.index import main
from data_prep.write.output import Output
from vit.data.storage.opening import open_split
from vit.system.urls import expand_braces

# ---- shards at a URL -----------------------------------------------------------------------------


BRACES = "imagenet1k-{train-{0000..0002},validation-0000}.tar"


@pytest.fixture(scope="module")
def s3():
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(foreign, s3) -> str:
    output = Output(f"{s3.new_bucket()}/shards")
    for tar in foreign.glob("*.tar"):
        output.publish(Path(shutil.copy(tar, foreign.parent)))
    return str(output)


@pytest.fixture
def web(foreign, monkeypatch, tmp_path):
    """Serve shards from another tool in /shards."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with WebServer(
        {f"/shards/{tar.name}": tar.read_bytes() for tar in foreign.glob("*.tar")}
    ) as server:
        yield server


def without(info: dict, *keys: str) -> dict:
    return {key: value for key, value in info.items() if key not in keys}


def assert_indexed_as_if_local(out: Path, foreign: Path, url: str) -> None:
    """Assert that `out` matches the result of indexing local shards, except for the tars and the
    README, and that `out` and the tars form a valid dataset."""
    assert main([str(foreign), "--workers", "1"]) == 0
    local = digests(foreign)
    remote = digests(out)
    assert remote.keys() == {name for name in local if not name.endswith((".tar", ".md"))}
    same = [name for name in remote if name.endswith((".idx", ".npy"))]
    assert {name: remote[name] for name in same} == {name: local[name] for name in same}
    for path in out.glob("*.json"):
        content = json.loads(path.read_text())
        assert content["shards_at"] == url
        assert without(content, "shards_at", "info_sha256") == without(
            json.loads((foreign / path.name).read_text()), "mtime_ns", "info_sha256"
        )
    for tar in foreign.glob("*.tar"):
        shutil.copy(tar, out)
    assert [open_split(out, "train").key(i) for i in range(12)] == [f"train{n}" for n in range(12)]


def fetched(web: WebServer) -> list[str]:
    return sorted(
        path.removeprefix("/shards/") for _, path, wanted in web.requests if wanted != "bytes=0-0"
    )


def test_shards_on_a_web_server_are_indexed(foreign, web, tmp_path):
    out = tmp_path / "out"
    url = f"{web.url}/shards"
    web.cuts = [1000, 500]
    assert main([f"{url}/{BRACES}", "--out", str(out), "--workers", "2"]) == 0
    assert list((tmp_path / "tmp").iterdir()) == []
    first = digests(out)
    web.requests[:] = []
    assert main([f"{url}/{BRACES}", "--out", str(out), "--workers", "2"]) == 0
    assert digests(out) == first
    assert fetched(web) == []  # the sizes of the tars were sufficient
    assert_indexed_as_if_local(out, foreign, url)


def test_shards_on_a_web_server_have_their_index_in_a_store(web, s3):
    bucket = s3.new_bucket()
    assert main([f"{web.url}/shards/{BRACES}", "--out", f"{bucket}/index", "--workers", "1"]) == 0
    assert Output(f"{bucket}/index").read_json("_info.json")["shards_at"] == f"{web.url}/shards"
    assert {name.rpartition(".")[2] for name in Output(f"{bucket}/index").sizes()} == {
        "json",
        "idx",
        "npy",
    }


def test_shards_on_a_web_server_with_an_info_are_indexed(foreign, web, tmp_path, capsys):
    names = [f"imagenet1k-train-{k:04d}.tar" for k in (2, 0)]
    theirs = {
        "splits": {
            "train": {
                "name": "train",
                "filenames": names,
                "shard_lengths": [4, 4],
                "num_samples": 8,
            }
        },
        "num_classes": 9,
    }
    web.files["/shards/_info.json"] = json.dumps(theirs).encode()
    assert main([f"{web.url}/shards", "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    info = json.loads((tmp_path / "out" / "_info.json").read_text())
    assert (info["splits"]["train"]["filenames"], info["num_classes"]) == (names, 9)
    theirs["splits"]["train"]["shard_lengths"] = [3, 5]
    web.files["/shards/_info.json"] = json.dumps(theirs).encode()
    assert main([f"{web.url}/shards", "--out", str(tmp_path / "other"), "--workers", "1"]) == 2
    assert "imagenet1k-train-0000.tar has 4 valid samples" in capsys.readouterr().err


def test_a_killed_command_is_continued(foreign, web, tmp_path):
    out = tmp_path / "out"
    url = f"{web.url}/shards"
    names = [f"{url}/imagenet1k-train-{k:04d}.tar" for k in range(3)] + [
        f"{url}/imagenet1k-validation-0000.tar"
    ]
    # Remove the last shard, so that indexing cannot finish before the kill.
    last = web.files.pop("/shards/imagenet1k-validation-0000.tar")
    arguments = [
        sys.executable,
        "-m",
        "data_prep.index",
        *names,
        "--out",
        str(out),
        "--workers",
        "1",
    ]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 240
        while not (out / "imagenet1k-train-0001.json").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    web.files["/shards/imagenet1k-validation-0000.tar"] = last
    web.requests.clear()
    assert main([*names, "--out", str(out), "--workers", "1"]) == 0
    assert not {"imagenet1k-train-0000.tar", "imagenet1k-train-0001.tar"} & set(fetched(web))
    assert_indexed_as_if_local(out, foreign, url)


def test_damaged_rows_are_rewritten(foreign, web, tmp_path):
    out = tmp_path / "out"
    arguments = [f"{web.url}/shards/{BRACES}", "--out", str(out), "--workers", "1"]
    assert main(arguments) == 0
    first = digests(out)
    for index in out.glob("*.index.npy"):
        index.unlink()
    (out / "imagenet1k-train-0001.rows.npy").write_bytes(b"no rows")
    assert main(arguments) == 0
    assert digests(out) == first


def test_a_shard_replaced_on_a_web_server_is_detected(foreign, web, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [f"{web.url}/shards/{BRACES}", "--out", str(out), "--workers", "1"]
    assert main(arguments) == 0
    web.files["/shards/imagenet1k-train-0001.tar"] += bytes(512)
    web.requests.clear()
    assert main(arguments) == 2
    assert fetched(web) == ["imagenet1k-train-0001.tar"]
    assert "imagenet1k-train-0001.tar has 4 valid samples" in capsys.readouterr().err
    (out / "_info.json").unlink()
    assert main(arguments) == 0
    described = json.loads((out / "_info.json").read_text())["splits"]["train"]
    assert (
        described["shard_sha256"][1]
        == hashlib.sha256(web.files["/shards/imagenet1k-train-0001.tar"]).hexdigest()
    )


def test_shards_in_a_writable_store_are_indexed(foreign, bucket):
    assert main([bucket, "--workers", "1"]) == 0
    assert main([str(foreign), "--workers", "1"]) == 0
    output = Output(bucket)
    local = {path.name: path.read_bytes() for path in foreign.iterdir()}
    assert output.sizes().keys() == local.keys()
    for name, content in local.items():
        stored_bytes = output.fetch(name, foreign.parent).read_bytes()
        # A sidecar gets the modification time of its tar if the time is known.
        if name.startswith("imagenet1k") and name.endswith(".json"):
            assert json.loads(stored_bytes) == without(json.loads(content), "mtime_ns")
        else:
            assert digest(stored_bytes) == digest(content), name
    assert main([f"{bucket}/{BRACES}", "--workers", "1"]) == 0
    assert output.sizes().keys() == local.keys()


def test_shards_in_an_unwritable_store_need_out(foreign, bucket, s3, tmp_path, capsys):
    with s3.only("s3:ListBucket", "s3:GetObject"):
        assert main([bucket, "--workers", "1"]) == 2
        error = capsys.readouterr().err
        assert "no permission to do this" in error
        assert error.endswith(
            "For shards without write permission, pass a folder for the index with --out\n"
        )
        assert main([bucket, "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert_indexed_as_if_local(tmp_path / "out", foreign, bucket)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            f"<url>/{BRACES}",
            ("the index cannot be written next to shards at a URL: pass a folder with --out"),
        ),
        (
            "<url> --out <out>",
            (
                "no _info.json, and web servers cannot list files: pass the shard URLs, as in"
                " '<url>/train-{0000..0099}.tar'"
            ),
        ),
        (
            "<url>/x-train-{0,0}.tar --out <out>",
            "<url>/x-train-0.tar: no such file on the server; correct the address",
        ),
        (
            "<url>/train-0.tar <folder> --out <out>",
            "<folder>: expected a single folder, or shard URLs ending in .tar",
        ),
        (
            "<url>/{a,b}/train-0.tar --out <out>",
            "the shards are in several folders (<url>/a, <url>/b): index each folder",
        ),
        (
            "<folder> --out <out>",
            (
                "--out <out> is for shards at a URL; the index of a folder (<folder>) is written"
                " next to its shards"
            ),
        ),
        (
            "<url>/train-0.tar --out <folder>",
            "<folder>: contains shards (imagenet1k-train-0000.tar, imagenet1k-train-0001.tar, ",
        ),
        ("<url>/damaged-train-0000.tar --out <out>", "<url>/damaged-train-0000.tar: truncated"),
        (
            "<url>/hostile --out <out>",
            "../../etc/train-0.tar: expected names of tars in the same folder",
        ),
        (
            "<url>/train-0.tar --out <other>",
            (
                "<other>: contains the index of http://elsewhere/shards, not of <url>: choose"
                " another --out"
            ),
        ),
    ],
)
def test_errors_about_urls_give_one_line(arguments, message, foreign, web, tmp_path, capsys):
    web.files["/shards/damaged-train-0000.tar"] = web.files["/shards/imagenet1k-train-0000.tar"][
        :5000
    ]
    entry = {"filenames": ["../../etc/train-0.tar"], "shard_lengths": [1], "num_samples": 1}
    web.files["/shards/hostile/_info.json"] = json.dumps({"splits": {"train": entry}}).encode()
    (tmp_path / "other").mkdir()
    other = {
        "splits": {"train": {**entry, "filenames": ["train-0.tar"]}},
        "shards_at": "http://elsewhere/shards",
    }
    (tmp_path / "other" / "_info.json").write_text(json.dumps(other))
    for word, place in {
        "url": f"{web.url}/shards",
        "out": tmp_path / "out",
        "folder": foreign,
        "other": tmp_path / "other",
    }.items():
        arguments = arguments.replace(f"<{word}>", str(place))
        message = message.replace(f"<{word}>", str(place))
    assert main([*arguments.split(), "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert str(tmp_path / "tmp") not in error


@pytest.mark.parametrize(
    "pattern",
    [
        "a-{0..3}.tar",
        BRACES,
        "{000..012}",
        "{00..100}",
        "{1..010}",
        "{8..11}-{a,b}",
        "plain.tar",
        "{a,{b,c}-{0..1}}",
        "x{print}y",
        "${SAS}/{0..1}",
    ],
)
def test_braces_in_urls_are_expanded(pattern):
    assert sorted(expand_braces(pattern)) == sorted(set(braceexpand(pattern)))
