"""Read small raw images from a few large files, for MNIST and CIFAR."""

from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.errors import PrepError
from data_prep.write.catalog import Builder
from data_prep.write.images import encode_jpeg
from data_prep.write.samples import Sample, read_range


def add_records(
    builder: Builder,
    split: str,
    path: Path,
    labels: np.ndarray,
    labels_path: Path,
    *,
    first: int,
    step: int,
    image_bytes: int,
    names: str,
    keys: str,
) -> None:
    """Add the images in an uncompressed file, which begin at regular intervals, to a split.

    Args:
        labels: One label per image.
        labels_path: The label file, named in the PrepError for a wrong label.
        first: The offset of the first image in bytes.
        step: The distance between the starts of two images in bytes.
        names: The beginning of the images' names.
        keys: The beginning of the images' keys.
    """
    num_classes = len(builder.class_names)
    if labels.max() >= num_classes:
        number = int(np.argmax(labels >= num_classes))
        raise PrepError(
            f"{labels_path}: record {number} has label {labels[number]}, expected 0 to"
            f" {num_classes - 1}: download the file again"
        )

    numbers = range(len(labels))
    builder.add(
        split,
        builder.file(path),
        names=[f"{names}/{number}" for number in numbers],
        labels=labels,
        offsets=first + step * np.arange(len(labels)),
        sizes=np.full(len(labels), image_bytes),
        keys=[f"{keys}-{number:05d}" for number in numbers],
    )


def read_jpeg(sample: Sample, shape: tuple[int, ...]) -> bytes:
    """Encode a raw image, (H, W) or (3, H, W), as a JPEG of quality 100 without subsampling."""
    pixels = np.frombuffer(read_range(sample), np.uint8).reshape(shape)
    if pixels.ndim == 3:
        pixels = np.ascontiguousarray(pixels.transpose(1, 2, 0))
    return encode_jpeg(Image.fromarray(pixels), quality=100, subsampling=0)
