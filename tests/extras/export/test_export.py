"""Run the code on the model card to test that other libraries can open exported models."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import yaml
from PIL import Image
from processes import run, train, write_config
from safetensors.torch import save_file
from transformers import AutoImageProcessor, AutoModelForImageClassification

from vit.config.io import from_dict
from vit.data.decode.crops import decode_center
from vit.extras.export.export import export, read_subject
from vit.extras.export.model_card import Origin, opening_code
from vit.inference.predictor import load
from vit.model import create_model
from vit.system.files import WeightsError, sha256_of
from vit.weights.files import load_weights, read_weights
from vit.weights.programs import LACKS, PROGRAMS, ProgramModel, View, lacking
from vit.weights.published import with_published_config

NAMES = ["apple", "bee | wasp", "fig"]
TINY = {"name": "vit_ti8", "image_size": 32, "embed_dim": 48, "depth": 1, "num_heads": 3}
ORIGIN = Origin("a run", "python launch/export.py runs/a --to it", "0" * 64)


def config_of(model: dict, **sections: Any):
    least = {"data": {"root": "-"}, "train": {"steps": 1}, "eval": {"resizer": "pillow"}}
    return from_dict({**least, "model": {**TINY, **model}, **sections}, "test")


def subject_of(model: dict | None = None, **sections: Any) -> ProgramModel:
    config = config_of(model or {}, **sections)
    network = create_model(config.model, num_classes=len(NAMES)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            spread = 0.5 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
            parameter.normal_(0, spread, generator=generator)
    return ProgramModel(network, config, len(NAMES), NAMES)


def photo(path: Path) -> None:
    """Write a smooth photo, because different resizers agree closely on smooth images."""
    y, x = np.mgrid[0:60, 0:90] / 90
    pixels = np.stack([x, y, (x + y) / 2], axis=-1) * 255
    Image.fromarray(pixels.astype(np.uint8)).save(path, quality=95)


def own_logits(subject: ProgramModel, path: Path) -> torch.Tensor:
    """Return the logits of our model for the photo, preprocessed as in our evaluation."""
    config = subject.config
    size = config.model.height_width()
    channels = config.model.in_chans
    image = decode_center(
        path.read_bytes(), size, config.eval, config.data.interpolation, channels=channels
    )
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (config.data.mean, config.data.std))
    with torch.inference_mode():
        return subject.model(((image / 255 - mean) / std)[None])


def run_card(folder: Path, monkeypatch) -> dict[str, Any]:
    """Run the Python code on the model card, and return its variables."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    monkeypatch.chdir(folder)
    namespace: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code[1], namespace)
    return namespace


VIEWS = {
    "center": {"data": {"root": "-"}, "eval": {"crop_pct": 0.8, "resizer": "pillow"}},
    "squash": {
        "data": {"root": "-", "mean": [0.5], "std": [0.25], "interpolation": "bilinear"},
        "eval": {"crop_pct": 1.0, "crop_mode": "squash", "resizer": "pillow"},
    },
    "resized": {"data": {"root": "-"}, "eval": {"crop_pct": 0.864, "resizer": "pillow"}},
}


@pytest.mark.parametrize(
    ("program", "view"),
    [
        *((program, "center") for program in PROGRAMS),
        *(("timm", view) for view in ("squash", "resized")),
        *(("huggingface", view) for view in ("squash", "resized")),
        ("torchvision", "squash"),
    ],
)
def test_the_code_of_the_card_opens_the_folder_and_gives_our_logits(
    program, view, tmp_path, monkeypatch, capsys
):
    subject = subject_of(**VIEWS[view])
    folder = tmp_path / "out"
    lines = export(program, subject, ORIGIN, folder)
    weights = next(folder.glob("model.*"))
    assert lines[-1] == f"sha256 of {weights.name}: {sha256_of(weights)}"
    assert not list(folder.glob("*.data")), "a small model must be in one file"
    card = (folder / "README.md").read_text()
    assert sha256_of(weights) in card
    library = {"huggingface": "transformers", "npz": "timm"}.get(program, program)
    assert f"library_name: {library}\n" in card
    photo(folder / "photo.jpg")
    variables = run_card(folder, monkeypatch)
    assert [variables["names"][n] for n in range(3)] == NAMES
    expected = own_logits(subject, folder / "photo.jpg")
    # torch and Pillow round differently when resizing, so pixel values may differ by one.
    scale = float(expected.abs().max())
    torch.testing.assert_close(variables["logits"], expected, rtol=0, atol=0.05 * scale)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        own = subject.model(images)
        if program == "onnx":
            other = torch.from_numpy(variables["session"].run(None, {"images": images.numpy()})[0])
        else:
            other = variables["model"](images)
    other = getattr(other, "logits", other)
    torch.testing.assert_close(other, own, rtol=0, atol=float(own.abs().max()) * 2**-17)
    again = read_weights(folder) if program != "onnx" else None
    if again is not None:
        assert all(torch.equal(again.weights[n], v) for n, v in subject.model.state_dict().items())


def test_an_onnx_model_whose_logits_are_nan_is_refused(tmp_path):
    """The maximum over all batches must be NaN if the logits of one batch are NaN."""
    subject = subject_of()
    with torch.no_grad():
        subject.model.head.bias[1] = float("nan")
    with pytest.raises(WeightsError, match="differ from the model's by nan of the largest logit"):
        export("onnx", subject, ORIGIN, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_an_onnx_model_above_2_gib_stores_its_weights_in_a_separate_file(tmp_path):
    """Three blocks with a width of 4,096 take 2.3 GiB, which exceeds the protobuf size limit."""
    subject = subject_of({**TINY, "embed_dim": 4096, "depth": 3, "num_heads": 32})
    num_bytes = sum(tensor.nbytes for tensor in subject.model.state_dict().values())
    assert num_bytes > 2**31
    lines = export("onnx", subject, ORIGIN, tmp_path / "out")
    folder = (tmp_path / "out").rename(tmp_path / "moved")
    path = folder / "model.onnx"
    beside = folder / "model.onnx.data"
    assert path.stat().st_size < 2**22
    assert beside.stat().st_size > num_bytes - 2**10, (
        "only the smallest tensors may stay in the model file"
    )
    assert lines[-2:] == [f"sha256 of {file.name}: {sha256_of(file)}" for file in (path, beside)]
    card = (folder / "README.md").read_text()
    assert sha256_of(path) in card
    assert sha256_of(beside) in card
    onnx.checker.check_model(str(path))
    images = torch.randn(2, 3, 32, 32)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    logits = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    with torch.inference_mode():
        own = subject.model(images)
    torch.testing.assert_close(logits, own, rtol=0, atol=float(own.abs().max()) * 1e-3)
    # pytest would keep this large file.
    beside.unlink()


@pytest.mark.parametrize(
    "model",
    [
        {"class_token": False, "global_pool": "avg"},
        {"image_size": [24, 40], "patch_size": [8, 4], "init_values": 0.1},
        {"qkv_bias": False, "pos_embed": "sincos2d", "mlp_ratio": 2.0, "drop_path_rate": 0.1},
        {"global_pool": "norm_avg", "mlp_layer": "mlp_tanh"},
        {"in_chans": 1},
        {"dist_token": True},
        {"qk_norm": True, "norm_layer": "rmsnorm", "reg_tokens": 2, "no_embed_class": True},
        {"name": "vit_G8", "global_pool": "map", "pos_embed": "none", "init_head_bias": -2.0},
    ],
)
def test_timm_builds_every_variant_of_our_model(model, tmp_path):
    channels = model.get("in_chans", 3)
    data = {"root": "-", "mean": [0.4] * channels, "std": [0.2] * channels}
    subject = subject_of(model, data=data)
    export("timm", subject, ORIGIN, tmp_path / "out")
    guest = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.randn(2, channels, *subject.model.image_size)
    with torch.inference_mode():
        torch.testing.assert_close(guest(images), subject.model(images), rtol=1e-4, atol=1e-4)
    data = timm.data.resolve_model_data_config(guest)
    assert tuple(data["mean"]) == subject.view.mean
    assert tuple(data["std"]) == subject.view.std
    assert tuple(data["input_size"]) == (channels, *subject.model.image_size)


def test_transformers_opens_a_folder_in_timms_layout(tmp_path):
    subject = subject_of({"class_token": False, "global_pool": "avg"})
    export("timm", subject, ORIGIN, tmp_path / "out")
    guest = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(
            guest(images).logits, subject.model(images), rtol=1e-4, atol=1e-4
        )
    assert guest.config.id2label == dict(enumerate(NAMES))
    assert AutoImageProcessor.from_pretrained(tmp_path / "out") is not None


@pytest.mark.parametrize(
    ("model", "able"),
    [
        ({}, ["timm", "torchvision", "huggingface", "onnx", "npz"]),
        ({"class_token": False, "global_pool": "avg"}, ["timm", "onnx"]),
        ({"global_pool": "norm_avg"}, ["timm", "onnx"]),
        ({"mlp_layer": "mlp_tanh"}, ["timm", "huggingface", "onnx"]),
        ({"mlp_layer": "mlp"}, ["timm", "torchvision", "huggingface", "onnx", "npz"]),
        ({"mlp_layer": "swiglu"}, ["onnx"]),
        ({"init_values": 0.1}, ["timm", "onnx"]),
        ({"representation_size": 8}, ["torchvision", "onnx"]),
        ({"qkv_bias": False}, ["timm", "huggingface", "onnx"]),
        ({"image_size": [24, 40]}, ["timm", "onnx"]),
        ({"in_chans": 1}, ["timm", "onnx"]),
        ({"dist_token": True}, ["timm", "onnx"]),
        ({"reg_tokens": 2, "global_pool": "map", "pos_embed": "none"}, ["timm", "onnx"]),
        ({"rope_type": "axial"}, ["onnx"]),
    ],
)
def test_an_unsupported_layout_is_refused_with_the_possible_ones(model, able, tmp_path):
    data = {"root": "-", "mean": [0.5], "std": [0.5]}
    subject = subject_of(model, data=data)
    assert [name for name in PROGRAMS if not lacking(name, subject.config)] == able
    for program in {*PROGRAMS} - {*able}:
        message = rf"--to {program}: the model has .*: export to {' or '.join(able)} instead"
        with pytest.raises(WeightsError, match=message):
            export(program, subject, ORIGIN, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_setting_that_is_missing_in_the_tables_is_refused(monkeypatch):
    config = config_of({})
    monkeypatch.setattr("vit.weights.programs.KNOWN_FIELDS", {"name", "image_size", "in_chans"})
    settings = lacking("timm", config)
    assert settings == ["model.embed_dim", "model.depth", "model.num_heads"]
    assert lacking("onnx", config) == []
    assert LACKS["onnx"] == set()


@pytest.mark.parametrize(
    ("model", "view"),
    [
        # The crop removes three of 35 pixels, so its margin is odd.
        ({}, {"crop_pct": 0.9}),
        ({"image_size": [24, 40]}, {"crop_pct": 0.9}),
        ({"image_size": [24, 40]}, {"crop_pct": 0.9, "crop_mode": "squash"}),
    ],
)
def test_the_card_for_onnx_preprocesses_as_evaluation_does(model, view, tmp_path, monkeypatch):
    """The test uses a noise image, because an error of one pixel in resizing or cropping would
    change the result."""
    subject = subject_of(model, eval={**view, "resizer": "pillow"})
    noise = np.random.default_rng(0).integers(0, 256, (61, 91, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "photo.png")
    (tmp_path / "photo.jpg").symlink_to("photo.png")
    monkeypatch.chdir(tmp_path)
    code, session, _ = opening_code("onnx", subject).partition("session =")
    assert session
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    config = subject.config
    data = (tmp_path / "photo.png").read_bytes()
    size = config.model.height_width()
    expected = decode_center(data, size, config.eval, config.data.interpolation)
    levels = namespace["images"][0].transpose(1, 2, 0) * config.data.std + config.data.mean
    assert np.array_equal(np.round(255 * levels), expected.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("settings", [{"name": "lamb", "lr": 0.01}, {"name": "lamb"}, {"eps": 0.1}])
def test_the_recipe_of_the_card_gives_the_settings_of_the_run(settings, tmp_path):
    subject = subject_of(optim=settings)
    export("timm", subject, ORIGIN, tmp_path / "out")
    recipe = re.search(
        r"```yaml\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL
    )
    again = yaml.safe_load(recipe[1])
    least = {"data": {"root": "-"}, "train": {"steps": 1}}
    assert from_dict({**least, **again}, "card").optim == subject.config.optim


def test_the_code_of_the_card_opens_a_folder_without_class_names(tmp_path, monkeypatch, capsys):
    subject = replace(subject_of(), class_names=[])
    export("timm", subject, ORIGIN, tmp_path / "out")
    photo(tmp_path / "out" / "photo.jpg")
    assert run_card(tmp_path / "out", monkeypatch)["names"] == range(3)


def test_unused_classes_get_names_in_the_export(tmp_path):
    """Other libraries derive the number of classes from the class names. With only three names,
    they could not load a head with five classes."""
    subject = replace(subject_of(), num_classes=5)
    subject.model.head = torch.nn.Linear(48, 5)
    export("huggingface", subject, ORIGIN, tmp_path / "theirs")
    opened = AutoModelForImageClassification.from_pretrained(tmp_path / "theirs")
    expected = [*NAMES, "class 3", "class 4"]
    assert list(opened.config.id2label.values()) == expected
    export("timm", subject, ORIGIN, tmp_path / "timm")
    opened = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    assert opened.pretrained_cfg["label_names"] == expected


@pytest.mark.parametrize("model", [{}, {"image_size": [24, 40]}])
def test_a_view_survives_the_export_to_transformers(model, tmp_path):
    """Preprocessing resizes an image to 35x35 or 26x44 without preserving its aspect ratio, and
    then crops the center."""
    subject = subject_of(model, eval={"crop_pct": 0.9, "crop_mode": "squash", "resizer": "pillow"})
    export("huggingface", subject, ORIGIN, tmp_path / "theirs")
    loaded, _ = with_published_config(read_weights(tmp_path / "theirs"), None, "-")
    again = View.from_config(from_dict(loaded.config, "test"))
    assert (again.cover, again.squash) == (subject.view.cover, True)


def test_a_grid_that_is_not_square_survives_the_export(tmp_path):
    """15 patches and a class token need 16 position embeddings, as many as a 4x4 grid. Only the
    config distinguishes the two models."""
    for program in ("timm", "huggingface"):
        config = {"eval": {"crop_mode": "squash"}} if program == "huggingface" else {}
        subject = subject_of({"image_size": [24, 40]}, **config)
        export(program, subject, ORIGIN, tmp_path / program)
        trained = load(tmp_path / program)
        images = torch.randn(2, 3, 24, 40)
        assert trained.notes == ()
        assert torch.equal(trained(images), subject.model(images))
        resized = load(tmp_path / program, settings={"model.image_size": [48, 80]})
        assert resized.notes == ("positions resampled from 3x5 to 6x10 (bicubic, antialiased)",)


def test_an_exported_folder_is_complete_or_absent(tmp_path, monkeypatch):
    subject = subject_of()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "a").touch()
    with pytest.raises(WeightsError, match=r"taken already exists: remove it, or pass another"):
        export("timm", subject, ORIGIN, tmp_path / "taken")
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match=r"cannot be written .*nothing was written"):
        export("timm", subject, ORIGIN, tmp_path / "file" / "out")
    monkeypatch.setattr("vit.extras.export.export.model_card", _fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        export("timm", subject, ORIGIN, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


def _fail(*_):
    raise RuntimeError("in the middle")


def test_timm_and_transformers_open_the_weights_of_a_run(tmp_path, shards):
    train(write_config(tmp_path, shards), tmp_path / "run")
    folder = tmp_path / "run" / "weights"
    assert (folder / "model.safetensors").readlink() == Path("last_ema.safetensors")
    loaded = read_weights(tmp_path / "run")
    assert read_weights(folder).weights.keys() == loaded.weights.keys()
    config = from_dict(loaded.config, "test")
    model = create_model(config.model, num_classes=loaded.num_classes).eval()
    load_weights(model, loaded.weights)
    images = torch.randn(2, 3, *config.model.height_width())
    with torch.inference_mode():
        expected = model(images)
        guest = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        torch.testing.assert_close(guest(images), expected, rtol=1e-4, atol=1e-4)
        wrapped = AutoModelForImageClassification.from_pretrained(folder).eval()
        torch.testing.assert_close(wrapped(images).logits, expected, rtol=1e-4, atol=1e-4)
    assert tuple(guest.pretrained_cfg["mean"]) == config.data.mean
    assert guest.pretrained_cfg["label_names"] == loaded.class_names

    done = run("launch/export.py", tmp_path / "run", "--to", "timm")
    assert done.returncode == 0, done.stderr
    assert "averaged weights): run, 3 classes at 16x16, to timm\n" in done.stdout
    out = tmp_path / "run" / "export" / "timm"
    line = json.loads(
        [
            row
            for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
            if '"eval"' in row
        ][-1]
    )
    card = (out / "README.md").read_text()
    assert f"({line['correct_top1_ema']} of {line['num_images']} images" in card
    assert loaded.path.name == "last_ema.safetensors"
    assert sha256_of(loaded.path) in card
    assert "moving average" in card
    assert "launch/train.py --config" in card
    again = read_weights(out)
    assert all(torch.equal(again.weights[n], loaded.weights[n]) for n in loaded.weights)


@pytest.mark.parametrize(
    ("name", "size"), [("vit_small_patch14_reg4_dinov2", 98), ("vit_tiny_patch16_224", 112)]
)
def test_an_export_of_a_file_keeps_the_grid_of_its_positions(name, size, tmp_path):
    theirs = timm.create_model(name, img_size=size, num_classes=3, depth=1).eval()
    path = tmp_path / "mine.safetensors"
    save_file(theirs.state_dict(), path)
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": name, "model_args": {"depth": 1}})
    )
    subject, *_ = read_subject(str(path), None)
    export("timm", subject, ORIGIN, tmp_path / "out")
    opened = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    assert opened.patch_embed.img_size == (size, size)
    images = torch.randn(2, 3, size, size)
    with torch.inference_mode():
        assert torch.equal(opened(images), theirs(images))


def test_an_exported_folder_is_not_identified_as_a_published_model(tmp_path):
    export("timm", subject_of(), ORIGIN, tmp_path / "out")
    _, published = with_published_config(read_weights(tmp_path / "out"), None, "data")
    assert published.name == str(tmp_path / "out")
