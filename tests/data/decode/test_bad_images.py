"""Test that unusual images are decoded, and that unreadable images are either skipped and counted
or raise an error that contains their key."""

import io
import os
import struct
import tarfile

import numpy as np
import pytest
import torch
from checksums import indexed_as_it_is
from PIL import Image

from vit.config.schema import AugmentConfig, EvalConfig
from vit.data.batches import Batch, EvalBatches, TrainBatches
from vit.data.decode import native
from vit.data.decode.images import decode_box
from vit.data.decode.jpeg_header import read_header
from vit.data.image_format import ImageFormat
from vit.data.loader import Loader
from vit.data.order import make_order
from vit.data.shards.info_file import make_info, write_sidecar
from vit.data.storage.opening import open_split
from vit.system.files import ShardError, write_json

FORMAT = ImageFormat((16, 16), 3, "bilinear")


def encoded(
    width: int = 60, height: int = 40, mode: str = "RGB", form: str = "JPEG", **options
) -> bytes:
    pixels = np.random.default_rng(width * height).integers(
        0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8
    )
    image = Image.fromarray(pixels).resize((width, height)).convert("L" if mode == "I;16" else mode)
    data = io.BytesIO()
    (image.convert("I").convert("I;16") if mode == "I;16" else image).save(data, form, **options)
    return data.getvalue()


def with_interval(data: bytes, blocks: int) -> bytes:
    """Return the JPEG with a header that declares a restart marker after every `blocks` blocks."""
    at = data.index(b"\xff\xda")
    return data[:at] + b"\xff\xdd\0\4" + struct.pack(">H", blocks) + data[at:]


GOOD = {
    "gray": encoded(mode="L"),
    "cmyk": encoded(mode="CMYK"),
    "progressive": encoded(progressive=True),
    "png": encoded(form="PNG"),
    "alpha": encoded(mode="RGBA", form="PNG"),
    "palette": encoded(mode="P", form="PNG"),
    "16bit": encoded(mode="I;16", form="PNG"),
    "webp": encoded(form="WEBP"),
    "gif": encoded(mode="P", form="GIF"),
    "pixel": encoded(1, 1),
    "wide": encoded(30_000, 10),
    "tall_png": encoded(10, 30_000, form="PNG"),
    "markers": encoded(restart_marker_blocks=2),
    "behind": encoded() + b"something behind the image",
    "turned": encoded(exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"),
}
BAD = {
    "truncated": encoded(200, 150)[:-2000],
    "truncated_markers": encoded(200, 150, restart_marker_blocks=1)[:-2000],
    "nearly_whole_markers": encoded(200, 150, restart_marker_blocks=1)[:-40],
    "truncated_png": encoded(200, 150, form="PNG")[:-200],
    "header_only": encoded(200, 150)[: read_header(encoded(200, 150)).scan_offset],
    "empty": b"",
    "zeros": bytes(500),
    "text": b"<html>404</html>",
    "16bit_jpeg": encoded(200, 150).replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x10"),
}
"""Images that cannot be decoded but have intact headers, so the index contains their sizes."""


def write_shard(root, images: dict[str, bytes], stored: dict[str, bytes]):
    """Write `images` to a shard and index them. Then overwrite some of them with `stored`,
    truncated or zero-padded to the original size."""
    root.mkdir()
    path = root / "train-00000.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, data in images.items():
            for name, content in ((f"{key}.jpg", data), (f"{key}.cls", b"1")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    sidecar = write_sidecar(path, len(images))
    about = {"source": "test", "options": {}, "class_names": ["a", "b"], "num_classes": 2}
    write_json(
        root / "_info.json", make_info({"train": [path.name]}, {path.name: sidecar}, **about)
    )
    split = open_split(root, "train")
    with open(path, "r+b") as tar:
        for number, key in enumerate(images):
            if key in stored:
                row = split.index[number]
                tar.seek(int(row["offset"]))
                tar.write(stored[key][: row["size"]].ljust(int(row["size"]), b"\0"))
    indexed_as_it_is(split, *range(len(images)))
    return split


def train_batches(split, **options) -> TrainBatches:
    return TrainBatches(
        split, make_order(split.num_samples, split.num_samples), AugmentConfig(), FORMAT, **options
    )


def rows_of(batches: TrainBatches | EvalBatches) -> Batch:
    return batches.layout.batch_in(memoryview(bytearray(batches.layout.num_bytes)))


@pytest.fixture(params=["simplejpeg", "native"])
def decoder(request, monkeypatch):
    if request.param == "simplejpeg":
        monkeypatch.setattr(native, "AVAILABLE", False)
    elif not native.AVAILABLE and os.environ.get("VIT_REQUIRE_NATIVE") != "1":
        pytest.skip(
            "the C decoder was not built: apt-get install build-essential, then pip install -e ."
        )


def test_unusual_images_are_trained_on_and_evaluated(tmp_path, decoder):
    split = write_shard(tmp_path / "root", GOOD, {})
    with Loader(train_batches(split, on_bad_image="error"), 0, 2) as loader:
        for batch in loader:
            assert sorted(batch.ids.tolist()) == list(range(len(GOOD)))
            assert (batch.weights == 1).all()
    views = EvalBatches(split, FORMAT, EvalConfig(), len(GOOD))
    with Loader(views, 0, 1) as loader:
        assert (next(loader).weights == 1).all()


def test_undecodable_images_are_skipped_and_named(tmp_path, decoder):
    whole = {key: encoded(200, 150, restart_marker_blocks=0) for key in BAD} | {"fine": encoded()}
    split = write_shard(tmp_path / "root", whole, BAD)
    with Loader(train_batches(split, on_bad_image="skip"), 0, 1) as loader:
        batch = next(loader)
        assert sorted(batch.bad_keys) == sorted(BAD)
        fine = batch.ids.tolist().index(len(BAD))
        assert np.flatnonzero(batch.weights).tolist() == [fine]
        assert not batch.images[batch.weights == 0].any()


@pytest.mark.parametrize("key", BAD)
def test_an_undecodable_image_is_an_error_by_default_and_in_evaluation(key, tmp_path, decoder):
    split = write_shard(tmp_path / "root", {"fine": encoded(), key: encoded(200, 150)}, BAD)
    for batches, remedy in (
        (train_batches(split), "; set loader.on_bad_image=skip to train without this image"),
        (
            EvalBatches(split, FORMAT, EvalConfig(), 2),
            "; evaluation needs every image: restore the shard",
        ),
    ):
        with pytest.raises(
            ShardError,
            match=(
                rf"train-00000\.tar: image '{key}' at byte \d+: cannot decode \d+ bytes: .*{remedy}"
            ),
        ):
            batches.fill(0, 0, rows_of(batches))


def test_indexing_names_an_empty_image(tmp_path):
    with pytest.raises(ShardError, match=r"has an empty image file, 'empty\.jpg'"):
        write_shard(tmp_path / "root", {"fine": encoded(), "empty": b""}, {})


LYING = {
    "fewer markers than said": with_interval(encoded(200, 150, subsampling=0), 5),
    "an interval that fits no row": with_interval(encoded(200, 150), 7),
}


@pytest.mark.parametrize("data", LYING.values(), ids=LYING)
def test_wrong_restart_markers_give_the_same_pixels_as_pillow(data, tmp_path, decoder):
    """Published results are based on Pillow, which decodes images with wrong restart markers."""
    with Image.open(io.BytesIO(data)) as image:
        expected = np.array(image)
    split = write_shard(tmp_path / "root", {"lying": data, "fine": encoded()}, {})
    for box in ((0, 0, 200, 150), (64, 30, 40, 40), (0, 0, 8, 8)):
        left, top, width, height = box
        np.testing.assert_array_equal(
            decode_box(split.read(0), box), expected[top : top + height, left : left + width]
        )


@pytest.mark.parametrize("key", ["jpeg", "png"])
def test_a_wrong_size_in_the_index_is_reported_instead_of_a_wrong_window(key, tmp_path, decoder):
    data = encoded(form=key.upper())
    split = write_shard(tmp_path / "root", {key: data, "fine": encoded()}, {})
    split.index = split.index.copy()
    split.index["width"][0] = 50
    split.index["height"][0] = 40
    batches = train_batches(split)
    rows = rows_of(batches)
    with pytest.raises(
        ShardError,
        match=(
            rf"image '{key}' at byte \d+: the image has 60 x 40 pixels, but the index says 50"
            r" x 40: delete"
        ),
    ):
        batches.fill(0, 0, rows)
    assert train_batches(split, on_bad_image="skip").fill(0, 0, rows) == (key,)


def test_repeated_images_equal_separate_views_and_each_bad_copy_counts(tmp_path, decoder):
    images = {f"k{n}": encoded(100 + n, 80) for n in range(12)}
    split = write_shard(tmp_path / "root", images, {"k3": b""})
    order = make_order(12, 12, aug_repeats=3)
    batches = TrainBatches(split, order, AugmentConfig(), FORMAT, on_bad_image="skip")
    seen = []
    for position in range(3):
        rows = rows_of(batches)
        one = rows_of(batches)
        bad = batches.fill(position, 0, rows)
        assert bad == ("k3",) * 3 * (3 in rows.ids), "each copy of a bad image must be counted"
        assert torch.equal(rows.weights == 0, rows.ids == 3)
        # Fill one row at a time, so that copies of an image cannot share its decoded pixels.
        for row in range(12):
            batches.fill(position, row, one.rows(row, row + 1))
        assert torch.equal(rows.images, one.images)
        seen += rows.ids.tolist()
        for sample in set(rows.ids.tolist()) - {3}:
            views = rows.images[rows.ids == sample]
            assert len(views) == 3
            assert not torch.equal(views[0], views[1])
    assert len(set(seen)) == 12
