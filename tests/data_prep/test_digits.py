"""The digits: real ones, legible ones, each original in one split only, the same bytes every time."""

import gzip
import hashlib
import io
import json
import re
import struct
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep import mnist
from data_prep.catalogue import Sample, Source, open_catalogue
from data_prep.digits import TEXTURES, Uniform, digit_mask, main, read, source, square_of, texture
from data_prep.jobs import PrepError
from vit.data.shards import open_split

FIRST_VERSION = [84.5, 77.4, 92.6]


def listed(found: Source, folder: Path, seed: int = 0) -> dict[str, list[Sample]]:
    """The samples of each split; their pixels are in `folder`."""
    catalogue = open_catalogue(found, folder / f"seed{seed}", seed)
    return {split: catalogue.table(split).samples(range(total)) for split, total in catalogue.splits.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("digits") / "root"
    assert main(["--out", str(root), "--renderings", "1", "--val-renderings", "1", "--image-size", "40", "--workers", "1"]) == 0
    return root


def original_of(key: str) -> int:
    return int(key.removeprefix("digit").split("_")[0])


def test_originals_are_in_one_split_only(root):
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
    assert {split: len(samples) for split, samples in splits.items()} == {"train": 8628, "val": 1795}
    val = Counter(sample.label for sample in splits["val"])
    assert min(val.values()) == 175
    assert max(val.values()) == 185
    assert not {s.name for s in splits["train"]} & {s.name for s in splits["val"]}
    assert {s.key for s in listed(source(seed=1), tmp_path, 1)["val"]} != {s.key for s in splits["val"]}


def test_same_options_same_bytes(root, tmp_path):
    main(["--out", str(tmp_path / "b"), "--renderings", "1", "--val-renderings", "1", "--image-size", "40", "--workers", "2"])
    for path in root.iterdir():
        assert path.read_bytes().replace(b"root", b"b") == (tmp_path / "b" / path.name).read_bytes().replace(b"root", b"b"), path.name
    options = json.loads((root / "_info.json").read_text())["options"]
    assert options["renderings"] == 1
    assert options["image_size"] == 40
    assert options["seed"] == 0


def test_renderings_differ_by_copy_and_seed_alone(tmp_path):
    pixels = tmp_path / "pixels"
    pixels.write_bytes(bytes(range(16)) * 8)

    def rendered(original: int, copy: int, seed: int, offset: int = 0) -> bytes:
        return read(Sample(f"digit{original:04d}_{copy:02d}", 3, str(original), str(pixels), offset, 64), 48, seed)

    images = [rendered(7, 0, 0), rendered(7, 1, 0), rendered(7, 0, 1), rendered(8, 0, 0), rendered(7, 0, 0, offset=64)]
    assert len(set(images)) == 4
    assert images[0] == images[4]


def test_pixels_are_those_of_the_first_version(tmp_path):
    """Mean red, green and blue of one rendering; a hash of the file would change with Pillow."""
    pixels = tmp_path / "pixels"
    pixels.write_bytes(bytes(range(16)) * 4)
    data = read(Sample("digit0007_02", 3, "7", str(pixels), 0, 64), 48, 5)
    decoded = np.asarray(Image.open(io.BytesIO(data)), np.int64)
    assert decoded.shape == (48, 48, 3)
    assert decoded.mean(axis=(0, 1)).round(1).tolist() == FIRST_VERSION


def test_uniform_numbers_are_splitmix64():
    uniform = Uniform((1234567).to_bytes(8, "little"))
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # the reference C program's, seed 1234567
    assert uniform.array(2).tolist() + uniform.array(1).tolist() == [(z >> 11) * 2.0**-53 for z in first]


@pytest.mark.parametrize("kind", TEXTURES)
def test_textures_are_calm(kind):
    for n in range(20):
        pattern = texture(kind, 48, Uniform(n.to_bytes(8, "little")))
        assert pattern.shape == (48, 48)
        assert pattern.min() >= 0
        assert pattern.max() <= 1
        assert np.ptp(pattern) > 0.2
        assert max(np.abs(np.diff(pattern, axis=axis)).max() for axis in (0, 1)) < 0.75


def luminance_of(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)), np.float64) / 255 @ (0.2126, 0.7152, 0.0722)


def test_digits_stand_out_and_lie_inside(tmp_path):
    """Ink and ground differ clearly in luminance, whatever colours and texture were drawn; the border is ground."""
    found = source(seed=3)
    for sample in listed(found, tmp_path, 3)["val"][::20]:
        luminance = luminance_of(found.read(sample))
        border = np.concatenate([luminance[0], luminance[-1], luminance[:, 0], luminance[:, -1]])
        assert np.ptp(border) < 0.35, f"{sample}: ink, or a loud texture, at the border"
        ink = np.abs(luminance - np.median(border)) > 0.35
        assert 0.03 < ink.mean() < 0.5, f"{sample}: {ink.mean():.0%} of the image is ink"
        pixels = np.fromfile(sample.file, np.uint8, sample.size, offset=sample.offset).reshape(8, 8)
        mask = digit_mask(pixels / 16, 8, 48, Uniform(f"{sample.name:0>8}".encode()))
        assert mask.min() >= 0
        assert mask.max() <= 1
        assert 0.03 < mask.mean() < 0.5


# ---- MNIST's digits, photographs --------------------------------------------------------------------------------------


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


@pytest.fixture
def originals(tmp_path, monkeypatch) -> Path:
    """MNIST's four files with 40 and 20 digits: a bar as wide as 2 pixels and twice the label."""
    monkeypatch.setattr(mnist, "PARTS", {"train": ("train", 40), "val": ("t10k", 20)})
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part, count in (("train", 40), ("t10k", 20)):
        labels = np.arange(count) % 10
        images = np.zeros((count, 28, 28), np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4:24, 4 : 6 + 2 * label] = 255
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder


@pytest.fixture
def photographs(tmp_path) -> Path:
    """Large, small, light, dark, grey and with a palette; some lie deeper."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "textures"
    kinds = [("light/a.jpg", (90, 120), 255), ("dark/b.png", (300, 200), 60), ("c.jpg", (20, 16), 200), ("light/deep/d.gif", (64, 64), 255)]
    for name, (height, width), most in kinds:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(rng.integers(0, most + 1, (height, width, 3), np.uint8))
        (image.convert("L") if name == "c.jpg" else image).save(path)
    return folder


def test_mnist_and_photographs(originals, photographs, tmp_path):
    found = source(image_size=40, mnist_folder=originals, textures=photographs)
    splits = listed(found, tmp_path)
    assert {split: len(samples) for split, samples in splits.items()} == {"train": 40, "val": 20}
    assert {sample.key for sample in splits["val"]} == {f"t10k{n:05d}_00" for n in range(20)}
    seen, ink = set(), {label: [] for label in range(10)}
    for sample in splits["train"] + splits["val"]:
        original, _, photograph = sample.name.partition(" on ")
        assert int(original.partition("/")[2]) % 10 == sample.label
        seen.add(photograph)
        luminance = luminance_of(found.read(sample))
        assert luminance.shape == (40, 40)
        border = np.concatenate([luminance[0], luminance[-1], luminance[:, 0], luminance[:, -1]])
        assert np.percentile(border, 90) < 0.5, "the ground is dark"
        ink[sample.label].append((luminance > np.percentile(border, 90) + 0.2).mean())
    assert seen == {"light/a.jpg", "dark/b.png", "c.jpg", "light/deep/d.gif"}
    widths = [np.mean(found) for found in ink.values()]
    assert sorted(widths) == widths, "wider bars have more ink"


def test_the_command_takes_both_and_refuses_others_for_the_same_folder(originals, photographs, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["--out", str(out), "--mnist", str(originals), "--image-size", "32", "--workers", "1", "--num-shards", "2", "--with-json"]
    assert main([*command, "--textures", str(photographs)]) == 0
    options = json.loads((out / "_info.json").read_text())["options"]
    assert (options["originals"], options["renderings"], options["val_renderings"]) == ("mnist", 1, 1)
    assert (
        options["textures"]
        == hashlib.sha256(
            "".join(
                f"{name}\t{(photographs / name).stat().st_size}\n" for name in ("c.jpg", "dark/b.png", "light/a.jpg", "light/deep/d.gif")
            ).encode()
        ).hexdigest()
    )
    with tarfile.open(out / "train-00000.tar") as tar:
        described = json.load(tar.extractfile(next(name for name in tar.getnames() if name.endswith(".json"))))
    assert described["name"].startswith("train/000")
    assert (photographs / described["name"].partition(" on ")[2]).is_file()
    capsys.readouterr()
    (photographs / "c.jpg").unlink()
    assert main([*command, "--textures", str(photographs)]) == 2
    assert "textures is " in capsys.readouterr().err
    assert main(command) == 2
    assert re.search(r"textures is [0-9a-f]{8}\.\.\. there, null here", capsys.readouterr().err)


def test_squares_are_inside_dark_enough_and_true_to_their_photograph():
    photograph = Image.fromarray(np.full((60, 90, 3), 220, np.uint8))
    for n in range(10):
        square = square_of(photograph, 32, 0.2, Uniform(n.to_bytes(8, "little")))
        assert square.shape == (32, 32, 3)
        np.testing.assert_allclose(square, 0.3, atol=1e-9)
    dark = Image.fromarray(np.full((60, 90, 3), 20, np.uint8))
    np.testing.assert_allclose(square_of(dark, 32, 0.2, Uniform(b"")), 20 / 255)


def test_errors_of_folders(originals, photographs, tmp_path, capsys):
    (originals / "train-images-idx3-ubyte").unlink()
    assert main(["--out", str(tmp_path / "out"), "--mnist", str(originals)]) == 2
    assert "missing: train-images-idx3-ubyte (with .gz or without)" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    for folder, message in ((tmp_path / "empty", "no images below it"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(PrepError, match=f"{folder}: {message}; expected a folder of photographs"):
            source(textures=folder)
    (photographs / "c.jpg").write_bytes(b"no image")
    found = source(textures=photographs, renderings=1, val_renderings=1)
    sample = next(sample for sample in listed(found, tmp_path)["val"] if sample.name.endswith("c.jpg"))
    with pytest.raises(ValueError, match=r"texture .*/c.jpg cannot be read: cannot decode 8 bytes: no image"):
        found.read(sample)
