"""A small real data set without a download: handwritten digits, coloured, on textures.

    python -m data_prep.digits --out data/digits [--image-size 48] [--renderings 6] [--val-renderings 5]
                               [--mnist FOLDER] [--textures FOLDER]

The data's story: scikit-learn carries 1,797 digits that people wrote (8x8 grey; UCI optdigits). A fifth of each class goes to
val, by original, so no original is in both splits (who wrote it is not recorded, so a writer may be). Each original is rendered
several times: enlarged smoothly, turned, scaled and shifted a little, in a random colour, on a calm and clearly darker texture.
A ViT of 128 dimensions learns it in minutes on a CPU.

With --mnist the originals are MNIST's 28x28 ones instead, train's for `train` and t10k's for `val`, each rendered once by default.
With --textures the ground is a random square of a random photograph below FOLDER (the Describable Textures data set, ALOT, or any
other), darkened where it is too light for its digit; both splits use all photographs. With both, this is the data set of
https://github.com/explainingai-code/VIT-Pytorch.

Every random number comes from a hash of (seed, original, rendering), so an image depends on nothing else. Equal bytes need
equal versions of Pillow.
"""

from __future__ import annotations

import argparse
import colorsys
import hashlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from data_prep import mnist
from data_prep.catalogue import Builder, Sample, Source, read_range, stable_hash
from data_prep.command import Parser, add_arguments, positive, prepare, run
from data_prep.image_tree import images_below
from data_prep.jobs import PrepError
from vit.data.images import decode

VAL_FRACTION = 0.2
TEXTURES = ("gradient", "stripes", "checks", "noise", "dots")
JPEG_QUALITY = 90
LUMINANCE = np.array((0.2126, 0.7152, 0.0722))
"""Weights of red, green and blue (Rec. 709)."""
ON = " on "
"""Between the original and the photograph in a sample's name."""


class Kind(NamedTuple):
    """How originals of one size look."""

    side: int
    white: int
    """Largest value."""
    digit_height: int
    """Pixels that a digit mostly takes."""


KINDS = {64: Kind(8, 16, 8), 784: Kind(28, 255, 20)}
"""By bytes of an original: load_digits', MNIST's."""


# ---- drawing ----------------------------------------------------------------------------------------------------------


class Uniform:
    """Uniform numbers by SplitMix64 (Steele, Lea & Flood 2014) in counter mode: library generators promise no stable streams."""

    def __init__(self, key: bytes):
        self.key, self.count = np.uint64(int.from_bytes(key, "little")), 0

    def array(self, *shape: int) -> np.ndarray:
        """float64 in [0, 1)."""
        counter = np.arange(self.count + 1, self.count + 1 + int(np.prod(shape)), dtype=np.uint64)
        self.count += len(counter)
        z = self.key + counter * np.uint64(0x9E3779B97F4A7C15)  # modulo 2**64, as meant
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).reshape(shape) * 2.0**-53

    def between(self, low: float, high: float) -> float:
        """One number in [low, high)."""
        return low + (high - low) * float(self.array(1)[0])


def _resize(image: np.ndarray, size: int) -> np.ndarray:
    """(h, w) float -> (size, size) float32, bicubic."""
    return np.asarray(Image.fromarray(image.astype(np.float32)).resize((size, size), Image.Resampling.BICUBIC))


def texture(kind: str, size: int, uniform: Uniform) -> np.ndarray:
    """A calm pattern: (size, size) float in [0, 1], no detail finer than about a tenth of the image."""
    angle = uniform.between(0, 2 * np.pi)
    y, x = np.mgrid[0:size, 0:size] / size - 0.5
    u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    if kind == "gradient":
        return np.clip(u + 0.5, 0, 1)
    if kind == "noise":
        return np.clip(_resize(uniform.array(5, 5), size), 0, 1)
    frequency, phase = uniform.between(2, 4.5), uniform.between(0, 2 * np.pi)
    waves = np.sin(2 * np.pi * frequency * u + phase)
    if kind == "stripes":
        return 0.5 + 0.5 * waves
    across = np.sin(2 * np.pi * frequency * v + phase)
    if kind == "checks":
        return 0.5 + 0.5 * np.tanh(3 * waves * across)
    assert kind == "dots"
    return 1 / (1 + np.exp(-3.5 * (waves + across - 0.9)))


def colour(hue: float, saturation: float, luminance: float) -> np.ndarray:
    """(3,) RGB in [0, 1] of a given hue whose weighted mean (Rec. 709 weights) is exactly `luminance`."""
    rgb = np.array(colorsys.hsv_to_rgb(hue, saturation, 1.0))
    bright = float(rgb @ LUMINANCE)
    return rgb * luminance / bright if luminance < bright else rgb + (1 - rgb) * (luminance - bright) / (1 - bright + 1e-9)


def digit_mask(image: np.ndarray, digit_height: int, size: int, uniform: Uniform) -> np.ndarray:
    """(n, n) float in [0, 1] -> (size, size) opacity in [0, 1], turned by up to 8 degrees, scaled and shifted a little."""
    side = len(image)
    padded = np.pad(image, side // 2)  # so that nothing leaves the image
    angle = np.radians(uniform.between(-8, 8))
    scale = digit_height / (uniform.between(0.74, 0.86) * size)  # padded pixels a pixel; the digit takes this part of the height
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    middle, shift = size / 2, 0.04 * size
    cx, cy = middle + uniform.between(-shift, shift), middle + uniform.between(-shift, shift)
    affine = (cos, sin, side - cos * cx - sin * cy, -sin, cos, side + sin * cx - cos * cy)
    smooth = Image.fromarray(padded.astype(np.float32)).transform((size, size), Image.Transform.AFFINE, affine, Image.Resampling.BICUBIC)
    edge = np.clip((np.asarray(smooth, np.float64) - 0.25) / 0.4, 0, 1)
    return edge * edge * (3 - 2 * edge)


def square_of(photograph: Image.Image, size: int, ground: float, uniform: Uniform) -> np.ndarray:
    """A random square of an RGB photograph: (size, size, 3) float in [0, 1].

    From `size` pixels wide, not enlarged if the photograph is large enough, to as wide as it is. Darkened until 95 % of it have a luminance
    of at most `ground` + 0.1.
    """
    short = min(photograph.size)
    side = uniform.between(min(size, short), short)
    left, top = (uniform.between(0, whole - side) for whole in photograph.size)
    box = (left, top, left + side, top + side)
    square = np.asarray(photograph.resize((size, size), Image.Resampling.BICUBIC, box), np.float64) / 255
    light = float(np.percentile(square @ LUMINANCE, 95))
    return square * min(1.0, (ground + 0.1) / max(light, 1e-3))


def render(digit: np.ndarray, digit_height: int, size: int, uniform: Uniform, photograph: Image.Image | None = None) -> np.ndarray:
    """(n, n) digit in [0, 1] -> (size, size, 3) uint8. The digit is lighter than its ground: a drawn texture, by 0.45 in luminance at
    least, or a square of a photograph, by 0.4 but for its brightest spots."""
    kind = TEXTURES[int(uniform.between(0, len(TEXTURES)))]
    # Light on dark, always: with either way round a small ViT needs twice the epochs, and this data set is for first steps.
    ground = uniform.between(0.06, 0.34)
    ink = ground + uniform.between(0.5, 0.62)
    hue = uniform.between(0, 1)
    near, saturation = hue + uniform.between(-0.08, 0.08), uniform.between(0.25, 0.8)
    swing = uniform.between(0.03, 0.05)
    if photograph is None:
        low = colour(hue % 1, saturation, max(0.02, ground - swing))
        high = colour(near % 1, saturation, min(0.98, ground + swing))
        pattern = texture(kind, size, uniform)[..., None]
        background = low + (high - low) * pattern
    else:
        background = square_of(photograph, size, ground, uniform)
    pen = colour((hue + uniform.between(0.2, 0.8)) % 1, uniform.between(0.5, 1.0), ink)
    mask = digit_mask(digit, digit_height, size, uniform)[..., None]
    return np.clip(np.rint(255 * (background + (pen - background) * mask)), 0, 255).astype(np.uint8)


def read(sample: Sample, image_size: int, seed: int, textures: str | None = None) -> bytes:
    """The JPEG of one rendering. Its name is its original's, with the photograph's path below `textures`; its key ends in its number."""
    kind = KINDS[sample.size]
    digit = np.frombuffer(read_range(sample), np.uint8).reshape(kind.side, kind.side)
    original, _, path = sample.name.partition(ON)
    uniform = Uniform(stable_hash(seed, original, int(sample.key.rpartition("_")[2])))
    photograph = None if textures is None else _opened(os.path.join(textures, path))
    pixels = render(digit / kind.white, kind.digit_height, image_size, uniform, photograph)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "JPEG", quality=JPEG_QUALITY)
    return encoded.getvalue()


def _opened(path: str) -> Image.Image:
    try:
        return Image.fromarray(decode(Path(path).read_bytes()))
    except (OSError, ValueError) as error:
        raise ValueError(f"texture {path} cannot be read: {error}") from error


# ---- the source -------------------------------------------------------------------------------------------------------


class Originals(NamedTuple):
    """The digits of one split."""

    file: int
    """Number in the catalogue of the file with their pixels."""
    names: Sequence[str]
    keys: Sequence[str]
    labels: np.ndarray
    offsets: np.ndarray


def source(
    image_size: int = 48,
    renderings: int | None = None,
    val_renderings: int | None = None,
    seed: int = 0,
    mnist_folder: Path | None = None,
    textures: Path | None = None,
) -> Source:
    """All renderings.

    image_size: side in pixels. (val_)renderings: images of each original, by default 6 and 5, of MNIST's one.
    Raises PrepError if MNIST's files are missing, and if `textures` holds no images.
    """
    defaults = (6, 5) if mnist_folder is None else (1, 1)
    copies = {"train": renderings or defaults[0], "val": val_renderings or defaults[1]}
    options: dict[str, Any] = {"image_size": image_size, "renderings": copies["train"], "val_renderings": copies["val"]}
    files = None if mnist_folder is None else mnist.find_files(mnist_folder)
    if files is not None:
        options["originals"] = "mnist"
    photographs: list[str] = []
    if textures is not None:
        photographs = _photographs(textures)
        options["textures"] = _fingerprint(textures, photographs)
    fill = partial(_fill, files, photographs, copies, seed)
    folder = None if textures is None else os.path.abspath(textures)
    return Source("digits", options, fill, partial(read, image_size=image_size, seed=seed, textures=folder))


def _photographs(folder: Path) -> list[str]:
    """Sorted paths of the photographs, relative to the folder."""
    found = sorted(images_below(folder)) if folder.is_dir() else []
    if not found:
        there = "no images below it" if folder.is_dir() else "not a folder" if folder.exists() else "no such folder"
        raise PrepError(f"{folder}: {there}; expected a folder of photographs of textures, such as that of the DTD data set")
    return found


def _fingerprint(folder: Path, photographs: Sequence[str]) -> str:
    """A sha256 of the photographs' names and sizes: with others a command is not continued."""
    digest = hashlib.sha256()
    for path in photographs:
        digest.update(f"{path}\t{os.path.getsize(folder / path)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _fill(files: Mapping[str, Path] | None, photographs: Sequence[str], copies: Mapping[str, int], seed: int, builder: Builder) -> None:
    builder.classes([str(label) for label in range(10)])
    splits = _of_scikit_learn(builder, seed) if files is None else _of_mnist(builder, files)
    for split, found in splits.items():
        for copy in range(copies[split]):
            names = found.names
            if photographs:
                names = [f"{name}{ON}{_drawn(photographs, seed, name, copy)}" for name in names]
            keys = [f"{key}_{copy:02d}" for key in found.keys]
            builder.add(split, found.file, names, found.labels, found.offsets, np.full(len(names), 64 if files is None else 784), keys)


def _drawn(photographs: Sequence[str], seed: int, original: str, copy: int) -> str:
    """The photograph under one rendering."""
    return photographs[int.from_bytes(stable_hash(seed, "texture", original, copy), "big") % len(photographs)]


def _of_scikit_learn(builder: Builder, seed: int) -> dict[str, Originals]:
    from sklearn.datasets import load_digits  # here, as it is slow to import and no worker needs it

    loaded = load_digits()
    pixels = builder.folder / "digits.bin"
    pixels.write_bytes(loaded.images.astype(np.uint8).tobytes())
    file = builder.file(pixels)
    chosen: dict[str, list[int]] = {"train": [], "val": []}
    for label in range(10):
        of_class = sorted(np.flatnonzero(loaded.target == label).tolist(), key=lambda original: stable_hash(seed, original))
        num_val = round(VAL_FRACTION * len(of_class))
        chosen["val"] += of_class[:num_val]
        chosen["train"] += of_class[num_val:]
    found = {}
    for split, numbers in chosen.items():
        names, keys = [str(number) for number in numbers], [f"digit{number:04d}" for number in numbers]
        found[split] = Originals(file, names, keys, loaded.target[numbers], 64 * np.array(numbers))
    return found


def _of_mnist(builder: Builder, files: Mapping[str, Path]) -> dict[str, Originals]:
    found = {}
    for split, (part, count) in mnist.PARTS.items():
        path, labels = mnist.labelled_images(files, split, builder.folder)
        offsets = mnist.HEADER_BYTES["images"] + 784 * np.arange(count)
        names, keys = ([f"{part}{mark}{number:05d}" for number in range(count)] for mark in ("/", ""))
        found[split] = Originals(builder.file(path), names, keys, labels, offsets)
    return found


# ---- the command ------------------------------------------------------------------------------------------------------


def _prepare(args: argparse.Namespace) -> None:
    prepare(source(args.image_size, args.renderings, args.val_renderings, args.seed, args.mnist, args.textures), args)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser("python -m data_prep.digits", __doc__)
    parser.add_argument("--image-size", type=positive, default=48, metavar="N", help="side in pixels (default: %(default)s)")
    parser.add_argument("--renderings", type=positive, metavar="N", help="training images of each original (default: 6, with --mnist 1)")
    parser.add_argument(
        "--val-renderings", type=positive, metavar="N", help="validation images of each original (default: 5, with --mnist 1)"
    )
    parser.add_argument("--mnist", type=Path, metavar="FOLDER", help="take MNIST's four idx files there as originals (see data_prep.mnist)")
    parser.add_argument("--textures", type=Path, metavar="FOLDER", help="take the photographs below this folder as grounds")
    add_arguments(parser)
    return run(_prepare, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
