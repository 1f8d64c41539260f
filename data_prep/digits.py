"""Write a small real data set without a download: handwritten digits in color on textures.

    python -m data_prep.digits --out data/digits [--image-size 48] [--renderings 6]
                               [--val-renderings 5]

scikit-learn contains 1,797 handwritten digits (8x8 gray, UCI optdigits). In each class, a fifth of
the originals becomes val, so no original is in both splits. A person's handwriting may be in both
splits, because the data set does not record the writers. Each original is rendered several times. A
rendering is enlarged smoothly, slightly rotated, scaled and shifted, and drawn in a random color on
a much darker texture. A ViT with 128 dimensions learns the data set in minutes on a CPU.

Random numbers come from a hash of (seed, original, rendering), so every image is independent of the
others. The bytes are reproducible only with the same version of Pillow.
"""

import colorsys
from collections.abc import Mapping
from functools import partial

import numpy as np
from PIL import Image

from data_prep.command import positive, source_command
from data_prep.read.class_tree import split_by_hash
from data_prep.write.catalog import Builder, Source
from data_prep.write.images import encode_jpeg
from data_prep.write.samples import Sample, read_range, stable_hash

VAL_FRACTION = 0.2
TEXTURES = ("gradient", "stripes", "checks", "noise", "dots")
JPEG_QUALITY = 90
LUMINANCE = np.array((0.2126, 0.7152, 0.0722))
"""The Rec. 709 weights of red, green and blue."""
SIDE = 8
WHITE = 16
"""The maximum pixel value of an original."""
DIGIT_HEIGHT = 8
"""The typical height of a digit in an original, in pixels."""
MAX_ANGLE = 8
"""The maximum rotation of a digit, in degrees."""
HEIGHTS = (0.74, 0.86)
"""The minimum and maximum height of a rendered digit, as a fraction of the image's side."""
MAX_SHIFT = 0.04
"""The maximum distance of a digit from the center on an axis, as a fraction of the image's side."""


# ---- drawing -------------------------------------------------------------------------------------


class Uniform:
    """A uniform random number generator: SplitMix64 (Steele, Lea & Flood 2014) in counter mode.

    Libraries do not guarantee the same random streams in all versions.
    """

    def __init__(self, key: bytes):
        self.key = np.uint64(int.from_bytes(key, "little"))
        self.count = 0

    def array(self, *shape: int) -> np.ndarray:
        """Draw float64 numbers in [0, 1)."""
        counter = np.arange(self.count + 1, self.count + 1 + int(np.prod(shape)), dtype=np.uint64)
        self.count += len(counter)
        z = self.key + counter * np.uint64(0x9E3779B97F4A7C15)  # wraps modulo 2**64 as intended
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).reshape(shape) * 2.0**-53

    def between(self, low: float, high: float) -> float:
        """Draw a float in [low, high)."""
        return low + (high - low) * float(self.array(1)[0])


def _resize(image: np.ndarray, size: int) -> np.ndarray:
    """Resize an (h, w) float image to (size, size) float32 with bicubic interpolation."""
    return np.asarray(
        Image.fromarray(image.astype(np.float32)).resize((size, size), Image.Resampling.BICUBIC)
    )


def texture(kind: str, size: int, uniform: Uniform) -> np.ndarray:
    """Draw a smooth pattern, (size, size) float in [0, 1], with details a tenth as wide as the
    image."""
    angle = uniform.between(0, 2 * np.pi)
    y, x = np.mgrid[0:size, 0:size] / size - 0.5
    u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    if kind == "gradient":
        return np.clip(u + 0.5, 0, 1)
    if kind == "noise":
        return np.clip(_resize(uniform.array(5, 5), size), 0, 1)

    frequency = uniform.between(2, 4.5)
    phase = uniform.between(0, 2 * np.pi)
    waves = np.sin(2 * np.pi * frequency * u + phase)
    if kind == "stripes":
        return 0.5 + 0.5 * waves

    across = np.sin(2 * np.pi * frequency * v + phase)
    if kind == "checks":
        return 0.5 + 0.5 * np.tanh(3 * waves * across)
    return 1 / (1 + np.exp(-3.5 * (waves + across - 0.9)))


def color(hue: float, saturation: float, luminance: float) -> np.ndarray:
    """Return a color, (3,) RGB in [0, 1], with the given hue, saturation and Rec. 709 luminance."""
    rgb = np.array(colorsys.hsv_to_rgb(hue, saturation, 1.0))
    bright = float(rgb @ LUMINANCE)
    if luminance < bright:
        return rgb * luminance / bright
    return rgb + (1 - rgb) * (luminance - bright) / (1 - bright + 1e-9)


def digit_mask(image: np.ndarray, size: int, uniform: Uniform) -> np.ndarray:
    """Convert an (n, n) float digit in [0, 1] to a (size, size) opacity mask in [0, 1].

    The digit is rotated by up to 8 degrees and slightly scaled and shifted.
    """
    side = len(image)
    padded = np.pad(image, side // 2)  # Keep the rotated digit inside the image.

    angle = np.radians(uniform.between(-MAX_ANGLE, MAX_ANGLE))
    # The number of padded pixels per output pixel.
    scale = DIGIT_HEIGHT / (uniform.between(*HEIGHTS) * size)
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    shift = MAX_SHIFT * size
    cx = size / 2 + uniform.between(-shift, shift)
    cy = size / 2 + uniform.between(-shift, shift)

    # Pillow maps each pixel (x, y) of the output to a place in the padded digit: x_digit = a * x +
    # b * y + c, y_digit = d * x + e * y + f. The center (cx, cy) becomes the center (side, side).
    affine = (cos, sin, side - cos * cx - sin * cy, -sin, cos, side + sin * cx - cos * cy)
    smooth = Image.fromarray(padded.astype(np.float32)).transform(
        (size, size), Image.Transform.AFFINE, affine, Image.Resampling.BICUBIC
    )

    # Smoothstep: below 0.25 the digit is transparent, above 0.65 opaque, between a smooth ramp.
    edge = np.clip((np.asarray(smooth, np.float64) - 0.25) / 0.4, 0, 1)
    return edge * edge * (3 - 2 * edge)


def render(digit: np.ndarray, size: int, uniform: Uniform) -> np.ndarray:
    """Draw an (8, 8) digit in [0, 1] as (size, size, 3) uint8, 0.45 lighter than its background."""
    kind = TEXTURES[int(uniform.between(0, len(TEXTURES)))]

    # Digits are always lighter than the background. If some were darker, a small ViT would need
    # twice as many epochs, too many for a first example.
    ground = uniform.between(0.06, 0.34)
    ink = ground + uniform.between(0.5, 0.62)
    hue = uniform.between(0, 1)
    near = hue + uniform.between(-0.08, 0.08)
    saturation = uniform.between(0.25, 0.8)
    swing = uniform.between(0.03, 0.05)

    low = color(hue % 1, saturation, max(0.02, ground - swing))
    high = color(near % 1, saturation, min(0.98, ground + swing))
    background = low + (high - low) * texture(kind, size, uniform)[..., None]

    pen = color((hue + uniform.between(0.2, 0.8)) % 1, uniform.between(0.5, 1.0), ink)
    mask = digit_mask(digit, size, uniform)[..., None]
    return np.clip(np.rint(255 * (background + (pen - background) * mask)), 0, 255).astype(np.uint8)


def read(sample: Sample, image_size: int, seed: int) -> bytes:
    """Render one JPEG. `sample.name` is the original's name. The key ends with the rendering
    number."""
    digit = np.frombuffer(read_range(sample), np.uint8).reshape(SIDE, SIDE)
    uniform = Uniform(stable_hash(seed, sample.name, int(sample.key.rpartition("_")[2])))
    pixels = render(digit / WHITE, image_size, uniform)
    return encode_jpeg(Image.fromarray(pixels), quality=JPEG_QUALITY)


# ---- the source ----------------------------------------------------------------------------------


def source(
    image_size: int = 48, renderings: int = 6, val_renderings: int = 5, seed: int = 0
) -> Source:
    """Return a `Source` of digits.

    renderings, val_renderings: the number of renderings per original in train and in val.
    """
    return Source(
        "digits",
        {"image_size": image_size, "renderings": renderings, "val_renderings": val_renderings},
        partial(_fill, {"train": renderings, "val": val_renderings}, seed),
        partial(read, image_size=image_size, seed=seed),
    )


def _fill(copies: Mapping[str, int], seed: int, builder: Builder) -> None:
    """Add each rendering as a sample, whose location is that of the original's bytes.

    copies: the number of renderings per original in each split.
    """
    # Import scikit-learn only when needed, because it loads slowly and workers do not use it.
    from sklearn.datasets import load_digits

    builder.classes([str(label) for label in range(10)])
    loaded = load_digits()
    pixels = builder.folder / "digits.bin"
    pixels.write_bytes(loaded.images.astype(np.uint8).tobytes())
    file = builder.file(pixels)

    fractions = {"train": 1 - VAL_FRACTION, "val": VAL_FRACTION}
    num_bytes = SIDE * SIDE
    for label in range(10):
        originals = [str(number) for number in np.flatnonzero(loaded.target == label)]
        for split, names in split_by_hash(originals, fractions, seed).items():
            for copy in range(copies[split]):
                builder.add(
                    split,
                    file,
                    names=names,
                    labels=label,
                    offsets=[num_bytes * int(name) for name in names],
                    sizes=np.full(len(names), num_bytes),
                    keys=[f"digit{int(name):04d}_{copy:02d}" for name in names],
                )


# ---- the command ---------------------------------------------------------------------------------


main = source_command(
    "digits",
    __doc__,
    {
        "--image-size": {
            "type": positive,
            "default": 48,
            "metavar": "N",
            "help": "side of an image in pixels (default: %(default)s)",
        },
        "--renderings": {
            "type": positive,
            "default": 6,
            "metavar": "N",
            "help": "training images per original (default: %(default)s)",
        },
        "--val-renderings": {
            "type": positive,
            "default": 5,
            "metavar": "N",
            "help": "validation images per original (default: %(default)s)",
        },
    },
    lambda args: source(args.image_size, args.renderings, args.val_renderings, args.seed),
)


if __name__ == "__main__":
    raise SystemExit(main())
