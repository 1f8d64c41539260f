"""Test that HEIC photos are converted to JPEG if pillow-heif is installed."""

import json

import numpy as np
import pytest
from PIL import Image
from small_shards import add

from data_prep.imagefolder import main
from vit.data.decode.image_files import READS_HEIF
from vit.data.storage.opening import open_split

pytestmark = pytest.mark.skipif(not READS_HEIF, reason="needs pip install pillow-heif")


def test_photos_are_read_and_stored_as_jpegs(tmp_path, capsys):
    import pillow_heif

    pillow_heif.register_heif_opener()
    pixels = np.add.outer(np.arange(40), np.arange(60))[..., None].repeat(3, 2).astype(np.uint8)
    for folder, name in (("cat", "a.HEIC"), ("cat", "b.heif"), ("dog", "c.heic"), ("dog", "d")):
        path = tmp_path / "photos" / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, "HEIF", quality=95)
    add(tmp_path / "photos" / "dog" / "e.jpg")
    out = tmp_path / "out"
    flags = ("--out", str(out), "--val-fraction", "0", "--workers", "1")
    assert main([str(tmp_path / "photos"), *flags]) == 0
    assert json.loads((out / "_info.json").read_text())["changed"] == {"HEIF (RGB)": 4}
    split = open_split(out, "train")
    photos = [np.asarray(image) for image, _ in (split[n] for n in range(5))]
    photos = [photo for photo in photos if photo.shape == pixels.shape]
    assert len(photos) == 4
    assert max(np.abs(photo.astype(int) - pixels).mean() for photo in photos) < 3
