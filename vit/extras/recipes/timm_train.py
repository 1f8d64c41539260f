"""Map commands and YAML files of timm's train.py to settings of this project.

The YAML files are published as train_hparams.yaml or args.yaml. In timm, the batch size is per GPU.
Without --lr, the learning rate is --lr-base scaled by the batch size, or by its square root for
Adam and LAMB. Image size, crop and mean default to those of the model. Color jitter applies only
without a policy. The learning rate changes once per epoch and starts at --warmup-lr. A cool-down
adds epochs, and so does the warm-up with --warmup-prefix.
"""

from __future__ import annotations

import re
from statistics import fmean
from typing import Any

from vit.extras.recipes.arguments import ParsedArguments, Table
from vit.extras.recipes.rates import map_rate, timm_cosine, timm_step, with_effect
from vit.extras.recipes.reading import Reading
from vit.extras.recipes.timm_common import (
    map_average,
    map_batch,
    map_clipping,
    map_color_jitter,
    map_erasing,
    map_initial_weights,
    map_layer_decay,
    map_mixing,
    map_optimizer,
    map_policy,
    map_precision,
)
from vit.extras.recipes.timm_table import OFF, ONLY_WITH, TABLE, note_old_defaults
from vit.system.spelling import did_you_mean

__all__ = ["TABLE", "read"]
_SIZES = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h"}
_PLAIN = r"(?:vit|deit|deit3)_(tiny|small|base|large|huge)(_distilled)?_patch(\d+)_(\d+)"
"""Matches names of timm models that are equal to a model of this project."""


def read(
    table: Table, parsed: ParsedArguments, num_gpus: int | None, is_distributed: bool
) -> Reading:
    """Map the arguments of a command or a YAML file of timm's train.py."""
    reading = Reading(table, parsed)
    args = reading.args
    steps = max(1, args["grad_accum_steps"])
    batch = map_batch(reading, "batch_size grad_accum_steps", num_gpus, steps)
    reading.expect_off(OFF)
    for names, reason in ONLY_WITH.items():
        reading.inert(names, reason)
    _map_model(reading)
    _map_images(reading, is_distributed)
    map_mixing(reading, args["batch_size"])
    _map_mixup_off_epoch(reading)
    _map_loss(reading)
    _map_teacher(reading)
    lr, formula = _rate(args, batch)
    map_optimizer(reading, lr, formula, "lr lr_base lr_base_size lr_base_scale")
    _note_rate_for_sgd(reading, lr)
    map_clipping(reading)
    map_layer_decay(reading, "layer_decay", args["layer_decay"], "timm")
    _map_schedule(reading, lr)
    reading.same("model_ema")
    map_average(reading, args["model_ema_decay"] if args["model_ema"] else None)
    if not args["model_ema_warmup"]:
        reading.same("model_ema_warmup")
    elif args["model_ema"]:
        reading.same("model_ema_warmup", {"ema.warmup": 2 / 3})
    else:
        reading.inert("model_ema_warmup", "the average is off")
    reading.same("seed", {"train.seed": args["seed"]})
    reading.same("val_interval", {"eval.every_epochs": args["val_interval"]})
    _map_precision(reading)
    _map_initial_weights(reading)
    note_old_defaults(reading)
    reading.finish()
    return reading


def _map_initial_weights(reading: Reading) -> None:
    """Map the initial weights and `--head-init-scale`, a factor on the head's weights."""
    scale = reading.args["head_init_scale"]
    is_ours = not reading.settings["model.name"].startswith("timm/")
    if scale in (None, 1):
        reading.same("head_init_scale")
        if is_ours:
            map_initial_weights(reading, "", "timm")
    elif scale == 0 and is_ours:
        reading.same("head_init_scale")  # Without `model.weight_init`, the head starts at 0.
        map_initial_weights(reading, "torch's convolution default for patches, and a head of zeros")
    else:
        reading.cannot("head_init_scale", f"initial weights of the head times {scale:g}")


def _map_model(reading: Reading) -> None:
    """Map the model, its image size, and the evaluation settings of its published weights."""
    args = reading.args
    name = re.sub(r"^(hf[-_]hub:)?(timm/)?", "", args["model"])
    config = _published(name)
    settings: dict[str, Any] = {"model.name": f"timm/{name}"}
    plain = re.fullmatch(_PLAIN, name.partition(".")[0])
    if plain:
        settings = {"model.name": f"vit_{_SIZES[plain[1]]}{plain[3]}"}
        settings |= {"model.dist_token": True} if plain[2] else {}
        if name.startswith("deit3_"):
            settings |= {"model.init_values": 1e-6, "model.no_embed_class": True}
    reading.same("model", settings)
    _map_size(reading, config["input_size"])
    if args["gp"] is None:
        reading.same("gp")
    elif plain and args["gp"] in ("avg", "token", "map"):
        reading.same("gp", {"model.global_pool": args["gp"]})
    else:
        reading.cannot("gp", f"the pooling {args['gp']} for this model")
    _map_fields(reading, is_plain=bool(plain))
    rate = args["drop_path"]
    reading.same("drop_path", {"model.drop_path_rate": rate} if rate else {})
    reading.expect_off({"drop": "dropout before the head"})
    for key, value in (("crop_pct", config["crop_pct"]),):
        reading.same(key, {"eval.crop_pct": args[key] or value}, "" if args[key] else "the model's")
    channels = reading.settings.get("model.in_chans", 3)
    for key in ("mean", "std"):
        statistics = list(args[key] or config[key])
        if len(statistics) != channels:
            statistics = [fmean(statistics)] * channels  # Imitates timm's adapt_to_chs.
        reading.same(key, {f"data.{key}": statistics}, "" if args[key] else "the model's")
    classes = {"model.num_classes": args["num_classes"]} if args["num_classes"] else {}
    reading.same("num_classes", classes)
    if re.match(r"(vit|naflexvit|flexivit|deit|beit|eva)", name):
        reading.inert("dist_bn", "the model has no batch norm")
    elif args["dist_bn"] == "reduce":
        text = "batch norm statistics: timm averages them over GPUs, this project uses rank 0's"
        reading.differs("dist_bn", text)
    else:
        reading.same("dist_bn")
    weights = args["pretrained_path"] or args["initial_checkpoint"]
    start: dict[str, Any] = {}
    if args["pretrained"] and not weights:
        start["init.checkpoint"] = config["hub_name"]
        if args["num_classes"]:
            start["init.reset_head"] = True
    reading.same("pretrained", start)
    reading.same(
        "pretrained_path initial_checkpoint", {"init.checkpoint": weights} if weights else {}
    )


def _published(name: str) -> dict[str, Any]:
    """Return timm's preprocessing and Hub name for a model. Raises ValueError if unknown."""
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            "recipes for timm's train.py need timm to look up the model's settings, but timm is not"
            " installed: pip install timm"
        ) from error
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models())
        raise ValueError(f"--model {name}: timm {timm.__version__} has no such model{hint}")
    config = timm.models.get_pretrained_cfg(name)
    assert config is not None, "every model of timm has a config"
    return {
        "hub_name": config.hf_hub_id,
        "input_size": config.input_size,
        "crop_pct": config.crop_pct or 0.875,
        "mean": config.mean,
        "std": config.std,
    }


def _map_size(reading: Reading, published: tuple[int, int, int]) -> None:
    args = reading.args
    channels, height, width = published
    in_kwargs = args["model_kwargs"].get("img_size")
    if args["input_size"]:
        channels, height, width = args["input_size"]
    elif args["img_size"]:
        height = width = args["img_size"]
    elif in_kwargs:
        height = width = in_kwargs
    channels = args["in_chans"] or channels
    size = {"model.image_size": height if height == width else [height, width]}
    if channels != 3:
        size["model.in_chans"] = channels
    reading.same("input_size img_size in_chans", size)


def _map_fields(reading: Reading, is_plain: bool) -> None:
    fields = {k: v for k, v in reading.args["model_kwargs"].items() if k != "img_size"}
    ours = {f"model.{key}": value for key, value in fields.items()}
    lacking = [key for key in ours if not reading.has_setting(key)]
    if lacking:
        text = "arguments of the model: " + ", ".join(key.partition(".")[2] for key in lacking)
        reading.cannot("model_kwargs", text, {k: v for k, v in ours.items() if k not in lacking})
    else:
        reading.same("model_kwargs", ours)
    bias = reading.args["head_init_bias"]
    if bias is None or not is_plain:
        reading.expect_off({"head_init_bias": "the initial bias of the head"})
    else:
        reading.same("head_init_bias", {"model.init_head_bias": bias})


_OF_AUGMENTATION = (
    "train_crop_mode scale ratio hflip aa color_jitter color_jitter_prob reprob remode recount"
    " resplit"
)


def _map_images(reading: Reading, is_distributed: bool) -> None:
    if reading.args["no_aug"]:
        _map_no_augmentation(reading)
    else:
        _map_augmentation(reading)
    _map_repeats(reading, is_distributed)


def _map_no_augmentation(reading: Reading) -> None:
    """Map `--no-aug`. A crop scale of 1 and an aspect ratio of 1 select the central square."""
    window = {"augment.crop_scale": [1.0, 1.0], "augment.crop_ratio": [1.0, 1.0]}
    reading.same("no_aug", {**window, "augment.hflip_prob": 0.0})
    reading.inert(_OF_AUGMENTATION, "--no-aug")
    if reading.args["train_interpolation"] == "random":
        reading.args["train_interpolation"] = "bilinear"  # timm's interpolation for --no-aug
    _map_interpolation(reading)


def _map_augmentation(reading: Reading) -> None:
    args = reading.args
    reading.same("no_aug")
    mode = args["train_crop_mode"] or "rrc"
    if mode == "rrc":
        reading.same("train_crop_mode")
    else:
        reading.cannot("train_crop_mode", f"crops {mode}, which keep the aspect ratio")
    reading.same("scale", {"augment.crop_scale": list(args["scale"])})
    reading.same("ratio", {"augment.crop_ratio": list(args["ratio"])})
    reading.same("hflip", {"augment.hflip_prob": args["hflip"]})
    _map_interpolation(reading)
    map_policy(reading, args["train_interpolation"])
    jitters = args["aa"] in ("", None, "3a")
    map_color_jitter(reading, applies=jitters)
    if args["color_jitter_prob"] is None or not (jitters and args["color_jitter"]):
        reading.inert("color_jitter_prob", "--color-jitter-prob or --color-jitter is off")
    else:
        reading.cannot("color_jitter_prob", "color changes in a share of the images")
    map_erasing(reading)


def _map_repeats(reading: Reading, is_distributed: bool) -> None:
    repeats = int(reading.args["aug_repeats"])
    if repeats > 1 and is_distributed:
        settings = {"order.aug_repeats": repeats, "order.aug_repeats_form": "sampler"}
        reading.same("aug_repeats", settings)
    elif repeats > 1:
        reading.inert("aug_repeats", "a single process has no distributed sampler")
    else:
        reading.same("aug_repeats")


def _map_interpolation(reading: Reading) -> None:
    args = reading.args
    training = args["train_interpolation"]
    if training in ("bicubic", "bilinear"):
        reading.same("train_interpolation", {"data.interpolation": training})
    else:
        text = "timm chooses bilinear or bicubic for each training image, this project uses bicubic"
        reading.differs("train_interpolation", text, {"data.interpolation": "bicubic"})
    ours = training if training in ("bicubic", "bilinear") else "bicubic"
    theirs = args["interpolation"] or "bicubic"
    if theirs == ours:
        reading.same("interpolation")
    else:
        text = f"timm resizes by {theirs} for evaluation, this project by {ours} as in training"
        reading.differs("interpolation", text)


def _map_mixup_off_epoch(reading: Reading) -> None:
    args = reading.args
    last = args["mixup_off_epoch"]
    mixes = args["mixup"] > 0 or args["cutmix"] > 0
    off = {"augment.mixup_off_epoch": last} if last and mixes and last < args["epochs"] else {}
    reading.same("mixup_off_epoch", off)


def _map_loss(reading: Reading) -> None:
    args = reading.args
    if not args["bce_loss"]:
        reading.same("bce_loss")
        reading.inert("bce_sum bce_target_thresh bce_pos_weight", "--bce-loss is off")
        return
    reading.expect_off({"bce_pos_weight": "a weight for positive targets"})
    threshold = args["bce_target_thresh"]
    names = "bce_loss bce_sum bce_target_thresh"
    if threshold is not None and threshold < args["smoothing"] / 1000:
        text = "with this threshold, smoothing makes all targets 1: replaced by cross-entropy"
        reading.cannot(names, text)
        return
    bce = {"loss.name": "bce", "loss.bce_sum": args["bce_sum"], "loss.bce_target_thresh": threshold}
    reading.same(names, bce)


def _rate(args: dict[str, Any], batch: int) -> tuple[float, str]:
    """Return the peak learning rate and its formula (train.py, `if not args.lr`)."""
    if args["lr"]:
        return args["lr"], ""
    ratio = batch / args["lr_base_size"]
    name = args["opt"].lower()
    scale = args["lr_base_scale"] or ("sqrt" if "ada" in name or "lamb" in name else "linear")
    formula = f"{args['lr_base']:g} x {batch} / {args['lr_base_size']}"
    if scale == "sqrt":
        return args["lr_base"] * ratio**0.5, formula.replace("x ", "x sqrt(") + ")"
    return args["lr_base"] * ratio, formula


def _note_rate_for_sgd(reading: Reading, lr: float) -> None:
    """Add a note if Adam or LAMB runs with timm's default learning rate, which is meant for SGD."""
    is_adaptive = reading.settings["optim.name"] in ("adamw", "nadamw", "lamb")
    if is_adaptive and not reading.stated & {"lr", "lr_base"} and lr >= 0.01:
        text = (
            f"note: the command has neither --lr nor --lr-base, so timm's default gives a learning"
            f" rate of {lr:g}, which suits SGD and is usually far too high for"
            f" {reading.args['opt']}: pass --lr"
        )
        reading.same("", text=text)


_OF_TEACHER = (
    "kd_distill_type kd_loss_type distill_loss_weight task_loss_weight kd_temperature"
    " kd_student_feature_dim kd_teacher_feature_dim kd_token_distill_type"
)


def _map_teacher(reading: Reading) -> None:
    """Map distillation (timm/task/distillation.py, token_distillation.py)."""
    args = reading.args
    name = args["kd_model_name"]
    distill_type = args["kd_distill_type"]
    if name is None:
        reading.same("kd_model_name")
        reading.inert(_OF_TEACHER, "the recipe has no teacher")
        return
    if distill_type == "feature":
        text = "features of a teacher as targets, through a trained projection"
        reading.cannot(f"kd_model_name {_OF_TEACHER}", text)
        return
    of_task, of_teacher = args["task_loss_weight"], args["distill_loss_weight"]
    if of_teacher is None:
        of_teacher = 1.0 if of_task is None else 1.0 - of_task
    of_task = 1.0 if of_task is None else of_task
    if of_teacher <= 0 or of_task < 0:
        raise ValueError(
            f"--task-loss-weight {of_task:g} leaves {of_teacher:g} for the teacher: pass"
            " positive weights, or omit --kd-model-name"
        )
    settings = {"distill.teacher": f"{name}.safetensors", "distill.teacher_model": name}
    reading.same("kd_model_name", settings, "save timm's weights of the teacher to this path")
    weights = {"distill.task_loss_weight": of_task, "distill.distill_loss_weight": of_teacher}
    reading.same("task_loss_weight distill_loss_weight", weights)
    reading.inert("kd_student_feature_dim kd_teacher_feature_dim", "no features are compared")
    reading.same("kd_loss_type")
    has_two_heads = "model.dist_token" in reading.settings
    if distill_type == "logit" and has_two_heads:
        text = "timm trains the mean of both heads on both targets, this project each head on one"
        reading.differs("kd_distill_type", text)
    elif distill_type == "token" and not has_two_heads:
        raise ValueError(
            f"--kd-distill-type token: {args['model']} has no second head: use"
            " deit_{tiny,small,base}_distilled_patch16_{224,384}, or --kd-distill-type logit"
        )
    else:
        reading.same("kd_distill_type")
    kind = args["kd_token_distill_type"] if distill_type == "token" else "soft"
    if distill_type == "token":
        reading.same("kd_token_distill_type", {"distill.distill_type": kind})
    else:
        reading.same("", {"distill.distill_type": "soft"})
        reading.inert("kd_token_distill_type", "only for --kd-distill-type token")
    if kind == "hard":
        reading.inert("kd_temperature", "only for soft distillation")
    else:
        reading.same("kd_temperature", {"distill.temperature": args["kd_temperature"]})


def _map_schedule(reading: Reading, lr: float) -> None:
    args = reading.args
    epochs = args["epochs"]
    warmup = args["warmup_epochs"]
    prefix = warmup if args["warmup_prefix"] else 0
    cooldown = args["cooldown_epochs"] if args["sched"] == "cosine" else 0
    parts = [f"{epochs}"]
    if prefix:
        parts.insert(0, f"{prefix} of warm-up")
    if cooldown:
        parts.append(f"{cooldown} of cool-down")
    length = {"train.epochs": prefix + epochs + cooldown}
    reading.same("epochs warmup_prefix", length, " + ".join(parts) if len(parts) > 1 else "")
    if args["lr_cycle_limit"] == 1:
        reading.same("lr_cycle_limit")
    else:
        reading.cannot("lr_cycle_limit", f"{args['lr_cycle_limit']} cycles of the schedule")
    settings = {
        "schedule.name": "cosine",
        "schedule.interval": "step" if args["sched_on_updates"] else "epoch",
        "schedule.warmup_epochs": warmup,
        "schedule.warmup_lr": min(args["warmup_lr"], lr),
        "schedule.warmup_prefix": args["warmup_prefix"],
        "schedule.min_lr": min(args["min_lr"], lr),
    }
    names = "sched sched_on_updates min_lr warmup_lr warmup_epochs lr_k_decay"
    steps = "decay_epochs decay_rate decay_milestones patience_epochs"
    if args["sched"] != "cosine":
        text = f"the schedule {args['sched']}: replaced by a cosine"
        if args["sched"] == "step":
            at_end = timm_step(lr, args["decay_epochs"], args["decay_rate"])(epochs - 0.5)
            text += f"; timm's ends at {at_end:.2g}"
        reading.cannot(f"{names} {steps} cooldown_epochs", text, with_effect(settings))
        return
    reading.inert(steps, "the schedule is a cosine")
    if cooldown and settings["schedule.min_lr"]:
        reading.same("cooldown_epochs", {"schedule.cooldown_epochs": cooldown})
    elif cooldown:
        text = f"timm adds {cooldown} epochs at learning rate 0, this project lengthens the cosine"
        reading.differs("cooldown_epochs", text)
    else:
        reading.same("cooldown_epochs")
    theirs = timm_cosine(
        lr,
        epochs,
        warmup_epochs=warmup,
        warmup_lr=args["warmup_lr"],
        min_lr=args["min_lr"],
        warmup_prefix=args["warmup_prefix"],
        k_decay=args["lr_k_decay"],
        per_step=args["sched_on_updates"],
    )
    reasons = "--lr-k-decay changes the shape of the cosine" if args["lr_k_decay"] != 1 else ""
    map_rate(reading, names, theirs, settings, reasons)


def _map_precision(reading: Reading) -> None:
    args = reading.args
    theirs = "bf16" if args["amp_dtype"] == "bfloat16" else "fp16 with a scaled loss"
    reading.same("amp amp_dtype apex_amp native_amp")
    is_mixed = args["amp"] or args["apex_amp"] or args["native_amp"]
    map_precision(reading, theirs if is_mixed else "fp32")
    if args["model_dtype"] in (None, "float32"):
        reading.same("model_dtype")
    else:
        reading.cannot("model_dtype", f"weights in {args['model_dtype']}")
