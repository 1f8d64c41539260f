"""Map commands of DeiT's main.py, and of its forks in ViT-5 and RoPE-ViT, to our settings.

In DeiT, the batch size is per GPU. The learning rate is for a batch of 512 images, and is scaled to
the actual batch size unless `--unscale-lr` is given. ThreeAugment replaces timm's transforms,
including erasing. Models with LS in their names have the same drop-path rate in all blocks. The
learning rate changes once per epoch, one epoch late.
"""

from __future__ import annotations

import re
from typing import Any

from vit.extras.recipes.arguments import ParsedArguments, Table, make_table
from vit.extras.recipes.command import Command
from vit.extras.recipes.rates import Rate, map_rate, timm_cosine, with_effect
from vit.extras.recipes.reading import Reading
from vit.extras.recipes.timm_common import (
    local_file,
    map_average,
    map_batch,
    map_clipping,
    map_color_jitter,
    map_erasing,
    map_initial_weights,
    map_mixing,
    map_optimizer,
    map_policy,
    map_precision,
)

SOURCE = "facebookresearch/deit@7e160fe4:main.py"
_RECIPE = """
--batch-size              int     64      per GPU; data.global_batch_size is the total
--epochs                  int     300     train.epochs
--bce-loss                on      -       loss
--unscale-lr              on      -       optim.lr is --lr; else --lr is for a batch of 512
--model                   str     deit_base_patch16_224   model
--input-size              int     224     model.image_size
--drop                    float   0.0     model.proj_drop_rate, model.pos_drop_rate
--drop-path               float   0.1     model.drop_path_rate
--model-ema               on      true    ema.decay
--no-model-ema            off:model_ema   -
--model-ema-decay         float   0.99996  ema.decay
--opt                     str     adamw   optim.name
--opt-eps                 float   1e-8    optim.eps
--opt-betas               floats  -       optim.betas
--clip-grad               float   -       optim.clip_grad_norm
--momentum                float   0.9     optim.momentum
--weight-decay            float   0.05    optim.weight_decay
--sched                   str     cosine  schedule.name
--lr                      float   5e-4    optim.lr
--lr-noise                floats  -       -
--lr-noise-pct            float   0.67    -
--lr-noise-std            float   1.0     -
--warmup-lr               float   1e-6    schedule
--min-lr                  float   1e-5    schedule.min_lr
--decay-epochs            float   30      for step schedules
--warmup-epochs           int     5       schedule.warmup_epochs
--cooldown-epochs         int     10      never reached
--patience-epochs         int     10      for the plateau schedule
--decay-rate --dr         float   0.1     for step schedules
--color-jitter            float   0.3     augment.color_jitter
--aa                      str     rand-m9-mstd0.5-inc1  augment.randaugment_layers and others
--smoothing               float   0.1     loss.label_smoothing
--train-interpolation     str     bicubic  data.interpolation
--repeated-aug            on      true    order.aug_repeats
--no-repeated-aug         off:repeated_aug   -
--train-mode              on      true    dropout and drop path are on in training
--no-train-mode           off:train_mode   -
--ThreeAugment            on      -       augment.auto_augment
--src                     on      -       augment.crop
--reprob                  float   0.25    augment.erasing_prob
--remode                  str     pixel   augment.erasing_mode
--recount                 int     1       number of erased boxes
--resplit                 on      -       -
--mixup                   float   0.8     augment.mixup_alpha
--cutmix                  float   1.0     augment.cutmix_alpha
--cutmix-minmax           floats  -       -
--mixup-prob              float   1.0     augment.mix_prob
--mixup-switch-prob       float   0.5     augment.cutmix_switch_prob
--mixup-mode              str     batch   augment.mixup_mode
--teacher-model           str     regnety_160   distillation
--teacher-path            str     -       distillation
--distillation-type       str     none    distillation
--distillation-alpha      float   0.5     distillation
--distillation-tau        float   1.0     distillation
--cosub                   on      -       trains two submodels
--finetune                str     -       init.checkpoint
--attn-only               on      -       trains attention only
--seed                    int     0       train.seed
--eval-crop-ratio         float   0.875   eval.crop_pct
--nb-classes              int     1000    follows from the data
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
--ngpus                   int     8       GPUs per node
--nodes                   int     2       nodes
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
--load_ema                on      -       take the averaged weights of --finetune
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
_SIZES = {"tiny": "ti", "small": "s", "base": "b", "large": "l", "huge": "h"}
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


def table_for(command: Command) -> Table:
    """Return the argument table of the main.py that `command` runs. Three projects have a
    main.py."""
    line = " ".join(command.words)
    if "submitit" in command.script:
        return SUBMITIT
    if re.search(r"--model[= ]rope_", line):
        return ROPE
    return VIT5 if re.search(r"--model[= ]vit5_|--accum_iter|--load_ema", line) else TABLE


def read(
    table: Table, parsed: ParsedArguments, num_gpus: int | None, is_distributed: bool
) -> Reading:
    """Map the arguments of main.py in DeiT or a fork."""
    reading = Reading(table, parsed)
    args = reading.args
    if args["eval"]:
        raise ValueError(
            f"{table.program} --eval only evaluates: run"
            " python launch/eval.py --checkpoint FILE --data SHARDS"
        )
    if table is SUBMITIT:
        num_gpus = num_gpus or args["ngpus"] * args["nodes"]
        is_distributed = True
        reading.same("ngpus nodes")
    if table is VIT5:
        batch = map_batch(reading, "batch_size accum_iter", num_gpus, args["accum_iter"])
    else:
        batch = map_batch(reading, "batch_size", num_gpus)
    reading.same("epochs", {"train.epochs": args["epochs"]})
    _map_model(reading)
    _map_start(reading)
    _map_images(reading, is_distributed)
    map_mixing(reading, args["batch_size"])
    _map_loss(reading)
    scaled = args["lr"] * batch / 512
    lr = args["lr"] if args["unscale_lr"] else scaled
    formula = "" if args["unscale_lr"] else f"{args['lr']:g} x {batch} / 512"
    map_optimizer(reading, lr, formula, "lr unscale_lr")
    map_clipping(reading)
    _map_schedule(reading, lr)
    decay = args["model_ema_decay"] if args["model_ema"] else None
    reading.same("model_ema")
    map_average(
        reading, decay, note="DeiT never evaluates the average, this project evaluates both"
    )
    reading.same("seed", {"train.seed": args["seed"]})
    reading.same("", {"eval.every_epochs": 1})
    map_precision(reading, "fp16 with a scaled loss")
    map_initial_weights(reading, "a class token of std 0.02", "timm")
    reading.finish()
    return reading


def _map_model(reading: Reading) -> None:
    name = reading.args["model"]
    settings: dict[str, Any]
    if match := re.fullmatch(r"deit_(tiny|small|base)(_distilled)?_patch16_(224|384)", name):
        settings = {"model.name": f"vit_{_SIZES[match[1]]}16"}
        if not match[2]:
            reading.same("model", settings)
        elif reading.args["distillation_type"] == "none":
            text = "without a teacher, this project trains the mean of both heads, DeiT one head"
            reading.differs("model", text, {**settings, "model.dist_token": True})
        else:
            reading.same("model", {**settings, "model.dist_token": True})
    elif match := re.fullmatch(r"deit_(tiny|small|medium|base|large|huge)_patch(14|16)_LS", name):
        size = _SIZES.get(match[1], "b")
        settings = {"model.name": f"vit_{size}{match[2]}", **_DEIT3}
        if match[1] == "medium":
            settings |= {"model.embed_dim": 512, "model.num_heads": 8}
        reading.same("model", settings)
    elif match := re.fullmatch(r"vit5_(small|base|large)", name):
        settings = {"model.name": f"vit_{_SIZES[match[1]]}16", **_PARTS_OF_VIT5}
        text = "the class token is initialized with std 1e-6 in this project and 0.02 in ViT-5"
        reading.differs("model", text, settings)
    elif match := re.fullmatch(
        r"rope_(axial|mixed)_(ape_)?deit_(small|base|large)_patch16_LS", name
    ):
        settings = {"model.name": f"vit_{_SIZES[match[3]]}16", "model.init_values": 1e-4}
        settings |= {"model.rope_type": "axial", "model.rope_temperature": 100.0}
        settings |= {"model.no_embed_class": True} if match[2] else {"model.pos_embed": "none"}
        if match[1] == "axial":
            reading.same("model", settings)
        else:
            text = "learned rotary frequencies (RoPE-Mixed): replaced by axial frequencies"
            reading.cannot("model", text, settings)
    else:
        raise ValueError(
            f"--model {name}: expected deit_{{tiny,small,base}}_patch16_{{224,384}},"
            " deit_{tiny,small,medium,base,large}_patch16_LS, deit_huge_patch14_LS,"
            " vit5_{small,base,large} or rope_{axial,mixed}[_ape]_deit_{small,base,large}"
            "_patch16_LS"
        )
    _map_image_size(reading, 14 if "patch14" in name else 16)
    _map_dropping(reading, has_one_rate="_LS" in name or name.startswith("vit5"))


def _map_image_size(reading: Reading, patch: int) -> None:
    size = reading.args["input_size"]
    used = size // patch * patch
    if used == size:
        reading.same("input_size", {"model.image_size": size})
        return
    text = f"DeiT uses only {used} of {size} px, because patches have {patch} px: set to {used} px"
    reading.differs("input_size", text, {"model.image_size": used})


def _map_dropping(reading: Reading, has_one_rate: bool) -> None:
    """Map dropout and drop path. has_one_rate: whether all blocks have the same drop-path rate."""
    args = reading.args
    rate = args["drop_path"]
    settings: dict[str, Any] = {"model.drop_path_rate": rate}
    if has_one_rate and rate:
        settings["model.drop_path_schedule"] = "constant"
    reading.same("drop_path", settings)
    if not args["drop"]:
        reading.same("drop")
    elif has_one_rate:
        reading.cannot("drop", "dropout of the head's input")
    else:
        drops = {"model.pos_drop_rate": args["drop"], "model.proj_drop_rate": args["drop"]}
        reading.same("drop", drops)
    reading.same("nb_classes")
    if args["train_mode"]:
        reading.same("train_mode")
    else:
        reading.cannot("train_mode", "training with dropout and drop path switched off")


def _map_start(reading: Reading) -> None:
    args = reading.args
    if args["finetune"] and args["data_set"] != "IMNET":
        file, note = local_file(args["finetune"])
        text = (
            "DeiT resets the head only if the number of classes differs, this project always does"
        )
        start = {"init.checkpoint": file, "init.reset_head": True}
        reading.differs("finetune", "; ".join(filter(None, (note, text))), start)
    elif args["finetune"]:
        file, note = local_file(args["finetune"])
        reading.same("finetune", {"init.checkpoint": file}, note)
    else:
        reading.same("finetune")
    if "load_ema" in args:
        if args["finetune"] and args["load_ema"]:
            text = "the averaged weights of the checkpoint: pass a file with those weights"
            reading.differs("load_ema", text)
        else:
            reading.same("load_ema")
    _map_teacher(reading)
    reading.expect_off(
        {
            "cosub": "two submodels that learn from each other",
            "attn_only": "training of attention only",
        }
    )


def _map_teacher(reading: Reading) -> None:
    """Map the teacher. main.py requires a model with two heads (losses.py)."""
    args = reading.args
    kind = args["distillation_type"]
    alpha = args["distillation_alpha"]
    path = args["teacher_path"]
    if kind == "none":
        reading.same("distillation_type")
        names = "teacher_model teacher_path distillation_alpha distillation_tau"
        reading.inert(names, "the recipe has no teacher")
        return
    if kind not in ("hard", "soft") or not path or not 0 < alpha < 1:
        raise ValueError(
            f"--distillation-type {kind} --distillation-alpha {alpha:g} --teacher-path"
            f" {path or '-'}: expected none, or hard or soft with an alpha between 0 and 1 and the"
            " teacher's weights file"
        )
    if "_distilled" not in args["model"]:
        raise ValueError(
            f"--distillation-type {kind}: {args['model']} has one head, which main.py rejects:"
            " use deit_{tiny,small,base}_distilled_patch16_{224,384}"
        )
    reading.same("distillation_type", {"distill.distill_type": kind})
    file, note = local_file(path)
    reading.same("teacher_path", {"distill.teacher": file}, note)
    text = f"timm's {args['teacher_model']}, which needs timm unless it is a ViT"
    reading.same("teacher_model", {"distill.teacher_model": args["teacher_model"]}, text)
    weights = {"distill.task_loss_weight": 1 - alpha, "distill.distill_loss_weight": alpha}
    if kind == "hard":
        reading.inert("distillation_tau", "only for soft distillation")
        reading.same("distillation_alpha", weights)
        return
    classes = args["nb_classes"]
    weights["distill.distill_loss_weight"] = alpha / classes
    note = f"DeiT takes the mean over {classes} classes, this project the sum"
    reading.same("distillation_alpha", weights)
    reading.comments["distill.distill_loss_weight"] = note
    reading.same("distillation_tau", {"distill.temperature": args["distillation_tau"]})


def _map_images(reading: Reading, is_distributed: bool) -> None:
    args = reading.args
    reading.same("eval_crop_ratio", {"eval.crop_pct": args["eval_crop_ratio"]})
    if args["ThreeAugment"]:
        reading.same("ThreeAugment", {"augment.auto_augment": "three_augment"})
        reading.same("src", {"augment.crop": "simple"} if args["src"] else {})
        text = "ThreeAugment replaces these transforms"
        reading.inert("aa reprob remode recount resplit train_interpolation", text)
        map_color_jitter(reading, applies=True)
    else:
        reading.same("ThreeAugment")
        if args["src"]:
            reading.inert("src", "only with --ThreeAugment")
        else:
            reading.same("src")
        _map_interpolation(reading)
        map_policy(reading, args["train_interpolation"])
        map_color_jitter(reading, applies=args["aa"] in ("", None, "3a"))
        map_erasing(reading)
    if args["repeated_aug"] and is_distributed:
        repeats = {"order.aug_repeats": 3, "order.aug_repeats_form": "sampler"}
        reading.same("repeated_aug", repeats)
    elif args["repeated_aug"]:
        reading.inert("repeated_aug", "a single process without torchrun uses a random sampler")
    else:
        reading.same("repeated_aug")


def _map_interpolation(reading: Reading) -> None:
    interpolation = reading.args["train_interpolation"]
    if interpolation in ("bicubic", "bilinear"):
        reading.same("train_interpolation", {"data.interpolation": interpolation})
    else:
        text = f"DeiT resizes by {interpolation}, this project by bicubic"
        reading.differs("train_interpolation", text, {"data.interpolation": "bicubic"})


def _map_loss(reading: Reading) -> None:
    args = reading.args
    if not args["bce_loss"]:
        reading.same("bce_loss")
        return
    if args["smoothing"]:
        text = "with --smoothing above 0 --bce-loss makes all targets 1: replaced by cross-entropy"
        reading.cannot("bce_loss", text)
    else:
        reading.same("bce_loss", {"loss.name": "bce", "loss.bce_target_thresh": 0.0})


def _map_schedule(reading: Reading, lr: float) -> None:
    args = reading.args
    reading.inert("lr_noise_pct lr_noise_std", "--lr-noise is off")
    reading.expect_off({"lr_noise": "noise on the learning rate"})
    reading.inert("cooldown_epochs", "the loop ends at --epochs")
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
    reading.inert("decay_epochs decay_rate patience_epochs", "the schedule is a cosine")
    reading.same("sched")
    theirs: Rate = timm_cosine(
        lr,
        args["epochs"],
        warmup_epochs=args["warmup_epochs"],
        warmup_lr=args["warmup_lr"],
        min_lr=args["min_lr"],
        late=1,
    )
    reasons = "DeiT's schedule is one epoch late, so the first two epochs use --warmup-lr"
    map_rate(reading, "min_lr warmup_lr warmup_epochs", theirs, settings, reasons)
