"""Test that recipes of timm's train.py are imported from commands and argument files with the same
meaning as in timm."""

from __future__ import annotations

import re
from argparse import Namespace

import numpy as np
import pytest
import timm
import yaml
from timm.data import create_transform
from timm.data.loader import adapt_to_chs
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.utils import ModelEmaV3
from torch import nn

from vit.config.io import to_dict
from vit.data.augment.draw import draw_crops
from vit.extras.recipes.importing import import_recipe
from vit.extras.recipes.summary import account, yaml_text
from vit.model import create_model
from vit.optim.ema import create_average
from vit.optim.optimizer import create_optimizer
from vit.weights.hub import is_hub_name

_NUMBERS = {
    *("lr", "betas", "eps", "momentum", "nesterov", "algo", "ns_steps", "ns_coefficients"),
    *("adjust_lr_fn", "fallback_lr_scale", "min_dim_size_to_factor", "decay_rate", "beta2_cap"),
    *("momentum_dtype", "clipping_threshold"),
}
"""The optimizer settings that must match those of timm's factory."""
VIT = "--model vit_base_patch16_224 --batch-size 128"


def settings(command, **options):
    return import_recipe(command, **options).settings


def finding(imported, name):
    (match,) = (f for f in imported.reading.findings if name in f.theirs)
    return match


def test_a_vit_becomes_our_size_with_the_view_of_timms_weights():
    values = settings(f"torchrun --nproc_per_node=8 train.py {VIT} --opt adamw --lr 1e-3")
    assert values["model.name"] == "vit_b16"
    assert values["data.global_batch_size"] == 1024
    assert values["data.mean"] == [0.5, 0.5, 0.5]
    assert values["eval.crop_pct"] == 0.9
    assert values["augment.color_jitter"] == [0.4, 0.4, 0.4, 0]
    assert values["optim.weight_decay"] == 2e-5
    assert values["train.seed"] == 42
    convolutional = settings("python train.py --model resnet50d --lr 0.1")
    assert convolutional["model.name"] == "timm/resnet50d"
    assert convolutional["optim.name"] == "sgd"
    assert convolutional["optim.nesterov"] is True


@pytest.mark.parametrize(
    ("flags", "lr"),
    [
        ("--opt sgd --lr-base 0.1", 0.1 * 1024 / 256),
        ("--opt adamw --lr-base 1e-3 --lr-base-size 256", 1e-3 * 2),
        ("--opt adamw --lr-base 1e-3 --lr-base-scale linear", 4e-3),
        ("--opt sgd --lr-base 0.1 --lr-base-scale sqrt --grad-accum-steps 4", 0.1 * 4),
        ("--opt adamw --lr-base 1e-3 --lr 5e-4 --native-amp", 5e-4),
    ],
)
def test_the_rate_follows_from_the_batch_as_timm_scales_it(flags, lr):
    values = settings(f"./distributed_train.sh 8 {VIT} {flags}")
    assert values["optim.lr"] == pytest.approx(lr)


@pytest.mark.parametrize(
    ("flags", "is_noted"),
    [
        ("--opt adamw", True),
        ("--opt lamb", True),
        ("--opt sgd", False),
        ("--opt adamw --lr 0.2", False),
        ("--opt adamw --lr-base 0.1", False),
        ("--opt adamw --lr-base-size 1048576", False),
    ],
)
def test_timms_default_sgd_rate_with_adam_gets_a_note(flags, is_noted):
    imported = import_recipe(f"./distributed_train.sh 8 {VIT} {flags}")
    assert ("neither --lr nor --lr-base" in " ".join(account(imported).split())) == is_noted


def test_cooldown_and_prefix_add_epochs_and_a_policy_replaces_color_jitter():
    imported = import_recipe(
        f"python train.py {VIT} --opt adamw --lr 1e-3 --epochs 20 --warmup-epochs 5 --warmup-prefix"
        " --aa rand-m9-mstd101-inc1-n3 --aug-repeats 3 --clip-grad 5 --clip-mode agc"
    )
    assert imported.settings["train.epochs"] == 25
    assert imported.settings["augment.randaugment_layers"] == 3
    assert "mstd" in finding(imported, "aa").text
    assert finding(imported, "color_jitter").verdict == "inert"
    assert finding(imported, "aug_repeats").verdict == "inert", (
        "timm uses this sampler only with several processes"
    )
    assert finding(imported, "clip_grad").verdict == "cannot"


def earlier_defaults(command):
    """Return the report's warning about the defaults of earlier timm versions, as one line."""
    (text,) = (f.text for f in import_recipe(command).reading.findings if "2021-09-02" in f.text)
    return text


def test_changed_defaults_of_unstated_arguments_are_listed_as_flags():
    """The command in huggingface/pytorch-image-models#275 is from November 2020."""
    text = earlier_defaults(
        "./distributed_train.sh 8 /data --model vit_base_patch16_224 --sched cosine --epochs 300"
        " --warmup-epochs 5 --lr 1e-3 --opt adam --batch-size 64"
    )
    of_2022, _, of_2021 = text.partition("2021-09-02")
    flags = "--weight-decay 1e-4 --warmup-lr 1e-4 --min-lr 1e-5 --cooldown-epochs 10"
    assert set(re.findall(r"--[a-z-]+ \S*\d", of_2021)) == set(re.findall(r"--\S+ \S+", flags))
    assert "--min-lr 1e-6" in of_2022
    assert "--weight-decay" not in of_2022
    assert "--remode" not in text, "without erasing, its mode must not be listed"


def test_the_warning_lists_every_unstated_argument():
    text = earlier_defaults(
        "./distributed_train.sh 8 /path --model poolformer_s12 -b 128 --lr 1e-3 --drop-path 0.1"
        " --apex-amp"
    )
    assert "a fork" in text
    assert "--sched step" in text


@pytest.mark.parametrize(
    "flags",
    [
        # timm introduced --lr-base in the same version as today's defaults.
        "--lr-base 0.1",
        "--lr 1e-3 --weight-decay 0.1 --warmup-lr 0 --min-lr 0 --warmup-epochs 5 --sched cosine"
        " --epochs 9 --cooldown-epochs 0",
    ],
)
def test_a_command_with_the_same_meaning_in_all_versions_gets_no_warning(flags):
    imported = import_recipe(f"./distributed_train.sh 8 {VIT} --opt adamw {flags}")
    assert not [f.text for f in imported.reading.findings if "2021-09-02" in f.text]


@pytest.mark.parametrize(
    ("policy", "verdict", "expected"),
    [
        ("rand-m9-mstd0.5-inc1", "differs", {"randaugment_layers": 2, "randaugment_magnitude": 9}),
        ("rand-m9-mstd0.5", "differs", {"randaugment_ops": "timm_inc0"}),
        ("rand-m9-inc0", "differs", {"randaugment_ops": "timm_inc0"}),
        ("rand-m9-mmax30", "cannot", {"randaugment_layers": 2}),
        ("original", "differs", {"auto_augment": "original"}),
        ("v0r-mstd0.5", "differs", {"auto_augment": "v0r", "magnitude_std": 0.5}),
        ("3a", "same", {"auto_augment": "three_augment", "color_jitter": [0.4, 0.4, 0.4, 0]}),
        ("augmix-m5", "cannot", {}),
    ],
)
def test_a_policy_of_timm_becomes_our_settings(policy, verdict, expected):
    imported = import_recipe(f"python train.py {VIT} --opt adamw --lr 1e-3 --aa {policy}")
    assert finding(imported, "aa").verdict == verdict
    values = {key: imported.settings.get(f"augment.{key}") for key in expected}
    assert values == expected
    imported.config()


@pytest.mark.parametrize("policy", ["ra", "none", "rand-m9.5", "rand-m9-q1", "v0-m9", "ta_wide"])
def test_a_policy_that_timm_rejects_is_an_error(policy):
    with pytest.raises((AssertionError, ValueError)):
        create_transform(224, is_training=True, auto_augment=policy)
    with pytest.raises(ValueError, match="timm rejects"):
        import_recipe(f"python train.py {VIT} --opt adamw --lr 1e-3 --aa {policy}")


@pytest.mark.parametrize(
    "flags",
    [
        *("adamw", "lamb", "nadamw --opt-betas 0.8 0.9", "sgd", "momentum --momentum 0.8"),
        *("muon", "nadamuon --opt-kwargs ns_steps=5 adjust_lr_fn=rms_to_rms", "adafactorbv"),
        "muon --opt-kwargs adjust_lr_fn=original ns_coefficients=original",
        *("adamw --opt-eps 1e-6", "adafactorbv --opt-kwargs beta2_cap=0.95 decay_rate=0.8"),
    ],
)
def test_an_optimizer_has_the_numbers_that_timms_factory_gives_it(flags):
    imported = import_recipe(f"python train.py {VIT} --lr 1e-3 --weight-decay 0.1 --opt {flags}")
    model = nn.Linear(8, 8)
    args = Namespace(**imported.reading.args)
    theirs = create_optimizer_v2(model, **optimizer_kwargs(args), **args.opt_kwargs)
    ours = create_optimizer(model, imported.config().optim)
    expected = {key: theirs.param_groups[-1][key] for key in _NUMBERS & theirs.defaults.keys()}
    # Weight decay applies to weights but not to biases.
    expected["weight_decay"] = 0.1
    (decayed,) = (g for g in ours.param_groups if g["weight_decay"])
    expected = {k: tuple(v) if isinstance(v, list) else v for k, v in expected.items()}
    assert {key: decayed[key] for key in expected} == expected
    assert not [f.text for f in imported.reading.findings if f.verdict == "cannot"]


@pytest.mark.parametrize(
    ("kwargs", "lacking"),
    [
        ("muon --opt-kwargs ns_steps=4", "ns_steps"),
        ("adamw --opt-kwargs ns_steps=5", "ns_steps"),
        ("muon --opt-kwargs ns_coefficients=polar_express scale_eps=True",
         "ns_coefficients, scale_eps"),
        ("adafactorbv --opt-kwargs momentum_dtype=float32 decay_rate=0.7 clipping_threshold=1.0",
         "clipping_threshold, decay_rate, momentum_dtype"),
    ],
)  # fmt: skip
def test_an_argument_of_the_optimizer_that_we_lack_or_fix_is_reported(kwargs, lacking):
    imported = import_recipe(f"python train.py {VIT} --lr 1e-3 --opt {kwargs}")
    (text,) = (f.text for f in imported.reading.findings if f.verdict == "cannot")
    assert text == f"arguments of the optimizer: {lacking}"
    imported.config()


def test_the_polynomial_of_timm_beside_the_scale_of_jordan_is_reported():
    imported = import_recipe(
        f"python train.py {VIT} --lr 1e-3 --opt muon --opt-kwargs adjust_lr_fn=original"
    )
    (text,) = (f.text for f in imported.reading.findings if f.verdict == "cannot")
    assert text == "ns_coefficients=quintic beside adjust_lr_fn=original"


def test_without_augmentation_the_crop_is_the_central_square():
    flags = "--opt adamw --lr 1e-3 --no-aug --aa rand-m9 --reprob 0.25 --aug-repeats 3"
    imported = import_recipe(f"./distributed_train.sh 2 {VIT} {flags}")
    augment = imported.config().augment
    theirs = create_transform(224, is_training=True, no_aug=True).transforms
    window = draw_crops(augment, np.arange(9, dtype=np.uint64), np.full(9, 500), np.full(9, 300),
                        (224, 224))  # fmt: skip
    assert [type(each).__name__ for each in theirs[:2]] == ["Resize", "CenterCrop"]
    assert np.unique(window, axis=0).tolist() == [[100, 0, 300, 300]]
    assert not any((augment.hflip_prob, augment.erasing_prob, augment.randaugment_layers))
    assert not any(augment.color_jitter)
    assert imported.settings["data.interpolation"] == "bilinear"
    assert imported.settings["order.aug_repeats"] == 3
    assert "--train-interpolation random (default)" in account(imported), "the command's value"


def test_a_head_scaled_by_zero_starts_at_zero_and_other_factors_are_unavailable():
    zero = import_recipe(f"python train.py {VIT} --opt adamw --lr 1e-3 --head-init-scale 0")
    small = {"embed_dim": 16, "depth": 1, "num_heads": 1}
    head = create_model(zero.config().model, num_classes=3, **small).head.weight
    assert not head.any()
    other = import_recipe(f"python train.py {VIT} --opt adamw --lr 1e-3 --head-init-scale 0.001")
    assert finding(other, "head_init_scale").verdict == "cannot"


@pytest.mark.parametrize("flags", ["", "--mean 0.485 0.456 0.406 --std 0.2 0.3 0.4"])
def test_gray_images_use_the_average_of_mean_and_std_as_in_timm(flags):
    vit = "--model vit_small_patch16_224 --num-classes 10 -b 64 --opt adamw --lr 1e-3"
    rgb = settings(f"python train.py {vit} {flags}")
    imported = import_recipe(f"python train.py {vit} {flags} --in-chans 1")
    data = imported.config().data
    for key in ("mean", "std"):
        theirs = adapt_to_chs(rgb[f"data.{key}"], 1)
        assert getattr(data, key) == pytest.approx(theirs)


def test_prefixes_of_hub_names_are_removed():
    name = "vit_base_patch16_224.augreg_in21k"
    for prefix in ("hf_hub:timm/", "hf-hub:timm/", "timm/"):
        values = settings(f"python train.py --model {prefix}{name} --lr 1e-3 --opt adamw")
        assert values["model.name"] == "vit_b16"


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "resnet50.a1_in1k"])
def test_pretrained_weights_are_fetched_from_the_repository_that_timm_would_take(name):
    imported = import_recipe(f"python train.py --model {name} --pretrained --num-classes 10")
    repository = timm.models.get_pretrained_cfg(name).hf_hub_id
    assert imported.settings["init.checkpoint"] == repository
    assert imported.settings["init.reset_head"]
    assert is_hub_name(repository)
    assert finding(imported, "pretrained").verdict == "same"


def test_the_smaller_of_lambs_clip_and_the_given_clip_is_used():
    values = settings(f"python train.py {VIT} --lr 1e-3 --opt lamb --clip-grad 5")
    assert values["optim.clip_grad_norm"] == 1
    values = settings(f"python train.py {VIT} --lr 1e-3 --opt lamb --clip-grad 0.5")
    assert values["optim.clip_grad_norm"] == 0.5


def test_the_warm_up_of_the_average_equals_timms():
    flags = "--opt adamw --lr 1e-3 --model-ema --model-ema-decay 0.999 --model-ema-warmup"
    imported = import_recipe(f"python train.py {VIT} {flags}")
    assert finding(imported, "model_ema_warmup").verdict == "same"
    ours = create_average(nn.Linear(2, 2), imported.config().ema, 100)
    theirs = ModelEmaV3(nn.Linear(2, 2), decay=0.999, use_warmup=True)
    for step in (0, 1, 100, 31_000, 40_000):
        assert ours.decay_at(step) == pytest.approx(theirs.get_decay(step + 1))


def test_a_file_of_arguments_is_read_and_another_programs_is_refused(tmp_path):
    file = tmp_path / "train_hparams.yaml"
    arguments = {
        "model": "vit_base_patch16_rope_reg1_gap_256",
        "model_kwargs": {"img_size": 256},
        "batch_size": 256,
        "amp": True,
        "amp_dtype": "bfloat16",
        # amp_impl existed only in earlier versions of timm.
        "amp_impl": "native",
        "lr": None,
        "lr_base": 8e-4,
        "lr_base_size": 512,
        "opt": "adamw",
        "crop_pct": 0.95,
        "data_dir": "/data/imagenet/",
    }
    file.write_text(yaml.safe_dump(arguments))
    imported = import_recipe(str(file), num_gpus=4)
    assert imported.settings["model.name"] == "timm/vit_base_patch16_rope_reg1_gap_256"
    assert imported.settings["model.image_size"] == 256
    assert imported.settings["eval.crop_pct"] == 0.95
    assert imported.settings["optim.lr"] == pytest.approx(8e-4 * 2**0.5)
    assert to_dict(imported.config())["train"]["precision"] == "auto"
    assert "--data-dir /data/imagenet/" in account(imported)
    assert "0.0008 x sqrt(1024 / 512)" in yaml_text(imported, None)
    file.write_text("optimizer: adamw\nlearning_rate: 1\n")
    with pytest.raises(ValueError, match=r"timm's train\.py has no argument optimizer"):
        import_recipe(str(file))
    with pytest.raises(ValueError, match=r"no such model.*vit_base_patch16_224"):
        import_recipe("python train.py --model vit_base_patch16_2244 --lr 1 --opt adamw --aa x")


@pytest.mark.parametrize(
    ("arguments", "ours", "missing"),
    [
        ("--gp avg", {"global_pool": "avg"}, ""),
        ("--gp avg --model-kwargs fc_norm=True", {"global_pool": "avg"}, ""),
        ("--gp avg --model-kwargs fc_norm=False", {"global_pool": "norm_avg"}, ""),
        (
            "--model-kwargs global_pool=avg fc_norm=False act_layer=gelu_tanh",
            {"global_pool": "norm_avg", "mlp_layer": "mlp_tanh"},
            "",
        ),
        ("--model-kwargs fc_norm=True", {}, "fc_norm"),
        ("--gp avg --model-kwargs act_layer=silu", {"global_pool": "avg"}, "act_layer"),
    ],
)
def test_pooling_and_activation_are_timms(arguments, ours, missing):
    imported = import_recipe(f"python train.py data --model vit_base_patch16_224 {arguments}")
    model = imported.config().model.model_dump(exclude_none=True)
    assert {key: model.get(key) for key in ("global_pool", "mlp_layer") if key in model} == ours
    refused = [f.text for f in imported.reading.findings if f.verdict == "cannot"]
    assert any(text.endswith(f"arguments of the model: {missing}") for text in refused) == bool(
        missing
    )


def test_a_model_argument_replaces_the_default_of_the_models_name():
    line = "python train.py data --model deit3_small_patch16_224 --model-kwargs init_values=1e-5"
    model = import_recipe(line).config().model
    assert (model.init_values, model.no_embed_class) == (1e-5, True)


def test_a_number_in_a_file_may_be_written_as_on_a_command_line(tmp_path):
    """YAML 1.1 reads `1e-3` as text, but argparse reads it as a number."""
    file = tmp_path / "args.yaml"
    file.write_text("model: vit_base_patch16_224\nopt: adamw\nlr: 1e-3\nbatch_size: 64\n")
    assert import_recipe(str(file), num_gpus=1).settings["optim.lr"] == 1e-3
