from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import TINY, run_here, write_config


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = write_config(folder, shards, steps=3)
    settings = [*TINY, f"run.dir={folder / 'run'}", "ema.decay=null"]
    run_here("launch/train.py", "--config", config, *settings)
    return folder / "run"


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def odd_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images of many kinds, with files that only look like images, and with a
    tar file."""
    folder = tmp_path_factory.mktemp("odd")
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    image = Image.fromarray(pixels)
    turned = Image.Exif()
    turned[0x112] = 6
    contents = {
        "a/alpha.png": encoded(image.convert("RGBA"), "PNG"),
        "a/cmyk.jpg": encoded(image.convert("CMYK"), "JPEG"),
        "a/turned.jpg": encoded(image, "JPEG", exif=turned),
        "b/gray16.png": encoded(Image.fromarray(pixels[..., 0].astype(np.uint16) * 257), "PNG"),
        "b/smaller_than_a_patch.png": encoded(image.resize((3, 2)), "PNG"),
        "b/without_suffix": encoded(image, "PNG"),
        "broken/cut.jpg": encoded(image, "JPEG")[:400],
        "broken/empty.jpg": b"",
        "broken/page.jpg": b"<!DOCTYPE html><html></html>",
        "notes.txt": b"no image",
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    line = Image.new("RGB", (9_000_000, 1))
    (folder / "broken" / "line.png").write_bytes(encoded(line, "PNG"))
    with tarfile.open(folder / "c.tar", "w") as tar:
        tar.add(folder / "a" / "cmyk.jpg", "x/one.jpg")
        tar.add(folder / "notes.txt", "x/one.cls")
        tar.add(folder / "broken" / "cut.jpg", "x/two.jpg")
    return folder
