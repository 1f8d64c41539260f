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

from vit.config.hints import all_keys
from vit.extras.recipes.rates import map_rate, timm_cosine, with_effect
from vit.extras.recipes.reading import Case, Reading
from vit.extras.recipes.timm_common import (
    TIMM_CASES,
    map_batch,
    map_clipping,
    map_initial_weights,
    map_layer_decay,
    map_optimizer,
    map_policy,
    map_precision,
    map_repeats,
)
from vit.extras.recipes.timm_table import TABLE, note_old_defaults
from vit.layers.presets import SIZES
from vit.system.spelling import did_you_mean

__all__ = ["TABLE", "map_arguments"]
_PLAIN = r"(?:vit|deit|deit3)_(tiny|small|base|large|huge)(_distilled)?_patch(\d+)_(\d+)"
"""The pattern for names of timm models that equal a model of this project."""


_STEPS = "decay_epochs decay_rate decay_milestones patience_epochs"
_CASES = (
    Case(
        "same",
        "no_aug",
        lambda a: a["no_aug"],
        # A crop scale of 1 and a ratio of 1 select the central square.
        settings={
            "augment.crop_scale": [1.0, 1.0],
            "augment.crop_ratio": [1.0, 1.0],
            "augment.hflip_prob": 0.0,
        },
    ),
    Case(
        "inert",
        "train_crop_mode scale ratio hflip aa color_jitter color_jitter_prob reprob remode recount"
        " resplit",
        lambda a: a["no_aug"],
        "--no-aug",
    ),
    Case(
        "cannot",
        "train_crop_mode",
        lambda a: a["train_crop_mode"] not in (None, "", "rrc"),
        "crops {train_crop_mode}, which keep the aspect ratio",
    ),
    Case(
        "inert",
        "color_jitter_prob",
        lambda a: (
            a["color_jitter_prob"] is None
            or not a["color_jitter"]
            or a["aa"] not in ("", None, "3a")
        ),
        "--color-jitter-prob or --color-jitter is off",
    ),
    Case("cannot", "color_jitter_prob", lambda a: True, "color changes in a share of the images"),
    Case(
        "same",
        "mixup_off_epoch",
        lambda a: max(a["mixup"], a["cutmix"]) <= 0 or a["mixup_off_epoch"] >= a["epochs"],
    ),
    Case(
        "inert",
        "bce_sum bce_target_thresh bce_pos_weight",
        lambda a: not a["bce_loss"],
        "--bce-loss is off",
    ),
    Case(
        "cannot",
        "bce_loss bce_sum bce_target_thresh",
        lambda a: (
            a["bce_loss"]
            and a["bce_target_thresh"] is not None
            and a["bce_target_thresh"] < a["smoothing"] / 1000
        ),
        "with this threshold, smoothing makes all targets 1: replaced by cross-entropy",
    ),
    Case(
        "same",
        "bce_loss bce_sum bce_target_thresh",
        lambda a: a["bce_loss"],
        settings=lambda a: {
            "loss.name": "bce",
            "loss.bce_sum": a["bce_sum"],
            "loss.bce_target_thresh": a["bce_target_thresh"],
        },
    ),
    Case(
        "cannot",
        "lr_cycle_limit",
        lambda a: a["lr_cycle_limit"] != 1,
        "{lr_cycle_limit} cycles of the schedule",
    ),
    Case(
        "same",
        "cooldown_epochs",
        lambda a: a["sched"] == "cosine" and a["cooldown_epochs"] and a["min_lr"],
        settings=lambda a: {"schedule.cooldown_epochs": a["cooldown_epochs"]},
    ),
    Case(
        "differs",
        "cooldown_epochs",
        lambda a: a["sched"] == "cosine" and a["cooldown_epochs"],
        "timm adds {cooldown_epochs} epochs at learning rate 0, this project lengthens the cosine",
    ),
    Case(
        "inert",
        "dist_bn",
        lambda a: re.match(
            r"(hf[-_]hub:)?(timm/)?(vit|naflexvit|flexivit|deit|beit|eva)", a["model"]
        ),
        "the model has no batch norm",
    ),
    Case(
        "differs",
        "dist_bn",
        lambda a: a["dist_bn"] == "reduce",
        "batch norm statistics: timm averages them over GPUs, this project uses rank 0's",
    ),
    Case("inert", _STEPS, lambda a: a["sched"] == "cosine", "the schedule is a cosine"),
    Case("inert", "model_ema_decay", lambda a: not a["model_ema"], "the average is off"),
    Case(
        "inert",
        "model_ema_warmup",
        lambda a: a["model_ema_warmup"] and not a["model_ema"],
        "the average is off",
    ),
    Case(
        "same",
        "model_ema_warmup",
        lambda a: a["model_ema_warmup"],
        settings={"train.ema_warmup": True, "train.ema_warmup_power": 2 / 3},
    ),
    Case(
        "cannot",
        "model_dtype",
        lambda a: a["model_dtype"] not in (None, "float32"),
        "weights in {model_dtype}",
    ),
    Case(
        "cannot",
        "head_init_scale",
        lambda a: a["head_init_scale"] is not None,
        "initial weights of the head times {head_init_scale}",
    ),
)


def map_arguments(reading: Reading, num_gpus: int | None, is_distributed: bool) -> None:
    """Map the arguments of a command or a YAML file of timm's train.py."""
    args = reading.args
    steps = max(1, args["grad_accum_steps"])
    batch = map_batch(reading, "batch_size grad_accum_steps", num_gpus, steps)
    _map_model(reading)
    if not args["no_aug"]:
        map_policy(reading, args["train_interpolation"])
    elif args["train_interpolation"] == "random":
        args["train_interpolation"] = "bilinear"  # timm's choice for --no-aug
    _map_interpolation(reading)
    map_repeats(reading, "aug_repeats", int(args["aug_repeats"]), is_distributed)
    reading.apply((*_CASES, *TIMM_CASES))
    lr, formula = _rate(args, batch)
    map_optimizer(reading, lr, formula, "lr lr_base lr_base_size lr_base_scale")
    _note_rate_for_sgd(reading, lr)
    map_clipping(reading)
    map_layer_decay(reading, "layer_decay", args["layer_decay"], "timm")
    _map_schedule(reading, lr)
    theirs = "bf16" if args["amp_dtype"] == "bfloat16" else "fp16 with a scaled loss"
    is_mixed = args["amp"] or args["apex_amp"] or args["native_amp"]
    map_precision(reading, theirs if is_mixed else "fp32")
    if args["head_init_scale"] is None and not reading.settings["model.name"].startswith("timm/"):
        map_initial_weights(reading, "", "timm")
    note_old_defaults(reading)


def _map_model(reading: Reading) -> None:
    """Map the model, its image size, and the evaluation settings of its published weights."""
    args = reading.args
    name = re.sub(r"^(hf[-_]hub:)?(timm/)?", "", args["model"])
    config = _published(name)
    settings: dict[str, Any] = {"model.name": f"timm/{name}"}
    plain = re.fullmatch(_PLAIN, name.partition(".")[0])
    if plain:
        settings = {"model.name": f"vit_{SIZES[plain[1]]}{plain[3]}"}
        settings |= {"model.dist_token": True} if plain[2] else {}
        if name.startswith("deit3_"):
            settings |= {"model.init_values": 1e-6, "model.no_embed_class": True}
    reading.same("model", settings)
    _map_size(reading, config["input_size"])
    if plain and args["gp"] in ("avg", "token", "map"):
        reading.same("gp", {"model.global_pool": args["gp"]})
    elif args["gp"] is not None:
        reading.cannot("gp", f"the pooling {args['gp']} for this model")
    _map_fields(reading, is_plain=bool(plain))
    crop = {"eval.crop_pct": args["crop_pct"] or config["crop_pct"]}
    reading.same("crop_pct", crop, "" if args["crop_pct"] else "the model's")
    channels = reading.settings.get("model.in_chans", 3)
    for key in ("mean", "std"):
        statistics = list(args[key] or config[key])
        if len(statistics) != channels:
            statistics = [fmean(statistics)] * channels  # like timm's adapt_to_chs
        reading.same(key, {f"data.{key}": statistics}, "" if args[key] else "the model's")
    weights = args["pretrained_path"] or args["initial_checkpoint"]
    if args["pretrained"] and not weights:
        head = {"init.reset_head": True} if args["num_classes"] else {}
        reading.same("pretrained", {"init.checkpoint": config["hub_name"], **head})
    file = {"init.checkpoint": weights} if weights else {}
    reading.same("pretrained_path initial_checkpoint", file)


def _published(name: str) -> dict[str, Any]:
    """Return timm's preprocessing and Hub name for a model. Raises ValueError if unknown."""
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            "recipes of timm's train.py need timm for the model's settings, and timm is not"
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
    lacking = [key for key in ours if key not in all_keys()]
    if lacking:
        text = "arguments of the model: " + ", ".join(key.partition(".")[2] for key in lacking)
        reading.cannot("model_kwargs", text, {k: v for k, v in ours.items() if k not in lacking})
    else:
        reading.same("model_kwargs", ours)
    bias = reading.args["head_init_bias"]
    if bias is not None and is_plain:
        reading.same("head_init_bias", {"model.init_head_bias": bias})


def _map_interpolation(reading: Reading) -> None:
    training = reading.args["train_interpolation"]
    ours = training if training in ("bicubic", "bilinear") else "bicubic"
    if training != ours:
        text = "timm chooses bilinear or bicubic for each training image, this project uses bicubic"
        reading.differs("train_interpolation", text, {"data.interpolation": ours})
    theirs = reading.args["interpolation"] or "bicubic"
    if theirs != ours:
        text = f"timm resizes by {theirs} for evaluation, this project by {ours} as in training"
        reading.differs("interpolation", text)


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
    """Add a note if Adam or LAMB uses timm's default learning rate, which is meant for SGD."""
    is_adaptive = reading.settings["optim.name"] in ("adamw", "nadamw", "lamb")
    if is_adaptive and not reading.stated & {"lr", "lr_base"} and lr >= 0.01:
        text = (
            f"note: the command has neither --lr nor --lr-base, so timm's default gives a learning"
            f" rate of {lr:g}, which suits SGD and is usually far too high for"
            f" {reading.args['opt']}: pass --lr"
        )
        reading.same("", text=text)


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
    settings = {
        "schedule.name": "cosine",
        "schedule.interval": "step" if args["sched_on_updates"] else "epoch",
        "schedule.warmup_epochs": warmup,
        "schedule.warmup_lr": min(args["warmup_lr"], lr),
        "schedule.warmup_prefix": args["warmup_prefix"],
        "schedule.min_lr": min(args["min_lr"], lr),
    }
    names = "sched sched_on_updates min_lr warmup_lr warmup_epochs lr_k_decay"
    if args["sched"] != "cosine":
        text = f"the schedule {args['sched']}: replaced by a cosine"
        reading.cannot(f"{names} {_STEPS} cooldown_epochs", text, with_effect(settings))
        return
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
