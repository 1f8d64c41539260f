"""Create ImageNet-like images and archives for benchmarks/prep.py.

Windows cut from two scikit-learn photos have ImageNet's sizes, and enough grain that JPEGs average
110 kB.

    <place>/
      images-3000/<wnid>/<wnid>_<number>.JPEG     class folders
      nested-3000.tar                             the same images in a tar of 100 tars
      tiny-200000.tar                             a tar of 1,000 tars of 200 almost empty members
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

NUM_CLASSES = 100
GRAIN = 20.5


def make_image(number: int, photos: Sequence[Image.Image]) -> bytes:
    """Return a JPEG of a grainy photo window. Half of all windows have 500 x 375 pixels."""
    rng = np.random.default_rng(number)
    odd = (int(rng.integers(200, 520)), int(rng.integers(180, 460)))
    width, height = ((500, 375), (375, 500), (500, 333), (640, 480), odd)[
        rng.choice(5, p=(0.55, 0.15, 0.12, 0.06, 0.12))
    ]

    photo = photos[number % len(photos)]
    scale = min(photo.width / width, photo.height / height) * rng.uniform(0.4, 1)
    left, top = (
        rng.uniform(0, photo.width - scale * width),
        rng.uniform(0, photo.height - scale * height),
    )
    box = (left, top, left + scale * width, top + scale * height)

    pixels = np.asarray(photo.resize((width, height), Image.Resampling.BICUBIC, box), np.float32)
    pixels = pixels * rng.uniform(0.8, 1.2) + rng.standard_normal(
        (height, width, 1), np.float32
    ) * GRAIN * rng.uniform(0.3, 1.7)

    encoded = io.BytesIO()
    quality = int(rng.choice((80, 85, 90, 95)))
    subsampling = int(rng.choice((0, 2)))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
        encoded, "JPEG", quality=quality, subsampling=subsampling
    )
    return encoded.getvalue()


def nested_tar(path: Path, classes: dict[str, dict[str, bytes]]) -> None:
    """Write a tar that contains one tar per class ({wnid: {name: data}}), completely or not at
    all."""
    with tarfile.open(f"{path}.tmp", "w", format=tarfile.USTAR_FORMAT) as outer:
        for wnid, members in classes.items():
            inner_bytes = io.BytesIO()
            with tarfile.open(fileobj=inner_bytes, mode="w", format=tarfile.USTAR_FORMAT) as inner:
                for name, data in members.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    inner.addfile(member, io.BytesIO(data))

            member = tarfile.TarInfo(f"{wnid}.tar")
            member.size = inner_bytes.tell()
            inner_bytes.seek(0)
            outer.addfile(member, inner_bytes)
    os.replace(f"{path}.tmp", path)


class Data(NamedTuple):
    folder: Path
    """The folder that contains <wnid>/<wnid>_<number>.JPEG."""
    archive: Path
    tiny: Path
    """A tar of tars with many tiny members."""
    files: list[Path]
    num_bytes: int


def make_data(place: Path, num_images: int, num_tiny: int) -> Data:
    """Return the images and archives in `place`. Create those that are missing."""
    folder = place / f"images-{num_images}"
    archive = place / f"nested-{num_images}.tar"
    tiny = place / f"tiny-{num_tiny}.tar"
    if not archive.exists():
        from sklearn.datasets import load_sample_images

        photos = [Image.fromarray(photo) for photo in load_sample_images().images]
        classes: dict[str, dict[str, bytes]] = {f"n{label:08d}": {} for label in range(NUM_CLASSES)}
        for number in range(num_images):
            wnid = f"n{number % NUM_CLASSES:08d}"
            classes[wnid][f"{wnid}_{number}.JPEG"] = make_image(number, photos)
        for wnid, images in classes.items():
            (folder / wnid).mkdir(parents=True, exist_ok=True)
            for name, data in images.items():
                (folder / wnid / name).write_bytes(data)
        nested_tar(archive, classes)
    if not tiny.exists():
        wnids = [f"n{label:08d}" for label in range(1000)]
        nested_tar(
            tiny,
            {
                wnid: {f"{wnid}_{n}.JPEG": b"tiny" for n in range(num_tiny // 1000)}
                for wnid in wnids
            },
        )
    files = sorted(folder.glob("*/*.JPEG"))
    return Data(folder, archive, tiny, files, sum(file.stat().st_size for file in files))
