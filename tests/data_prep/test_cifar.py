"""Test CIFAR-10 and CIFAR-100 in binary form: every record must match an independent reader, and
corrupt files must be rejected."""

import gzip
import hashlib
import io
import pickle
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from prep_place import new_catalogue
from servers import WebServer

from data_prep import cifar
from data_prep.errors import PrepError
from data_prep.write.catalogue import Source
from vit.data.shards.data_set import open_split

CLASSES = {
    10: ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
    100: [f"fine_{n:02d}" for n in range(100)],
}


def contents(classes: int) -> dict[str, bytes]:
    """Return all files of a dataset. The images are gradients whose brightness increases with the
    label."""
    kind = cifar.KINDS[classes]
    y, x = np.mgrid[:32, :32].astype(np.uint8)
    # The original file ends with a blank line.
    files = {kind.class_names: "".join(f"{name}\n" for name in CLASSES[classes]).encode() + b"\n"}
    for seed, (name, (_, count)) in enumerate(kind.files.items()):
        labels = (
            np.random.default_rng(seed).permutation(np.arange(count) % classes).astype(np.uint8)
        )
        records = np.empty((len(labels), kind.label_bytes + 3072), np.uint8)
        records[:, 0] = labels // 5  # CIFAR-100's coarse label, overwritten for CIFAR-10
        records[:, kind.label_bytes - 1] = labels
        for channel in range(3):
            plane = records[
                :, kind.label_bytes + 1024 * channel : kind.label_bytes + 1024 * (channel + 1)
            ]
            plane[:] = (3 * x + channel * y).reshape(-1)
            plane += (labels * (1 + channel) % 90)[:, None]
        files[name] = records.tobytes()
    return files


@pytest.fixture(scope="module")
def full10() -> dict[str, bytes]:
    return contents(10)


@pytest.fixture
def small(monkeypatch) -> dict[int, dict[str, bytes]]:
    """Write the files of both datasets with one percent of the records."""
    for classes, kind in list(cifar.KINDS.items()):
        fewer = {name: (split, count // 100) for name, (split, count) in kind.files.items()}
        monkeypatch.setitem(cifar.KINDS, classes, kind._replace(files=fewer))
    return {classes: contents(classes) for classes in (10, 100)}


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def pack(path: Path, files: dict[str, bytes], prefix: str = "cifar/", mode: str = "w:gz") -> Path:
    """Write an archive with a folder, its files and a readme, like the official archives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, **({"compresslevel": 1} if mode == "w:gz" else {})) as tar:
        for name, content in {**files, "readme.html": b"<html>"}.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_all_records_are_read_with_their_labels(full10, tmp_path):
    archive = cifar.source(put(tmp_path / "cifar-10-batches-bin", full10).parent)
    catalogue = new_catalogue(archive, tmp_path, seed=0)
    assert catalogue.splits == {"train": 50_000, "val": 10_000}
    assert catalogue.class_names == CLASSES[10]
    for split in ("train", "val"):
        for sample in catalogue.table(split).samples(range(0, catalogue.splits[split], 97)):
            name, _, number = sample.name.partition("/")
            record = full10[name][int(number) * 3073 :][:3073]
            assert record[0] == sample.label
            assert sample.key == f"{name.removesuffix('.bin')}-{int(number):05d}"
            planes = [
                [record[1 + 1024 * channel + 32 * row :][:32] for row in range(32)]
                for channel in range(3)
            ]
            image = Image.open(io.BytesIO(archive.read(sample)))
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (32, 32))
            assert isinstance(image, JpegImageFile)
            assert [(h, v) for _, h, v, _ in image.layer] == [(1, 1)] * 3, (
                "chroma must not be subsampled"
            )
            expected = np.stack(
                [np.array([list(row) for row in plane]) for plane in planes], axis=-1
            )
            assert np.abs(np.asarray(image, np.int64) - expected).max() <= 4


@pytest.mark.parametrize("classes", [10, 100])
def test_every_layout_gives_the_same_shards(small, classes, tmp_path, capsys):
    kind = cifar.KINDS[classes]
    files = small[classes]
    sources = [
        put(tmp_path / "files", files),
        put(tmp_path / "extracted" / kind.folder, files).parent,
        pack(tmp_path / "an.tar.gz", files),
        pack(tmp_path / "a.tar", files, prefix="./deep/er/", mode="w"),
        pack(tmp_path / "with_archive" / kind.archive, files).parent,
        put(
            put(tmp_path / "two" / kind.folder, files).parent / cifar.KINDS[110 - classes].folder,
            small[110 - classes],
        ).parent,
    ]
    pack(tmp_path / "extracted" / kind.archive, {})  # extracted files are preferred
    everything = [
        images_of(cifar.source(source, classes), tmp_path / f"c{number}")
        for number, source in enumerate(sources)
    ]
    assert all(content == everything[0] for content in everything)
    assert (
        cifar.main(
            [str(sources[2]), "--out", str(tmp_path / "out"), "--num-shards", "2", "--workers", "1"]
        )
        == 0
    )
    train = open_split(tmp_path / "out", "train")
    val = open_split(tmp_path / "out", "val")
    assert (train.num_samples, val.num_samples) == (500, 100)
    assert train.class_names == CLASSES[classes]
    assert np.bincount(train.index["label"]).tolist() == [500 // classes] * classes, (
        "all labels must be equally frequent"
    )
    assert {
        split.key(i): split.read(i) for split in (train, val) for i in range(split.num_samples)
    } == everything[0][1]
    assert not list((tmp_path / "out").glob("[._]*atalogue*")), "temporary files must be removed"
    assert cifar.main([str(tmp_path / "two"), "--out", str(tmp_path / "none")]) == 2
    assert "contains CIFAR-10 in " in capsys.readouterr().err


def images_of(found: Source, folder: Path) -> tuple[str, dict[str, bytes]]:
    """Return the hash of the catalog's keys and labels, and a dict from keys to images."""
    catalogue = new_catalogue(found, folder, seed=0)
    tables = [
        catalogue.table(split).samples(range(total)) for split, total in catalogue.splits.items()
    ]
    return catalogue.sha256, {
        sample.key: found.read(sample) for samples in tables for sample in samples
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda files: files.pop("data_batch_3.bin"),
            "these files are missing: data_batch_3.bin; extract them from cifar-10-binary.tar.gz",
        ),
        (lambda files: files.pop("batches.meta.txt"), "files are missing: batches.meta.txt"),
        (
            lambda files: files.clear(),
            "no CIFAR files; expected cifar-10-binary.tar.gz or its data_batch_1.bin, ",
        ),
        (
            lambda files: files.update({"test_batch.bin": files["test_batch.bin"][:-1]}),
            "test_batch.bin: has 307,299 bytes, expected 307,300 (100 rec",
        ),
        (
            lambda files: files.update(
                {
                    "test_batch.bin": (
                        bytes(3073 * 7) + b"\x0a" + files["test_batch.bin"][3073 * 7 + 1 :]
                    )
                }
            ),
            "test_batch.bin: record 7 has label 10, expected 0 to 9",
        ),
        (
            lambda files: files.update({"batches.meta.txt": b"cat\ncat\n"}),
            "batches.meta.txt: contains 2 names, 1 of them distinct; expected the names",
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_wrong_files_give_one_line(small, tmp_path, capsys, change, message, packed):
    files = small[10]
    change(files)
    source = pack(tmp_path / "source.tar.gz", files) if packed else put(tmp_path / "source", files)
    assert cifar.main([str(source), "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    error = capsys.readouterr().err
    assert re.match(r"error: .*\n\Z", error)
    assert message in error
    assert not list(tmp_path.glob("out/*"))


def test_hostile_and_damaged_archives_are_refused(small, tmp_path):
    whole = pack(tmp_path / "whole.tar.gz", small[10]).read_bytes()
    plain = gzip.decompress(whole)
    for content, message in (
        (whole[: len(whole) // 2], r"damaged or truncated"),
        (whole[:1000] + bytes(1000) + whole[2000:], r"damaged or truncated"),
        (gzip.compress(plain[:700_000], 1), r"damaged or truncated"),
        (b"PK\3\4" + bytes(600), r"not a tar or tar.gz"),
        (b"", r"not a tar or tar.gz"),
    ):
        (tmp_path / "bad.tar.gz").write_bytes(content)
        with pytest.raises(PrepError, match=message):
            cifar.source(tmp_path / "bad.tar.gz")
    with tarfile.open(tmp_path / "link.tar", "w") as tar:
        for name in cifar.KINDS[10].files:
            link = tarfile.TarInfo(f"../../{name}")
            link.type = tarfile.SYMTYPE
            link.linkname = "/etc/passwd"
            tar.addfile(link)
    with pytest.raises(PrepError, match="no CIFAR files"):
        cifar.source(tmp_path / "link.tar")
    with tarfile.open(tmp_path / "bomb.tar", "w") as tar:
        member = tarfile.TarInfo("data_batch_1.bin")
        member.size = 1 << 40
        tar.addfile(member)
    with pytest.raises(
        PrepError,
        match=(
            r"contains 'data_batch_1.bin' \(1,099,511,627,776 bytes\) after 0 other members,"
            r" unlike a CIFAR archive"
        ),
    ):
        cifar.source(tmp_path / "bomb.tar")
    many = pack(tmp_path / "many.tar", {f"{number}.txt": b"" for number in range(101)}, mode="w")
    with pytest.raises(PrepError, match="unlike a CIFAR archive"):
        cifar.source(many)


def test_pickles_are_refused_unopened(tmp_path):
    """The pickle would create a file if it were loaded."""

    class Trap:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "sprung",))

    batch = {"data_batch_1": pickle.dumps(Trap())}
    sources = [
        put(tmp_path / "a", batch),
        put(tmp_path / "b" / "cifar-10-batches-py", batch).parent,
        put(tmp_path / "c" / "cifar-100-python", {"train": batch["data_batch_1"]}).parent,
        pack(tmp_path / "d" / "cifar-10-python.tar.gz", batch).parent,
        pack(tmp_path / "renamed.tar.gz", batch),
        put(tmp_path / "half", {"cifar-10-python.tar.gz": b"half downloaded"}),
    ]
    for source in sources:
        with pytest.raises(
            PrepError, match=(r"no CIFAR files; expected cifar-10-binary.tar.gz or .*")
        ):
            cifar.source(source)
    assert not (tmp_path / "sprung").exists()


def test_download_from_a_mirror(small, tmp_path, capsys, monkeypatch):
    archive = pack(tmp_path / "made.tar.gz", small[100]).read_bytes()
    command = [
        str(tmp_path / "new"),
        "--out",
        str(tmp_path / "out"),
        "--workers",
        "1",
        "--num-shards",
        "2",
    ]
    with WebServer({"/kriz/cifar-100-binary.tar.gz": archive}) as server:
        assert cifar.main([*command, "--url", f"{server.url}/kriz"]) == 2
        assert "--download requires --classes 10 or --classes 100" in capsys.readouterr().err
        assert cifar.main([*command, "--url", f"{server.url}/kriz", "--classes", "100"]) == 2
        assert "expected 03b5dce01913d631647c71ecec9e9cb8" in capsys.readouterr().err
        kind = cifar.KINDS[100]._replace(md5=hashlib.md5(archive).hexdigest())
        monkeypatch.setitem(cifar.KINDS, 100, kind)
        server.cuts = [5000]
        assert cifar.main([*command, "--url", f"{server.url}/kriz", "--classes", "100"]) == 0
    assert open_split(tmp_path / "out", "train").num_samples == 500


def test_a_missing_path_is_reported(tmp_path):
    with pytest.raises(
        PrepError,
        match=r"nowhere: no such file or folder; expected cifar-100-binary.tar.gz or its train",
    ):
        cifar.source(tmp_path / "nowhere", 100)
