"""Published models: the table against timm's own settings, weights and views against timm's models
and transforms, names against people."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from processes import run
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from timm.data import create_transform, resolve_data_config
from timm.models import save_for_hf

from data_prep import imagefolder
from vit.config.io import from_dict
from vit.data.augment.apply import create_augment
from vit.data.batches import ImageFormat
from vit.data.decode.views import decode_center
from vit.data.shards.data_set import open_split
from vit.evaluate import Evaluator
from vit.model import create_model
from vit.ranks.distributed import World
from vit.weights.files import find_weights, load_weights, read_weights
from vit.weights.published import describe_published, identify, to_config, with_published_config
from vit.weights.published_models import KNOWN, NO_NUMBER, TIMM, KnownModel, own_model

ROOT = Path(__file__).parents[2]
WORLD = World(0, 1, torch.device("cpu"))
TIMM_ROWS = [row for row in KNOWN if row.source == TIMM]
ARCHITECTURES = sorted(name for name in timm.list_models() if own_model(name))


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TIMM_ROWS, ids=lambda row: row.name)
def test_a_row_has_the_settings_that_timm_has(row):
    settings = timm.get_pretrained_cfg(row.name)
    assert (3, *row.image_size) == settings.input_size
    assert (row.mean, row.std) == (settings.mean, settings.std)
    assert (row.crop_pct, row.interpolation, settings.crop_mode) == (
        settings.crop_pct,
        settings.interpolation,
        "center",
    )
    assert (settings.num_classes, settings.classifier) == (1000, row.head)
    assert all(settings.url.endswith(f"/{file}") for file in row.files), settings.url


def test_accuracies_are_counts_of_50000_images_and_names_are_unique():
    for row in KNOWN:
        for percent in (row.top1, row.top5):
            assert percent * 500 == pytest.approx(round(percent * 500), abs=1e-6), (
                f"{row.name}: {percent} % is no count of 50,000"
            )
        assert row.top1 < row.top5
    names = [row.name for row in KNOWN] + [file for row in KNOWN for file in row.files]
    assert len(set(names)) == len(names)


def test_our_model_stands_in_for_plain_vits_only():
    assert len(ARCHITECTURES) > 30
    assert {row.name.partition(".")[0] for row in TIMM_ROWS} <= set(ARCHITECTURES)
    for other in (
        "vit_base_patch16_clip_224",
        "deit_base_distilled_patch16_224",
        "vit_base_patch16_rope_224",
        "flexivit_base",
        "resnet50",
    ):
        assert own_model(other) is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_our_model_has_the_weights_of_timms(architecture):
    """Names and shapes; what they compute is compared below, family by family."""
    known = identify(
        f"{architecture}.pth", f"{architecture}.{timm.get_pretrained_cfg(architecture).tag}"
    )
    with torch.device("meta"):
        theirs = timm.create_model(architecture, num_classes=1000)
        section = dict(known.model)
        ours = create_model(section.pop("name"), known.image_size, 1000, **section)
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
    """Photographs of several shapes: wide, tall, smaller than the view, grey."""
    china, flower = (Image.fromarray(image) for image in load_sample_images().images)  # 640 x 427
    pictures = {
        "china": china,
        "tall": china.crop((100, 0, 340, 427)),
        "small": flower.crop((200, 100, 420, 280)),
        "grey": flower.crop((0, 150, 640, 350)).convert("L"),
    }
    encoded = {}
    for name, picture in pictures.items():
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=90)
        encoded[name] = buffer.getvalue()
    return encoded


def timms_view(name: str):
    """timm's own evaluation transform: PIL image -> normalised (3, H, W)."""
    return create_transform(
        **resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    )


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224.augreg_in21k_ft_in1k",  # 248 -> 224, bicubic
        "vit_small_patch16_384.augreg_in1k",  # 384 -> 384
        "deit3_huge_patch14_224.fb_in22k_ft_in1k",  # 224 -> 224, ImageNet's mean
        "vit_base_patch16_224_miil.in21k_ft_in1k",  # 256 -> 224, bilinear
        "vit_medium_patch16_gap_384.sw_in12k_ft_in1k",  # 404 -> 384, both sides alike
    ],
)
def test_an_image_looks_as_in_timm(name):
    known = identify("x", name)
    view = timms_view(name)
    assert list(known.image_size) == list(timm.get_pretrained_cfg(name).input_size[1:])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (known.mean, known.std))
    for picture, data in jpegs().items():
        ours = decode_center(
            data,
            known.image_size,
            from_dict(to_config(known, "data"), "test").eval,
            known.interpolation,
        )
        theirs = view(Image.open(io.BytesIO(data)).convert("RGB"))
        assert torch.equal(ours, ((theirs * std + mean) * 255).round().byte()), picture


def random_timm_model(name: str, **fields) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A model whose weights are drawn, the photographs as timm shows them to it, and its logits (4,
    1000).

    Its biases are such that it sees several classes in them.
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
    """How far two orders of summation may be apart in a logit of `random_timm_model`: the head adds
    `num_features` products, whose roundings grow as the root of their number, and takes off a bias
    that is many times larger than what is left."""
    heads = model.get_classifier()
    scale = max(
        head.bias.abs().max().item() for head in (heads if isinstance(heads, tuple) else (heads,))
    )
    return torch.finfo(torch.float32).eps * model.num_features**0.5 * scale


def official_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As facebookresearch/deit:models_v2.py calls them."""
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
    """Shards of the photographs, each a class of its own."""
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


@pytest.fixture
def one_thread():
    """Threads that wait for each other on a busy machine cost ten times what they gain here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "save", "fields"),
    [
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", as_safetensors, {}),
        (
            "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
            as_hub_folder,
            {"global_pool": "avg", "depth": 3},
        ),
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", as_hub_folder, {"img_size": 160, "depth": 3}),
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
        ("deit_tiny_distilled_patch16_224.fb_in1k", as_pth, {}),  # a guest
        # a guest that was made otherwise
        ("flexivit_small.300ep_in1k", as_hub_folder, {"global_pool": "avg", "depth": 2}),
        ("resnet10t.c3_in1k", as_hub_folder, {}),  # a guest with another name for its head
    ],
)
def test_a_file_of_timms_computes_and_predicts_what_timm_does(
    name, save, fields, tmp_path, photographs
):
    theirs, images, expected = random_timm_model(name, **fields)
    path = save(theirs, tmp_path, name)
    trained, known = with_published_config(read_weights(path), None, str(photographs), "val")
    row = next((row for row in KNOWN if row.name == name), None)
    assert known.name == name
    assert known.top1 == (row.top1 if row and not fields else None)

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
        split,
        ImageFormat.from_config(config.model, config.data),
        create_augment(config.augment, config.data, 1000, WORLD.device),
        WORLD,
        config.eval.model_copy(update={"batch_size": 4}),
        precision=config.train.precision,
    )
    result = evaluator.evaluate({"model": ours})["model"]
    best, second = expected.topk(2).values.unbind(1)
    assert len(expected.argmax(1).unique()) > 2, "one class for all images would prove little"
    assert (best - second).min() > 2 * rounding(theirs), "a tie"
    by_name = torch.from_numpy(split.index["label"].astype(int))
    assert torch.equal(result.predictions, expected.argmax(1)[by_name])


def test_the_command_shows_the_published_number_beside_its_own(tmp_path, photographs):
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
        "here: 4 images); the data have 4 classes, the model 1000: labels are compared by number"
        in done.stdout
    )


# --- which model it is ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("vit_base_patch16_224.augreg_in1k.safetensors", "vit_base_patch16_224.augreg_in1k"),
        (
            "vit_base_patch16_224.augreg_in21k_ft_in1k.pth",
            "vit_base_patch16_224.augreg_in21k_ft_in1k",
        ),
        (
            "vit_large_patch16_224.augreg_in21k_ft_in1k-copy.bin",
            "vit_large_patch16_224.augreg_in21k_ft_in1k",
        ),
        ("deit_base_patch16_224-b5f2ef4d.pth", "deit_base_patch16_224.fb_in1k"),
        ("deit_base_patch16_224.pth", "deit_base_patch16_224.fb_in1k"),
        ("deit_base_patch16_224.pth.tar", "deit_base_patch16_224.fb_in1k"),
        ("vgg11.pth.tar", "vgg11.tv_in1k"),  # by timm, from all of the name
        ("deit_3_huge_224_21k_v1.pth", "deit3_huge_patch14_224.fb_in22k_ft_in1k"),
        ("mae_finetuned_vit_huge.pth", "mae_finetuned_vit_huge"),
        # not in the table, but in timm
        ("vit_base_patch16_224.sam_in1k.safetensors", "vit_base_patch16_224.sam_in1k"),
        ("deit_base_distilled_patch16_224-df68dfff.pth", "deit_base_distilled_patch16_224.fb_in1k"),
        (
            "models--timm--vit_base_patch32_224.augreg_in1k/snapshots/0a1b/model.safetensors",
            "vit_base_patch32_224.augreg_in1k",
        ),
    ],
)
def test_by_the_name_of_the_file(file, name, tmp_path):
    assert identify(tmp_path / file).name == name


def test_by_the_name_that_is_given(tmp_path):
    row = identify(tmp_path / "mine.pth", "vit_base_patch16_384.augreg_in1k")
    assert (row.top1, row.model) == (81.102, {"name": "vit_b16"})
    assert identify(tmp_path / "mine.pth", "timm/vit_base_patch16_384.augreg_in1k") == row
    assert (
        identify(tmp_path / "vit_tiny_patch16_224.pth", "deit_small_patch16_224").name
        == "deit_small_patch16_224.fb_in1k"
    )
    guest = identify(tmp_path / "mine.pth", "timm/resnet50.a1_in1k")
    assert (guest.model, guest.crop_pct, guest.head, guest.top1) == (
        {"name": "timm/resnet50"},
        0.95,
        "fc",
        None,
    )
    plain = identify(tmp_path / "mine.pth", "vit_base_patch8_224.augreg_in21k_ft_in1k")
    assert (plain.model, plain.mean, plain.source) == (
        {"name": "vit_b8"},
        (0.5, 0.5, 0.5),
        NO_NUMBER,
    )


def test_a_name_without_a_tag_means_timms_default_settings_and_says_so(tmp_path):
    """Whoever trained a model of their own with timm has no tag to give."""
    default = timm.get_pretrained_cfg("vit_tiny_patch16_224")
    found = identify(tmp_path / "mine.pth", "vit_tiny_patch16_224")
    assert (found.mean, found.std, found.crop_pct) == (default.mean, default.std, default.crop_pct)
    assert (found.model, found.top1) == ({"name": "vit_ti16"}, None)
    assert (
        describe_published(found, 6, (224, 224), 3, 3)
        == f"vit_tiny_patch16_224.{default.tag}: no published number at hand; vit_tiny_patch16_224"
        f" has no tag, so the settings are those of timm's default, {default.tag}"
    )
    guest = identify(tmp_path / "mine.pth", "timm/resnet18")
    told = "; timm/resnet18 has no tag, so the settings are those of timm's default, "
    assert guest.source == NO_NUMBER + told + guest.name.removeprefix("resnet18.")


@pytest.mark.parametrize(
    "row", [row for row in TIMM_ROWS if row.name.startswith("deit_")], ids=lambda row: row.name
)
def test_names_that_pass_without_a_tag_have_only_one(row):
    architecture = row.name.partition(".")[0]
    tagged = [
        name
        for name in timm.list_pretrained(f"{architecture}.*")
        if timm.get_pretrained_cfg(name).num_classes == 1000
    ]
    assert tagged == [identify("x", architecture).name]


def test_by_the_settings_beside_it(tmp_path):
    save_for_hf(
        timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
        tmp_path,
        safe_serialization=True,
    )
    assert find_weights(tmp_path) == tmp_path / "model.safetensors"
    expected = next(row for row in KNOWN if row.name.startswith("vit_tiny"))
    assert identify(tmp_path) == identify(tmp_path / "model.safetensors") == expected
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["pretrained_cfg"]["crop_pct"] = 0.95
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert (identify(tmp_path).crop_pct, identify(tmp_path).top1) == (0.95, None), (
        "with another view the number is another"
    )
    assert identify(tmp_path, "deit_tiny_patch16_224").name == "deit_tiny_patch16_224.fb_in1k", (
        "what is given wins"
    )


@pytest.mark.parametrize(
    ("file", "name", "expected"),
    [
        (
            "vit_base_patch16_224.pth",
            None,
            r"names several weights, .* vit_base_patch16_224.augreg_in1k \(79.2 %\), vit_base",
        ),
        (
            "checkpoint-99.pth",
            None,
            r"checkpoint-99.pth: neither its name nor a config.json next to it .* --model NAME",
        ),
        ("vit_bas_patch16_224.pth", None, "did you mean .*vit_base_patch16_224"),
        (
            "deit3_base_patch16_224.pth",
            None,
            r"names several weights, .* deit3_base_patch16_224.fb_in1k \(83.8 %\)",
        ),
        (
            "x.pth",
            "vit_base_patch16_224.augreg_in2",
            "in neither .*did you mean vit_base_patch16_224.augreg_in1k",
        ),
        ("x.pth", "timm/vit_bsae_patch16_224", "did you mean .*vit_base_patch16_224"),
        (
            "x.pth",
            "vgg99",
            "vgg99 is in neither the table of vit/weights/published_models.py nor timm 1",
        ),
        ("x.pth", "vit_medium_patch16_gap_384.sw_in12k_ft_in1k", None),
    ],
)
def test_what_is_not_known_is_told_in_one_line_with_the_nearest(file, name, expected, tmp_path):
    if expected is None:
        assert identify(tmp_path / file, name).crop_mode == "squash"
        return
    with pytest.raises(ValueError, match=expected) as caught:
        identify(tmp_path / file, name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            '{"architectures": ["ViTForImageClassification"], "model_type": "vit"}',
            "transformers.*ViTForImageClassification.*timm's copy",
        ),
        ('{"architecture": ', "cannot be read"),
        (
            '{"architecture": "vit_tiny_patch16_224", "model_args": {"act_layer": "silu"}}',
            "made with act_layer, which this project cannot do",
        ),
        (
            '{"architecture": "resnet50", "pretrained_cfg": {"interpolation": "lanczos"}}',
            "resizes with 'lanczos'",
        ),
        ('{"name": "something else"}', "neither its name nor a config.json"),
        ("[1]", "neither its name nor a config.json"),
    ],
)
def test_settings_of_others_are_told(content, expected, tmp_path):
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=expected) as caught:
        identify(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_table_needs_no_timm(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert identify(tmp_path / "deit_3_base_224_1k.pth").top1 == 83.8
    assert identify("x", "vit_large_patch16_384.augreg_in21k_ft_in1k").model == {"name": "vit_l16"}
    with pytest.raises(
        ValueError, match=r"vit_tiny_patch16_224 names several weights, .* give --model with one"
    ):
        identify("x", "vit_tiny_patch16_224")
    with pytest.raises(ValueError, match=r"nor timm, which is not installed \(pip install timm\)"):
        identify("x", "resnet50")
    with pytest.raises(ValueError, match="neither its name"):
        identify(tmp_path / "resnet50.pth")


# --- evaluating it --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row.name)
def test_a_config_says_what_the_row_says(row):
    values = to_config(row, "data/imagenet", "validation")
    config = from_dict(values, "test")
    assert (config.data.root, config.data.val_split, config.model.num_classes) == (
        "data/imagenet",
        "validation",
        1000,
    )
    assert (config.data.mean, config.data.std, config.data.interpolation) == (
        row.mean,
        row.std,
        row.interpolation,
    )
    assert (
        config.eval.crop_pct,
        ImageFormat.from_config(config.model, config.data).size,
        config.train.precision,
    ) == (row.crop_pct, row.image_size, "fp32")
    assert {"in_chans": 3, **row.model}.items() <= config.model.model_dump().items()


def test_weights_without_classes_and_a_command_without_data_are_told(tmp_path):
    path = tmp_path / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=0).state_dict(), path)
    with pytest.raises(ValueError, match=r"has no head.weight, so no classes"):
        with_published_config(read_weights(path), None, "data")
    with pytest.raises(ValueError, match=r"is vit_tiny.*with --data ROOT"):
        with_published_config(read_weights(path), None, None)


def test_the_number_is_for_a_thousand_classes(tmp_path):
    path = tmp_path / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", num_classes=10).state_dict(), path)
    trained, known = with_published_config(read_weights(path), None, "data")
    assert (trained.num_classes, trained.config["model"]["num_classes"], known.top1) == (
        10,
        10,
        None,
    )
    without = f"{known.name}: no published number at hand for 10 classes"
    assert describe_published(known, 50_000, (224, 224), 10, 10) == without
    others = "; the data have 3 classes, the model 10: labels are compared by number"
    assert describe_published(known, 50_000, (224, 224), 3, 10) == without + others, (
        "told without a number, too"
    )


def test_the_published_number_says_what_it_stands_for():
    row = next(row for row in KNOWN if row.name == "vit_base_patch16_224.augreg_in1k")
    line = "vit_base_patch16_224.augreg_in1k: top-1 79.15 % (39577), top-5 94.11 % (47054)"
    on = " (published, on the 50,000 of ILSVRC2012 val; here: {} images)"
    assert describe_published(row, 50_000, (224, 224), 1000, 1000) == line + on.format("50,000")
    assert (
        describe_published(row, 3925, (384, 224), 10, 1000)
        == line + on.format("3,925")
        + "; published at 224x224, here 384x224; the data have 10 classes, the model 1000: labels"
        " are compared by number"
    )


def test_the_page_has_the_table():
    """docs/recipes.md is for people, vit/weights/published_models.py for the program: one table."""

    def line(row: KnownModel) -> str:
        names = [row.name, *row.files]
        side = f"{row.image_size[0]}, {row.crop_pct:g}"
        return (
            f"| {', '.join(f'`{name}`' for name in names)} | {side} | {row.top1:.2f} |"
            f" {row.top5:.2f} |"
        )

    page = (ROOT / "docs" / "recipes.md").read_text().partition("## Known models")[2]
    shown = [text for text in page.splitlines() if text.startswith("| `")]
    expected = [line(row) for row in KNOWN]
    assert shown == expected, "the table of docs/recipes.md should be:\n" + "\n".join(expected)
    assert {row.source for row in KNOWN} == set(re.findall(r"[\w-]+/[\w-]+@\w+:[\w/.-]+\w", page))
