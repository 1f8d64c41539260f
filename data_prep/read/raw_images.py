"""Read small raw images from a few large files. MNIST and CIFAR share this code."""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.command import Flags
from data_prep.errors import PrepError
from data_prep.read.download import download
from data_prep.write.catalogue import Builder
from data_prep.write.samples import Sample, read_range


def add_records(
    builder: Builder,
    split: str,
    file: Path,
    labels: np.ndarray,
    *,
    labels_from: Path,
    first: int,
    step: int,
    image_bytes: int,
    name_stem: str,
    key_stem: str,
) -> None:
    """Add the images of a file: the first starts at byte `first`, others follow every `step` bytes.

    labels_from: the label file to name in messages. Raises PrepError for a label without a class.
    """
    count = len(labels)
    num_classes = len(builder.class_names)
    if labels.max() >= num_classes:
        number = int(np.argmax(labels >= num_classes))
        raise PrepError(
            f"{labels_from}: record {number} has label {labels[number]}; expected 0 to"
            f" {num_classes - 1}; download the file again"
        )
    builder.add(
        split,
        builder.file(file),
        names=[f"{name_stem}/{number}" for number in range(count)],
        labels=labels,
        offsets=first + step * np.arange(count),
        sizes=np.full(count, image_bytes),
        keys=[f"{key_stem}-{number:05d}" for number in range(count)],
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
