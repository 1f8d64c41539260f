"""Test that the digits are real and legible, that each original is in a single split, and that the
bytes are reproducible."""

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from prep_place import new_catalog

from data_prep.digits import TEXTURES, Uniform, digit_mask, main, read, source, texture
from data_prep.write.catalog import Source
from data_prep.write.samples import Sample
from vit.data.storage.opening import open_split

FIRST_VERSION = [84.5, 77.4, 92.6]


def listed(found: Source, folder: Path, seed: int = 0) -> dict[str, list[Sample]]:
    """Return the samples of each split in a catalog created in `folder`."""
    catalog = new_catalog(found, folder / f"seed{seed}", seed)
    return {
        split: catalog.table(split).samples(range(total)) for split, total in catalog.splits.items()
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits") / "root"
    assert (
        main(
            [
                "--out",
                str(root),
                "--renderings",
                "1",
                "--val-renderings",
                "1",
                "--image-size",
                "40",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    return root


def original_of(key: str) -> int:
    return int(key.removeprefix("digit").split("_")[0])


def test_each_original_is_in_a_single_split(root):
    from sklearn.datasets import load_digits

    labels = load_digits().target
    seen: Counter[int] = Counter()
    for name in ("train", "val"):
        split = open_split(root, name)
        originals = [original_of(split.key(i)) for i in range(split.num_samples)]
        assert split.index["label"].tolist() == labels[originals].tolist()
        assert set(split.index["width"]) == set(split.index["height"]) == {40}
        assert split.class_names == list("0123456789")
        seen.update(originals)
    assert seen == Counter(range(1797))


def test_default_counts_and_balance(tmp_path):
    splits = listed(source(), tmp_path)
    assert {split: len(samples) for split, samples in splits.items()} == {
        "train": 8628,
        "val": 1795,
    }
    val = Counter(sample.label for sample in splits["val"])
    assert min(val.values()) == 175
    assert max(val.values()) == 185
    assert not {s.name for s in splits["train"]} & {s.name for s in splits["val"]}
    assert {s.key for s in listed(source(seed=1), tmp_path, 1)["val"]} != {
        s.key for s in splits["val"]
    }


def test_the_same_options_give_the_same_bytes(root, tmp_path):
    main(
        [
            "--out",
            str(tmp_path / "b"),
            "--renderings",
            "1",
            "--val-renderings",
            "1",
            "--image-size",
            "40",
            "--workers",
            "2",
        ]
    )
    for path in root.iterdir():
        assert path.read_bytes().replace(b"root", b"b") == (
            tmp_path / "b" / path.name
        ).read_bytes().replace(b"root", b"b"), path.name
    options = json.loads((root / "_info.json").read_text())["options"]
    assert options["renderings"] == 1
    assert options["image_size"] == 40
    assert options["seed"] == 0


def test_renderings_depend_only_on_copy_and_seed(tmp_path):
    pixels = tmp_path / "pixels"
    pixels.write_bytes(bytes(range(16)) * 8)

    def rendered(original: int, copy: int, seed: int, offset: int = 0) -> bytes:
        return read(
            Sample(f"digit{original:04d}_{copy:02d}", 3, str(original), str(pixels), offset, 64),
            48,
            seed,
        )

    images = [
        rendered(7, 0, 0),
        rendered(7, 1, 0),
        rendered(7, 0, 1),
        rendered(8, 0, 0),
        rendered(7, 0, 0, offset=64),
    ]
    assert len(set(images)) == 4
    assert images[0] == images[4]


def test_pixels_are_those_of_the_first_version(tmp_path):
    """The test compares mean colors, because a hash of the file would depend on the Pillow
    version."""
    pixels = tmp_path / "pixels"
    pixels.write_bytes(bytes(range(16)) * 4)
    data = read(Sample("digit0007_02", 3, "7", str(pixels), 0, 64), 48, 5)
    decoded = np.asarray(Image.open(io.BytesIO(data)), np.int64)
    assert decoded.shape == (48, 48, 3)
    assert decoded.mean(axis=(0, 1)).round(1).tolist() == FIRST_VERSION


def test_uniform_numbers_are_splitmix64():
    uniform = Uniform((1234567).to_bytes(8, "little"))
    # The reference C program computes these values with seed 1234567.
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert uniform.array(2).tolist() + uniform.array(1).tolist() == [
        (z >> 11) * 2.0**-53 for z in first
    ]


@pytest.mark.parametrize("kind", TEXTURES)
def test_textures_have_no_hard_edges(kind):
    for n in range(20):
        pattern = texture(kind, 48, Uniform(n.to_bytes(8, "little")))
        assert pattern.shape == (48, 48)
        assert pattern.min() >= 0
        assert pattern.max() <= 1
        assert np.ptp(pattern) > 0.2
        assert max(np.abs(np.diff(pattern, axis=axis)).max() for axis in (0, 1)) < 0.75


def luminance_of(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)), np.float64) / 255 @ (0.2126, 0.7152, 0.0722)


def test_digits_contrast_with_the_background_and_do_not_touch_the_border(tmp_path):
    """The luminance of the digit and the background must differ clearly for any colors and texture.
    The border must contain only background."""
    digits = source(seed=3)
    for sample in listed(digits, tmp_path, 3)["val"][::20]:
        luminance = luminance_of(digits.read(sample))
        border = np.concatenate([luminance[0], luminance[-1], luminance[:, 0], luminance[:, -1]])
        assert np.ptp(border) < 0.35, f"{sample}: the digit or a strong texture touches the border"
        ink = np.abs(luminance - np.median(border)) > 0.35
        assert 0.03 < ink.mean() < 0.5, f"{sample}: the digit covers {ink.mean():.0%} of the image"
        pixels = np.fromfile(sample.file, np.uint8, sample.size, offset=sample.offset).reshape(8, 8)
        mask = digit_mask(pixels / 16, 48, Uniform(f"{sample.name:0>8}".encode()))
        assert mask.min() >= 0
        assert mask.max() <= 1
        assert 0.03 < mask.mean() < 0.5


# ---- MNIST digits and photographs ----------------------------------------------------------------
