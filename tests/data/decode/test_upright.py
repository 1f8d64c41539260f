"""Compare rotation by EXIF orientation with Pillow's `exif_transpose`."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from vit.config.schema import EvalConfig
from vit.data.decode.crops import decode_center
from vit.data.decode.upright import upright

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 41, 3), np.uint8))


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "gray JPEG", "CMYK JPEG"])
def test_a_view_with_apply_exif_equals_that_of_the_upright_image(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    colors, _, plain = form.rpartition(" ")
    picture = PICTURE.convert({"gray": "L", "CMYK": "CMYK"}.get(colors, "RGB"))
    data = encoded(picture, plain, exif=exif)
    oracle = encoded(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"), "PNG")
    for channels in (1, 3) if form == "gray JPEG" else (3,):
        turned, stored, expected = (
            decode_center(each, (16, 16), EvalConfig(apply_exif=applied), "bicubic", channels)
            for each, applied in ((data, True), (data, None), (oracle, None))
        )
        assert torch.equal(turned, expected)
        # Pillow rotates TIFF images automatically when it reads them.
        if orientation > 1 and form != "TIFF":
            assert not torch.equal(stored, expected)


def test_an_upright_image_keeps_its_bytes_and_a_broken_image_its_error():
    data = encoded(PICTURE, "JPEG")
    assert upright(data) is data
    with pytest.raises(ValueError, match=r"\Acannot decode 4 bytes: not an image; expected one of"):
        decode_center(b"html", (16, 16), EvalConfig(apply_exif=True), "bicubic")
