"""OpenMMLab's MMPretrain: configs in Python, which inherit from others by `_base_`.

Its own meanings: a child's dictionaries are merged into its bases' (`_delete_` replaces one), its
lists replace theirs; the batch is that of a GPU, and how many there are is in the file's name
(`64xb64`) or follows from `auto_scale_lr`; the warm-up moves each step, the rest each epoch; what
is decayed stands in `paramwise_cfg`; without AMP numbers are fp32.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vit.extras.recipes.arguments import Argument, Given, Table
from vit.extras.recipes.command import Command
from vit.extras.recipes.python_config import Leaves, Opaque, flattened, with_bases
from vit.extras.recipes.rates import after_warmup, say_rate, with_effect
from vit.extras.recipes.reading import ConfigReading, Reading
from vit.extras.recipes.timm_common import (
    not_available,
    say_initial_weights,
    say_layer_decay,
    say_precision,
)

SOURCE = "open-mmlab/mmpretrain@ee7f2e88"
_PLACES = re.compile(
    r"(default_scope|default_hooks|env_cfg|vis\w*|log_level|load_from|resume|work_dir|test_\w+"
    r"|val_evaluator|val_cfg|train_pipeline|dataset_type|bgr_\w+|auto_scale_lr|_base_"
    r"|data_preprocessor\.(type|num_classes|to_rgb)|randomness\.(deterministic|diff_rank_seed)"
    r"|(train|val)_dataloader\.(num_workers|persistent_workers|pin_memory|collate_fn\.\w+)"
    r"|(train|val)_dataloader\.dataset\.(type|data_root|split|ann_file|data_prefix|\w+_classes)"
    r"|(train|val)_dataloader\.sampler\.shuffle|val_dataloader\.sampler\.type|val_dataloader\.batch_size"
    r"|(train|val)_dataloader\.dataset\.pipeline\.\d+\.(backend|hparams\.\w+|fill_color|fill_std)"
    r"|model\.(type|head\.(type|in_channels|num_classes|topk)|backbone\.(type|img_size))"
    r"|(train|val)_dataloader\.drop_last|train_cfg\.(by_epoch|type)|strategy\.[\w.]+|runner_type"
    r"|model\.data_preprocessor\.(type|num_classes|to_rgb)"
    r"|optim_wrapper\.(type|constructor)|custom_imports\.\w+)\b"
)
"""Keys that say where things are, what is shown, how fast it runs, and which class does it."""
_ARCHES = {
    "deit-tiny": "ti",
    "deit-t": "ti",
    "deit-small": "s",
    "deit-s": "s",
    "deit-base": "b",
    "deit-b": "b",
    "base": "b",
    "b": "b",
    "large": "l",
    "l": "l",
    "huge": "h",
    "h": "h",
}
"""Names of sizes. `small` is another network there: 8 layers of 768 (DeiT3 has the usual one)."""
_BACKBONES = ("VisionTransformer", "DeiT3", "DistilledVisionTransformer")
_CLIP = {
    "b16": "vit_base_patch16_clip_224",
    "b32": "vit_base_patch32_clip_224",
    "l14": "vit_large_patch14_clip_224",
    "h14": "vit_huge_patch14_clip_224",
}
_DEPTHS = {"ti": 12, "s": 12, "b": 12, "l": 24, "h": 32}
_OF_DEIT3 = {"s": "s", "small": "s", "m": "b", "medium": "b"}
_INITIAL = "model.init_cfg model.backbone.init_cfg model.head.init_cfg"


def is_config(text: str) -> bool:
    """Whether `text` is a config of OpenMMLab."""
    return bool(re.search(r"^(_base_|optim_wrapper|model|train_cfg)\s*=", text, re.M))


def read_command(command: Command, num_gpus: int | None) -> Reading:
    """Account for `tools/dist_train.sh CONFIG GPUS` or `tools/train.py CONFIG`."""
    path = Path(command.words[0])
    if not path.is_file():
        raise ValueError(f"{path}: cannot read the config file: give a path from here")
    gpus = num_gpus or command.num_gpus()
    amp = "--amp" in command.words
    return read(path.read_text(encoding="utf-8"), path, gpus, amp)


def read(text: str, path: Path | None, num_gpus: int | None, amp: bool = False) -> Reading:
    """Account for a config. path: where it is, for its bases; num_gpus: None if not known."""
    config = with_bases(text, path)
    leaves = {k: v for k, v in flattened(config).items() if not isinstance(v, Opaque)}
    arguments = tuple(Argument((k,), "str", None, "", not _PLACES.match(k)) for k in leaves)
    table = Table("MMPretrain", f"{SOURCE}, its defaults", arguments)
    reading = ConfigReading(table, Given(Leaves(leaves), frozenset(leaves)))
    _say_batch(reading, path, num_gpus)
    _say_model(reading)
    _say_images(reading)
    _say_mixing(reading)
    _say_optimizer(reading)
    _say_schedule(reading)
    _say_rest(reading, amp)
    reading.finish()
    return reading


def _say_batch(reading: ConfigReading, path: Path | None, num_gpus: int | None) -> None:
    size = reading.args["train_dataloader.batch_size"]
    named = re.search(r"(\d+)xb(\d+)", path.stem) if path else None
    base = reading.get("auto_scale_lr.base_batch_size")
    if num_gpus:
        how = f"{size} x {num_gpus} GPUs"
        batch = size * num_gpus
    elif named:
        how = f"{size} x {named[1]} GPUs, as the file's name has it"
        batch = size * int(named[1])
        if int(named[2]) != size:
            text = f"a GPU has {size} images in the config, {named[2]} in the file's name"
            reading.differs("", text)
    elif base:
        how = "as auto_scale_lr has it"
        batch = base
    else:
        raise ValueError("how many GPUs train is neither in the config nor in its name: --gpus N")
    reading.same("train_dataloader.batch_size", {"data.global_batch_size": batch}, how)
    if base and base != batch and named:
        text = f"the rate is for a batch of {base:,}: it is scaled only with --auto-scale-lr"
        reading.differs("", text)


def _say_model(reading: ConfigReading) -> None:
    backbone = reading.get("model.backbone.type", "VisionTransformer")
    if backbone not in _BACKBONES:
        raise ValueError(f"a backbone {backbone}: known are {', '.join(_BACKBONES)}")
    arch = str(reading.args["model.backbone.arch"]).lower()
    is_deit3 = backbone == "DeiT3"
    size = _ARCHES.get(arch, _OF_DEIT3.get(arch, "") if is_deit3 else "")
    if not size:
        raise ValueError(f"arch {arch!r}: known are {', '.join(_ARCHES)}")
    patch = reading.get("model.backbone.patch_size", 16)
    name: dict[str, Any] = {"model.name": f"vit_{size}{patch}"}
    if is_deit3:
        name |= {"model.init_values": 1e-4, "model.no_embed_class": True}
    if arch in ("m", "medium"):
        name |= {"model.embed_dim": 512, "model.num_heads": 8}
    if backbone == "DistilledVisionTransformer":
        name["model.dist_token"] = True
    _say_network(reading, f"{size}{patch}", name)
    rate = reading.get("model.backbone.drop_path_rate", 0.0)
    dropped: dict[str, Any] = {"model.drop_path_rate": rate} if rate else {}
    reading.same(reading.there("model.backbone.drop_path_rate"), dropped)
    drop = reading.get("model.backbone.drop_rate", 0.0)
    rates = {"model.pos_drop_rate": drop, "model.proj_drop_rate": drop} if drop else {}
    reading.same(reading.there("model.backbone.drop_rate"), rates)
    pools = reading.get("model.backbone.out_type") == "avg_featmap"
    pooled = {"model.global_pool": "avg"} if pools else {}
    names = reading.there("model.backbone.out_type model.backbone.final_norm")
    reading.same(names, pooled)
    if neck := reading.get("model.neck.type"):
        text = f"{neck} between the backbone and the head"
        reading.cannot(reading.there("model.neck"), text)
    else:
        reading.same(reading.there("model.neck"))
    hidden = reading.get("model.head.hidden_dim")
    reading.same(
        reading.there("model.head.hidden_dim"),
        {"model.representation_size": hidden} if hidden else {},
    )
    _say_start(reading, size)
    _say_loss(reading)


def _say_network(reading: ConfigReading, size: str, ours: dict[str, Any]) -> None:
    """`pre_norm` decides whose network it is. size: such as b16; ours: its settings without it."""
    names = reading.there("model.backbone.arch model.backbone.patch_size model.backbone.pre_norm")
    if not reading.get("model.backbone.pre_norm"):
        reading.same(names, ours)
    elif size in _CLIP:
        text = "timm's model of CLIP has the norm before the blocks: norms with an epsilon of 1e-5"
        reading.differs(names, f"{text} here, of 1e-6 there", {"model.name": f"timm/{_CLIP[size]}"})
    else:
        raise ValueError(
            f"model.backbone.pre_norm of a {size}: expected one of {', '.join(_CLIP)}: set another"
            " arch and patch_size, or pre_norm=False"
        )


def _say_start(reading: ConfigReading, size: str) -> None:
    """Weights to start from, and how the others are drawn."""
    weights = reading.get("model.backbone.init_cfg.checkpoint")
    if reading.get("model.backbone.init_cfg.type") == "Pretrained":
        text = (
            f"the backbone starts from {weights or 'a checkpoint'}, the head is new: give its file"
        )
        start = {"init.checkpoint": weights or "pretrained.pth", "init.reset_head": True}
        reading.differs(reading.there("model.backbone.init_cfg"), text, start)
    frozen = reading.get("model.backbone.frozen_stages", -1)
    freeze = {"init.freeze": "backbone" if frozen >= _DEPTHS[size] else frozen}
    reading.same(reading.there("model.backbone.frozen_stages"), freeze if frozen > 0 else {})
    names = reading.there(_INITIAL)
    if names:
        reading.differs(names, "first weights are ours: normal, std 0.02, and a head of zeros")
    else:
        say_initial_weights(reading, "Xavier's in MLPs")


def _say_loss(reading: ConfigReading) -> None:
    kind = reading.get("model.head.loss.type", "CrossEntropyLoss")
    names = reading.there("model.head.loss")
    value = reading.get("model.head.loss.label_smooth_val", 0.0)
    mode = reading.get("model.head.loss.mode", "original")
    if kind == "CrossEntropyLoss":
        reading.same(names, {"loss.label_smoothing": 0.0})
    elif kind == "LabelSmoothLoss" and mode == "original":
        reading.same(names, {"loss.label_smoothing": value})
    elif kind == "LabelSmoothLoss" and mode == "classy_vision":
        # (one-hot + v / K) / (1 + v) is smoothing by v / (1 + v)
        smoothing = {"loss.label_smoothing": value / (1 + value)}
        reading.same(names, smoothing, f"{value} / {1 + value}, ClassyVision's form")
    else:
        reading.cannot(names, f"the loss {kind} {mode}: cross-entropy here")


def _say_images(reading: ConfigReading) -> None:
    """Training and evaluation, operation by operation."""
    of_model = "model.data_preprocessor"
    path = of_model if f"{of_model}.mean" in reading.args else "data_preprocessor"
    mean = [value / 255 for value in reading.args[f"{path}.mean"]]
    std = [value / 255 for value in reading.args[f"{path}.std"]]
    reading.same(
        reading.there(f"{of_model} data_preprocessor.mean data_preprocessor.std"),
        {"data.mean": [round(v, 6) for v in mean], "data.std": [round(v, 6) for v in std]},
        "over 255",
    )
    for item in reading.items("train_dataloader.dataset.pipeline"):
        _say_operation(reading, item)
    copies = reading.get("train_dataloader.sampler.num_repeats", 3)
    repeats = {"data.aug_repeats": copies, "data.aug_repeats_form": "sampler"}
    is_repeated = reading.get("train_dataloader.sampler.type") == "RepeatAugSampler"
    reading.same(reading.there("train_dataloader.sampler"), repeats if is_repeated else {})
    side = 0
    for item in reading.items("val_dataloader.dataset.pipeline"):
        kind = reading.get(f"{item}.type")
        names = reading.there(item)
        if kind == "ResizeEdge":
            side = reading.args[f"{item}.scale"]
            theirs = reading.get(f"{item}.interpolation", "bilinear")
            ours = reading.settings.get("data.interpolation", theirs)
            if theirs != ours:
                text = f"images of evaluation are resized by {theirs} there, by {ours} here"
                reading.differs(names, f"{text}, as in training")
                continue
        elif kind == "CenterCrop":
            crop = reading.args[f"{item}.crop_size"]
            view = {"eval.crop_pct": crop / side}
            if side != crop and crop / side != 0.875:
                view = {"eval.resize_px": side}
            reading.same(names, view)
            continue
        elif kind == "Resize":
            reading.same(names, {"eval.crop_mode": "squash", "eval.crop_pct": 1.0})
            continue
        elif kind not in ("LoadImageFromFile", "PackInputs"):
            reading.cannot(names, f"{kind} in evaluation")
            continue
        reading.same(names)


def _say_operation(reading: ConfigReading, item: str) -> None:
    """One operation of the training pipeline."""
    kind = reading.get(f"{item}.type")
    names = reading.there(item)
    if kind in ("LoadImageFromFile", "PackInputs"):
        reading.same(names)
    elif kind == "RandomResizedCrop":
        interpolation = reading.get(f"{item}.interpolation", "bilinear")
        crop = {"model.image_size": reading.args[f"{item}.scale"]}
        reading.same(names, {**crop, "data.interpolation": interpolation})
    elif kind == "RandomFlip" and reading.get(f"{item}.direction", "horizontal") == "horizontal":
        reading.same(names, {"augment.hflip_prob": reading.args[f"{item}.prob"]})
    elif kind == "RandAugment" and reading.get(f"{item}.policies") == "timm_increasing":
        settings = {
            "augment.randaugment_layers": reading.args[f"{item}.num_policies"],
            "augment.randaugment_magnitude": float(reading.args[f"{item}.magnitude_level"]),
            "augment.randaugment_magnitude_std": reading.get(f"{item}.magnitude_std", 0.0),
        }
        text = "operations that warp are bilinear here, bicubic there: no known effect on accuracy"
        reading.differs(names, text, settings)
    elif kind == "AutoAugment" and reading.get(f"{item}.policies") == "imagenet":
        # Its `hparams`, colour and interpolation, do not reach the operations that it builds.
        text = (
            "warps take the nearest pixel and leave grey there, are bilinear and leave black here"
        )
        reading.differs(names, text, {"augment.auto_augment": "imagenet"})
    elif kind == "RandomErasing":
        low = reading.get(f"{item}.min_area_ratio", 0.02)
        high = reading.get(f"{item}.max_area_ratio", 0.4)
        settings = {
            "augment.erasing_prob": reading.args[f"{item}.erase_prob"],
            "augment.erasing_mode": "rand" if reading.get(f"{item}.mode") == "rand" else "const",
            "augment.erasing_area": [low, high],
        }
        text = "fill_std: noise per pixel around a mean colour there, one random colour here"
        reading.differs(names, text, settings)
    elif kind == "ColorJitter":
        parts = [
            reading.get(f"{item}.{n}", 0) for n in ("brightness", "contrast", "saturation", "hue")
        ]
        reading.same(names, {"augment.color_jitter": parts})
    else:
        reading.cannot(names, f"{kind} is not available")


def _say_mixing(reading: ConfigReading) -> None:
    """MixUp and CutMix: one of them for each batch, each as likely."""
    path = "model.train_cfg.augments"
    items = reading.items(path) or [path]
    alphas = {"Mixup": 0.0, "CutMix": 0.0}
    unknown = []
    for item in items:
        kind = reading.get(f"{item}.type")
        if kind in alphas:
            alphas[kind] = reading.get(f"{item}.alpha", 1.0)
        elif kind:
            unknown.append(kind)
    settings = {"augment.mixup_alpha": alphas["Mixup"], "augment.cutmix_alpha": alphas["CutMix"]}
    names = reading.there(path)
    if unknown:
        reading.cannot(names, f"{', '.join(unknown)} is not available", settings)
    elif names:
        text = (
            "one draw of lambda and box for the images of a GPU, with partners drawn at random"
            " there; for each augment.mix_group_size images, in a ring, here"
        )
        reading.differs(names, text, settings)


def _say_optimizer(reading: ConfigReading) -> None:
    path = "optim_wrapper.optimizer"
    kind = reading.args[f"{path}.type"]
    lr = reading.args[f"{path}.lr"]
    reading.same(f"{path}.lr", {"optim.lr": lr})
    if kind == "AdamW":
        reading.same(f"{path}.type", {"optim.name": "adamw"})
        betas = list(reading.get(f"{path}.betas", (0.9, 0.999)))
        reading.same(reading.there(f"{path}.betas"), {"optim.betas": betas})
        reading.same(reading.there(f"{path}.eps"), {"optim.eps": reading.get(f"{path}.eps", 1e-8)})
    elif kind == "SGD":
        reading.same(f"{path}.type", {"optim.name": "sgd"})
        momentum = {"optim.momentum": reading.get(f"{path}.momentum", 0.0)}
        reading.same(reading.there(f"{path}.momentum"), momentum)
        nesterov = {"optim.nesterov": reading.get(f"{path}.nesterov", False)}
        reading.same(reading.there(f"{path}.nesterov"), nesterov)
    else:
        raise not_available(f"{path}.type {kind}")
    decay = reading.get(f"{path}.weight_decay", 0.01 if kind == "AdamW" else 0.0)
    reading.same(reading.there(f"{path}.weight_decay"), {"optim.weight_decay": decay})
    _say_groups(reading, decay)
    clip = reading.get("optim_wrapper.clip_grad.max_norm")
    reading.same(reading.there("optim_wrapper.clip_grad"), {"optim.clip_grad_norm": clip})


def _say_groups(reading: ConfigReading, decay: float) -> None:
    """`paramwise_cfg`: what is not decayed, and rates by depth."""
    path = "optim_wrapper.paramwise_cfg"
    layers = reading.get(f"{path}.layer_decay_rate")
    if layers is not None:
        say_layer_decay(reading, f"{path}.layer_decay_rate", layers, "beit")
    keys = f"{path}.custom_keys"
    decayed = []
    for what, flags in (
        ("norms", (f"{path}.norm_decay_mult", f"{keys}..ln.decay_mult")),
        ("biases", (f"{path}.bias_decay_mult", f"{keys}..bias.decay_mult")),
        ("the class token", (f"{keys}..cls_token.decay_mult",)),
        ("positions", (f"{keys}..pos_embed.decay_mult",)),
    ):
        if decay and all(reading.get(flag, 1.0) != 0.0 for flag in flags):
            decayed.append(what)
    names = reading.there(path)
    lists = {4: "nothing", 2: "embeddings"}
    if len(decayed) == 4 or decayed == ["norms", "biases"]:
        reading.same(names, {"optim.no_weight_decay": lists[len(decayed)]})
    elif decayed:
        text = f"{', '.join(decayed)} are decayed by {decay:g}; here they are not"
        reading.cannot(names, text)
    else:
        reading.same(names)


def _say_schedule(reading: ConfigReading) -> None:
    """A linear warm-up and a cosine, or what cannot be said."""
    lr = reading.settings["optim.lr"]
    epochs = reading.args["train_cfg.max_epochs"]
    reading.same("train_cfg.max_epochs", {"train.epochs": epochs})
    every = {"eval.every_epochs": reading.get("train_cfg.val_interval", 1)}
    reading.same(reading.there("train_cfg.val_interval"), every)
    warmup = 0
    start = 0.0
    floor = 0.0
    per_epoch = True
    unknown = []
    for item in reading.items("param_scheduler"):
        kind = reading.get(f"{item}.type")
        if kind == "LinearLR":
            warmup = reading.args[f"{item}.end"]
            start = lr * reading.get(f"{item}.start_factor", 1 / 3)
        elif kind == "CosineAnnealingLR":
            floor = reading.get(f"{item}.eta_min", 0.0)
            per_epoch = not reading.get(f"{item}.convert_to_iter_based", False)
        else:
            unknown.append(str(kind))
    settings = {
        "schedule.name": "cosine",
        "schedule.warmup_epochs": warmup,
        "schedule.warmup_lr": start,
        "schedule.min_lr": min(floor, lr),
    }
    names = reading.there("param_scheduler")
    if unknown:
        reading.cannot(
            names, f"the schedule {', '.join(unknown)}: a cosine here", with_effect(settings)
        )
        return
    theirs = after_warmup(
        lr, epochs, warmup_epochs=warmup, warmup_lr=start, min_lr=floor, per_epoch=per_epoch
    )
    reasons = "its cosine moves once an epoch, its warm-up each step" if per_epoch else ""
    say_rate(reading, names, theirs, settings, reasons)


def _say_rest(reading: ConfigReading, amp: bool) -> None:
    """Averages, seeds, numbers, and keys that are not known here."""
    for item in reading.items("custom_hooks"):
        names = reading.there(item)
        if reading.get(f"{item}.type") == "EMAHook":
            decay = 1 - reading.get(f"{item}.momentum", 0.0002)
            text = "only the average is evaluated there; here both"
            reading.differs(names, text, {"train.ema_decay": decay})
        else:
            reading.cannot(names, f"{reading.get(f'{item}.type')} is not available")
    seed = reading.get("randomness.seed")
    reading.same(reading.there("randomness.seed"), {} if seed is None else {"train.seed": seed})
    say_precision(reading, "fp16 with a scaled loss" if amp else "fp32")
    accounted = {name for finding in reading.findings for name in finding.theirs}
    for argument in reading.table.arguments:
        name = argument.name
        if argument.in_recipe and name not in accounted:
            reading.cannot(name, f"{name} = {reading.args[name]!r} is not known here")
