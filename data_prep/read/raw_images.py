"""Data sets of small raw images in a few files: what MNIST and CIFAR have in common."""

from __future__ import annotations

import argparse
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.read import archives
from data_prep.read.download import download
from data_prep.write.catalogue_builder import Builder
from data_prep.write.samples import Sample, read_range

DAMAGE = (tarfile.TarError, *archives.DAMAGE)
"""What reading a damaged archive raises."""


def add_records(
    builder: Builder,
    split: str,
    path: Path,
    labels: np.ndarray,
    offsets: np.ndarray,
    num_bytes: int,
    stems: tuple[str, str],
) -> None:
    """Add the images of one file, `num_bytes` each. stems: of their names and of their keys."""
    count = len(labels)
    builder.add(
        split,
        builder.file(path),
        names=[f"{stems[0]}/{number}" for number in range(count)],
        labels=labels,
        offsets=offsets,
        sizes=np.full(count, num_bytes),
        keys=[f"{stems[1]}-{number:05d}" for number in range(count)],
    )


def read_jpeg(sample: Sample, shape: tuple[int, ...]) -> bytes:
    """A raw image, (H, W) or (3, H, W), as a JPEG of quality 100 without chroma subsampling."""
    pixels = np.frombuffer(read_range(sample), np.uint8).reshape(shape)
    if pixels.ndim == 3:
        pixels = np.ascontiguousarray(pixels.transpose(1, 2, 0))
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "JPEG", quality=100, subsampling=0)
    return encoded.getvalue()


def add_download_arguments(parser: argparse.ArgumentParser, files: str, size: str) -> None:
    """Add `--download` and `--url`."""
    parser.add_argument(
        "--download",
        action="store_true",
        help=f"fetch {files} into the folder SOURCE first ({size})",
    )
    parser.add_argument(
        "--url",
        metavar="BASE",
        help=f"with --download, which it implies: a mirror that has {files} below BASE",
    )


def download_all(md5: Mapping[str, str], base: str, folder: Path) -> None:
    """Fetch the files with these names and md5 that `folder` lacks."""
    for name, expected in md5.items():
        download(f"{base.rstrip('/')}/{name}", folder / name, expected)
