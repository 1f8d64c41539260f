"""Test published models. The table must match timm's settings. Results must match those of timm's
models and transforms. Misspelled names must be rejected."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from processes import run
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from timm.models import save_for_hf

from data_prep import imagefolder
from vit.config.io import from_dict
from vit.data.augment.apply import create_augment
from vit.data.decode.crops import decode_center
from vit.data.eval_sets import EvalSet
from vit.data.image_format import ImageFormat
from vit.data.storage.opening import open_split
from vit.distributed.process_group import World
from vit.evaluation.evaluate import Evaluator
from vit.model import create_model
from vit.weights.files import load_weights, read_weights
from vit.weights.published import identify, to_config, with_published_config
from vit.weights.published_models import KNOWN, TIMM, own_model

WORLD = World(0, 1, torch.device("cpu"))


TIMM_ROWS = [row for row in KNOWN if row.source == TIMM]


ARCHITECTURES = sorted(name for name in timm.list_models() if own_model(name))


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TIMM_ROWS, ids=lambda row: row.name)
def test_a_row_has_the_same_settings_as_timm(row):
    settings = timm.get_pretrained_cfg(row.name)
    assert (3, *row.image_size) == settings.input_size
    assert (row.mean, row.std) == (settings.mean, settings.std)
    assert (row.crop_pct, row.interpolation, settings.crop_mode) == (
        settings.crop_pct,
        settings.interpolation,
        "center",
    )
    heads = settings.classifier
    assert settings.num_classes == 1000
    assert (heads if isinstance(heads, str) else heads[0]) == row.head
    assert all(settings.url.endswith(f"/{file}") for file in row.files), settings.url


def test_accuracies_are_counts_of_50000_images_and_names_are_unique():
    for row in KNOWN:
        for percent in (row.top1, row.top5):
            assert percent * 500 == pytest.approx(round(percent * 500), abs=1e-6), (
                f"{row.name}: {percent} % is not a count out of 50,000"
            )
        assert row.top1 < row.top5
    names = [row.name for row in KNOWN] + [file for row in KNOWN for file in row.files]
    assert len(set(names)) == len(names)


def test_our_model_replaces_only_plain_vits_of_timm():
    assert len(ARCHITECTURES) > 30
    assert {row.name.partition(".")[0] for row in TIMM_ROWS} <= set(ARCHITECTURES)
    for other in (
        "vit_base_patch16_clip_224",
        "vit_base_patch16_rope_224",
        "flexivit_base",
        "resnet50",
    ):
        assert own_model(other) is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_our_model_has_the_same_parameters_as_in_timm(architecture):
    published = identify(
        f"{architecture}.pth", f"{architecture}.{timm.get_pretrained_cfg(architecture).tag}"
    )
    with torch.device("meta"):
        theirs = timm.create_model(architecture, num_classes=1000)
        section = dict(published.model)
        ours = create_model(section.pop("name"), published.image_size, 1000, **section)
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.state_dict().items()}
    if theirs.no_embed_class:  # DeiT III's class token has no position
        shapes["pos_embed"] = (1, shapes["pos_embed"][1] - 1, shapes["pos_embed"][2])
    assert shapes == {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert ours.blocks[0].attn.num_heads == theirs.blocks[0].attn.num_heads
    assert ours.blocks[0].norm1.eps == theirs.blocks[0].norm1.eps


@pytest.mark.parametrize("size", ["base", "large", "huge"])
def test_mae_is_a_vit_whose_patches_are_averaged(size):
    row = identify(f"mae_finetuned_vit_{size}.pth")
    with torch.device("meta"):
        theirs = timm.create_model(
            f"vit_{size}_patch{14 if size == 'huge' else 16}_224",
            num_classes=1000,
            global_pool="avg",
        )
        ours = create_model(
            row.model["name"], row.image_size, 1000, global_pool=row.model["global_pool"]
        )
    assert {k: v.shape for k, v in ours.state_dict().items()} == {
        k: v.shape for k, v in theirs.state_dict().items()
    }


# --- weights and views ----------------------------------------------------------------------------


def jpegs() -> dict[str, bytes]:
    from sklearn.datasets import load_sample_images  # import here, because the import is slow

    china, flower = (Image.fromarray(image) for image in load_sample_images().images)
    pictures = {
        "china": china,
        "tall": china.crop((100, 0, 340, 427)),
        "small": flower.crop((200, 100, 420, 280)),
        "gray": flower.crop((0, 150, 640, 350)).convert("L"),
    }
    encoded = {}
    for name, picture in pictures.items():
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=90)
        encoded[name] = buffer.getvalue()
    return encoded


def timms_view(name: str):
    return create_transform(
        **resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    )


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224.augreg_in21k_ft_in1k",  # resize to 248, crop to 224, bicubic
        "vit_small_patch16_384.augreg_in1k",  # resize to 384, crop to 384
        # Resize to 224, crop to 224, and normalize with ImageNet's mean.
        "deit3_huge_patch14_224.fb_in22k_ft_in1k",
        "vit_base_patch16_224_miil.in21k_ft_in1k",  # resize to 256, crop to 224, bilinear
        "vit_medium_patch16_gap_384.sw_in12k_ft_in1k",  # resize both sides to 404, crop to 384
    ],
)
def test_the_view_of_an_image_equals_timm(name):
    published = identify("x", name)
    view = timms_view(name)
    assert list(published.image_size) == list(timm.get_pretrained_cfg(name).input_size[1:])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (published.mean, published.std))
    for picture, data in jpegs().items():
        ours = decode_center(
            data,
            published.image_size,
            from_dict(to_config(published, "data"), "test").eval,
            published.interpolation,
        )
        theirs = view(Image.open(io.BytesIO(data)).convert("RGB"))
        assert torch.equal(ours, ((theirs * std + mean) * 255).round().byte()), picture


def random_timm_model(name: str, **fields) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Return timm's model with random weights, the photos preprocessed by timm, and the logits as a
    (4, 1000) tensor.

    The biases are chosen so that the model predicts several different classes.
    """
    model = timm.create_model(name, num_classes=1000, **fields).eval()
    size = fields.get("img_size", model.pretrained_cfg["input_size"][-1])
    view = create_transform(
        **resolve_data_config({"input_size": (3, size, size)}, pretrained_cfg=model.pretrained_cfg)
    )
    images = torch.stack(
        [view(Image.open(io.BytesIO(data)).convert("RGB")) for _, data in sorted(jpegs().items())]
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05 if parameter.ndim > 1 else 0.5, generator=generator)
        logits = model(images)
        heads = model.get_classifier()
        for head in heads if isinstance(heads, tuple) else (heads,):
            head.bias -= logits.mean(0)
    return model, images, logits - logits.mean(0)


def rounding(model: torch.nn.Module) -> float:
    """Return the largest difference that the order of summation can cause in a logit of
    `random_timm_model`.

    The head sums `num_features` products, and the rounding error grows with the square root of this
    number. The head then adds a bias that is many times larger than the sum.
    """
    heads = model.get_classifier()
    scale = max(
        head.bias.abs().max().item() for head in (heads if isinstance(heads, tuple) else (heads,))
    )
    return torch.finfo(torch.float32).eps * model.num_features**0.5 * scale


def official_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", name): tensor
        for name, tensor in weights.items()
    }


def as_safetensors(model, folder, name):
    save_file(model.state_dict(), folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def as_pth(model, folder, name):
    torch.save(model.state_dict(), folder / f"{name}.pth")
    return folder / f"{name}.pth"


def as_official_pth(model, folder, name):
    path = folder / next(row.files[0] for row in KNOWN if row.name == name)
    torch.save({"model": official_names(model.state_dict())}, path)
    return path


def as_hub_folder(model, folder, name):
    save_for_hf(model, folder / "downloaded", safe_serialization=True)
    return folder / "downloaded"


def as_hub_folder_without_settings(model, folder, name):
    (folder / name).mkdir()
    save_file(model.state_dict(), folder / name / "model.safetensors")
    return folder / name


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    for split in ("train", "val"):
        for name, data in jpegs().items():
            path = folder / "images" / split / name / f"{name}.jpg"
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
    assert (
        imagefolder.main(
            [
                str(folder / "images"),
                "--out",
                str(folder / "shards"),
                "--num-shards",
                "1",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    return folder / "shards"


@pytest.mark.parametrize(
    ("name", "save", "fields"),
    [
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", as_safetensors, {}),
        (
            "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
            as_hub_folder,
            {"global_pool": "avg", "depth": 3},
        ),
        (
            "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
            as_hub_folder,
            {"global_pool": "avg", "fc_norm": False, "act_layer": "gelu_tanh", "depth": 2},
        ),
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", as_hub_folder, {"img_size": 160, "depth": 3}),
        (
            "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
            as_hub_folder,
            {"reg_tokens": 2, "qk_norm": True, "no_embed_class": True, "depth": 2},
        ),
        ("deit_tiny_patch16_224.fb_in1k", as_official_pth, {}),
        ("deit3_small_patch16_224.fb_in1k", as_official_pth, {}),
        pytest.param("deit3_small_patch16_224.fb_in1k", as_hub_folder, {}, marks=pytest.mark.slow),
        pytest.param(
            "deit3_medium_patch16_224.fb_in1k",
            as_hub_folder_without_settings,
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param("vit_small_patch16_384.augreg_in1k", as_pth, {}, marks=pytest.mark.slow),
        ("deit_tiny_distilled_patch16_224.fb_in1k", as_pth, {}),
        # a timm model with arguments in its config
        ("flexivit_small.300ep_in1k", as_hub_folder, {"global_pool": "avg", "depth": 2}),
        # The head of this timm model has an unusual name. tests/test_kernels.py selects this case
        # by its id.
        pytest.param("resnet10t.c3_in1k", as_hub_folder, {}, id="resnet10t"),
    ],
)
def test_a_timm_file_gives_timms_logits_and_predictions(name, save, fields, tmp_path, photographs):
    theirs, images, expected = random_timm_model(name, **fields)
    path = save(theirs, tmp_path, name)
    trained, published = with_published_config(read_weights(path), None, str(photographs), "val")
    row = next((row for row in KNOWN if row.name == name), None)
    assert published.name == (str(path) if fields and path.is_dir() else name)
    assert published.top1 == (row.top1 if row and not fields else None)

    config = from_dict(trained.config, "test")
    assert trained.num_classes == config.model.num_classes == 1000
    ours = create_model(config.model, num_classes=1000).eval()
    assert type(ours).__module__.startswith(
        "vit." if own_model(name.partition(".")[0]) else "timm."
    )
    load_weights(ours, trained.weights, trained.grid_size)

    with torch.no_grad():
        torch.testing.assert_close(ours(images), expected, rtol=0, atol=rounding(theirs))

    split = open_split(photographs, "val")
    evaluator = Evaluator(
        (EvalSet("val", split),),
        ImageFormat.from_config(config.model, config.data),
        create_augment(config.augment, config.data, 1000, WORLD.device),
        WORLD,
        config.eval.model_copy(update={"batch_size": 4}),
        precision=config.train.precision,
    )
    result = evaluator.evaluate({"model": ours})["val"]["model"]
    best, second = expected.topk(2).values.unbind(1)
    assert len(expected.argmax(1).unique()) > 2, (
        "the model must not predict one class for all images, or this test proves little"
    )
    assert (best - second).min() > 2 * rounding(theirs), (
        "two classes must not be tied within rounding"
    )
    by_name = torch.from_numpy(split.index["label"].astype(int))
    assert torch.equal(result.predictions, expected.argmax(1)[by_name])


def test_the_command_prints_the_published_accuracy_beside_its_own(tmp_path, photographs):
    model, _, logits = random_timm_model("deit_tiny_patch16_224.fb_in1k")
    path = as_official_pth(model, tmp_path, "deit_tiny_patch16_224.fb_in1k")
    done = run(
        "launch/eval.py",
        "--checkpoint",
        path,
        "--data",
        photographs,
        "--num-workers",
        0,
        "--device",
        "cpu",
    )
    assert done.returncode == 0, done.stderr
    right = int((logits.argmax(1) == torch.arange(4)).sum())
    assert f"top-1 {25 * right:.2f} % ({right} of 4; 95 % interval " in done.stdout
    assert "deit_tiny_patch16_224.fb_in1k: top-1 72.19 % (36095)" in done.stdout
    assert (
        "here: 4 images); the data have 4 classes, but the model has 1000: labels are"
        " compared by number" in done.stdout
    )
