"""Test the writer: an interrupted run must resume and write the same bytes as an uninterrupted run,
leave no partial file and overwrite nothing."""

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import webdataset
from checksums import digests
from small_shards import FOUR, image_bytes, small_splits, source_of

from data_prep.errors import PrepError
from data_prep.write.catalog import Builder
from data_prep.write.images import ImagePolicy
from data_prep.write.plan import Settings, choose_num_shards, choose_part
from data_prep.write.shard import TarStream
from data_prep.write.writer import write
from vit.data.shards.tar import scan_tar
from vit.data.storage.opening import open_split
from vit.system.files import temporary_beside, temporary_file


def test_workers_and_order_have_no_effect(written, tmp_path):
    backwards = {split: samples[::-1] for split, samples in small_splits().items()}
    write(source_of(tmp_path, backwards), tmp_path / "root", replace(FOUR, workers=2))
    assert digests(tmp_path / "root") == digests(written)
    assert not [
        path.name
        for path in written.iterdir()
        if path.name.startswith((".", "_")) and path.name != "_info.json"
    ]


def test_shards_are_plain_tars(written):
    info = json.loads((written / "_info.json").read_text())
    train = info["splits"]["train"]
    assert train["name"] == "train"
    assert train["num_samples"] == 23
    assert sorted(train["shard_lengths"]) == [5, 6, 6, 6]
    assert len(info["splits"]["val"]["filenames"]) == 1  # proportional: 4 * 7 / 23
    for name, num_bytes, sha256 in zip(
        train["filenames"], train["shard_bytes"], train["shard_sha256"], strict=True
    ):
        data = (written / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (num_bytes, sha256)
        with tarfile.open(written / name) as tar:
            for member in tar:
                assert (
                    member.mode,
                    member.uid,
                    member.gid,
                    member.mtime,
                    member.uname,
                    member.gname,
                ) == (0o644, 0, 0, 0, "", "")
                assert member.isreg()
                assert not member.pax_headers
        listing = subprocess.run(
            ["tar", "-tvf", written / name], check=True, capture_output=True, text=True
        )
        assert listing.stderr == ""
        keys = [line.split()[-1] for line in listing.stdout.splitlines()]
        assert keys == [
            f"{sample.key}.{ext}" for sample in scan_tar(written / name) for ext in ("jpg", "cls")
        ]


def test_default_number_of_shards():
    assert choose_num_shards({"train": 23, "val": 7}, Settings(), 600.0) == {"train": 8, "val": 2}
    assert choose_num_shards({"train": 5, "val": 5}, Settings(), 600.0) == {"train": 5, "val": 5}
    assert choose_num_shards(
        {"train": 1000, "val": 100}, Settings(shard_bytes=50 * 600), 600.0
    ) == {"train": 20, "val": 2}
    with pytest.raises(PrepError, match="use --num-shards 23 or fewer"):
        choose_num_shards({"train": 23, "val": 7}, Settings(num_shards=24), 600.0)


def test_original_names_and_classes_are_returned_on_request(tmp_path, small):
    write(small, tmp_path / "root", replace(FOUR, with_json=True))
    names = {}
    for tar in (tmp_path / "root").glob("*.tar"):
        for sample in webdataset.WebDataset(str(tar), shardshuffle=False).decode():
            names[sample["__key__"]] = sample["json"]
    expected = {
        f"{split}_{n}": {"name": f"{split}.{n}.JPEG", "label": n % 3, "class": "abc"[n % 3]}
        for split, num in (("train", 23), ("val", 7))
        for n in range(num)
    }
    assert names == expected


def test_minival_is_cut_by_class_and_hash(tmp_path, small):
    write(small, tmp_path / "root", replace(FOUR, minival=0.25))
    info = json.loads((tmp_path / "root" / "_info.json").read_text())
    assert {split: described["num_samples"] for split, described in info["splits"].items()} == {
        "train": 17,
        "val": 7,
        "minival": 6,
    }
    assert np.bincount(open_split(tmp_path / "root", "minival").index["label"]).tolist() == [
        2,
        2,
        2,
    ]


def test_a_second_call_keeps_complete_files_and_rewrites_the_rest(written, small, tmp_path, capsys):
    root = tmp_path / "root"
    write(small, root, FOUR)
    modified = (root / "train-00001.tar").stat().st_mtime_ns
    (root / "train-00000.tar").unlink()
    os.truncate(root / "train-00002.tar", 1000)
    (root / "train-00003.json").unlink()
    (root / "_info.json").unlink()
    (root / ".train-00000.tar.elsewhere.1.tmp").write_bytes(b"left by a killed writer")
    os.utime(root / ".train-00000.tar.elsewhere.1.tmp", (1, 1))
    temporary_beside(root / "train-00000.tar").write_bytes(
        b"left by a killed writer of this host, whose lock went with it"
    )
    # Without a plan or an info file, the shards' origin is unknown.
    with pytest.raises(PrepError, match="shards of unknown origin"):
        write(small, root, FOUR)
    (root / "_info.json").write_bytes((written / "_info.json").read_bytes())
    (root / "mine.rows.npy").write_bytes(b"not of the writer")
    capsys.readouterr()
    write(small, root, FOUR)
    (root / "mine.rows.npy").unlink()
    assert "keeping 2 of 5 shards that already exist" in capsys.readouterr().out
    assert (root / "train-00001.tar").stat().st_mtime_ns == modified
    assert digests(root) == digests(written)


@pytest.mark.parametrize(
    ("num_train", "options", "settings", "difference"),
    [
        (23, {}, {"seed": 1}, "seed was 0, now 1"),
        (23, {}, {"num_shards": 5}, "num_shards was"),
        (23, {"quality": 9}, {}, "quality was null, now 9"),
        (23, {}, {"with_json": True}, "with_json was null, now true"),
        (23, {}, {"policy": ImagePolicy(resize_short_side=8)}, "resize_short_side was null, now 8"),
        (22, {}, {}, "catalog was"),
    ],
)
def test_other_contents_are_refused(written, tmp_path, num_train, options, settings, difference):
    before = digests(written)
    source = source_of(tmp_path, small_splits(num_train), **options)
    with pytest.raises(
        PrepError,
        match=rf"contains a data set with a different .*: .*{difference}.*choose another --out",
    ):
        write(source, written, replace(FOUR, **settings))
    assert digests(written) == before


def test_parts_in_any_order_are_the_whole_and_a_repeated_part_changes_nothing(
    written, small, tmp_path, capsys
):
    root = tmp_path / "root"
    for part, missing in (
        (
            "3-4",
            "3 of 5 shards are still missing (train-00000.tar, train-00001.tar, train-00002.tar)",
        ),
        ("0-0", "2 of 5"),
    ):
        write(small, root, replace(FOUR, part=part))
        assert missing in capsys.readouterr().out
    assert (root / "_writing.json").exists()
    assert not (root / "_info.json").exists()
    before = {path: path.stat().st_mtime_ns for path in root.iterdir()}
    write(small, root, replace(FOUR, part="0-0"))
    assert {path: path.stat().st_mtime_ns for path in root.iterdir()} == before
    write(small, root, replace(FOUR, part="0-2", workers=2))
    assert digests(root) == digests(written)
    before = {path: path.stat().st_mtime_ns for path in root.iterdir()}
    write(small, root, replace(FOUR, part="3-4"))
    assert "already complete" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in root.iterdir()} == before


def test_the_file_of_a_live_writer_is_left_alone(small, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    elsewhere = root / ".train-00000.tar.elsewhere.1.tmp"
    elsewhere.write_bytes(b"being written")
    with temporary_file(root / "train-00000.tar") as file:
        write(small, root, replace(FOUR, part="0-0"))
        assert Path(file.name).exists()
    assert elsewhere.exists()


def test_the_file_of_a_writer_that_outlives_its_command_is_removed_by_the_next(
    small, written, tmp_path
):
    root = tmp_path / "root"
    root.mkdir()
    left = open(temporary_beside(root / "train-00000.tar"), "wb")  # noqa: SIM115
    fcntl.flock(left, fcntl.LOCK_EX)

    def fill(builder: Builder) -> None:
        assert Path(left.name).exists(), "the next command must not remove a locked file"
        left.close()
        small.fill(builder)

    write(replace(small, fill=fill), root, FOUR)
    assert digests(root) == digests(written)


def test_a_process_that_finds_the_set_completed_by_another_leaves_nothing(
    small, written, tmp_path, capsys
):
    root = tmp_path / "root"

    def fill(builder: Builder) -> None:
        (builder.spool / "first").touch()
        write(small, root, FOUR)  # Another process removes the spool folder.
        (builder.spool / "second").touch()
        (root / "train-00001.rows.npy").touch()  # the rows of a shard that was published late
        (builder.spool / "first").read_bytes()

    write(replace(small, fill=fill), root, FOUR)
    assert "completed by another process" in capsys.readouterr().out
    assert digests(root) == digests(written)


def refused_advice(*_: int) -> None:
    raise OSError(errno.EINVAL, "a file system that takes no advice")


def no_memory(*_: int) -> None:
    raise MemoryError


@pytest.mark.parametrize(("advise", "error"), [(refused_advice, None), (no_memory, MemoryError)])
def test_an_error_in_the_hashing_thread_reaches_the_writer(tmp_path, monkeypatch, advise, error):
    monkeypatch.setattr(os, "posix_fadvise", advise)
    data = os.urandom(1 << 20)
    with open(tmp_path / "a.tar", "wb") as file, ThreadPoolExecutor(1) as pool:
        stream = TarStream(file.fileno(), pool)

        def add_all() -> None:
            try:
                for number in range(60):
                    stream.add(f"{number}.jpg", data)
                outcomes.append(stream.close())
            except BaseException as error:
                outcomes.append(type(error))

        outcomes: list[object] = []
        thread = threading.Thread(target=add_all, daemon=True)
        thread.start()
        thread.join(timeout=120)
    assert outcomes == [error or hashlib.sha256((tmp_path / "a.tar").read_bytes()).hexdigest()], (
        "the thread hangs or has a different result"
    )


def test_a_part_restores_missing_files_of_a_complete_dataset(written, small, tmp_path):
    root = tmp_path / "root"
    write(small, root, FOUR)
    (root / "val-00000.tar").unlink()
    write(small, root, replace(FOUR, part="1/2"))
    assert digests(root) == digests(written)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 10, 13])
def test_equal_parts_share_all_shards(num_parts):
    counts = {"train": 8, "val": 2}
    parts = [choose_part(f"{i}/{num_parts}", counts) for i in range(num_parts)]
    assert [number for part in parts for number in part] == list(range(10))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranges_include_both_ends():
    assert choose_part("7-8", {"train": 8, "val": 2}) == range(7, 9)
    assert choose_part(None, {"train": 8, "val": 2}) == range(10)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("8-10", r"shards between 0 and 9 \(train has 8; val has 2\)"),
        ("5-3", "expected A-B"),
        ("3/3", "or I/N"),
        ("0/0", "or I/N"),
        ("-1-3", "expected A-B, such as 100-199, or I/N"),
        ("all", "expected A-B"),
    ],
)
def test_invalid_parts_are_refused(part, message, tmp_path):
    with pytest.raises(PrepError, match=f"^--shards {part}: .*{message}"):
        choose_part(part, {"train": 8, "val": 2})


def test_a_complete_data_set_of_archives_is_not_listed_again(small, tmp_path, capsys):
    archive = tmp_path / "source" / "images.bin"
    calls = []

    def fill(builder: Builder) -> None:
        calls.append(1)
        small.fill(builder)

    source = replace(small, fill=fill, inputs=[archive])
    root = tmp_path / "root"
    for settings in (FOUR, Settings(), Settings()):
        write(source, root, settings)
    assert "already complete" in capsys.readouterr().out
    assert len(calls) == 1
    with pytest.raises(PrepError, match="jpeg_quality was 95, now 90"):
        write(source, root, Settings(policy=ImagePolicy(jpeg_quality=90)))
    os.utime(archive, (5, 5))
    write(source, root, Settings())
    assert len(calls) == 2
    archive.unlink()
    with pytest.raises(FileNotFoundError, match=r"images\.bin"):
        write(source, root, Settings())


def test_a_refused_command_keeps_the_files_of_another(small, tmp_path):
    root = tmp_path / "root"
    source = replace(small, inputs=[tmp_path / "source" / "images.bin"])
    write(source, root, replace(FOUR, part="0-1"))
    (root / "_spool").mkdir()
    before = sorted(path.name for path in root.iterdir())
    for settings, message in (
        (replace(FOUR, num_shards=5), "num_shards"),
        (replace(FOUR, seed=3), "seed"),
    ):
        with pytest.raises(PrepError, match=f"{message} was .* Nothing was changed"):
            write(source, root, settings)
    other = source_of(tmp_path / "other", small_splits(22))
    with pytest.raises(PrepError, match=r"catalog was .* Nothing was changed"):
        write(replace(other, inputs=[tmp_path / "other" / "images.bin"]), root, FOUR)
    assert sorted(path.name for path in root.iterdir()) == before


@pytest.mark.parametrize(
    ("fraction", "splits", "message"),
    [
        (0.01, small_splits(), "--minival 0.01: this is less than one image of the 8"),
        (0.5, {"val": small_splits()["val"]}, "the source has no training split to divide"),
    ],
)
def test_an_empty_minival_is_an_error(tmp_path, fraction, splits, message):
    with pytest.raises(PrepError, match=message):
        write(source_of(tmp_path, splits), tmp_path / "root", Settings(minival=fraction))


def test_names_in_any_encoding_are_accepted(tmp_path, capsys):
    splits = {
        "train": [
            ("gut.jpg", 0, image_bytes()),
            ("b\udcff.jpg", 1, b"damaged"),
            ("c\udcfe.jpg", 1, image_bytes()),
        ]
    }
    root = tmp_path / "root"
    write(
        source_of(tmp_path, splits),
        root,
        Settings(num_shards=1, max_unreadable=0.5, with_json=True),
    )
    assert json.loads((root / "quarantine.jsonl").read_text())["name"] == "b\udcff.jpg"
    split = open_split(root, "train")
    assert sorted(split.key(i) for i in range(split.num_samples)) == ["c\ufffd", "gut"]


def test_a_split_without_samples_is_refused(tmp_path):
    with pytest.raises(PrepError, match="split 'train' has no samples"):
        write(source_of(tmp_path, {"train": []}), tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_the_second_of_two_simultaneous_commands_with_other_options_is_refused(small, tmp_path):
    """The first command writes its data set while the second command lists the source."""
    root = tmp_path / "root"

    def fill(builder) -> None:
        write(small, root, FOUR)
        small.fill(builder)

    with pytest.raises(PrepError, match="seed was 0, now 1"):
        write(replace(small, fill=fill), root, replace(FOUR, seed=1))
    write(small, tmp_path / "alone", FOUR)
    names = {path.name for path in (tmp_path / "alone").glob("*.*")}
    assert {path.name for path in root.glob("*.*")} == names
    for name in names:
        assert (root / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name
