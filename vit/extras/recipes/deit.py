"""Map commands of DeiT's main.py, and of its forks in ViT-5 and RoPE-ViT, to our settings.

In DeiT, the batch size is per GPU. The learning rate is for a batch of 512 unless `--unscale-lr` is
given. ThreeAugment replaces timm's transforms, including erasing. Models with LS in their name use
one drop-path rate for all blocks. The learning rate changes once per epoch, one epoch late.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vit.extras.recipes.arguments import Table, make_table
from vit.extras.recipes.command import Command
from vit.extras.recipes.rates import map_rate, timm_cosine, with_effect
from vit.extras.recipes.reading import Case, Reading
from vit.extras.recipes.timm_common import (
    TIMM_CASES,
    color_jitter,
    local_file,
    map_batch,
    map_clipping,
    map_initial_weights,
    map_optimizer,
    map_policy,
    map_precision,
    map_repeats,
)
from vit.layers.presets import SIZES

SOURCE = "facebookresearch/deit@7e160fe4:main.py"
_RECIPE = """
--batch-size              int     64      per GPU; data.global_batch_size is the total
--epochs                  int     300     = train.epochs
--bce-loss                on      -       =
--unscale-lr              on      -       optim.lr is --lr; else --lr is for a batch of 512
--model                   str     deit_base_patch16_224   model
--input-size              int     224     model.image_size
--drop                    float   0.0     =? model.pos_drop_rate model.proj_drop_rate
--drop-path               float   0.1     = model.drop_path_rate
--model-ema               on      true    =
--no-model-ema            off:model_ema   -
--model-ema-decay         float   0.99996  train.ema_decay
--opt                     str     adamw   optim.name
--opt-eps                 float   1e-8    =
--opt-betas               floats  -       optim.betas
--clip-grad               float   -       optim.clip_grad_norm
--momentum                float   0.9     = optim.momentum
--weight-decay            float   0.05    = optim.weight_decay
--sched                   str     cosine  =
--lr                      float   5e-4    optim.lr
--lr-noise                floats  -       off: noise on the learning rate
--lr-noise-pct            float   0.67    inert: --lr-noise is off
--lr-noise-std            float   1.0     inert: --lr-noise is off
--warmup-lr               float   1e-6    schedule
--min-lr                  float   1e-5    schedule.min_lr
--decay-epochs            float   30      for step schedules
--warmup-epochs           int     5       schedule.warmup_epochs
--cooldown-epochs         int     10      inert: the loop ends at --epochs
--patience-epochs         int     10      for the plateau schedule
--decay-rate --dr         float   0.1     for step schedules
--color-jitter            float   0.3     =
--aa                      str     rand-m9-mstd0.5-inc1  =
--smoothing               float   0.1     = loss.label_smoothing
--train-interpolation     str     bicubic  = data.interpolation
--repeated-aug            on      true    =
--no-repeated-aug         off:repeated_aug   -
--train-mode              on      true    =
--no-train-mode           off:train_mode   -
--ThreeAugment            on      -       =
--src                     on      -       =
--reprob                  float   0.25    =? augment.erasing_prob
--remode                  str     pixel   = augment.erasing_mode
--recount                 int     1       =
--resplit                 on      -       off: no erasing in the first split of a batch
--mixup                   float   0.8     = augment.mixup_alpha
--cutmix                  float   1.0     = augment.cutmix_alpha
--cutmix-minmax           floats  -       off: CutMix boxes with a side between two fractions
--mixup-prob              float   1.0     = augment.mix_prob
--mixup-switch-prob       float   0.5     = augment.cutmix_switch_prob
--mixup-mode              str     batch   = augment.mixup_mode
--teacher-model           str     regnety_160   distillation
--teacher-path            str     -       distillation
--distillation-type       str     none    =
--distillation-alpha      float   0.5     distillation
--distillation-tau        float   1.0     distillation
--cosub                   on      -       off: two submodels that learn from each other
--finetune                str     -       =
--attn-only               on      -       off: training of attention only
--seed                    int     0       = train.seed
--eval-crop-ratio         float   0.875   = eval.crop_pct
--nb-classes              int     1000    =
"""
_PLACES = """
--model-ema-force-cpu     on      -
--data-path               str     /datasets01/imagenet_full_size/061417/
--data-set                str     IMNET
--inat-category           str     name
--output_dir              str     -
--device                  str     cuda
--resume                  str     -
--start_epoch             int     0
--eval                    on      -
--dist-eval               on      -
--num_workers             int     10
--pin-mem                 on      true
--no-pin-mem              off:pin_mem  -
--distributed             on      -
--world_size              int     1
--dist_url                str     env://
"""
_SUBMITIT = """
--ngpus                   int     8       =
--nodes                   int     2       =
"""
_SUBMITIT_PLACES = """
--timeout                 int     2800
--job_dir                 str     -
--partition               str     learnfair
--use_volta32             on      -
--comment                 str     -
"""
_VIT5 = """
--accum_iter              int     1       batches per step: data.global_batch_size
--load_ema                on      -       =
"""
_VIT5_PLACES = """
--flash                   on      true
--no-flash                off:flash  -
--if_wandb                on      true
--disable_wandb           off:if_wandb  -
--wandb_key               str     -
--wandb_project           str     -
--wandb_entity            str     -
--wandb_resume            str     -
"""
TABLE = make_table("DeiT's main.py", SOURCE, _RECIPE, _PLACES)
SUBMITIT = make_table(
    "DeiT's run_with_submitit.py",
    "facebookresearch/deit@7e160fe4:run_with_submitit.py",
    _RECIPE + _SUBMITIT,
    _PLACES + _SUBMITIT_PLACES,
)
VIT5 = make_table(
    "ViT-5's main.py",
    "wangf3014/ViT-5@b7b07960:main.py",
    re.sub(r"deit_base_patch16_224 ", "vit5_base ", _RECIPE).replace(
        "--seed                    int     0 ", "--seed                    int     42"
    )
    + _VIT5,
    _PLACES + _VIT5_PLACES,
)
ROPE = make_table("RoPE-ViT's main.py", "naver-ai/rope-vit@ce85c2e5:deit/main.py", _RECIPE, _PLACES)
_DEIT3 = {"model.init_values": 1e-4, "model.no_embed_class": True}
"""The DeiT III model settings (facebookresearch/deit@7e160fe4:models_v2.py, vit_models)."""
_PARTS_OF_VIT5 = {
    **_DEIT3,
    "model.norm_layer": "rmsnorm",
    "model.qkv_bias": False,
    "model.qk_norm": True,
    "model.reg_tokens": 4,
    "model.rope_type": "axial",
    "model.rope_reg_temperature": 100.0,
}
"""The ViT-5 model settings (wangf3014/ViT-5@b7b07960:models_vit5.py)."""
_ROPE = {"model.init_values": 1e-4, "model.rope_type": "axial", "model.rope_temperature": 100.0}


def _has_one_rate(args: Mapping[str, Any]) -> bool:
    """Return whether all blocks of the model have the same drop-path rate."""
    return "_LS" in args["model"] or args["model"].startswith("vit5")


_CASES = (
    Case(
        "same",
        "drop_path",
        lambda a: _has_one_rate(a) and a["drop_path"],
        settings=lambda a: {
            "model.drop_path_rate": a["drop_path"],
            "model.drop_path_schedule": "constant",
        },
    ),
    Case("cannot", "drop", lambda a: a["drop"] and _has_one_rate(a), "dropout of the head's input"),
    Case(
        "cannot",
        "bce_loss",
        lambda a: a["bce_loss"] and a["smoothing"],
        "with --smoothing above 0 --bce-loss makes all targets 1: replaced by cross-entropy",
    ),
    Case(
        "same",
        "bce_loss",
        lambda a: a["bce_loss"],
        settings={"loss.name": "bce", "loss.bce_target_thresh": 0.0},
    ),
    Case(
        "differs",
        "model_ema_decay",
        lambda a: a["model_ema"],
        "DeiT never evaluates the average, this project evaluates both",
        lambda a: {"train.ema_decay": a["model_ema_decay"]},
    ),
    Case("inert", "model_ema_decay", lambda a: True, "the average is off"),
    Case(
        "cannot",
        "train_mode",
        lambda a: not a["train_mode"],
        "training with dropout and drop path switched off",
    ),
    Case(
        "differs",
        "load_ema",
        lambda a: a["finetune"] and a.get("load_ema"),
        "the averaged weights of the checkpoint: pass a file with those weights",
    ),
    Case(
        "same",
        "ThreeAugment",
        lambda a: a["ThreeAugment"],
        settings={"augment.three_augment": True},
    ),
    Case(
        "inert",
        "aa reprob remode recount resplit train_interpolation",
        lambda a: a["ThreeAugment"],
        "ThreeAugment replaces these transforms",
    ),
    Case(
        "same",
        "color_jitter",
        lambda a: a["ThreeAugment"] and a["color_jitter"],
        settings=color_jitter,
    ),
    Case(
        "same", "src", lambda a: a["src"] and a["ThreeAugment"], settings={"augment.crop": "simple"}
    ),
    Case("inert", "src", lambda a: a["src"], "only with --ThreeAugment"),
    Case(
        "differs",
        "train_interpolation",
        lambda a: a["train_interpolation"] not in ("bicubic", "bilinear"),
        "DeiT resizes by {train_interpolation}, this project by bicubic",
        {"data.interpolation": "bicubic"},
    ),
    Case(
        "inert",
        "teacher_model teacher_path distillation_alpha distillation_tau",
        lambda a: a["distillation_type"] == "none",
        "the recipe has no teacher",
    ),
    Case(
        "inert",
        "distillation_tau",
        lambda a: a["distillation_type"] == "hard",
        "only for soft distillation",
    ),
    Case(
        "inert",
        "decay_epochs decay_rate patience_epochs",
        lambda a: a["sched"] == "cosine",
        "the schedule is a cosine",
    ),
)
_FAMILIES: dict[str, dict[str, Any]] = {
    r"deit_(?P<size>tiny|small|base)(_distilled)?_patch16_(224|384)": {},
    r"deit_(?P<size>tiny|small|medium|base|large|huge)_patch(14|16)_LS": _DEIT3,
    r"vit5_(?P<size>small|base|large)": _PARTS_OF_VIT5,
    r"rope_(axial|mixed)_(ape_)?deit_(?P<size>small|base|large)_patch16_LS": _ROPE,
}
"""The settings other than size and patch, by a pattern for the model's name."""


def table_for(command: Command) -> Table:
    """Return the argument table of the script in `command`. Three projects have a main.py."""
    line = " ".join(command.words)
    if "submitit" in command.script:
        return SUBMITIT
    if re.search(r"--model[= ]rope_", line):
        return ROPE
    return VIT5 if re.search(r"--model[= ]vit5_|--accum_iter|--load_ema", line) else TABLE


def map_arguments(reading: Reading, num_gpus: int | None, is_distributed: bool) -> None:
    """Map the arguments of DeiT's main.py or of a fork."""
    args = reading.args
    steps = args.get("accum_iter", 1)
    names = "batch_size accum_iter" if "accum_iter" in args else "batch_size"
    batch = map_batch(reading, names, num_gpus, steps)
    _map_model(reading)
    _map_start(reading)
    _map_teacher(reading)
    if not args["ThreeAugment"]:
        map_policy(reading, args["train_interpolation"])
    map_repeats(reading, "repeated_aug", 3 if args["repeated_aug"] else 1, is_distributed)
    reading.apply((*_CASES, *TIMM_CASES))
    scaled = args["lr"] * batch / 512
    lr = args["lr"] if args["unscale_lr"] else scaled
    formula = "" if args["unscale_lr"] else f"{args['lr']:g} x {batch} / 512"
    map_optimizer(reading, lr, formula, "lr unscale_lr")
    map_clipping(reading)
    _map_schedule(reading, lr)
    reading.same("", {"eval.every_epochs": 1})
    map_precision(reading, "fp16 with a scaled loss")
    map_initial_weights(reading, "a class token of std 0.02", "timm")


def _map_model(reading: Reading) -> None:
    args = reading.args
    name = args["model"]
    families = ((re.fullmatch(pattern, name), parts) for pattern, parts in _FAMILIES.items())
    match, parts = next(((match, parts) for match, parts in families if match), (None, {}))
    if match is None:
        raise ValueError(
            f"--model {name}: expected deit_{{tiny,small,base}}_patch16_{{224,384}},"
            " deit_{tiny,small,medium,base,large}_patch16_LS, deit_huge_patch14_LS,"
            " vit5_{small,base,large} or rope_{axial,mixed}[_ape]_deit_{small,base,large}"
            "_patch16_LS"
        )
    patch = 14 if "patch14" in name else 16
    settings = {"model.name": f"vit_{SIZES.get(match['size'], 'b')}{patch}", **parts}
    if match["size"] == "medium":
        settings |= {"model.embed_dim": 512, "model.num_heads": 8}
    if "_distilled" in name:
        settings["model.dist_token"] = True
    if name.startswith("rope"):
        settings |= (
            {"model.no_embed_class": True} if "_ape_" in name else {"model.pos_embed": "none"}
        )
    if "_mixed_" in name:
        text = "learned rotary frequencies (RoPE-Mixed): replaced by axial frequencies"
        reading.cannot("model", text, settings)
    elif name.startswith("vit5"):
        text = "the class token is initialized with std 1e-6 in this project and 0.02 in ViT-5"
        reading.differs("model", text, settings)
    elif "_distilled" in name and args["distillation_type"] == "none":
        text = "without a teacher, this project trains the mean of both heads, DeiT one head"
        reading.differs("model", text, settings)
    else:
        reading.same("model", settings)
    size = args["input_size"]
    used = size // patch * patch
    text = f"DeiT uses only {used} of {size} px, because patches have {patch} px: set to {used} px"
    if used == size:
        reading.same("input_size", {"model.image_size": size})
    else:
        reading.differs("input_size", text, {"model.image_size": used})


def _map_start(reading: Reading) -> None:
    args = reading.args
    if not args["finetune"]:
        return
    file, note = local_file(args["finetune"])
    if args["data_set"] == "IMNET":
        reading.same("finetune", {"init.checkpoint": file}, note)
    else:
        text = (
            "DeiT resets the head only if the number of classes differs, this project always does"
        )
        start = {"init.checkpoint": file, "init.reset_head": True}
        reading.differs("finetune", "; ".join(filter(None, (note, text))), start)


def _map_teacher(reading: Reading) -> None:
    """Map the teacher. main.py accepts a teacher only for models with two heads (losses.py)."""
    args = reading.args
    kind = args["distillation_type"]
    alpha = args["distillation_alpha"]
    path = args["teacher_path"]
    if kind == "none":
        return
    is_valid = kind in ("hard", "soft") and path and 0 < alpha < 1
    if not is_valid or "_distilled" not in args["model"]:
        raise ValueError(
            f"--model {args['model']} --distillation-type {kind} --distillation-alpha {alpha:g}"
            f" --teacher-path {path or '-'}: expected none, or hard or soft with an alpha between 0"
            " and 1, the file of the teacher's weights, and a model with two heads, such as"
            " deit_small_distilled_patch16_224"
        )
    reading.same("distillation_type", {"distill.distill_type": kind})
    file, note = local_file(path)
    reading.same("teacher_path", {"distill.teacher": file}, note)
    text = f"timm's {args['teacher_model']}, which needs timm unless it is a ViT"
    reading.same("teacher_model", {"distill.teacher_model": args["teacher_model"]}, text)
    weights = {"distill.distill_loss_weight": alpha, "distill.task_loss_weight": 1 - alpha}
    note = ""
    if kind == "soft":
        classes = args["nb_classes"]
        weights["distill.distill_loss_weight"] = alpha / classes
        note = f"DeiT takes the mean over {classes} classes, this project the sum"
        reading.same("distillation_tau", {"distill.temperature": args["distillation_tau"]})
    reading.same("distillation_alpha", weights, note)


def _map_schedule(reading: Reading, lr: float) -> None:
    args = reading.args
    settings = {
        "schedule.name": "cosine",
        "schedule.interval": "epoch",
        "schedule.warmup_epochs": args["warmup_epochs"],
        "schedule.warmup_lr": min(args["warmup_lr"], lr),
        "schedule.warmup_prefix": False,
        "schedule.min_lr": min(args["min_lr"], lr),
    }
    if args["sched"] != "cosine":
        names = "sched min_lr warmup_lr warmup_epochs decay_epochs decay_rate patience_epochs"
        reading.cannot(
            names, f"the schedule {args['sched']}: replaced by a cosine", with_effect(settings)
        )
        return
    theirs = timm_cosine(
        lr,
        args["epochs"],
        warmup_epochs=args["warmup_epochs"],
        warmup_lr=args["warmup_lr"],
        min_lr=args["min_lr"],
        late=1,
    )
    reasons = "DeiT's schedule is one epoch late, so the first two epochs use --warmup-lr"
    map_rate(reading, "min_lr warmup_lr warmup_epochs", theirs, settings, reasons)
