"""Test that each fault in ImageNet's files causes one clear error with the file and the remedy."""

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from fake_imagenet import (
    WNIDS,
    Fake,
    as_inner_tars,
    as_official,
    as_parquet,
    as_torchvision,
    devkit_files,
    make_fake,
    tar_of,
    write_devkit,
    write_kaggle_tree,
    write_parquets,
    write_torchvision_tree,
    write_train_tar,
)
from prep_place import new_catalogue

from data_prep.errors import PrepError
from data_prep.imagenet import main, source


@pytest.fixture(scope="module")
def fake() -> Fake:
    return make_fake(num_classes=12, train_per_class=5, val_per_class=3)


def _tree_with(fake: Fake, folder: Path, extra: str) -> list[Path]:
    tree = write_torchvision_tree(fake, folder / "in")
    (tree / extra).parent.mkdir(parents=True, exist_ok=True)
    (tree / extra).write_bytes(b"x")
    return [tree]


def _flat_val_without_labels(fake: Fake, folder: Path) -> list[Path]:
    as_official(fake, folder)
    (folder / "downloads" / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    return [folder / "downloads"]


def _web_page(fake: Fake, folder: Path) -> list[Path]:
    (as_official(fake, folder)[0] / "ILSVRC2012_img_train.tar").write_bytes(
        b"<!DOCTYPE html><html>Please log in</html>" * 100
    )
    return [folder / "downloads"]


def _cut_off(name: str, part: float) -> Callable[[Fake, Path], list[Path]]:
    def write(fake: Fake, folder: Path) -> list[Path]:
        path = as_official(fake, folder)[0] / name
        os.truncate(path, int(path.stat().st_size * part))
        return [folder / "downloads"]

    return write


def _cut_inner_tar(fake: Fake, folder: Path) -> list[Path]:
    path = as_inner_tars(fake, folder)[0] / "train" / f"{fake.wnids[4]}.tar"
    os.truncate(path, 3000)
    return [folder / "in"]


def _image_in_a_wrong_tar(fake: Fake, folder: Path) -> list[Path]:
    path = as_inner_tars(fake, folder)[0] / "train" / f"{fake.wnids[4]}.tar"
    path.write_bytes(tar_of([(f"{fake.wnids[5]}_1.JPEG", b"x"), ("cat.jpg", b"x")]))
    return [folder / "in"]


def _foreign_tar(fake: Fake, folder: Path) -> list[Path]:
    (folder / "foreign.tar").write_bytes(tar_of([("readme.txt", b"x")]))
    return [folder / "foreign.tar"]


def _foreign_train_tar(fake: Fake, folder: Path) -> list[Path]:
    (as_official(fake, folder)[0] / "ILSVRC2012_img_train.tar").write_bytes(
        tar_of([("readme.txt", b"x")])
    )
    return [folder / "downloads"]


def _train_tar_with_a_readme(fake: Fake, folder: Path) -> list[Path]:
    with tarfile.open(as_official(fake, folder)[0] / "ILSVRC2012_img_train.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo("README"))
    return [folder / "downloads"]


def _hostile_inner_tar(fake: Fake, folder: Path) -> list[Path]:
    path = as_official(fake, folder)[0] / "ILSVRC2012_img_train.tar"
    path.write_bytes(tar_of([(f"{fake.wnids[0]}.tar", tar_of([("../../etc/passwd", b"x")]))]))
    return [folder / "downloads"]


def _other_table(change: Callable[[str], str]) -> Callable[[Fake, Path], list[Path]]:
    def write(fake: Fake, folder: Path) -> list[Path]:
        table = write_kaggle_tree(fake, folder / "in") / "LOC_val_solution.csv"
        table.write_text(change(table.read_text()))
        return [folder / "in"]

    return write


def _labels_that_differ(fake: Fake, folder: Path) -> list[Path]:
    write_kaggle_tree(fake, folder / "in")
    wnids = dict(zip(fake.val_wnids, reversed(fake.val_wnids.values()), strict=True))
    other = Fake(fake.wnids, fake.train, fake.val, wnids, fake.ids)
    write_devkit(other, folder / "in" / "ILSVRC2012_devkit_t12.tar.gz")
    return [folder / "in"]


def _folders_by_another_rule(fake: Fake, folder: Path) -> list[Path]:
    """Write val folders as if the ids in the development kit were labels."""
    tree = write_torchvision_tree(fake, folder / "in")
    shutil.rmtree(tree / "val")
    for name, wnid in fake.val_wnids.items():
        path = tree / "val" / fake.wnids[fake.ids[wnid] - 1] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fake.val[name])
    write_devkit(fake, tree / "ILSVRC2012_devkit_t12.tar.gz")
    return [tree]


def _kit(
    change: Callable[[dict[str, bytes]], dict[str, bytes]],
) -> Callable[[Fake, Path], list[Path]]:
    def write(fake: Fake, folder: Path) -> list[Path]:
        path = as_official(fake, folder)[0] / "ILSVRC2012_devkit_t12.tar.gz"
        with tarfile.open(path, "w:gz") as kit:
            for name, data in change(devkit_files(fake)).items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                kit.addfile(member, io.BytesIO(data))
        return [folder / "downloads"]

    return write


def _parquets_numbered_otherwise(fake: Fake, folder: Path) -> list[Path]:
    order = fake.wnids[::-1]
    return [
        write_parquets(Fake(order, fake.train, fake.val, fake.val_wnids, fake.ids), folder / "in")
    ]


def _cut_parquet(fake: Fake, folder: Path) -> list[Path]:
    path = as_parquet(fake, folder)[0] / "data" / "train-00001-of-00003.parquet"
    os.truncate(path, path.stat().st_size // 2)
    return [folder / "imagenet-1k"]


def _parquet_of_something_else(fake: Fake, folder: Path) -> list[Path]:
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["x"], "label": [1]}), folder / "train-00000-of-00001.parquet"
    )
    return [folder / "train-00000-of-00001.parquet"]


TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
WRONG = {
    "nothing there": (
        lambda fake, folder: [folder / "missing"],
        r"missing: no such file or folder",
    ),
    "empty folder": (
        lambda fake, folder: [folder],
        r"this folder is empty; expected ImageNet's archives",
    ),
    "other folders": (lambda fake, folder: [_other_folder(folder)], "contains cat, dog"),
    "classes not WNIDs": (
        lambda fake, folder: _tree_with(fake, folder, "train/tench/1.JPEG"),
        (
            r"in/train: 1 class folders are not named by WordNet ID \(n01440764\): tench;"
            r" .*data_prep.imagefolder"
        ),
    ),
    "no class is a WNID": (
        lambda fake, folder: [_other_folder(folder / "train").parent],
        r"train: 2 class folders .* cat, dog",
    ),
    "foreign image": (
        lambda fake, folder: _tree_with(fake, folder, f"train/{fake.wnids[0]}/cat.jpg"),
        r"train: 1 images have file names that do not match their class in ImageNet: cat\.jpg",
    ),
    "two layouts": (
        lambda fake, folder: [
            *as_torchvision(fake, folder),
            write_train_tar(fake, folder / "t.tar"),
        ],
        r"found 2 sources for train: .*in/train \(12 class folders\).*t\.tar \(a tar of tars",
    ),
    "no labels of val": (
        _flat_val_without_labels,
        (
            r"(?s)val is a flat .* add one of these files: ILSVRC2012_devkit_t12\.tar\.gz"
            r" .*LOC_val_solution\.csv"
        ),
    ),
    "a web page": (_web_page, r"ILSVRC2012_img_train\.tar: not a tar but a web page"),
    "train cut off": (
        _cut_off("ILSVRC2012_img_train.tar", 0.5),
        r"ILSVRC2012_img_train\.tar: truncated: .*tar' of \d+ bytes at byte",
    ),
    "val cut off": (_cut_off("ILSVRC2012_img_val.tar", 0.3), r"ILSVRC2012_img_val\.tar: truncated"),
    "kit cut off": (
        _cut_off("ILSVRC2012_devkit_t12.tar.gz", 0.5),
        r"ILSVRC2012_devkit_t12\.tar\.gz: not a tar or tar\.gz, damaged or truncated",
    ),
    "inner tar cut off": (_cut_inner_tar, r"n\d+\.tar: truncated"),
    "image in a wrong tar": (
        _image_in_a_wrong_tar,
        r"2 images have file names that .*: n\d+_1\.JPEG \(in n\d+\), cat\.jpg",
    ),
    "compressed tar": (
        lambda fake, folder: [write_devkit(fake, folder / "train_images_0.tar.gz")],
        (
            r"(?s)no images of train found.*train_images_0\.tar\.gz is compressed and cannot be"
            r" read in place: unpack it first"
        ),
    ),
    "foreign tar": (_foreign_tar, r"foreign\.tar: begins with 'readme\.txt'; expected ImageNet's"),
    "foreign train tar": (
        _foreign_train_tar,
        r"contains 'readme\.txt'; expected tars named by WordNet ID",
    ),
    "train tar with a file without a suffix": (
        _train_tar_with_a_readme,
        r"contains 'README'; expected tars named by WordNet ID",
    ),
    "hostile tar": (_hostile_inner_tar, r"member '\.\./\.\./etc/passwd' leads out of the archive"),
    "table without an image": (
        _other_table(
            lambda text: "\n".join(
                line for line in text.splitlines() if "val_00000003," not in line
            )
        ),
        r"val: 1 images have no class in the label file: ILSVRC2012_val_00000003\.JPEG",
    ),
    "table with an unknown class": (
        _other_table(lambda text: text.replace(WNIDS[2], "n99999999")),
        r"unknown classes: n99999999 \(3\)",
    ),
    "table without WNIDs": (
        _other_table(lambda text: text.replace(WNIDS[2], "tench")),
        r"line \d+: expected a WordNet ID and a box",
    ),
    "table with other columns": (
        _other_table(lambda text: text.replace("ImageId", "id")),
        "columns are id, Pred.*; expected ImageId",
    ),
    "table that contradicts itself": (
        _other_table(
            lambda text: (
                text
                + f"ILSVRC2012_val_00000001,{WNIDS[0]} 1\nILSVRC2012_val_00000001,{WNIDS[1]} 1\n"
            )
        ),
        r"line \d+: 'ILSVRC2012_val_00000001' has the label n\d+, but n\d+ in an earlier line",
    ),
    "labels that differ": (
        _labels_that_differ,
        r"\d+ labels differ: pass only the correct label file",
    ),
    "folders by the kit's ids": (
        _folders_by_another_rule,
        r"images have another class .*: ILSVRC2012_val_.* \(in n\d+\)",
    ),
    "kit without its table": (
        _kit(lambda files: {TRUTH: files[TRUTH]}),
        r"contains no meta\.mat; expected ImageNet's development kit",
    ),
    "kit with another table": (
        _kit(lambda files: files | {"data/meta.mat": b"x" * 200}),
        r"not the kit's class table",
    ),
    "kit with other ids": (
        _kit(lambda files: files | {TRUTH: b"1\n2\n13\n"}),
        r"line 3 is '13'; expected the ILSVRC2012_ID of one",
    ),
    "kit with a group's id": (_kit(lambda files: files | {TRUTH: b"14\n"}), r"line 1 is '14'"),
    "parquets numbered otherwise": (
        _parquets_numbered_otherwise,
        "the labels do not follow the order of the WordNet IDs",
    ),
    "parquet cut off": (_cut_parquet, r"train-00001-of-00003\.parquet: not a complete parquet"),
    "parquet of something else": (
        _parquet_of_something_else,
        r"the columns are text, label; expected image",
    ),
}


def _other_folder(folder: Path) -> Path:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
    return folder


@pytest.mark.parametrize("wrong", WRONG)
def test_each_fault_gives_one_clear_error(tmp_path, fake, wrong):
    make, message = WRONG[wrong]
    (tmp_path / "s").mkdir()
    paths = make(fake, tmp_path / "s")
    partial = wrong not in ("table with an unknown class", "other folders", "no class is a WNID")
    with pytest.raises(PrepError, match=message):
        new_catalogue(source(paths, allow_partial=partial), tmp_path / "out", seed=0)


def test_source_and_out_must_differ(tmp_path, fake, capsys):
    folder = as_official(fake, tmp_path)[0]
    assert main([str(folder), "--out", f"{folder}/../downloads"]) == 2
    assert "SOURCE and --out are the same folder" in capsys.readouterr().err
    (folder / "_info.json").write_text("{}")
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "contains finished shards" in capsys.readouterr().err


def test_a_missing_parquet_file_is_reported(tmp_path, fake):
    folder = as_parquet(fake, tmp_path)[0]
    (folder / "data" / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(PrepError, match="1 of 3 parquet files of train are missing"):
        new_catalogue(source([folder]), tmp_path / "out", seed=0)
