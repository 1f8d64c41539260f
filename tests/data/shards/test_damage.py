"""Test that corrupt shards, indexes and info files raise an error with a remedy, and are never read
as if they were intact."""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from small_shards import NUM_SHARDS, PER_SHARD, jpeg, pair, write_tar

from vit.data.shards.index_file import index_mismatch, index_sha256, open_index, save_index
from vit.data.shards.info_file import read_sidecar
from vit.data.shards.tar import INDEX_DTYPE, scan_tar
from vit.data.storage.opening import open_split
from vit.system.files import ShardError

# ---- damage --------------------------------------------------------------------------------------


def test_truncation_anywhere_is_reported(tmp_path):
    tar = write_tar(
        tmp_path / "train-00000.tar", [*pair("a", 1), *pair("b", 2)], format=tarfile.USTAR_FORMAT
    )
    data = tar.read_bytes()
    whole = scan_tar(tar)
    first, last = whole[0].members[1], whole[1].members[1]
    cut = tmp_path / "cut.tar"
    ends = sorted(
        {
            *range(0, last.offset + 1, 256),
            *(m.offset - 512 for s in whole for m in s.members),
            last.offset,
        }
    )
    for end in ends:
        cut.write_bytes(data[:end])
        # If a tar is truncated right after a complete sample, the damage cannot be detected.
        if first.offset + first.size <= end <= first.offset + 512:
            assert [s.key for s in scan_tar(cut)] == ["a"]
            continue
        with pytest.raises(ShardError, match=r"cut\.tar.*(truncated|empty|not a tar)"):
            scan_tar(cut)
    for end in range(last.offset + last.size, len(data), 512):
        cut.write_bytes(data[:end])
        assert scan_tar(cut) == whole


def test_damage_inside_a_shard_is_reported(tmp_path):
    tar = write_tar(tmp_path / "train-00000.tar", [m for n in range(5) for m in pair(f"k{n}", n)])
    data = tar.read_bytes()
    samples = scan_tar(tar)
    header = samples[2].image.offset - 512
    for patch, reason in (
        (bytes(512), "data follow the end marker"),
        (b"\xa5" * 512, "damaged: no tar header"),
    ):
        tar.write_bytes(data[:header] + patch + data[header + 512 :])
        with pytest.raises(ShardError, match=reason):
            scan_tar(tar)
    tar.write_bytes(b"<html>404</html>" * 100)
    with pytest.raises(ShardError, match=r"train-00000\.tar: not a tar but a web page"):
        scan_tar(tar)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (pair("a", 1)[:1], "'a' has no .cls"),
        (pair("a", 1)[1:], "'a' has no images .*expected one of jpg, jpeg, png, webp"),
        (pair("a", 1, ext="bmp"), r"'a' has no images \(its members: bmp, cls;"),
        (
            pair("a", 1, label="cat"),
            "sample 'a' has the label 'cat'; expected an integer.*; try --classes names.txt",
        ),
        (pair("a", 1, label="1.0"), "expected an integer"),
        (pair("a", 1) + pair("a", 2), "shares its key with another sample"),
        ([("a.jpg", b"not a jpeg"), ("a.cls", b"1")], "size cannot be read, 'a.jpg'"),
        ([("README", b"hello")], "contains no samples"),
        (pair("a", 1)[:1] + pair("b", 1, label="x"), "'a' has no .cls.*2 of 2 samples do not fit"),
    ],
)
def test_invalid_samples_are_named(tmp_path, members, message):
    tar = write_tar(tmp_path / "train-00000.tar", members)
    with pytest.raises(ShardError, match=rf"train-00000\.tar: .*{message}"):
        scan_tar(tar)


@pytest.mark.parametrize("num_neighbors", [0, 1])
def test_members_grouped_by_suffix_are_explained(tmp_path, num_neighbors):
    """`tar cf train-00000.tar *.jpg *.cls` groups files by suffix. The last image and the first
    label may then look like one sample."""
    pairs = [pair(key, number) for number, key in enumerate("abc")]
    images, labels = ([both[column] for both in pairs] for column in (0, 1))
    order = [*images, *labels] if not num_neighbors else [*images, *labels[::-1]]
    tar = write_tar(tmp_path / "train-00000.tar", order)
    with pytest.raises(ShardError) as caught:
        scan_tar(tar)
    num_unfit = 6 - 2 * num_neighbors
    assert (
        f"sample 'a' has no .cls with the label (its members: jpg) ({num_unfit} of"
        f" {num_unfit + num_neighbors} samples do not fit). Members of 'a' are at several places"
        " of this tar, but the members of a sample must be adjacent: write it again with `tar"
        " --sort=name -cf train-00000.tar -C FOLDER .`" in str(caught.value)
    )


@pytest.mark.skipif(
    "GNU tar" not in subprocess.getoutput("tar --version"), reason="no GNU tar: apt-get install tar"
)
def test_the_remedy_for_grouped_members_works(tmp_path):
    (tmp_path / "images").mkdir()
    for number, key in enumerate(("b", "a-1", "a", "a b")):
        for name, data in pair(key, number):
            (tmp_path / "images" / name).write_bytes(data)
    tar = tmp_path / "train-0.tar"
    subprocess.run(["tar", "--sort=name", "-cf", tar, "-C", tmp_path / "images", "."], check=True)
    assert len(scan_tar(tar)) == 4


def change_info(root: Path, **changes) -> None:
    info = json.loads((root / "_info.json").read_text())
    info["splits"]["train"].update(
        {key: value for key, value in changes.items() if key in info["splits"]["train"]}
    )
    info.update(
        {key: value for key, value in changes.items() if key not in info["splits"]["train"]}
    )
    (root / "_info.json").write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: shutil.rmtree(root), "no such directory"),
        (lambda root: (shutil.rmtree(root), root.write_text("")), "Not a directory"),
        (
            lambda root: (root / "_info.json").unlink(),
            r"no _info\.json.*python -m data_prep\.index .*root",
        ),
        (lambda root: (root / "_info.json").write_text("{"), r"_info\.json: not valid JSON"),
        (lambda root: (root / "_info.json").write_text("{}"), r"_info\.json: has no `splits`"),
        (lambda root: change_info(root, format_version=9), "format_version 9.*update"),
        (lambda root: change_info(root, num_samples=99), "num_samples 99"),
        (
            lambda root: change_info(root, filenames=["../a.tar", "train-00001.tar", "/b.tar"]),
            r"split 'train': \.\./a\.tar, /b\.tar: expected names of tars in the same folder;",
        ),
        (
            lambda root: change_info(root, class_names=["a", "b", "c"]),
            r"3 labels are outside \[0, 3\); the first is 3 \(sample 3, train-00000",
        ),
    ],
)
def test_problems_name_file_and_remedy(root, damage, message):
    damage(root)
    with pytest.raises(ShardError, match=message):
        open_split(root, "train")


def test_the_error_for_an_unknown_split_lists_the_splits(root):
    with pytest.raises(ShardError, match=r"no split 'trian', only train \(did you mean train\?\)"):
        open_split(root, "trian")


def test_the_problems_of_all_shards_are_reported_together(root):
    (root / "train-00000.tar").unlink()
    with open(root / "train-00002.tar", "r+b") as tar:
        tar.truncate(5000)
    with pytest.raises(ShardError) as caught:
        open_split(root, "train")
    assert "train-00000.tar: No such file" in str(caught.value)
    assert (
        "train-00002.tar: 5000 bytes, expected 20480 (truncated or replaced); copy it again"
        in str(caught.value)
    )


def stale_rows(index: np.ndarray, **columns) -> np.ndarray:
    index = np.array(index)
    for name, values in columns.items():
        index[name] = values
    return index


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path, index: path.unlink(),
        lambda path, index: path.write_bytes(path.read_bytes()[:300]),
        lambda path, index: path.write_bytes(b"garbage"),
        lambda path, index: np.save(path, index[:-1]),
        lambda path, index: np.save(
            path, index.astype([(name, "<i8") for name in INDEX_DTYPE.names])
        ),
        lambda path, index: np.save(path, stale_rows(index, offset=10**6)),
        lambda path, index: np.save(path, stale_rows(index, offset=index["offset"] + 512)),
        lambda path, index: np.save(path, index[[*range(4), 5, 4, *range(6, 15)]]),
    ],
    ids=[
        "absent",
        "cut",
        "garbage",
        "short",
        "old dtype",
        "beyond end",
        "elsewhere",
        "other lengths",
    ],
)
def test_a_stale_index_is_rebuilt(root, spoil, caplog):
    path = root / "train.index.npy"
    before = path.read_bytes()
    spoil(path, np.load(path))
    split = open_split(root, "train")
    assert [split.read(i) for i in range(15)] == [jpeg(n) for n in range(15)]
    assert path.read_bytes() == before
    assert "rebuilding" in caplog.text
    assert isinstance(split.index, np.memmap)
    assert not list(root.glob(".*.tmp"))


def test_an_index_that_cannot_be_written_stays_in_memory(root, caplog):
    (root / "train.index.npy").unlink()
    # Renaming a file to the name of an existing folder fails, even for root.
    (root / "train.index.npy").mkdir()
    split = pickle.loads(pickle.dumps(open_split(root, "train")))
    assert [split.read(i) for i in range(15)] == [jpeg(n) for n in range(15)]
    assert "kept only in memory" in caplog.text
    assert not list(root.glob(".*.tmp"))


def test_a_rebuilt_index_must_agree_with_the_info(root):
    (root / "train.index.npy").unlink()
    change_info(root, shard_lengths=[6, 4, 5])
    with pytest.raises(
        ShardError,
        match=(
            r"train-00000\.tar: holds 5 samples, but _info\.json says 6[^\0]*"
            r"train-00001\.tar: holds 5"
            r" .* says 4"
        ),
    ):
        open_split(root, "train")


def test_a_shard_truncated_while_in_use_is_reported(root):
    split = open_split(root, "train")
    os.truncate(root / "train-00001.tar", int(split.index["offset"][7]) + 3)
    assert split.read(6) == jpeg(6)
    with pytest.raises(
        ShardError,
        match=(
            rf"train-00001\.tar: sample 7 \(key key7\).* at offset {split.index['offset'][7]}"
            r" returned 3"
        ),
    ):
        split.read(7)
    (root / "train-00002.tar").unlink()
    with pytest.raises(ShardError, match=r"train-00002\.tar: sample 10 .*No such file"):
        split.read(10)


def test_a_sidecar_of_another_program_is_not_overwritten(root):
    (root / "train-00000.json").write_text('{"captions": []}')
    with pytest.raises(ShardError, match=r"train-00000\.json: has the name of a shard's sidecar"):
        read_sidecar(root / "train-00000.tar")
    (root / "train-00000.json").unlink()
    assert read_sidecar(root / "train-00000.tar") is None


# ---- checksums -----------------------------------------------------------------------------------


def flip_a_bit(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_an_error_that_names_the_sample(root):
    split = open_split(root, "train")
    offset = int(split.index["offset"][7])
    flip_a_bit(root / "train-00001.tar", offset + int(split.index["size"][7]) - 20)
    with pytest.raises(
        ShardError,
        match=(
            rf"train-00001\.tar: sample 7 \(key key7\): reading \d+ bytes at offset {offset} twice"
            r" returned other bytes than the indexed ones, so a bit flipped on the disk or in"
            rf" transit; restore the shard and start again \(if `python -m"
            rf" data_prep\.verify {root}`"
            r" finds"
        ),
    ):
        split.read(7)
    assert split.read(8) == jpeg(8)


@pytest.mark.parametrize(
    ("field", "message"),
    [("crc32c", "twice returned other bytes"), ("size", "found no image of this size")],
    ids=["crc32c", "size"],
)
def test_a_damaged_index_can_be_deleted(root, field, message):
    path = root / "train.index.npy"
    rows = np.load(path)
    rows[field][7] ^= 4
    np.save(path, rows)
    with pytest.raises(ShardError, match=rf"{message}.*finds that the index is damaged, delete"):
        open_split(root, "train").read(7)
    path.unlink()
    assert open_split(root, "train").read(7) == jpeg(7)


def test_a_label_out_of_range_in_the_index_is_reported(root):
    path = root / "train.index.npy"
    rows = np.load(path)
    rows["label"][7] ^= 1 << 20
    np.save(path, rows)
    with pytest.raises(
        ShardError, match=r"1 labels are outside .* train\.index\.npy is outdated: delete it"
    ):
        open_split(root, "train")
    path.unlink()
    assert open_split(root, "train").index["label"].tolist() == [n % 4 for n in range(15)]


def test_a_read_that_succeeds_the_second_time_is_used_and_reported(root, monkeypatch, caplog):
    """A network file system may return wrong bytes once, although the disk is intact."""
    split = open_split(root, "train")
    tar = root / "train-00001.tar"
    offset = int(split.index["offset"][7])
    flip_a_bit(tar, offset + 100)
    forget = split.tars.forget

    def mended(*place: int) -> None:
        flip_a_bit(tar, offset + 100)
        forget(*place)

    monkeypatch.setattr(split.tars, "forget", mended)
    assert split.read(7) == jpeg(7)
    assert (
        f"{tar}: the bytes at offset {offset} were wrong in the first read and right in the"
        " second" in caplog.text
    )


def test_no_checksum_is_computed_of_a_replaced_shard(root):
    flip_a_bit(root / "train-00001.tar", 700)
    (root / "train.index.npy").unlink()
    with pytest.raises(
        ShardError,
        match=r"train-00001\.tar: replaced by a file with other content \(its sha256 differs",
    ):
        open_split(root, "train")


def test_one_flipped_bit_in_the_header_of_an_index_never_gives_a_stack_trace(root, caplog):
    """numpy parses the header of an .npy file as Python code, but does not catch the parser's
    errors."""
    path = root / "train.index.npy"
    whole = path.read_bytes()
    for bit in range(0, 8 * (len(whole) - 15 * INDEX_DTYPE.itemsize), 3):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        outcome = "right"
        try:
            rows = open_index(path)
            # A wrong number of samples would be noticed later, because `_info.json` contains it
            # too.
            is_right = len(rows) != 15 or np.array_equal(rows, np.load(io.BytesIO(whole)))
        except ValueError as error:
            outcome = str(error)
            is_right = False
        assert is_right or re.search("damaged|another format|truncated", outcome), (bit, outcome)


def test_checking_an_index_needs_little_memory(tmp_path):
    """Checking all rows of an index with a billion samples in one pass would need 133 GB per
    rank."""
    rows = np.zeros(1000, INDEX_DTYPE)
    rows["offset"] = np.arange(1000) * 2048 + 512
    rows["size"] = 1000
    lengths = [1000] * 400
    save_index(tmp_path / "train.index.npy", (rows for _ in lengths))
    index = open_index(tmp_path / "train.index.npy")
    tracemalloc.start()
    try:
        assert index_mismatch(index, lengths, [2048 * 1000] * 400) == ""
        assert len(index_sha256(index, lengths)) == 64
        used_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert used_bytes < index.nbytes / 50


def test_checksums_do_not_change_the_identity_of_a_split(root):
    split = open_split(root, "train")
    rows = np.array(split.index)
    rows["crc32c"] = np.repeat(range(NUM_SHARDS), PER_SHARD)
    assert split.identity() == hashlib.sha256(rows.tobytes()).hexdigest()
