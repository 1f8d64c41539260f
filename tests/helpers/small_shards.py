"""Create images that encode their own number, and write them to tar files and folders."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_prep.write.catalog import Builder, Source
from data_prep.write.plan import Settings
from data_prep.write.samples import read_range

NUM_SHARDS = 3
PER_SHARD = 5


def jpeg(number: int) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (20 + number, 30 + 2 * number), (10 * number, 100, 200)).save(encoded, "JPEG")
    return encoded.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pair(
    key: str, number: int, label: int | str | None = None, ext: str = "jpg"
) -> list[tuple[str, bytes]]:
    return [
        (f"{key}.{ext}", jpeg(number)),
        (f"{key}.cls", str(number % 4 if label is None else label).encode()),
    ]


FOUR = Settings(num_shards=4)


def image_bytes(
    number: int = 0, format: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (24, 16)
) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", size, (number * 7 % 256, number * 3 % 256, 90)).convert(mode).save(
        encoded, format
    )
    return encoded.getvalue()


def source_of(
    folder: Path, splits: dict[str, list[tuple[str, int, bytes]]], **options: Any
) -> Source:
    """Write all (name, label, encoded image) to one file in `folder`, and return this file as a
    `Source`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "images.bin"
    path.write_bytes(b"".join(data for samples in splits.values() for _, _, data in samples))

    def fill(builder: Builder) -> None:
        builder.classes(["a", "b", "c"])
        builder.note("made for a test")
        file = builder.file(path)
        end = 0
        for split, samples in splits.items():
            sizes = np.array([len(data) for _, _, data in samples], np.int64)
            ends = end + np.cumsum(sizes)
            builder.add(
                split,
                file,
                [name for name, _, _ in samples],
                [label for _, label, _ in samples],
                ends - sizes,
                sizes,
            )
            end = ends[-1] if len(ends) else end

    return Source("test", options, fill, read_range)


def small_splits(num_train: int = 23, num_val: int = 7) -> dict[str, list[tuple[str, int, bytes]]]:
    return {
        split: [(f"{split}.{n}.JPEG", n % 3, image_bytes(n)) for n in range(num)]
        for split, num in (("train", num_train), ("val", num_val))
    }


def add(path: Path, number: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (number % 256, 50, 50)).save(path)
    return path
