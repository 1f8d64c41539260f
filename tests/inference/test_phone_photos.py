"""Test phone photos whose pixels are stored sideways, together with the correct orientation in
EXIF.

Such photos must be rotated when shards are written, and whenever a model that was trained on these
shards is used.
"""

from __future__ import annotations

import csv
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extras.deleted_extras import needs
from PIL import Image, ImageOps
from processes import TINY, run_here, write_config
from torch.nn.modules.module import register_module_forward_hook

import vit
from data_prep import imagefolder
from vit.data.storage.opening import open_split
from vit.model import VisionTransformer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write photos with EXIF orientation 6, two sets of shards, and a run. The shards contain
    either the rotated photos (`upright`) or the stored pixels (`lying`). The run is trained on the
    upright shards."""
    folder = tmp_path_factory.mktemp("phone")
    exif = Image.Exif()
    exif[0x0112] = 6
    y, x = np.mgrid[0:40, 0:60] / 60
    for number in range(20):
        pixels = 255 * np.stack([x, y, np.full_like(x, number % 2)], axis=-1)
        path = folder / "photos" / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path, exif=exif, quality=95)
    ImageOps.exif_transpose(Image.open(path)).save(folder / "upright.png")
    (folder / "photo.jpg").write_bytes(path.read_bytes())
    for name, flags in (("upright", ()), ("lying", ("--no-apply-exif",))):
        arguments = [str(folder / "photos"), "--out", str(folder / name), "--workers", "1", *flags]
        assert imagefolder.main(arguments) == 0
    config = write_config(folder, folder / "upright", steps=2)
    run_here("launch/train.py", "--config", config, *TINY, f"run.dir={folder / 'run'}")
    return folder


def test_shards_record_whether_their_images_were_turned(place):
    assert open_split(place / "upright", "val").apply_exif
    assert not open_split(place / "lying", "val").apply_exif
    assert open_split(place / "upright", "val")[0][0].size == (40, 60)
    assert open_split(place / "lying", "val")[0][0].size == (60, 40)


def test_a_model_of_upright_photos_turns_a_lying_photo(place):
    trained = vit.load(place / "run")
    assert trained.config.eval.apply_exif
    inputs = trained.preprocess(place / "photo.jpg")
    assert torch.equal(inputs, trained.preprocess(place / "upright.png"))
    as_stored = vit.load(place / "run", settings={"eval.apply_exif": False})
    assert not torch.equal(inputs, as_stored.preprocess(place / "photo.jpg"))


def test_a_model_of_lying_photos_does_not_turn_them(place, tmp_path):
    config = write_config(tmp_path, place / "lying", steps=1)
    run_here("launch/train.py", "--config", config, *TINY, f"run.dir={tmp_path / 'run'}")
    trained = vit.load(tmp_path / "run")
    assert not trained.config.eval.apply_exif
    inputs = trained.preprocess(place / "photo.jpg")
    assert not torch.equal(inputs, trained.preprocess(place / "upright.png"))


def test_predict_turns_a_lying_photo(place, tmp_path):
    images = [place / "photo.jpg", place / "upright.png"]
    flags = ["--csv", tmp_path / "out.csv", "--device", "cpu"]
    run_here("launch/predict.py", "--checkpoint", place / "run", *images, *flags)
    with (tmp_path / "out.csv").open(newline="") as file:
        turned, expected = (row[2:] for row in list(csv.reader(file))[1:])
    assert turned == expected


def test_an_evaluation_turns_the_images_of_shards_with_lying_photos(place):
    seen = []

    def catch(module, inputs, logits):
        if isinstance(module, VisionTransformer):
            seen.append(inputs[0].clone())

    handle = register_module_forward_hook(catch)
    try:
        arguments = ["--data", place / "lying", "--num-workers", 0, "--device", "cpu"]
        run_here("launch/eval.py", place / "run", *arguments)
    finally:
        handle.remove()
    split = open_split(place / "lying", "val")
    images = [split.read(number) for number in range(split.num_samples)]
    assert torch.equal(torch.cat(seen)[: len(images)], vit.load(place / "run").preprocess(*images))


@needs("export")
@pytest.mark.parametrize("program", ["timm", "huggingface", "onnx"])
def test_exports_make_other_programs_turn_a_lying_photo(program, place, tmp_path, monkeypatch):
    """The code on the model card must run in other programs exactly as printed. `vit.load` reads
    the config from the folder."""
    config = write_config(tmp_path, place / "upright", steps=1)
    plain = [*TINY, f"run.dir={tmp_path / 'run'}", "eval.resizer=pillow"]
    run_here("launch/train.py", "--config", config, *plain)
    folder = tmp_path / "out"
    run_here("launch/export.py", tmp_path / "run", "--to", program, "--out", folder)
    (folder / "photo.jpg").write_bytes((place / "photo.jpg").read_bytes())
    card = (folder / "README.md").read_text()
    assert "Rotate the image by its EXIF orientation." in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(folder)
    namespace: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code[1], namespace)
    trained = vit.load(tmp_path / "run")
    expected = trained(trained.preprocess(place / "photo.jpg"))
    torch.testing.assert_close(namespace["logits"], expected, rtol=1e-3, atol=1e-4)
    if program != "onnx":
        again = vit.load(folder)
        assert torch.equal(
            again.preprocess(place / "photo.jpg"), trained.preprocess(place / "photo.jpg")
        )
