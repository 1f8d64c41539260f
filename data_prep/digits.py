"""A small real data set without a download: handwritten digits, coloured, on textures.

    python -m data_prep.digits --out data/digits [--num-shards N] [--workers N] [--seed N]
                               [--image-size 48] [--renderings 6] [--val-renderings 5]
                               [--shards A-B | --shards I/N]

The data's story: scikit-learn carries 1,797 digits that people wrote (8x8 grey; UCI optdigits). A fifth of each class goes to
val, by original, so no original is in both splits (who wrote it is not recorded, so a writer may be). Each original is rendered
several times: enlarged smoothly, turned, scaled and shifted a little, in a random colour, on a calm and clearly darker texture.
A ViT of 128 dimensions learns it in minutes on a CPU. After https://github.com/explainingai-code/VIT-Pytorch, which does so
with MNIST.

Every random number comes from a hash of (seed, original, rendering), so an image depends on nothing else. Equal bytes need
equal versions of Pillow.
"""

from __future__ import annotations

import argparse
import colorsys
import io
import sys
from typing import NamedTuple

import numpy as np
from PIL import Image

from data_prep.command import add_arguments, positive, run
from data_prep.writer import Catalogue, Sample, stable_hash, write

VAL_FRACTION = 0.2
TEXTURES = ("gradient", "stripes", "checks", "noise", "dots")
JPEG_QUALITY = 90


class Rendering(NamedTuple):
    """One image to make, and all it depends on."""

    pixels: bytes
    """64 values from 0 to 16, row by row."""
    original: int
    """Its number in load_digits."""
    copy: int
    """Which of the original's renderings."""
    image_size: int
    seed: int


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
    bright = float(rgb @ (0.2126, 0.7152, 0.0722))
    return rgb * luminance / bright if luminance < bright else rgb + (1 - rgb) * (luminance - bright) / (1 - bright + 1e-9)


def digit_mask(image: np.ndarray, size: int, uniform: Uniform) -> np.ndarray:
    """(8, 8) float in [0, 16] -> (size, size) opacity in [0, 1], turned by up to 8 degrees, scaled and shifted a little."""
    padded = np.pad(image / 16, 4)  # 16 x 16, so that nothing leaves the image
    angle = np.radians(uniform.between(-8, 8))
    scale = 8 / (uniform.between(0.74, 0.86) * size)  # padded pixels a pixel; the digit takes this part of the height
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    middle, shift = size / 2, 0.04 * size
    cx, cy = middle + uniform.between(-shift, shift), middle + uniform.between(-shift, shift)
    affine = (cos, sin, 8 - cos * cx - sin * cy, -sin, cos, 8 + sin * cx - cos * cy)
    smooth = Image.fromarray(padded.astype(np.float32)).transform((size, size), Image.Transform.AFFINE, affine, Image.Resampling.BICUBIC)
    edge = np.clip((np.asarray(smooth, np.float64) - 0.25) / 0.4, 0, 1)
    return edge * edge * (3 - 2 * edge)


def render(image: np.ndarray, size: int, uniform: Uniform) -> np.ndarray:
    """(8, 8) digit, 0 to 16 -> (size, size, 3) uint8. The digit is lighter than its background, by 0.45 in luminance at least."""
    kind = TEXTURES[int(uniform.between(0, len(TEXTURES)))]
    # Light on dark, always: with either way round a small ViT needs twice the epochs, and this data set is for first steps.
    ground = uniform.between(0.06, 0.34)
    ink = ground + uniform.between(0.5, 0.62)
    hue = uniform.between(0, 1)
    near, saturation = hue + uniform.between(-0.08, 0.08), uniform.between(0.25, 0.8)
    swing = uniform.between(0.03, 0.05)
    low = colour(hue % 1, saturation, max(0.02, ground - swing))
    high = colour(near % 1, saturation, min(0.98, ground + swing))
    pattern = texture(kind, size, uniform)[..., None]
    background = low + (high - low) * pattern
    pen = colour((hue + uniform.between(0.2, 0.8)) % 1, uniform.between(0.5, 1.0), ink)
    mask = digit_mask(image, size, uniform)[..., None]
    return np.clip(np.rint(255 * (background + (pen - background) * mask)), 0, 255).astype(np.uint8)


def read(rendering: Rendering) -> bytes:
    """The JPEG of one rendering."""
    digit = np.frombuffer(rendering.pixels, np.uint8).reshape(8, 8)
    uniform = Uniform(stable_hash(rendering.seed, rendering.original, rendering.copy))
    pixels = render(digit, rendering.image_size, uniform)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "JPEG", quality=JPEG_QUALITY)
    return encoded.getvalue()


def catalogue(image_size: int = 48, renderings: int = 6, val_renderings: int = 5, seed: int = 0) -> Catalogue:
    """The catalogue of all renderings. image_size: side in pixels; (val_)renderings: images of each original."""
    from sklearn.datasets import load_digits  # here, as it is slow to import and no worker needs it

    loaded = load_digits()
    labels, pixels = loaded.target, [image.astype(np.uint8).tobytes() for image in loaded.images]
    splits: dict[str, list[Sample]] = {"train": [], "val": []}
    for label in range(10):
        originals = sorted(np.flatnonzero(labels == label).tolist(), key=lambda original: stable_hash(seed, original))
        num_val = round(VAL_FRACTION * len(originals))
        for split, part, copies in (("val", originals[:num_val], val_renderings), ("train", originals[num_val:], renderings)):
            splits[split] += [
                Sample(f"digit{original:04d}_{copy:02d}", label, Rendering(pixels[original], original, copy, image_size, seed))
                for original in part
                for copy in range(copies)
            ]
    options = {"image_size": image_size, "renderings": renderings, "val_renderings": val_renderings}
    return Catalogue("digits", options, [str(label) for label in range(10)], splits, read)


def _prepare(args: argparse.Namespace) -> None:
    write(
        catalogue(args.image_size, args.renderings, args.val_renderings, args.seed),
        args.out,
        num_shards=args.num_shards,
        seed=args.seed,
        workers=args.workers,
        part=args.shards,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.digits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image-size", type=positive, default=48, metavar="N", help="side in pixels (default: %(default)s)")
    parser.add_argument(
        "--renderings", type=positive, default=6, metavar="N", help="training images of each original (default: %(default)s)"
    )
    parser.add_argument(
        "--val-renderings", type=positive, default=5, metavar="N", help="validation images of each original (default: %(default)s)"
    )
    add_arguments(parser)
    return run(_prepare, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
