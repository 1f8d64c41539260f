"""Create a tiny fake ImageNet in the formats of the official files, with real WordNet ids.

    fake = make_fake(num_classes=10, train_per_class=5, val_per_class=2)
    # ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar, ILSVRC2012_devkit_t12.tar.gz
    write_archives(fake, folder)

The fake copies the irregularities of ImageNet: the ids in the development kit (ILSVRC2012_ID) are
not in WNID order, the numbers in file names have gaps and varying widths, and validation images are
not sorted by class.
"""

from __future__ import annotations

import csv
import io
import random
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import timm
from PIL import Image

WNIDS = sorted((Path(timm.__file__).parent / "data/_info/imagenet_synsets.txt").read_text().split())


@dataclass(frozen=True)
class Fake:
    """A fake ImageNet. Images have names like those in the original archives, for example
    n01440764_18.JPEG."""

    wnids: list[str]
    """The WordNet ids in sorted order. A label is an index into this list."""
    train: dict[str, dict[str, bytes]]
    """Maps each WordNet id to its images, which are stored as {name: encoded image}."""
    val: dict[str, bytes]
    val_wnids: dict[str, str]
    """Maps the name of each validation image to its WordNet id."""
    ids: dict[str, int]
    """Maps each WordNet id to its ILSVRC2012_ID, which starts at 1."""

    def labels(self, split: str) -> dict[str, int]:
        if split == "val":
            return {name[:-5]: self.wnids.index(wnid) for name, wnid in self.val_wnids.items()}
        return {
            name[:-5]: self.wnids.index(wnid)
            for wnid, images in self.train.items()
            for name in images
        }

    def images(self, split: str) -> dict[str, bytes]:
        named = (
            self.val
            if split == "val"
            else {name: data for images in self.train.values() for name, data in images.items()}
        )
        return {name[:-5]: data for name, data in named.items()}


# ---- images --------------------------------------------------------------------------------------


def _jpeg(pixels: np.ndarray) -> bytes:
    return simplejpeg.encode_jpeg(pixels, quality=90)


def _saved(image: Image.Image, format: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def odd_images(seed: int = 0) -> dict[str, bytes]:
    """Return one example of each kind of unusual file in ImageNet. All file names end in .JPEG.
    Only the file "truncated" is unreadable."""
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), np.uint8)
    image = Image.fromarray(pixels)
    turned = Image.Exif()
    turned[0x0112] = 6  # EXIF orientation 6 rotates the image by 90 degrees
    return {
        "cmyk": _saved(image.convert("CMYK")),
        "rgba_png": _saved(image.convert("RGBA"), "PNG"),
        "gray": _saved(image.convert("L")),
        "one_pixel": _saved(image.crop((0, 0, 1, 1))),
        "truncated": (whole := _saved(image, quality=95))[: len(whole) // 2],
        "progressive": _saved(image, progressive=True),
        "exif_turned": _saved(image, exif=turned),
    }


def make_fake(
    num_classes: int = 10,
    train_per_class: int = 5,
    val_per_class: int = 2,
    odd: bool = False,
    seed: int = 0,
) -> Fake:
    """Return a fake ImageNet with the first `num_classes` classes.

    If `odd` is true, the last training images of the first classes are replaced with unusual files.
    """
    rng = np.random.default_rng(seed)
    shuffle = random.Random(seed)
    wnids = WNIDS[:num_classes]

    def image() -> bytes:
        height, width = (int(side) for side in rng.integers(20, 33, 2))
        tile = rng.integers(0, 256, (4, 4, 3), np.uint8)
        return _jpeg(
            np.ascontiguousarray(
                np.tile(tile.repeat(3, 0).repeat(3, 1), (3, 3, 1))[:height, :width]
            )
        )

    train = {}
    for wnid in wnids:
        numbers = shuffle.sample(range(1, 20 * train_per_class + 10), train_per_class)
        train[wnid] = {f"{wnid}_{number}.JPEG": image() for number in numbers}
    for wnid, data in zip(wnids * (7 if odd else 0), odd_images(seed).values(), strict=False):
        train[wnid][f"{wnid}_{900_000 + len(train[wnid])}.JPEG"] = data
    members = [wnid for wnid in wnids for _ in range(val_per_class)]
    shuffle.shuffle(members)
    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, len(members) + 1)]
    ids = list(range(1, num_classes + 1))
    shuffle.shuffle(ids)
    if ids == sorted(ids):
        ids.reverse()
    return Fake(
        wnids,
        train,
        {name: image() for name in names},
        dict(zip(names, members, strict=True)),
        dict(zip(wnids, ids, strict=True)),
    )


# ---- the official archives -----------------------------------------------------------------------


def tar_of(files: Iterable[tuple[str, bytes]]) -> bytes:
    """Return a tar file in GNU format, padded to a multiple of 10 KiB."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mtime = 1_340_000_000
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def write_train_tar(fake: Fake, path: Path) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as outer:
        for wnid, images in fake.train.items():
            data = tar_of(images.items())
            member = tarfile.TarInfo(f"{wnid}.tar")
            member.size = len(data)
            outer.addfile(member, io.BytesIO(data))
    return path


def write_inner_tars(fake: Fake, folder: Path) -> Path:
    """Write the tar files that the official training archive contains, one per class."""
    folder.mkdir(parents=True)
    for wnid, images in fake.train.items():
        (folder / f"{wnid}.tar").write_bytes(tar_of(images.items()))
    return folder


def write_val_tar(fake: Fake, path: Path) -> Path:
    path.write_bytes(tar_of(fake.val.items()))
    return path


def meta_mat(fake: Fake) -> bytes:
    """Return the development kit's `meta.mat`, which lists the classes in the order of their
    ILSVRC2012_ID, followed by the groups of classes."""
    from scipy.io import savemat

    dtype = [
        (name, "O")
        for name in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children")
    ]
    dtype += [(name, "O") for name in ("wordnet_height", "num_train_images")]
    none = np.zeros((1, 0), np.uint8)

    def number(value: float) -> np.ndarray:
        return np.array([[float(value)]])

    by_id = sorted(fake.ids, key=fake.ids.__getitem__)
    rows: list[tuple[Any, ...]] = [
        (
            number(fake.ids[w]),
            w,
            f"word of {w}, other word",
            f"gloss of {w}",
            number(0),
            none,
            number(0),
            number(len(fake.train[w])),
        )
        for w in by_id
    ]
    root = len(by_id) + 1
    group = len(by_id) + 2
    children = np.array([[fake.ids[w] for w in by_id]], np.float64)
    rows.append(
        (number(root), "n00001740", "entity", "all", number(1), number(group), number(2), number(0))
    )
    rows.append(
        (
            number(group),
            "n00021939",
            "artifact",
            "things",
            number(len(by_id)),
            children,
            number(1),
            number(0),
        )
    )
    synsets = np.empty((len(rows), 1), dtype)
    for place, row in enumerate(rows):
        synsets[place, 0] = row
    file = io.BytesIO()
    savemat(file, {"synsets": synsets})
    return file.getvalue()


def devkit_files(fake: Fake) -> dict[str, bytes]:
    truth = "".join(f"{fake.ids[fake.val_wnids[name]]}\n" for name in sorted(fake.val))
    return {
        "readme.txt": b"Development kit of a small ImageNet\n",
        "data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
        "data/meta.mat": meta_mat(fake),
    }


def write_devkit(fake: Fake, path: Path) -> Path:
    with tarfile.open(path, "w:gz", format=tarfile.GNU_FORMAT) as tar:
        for name, data in devkit_files(fake).items():
            member = tarfile.TarInfo(f"ILSVRC2012_devkit_t12/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_archives(fake: Fake, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_train_tar(fake, folder / "ILSVRC2012_img_train.tar")
    write_val_tar(fake, folder / "ILSVRC2012_img_val.tar")
    write_devkit(fake, folder / "ILSVRC2012_devkit_t12.tar.gz")
    return folder


# ---- layouts of other tools ----------------------------------------------------------------------


def write_files(files: Iterable[tuple[str, bytes]], folder: Path) -> Path:
    for name, data in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_devkit_folder(fake: Fake, folder: Path) -> Path:
    return write_files(devkit_files(fake).items(), folder)


def write_flat_val(fake: Fake, folder: Path) -> Path:
    return write_files(fake.val.items(), folder)


def torchvision_files(fake: Fake) -> dict[str, bytes]:
    files = {
        f"train/{wnid}/{name}": data
        for wnid, images in fake.train.items()
        for name, data in images.items()
    }
    return files | {f"val/{fake.val_wnids[name]}/{name}": data for name, data in fake.val.items()}


def write_torchvision_tree(fake: Fake, folder: Path) -> Path:
    return write_files(torchvision_files(fake).items(), folder)


def _table(rows: Iterable[tuple[str, str]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("ImageId", "PredictionString"))
    writer.writerows(rows)
    return text.getvalue().encode()


def kaggle_files(fake: Fake) -> dict[str, bytes]:
    files = {
        f"ILSVRC/Data/CLS-LOC/train/{wnid}/{name}": data
        for wnid, images in fake.train.items()
        for name, data in images.items()
    }
    files |= {f"ILSVRC/Data/CLS-LOC/val/{name}": data for name, data in fake.val.items()}
    files["ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG"] = next(iter(fake.val.values()))
    for wnid, images in fake.train.items():
        files[f"ILSVRC/Annotations/CLS-LOC/train/{wnid}/{next(iter(images))[:-5]}.xml"] = (
            b"<annotation></annotation>"
        )
    files["ILSVRC/ImageSets/CLS-LOC/val.txt"] = "".join(
        f"{n[:-5]} {i}\n" for i, n in enumerate(fake.val, 1)
    ).encode()
    files["LOC_synset_mapping.txt"] = "".join(
        f"{wnid} word of {wnid}\n" for wnid in fake.wnids
    ).encode()
    in_no_order = sorted(fake.val, key=lambda name: name[::-1], reverse=True)
    files["LOC_val_solution.csv"] = _table(
        (n[:-5], f"{fake.val_wnids[n]} 1 2 3 4 {fake.val_wnids[n]} 5 6 7 8 ") for n in in_no_order
    )
    files["LOC_train_solution.csv"] = _table(
        (n[:-5], f"{w} 1 2 3 4 ") for w, images in fake.train.items() for n in images
    )
    files["LOC_sample_submission.csv"] = _table([("ILSVRC2012_test_00000001", "1 1 1 1 1")])
    return files


def write_kaggle_tree(fake: Fake, folder: Path) -> Path:
    return write_files(kaggle_files(fake).items(), folder)


def write_zip(files: dict[str, bytes], path: Path, compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def write_parquets(
    fake: Fake, folder: Path, num_train: int = 3, num_val: int = 2, rows_per_group: int = 7
) -> Path:
    """Write parquet files named data/train-*-of-*.parquet and data/validation-*.

    Each row has the form {image: {bytes, path}, label}. The rows are in random order, and the image
    names contain the WordNet id.
    """
    import pyarrow
    import pyarrow.parquet

    (folder / "data").mkdir(parents=True)
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema([("image", image), ("label", pyarrow.int64())])
    for split, name, count in (("train", "train", num_train), ("val", "validation", num_val)):
        labels = fake.labels(split)
        images = fake.images(split)
        keys = sorted(images)
        random.Random(1).shuffle(keys)
        for part in range(count):
            rows = [
                {
                    "image": {
                        "bytes": images[key],
                        "path": f"{key}_{fake.wnids[labels[key]]}.JPEG",
                    },
                    "label": labels[key],
                }
                for key in keys[part::count]
            ]
            path = folder / "data" / f"{name}-{part:05d}-of-{count:05d}.parquet"
            pyarrow.parquet.write_table(
                pyarrow.Table.from_pylist(rows, schema), path, row_group_size=rows_per_group
            )
    return folder


# ---- layouts that users have ---------------------------------------------------------------------
# Each function takes (fake, folder), and returns the paths for the command line.


def as_official(fake: Fake, folder: Path) -> list[Path]:
    return [write_archives(fake, folder / "downloads")]


def as_archives_one_by_one_and_renamed(fake: Fake, folder: Path) -> list[Path]:
    kit = write_devkit(fake, folder / "devkit_of_tasks_1_and_2.tgz")
    return [write_val_tar(fake, folder / "b.tar"), kit, write_train_tar(fake, folder / "a.tar")]


def as_inner_tars(fake: Fake, folder: Path) -> list[Path]:
    write_inner_tars(fake, folder / "in" / "train")
    write_flat_val(fake, folder / "in" / "val")
    write_devkit(fake, folder / "in" / "ILSVRC2012_devkit_t12.tar.gz")
    return [folder / "in"]


def as_torchvision(fake: Fake, folder: Path) -> list[Path]:
    return [write_torchvision_tree(fake, folder / "in")]


def as_two_trees(fake: Fake, folder: Path) -> list[Path]:
    write_torchvision_tree(fake, folder / "in")
    (folder / "in" / "train").rename(folder / "some")
    (folder / "in" / "val").rename(folder / "others")
    return [folder / "others", folder / "some"]


def as_kaggle_tree(fake: Fake, folder: Path) -> list[Path]:
    return [write_kaggle_tree(fake, folder / "in")]


def as_kaggle_inner_folder_and_devkit(fake: Fake, folder: Path) -> list[Path]:
    write_devkit_folder(fake, folder / "ILSVRC2012_devkit_t12")
    return [
        write_kaggle_tree(fake, folder / "in") / "ILSVRC" / "Data" / "CLS-LOC",
        folder / "ILSVRC2012_devkit_t12",
    ]


def as_kaggle_zip(fake: Fake, folder: Path) -> list[Path]:
    return [write_zip(kaggle_files(fake), folder / "imagenet-object-localization-challenge.zip")]


def as_zipped_tree(fake: Fake, folder: Path) -> list[Path]:
    return [
        write_zip(
            {f"imagenet/{name}": data for name, data in torchvision_files(fake).items()},
            folder / "a.zip",
            zipfile.ZIP_STORED,
        )
    ]


def as_parquet(fake: Fake, folder: Path) -> list[Path]:
    return [write_parquets(fake, folder / "imagenet-1k")]


def as_train_tar_and_val_tree(fake: Fake, folder: Path) -> list[Path]:
    return [
        write_train_tar(fake, folder / "ILSVRC2012_img_train.tar"),
        write_torchvision_tree(fake, folder / "in") / "val",
    ]


LAYOUTS = {
    name.removeprefix("as_"): function
    for name, function in sorted(globals().items())
    if name.startswith("as_")
}
"""Maps the name of each layout to the function that writes it. All layouts must produce identical
shards."""
