"""Test that `vit.load` returns the model of a run, and that it preprocesses images exactly as the
run's evaluation does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from processes import TINY, run_here, write_config
from safetensors.torch import save_file
from torch.nn.modules.module import register_module_forward_hook

import vit
from vit.checkpoint.checkpoint import newest_checkpoint
from vit.data.storage.opening import open_split
from vit.layers.precision import has_bf16
from vit.model import VisionTransformer
from vit.system.files import WeightsError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = write_config(folder, shards, steps=3)
    run_here("launch/train.py", "--config", config, *TINY, f"run.dir={folder / 'run'}")
    return folder / "run"


def test_inputs_and_logits_are_those_of_launch_eval(run, shards, capfd):
    seen = []

    def catch(module, inputs, logits):
        if isinstance(module, VisionTransformer):
            seen.append((inputs[0].clone(), logits.clone()))

    handle = register_module_forward_hook(catch)
    try:
        run_here("launch/eval.py", run, "--num-workers", 0, "--device", "cpu")
    finally:
        handle.remove()
    split = open_split(str(shards), "val")
    trained = vit.load(run)
    encoded = [split.read(number) for number in range(split.num_samples)]
    at = 0
    for inputs, logits in seen:
        images = encoded[at : at + len(inputs)]
        preprocessed = trained.preprocess(*images)
        assert torch.equal(preprocessed, inputs[: len(images)])
        # The memory layouts must match, because a different layout can change the order of
        # summation.
        assert preprocessed.stride() == inputs.stride()
        if len(images) == len(inputs):
            assert torch.equal(trained(preprocessed), logits)
        at += len(images)
    assert at == split.num_samples == 23
    assert trained.class_names == ("class0", "class1", "class2")
    assert not trained.model.training


def test_auto_is_the_precision_of_the_device(run):
    inputs = torch.randn(2, 3, 16, 16)
    auto = vit.load(run, settings={"train.precision": "auto"})
    chosen = "bf16" if has_bf16(torch.device("cpu")) else "fp32"
    given = vit.load(run, settings={"train.precision": chosen})
    assert auto.config == given.config
    assert torch.equal(auto(inputs), given(inputs))


def test_one_line_classifies_a_file(run, shards):
    image = next((shards.parent / "images" / "val").rglob("*.jpg"))
    trained = vit.load(str(run))
    predictions = trained.classify(image)
    assert [round(sum(value for _, value in predictions), 5), len(predictions)] == [1.0, 3]
    assert {name for name, _ in predictions} == set(trained.class_names)
    assert predictions == sorted(predictions, key=lambda pair: -pair[1])
    assert trained.classify(str(image), top=2) == predictions[:2]
    assert trained.classify(image.read_bytes()) == predictions
    expected = trained(trained.preprocess(image)).softmax(1)[0]
    assert predictions[0][1] == expected.max().item()


def test_a_file_of_weights_and_a_checkpoint_load_as_the_run_does(run):
    state = vit.load(run).model.state_dict()
    newest = newest_checkpoint(run)
    assert newest is not None
    for path in (run / "weights" / "last_ema.safetensors", newest[0]):
        other = vit.load(path).model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in other.items())


def test_another_image_size_resamples_positions_and_adds_a_note(run):
    trained = vit.load(run, settings={"model.image_size": 24})
    assert trained.preprocess(b"P6 2 1 255 abcdef").shape == (1, 3, 24, 24)
    assert trained.notes == ("positions resampled from 2x2 to 3x3 (bicubic, antialiased)",)


def test_weights_of_other_programs_are_identified_by_the_file_name(tmp_path):
    weights = VisionTransformer(patch_size=16, embed_dim=192, num_heads=3).state_dict()
    path = tmp_path / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    save_file(weights, path)
    trained = vit.load(path)
    assert trained.preprocess.view.resizer == "pillow"
    assert trained.class_names[281] == "tabby, tabby cat"
    assert trained.notes == ("1,000 classes without names are assumed to be those of ImageNet-1k",)
    assert len(trained.class_names) == 1000
    names = [f"name {number}" for number in range(1000)]
    assert vit.load(path, class_names=names).class_names == tuple(names)
    with pytest.raises(ValueError, match=r"3 class names were given, .* has 1000 classes"):
        vit.load(path, class_names=["a", "b", "c"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"<!DOCTYPE html><html>", "a web page"), (b"", "0 bytes"), (None, "No such file")],
)
def test_a_file_that_is_not_an_image_is_an_error_with_its_path(content, reason, run, tmp_path):
    path = tmp_path / "photo.jpg"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as error:
        vit.load(run).classify(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_folder_without_weights_is_refused(run, tmp_path):
    with pytest.raises(WeightsError, match="expected a run folder"):
        vit.load(tmp_path)
    with pytest.raises(ValueError, match="omit the name"):
        vit.load(run, name="vit_base_patch16_224")
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        vit.laod  # noqa: B018


def test_images_in_memory_are_classified_like_their_files(run, tmp_path):
    trained = vit.load(run)
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    turned = Image.Exif()
    turned[0x112] = 6
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    Image.fromarray(pixels).convert("CMYK").save(tmp_path / "cmyk.jpg")
    Image.fromarray(pixels).save(tmp_path / "turned.jpg", exif=turned)
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(tmp_path / "gray16.png")
    Image.fromarray(pixels).convert("P").save(tmp_path / "palette.png", transparency=3)
    for apply_exif in (False, True):
        loaded = vit.load(run, settings={"eval.apply_exif": apply_exif})
        for file in sorted(tmp_path.iterdir()):
            with Image.open(file) as image:
                of_memory = loaded.preprocess.pixels(image)
            assert torch.equal(of_memory, loaded.preprocess.pixels(file)), (file, apply_exif)
    expected = trained.classify(tmp_path / "photo.png")
    image = Image.fromarray(pixels)
    assert trained.classify(image) == trained.classify(pixels) == expected
    gray = trained.classify(pixels[..., 1])
    assert gray == trained.classify(np.repeat(pixels[..., 1:2], 3, axis=2))
    batch = trained.classify([tmp_path / "photo.png", image, pixels[..., 1]], top=2)
    assert batch == [expected[:2], expected[:2], gray[:2]]


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        (np.zeros((4, 4, 3), np.float32), r"ndarray \(4, 4, 3\)"),
        (np.zeros((3, 4, 4), np.uint8), r"ndarray \(3, 4, 4\)"),
        (np.zeros(4, np.uint8), r"ndarray \(4,\)"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), r"Tensor torch.Size\(\[4, 4, 3\]\)"),
        (Image.new("F", (4, 4)), "Image F"),
        (None, "NoneType "),
    ],
)
def test_other_images_in_memory_are_refused(image, kind, run):
    with pytest.raises(ValueError, match=f"an image is a {kind}: expected a path, encoded bytes"):
        vit.load(run).classify(image)
