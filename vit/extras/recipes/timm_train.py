"""Map commands and YAML files of timm's train.py to settings of this project.

The YAML files are published as train_hparams.yaml or args.yaml. In timm, the batch size is per GPU.
Without --lr, the learning rate is --lr-base scaled by the batch size, or by its square root for
Adam and LAMB. Image size, crop and mean default to those of the model. Color jitter applies only
without a policy. The learning rate changes once per epoch and starts at --warmup-lr. A cool-down
adds epochs, and so does the warm-up with --warmup-prefix.
"""

import re
from collections.abc import Mapping
from functools import cache, partial
from statistics import fmean
from typing import Any

from vit.config.hints import all_keys
from vit.extras.recipes.arguments import read_words
from vit.extras.recipes.rates import map_schedule, timm_cosine, timm_step, timm_wsd
from vit.extras.recipes.reading import (
    Findings,
    Mapped,
    Program,
    Reading,
    Settings,
    cannot,
    differs,
    implied,
    inert,
    same,
    same_if_used,
)
from vit.extras.recipes.timm_common import (
    initial_weights,
    map_average,
    map_batch,
    map_clipping,
    map_color_jitter,
    map_erasing,
    map_mixing,
    map_optimizer,
    map_policy,
    map_repeats,
    precision,
    train_interpolation,
)
from vit.extras.recipes.timm_table import OLDER_DEFAULTS, TABLE
from vit.layers.presets import SIZES
from vit.system.spelling import did_you_mean
from vit.weights.published import in_our_terms

_PLAIN = (
    r"(vit|deit|deit3)_(?P<size>tiny|small|base|large|huge)(?P<distilled>_distilled)?"
    r"_patch(?P<patch>\d+)_\d+"
)
"""Matches the names of timm models that are identical to a model of this project."""


def _map_initial_weights(reading: Reading) -> Findings:
    """Map the initial weights and `--head-init-scale`, a factor on the head's weights."""
    scale = reading.args["head_init_scale"]
    is_ours = _plain(reading) is not None
    if scale in (None, 1):
        yield same("head_init_scale")
        if is_ours:
            yield initial_weights(reading, "", "timm")
    elif scale == 0 and is_ours:
        yield same("head_init_scale")  # Without `model.weight_init`, the head starts at 0.
        yield initial_weights(
            reading, "torch's convolution default for patches, and a head of zeros"
        )
    else:
        yield cannot("head_init_scale", f"initial weights of the head times {scale:g}")


def _plain(reading: Reading) -> re.Match[str] | None:
    """Return a match if the model is identical to a model of this project."""
    return re.fullmatch(_PLAIN, _model_name(reading).partition(".")[0])


def _model_name(reading: Reading) -> str:
    return re.sub(r"^(hf[-_]hub:)?(timm/)?", "", reading.args["model"])


def _map_model(reading: Reading) -> Findings:
    """Map the model and its image size, which is the published one unless `--input-size`,
    `--img-size` or `--model-kwargs` sets it."""
    args = reading.args
    name = _model_name(reading)
    published = _published(name)

    settings: Settings = {"model.name": f"timm/{name}"}
    plain = _plain(reading)
    if plain:
        settings = {"model.name": f"vit_{SIZES[plain['size']]}{plain['patch']}"}
        if plain["distilled"]:
            settings["model.dist_token"] = True
        if name.startswith("deit3_"):
            defaults = {"init_values": 1e-6, "no_embed_class": True}
            stated = args["model_kwargs"]
            settings |= {f"model.{key}": defaults[key] for key in defaults if key not in stated}
    yield same("model", settings)

    channels, height, width = args["input_size"] or published.input_size
    side = args["img_size"] or args["model_kwargs"].get("img_size")
    if side and not args["input_size"]:
        height = width = side
    channels = args["in_chans"] or channels
    size = {"model.image_size": height if height == width else [height, width]}
    if channels != 3:
        size["model.in_chans"] = channels
    yield same("input_size img_size in_chans", size)


def _map_pooling(reading: Reading) -> Findings:
    pool = reading.args["gp"]
    if pool is None:
        yield same("gp")
    elif _plain(reading) and pool in ("avg", "token", "map"):
        ours = in_our_terms({**reading.args["model_kwargs"], "global_pool": pool})
        yield same("gp", {"model.global_pool": ours["global_pool"]})
    else:
        yield cannot("gp", f"the pooling {pool} for this model")


@cache
def _published(name: str) -> Any:
    """Return timm's `PretrainedCfg` for a model: preprocessing and Hub name. Raises ValueError if
    unknown."""
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
    return config


def _map_fields(reading: Reading) -> Findings:
    """Map `--model-kwargs` and `--head-init-bias`."""
    fields = {"global_pool": reading.args["gp"]} | reading.args["model_kwargs"]
    if _plain(reading):
        fields = in_our_terms(fields)

    # Other functions map the image size, and the pooling that `--gp` states.
    mapped = {"img_size", "global_pool"} if reading.args["gp"] else {"img_size"}
    stated = {key: v for key, v in fields.items() if key not in mapped and v is not None}
    lacking = [key for key in stated if f"model.{key}" not in all_keys()]
    ours = {f"model.{key}": value for key, value in stated.items() if key not in lacking}
    if lacking:
        yield cannot("model_kwargs", f"arguments of the model: {', '.join(lacking)}", ours)
    else:
        yield same("model_kwargs", ours)

    bias = reading.args["head_init_bias"]
    if bias is not None and _plain(reading):
        yield same("head_init_bias", {"model.init_head_bias": bias})
    elif bias:
        yield cannot("head_init_bias", "the initial bias of the head")
    else:
        yield same("head_init_bias")


def _map_view(reading: Reading) -> Findings:
    """Map `--crop-pct`, `--mean` and `--std`, which default to those of the model's weights."""
    args = reading.args
    published = _published(_model_name(reading))
    yield same(
        "crop_pct",
        {"eval.crop_pct": args["crop_pct"] or published.crop_pct or 0.875},
        "" if args["crop_pct"] else "the model's",
    )

    channels = reading.settings.get("model.in_chans", 3)
    for key in ("mean", "std"):
        statistics = list(args[key] or getattr(published, key))
        if len(statistics) != channels:
            statistics = [fmean(statistics)] * channels  # Imitates timm's adapt_to_chs.
        yield same(key, {f"data.{key}": statistics}, "" if args[key] else "the model's")


def _map_batch_norm(reading: Reading) -> Findings:
    if re.match(r"(vit|naflexvit|flexivit|deit|beit|eva)", _model_name(reading)):
        yield inert("dist_bn", "the model has no batch norm")
    elif reading.args["dist_bn"] == "reduce":
        yield differs(
            "dist_bn",
            "batch norm statistics: timm averages them over GPUs, this project uses rank 0's",
        )
    else:
        yield same("dist_bn")


def _map_weights(reading: Reading) -> Findings:
    """Map the initial weights: a file, or with `--pretrained` timm's weights of the model."""
    args = reading.args
    weights = args["pretrained_path"] or args["initial_checkpoint"]

    start: Settings = {}
    if args["pretrained"] and not weights:
        start["init.checkpoint"] = _published(_model_name(reading)).hf_hub_id
        if args["num_classes"]:
            start["init.reset_head"] = True

    yield same("pretrained", start)
    yield same(
        "pretrained_path initial_checkpoint", {"init.checkpoint": weights} if weights else {}
    )


def _map_no_augmentation(reading: Reading) -> Findings:
    """Map `--no-aug`. A crop scale of 1 and an aspect ratio of 1 select the central square."""
    if reading.args["no_aug"]:
        yield same(
            "no_aug",
            {
                "augment.crop_scale": [1.0, 1.0],
                "augment.crop_ratio": [1.0, 1.0],
                "augment.hflip_prob": 0.0,
            },
        )
        names = "train_crop_mode scale ratio hflip aa color_jitter color_jitter_prob reprob remode"
        yield inert(f"{names} recount resplit", "--no-aug")
    else:
        yield same("no_aug")


def _map_color_jitter_prob(reading: Reading) -> Findings:
    args = reading.args
    jitters = args["aa"] in ("", None, "3a") and args["color_jitter"]
    if args["color_jitter_prob"] is None or not jitters:
        yield inert("color_jitter_prob", "--color-jitter-prob or --color-jitter is off")
    else:
        yield cannot("color_jitter_prob", "color changes in a share of the images")


def _map_repeats(reading: Reading) -> Findings:
    return map_repeats(
        reading,
        "aug_repeats",
        int(reading.args["aug_repeats"]),
        "a single process has no distributed sampler",
    )


def _map_interpolation(reading: Reading) -> Findings:
    """Map the interpolation in training, which is also this project's in evaluation."""
    args = reading.args
    is_bilinear = args["no_aug"] and args["train_interpolation"] == "random"  # as in timm
    of_training = train_interpolation(
        "bilinear" if is_bilinear else args["train_interpolation"],
        "timm chooses bilinear or bicubic for each training image, this project uses bicubic",
    )
    yield of_training

    ours = of_training.settings["data.interpolation"]
    theirs = args["interpolation"] or "bicubic"
    if theirs == ours:
        yield same("interpolation")
    else:
        yield differs(
            "interpolation",
            f"timm resizes by {theirs} for evaluation, this project by {ours} as in training",
        )


def _map_mixup_off_epoch(reading: Reading) -> Findings:
    args = reading.args
    last = args["mixup_off_epoch"]
    mixes = args["mixup"] > 0 or args["cutmix"] > 0
    has_effect = mixes and last and last < args["epochs"]
    yield same("mixup_off_epoch", {"augment.mixup_off_epoch": last} if has_effect else {})


def _map_loss(reading: Reading) -> Findings:
    """Map the loss, which is `--loss` or, in older commands, `--bce-loss`."""
    args = reading.args
    loss = args["loss"] or ("bce" if args["bce_loss"] else "ce")
    threshold = args["bce_target_thresh"]
    names = "bce_loss loss bce_sum bce_target_thresh"

    if loss != "bce":
        if loss == "ce":
            yield same("bce_loss loss")
        else:
            yield cannot("bce_loss loss", f"the loss {loss}: replaced by cross-entropy")
        yield inert(
            "bce_sum bce_target_thresh bce_pos_weight loss_pos_weight",
            "the loss is not binary cross-entropy",
        )
    elif threshold is not None and threshold < args["smoothing"] / 1000:
        yield cannot(
            names, "with this threshold, smoothing makes all targets 1: replaced by cross-entropy"
        )
    else:
        yield same(
            names,
            {
                "loss.name": "bce",
                "loss.bce_sum": args["bce_sum"],
                "loss.bce_target_thresh": threshold,
            },
        )


def _map_optimizer(reading: Reading) -> Findings:
    """Map the optimizer, and note that timm's default learning rate is meant for SGD."""
    lr, formula = _rate(reading.args, reading.settings["data.global_batch_size"])
    findings = list(map_optimizer(reading, lr, formula, "lr lr_base lr_base_size lr_base_scale"))
    yield from findings

    is_adaptive = findings[0].settings["optim.name"] in ("adamw", "nadamw", "lamb")
    is_high_default = lr >= 0.01 and not reading.stated & {"lr", "lr_base"}
    if is_adaptive and is_high_default:
        yield same(
            "",
            text="note: the command has neither --lr nor --lr-base, so timm's default gives a"
            f" learning rate of {lr:g}, which suits SGD and is usually far too high for"
            f" {reading.args['opt']}: pass --lr",
        )


def _rate(args: Mapping[str, Any], batch: int) -> tuple[float, str]:
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


_OF_TEACHER = (
    "kd_distill_type kd_loss_type distill_loss_weight task_loss_weight kd_temperature"
    " kd_student_feature_dim kd_teacher_feature_dim kd_token_distill_type"
)


def _map_teacher(reading: Reading) -> Findings:
    """Map distillation (timm/task/distillation.py, token_distillation.py)."""
    args = reading.args
    name = args["kd_model_name"]
    if name is None:
        yield same("kd_model_name")
        yield inert(_OF_TEACHER, "the recipe has no teacher")
    elif args["kd_distill_type"] == "feature":
        yield cannot(
            f"kd_model_name {_OF_TEACHER}",
            "features of a teacher as targets, through a trained projection",
        )
    else:
        settings = {"distill.teacher": f"{name}.safetensors", "distill.teacher_model": name}
        loss_weights = _loss_weights(args["task_loss_weight"], args["distill_loss_weight"])
        yield same("kd_model_name", settings, "save timm's weights of the teacher to this path")
        yield same("task_loss_weight distill_loss_weight", loss_weights)
        yield inert("kd_student_feature_dim kd_teacher_feature_dim", "no features are compared")

        is_token = args["kd_distill_type"] == "token"
        yield from _map_token_targets(reading) if is_token else _map_logit_targets(reading)


def _map_token_targets(reading: Reading) -> Findings:
    """Map `--kd-distill-type token`, which trains a second head on the teacher's predictions."""
    args = reading.args
    if "model.dist_token" not in reading.settings:
        raise ValueError(
            f"--kd-distill-type token: {args['model']} has no second head: use"
            " deit_{tiny,small,base}_distilled_patch16_{224,384}, or --kd-distill-type logit"
        )

    kind = args["kd_token_distill_type"]
    yield same("kd_distill_type")
    yield same("kd_token_distill_type", {"distill.distill_type": kind})
    yield same_if_used(
        kind != "hard",
        "kd_temperature",
        {"distill.temperature": args["kd_temperature"]},
        "only for soft distillation",
    )


def _map_logit_targets(reading: Reading) -> Findings:
    """Map `--kd-distill-type logit` and others, which are soft distillation."""
    if reading.args["kd_distill_type"] == "logit" and "model.dist_token" in reading.settings:
        yield differs(
            "kd_distill_type",
            "timm trains the mean of both heads on both targets, this project each head on one",
        )
    else:
        yield same("kd_distill_type")
    yield implied({"distill.distill_type": "soft"})
    yield inert("kd_token_distill_type", "only for --kd-distill-type token")
    yield same("kd_temperature", {"distill.temperature": reading.args["kd_temperature"]})


def _loss_weights(of_task: float | None, of_teacher: float | None) -> Settings:
    """Return the settings for the weights of both losses. None selects timm's default."""
    if of_teacher is None:
        of_teacher = 1.0 if of_task is None else 1.0 - of_task
    if of_task is None:
        of_task = 1.0
    if of_teacher <= 0 or of_task < 0:
        raise ValueError(
            f"--task-loss-weight {of_task:g} leaves {of_teacher:g} for the teacher: pass"
            " positive weights, or omit --kd-model-name"
        )

    return {"distill.task_loss_weight": of_task, "distill.distill_loss_weight": of_teacher}


def _map_length(reading: Reading) -> Findings:
    """Map `--epochs`, to which a warm-up and a cool-down can be added."""
    args = reading.args
    epochs = args["epochs"]
    prefix = args["warmup_epochs"] if args["warmup_prefix"] else 0
    cooldown = args["cooldown_epochs"] if args["sched"] in ("cosine", "wsd") else 0

    parts = [f"{epochs}"]
    if prefix:
        parts.insert(0, f"{prefix} of warm-up")
    if cooldown:
        parts.append(f"{cooldown} of cool-down")
    yield same(
        "epochs warmup_prefix",
        {"train.epochs": prefix + epochs + cooldown},
        " + ".join(parts) if len(parts) > 1 else "",
    )


def _map_schedule(reading: Reading) -> Findings:
    """Map `--sched` and its arguments to a schedule of this project, or to the nearest one."""
    args = reading.args
    kind = args["sched"]
    settings = {
        "schedule.name": "cosine",
        "schedule.interval": "step" if args["sched_on_updates"] else "epoch",
        "schedule.warmup_epochs": args["warmup_epochs"],
        "schedule.warmup_lr": args["warmup_lr"],
        "schedule.warmup_prefix": args["warmup_prefix"],
        "schedule.min_lr": args["min_lr"],
    }
    names = "sched sched_on_updates min_lr warmup_lr warmup_epochs"
    of_step = "decay_rate decay_milestones patience_epochs lr_stable_timescale"

    if kind == "wsd":
        yield from _map_wsd(reading, names, settings, of_step)
    elif kind in ("constant", "none"):
        has_warmup = kind == "constant" and args["warmup_epochs"]
        kept = ("interval", "warmup_epochs", "warmup_lr") if has_warmup else ()
        ours = {f"schedule.{key}": settings[f"schedule.{key}"] for key in kept}
        yield same(names, {"schedule.name": "constant", **ours})
        yield inert(
            f"{of_step} lr_k_decay decay_epochs lr_decay_fn cooldown_epochs", "the rate is constant"
        )
    else:
        yield from _map_cosine(reading, names, settings, f"decay_epochs lr_decay_fn {of_step}")


def _map_cosine(reading: Reading, names: str, settings: Mapping[str, Any], unused: str) -> Findings:
    """Map `--sched cosine`, and replace schedules without an equivalent by a cosine.

    Args:
        reading: The reading, with findings for learning rate, length and batch size.
        names: The arguments of all schedules.
        settings: This project's settings for `names`.
        unused: The arguments of other schedules.
    """
    args = reading.args
    kind = args["sched"]
    note = ""
    if kind == "cosine":
        cooldown = _cooldown(reading)
        yield cooldown
        reading = reading.plus([cooldown])
    else:
        unused += " cooldown_epochs"

    if kind == "step":
        at_end = timm_step(
            reading.settings["optim.lr"],
            args["epochs"] - 0.5,
            args["decay_epochs"] or 90,
            args["decay_rate"],
        )
        note = f"; timm's ends at {at_end:.2g}"

    yield from map_schedule(
        reading,
        f"{names} lr_k_decay",
        settings,
        partial(
            timm_cosine,
            warmup_prefix=args["warmup_prefix"],
            k_decay=args["lr_k_decay"],
            per_step=args["sched_on_updates"],
        ),
        kind="" if kind == "cosine" else kind,
        unused=unused,
        note=note,
        reasons="--lr-k-decay changes the shape of the cosine" if args["lr_k_decay"] != 1 else "",
        epochs=args["epochs"],
    )


def _map_wsd(reading: Reading, names: str, settings: Mapping[str, Any], unused: str) -> Findings:
    """Map `--sched wsd` (timm/scheduler/scheduler_factory.py). Arguments: see `_map_cosine`."""
    args = reading.args
    warmup = args["warmup_epochs"]
    after_warmup = args["epochs"] - (0 if args["warmup_prefix"] else warmup)
    decay = _decay_epochs(args, after_warmup)
    cooldown = _cooldown(reading)
    yield cooldown

    form = args["lr_decay_fn"] or "1-sqrt"
    ours = {
        **settings,
        "schedule.name": "wsd",
        "schedule.decay_fraction": decay / reading.settings["train.epochs"],
        # timm's `power` has the exponent 1/2 here.
        "schedule.decay_form": "linear" if form == "linear" else "1-sqrt",
    }
    del ours["schedule.warmup_prefix"]  # the warm-up is always first

    yield from map_schedule(
        reading.plus([cooldown]),
        f"{names} decay_epochs lr_decay_fn",
        ours,
        partial(timm_wsd, decay_epochs=decay, decay_fn=form, per_step=args["sched_on_updates"]),
        unused=f"{unused} lr_k_decay",
        reasons=f"--lr-decay-fn {form}" if form in ("cosine", "exp") else "",
        epochs=warmup + after_warmup,
    )


def _decay_epochs(args: Mapping[str, Any], after_warmup: float) -> float:
    """Return the length of the decay of `--sched wsd`, in epochs.

    In timm, a value below 1 is a fraction of the epochs after the warm-up. The length is rounded to
    whole epochs unless the rate changes each step.
    """
    stated = 0.2 if args["decay_epochs"] is None else args["decay_epochs"]
    length = stated * after_warmup if 0 < stated < 1 else stated
    decay = length if args["sched_on_updates"] else round(length)
    if not 0 < decay <= after_warmup:
        raise ValueError(
            f"--decay-epochs {stated:g}: timm rejects a decay of {decay:g} epochs in"
            f" {after_warmup} epochs after the warm-up"
        )
    return decay


def _cooldown(reading: Reading) -> Mapped:
    cooldown = reading.args["cooldown_epochs"]
    if cooldown and min(reading.args["min_lr"], reading.settings["optim.lr"]) == 0:
        return differs(
            "cooldown_epochs",
            f"timm adds {cooldown} epochs at learning rate 0, this project lengthens the schedule",
        )

    return same("cooldown_epochs", {"schedule.cooldown_epochs": cooldown} if cooldown else {})


def _map_ema_warmup(reading: Reading) -> Findings:
    warmup = {"ema.warmup": 2 / 3} if reading.args["model_ema_warmup"] else {}
    is_used = reading.args["model_ema"] or not warmup
    yield same_if_used(is_used, "model_ema_warmup", warmup, "the average is off")


def _map_precision(reading: Reading) -> Findings:
    args = reading.args
    yield same("amp amp_dtype apex_amp native_amp")

    theirs = "bf16" if args["amp_dtype"] == "bfloat16" else "fp16 with a scaled loss"
    is_mixed = args["amp"] or args["apex_amp"] or args["native_amp"]
    yield precision(theirs if is_mixed else "fp32")


def _note_old_defaults(reading: Reading) -> Findings:
    """Note omitted arguments whose defaults differed in earlier versions of timm."""
    inert_names = [finding.theirs for finding in reading.findings if finding.verdict == "inert"]
    irrelevant = reading.stated.union(*inert_names)
    parts = []
    for day, defaults in OLDER_DEFAULTS.items():
        unstated = [
            f"{flag} {value}"
            for flag, value in defaults.items()
            if flag.removeprefix("--").replace("-", "_") not in irrelevant
        ]
        if unstated:
            parts.append(f"until {day} {' '.join(unstated)}")

    # --lr-base was added together with the current defaults.
    if parts and "lr_base" not in reading.stated:
        yield differs(
            "",
            "arguments that are not given have timm's current defaults. For an older command, pass"
            f" the old defaults: {'; '.join(parts)}. For a fork, pass the defaults of its train.py",
        )


PROGRAM = Program(
    parse=lambda command: read_words(TABLE, command.words),
    handlers={
        "batch_size": map_batch,
        "model": _map_model,
        "gp": _map_pooling,
        "model_kwargs": _map_fields,
        "crop_pct": _map_view,
        "dist_bn": _map_batch_norm,
        "pretrained": _map_weights,
        "no_aug": _map_no_augmentation,
        "train_interpolation": _map_interpolation,
        "aa": map_policy,
        "color_jitter": map_color_jitter,
        "color_jitter_prob": _map_color_jitter_prob,
        "remode": map_erasing,
        "aug_repeats": _map_repeats,
        "mixup_prob": map_mixing,
        "mixup_off_epoch": _map_mixup_off_epoch,
        "bce_loss": _map_loss,
        "kd_model_name": _map_teacher,
        "opt": _map_optimizer,
        "clip_grad": map_clipping,
        "epochs": _map_length,
        "sched": _map_schedule,
        "model_ema_decay": map_average,
        "model_ema_warmup": _map_ema_warmup,
        "amp": _map_precision,
        "head_init_scale": _map_initial_weights,
    },
    rest=_note_old_defaults,
)
