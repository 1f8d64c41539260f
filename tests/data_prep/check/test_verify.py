"""Test that verification accepts an intact dataset, and finds and names every kind of damage."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
from checksums import digests
from servers import S3Server, WebServer
from verifying import PER_CLASS, edit, edit_json, foreign, image_bytes, members_of, pair, verify

from data_prep import index
from data_prep.verify import main
from data_prep.write.output import Output

# ---- intact datasets -----------------------------------------------------------------------------


def test_an_intact_dataset_passes(root, capsys):
    before = digests(root)
    assert verify(root) == 0
    output = capsys.readouterr().out
    assert "PROBLEMS" not in output
    assert "Notes" not in output
    num_train, num_val = (
        sum(len(members_of(tar)) // 2 for tar in root.glob(f"{split}-*.tar"))
        for split in ("train", "val")
    )
    assert num_train + num_val == sum(PER_CLASS.values()) + 1
    for row in (
        ("shards", 7, 1),
        ("samples recorded", num_train, num_val),
        ("images checked", num_train, num_val),
        ("changed or noted", "(0 +1|1 +0)"),
        ("quarantined", 1, 0),
    ):
        assert re.search(r"\s+".join(map(str, row)), output), row
    assert re.search(rf"{root}: no problems, \d+\.\d s\n$", output)
    assert digests(root) == before
    assert verify(root, "--strict") == 0


def test_a_quick_check_lists_its_omissions(root, capsys):
    assert verify(root, "--quick", "--sample", "10") == 0
    output = capsys.readouterr().out
    decoded = [
        int(number) for number in re.findall(r"\d+", re.search(r"images checked(.*)", output)[1])
    ]
    assert sum(decoded) in range(10, 18)
    assert f"Checked:\n  {sum(decoded)} images\n" in output
    assert "NOT checked (run without --quick)" in output
    assert "no problems in the checked part" in output


def test_the_command_ends_with_its_status_and_writes_plain_lines(root):
    command = [sys.executable, "-m", "data_prep.verify", str(root), "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    progress = r"(verifying: \d+ of \d+ .*\n)*"  # printed after 10 s
    assert done.returncode == 0
    assert re.fullmatch(progress, done.stderr), done.stderr
    assert "\x1b" not in done.stdout
    (root / "train-00002.tar").unlink()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_shards_of_other_tools_pass(tmp_path, capsys):
    shards = [
        [member for n in range(3) for member in pair(f"{s}_{n}", image_bytes(10 * s + n), n)]
        for s in range(2)
    ]
    root = foreign(tmp_path / "foreign", *shards)
    assert verify(root) == 0
    assert verify(root, "--quick") == 0
    described = {
        "name": "train",
        "filenames": ["train-000.tar", "train-001.tar"],
        "shard_lengths": [3, 3],
        "num_samples": 6,
    }
    # Write timm's info, without our keys.
    (root / "_info.json").write_text(json.dumps({"splits": {"train": described}}))
    assert verify(root) == 0
    edit(root / "train-001.tar", lambda data: data.__setitem__(700, data[700] ^ 1))
    capsys.readouterr()
    assert verify(root) == 1  # the sidecar contains the sha256
    assert "train-001.tar: altered or replaced: its sha256" in capsys.readouterr().out


# ---- datasets at a URL ---------------------------------------------------------------------------


@pytest.fixture
def web(root, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with WebServer({f"/set/{path.name}": path.read_bytes() for path in root.iterdir()}) as server:
        yield server


def test_a_dataset_on_a_web_server_is_verified(web, root, capsys):
    url = f"{web.url}/set"
    assert main([url, "--workers", "2"]) == 0
    assert "every byte of 8 of 8 shards against its sha256" in (output := capsys.readouterr().out)
    assert f"{url}: no problems" in output
    tar = bytearray(web.files["/set/train-00002.tar"])
    tar[1200] ^= 1
    web.files["/set/train-00002.tar"] = bytes(tar)
    del web.files["/set/train-00003.tar"]
    assert main([url, "--workers", "2"]) == 1
    output = capsys.readouterr().out
    assert "train-00002.tar: altered or replaced: its sha256" in output
    assert "train-00003.tar: no such file" in output
    assert "every byte of 7 of 8 shards against its sha256" in output


def test_a_quick_check_of_a_web_server_reads_only_ranges_of_shards(web, capsys):
    assert main([f"{web.url}/set", "--workers", "1", "--quick", "--sample", "8"]) == 0
    assert "no problems in the checked part" in capsys.readouterr().out
    ranges = [
        byte_range
        for method, path, byte_range in web.requests
        if method == "GET" and path.endswith(".tar")
    ]
    assert ranges
    assert all(ranges)


def test_an_index_of_shards_on_a_web_server_is_verified(web, root, tmp_path, capsys):
    assert (
        index.main(
            [
                f"{web.url}/set/{{train-0000{{0..6}},val-00000}}.tar",
                "--out",
                str(tmp_path / "index"),
                "--workers",
                "1",
            ]
        )
        == 0
    )
    assert main([str(tmp_path / "index"), "--workers", "1"]) == 0
    assert "every byte of 8 of 8 shards against its sha256" in capsys.readouterr().out


def test_a_dataset_in_a_store_is_verified(root, capsys):
    with S3Server() as server:
        output = Output(f"{server.new_bucket()}/set")
        for path in list(root.iterdir()):
            output.publish(path)
        assert main([str(output), "--workers", "1"]) == 0
        assert main([str(output), "--workers", "1", "--quick"]) == 0
        assert capsys.readouterr().out.count(f"{output}: no problems") == 2


# ---- datasets that cannot be checked -------------------------------------------------------------


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: shutil.rmtree(root), "no such directory; expected a folder of shards"),
        (lambda root: (shutil.rmtree(root), root.write_text("")), "Not a directory"),
        (lambda root: (root / "_info.json").unlink(), "no _info.json; if the shards are complete"),
        (
            lambda root: (root / "_info.json").rename(root / "_writing.json"),
            "this data set is incomplete: rerun the command that writes it",
        ),
        (lambda root: (root / "_info.json").write_text("{"), "_info.json: not valid JSON"),
        (
            lambda root: (root / "_info.json").write_text('{"splits": {"train": {}}}'),
            "split 'train': has no filenames, shard_lengths, num_samples",
        ),
        (
            lambda root: edit_json(
                root / "_info.json", lambda info: info["splits"]["val"]["shard_bytes"].append(1)
            ),
            "2 shard_bytes",
        ),
    ],
)
def test_a_dataset_that_cannot_be_checked_gives_one_line_and_status_2(
    root, prepare, message, capsys
):
    prepare(root)
    assert verify(root) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
