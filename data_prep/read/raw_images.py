"""Read small raw images from a few large files, for MNIST and CIFAR."""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from data_prep.command import Flags
from data_prep.errors import PrepError
from data_prep.read.download import download
from data_prep.write.catalogue import Builder, Source
from data_prep.write.samples import Sample, read_range


class Records(NamedTuple):
    """The images in an uncompressed file, which begin at equal distances."""

    split: str
    file: int
    """The index of the file in the catalog."""
    labels: np.ndarray
    labels_from: object
    """The path of the label file, used in messages."""
    first: int
    """The offset of the first image in bytes."""
    step: int
    """The distance between the starts of two images in bytes."""
    name_stem: str
    key_stem: str


def array_source(
    name: str,
    options: dict[str, Any],
    shape: tuple[int, ...],
    records: Callable[[Builder], Iterable[Records]],
) -> Source:
    """Return a `Source` of raw images. shape: (H, W) or (3, H, W). records: a function that sets
    the classes and returns the images of each file."""
    fill = partial(_fill, records, math.prod(shape))
    return Source(name, options, fill, partial(read_jpeg, shape=shape))


def _fill(
    records: Callable[[Builder], Iterable[Records]], image_bytes: int, builder: Builder
) -> None:
    for part in records(builder):
        count = len(part.labels)
        num_classes = len(builder.class_names)
        if part.labels.max() >= num_classes:
            number = int(np.argmax(part.labels >= num_classes))
            raise PrepError(
                f"{part.labels_from}: record {number} has label {part.labels[number]}, expected 0"
                f" to {num_classes - 1}: download the file again"
            )
        builder.add(
            part.split,
            part.file,
            names=[f"{part.name_stem}/{number}" for number in range(count)],
            labels=part.labels,
            offsets=part.first + part.step * np.arange(count),
            sizes=np.full(count, image_bytes),
            keys=[f"{part.key_stem}-{number:05d}" for number in range(count)],
        )


def read_jpeg(sample: Sample, shape: tuple[int, ...]) -> bytes:
    """Encode a raw image, (H, W) or (3, H, W), as a JPEG of quality 100 without subsampling."""
    pixels = np.frombuffer(read_range(sample), np.uint8).reshape(shape)
    if pixels.ndim == 3:
        pixels = np.ascontiguousarray(pixels.transpose(1, 2, 0))
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "JPEG", quality=100, subsampling=0)
    return encoded.getvalue()


def download_flags(files: str, size: str) -> Flags:
    """Return the `--download` and `--url` flags for `files`, such as "the archive"."""
    return {
        "--download": {
            "action": "store_true",
            "help": f"first download {files} into the folder SOURCE ({size})",
        },
        "--url": {
            "metavar": "BASE",
            "help": f"download from a mirror with {files} below BASE; implies --download",
        },
    }


def download_if_asked(args: argparse.Namespace, md5: Mapping[str, str], base: str) -> None:
    """Download the files missing from SOURCE if --download or --url was given."""
    if args.download or args.url:
        for name, expected in md5.items():
            url = f"{(args.url or base).rstrip('/')}/{name}"
            download(url, args.source / name, expected)
