"""Create ImageNet-like JPEGs and shards of them for benchmarks/loader.py.

Windows cut from two scikit-learn photos have ImageNet's sizes, JPEG qualities and chroma
subsampling. Because decoding cost depends on the number of bits, grain is added up to 5 bits per
pixel. (ILSVRC 2012 has 110 kB per image, about 469 x 387 pixels and 4.9 bits per pixel.) The
data_prep commands write two sets of shards, without and with restart markers. Everything is created
only once per version of this module. Real photos can replace the windows.

    <place>/
      jpegs/<wnid>/<wnid>_<number>.JPEG     class folders, as torchvision's ImageFolder reads them
      shards/                               the same bytes in our shards, also for webdataset
      marked/                               shards of the same images with restart markers
      windows/<number>.jpg                  one losslessly cut window of each of some images
      mds/  litdata/  ffcv.beton            the same images in peers' formats, written by the peers
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from measure import CORES
from PIL import Image

from data_prep.write.jobs import run_jobs

ROOT = Path(__file__).resolve().parent.parent
NUM_CLASSES = 20
NUM_SHARDS = 8
GRAIN = 6.5
SIZES = ((500, 375), (375, 500), (500, 333), (333, 500), (640, 480))
SHARES = (0.48, 0.14, 0.10, 0.04, 0.04, 0.20)
"""The probabilities of the image sizes. The last probability is for all other sizes, a tenth of
which are large."""
QUALITIES = ((70, 75, 80, 85, 90, 93, 96), (0.05, 0.06, 0.06, 0.06, 0.06, 0.04, 0.67))
"""The JPEG qualities and their probabilities, as in EliSchwartz/imagenet-sample-images, which has
one photograph of each of ImageNet's 1,000 classes."""
SUBSAMPLED = 0.21
"""The share of images with 4:2:0 chroma in the same photographs. The others have 4:4:4."""
NUM_WINDOWS = 320


class Data(NamedTuple):
    """The benchmark data in the folder `place`."""

    place: Path
    num_images: int

    @property
    def folder(self) -> Path:
        return self.place / "jpegs"

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*/*.JPEG"))

    @property
    def shards(self) -> Path:
        return self.place / "shards"

    @property
    def marked(self) -> Path:
        return self.place / "marked"

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return the path of `name`. `make` creates the file or folder once, completely or not at
        all."""
        path = self.place / name
        unfinished = self.place / f"unfinished-{name}"
        if not path.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.unlink(missing_ok=True)
            make(unfinished)
            unfinished.rename(path)
        return path


def make_data(place: Path, num_images: int, photos: Path | None = None) -> Data:
    """Return the images and shards in `place`. Create those that are missing.

    photos: a folder of JPEGs named WNID_*.JPEG, which are used instead of made images.
    """
    # Other photos, or another version of this module, must not get the images of an earlier call.
    source = str(photos.resolve()).encode() if photos else Path(__file__).read_bytes()
    data = Data(place / f"{num_images}-{hashlib.sha256(source).hexdigest()[:8]}", num_images)
    data.place.mkdir(parents=True, exist_ok=True)
    if photos:
        data.made("jpegs", lambda folder: copy_photos(photos, folder, num_images))
    else:
        data.made("jpegs", lambda folder: make_images(folder, num_images))
    for name, markers in (("shards", "off"), ("marked", "auto")):
        data.made(name, partial(make_shards, data.folder, markers=markers))
    return data


def copy_photos(photos: Path, folder: Path, num_images: int) -> None:
    """Copy the first photos into class folders. Raises SystemExit if there are too few."""
    files = sorted(photos.glob("*_*.JPEG"))[:num_images]
    if len(files) < num_images:
        raise SystemExit(
            f"{photos}: expected {num_images:,} files named WNID_*.JPEG, found {len(files):,}"
        )
    for file in files:
        wnid = file.name.partition("_")[0]
        (folder / wnid).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / wnid)


def make_shards(folder: Path, out: Path, markers: str) -> None:
    """Write shards of the class folders with the public command. markers: off or auto."""
    options = [
        "--out",
        str(out),
        "--num-shards",
        str(NUM_SHARDS),
        "--val-fraction",
        "0",
        "--restart-markers",
        markers,
    ]
    subprocess.run(
        [sys.executable, "-m", "data_prep.imagefolder", str(folder), *options],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def make_images(folder: Path, num_images: int) -> None:
    ranges = [range(start, min(start + 100, num_images)) for start in range(0, num_images, 100)]
    run_jobs(
        [(_write_images, (folder, numbers), numbers[0]) for numbers in ranges],
        CORES,
        "images",
        num_jobs=len(ranges),
        unit="parts",
    )


def _write_images(job: tuple[Path, range]) -> None:
    from sklearn.datasets import load_sample_images

    folder, numbers = job
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    for number in numbers:
        wnid = f"n{number % NUM_CLASSES:08d}"
        (folder / wnid).mkdir(parents=True, exist_ok=True)
        (folder / wnid / f"{wnid}_{number}.JPEG").write_bytes(make_image(number, photos))


def make_image(number: int, photos: list[Image.Image]) -> bytes:
    """Return a JPEG of a photo window with changed contrast, brightness, colors and added grain."""
    rng = np.random.default_rng(number)
    width, height = _size(rng)
    photo = photos[number % len(photos)]

    scale = min(photo.width / width, photo.height / height) * rng.uniform(0.35, 1)
    left, top = (
        rng.uniform(0, photo.width - scale * width),
        rng.uniform(0, photo.height - scale * height),
    )
    box = (left, top, left + scale * width, top + scale * height)

    pixels = np.asarray(photo.resize((width, height), Image.Resampling.BICUBIC, box), np.float32)
    pixels = ((pixels - 128) * rng.uniform(0.7, 1.3) + 128 + rng.uniform(-25, 25)) * rng.uniform(
        0.85, 1.15, 3
    ).astype(np.float32)
    pixels += rng.standard_normal((height, width, 1), np.float32) * GRAIN * rng.uniform(0.3, 1.7)
    pixels += rng.standard_normal((height, width, 3), np.float32) * GRAIN * rng.uniform(0.1, 0.6)

    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    encoded = io.BytesIO()
    subsampling = 2 if rng.random() < SUBSAMPLED else 0
    if rng.random() < 0.02:
        image = image.convert("L")
        subsampling = -1

    quality = int(rng.choice(QUALITIES[0], p=QUALITIES[1]))
    image.save(
        encoded, "JPEG", quality=quality, subsampling=subsampling, progressive=rng.random() < 0.01
    )
    return encoded.getvalue()


def _size(rng: np.random.Generator) -> tuple[int, int]:
    choice = rng.choice(len(SHARES), p=SHARES)
    if choice < len(SIZES):
        return SIZES[choice]
    if rng.random() < 0.1:
        return int(rng.integers(800, 1100)), int(rng.integers(600, 800))
    return int(rng.integers(200, 520)), int(rng.integers(180, 460))


def cut_windows(data: Data, out: Path) -> None:
    """Losslessly cut one random training window out of each of the first images.

    jpegtran cuts at block boundaries.
    """
    from vit.config.schema import AugmentConfig
    from vit.data.augment.draw import draw_crops, sample_keys

    files = data.files[:NUM_WINDOWS]
    sizes = np.array([Image.open(file).size for file in files])
    keys = sample_keys(0, 0, np.arange(len(files)))
    crops = draw_crops(AugmentConfig(), keys, sizes[:, 0], sizes[:, 1], (224, 224))
    out.mkdir()
    for number, (file, (left, top, width, height)) in enumerate(
        zip(files, crops.tolist(), strict=True)
    ):
        place = f"{width}x{height}+{left}+{top}"
        command = ["jpegtran", "-optimize", "-crop", place, "-outfile", f"{out}/{number:06d}.jpg"]
        subprocess.run([*command, str(file)], check=True)


def describe(data: Data) -> str:
    """Describe the images in one line, with their number, their bytes, and their bits per pixel."""
    sizes_bytes = []
    pixels = []
    for file in data.files:
        with Image.open(file) as image:
            pixels.append(image.width * image.height)
        sizes_bytes.append(file.stat().st_size)

    mean_kb = np.mean(sizes_bytes) / 1e3
    median_kb = np.median(sizes_bytes) / 1e3
    bits = 8 * np.sum(sizes_bytes) / np.sum(pixels)
    return (
        f"{len(pixels):,} JPEGs, {mean_kb:.0f} kB on average (median {median_kb:.0f}), {bits:.2f}"
        " bits a pixel."
    )


def bytes_rows(data: Data) -> list[list[str]]:
    """Return a table of the disk space that the images take in each format."""
    forms = {
        "jpegs/*/*.JPEG": "JPEGs in class folders",
        "shards/*.tar": "our shards",
        "marked/*.tar": "our shards with restart markers",
        "mds/*": "MosaicML streaming",
        "litdata/*": "litdata",
        "ffcv.beton": "FFCV, encoded again at quality 90",
    }

    rows = [["", "kB an image", "ratio to the JPEGs"]]
    num_original = sum(file.stat().st_size for file in data.files)
    for pattern, form in forms.items():
        num_bytes = sum(file.stat().st_size for file in data.place.glob(pattern))
        if num_bytes:
            rows.append(
                [
                    form,
                    f"{num_bytes / data.num_images / 1e3:.1f}",
                    f"{num_bytes / num_original:.3f}",
                ]
            )
    return rows
