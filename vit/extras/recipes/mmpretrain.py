"""Map Python configs of OpenMMLab's MMPretrain to settings of this project.

In MMPretrain, configs inherit with `_base_`. Dictionaries are merged into those of the base, unless
they contain `_delete_`, and lists replace those of the base. The batch size is per GPU. The number
of GPUs is in the file's name (`64xb64`) or follows from `auto_scale_lr`. The learning rate changes
each step during the warm-up, and each epoch afterwards. `paramwise_cfg` selects the parameters with
weight decay. Without AMP, training uses fp32.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from vit.extras.recipes.arguments import make_table
from vit.extras.recipes.command import Command
from vit.extras.recipes.python_config import with_bases
from vit.extras.recipes.rates import after_warmup, map_schedule
from vit.extras.recipes.reading import Handler, Reading, crop_pct_for, reading_of
from vit.extras.recipes.timm_common import map_initial_weights, map_precision, not_available
from vit.layers.presets import PRESETS

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
"""The keys for paths, logging, speed and class names, which are not part of a recipe."""
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
"""The model sizes by MMPretrain name. `small` is omitted, because it has 8 layers of width 768,
except in DeiT3."""
_BACKBONES = ("VisionTransformer", "DeiT3", "DistilledVisionTransformer")
_CLIP = {
    "b16": "vit_base_patch16_clip_224",
    "b32": "vit_base_patch32_clip_224",
    "l14": "vit_large_patch14_clip_224",
    "h14": "vit_huge_patch14_clip_224",
}
_OF_DEIT3 = {"s": "s", "small": "s", "m": "b", "medium": "b"}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "SGD": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
}
"""The arguments of each optimizer, with torch's defaults."""
_INITIAL = "model.init_cfg model.backbone.init_cfg model.head.init_cfg"
RULES = make_table(
    "MMPretrain",
    SOURCE,
    """
model.backbone.arch                     str    -    model.name
model.backbone.drop_path_rate           float  0.0  [model.drop_path_rate]
model.backbone.drop_rate                float  0.0  [model.pos_drop_rate, model.proj_drop_rate]
model.backbone.out_type model.backbone.final_norm  str  -  model.global_pool
model.neck                              str    -    a module before the head
model.head.hidden_dim                   int    -    [model.representation_size]
model.backbone.init_cfg                 str    -    init.checkpoint
model.backbone.frozen_stages            int    -1   init.freeze
model.head.loss                         str    -    loss.label_smoothing
data_preprocessor                       str    -    data.mean, data.std
train_dataloader.dataset.pipeline       str    -    augment
train_dataloader.sampler                str    -    order.aug_repeats
val_dataloader.dataset.pipeline         str    -    eval
model.train_cfg.augments                str    -    augment.mixup_alpha, augment.cutmix_alpha
optim_wrapper.optimizer                 str    -    optim
optim_wrapper.paramwise_cfg             str    -    optim.no_weight_decay, optim.layer_decay
optim_wrapper.clip_grad.max_norm optim_wrapper.clip_grad  float  -  optim.clip_grad_norm
train_cfg.max_epochs                    required  -  train.epochs
train_cfg.val_interval                  int    1    eval.every_epochs
param_scheduler                         str    -    schedule
custom_hooks                            str    -    ema.decay
randomness.seed                         int    -    ?train.seed
""",
    "",
).arguments
"""The keys of a config that are mapped, in this order."""


def is_config(text: str) -> bool:
    """Return whether `text` is a config of OpenMMLab."""
    return bool(re.search(r"^(_base_|optim_wrapper|model|train_cfg)\s*=", text, re.M))


def read_command(command: Command, num_gpus: int | None) -> Reading:
    """Map `tools/dist_train.sh CONFIG GPUS` or `tools/train.py CONFIG`."""
    path = Path(command.words[0])
    if not path.is_file():
        raise ValueError(
            f"{path}: the config file cannot be read: pass a path relative to the current folder"
        )
    gpus = num_gpus or command.num_gpus()
    amp = "--amp" in command.words
    return read(path.read_text(encoding="utf-8"), path, gpus, amp)


def read(text: str, path: Path | None, num_gpus: int | None, amp: bool = False) -> Reading:
    """Map a config. path: the config file, whose folder is used to find base configs. num_gpus:
    None if unknown."""
    config = with_bases(text, path)
    reading = reading_of(config, "MMPretrain", f"{SOURCE}, its defaults", _PLACES, num_gpus)
    _map_batch(reading, path)
    reading.follow(RULES, HANDLERS)
    map_precision(reading, "fp16 with a scaled loss" if amp else "fp32")
    reading.refuse_rest()
    reading.finish()
    return reading


def _map_batch(reading: Reading, path: Path | None) -> None:
    num_gpus = reading.num_gpus
    size = reading.args["train_dataloader.batch_size"]
    named = re.search(r"(\d+)xb(\d+)", path.stem) if path else None
    base = reading.get("auto_scale_lr.base_batch_size")
    if num_gpus:
        formula = f"{size} x {num_gpus} GPUs"
        batch = size * num_gpus
    elif named:
        formula = f"{size} x {named[1]} GPUs, from the file's name"
        batch = size * int(named[1])
        if int(named[2]) != size:
            text = f"images per GPU: {size} images in the config, {named[2]} in the file's name"
            reading.differs("", text)
    elif base:
        formula = "from auto_scale_lr"
        batch = base
    else:
        raise ValueError(
            "the number of GPUs is neither in the config nor in its file name: pass --gpus N"
        )
    reading.same("train_dataloader.batch_size", {"data.global_batch_size": batch}, formula)
    if base and base != batch and named:
        text = f"the rate is for a batch of {base:,}, and only --auto-scale-lr scales it"
        reading.differs("", text)


def _size(reading: Reading) -> str:
    """Return this project's name for the size of the model, such as "b"."""
    backbone = reading.get("model.backbone.type", "VisionTransformer")
    if backbone not in _BACKBONES:
        raise ValueError(f"backbone {backbone}: expected one of {', '.join(_BACKBONES)}")
    arch = str(reading.args["model.backbone.arch"]).lower()
    sizes = {**_OF_DEIT3, **_ARCHES} if backbone == "DeiT3" else _ARCHES
    if arch not in sizes:
        raise ValueError(f"arch {arch!r}: expected one of {', '.join(_ARCHES)}")
    return sizes[arch]


def _map_model(reading: Reading) -> None:
    size = f"{_size(reading)}{reading.get('model.backbone.patch_size', 16)}"
    backbone = reading.get("model.backbone.type")
    ours: dict[str, Any] = {"model.name": f"vit_{size}"}
    if backbone == "DeiT3":
        ours |= {"model.init_values": 1e-4, "model.no_embed_class": True}
    if reading.args["model.backbone.arch"].lower() in ("m", "medium"):
        ours |= {"model.embed_dim": 512, "model.num_heads": 8}
    if backbone == "DistilledVisionTransformer":
        ours["model.dist_token"] = True
    names = reading.remaining(
        "model.backbone.arch model.backbone.patch_size model.backbone.pre_norm"
    )
    if not reading.get("model.backbone.pre_norm"):
        reading.same(names, ours)
    elif size in _CLIP:
        text = "mapped to timm's CLIP model, whose norms have an epsilon of 1e-5 instead of 1e-6"
        reading.differs(names, text, {"model.name": f"timm/{_CLIP[size]}"})
    else:
        raise ValueError(
            f"model.backbone.pre_norm is not supported for {size}: choose an arch and patch_size"
            f" from {', '.join(_CLIP)}, or set pre_norm=False"
        )


def _map_pooling(reading: Reading) -> None:
    """Map `out_type`. With `final_norm`, MMPretrain normalizes both before and after the mean."""
    pools = reading.get("model.backbone.out_type") == "avg_featmap"
    texts = {
        (True, True): "norms before and after the mean of the patches: only the second is kept",
        (False, False): "no norm after the last block: added",
    }
    reading.cannot(
        reading.remaining("model.backbone.out_type model.backbone.final_norm"),
        texts.get((pools, reading.get("model.backbone.final_norm", True)), ""),
        {"model.global_pool": "avg"} if pools else {},
    )


def _map_neck(reading: Reading) -> None:
    neck = reading.get("model.neck.type")
    text = f"{neck} between the backbone and the head" if neck else ""
    reading.cannot(reading.remaining("model.neck"), text)


def _map_start(reading: Reading) -> None:
    """Map the initial weights of the backbone."""
    weights = reading.get("model.backbone.init_cfg.checkpoint")
    if reading.get("model.backbone.init_cfg.type") == "Pretrained":
        text = (
            f"the backbone starts from {weights or 'a checkpoint'}, with a new head: set"
            " init.checkpoint to its file"
        )
        start = {"init.checkpoint": weights or "pretrained.pth", "init.reset_head": True}
        reading.differs(reading.remaining("model.backbone.init_cfg"), text, start)


def _map_freezing(reading: Reading) -> None:
    """Map `frozen_stages`, and the distributions of all other initial weights."""
    frozen = reading.get("model.backbone.frozen_stages", -1)
    freeze = {"init.freeze": "backbone" if frozen >= PRESETS[_size(reading)]["depth"] else frozen}
    reading.same(reading.remaining("model.backbone.frozen_stages"), freeze if frozen > 0 else {})
    if names := reading.remaining(_INITIAL):
        reading.differs(
            names,
            "this project draws its own initial weights: normal with std 0.02, and a head of zeros",
        )
    else:
        map_initial_weights(reading, "Xavier's in MLPs")


def _map_loss(reading: Reading) -> None:
    kind = reading.get("model.head.loss.type", "CrossEntropyLoss")
    names = reading.remaining("model.head.loss")
    value = reading.get("model.head.loss.label_smooth_val", 0.0)
    mode = reading.get("model.head.loss.mode", "original")
    if kind == "CrossEntropyLoss":
        reading.same(names, {"loss.label_smoothing": 0.0})
    elif kind == "LabelSmoothLoss" and mode == "original":
        reading.same(names, {"loss.label_smoothing": value})
    elif kind == "LabelSmoothLoss" and mode == "classy_vision":
        # (one-hot + v / K) / (1 + v) equals label smoothing by v / (1 + v)
        smoothing = {"loss.label_smoothing": value / (1 + value)}
        reading.same(names, smoothing, f"{value} / {1 + value}, ClassyVision's form")
    else:
        reading.cannot(names, f"the loss {kind} {mode}: replaced by cross-entropy")


def _map_statistics(reading: Reading) -> None:
    of_model = "model.data_preprocessor"
    path = of_model if f"{of_model}.mean" in reading.args else "data_preprocessor"
    reading.same(
        reading.remaining(f"{of_model} data_preprocessor.mean data_preprocessor.std"),
        {
            f"data.{key}": [round(value / 255, 6) for value in reading.args[f"{path}.{key}"]]
            for key in ("mean", "std")
        },
        "divided by 255",
    )


def _map_augmentation(reading: Reading) -> None:
    for item in reading.items("train_dataloader.dataset.pipeline"):
        _map_operation(reading, item)


def _map_sampler(reading: Reading) -> None:
    path = "train_dataloader.sampler"
    copies = reading.get(f"{path}.num_repeats", 3)
    repeats = {"order.aug_repeats": copies, "order.aug_repeats_form": "sampler"}
    is_repeated = reading.get(f"{path}.type") == "RepeatAugSampler"
    reading.same(reading.remaining(path), repeats if is_repeated else {})


def _map_evaluation(reading: Reading) -> None:
    side = 0
    for item in reading.items("val_dataloader.dataset.pipeline"):
        kind = reading.get(f"{item}.type")
        names = reading.remaining(item)
        match kind:
            case "ResizeEdge":
                side = reading.args[f"{item}.scale"]
                theirs = reading.get(f"{item}.interpolation", "bilinear")
                ours = reading.settings.get("data.interpolation", theirs)
                text = (
                    f"for evaluation MMPretrain resizes by {theirs}, this project by {ours} as in"
                    " training"
                )
                reading.differs(names, "" if theirs == ours else text)
            case "CenterCrop":
                crop = reading.args[f"{item}.crop_size"]
                crop_pct = crop_pct_for(crop, side)
                if crop_pct is None:
                    reading.cannot(names, "an evaluation image smaller than the crop")
                else:
                    reading.same(names, {"eval.crop_pct": crop_pct})
            case "Resize":
                reading.same(names, {"eval.crop_mode": "squash", "eval.crop_pct": 1.0})
            case "LoadImageFromFile" | "PackInputs":
                reading.same(names)
            case _:
                reading.cannot(names, f"the operation {kind} in evaluation")


def _map_operation(reading: Reading, item: str) -> None:
    kind = reading.get(f"{item}.type")
    names = reading.remaining(item)
    match kind:
        case "LoadImageFromFile" | "PackInputs":
            reading.same(names)
        case "RandomResizedCrop":
            interpolation = reading.get(f"{item}.interpolation", "bilinear")
            crop = {"model.image_size": reading.args[f"{item}.scale"]}
            reading.same(names, {**crop, "data.interpolation": interpolation})
        case "RandomFlip" if reading.get(f"{item}.direction", "horizontal") == "horizontal":
            reading.same(names, {"augment.hflip_prob": reading.args[f"{item}.prob"]})
        case "RandAugment" if reading.get(f"{item}.policies") == "timm_increasing":
            settings = {
                "augment.randaugment_layers": reading.args[f"{item}.num_policies"],
                "augment.randaugment_magnitude": float(reading.args[f"{item}.magnitude_level"]),
                "augment.magnitude_std": reading.get(f"{item}.magnitude_std", 0.0),
            }
            text = (
                "this project warps bilinearly, MMPretrain bicubically: no known effect on accuracy"
            )
            reading.differs(names, text, settings)
        case "AutoAugment" if reading.get(f"{item}.policies") == "imagenet":
            # MMPretrain's AutoAugment does not pass its `hparams` (color and interpolation) to the
            # operations.
            text = (
                "MMPretrain warps by nearest pixel and fills gray, this project bilinearly and"
                " black"
            )
            reading.differs(names, text, {"augment.auto_augment": "imagenet"})
        case "RandomErasing":
            low = reading.get(f"{item}.min_area_ratio", 0.02)
            high = reading.get(f"{item}.max_area_ratio", 0.4)
            settings = {
                "augment.erasing_prob": reading.args[f"{item}.erase_prob"],
                "augment.erasing_mode": "rand"
                if reading.get(f"{item}.mode") == "rand"
                else "const",
                "augment.erasing_area": [low, high],
            }
            text = (
                "fill_std: MMPretrain fills with noise around a mean, this project with one color"
            )
            reading.differs(names, text, settings)
        case "ColorJitter":
            parts = [
                reading.get(f"{item}.{n}", 0)
                for n in ("brightness", "contrast", "saturation", "hue")
            ]
            reading.same(names, {"augment.color_jitter": parts})
        case _:
            reading.cannot(names, f"{kind} is not available")


def _map_mixing(reading: Reading) -> None:
    """Map MixUp and CutMix. Each batch gets one of the two, with equal probability."""
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
    names = reading.remaining(path)
    if unknown:
        reading.cannot(names, f"{', '.join(unknown)} is not available", settings)
    elif names:
        text = (
            "MMPretrain draws one lambda and box for the images of a GPU, with random partners;"
            " this project draws one for each augment.mix_group_size images, with neighbours"
        )
        reading.differs(names, text, settings)


def _map_optimizer(reading: Reading) -> None:
    path = "optim_wrapper.optimizer"
    kind = reading.args[f"{path}.type"]
    reading.same(f"{path}.lr", {"optim.lr": reading.args[f"{path}.lr"]})
    if kind not in _OPTIMIZERS:
        raise not_available(f"{path}.type {kind}")
    reading.same(f"{path}.type", {"optim.name": kind.lower()})
    for name, default in _OPTIMIZERS[kind].items():
        value = reading.get(f"{path}.{name}", default)
        reading.same(reading.remaining(f"{path}.{name}"), {f"optim.{name}": value})


def _map_groups(reading: Reading) -> None:
    """Map the layer-wise learning rates, and the parameters without weight decay."""
    path = "optim_wrapper.paramwise_cfg"
    decay = reading.settings["optim.weight_decay"]
    factor = reading.get(f"{path}.layer_decay_rate", 1)
    by_layer = {"optim.layer_decay": factor, "optim.layer_decay_form": "beit"}
    rest = reading.remaining(f"{path}.layer_decay_rate")
    reading.same(rest, {} if factor in (None, 1) else by_layer)
    keys = f"{path}.custom_keys"
    decayed = []
    for part, flags in (
        ("norms", (f"{path}.norm_decay_mult", f"{keys}..ln.decay_mult")),
        ("biases", (f"{path}.bias_decay_mult", f"{keys}..bias.decay_mult")),
        ("the class token", (f"{keys}..cls_token.decay_mult",)),
        ("positions", (f"{keys}..pos_embed.decay_mult",)),
    ):
        if decay and all(reading.get(flag, 1.0) != 0.0 for flag in flags):
            decayed.append(part)
    names = reading.remaining(path)
    if len(decayed) == 4:
        reading.same(names, {"optim.no_weight_decay": "nothing"})
    elif decayed == ["norms", "biases"]:
        reading.same(names, {"optim.no_weight_decay": "embeddings"})
    elif decayed:
        text = f"{', '.join(decayed)} are decayed by {decay:g}; this project does not decay them"
        reading.cannot(names, text)
    else:
        reading.same(names)


def _map_schedule(reading: Reading) -> None:
    """Map a linear warm-up with a cosine schedule. Other schedules have no equivalent."""
    lr = reading.settings["optim.lr"]
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
        "schedule.min_lr": floor,
    }
    reasons = "MMPretrain's cosine changes once per epoch, and its warm-up changes each step"
    map_schedule(
        reading,
        reading.remaining("param_scheduler"),
        settings,
        partial(after_warmup, per_epoch=per_epoch),
        limited=["schedule.min_lr"],
        kind=", ".join(unknown),
        reasons=reasons if per_epoch else "",
    )


def _map_hooks(reading: Reading) -> None:
    for item in reading.items("custom_hooks"):
        names = reading.remaining(item)
        kind = reading.get(f"{item}.type")
        if kind == "EMAHook":
            decay = 1 - reading.get(f"{item}.momentum", 0.0002)
            text = "MMPretrain evaluates only the averaged weights, this project evaluates both"
            reading.differs(names, text, {"ema.decay": decay})
        else:
            reading.cannot(names, f"{kind} is not available")


HANDLERS: dict[str, Handler] = {
    "model.backbone.arch": _map_model,
    "model.backbone.out_type": _map_pooling,
    "model.neck": _map_neck,
    "model.backbone.init_cfg": _map_start,
    "model.backbone.frozen_stages": _map_freezing,
    "model.head.loss": _map_loss,
    "data_preprocessor": _map_statistics,
    "train_dataloader.dataset.pipeline": _map_augmentation,
    "train_dataloader.sampler": _map_sampler,
    "val_dataloader.dataset.pipeline": _map_evaluation,
    "model.train_cfg.augments": _map_mixing,
    "optim_wrapper.optimizer": _map_optimizer,
    "optim_wrapper.paramwise_cfg": _map_groups,
    "param_scheduler": _map_schedule,
    "custom_hooks": _map_hooks,
}
