"""Test that all layouts of ImageNet produce the same catalog and the same image bytes, with
torchvision's labels."""

import hashlib
import os
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
from fake_imagenet import (
    WNIDS,
    Fake,
    as_official,
    as_parquet,
    kaggle_files,
    make_fake,
    tar_of,
    write_archives,
    write_devkit,
    write_flat_val,
    write_inner_tars,
    write_torchvision_tree,
    write_train_tar,
    write_zip,
)
from prep_place import new_catalog

from data_prep import imagenet
from data_prep.errors import PrepError
from data_prep.imagenet import differences, source
from data_prep.write.catalog import Catalog


@pytest.fixture(scope="module")
def fake() -> Fake:
    return make_fake(num_classes=12, train_per_class=5, val_per_class=3, odd=True)


def catalog(folder: Path, *paths: Path) -> Catalog:
    return new_catalog(source(paths, allow_partial=True), folder, seed=0, workers=2)


def contents(found: Catalog, split: str) -> dict[str, tuple[int, str, int, bytes]]:
    """Return {key: (label, name, size, bytes)}."""
    table = found.table(split)
    return {
        s.key: (s.label, s.name, s.size, imagenet.read(s)) for s in table.samples(range(len(table)))
    }


def expected(fake: Fake, split: str) -> dict[str, tuple[int, str, int, bytes]]:
    images = fake.images(split)
    return {
        key: (label, f"{key}.JPEG", len(images[key]), images[key])
        for key, label in fake.labels(split).items()
    }


@pytest.fixture(scope="module")
def reference(fake, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("reference")
    return catalog(folder, *as_official(fake, folder)).sha256


def test_the_layout_is_reported(tmp_path, fake, capsys):
    listing = catalog(tmp_path, *as_official(fake, tmp_path))
    output = capsys.readouterr().out
    folder = tmp_path / "downloads"
    assert f"train: a tar of tars, read in place ({folder}/ILSVRC2012_img_train.tar)" in output
    assert f"val: a flat tar, read in place ({folder}/ILSVRC2012_img_val.tar)" in output
    assert f"labels of val: the development kit ({folder}/ILSVRC2012_devkit_t12.tar.gz)" in output
    assert "partial: train: 67 images instead of 1,281,167" in output
    recorded = (
        "partial: labels are positions among 12 classes: not the labels of published weights, which"
        " know 1,000"
    )
    assert recorded in listing.notes, "_info.json of earlier versions contains this text"
    assert (
        f"train: a tar of tars, read in place ({folder}/ILSVRC2012_img_train.tar)" in listing.notes
    )


def test_labels_equal_those_of_torchvision(tmp_path, fake, monkeypatch):
    """The test reads the same archives and development kit with torchvision. Published weights use
    torchvision's labels."""
    from torchvision.datasets import ImageNet
    from torchvision.datasets import imagenet as theirs

    folder = as_official(fake, tmp_path)[0]
    ours = catalog(tmp_path, folder)
    for part, (name, _) in theirs.ARCHIVE_META.items():
        md5 = hashlib.md5((folder / name).read_bytes()).hexdigest()
        monkeypatch.setitem(theirs.ARCHIVE_META, part, (name, md5))
    for split in ("train", "val"):
        labels = {Path(path).stem: label for path, label in ImageNet(str(folder), split).samples}
        assert labels == {key: label for key, (label, *_) in contents(ours, split).items()}
        assert labels == fake.labels(split)
    with pytest.raises(
        PrepError,
        match=(
            r"found 2 sources for train: .*ILSVRC2012_img_train.tar \(a tar of tars.*/train \(12"
            r" class folders\)"
        ),
    ):
        source([folder], allow_partial=True)  # Archives and folders now exist side by side.


def test_a_thousand_tars_are_read_in_any_order(tmp_path):
    fake = make_fake(num_classes=1000, train_per_class=2, val_per_class=1)
    write_inner_tars(fake, tmp_path / "train")
    write_flat_val(fake, tmp_path / "val")
    write_devkit(fake, tmp_path / "ILSVRC2012_devkit_t12.tar.gz")
    listing = catalog(
        tmp_path, tmp_path / "train", tmp_path / "val", tmp_path / "ILSVRC2012_devkit_t12.tar.gz"
    )
    assert listing.class_names == WNIDS
    assert listing.sha256 == catalog(tmp_path / "x", _archives_of(fake, tmp_path / "x")).sha256
    for split in ("train", "val"):
        assert {key: row[0] for key, row in contents(listing, split).items()} == fake.labels(split)


def _archives_of(fake: Fake, folder: Path) -> Path:
    return write_archives(fake, folder / "downloads")


# ---- files that are not ImageNet's ---------------------------------------------------------------


def test_files_of_macos_are_skipped(tmp_path, fake, reference):
    tree = write_torchvision_tree(fake, tmp_path / "tree")
    for folder in (
        tree,
        tree / "train",
        tree / "train" / fake.wnids[0],
        tree / "val" / fake.wnids[1],
    ):
        (folder / ".DS_Store").write_bytes(b"x")
        (folder / f"._{fake.wnids[0]}_1.JPEG").write_bytes(b"x")
    (tree / "__MACOSX" / "train").mkdir(parents=True)
    (tree / "train" / fake.wnids[0] / "notes.txt").write_text("no image")
    assert catalog(tmp_path / "a", tree).sha256 == reference
    archives = _archives_of(fake, tmp_path)
    with tarfile.open(archives / "ILSVRC2012_img_train.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo(f"._{fake.wnids[0]}.tar"))
    assert catalog(tmp_path / "t", archives).sha256 == reference
    files = kaggle_files(fake)
    files |= {f"__MACOSX/{name.replace('n0', '._n0')}": b"x" for name in files}
    files |= {f"ILSVRC/Data/CLS-LOC/train/{fake.wnids[0]}/._{fake.wnids[0]}_1.JPEG": b"x"}
    assert catalog(tmp_path / "b", write_zip(files, tmp_path / "a.zip")).sha256 == reference
    dirty = Fake(
        fake.wnids,
        {w: {f"./._{w}_1.JPEG": b"x"} | images for w, images in fake.train.items()},
        fake.val,
        fake.val_wnids,
        fake.ids,
    )
    assert catalog(tmp_path / "c", write_archives(dirty, tmp_path / "d")).sha256 == reference


def test_other_files_among_the_images_are_reported(tmp_path, fake):
    folder = write_torchvision_tree(fake, tmp_path / "in")
    first = fake.wnids[0]
    (tmp_path / "in.tar").write_bytes(
        tar_of([(f"{first}.tar", tar_of([(f"{first}_1.JPEG", b"x"), ("readme", b"")]))])
    )
    listing = catalog(tmp_path, tmp_path / "in.tar", folder / "val")
    assert "train: 1 files that are no images are left out: readme" in listing.notes


# ---- image counts --------------------------------------------------------------------------------


def test_complete_counts_have_no_differences():
    train = np.full(1000, 1300)
    train[0] = 732
    # With 1,300 images in each class, the total would be 18,833 too high.
    train[1:] -= np.diff(np.linspace(0, 18_833 - 568, 1000).astype(int))
    assert train.sum() == 1_281_167
    assert differences("train", WNIDS, train) == []
    assert differences("val", WNIDS, np.full(1000, 50)) == []


def test_all_differences_are_reported():
    train = np.full(1000, 1281)
    train[[3, 4]] = 0
    train[5] = 731
    train[6] = 1301
    assert differences("train", WNIDS, train) == [
        f"train: {train.sum():,} images instead of 1,281,167",
        f"train: 2 classes have no images: {WNIDS[3]} (0), {WNIDS[4]} (0)",
        f"train: 1 classes have fewer than 732: {WNIDS[5]} (731)",
        f"train: 1 classes have more than 1300: {WNIDS[6]} (1301)",
    ]
    val = np.full(1000, 50)
    val[7] = 51
    val[8] = 49
    assert differences("val", WNIDS, val) == [
        f"val: 1 classes have fewer than 50: {WNIDS[8]} (49)",
        f"val: 1 classes have more than 50: {WNIDS[7]} (51)",
    ]


def test_val_skips_the_classes_that_are_missing_from_train(tmp_path, fake):
    folder = as_official(fake, tmp_path)[0]
    small = make_fake(3, 2, 1)
    write_train_tar(small, folder / "ILSVRC2012_img_train.tar")
    listing = catalog(tmp_path, folder)
    assert listing.class_names == small.wnids
    assert listing.splits == {"train": 6, "val": 9}
    assert any("27 images of unknown classes" in note for note in listing.notes)


def test_a_single_split_is_accepted(tmp_path, fake):
    folder = as_official(fake, tmp_path)[0]
    with pytest.raises(
        PrepError, match=r"no images of train found; expected one of ILSVRC2012_img_train\.tar"
    ):
        source([folder / "ILSVRC2012_img_val.tar", folder / "ILSVRC2012_devkit_t12.tar.gz"])
    val = catalog(
        tmp_path / "v", folder / "ILSVRC2012_img_val.tar", folder / "ILSVRC2012_devkit_t12.tar.gz"
    )
    assert contents(val, "val") == expected(fake, "val")
    assert (val.class_names, list(val.splits)) == (fake.wnids, ["val"])
    train = catalog(tmp_path / "t", folder / "ILSVRC2012_img_train.tar")
    assert contents(train, "train") == expected(fake, "train")


# ---- running the command again -------------------------------------------------------------------


def test_parquets_are_copied_once_and_again_when_they_change(tmp_path, fake, capsys):
    folder = as_parquet(fake, tmp_path)[0]
    spooled = {path.name: path.stat().st_ino for path in _spooled(tmp_path, folder, 0)}
    assert len(spooled) == 10
    # A different seed must reuse the same images.
    assert {path.name: path.stat().st_ino for path in _spooled(tmp_path, folder, 1)} == spooled
    victim = sorted(tmp_path.glob("_spool/train-00000*.json"))[0]
    victim.unlink()  # as if the command had been killed between writing the images and their table
    assert {path.name for path in _spooled(tmp_path, folder, 2)} == spooled.keys()
    changed = folder / "data" / "train-00000-of-00003.parquet"
    os.utime(changed, (1, 1))
    assert len({path.name for path in _spooled(tmp_path, folder, 3)} - spooled.keys()) == 2


def _spooled(folder: Path, parquets: Path, seed: int) -> list[Path]:
    listing = new_catalog(source([parquets], allow_partial=True), folder, seed=seed, workers=2)
    assert listing.splits == {"train": 67, "val": 36}
    return sorted((folder / "_spool").iterdir())


def test_md5s_are_compared_on_request(tmp_path, fake, monkeypatch, capsys):
    folder = as_official(fake, tmp_path)[0]
    with pytest.raises(PrepError) as error:
        source([folder], allow_partial=True, md5=True)
    for name, md5 in imagenet.MD5.items():
        digest = hashlib.md5((folder / name).read_bytes()).hexdigest()
        assert (
            f"{name} ({(folder / name).stat().st_size:,} bytes) has md5 {digest}; expected {md5}"
            in str(error.value)
        )
        monkeypatch.setitem(imagenet.MD5, name, digest)
    source([folder], allow_partial=True, md5=True)
    assert capsys.readouterr().out.count(": correct") == 3
    source([write_torchvision_tree(fake, tmp_path / "tree")], allow_partial=True, md5=True)
    assert "md5: none of these files has a published md5" in capsys.readouterr().out


def test_a_missing_image_raises_os_error(tmp_path, fake):
    tree = write_torchvision_tree(fake, tmp_path / "in")
    table = catalog(tmp_path, tree).table("train")
    sample = random.Random(0).choice(table.samples(range(len(table))))
    os.unlink(os.path.join(sample.file, sample.name))
    with pytest.raises(OSError, match="No such file"):
        imagenet.read(sample)
