"""Test that scanning and reading shards returns the same samples as tarfile, webdataset and
timm."""

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
import threading

import numpy as np
import pytest
import webdataset
from PIL import Image
from small_shards import NUM_SHARDS, PER_SHARD, jpeg, pair, write_tar

from vit.data.shards.data_set import build_index
from vit.data.shards.info_file import SplitInfo
from vit.data.shards.members import SampleLayout
from vit.data.shards.split import Split
from vit.data.shards.tar import INDEX_DTYPE, scan_tar, survey_tar
from vit.data.storage.opening import open_split
from vit.system.files import ShardError


def test_written_samples_are_read_back(root):
    split = open_split(root, "train")
    assert (split.num_samples, split.num_classes, split.class_names) == (15, 4, list("abcd"))
    assert split.index.dtype == INDEX_DTYPE
    assert isinstance(split.index, np.memmap)
    for n in range(15):
        assert split.read(n) == jpeg(n)
        assert split.key(n) == f"key{n}"
    assert split.index["label"].tolist() == [n % 4 for n in range(15)]
    assert split.index["width"].tolist() == [20 + n for n in range(15)]
    assert split.index["height"].tolist() == [30 + 2 * n for n in range(15)]
    with pytest.raises(IndexError):
        split.read(15)


def test_one_process_of_a_host_checks_the_shards_of_a_folder(root):
    """If every process checked the shards, thousands of ranks would open each shard on a shared
    file system."""
    path = root / open_split(root, "train").filenames[1]
    path.write_bytes(path.read_bytes()[:512])
    with pytest.raises(ShardError, match="512 bytes, expected"):
        open_split(root, "train")
    split = open_split(root, "train", is_checked=True)
    assert split.read(0) == jpeg(0)
    with pytest.raises(ShardError):
        split.read(PER_SHARD)
    with pytest.raises(ShardError, match="512 bytes, expected"):
        open_split(root, "train", root / "cache", is_checked=True)


def test_offsets_equal_those_of_tarfile_and_dali(root):
    split = open_split(root, "train")
    for shard, name in enumerate(split.filenames):
        rows = split.index[shard * PER_SHARD : (shard + 1) * PER_SHARD]
        with tarfile.open(root / name) as tar:
            members = tar.getmembers()
        assert [(m.offset_data, m.size) for m in members[::2]] == list(
            zip(rows["offset"], rows["size"], strict=True)
        )
        header, *lines = (root / name).with_suffix(".idx").read_text().splitlines()
        assert header == f"v1.2 {PER_SHARD}"
        fields = [f"{m.name.split('.')[1]} {m.offset_data} {m.size} {m.name}" for m in members]
        assert lines == [
            f"{image} {label}" for image, label in zip(fields[::2], fields[1::2], strict=True)
        ]


def test_webdataset_and_timm_read_the_same_samples(root):
    from timm.data import create_dataset

    split = open_split(root, "train")
    ours = [
        (split.key(i), split.read(i), int(split.index["label"][i]))
        for i in range(split.num_samples)
    ]
    urls = [str(root / name) for name in split.filenames]
    theirs = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    assert [(s["__key__"], s["jpg"], int(s["cls"])) for s in theirs] == ours
    timms = create_dataset("wds/", root=str(root), split="train", is_training=False, batch_size=5)
    assert [(image.size, label) for image, label in timms] == [
        (Image.open(io.BytesIO(data)).size, label) for _, data, label in ours
    ]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_members_of_other_writers_are_read(tmp_path, format):
    """Other tools write folders, upper-case suffixes, additional files, and names that need a
    separate header."""
    long = "n01/" + "x" * (90 if format == tarfile.USTAR_FORMAT else 150)
    members = [
        *pair("./dir.d/a", 1, ext="JPEG"),
        ("./dir.d/a.json", b"{}"),
        ("__meta__", b"{}"),
        *pair(long, 2),
        ("README", b"no"),
    ]
    tar = write_tar(tmp_path / "train-0.tar", members, format=format)
    samples = scan_tar(tar)
    assert [s.key for s in samples] == ["./dir.d/a", long]
    assert [s["__key__"] for s in webdataset.WebDataset(str(tar), shardshuffle=False)] == [
        "./dir.d/a",
        long,
    ]
    assert [m.ext for m in samples[0].members] == ["jpeg", "cls", "json"]
    info = {
        "splits": {
            "train": {
                "name": "train",
                "filenames": [tar.name],
                "shard_lengths": [2],
                "num_samples": 2,
            }
        }
    }
    # Use only the keys that timm writes.
    (tmp_path / "_info.json").write_text(json.dumps(info))
    split = open_split(tmp_path, "train")
    assert [split.key(i) for i in range(2)] == ["./dir.d/a", long]
    assert split.num_classes == 3
    assert split.class_names == []


def test_a_split_is_a_sequence_of_images_and_labels(root):
    split = open_split(root, "train")
    assert len(split) == split.num_samples == 15
    image, label = split[3]
    expected = Image.open(io.BytesIO(split.read(3))).convert("RGB")
    assert (image.mode, image.tobytes(), label) == (
        "RGB",
        expected.tobytes(),
        int(split.index["label"][3]),
    )
    assert split[-1][1] == int(split.index["label"][14])
    with pytest.raises(IndexError):
        split[15]
    assert len(list(split)) == 15


def test_a_split_works_after_pickle_and_fork_and_in_threads(root):
    split = open_split(root, "train")
    expected = [split.read(i) for i in range(15)]
    state = pickle.dumps(split)
    assert len(state) < 2000, "the index must be pickled as a path"
    assert [pickle.loads(state).read(i) for i in range(15)] == expected

    child = os.fork()
    if child == 0:
        os._exit(0 if [split.read(i) for i in range(15)] == expected else 1)
    assert os.waitpid(child, 0)[1] == 0

    split.close()
    wrong = []
    threads = [
        threading.Thread(
            target=lambda: wrong.extend(i for i in range(15) if split.read(i) != expected[i])
        )
        for _ in range(8)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong
    num_open = len(os.listdir("/proc/self/fd"))
    split.close()
    assert len(os.listdir("/proc/self/fd")) == num_open - NUM_SHARDS


def test_more_shards_than_descriptors_can_be_read(root):
    names = [f"many-{k:05d}.tar" for k in range(40)]
    for name in names:
        os.link(root / "train-00000.tar", root / name)
    split = {
        "name": "many",
        "filenames": names,
        "shard_lengths": [PER_SHARD] * 40,
        "num_samples": PER_SHARD * 40,
    }
    (root / "_info.json").write_text(json.dumps({"splits": {"many": split}}))
    code = (
        "import resource, sys\n"
        "from vit.data.storage.opening import open_split\n"
        "split = open_split(sys.argv[1], 'many')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (24, 4096))\n"
        "assert sum(len(split.read(i)) for i in range(200)) == int(split.index['size'].sum())\n"
    )
    subprocess.run([sys.executable, "-c", code, root], check=True)


# ---- unusual members -----------------------------------------------------------------------------


def test_unfit_samples_are_listed_and_skipped_only_if_they_are_named(tmp_path):
    image = jpeg(0)
    members = [
        ("a.jpg", image),
        ("a.cls", b"1"),
        ("b.jpg", b""),
        ("b.cls", b"1"),
        ("c.jpg", image),
        ("d.jpg", image),
        ("d.cls", b"3"),
    ]
    members += [
        ("e.jpg", image),
        ("e.png", image),
        ("e.cls", b"1"),
        ("f.jpg", image[:40]),
        ("f.cls", b"1"),
        ("README", b"x"),
    ]

    tar = write_tar(tmp_path / "train-00000.tar", members)
    survey = survey_tar(tar)
    assert [sample.key for sample in survey.samples] == ["a", "d"]
    assert [(sample.key, sample.name) for sample in survey.unfit] == [
        ("b", "b.jpg"),
        ("c", "c.jpg"),
        ("e", "e.jpg"),
        ("f", "f.jpg"),
    ]
    assert survey.ignored == {"a file without key and suffix": 1}

    with pytest.raises(
        ShardError,
        match=(
            r"sample 'b' has an empty image file, 'b.jpg' \(4 of 6 samples do not fit\)\. .*"
            r"data_prep\.index` skips them"
        ),
    ):
        scan_tar(tar)

    assert scan_tar(tar, left_out=[sample.offset for sample in survey.unfit]) == survey.samples
    with pytest.raises(ShardError, match="sample 'b'"):
        scan_tar(tar, left_out=[sample.offset for sample in survey.unfit[1:]])


def test_hard_linked_files_are_read(tmp_path):
    with tarfile.open(tmp_path / "train-00000.tar", "w") as tar:
        for name, data in (("a.jpg", jpeg(0)), ("a.cls", b"1")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name in ("b.jpg", "b.cls"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.LNKTYPE
            member.linkname = f"a{name[1:]}"
            tar.addfile(member)
    with pytest.raises(
        ShardError,
        match=r"sample 'b' has no images \(its members: jpg is a hard link, cls is a hard link; ",
    ):
        scan_tar(tmp_path / "train-00000.tar")


def test_links_beside_the_files_of_a_sample_are_ignored(tmp_path):
    write_tar(tmp_path / "train-00000.tar", pair("a", 1))
    with tarfile.open(tmp_path / "train-00000.tar", "a") as tar:
        for _ in range(2):
            member = tarfile.TarInfo("a.txt")
            member.type = tarfile.SYMTYPE
            member.linkname = "elsewhere"
            tar.addfile(member)
    assert [sample.key for sample in scan_tar(tmp_path / "train-00000.tar")] == ["a"]


@pytest.mark.parametrize("name", ["\u00e9t\u00e9/\u00e7a", "\u732b/0", "x" * 150])
def test_keys_of_pax_names_are_complete(tmp_path, name):
    """Python's tarfile replaces a non-ASCII letter with '?' and writes the real name to a preceding
    header."""
    pairs = [member for key in (name, f"{name}2") for member in pair(key, 0)]
    write_tar(tmp_path / "train-00000.tar", pairs, format=tarfile.PAX_FORMAT)
    described = SplitInfo(["train-00000.tar"], [2], [None], [None])
    index = build_index(tmp_path, "train", described, SampleLayout())
    split = Split(tmp_path, "train", ["train-00000.tar"], [2], index, 1, [])
    assert [split.key(0), split.key(1)] == [name, f"{name}2"]
