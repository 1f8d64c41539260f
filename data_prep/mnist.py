"""Write shards of MNIST, Fashion-MNIST or Kuzushiji-MNIST from the four idx files.

    python -m data_prep.mnist SOURCE --out ROOT [--variant mnist|fashion|kmnist] [--download]

SOURCE contains train-images-idx3-ubyte, train-labels-idx1-ubyte and the two t10k files, compressed
(.gz) or not, directly or in torchvision's folders (MNIST/raw/...). The 60,000 training images
become `train`, and the 10,000 images of t10k become `val`. Keys contain the position in the file,
such as train-00000. --download first fetches the files into SOURCE and checks their md5.

Each 28x28 gray image becomes a gray JPEG of quality 100. On MNIST's t10k, the JPEG differs from the
original by at most 2 of 255 levels (63 dB). At quality 95, it differs by 10 levels (47 dB). Such
JPEGs are a quarter smaller, but tar padding removes this advantage. Uncompressed files are read in
place.
"""

import argparse
import gzip
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.command import source_command
from data_prep.errors import PrepError, readable
from data_prep.read.archives import DAMAGE
from data_prep.read.download import checksum_of, download_flags, download_if_asked
from data_prep.read.raw_images import add_records, read_jpeg
from data_prep.write.catalog import Builder, Source

SIDE = 28
PARTS = {"train": ("train", 60_000), "val": ("t10k", 10_000)}
"""Maps each split to its file name prefix and its number of images."""
HEADER_BYTES = {"images": 16, "labels": 8}


class Variant(NamedTuple):
    """One of the data sets in MNIST's format."""

    torchvision_folder: str
    url: str
    md5: Mapping[str, str]
    """The md5 of each compressed file, from torchvision and from the data sets' web pages."""
    class_names: tuple[str, ...]


VARIANTS = {
    "mnist": Variant(
        "MNIST",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        tuple("0123456789"),
    ),
    "fashion": Variant(
        "FashionMNIST",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        (
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
    ),
    "kmnist": Variant(
        "KMNIST",
        "http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
        {
            "train-images-idx3-ubyte": "bdb82020997e1d708af4cf47b453dcf7",
            "train-labels-idx1-ubyte": "e144d726b3acfaa3e44228e80efcd344",
            "t10k-images-idx3-ubyte": "5c965bf0a639b31b8f53240b1b52f4d7",
            "t10k-labels-idx1-ubyte": "7320c461ea6c1c855c0b718fb2a4b134",
        },
        ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    ),
}


# ---- the files -----------------------------------------------------------------------------------


def find_files(folder: Path, variant: str = "mnist") -> dict[str, Path]:
    """Return the paths of the four files, by official name without .gz.

    torchvision's folders are searched as well, and uncompressed files are preferred. Raises a
    PrepError that names all missing files, or both folders if two match.
    """
    if not folder.is_dir():
        raise PrepError(
            f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; expected a"
            " folder with the four idx files"
        )

    expected = VARIANTS[variant]
    places = [folder, folder / "raw", folder / expected.torchvision_folder / "raw"]
    files_in = {place: _files_in(place, expected) for place in places}
    candidates = [place for place, files in files_in.items() if files]
    if len(candidates) > 1:
        raise PrepError(
            f"found idx files in several folders ({', '.join(map(str, candidates))}): pass"
            " one of them as SOURCE"
        )

    place = candidates[0] if candidates else folder
    missing = [name for name in expected.md5 if name not in files_in[place]]
    if missing:
        raise PrepError(
            f"{place}: missing files: {', '.join(missing)} (with or without .gz); download them"
            f" from {expected.url}, or use --download or another --variant"
        )

    return files_in[place]


def _files_in(folder: Path, variant: Variant) -> dict[str, Path]:
    """Return the files of `variant` in a folder. Some mirrors replace a name's first dash with a
    dot."""
    files = dict[str, Path]()
    for name in variant.md5:
        dotted = name.replace("-idx", ".idx")
        for spelling in (f"{dotted}.gz", f"{name}.gz", dotted, name):  # the last one is preferred
            if (folder / spelling).is_file():
                files[name] = folder / spelling
    return files


def read_idx(path: Path, shape: tuple[int, ...]) -> bytes:
    """Return the uncompressed content, including the header, of an idx file with this data shape.

    The file begins with a big-endian 0x0000TTDD, in which TT is 08 for unsigned bytes and DD is the
    number of dimensions. A four-byte size for each dimension and the data follow
    (http://yann.lecun.com/exdb/mnist). Raises PrepError for a file of another kind, size or shape.
    """
    expected = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
    num_bytes = len(expected) + int(np.prod(shape))
    opened = gzip.open if path.suffix == ".gz" else open
    with readable(path, DAMAGE, "not a complete gzip file"), opened(path, "rb") as file:
        # Limit the size, because a hostile file may decompress to any size.
        content = file.read(num_bytes + 1)

    if len(content) != num_bytes or not content.startswith(expected):
        size = f"{len(content):,} bytes" if len(content) <= num_bytes else "more"
        raise PrepError(
            f"{path}: expected an idx file of {num_bytes:,} bytes that begins with"
            f" {expected.hex()}, found {size} that begin with {content[:8].hex()}; copy or download"
            " the file again"
        )

    return content


# ---- the source ----------------------------------------------------------------------------------


def source(folder: Path, variant: str = "mnist") -> Source:
    """Return a `Source` for the four idx files in `folder`.

    Raises PrepError if files are missing or are from a different variant.
    """
    files = find_files(folder, variant)
    for name, path in files.items():
        # Only the md5 hashes of the official compressed files distinguish the variants.
        variants = {other.md5[name]: key for key, other in VARIANTS.items()}
        md5 = checksum_of(path, "md5") if path.suffix == ".gz" else ""
        owner = variants.get(md5, variant)
        if owner != variant:
            raise PrepError(
                f"{path}: this file belongs to {VARIANTS[owner].torchvision_folder};"
                f" use --variant {owner}"
            )

    return Source(
        "mnist",
        {"variant": variant},
        partial(_fill, files, variant),
        partial(read_jpeg, shape=(SIDE, SIDE)),
    )


def _fill(files: Mapping[str, Path], variant: str, builder: Builder) -> None:
    """Add the images of both splits. Compressed images are unpacked temporarily."""
    builder.classes(VARIANTS[variant].class_names)
    for split, (part, count) in PARTS.items():
        labels_file = files[f"{part}-labels-idx1-ubyte"]
        labels = np.frombuffer(
            read_idx(labels_file, (count,)), np.uint8, offset=HEADER_BYTES["labels"]
        )

        name = f"{part}-images-idx3-ubyte"
        images_file = files[name]
        content = read_idx(images_file, (count, SIDE, SIDE))
        if images_file.suffix == ".gz":
            images_file = builder.folder / name
            images_file.write_bytes(content)

        add_records(
            builder,
            split,
            images_file,
            labels,
            labels_file,
            first=HEADER_BYTES["images"],
            step=SIDE * SIDE,
            image_bytes=SIDE * SIDE,
            names=f"{part}-images",
            keys=part,
        )


# ---- the command ---------------------------------------------------------------------------------


def _source(args: argparse.Namespace) -> Source:
    variant = VARIANTS[args.variant]
    download_if_asked(args, {f"{name}.gz": md5 for name, md5 in variant.md5.items()}, variant.url)
    return source(args.source, args.variant)


main = source_command(
    "mnist",
    __doc__,
    {
        "source": {
            "type": Path,
            "metavar": "SOURCE",
            "help": "folder with the four idx files, or torchvision's root folder",
        },
        "--variant": {
            "choices": tuple(VARIANTS),
            "default": "mnist",
            "help": "data set to write (default: %(default)s)",
        },
        **download_flags("the four .gz files", "11, 30 or 21 MB"),
    },
    _source,
)


if __name__ == "__main__":
    raise SystemExit(main())
