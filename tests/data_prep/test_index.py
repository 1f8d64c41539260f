"""Test that indexing makes shards from other tools readable without changing the tars."""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from checksums import digests
from small_shards import jpeg, pair, write_tar

from data_prep import imagefolder
from data_prep.index import main
from data_prep.verify import main as verify
from data_prep.write.index_records import split_of
from vit.config.base import Selection
from vit.data.select import choose
from vit.data.storage.opening import open_split


def tars(root: Path) -> dict[str, tuple[str, int]]:
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in root.glob("*.tar")
    }


def test_foreign_shards_become_readable(foreign, capsys):
    before = tars(foreign)
    assert main([str(foreign), "--workers", "2"]) == 0
    assert tars(foreign) == before
    assert (
        "train: 12 samples in 3 shards\nvalidation: 4 samples in 1 shard" in capsys.readouterr().out
    )
    train = open_split(foreign, "train")
    validation = open_split(foreign, "validation")
    assert [(train.key(i), train.read(i)) for i in range(12)] == [
        (f"train{n}", jpeg(n)) for n in range(12)
    ]
    assert train.index["label"].tolist() == [n % 5 for n in range(12)]
    assert train.num_classes == validation.num_classes == 5  # one list of classes for all splits
    first = digests(foreign)
    assert main([str(foreign), "--workers", "1"]) == 0
    assert digests(foreign) == first


def test_timm_reads_them_too(foreign):
    from timm.data import create_dataset

    assert main([str(foreign), "--workers", "1"]) == 0
    dataset = create_dataset(
        "wds/", root=str(foreign), split="validation", is_training=False, batch_size=2
    )
    assert [label for _, label in dataset] == [0, 1, 2, 0]


def test_the_info_of_another_tool_is_kept(foreign, capsys):
    names = [f"imagenet1k-train-{k:04d}.tar" for k in (2, 0)]  # in order, without the omitted shard
    theirs = {
        "splits": {
            "train": {
                "name": "train",
                "filenames": names,
                "shard_lengths": [4, 4],
                "num_samples": 8,
            }
        },
        "note": "x",
    }
    (foreign / "_info.json").write_text(json.dumps(theirs))
    assert main([str(foreign), "--workers", "1"]) == 0
    assert json.loads((foreign / "_info.json").read_text()) == theirs
    split = open_split(foreign, "train")
    assert [split.key(i) for i in range(8)] == [f"train{n}" for n in (8, 9, 10, 11, 0, 1, 2, 3)]
    theirs["splits"]["train"]["shard_lengths"] = [3, 5]
    (foreign / "_info.json").write_text(json.dumps(theirs))
    assert main([str(foreign), "--workers", "1"]) == 2
    assert "imagenet1k-train-0000.tar has 4 valid samples" in capsys.readouterr().err


def test_the_info_of_another_tool_does_not_lead_out_of_its_folder(foreign, capsys):
    shutil.copy(foreign / "imagenet1k-train-0000.tar", foreign.parent / "train-0.tar")
    before = digests(foreign.parent)
    split = {"filenames": ["../train-0.tar"], "shard_lengths": [4], "num_samples": 4}
    (foreign / "_info.json").write_text(json.dumps({"splits": {"train": split}}))
    assert main([str(foreign), "--workers", "1"]) == 2
    assert "../train-0.tar: expected names of tars in the same folder" in capsys.readouterr().err
    (foreign / "_info.json").unlink()
    assert digests(foreign.parent) == before


def test_a_replaced_tar_gets_a_new_sidecar(foreign):
    assert main([str(foreign), "--workers", "1"]) == 0
    (foreign / "_info.json").unlink()
    tar = foreign / "imagenet1k-train-0001.tar"
    data = tar.read_bytes()
    tar.write_bytes(data + bytes(512))
    assert main([str(foreign), "--workers", "1"]) == 0
    train = json.loads((foreign / "_info.json").read_text())["splits"]["train"]
    assert train["shard_bytes"][1] == len(data) + 512
    assert train["shard_sha256"][1] == hashlib.sha256(data + bytes(512)).hexdigest()


def test_our_own_shards_do_not_change(tmp_path):
    for n in range(6):
        image = tmp_path / "images" / "train" / "ab"[n % 2] / f"{n}.jpg"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(jpeg(n))
    (tmp_path / "images" / "train").rename(tmp_path / "images" / "val")
    shutil.copytree(tmp_path / "images" / "val", tmp_path / "images" / "train")
    root = tmp_path / "own"
    assert (
        imagefolder.main(
            [str(tmp_path / "images"), "--out", str(root), "--num-shards", "2", "--workers", "1"]
        )
        == 0
    )
    whole = digests(root)
    (root / "train-00000.idx").unlink()
    (root / "train.index.npy").unlink()
    assert main([str(root), "--workers", "1"]) == 0
    assert digests(root) == whole


def test_a_wrong_idx_is_rewritten(foreign, capsys):
    assert main([str(foreign), "--workers", "1"]) == 0
    whole = digests(foreign)
    idx = foreign / "imagenet1k-train-0001.idx"
    lines = idx.read_bytes().splitlines(True)
    for content in (b"PRECIOUS\n", b"".join([lines[0], *lines[:0:-1]])):
        idx.write_bytes(content)
        assert main([str(foreign), "--workers", "1"]) == 0
        assert digests(foreign) == whole


def test_an_idx_has_no_control_characters_and_keys_are_still_found_by_it(tmp_path):
    tar = shard_with(tmp_path, [("\x1b[2J a\u202e.jpg", jpeg(3)), ("\x1b[2J a\u202e.cls", b"0")])
    assert main([str(tmp_path), "--workers", "1"]) == 0
    assert verify([str(tmp_path)]) == 0
    lines = tar.with_suffix(".idx").read_text().splitlines()
    assert [line.split(" ")[3] for line in lines[1:]] == [
        *("s0.jpg", "s1.jpg", r"\x1b[2J_a\u202e.jpg", "s2.jpg")
    ]
    (tmp_path / "bad.txt").write_text("\x1b[2J a\u202e\n")
    split = open_split(tmp_path, "train")
    tar.write_bytes(bytes(tar.stat().st_size))
    chosen = choose(split, Selection(exclude=str(tmp_path / "bad.txt")))
    assert chosen.numbers.tolist() == [0, 1, 3], "no header is readable, so .idx must be used"


def test_duplicate_shards_and_keys_are_noted(tmp_path, capsys):
    root = tmp_path / "root"
    shard_with(root, [])
    assert main([str(root), "--workers", "1"]) == 0
    assert "more than once" not in capsys.readouterr().out
    (root / "_info.json").unlink()
    shutil.copy(root / "train-0000.tar", root / "val-0000.tar")
    shutil.copy(root / "train-0000.tar", root / "train-0001.tar")
    assert main([str(root), "--workers", "1"]) == 0
    equal = "train-0000.tar, train-0001.tar, val-0000.tar"
    assert f"note: {equal} have the same bytes: move _info.json and" in capsys.readouterr().out
    (root / "_info.json").unlink()
    (root / "train-0001.tar").unlink()
    (root / "val-0000.tar").unlink()
    shard_with(root, [("s9.jpg", jpeg(3)), ("s9.cls", b"0")], "train-0001.tar")
    assert main([str(root), "--workers", "1"]) == 0
    assert (
        f"note: 3 keys of train occur more than once: `python -m data_prep.verify {root}`"
        " lists them" in capsys.readouterr().out
    )


def test_a_script_without_a_main_guard_gets_the_reason_for_its_dead_workers(foreign, tmp_path):
    script = tmp_path / "script.py"
    call = f"index([{str(foreign)!r}])"
    ends = []
    for guard in ("", 'if __name__ == "__main__": '):
        script.write_text(f"from data_prep.index import index\n{guard}{call}\n")
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
        ends.append((done.returncode, done.stderr.strip()))
    assert ends[0][0] == 1
    assert ends[0][1].endswith(
        "a worker process was killed (out of memory?), or ended at its start, because a script"
        ' calls this function outside `if __name__ == "__main__":`; run the same command again,'
        " perhaps with fewer --workers"
    )
    assert ends[1][0] == 0


# ---- members that do not fit ---------------------------------------------------------------------


def write_members(path: Path, members: list[tuple[str, bytes | None]]) -> None:
    """Write a tar with the given members. If the content is None, write a hard link to the first
    member with the same suffix."""
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            if data is None:
                member.type = tarfile.LNKTYPE
                member.linkname = f"s0.{name.partition('.')[2]}"
                tar.addfile(member)
            else:
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


BAD: dict[str, list[tuple[str, bytes | None]]] = {
    "empty image": [("bad.jpg", b""), ("bad.cls", b"1")],
    "two images": [("bad.jpg", jpeg(1)), ("bad.png", jpeg(1)), ("bad.cls", b"1")],
    "no label": [("bad.jpg", jpeg(1))],
    "no image": [("bad.cls", b"1")],
    "broken header": [("bad.jpg", jpeg(1)[:30]), ("bad.cls", b"1")],
    "label no number": [("bad.jpg", jpeg(1)), ("bad.cls", b"cat")],
    "negative label": [("bad.jpg", jpeg(1)), ("bad.cls", b"-1")],
    "hard links": [("bad.jpg", None), ("bad.cls", None)],
}


def shard_with(
    root: Path, bad: list[tuple[str, bytes | None]], name: str = "train-0000.tar"
) -> Path:
    """Write three valid samples around an invalid sample."""
    root.mkdir(exist_ok=True)
    good = [[(f"s{n}.jpg", jpeg(n)), (f"s{n}.cls", b"%d" % (n % 2))] for n in range(3)]
    write_members(root / name, [*good[0], *good[1], *bad, *good[2]])
    return root / name


@pytest.mark.parametrize("kind", BAD)
def test_an_unsuitable_sample_is_skipped_and_listed(kind, tmp_path, capsys):
    tar = shard_with(tmp_path / "root", BAD[kind])
    assert main([str(tar.parent), "--workers", "1"]) == 0
    output = capsys.readouterr().out
    assert (
        f"skipped 1 invalid sample, listed in {tar.parent}/quarantine.jsonl; the first:"
        " train-0000.tar: sample 'bad' " in output
    )
    assert [
        json.loads(line)["key"]
        for line in (tar.parent / "quarantine.jsonl").read_text().splitlines()
    ] == ["bad"]
    info = json.loads((tar.parent / "_info.json").read_text())
    assert (info["quarantined"], info["splits"]["train"]["shard_lengths"]) == (1, [3])
    for again in (False, True):
        if again:  # Indexing the tars again must skip the same samples.
            (tar.parent / "train.index.npy").unlink()
        split = open_split(tar.parent, "train")
        assert [(split.key(i), split.read(i)) for i in range(len(split))] == [
            (f"s{n}", jpeg(n)) for n in range(3)
        ]
    before = digests(tar.parent)
    assert main([str(tar.parent), "--workers", "1"]) == 0
    assert digests(tar.parent) == before
    assert verify([str(tar.parent), "--workers", "1"]) == 0


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (BAD["empty image"], "Repair such samples, move the shard away, or describe .*"),
        (
            [("README", b"x")],
            (
                "contains no samples; expected pairs of <key>.jpg and <key>.cls .*; copy it again,"
                " or move it away"
            ),
        ),
    ],
    ids=["all unfit", "none"],
)
def test_a_shard_without_samples_that_fit_can_be_moved_away(members, message, tmp_path, capsys):
    root = shard_with(tmp_path / "root", []).parent
    write_members(root / "train-0001.tar", members)
    assert main([str(root), "--workers", "1", "--max-unreadable", "0.9"]) == 2
    assert re.search(f"train-0001.tar: .*{message}$", capsys.readouterr().err)
    (root / "train-0001.tar").rename(tmp_path / "away.tar")
    assert main([str(root), "--workers", "1"]) == 0


def test_members_outside_samples_are_reported(tmp_path, capsys):
    tar = shard_with(tmp_path / "root", [("README", b"x"), ("LICENSE", b"y")])
    assert main([str(tar.parent), "--workers", "1"]) == 0
    assert (
        "note: ignored because they are not part of a sample: a file without key and suffix (2"
        " times)" in capsys.readouterr().out
    )


def test_a_label_above_the_number_of_samples_is_refused(tmp_path, capsys):
    tar = shard_with(tmp_path / "root", [("far.jpg", jpeg(1)), ("far.cls", b"999999999")])
    assert main([str(tar.parent), "--workers", "1"]) == 2
    assert (
        "label 999,999,999 (in train-0000.tar) would require 1,000,000,000 classes for 4 samples"
        in capsys.readouterr().err
    )
    (tmp_path / "names.txt").write_text("".join(f"class{n}\n" for n in range(100)))
    write_members(tar, [("a.jpg", jpeg(0)), ("a.cls", b"99"), ("b.jpg", jpeg(1)), ("b.cls", b"0")])
    assert main([str(tar.parent), "--workers", "1", "--classes", str(tmp_path / "names.txt")]) == 0


def test_a_shard_copied_with_its_time_is_hashed_again(tmp_path, capsys):
    """rsync -t and cp -p may give a corrected shard a modification time that is older than that of
    the existing sidecar."""
    tar = shard_with(tmp_path / "root", [])
    os.utime(tar, (1, 1))
    assert main([str(tar.parent), "--workers", "1"]) == 0
    corrected = tar.read_bytes()
    at = corrected.index(jpeg(1)) + 25  # in a quantization table
    tar.write_bytes(corrected[:at] + bytes([corrected[at] ^ 1]) + corrected[at + 1 :])
    os.utime(tar, (2, 2))
    assert main([str(tar.parent), "--workers", "1"]) == 2
    assert "train-0000.tar has 3 valid samples" in capsys.readouterr().err
    (tar.parent / "_info.json").unlink()
    assert main([str(tar.parent), "--workers", "1"]) == 0
    info = json.loads((tar.parent / "_info.json").read_text())
    assert info["splits"]["train"]["shard_sha256"] == [hashlib.sha256(tar.read_bytes()).hexdigest()]


def test_the_split_may_be_named_on_the_command_line(foreign, capsys):
    for n, tar in enumerate(sorted(foreign.glob("*train*.tar"))):
        tar.rename(foreign / f"{n:05d}.tar")  # the names that img2dataset gives to shards
    (foreign / "imagenet1k-validation-0000.tar").unlink()
    assert main([str(foreign), "--workers", "1"]) == 2
    assert (
        "the names 00000.tar, 00001.tar, 00002.tar contain no split: use --split train if all"
        in capsys.readouterr().err
    )
    assert main([str(foreign), "--workers", "1", "--split", "train"]) == 0
    assert open_split(foreign, "train").num_samples == 12
    assert main([str(foreign), "--workers", "1", "--split", "train"]) == 0
    assert main([str(foreign), "--workers", "1", "--split", "val"]) == 2
    assert "--split is val, but _info.json lists train" in capsys.readouterr().err


def test_a_split_that_contradicts_the_names_is_refused(foreign, capsys):
    assert main([str(foreign), "--workers", "1", "--split", "train"]) == 2
    assert (
        "--split is train, but these file names belong to another split:"
        " imagenet1k-validation-0000.tar" in capsys.readouterr().err
    )


@pytest.mark.parametrize("names", [("test", "train", "valid"), ("Test", "Training", "dev")])
def test_the_validation_split_is_suggested_rather_than_the_test_split(names, tmp_path, capsys):
    for split in names:
        write_tar(tmp_path / f"{split}-000.tar", pair("a", 1, 0) + pair("b", 2, 1))
    assert main([str(tmp_path), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert f" data.val_split={names[2]};" in printed
    assert (" data.train_split=Training" in printed) == (names[1] != "train")


def test_splits_are_named_by_their_shards():
    names = {
        "train-00000.tar": "train",
        "imagenet1k-train-0000.tar": "train",
        "val-0.tar": "val",
        "a-b-validation-17.tar": "validation",
    }
    names |= {
        "train-00000-of-00100.tar": "train",
        "cc3m-heldout-000.tar": "heldout",
        "00000.tar": None,
        "data.tar": None,
        "x-y.tar": None,
    }
    assert {name: split_of(name) for name in names} == names


def test_help_is_readable():
    done = subprocess.run(
        [sys.executable, "-m", "data_prep.index", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ROOT" in done.stdout
    assert "--workers N" in done.stdout
