"""DeiT's main.py: DeiT, DeiT III, and the programs made of it, ViT-5's and RoPE-ViT's.

Its own meanings: the batch is that of a GPU; the rate is for a batch of 512 unless `--unscale-lr`
is given; with ThreeAugment its own transforms replace those of timm, erasing included; models named
LS have one rate of drop path for all blocks; the schedule moves once an epoch, an epoch late.
"""

from __future__ import annotations

import re
from typing import Any

from vit.extras.recipes.arguments import Given, Table, make_table
from vit.extras.recipes.command import Command
from vit.extras.recipes.rates import Rate, say_rate, timm_cosine, with_effect
from vit.extras.recipes.reading import Reading
from vit.extras.recipes.timm_common import (
    file_here,
    say_average,
    say_batch,
    say_clipping,
    say_color_jitter,
    say_erasing,
    say_initial_weights,
    say_mixing,
    say_optimizer,
    say_policy,
    say_precision,
)

SOURCE = "facebookresearch/deit@7e160fe4:main.py"
_RECIPE = """
--batch-size              int     64      of a GPU: data.global_batch_size is that of all GPUs
--epochs                  int     300     train.epochs
--bce-loss                on      -       loss
--unscale-lr              on      -       optim.lr is --lr; else --lr is for a batch of 512
--model                   str     deit_base_patch16_224   model
--input-size              int     224     model.image_size
--drop                    float   0.0     model.proj_drop_rate, model.pos_drop_rate
--drop-path               float   0.1     model.drop_path_rate
--model-ema               on      true    train.ema_decay
--no-model-ema            off:model_ema   -
--model-ema-decay         float   0.99996  train.ema_decay
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
--decay-epochs            float   30      of step schedules
--warmup-epochs           int     5       schedule.warmup_epochs
--cooldown-epochs         int     10      never reached
--patience-epochs         int     10      of the plateau schedule
--decay-rate --dr         float   0.1     of step schedules
--color-jitter            float   0.3     augment.color_jitter
--aa                      str     rand-m9-mstd0.5-inc1  augment.randaugment_layers and others
--smoothing               float   0.1     loss.label_smoothing
--train-interpolation     str     bicubic  data.interpolation
--repeated-aug            on      true    data.aug_repeats
--no-repeated-aug         off:repeated_aug   -
--train-mode              on      true    dropout and drop path are on in training
--no-train-mode           off:train_mode   -
--ThreeAugment            on      -       augment.three_augment
--src                     on      -       augment.crop
--reprob                  float   0.25    augment.erasing_prob
--remode                  str     pixel   augment.erasing_mode
--recount                 int     1       boxes that are erased
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
--cosub                   on      -       training of two submodels
--finetune                str     -       init.checkpoint
--attn-only               on      -       trains attention only
--seed                    int     0       train.seed
--eval-crop-ratio         float   0.875   eval.crop_pct
--nb-classes              int     1000    as many as the data have; published commands give it
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
--ngpus                   int     8       GPUs of a node
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
--accum_iter              int     1       batches of a step: data.global_batch_size
--load_ema                on      -       of --finetune the averaged weights
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
"""facebookresearch/deit@7e160fe4:models_v2.py, vit_models."""
_PARTS_OF_VIT5 = {
    **_DEIT3,
    "model.norm_layer": "rmsnorm",
    "model.qkv_bias": False,
    "model.qk_norm": True,
    "model.reg_tokens": 4,
    "model.rope_type": "axial",
    "model.rope_reg_temperature": 100.0,
}
"""wangf3014/ViT-5@b7b07960:models_vit5.py."""


def table_for(command: Command) -> Table:
    """The table of the program that `command` runs: main.py looks the same in three of them."""
    line = " ".join(command.words)
    if "submitit" in command.script:
        return SUBMITIT
    if re.search(r"--model[= ]rope_", line):
        return ROPE
    return VIT5 if re.search(r"--model[= ]vit5_|--accum_iter|--load_ema", line) else TABLE


def read(table: Table, given: Given, num_gpus: int | None, is_distributed: bool) -> Reading:
    """Account for a command of DeiT's main.py or its relatives."""
    reading = Reading(table, given)
    args = reading.args
    if args["eval"]:
        raise ValueError(
            f"{table.program} --eval evaluates, there is nothing to train:"
            " python launch/eval.py --checkpoint FILE --data SHARDS"
        )
    if table is SUBMITIT:
        num_gpus = num_gpus or args["ngpus"] * args["nodes"]
        is_distributed = True
        reading.same("ngpus nodes")
    if table is VIT5:
        batch = say_batch(reading, "batch_size accum_iter", num_gpus, args["accum_iter"])
    else:
        batch = say_batch(reading, "batch_size", num_gpus)
    reading.same("epochs", {"train.epochs": args["epochs"]})
    _say_model(reading)
    _say_start(reading)
    _say_images(reading, is_distributed)
    say_mixing(reading, args["batch_size"])
    _say_loss(reading)
    scaled = args["lr"] * batch / 512
    lr = args["lr"] if args["unscale_lr"] else scaled
    how = "" if args["unscale_lr"] else f"{args['lr']:g} x {batch} / 512"
    say_optimizer(reading, lr, how, "lr unscale_lr")
    say_clipping(reading)
    _say_schedule(reading, lr)
    decay = args["model_ema_decay"] if args["model_ema"] else None
    reading.same("model_ema")
    say_average(reading, decay, note="the average is never evaluated there; here it is, too")
    reading.same("seed", {"train.seed": args["seed"]})
    reading.same("", {"eval.every_epochs": 1})
    say_precision(reading, "fp16 with a scaled loss")
    say_initial_weights(reading, "a class token of std 0.02", "timm")
    reading.finish()
    return reading


def _say_model(reading: Reading) -> None:
    name = reading.args["model"]
    settings: dict[str, Any]
    if found := re.fullmatch(r"deit_(tiny|small|base)(_distilled)?_patch16_(224|384)", name):
        settings = {"model.name": f"vit_{_SIZES[found[1]]}16"}
        if not found[2]:
            reading.same("model", settings)
        elif reading.args["distillation_type"] == "none":
            text = "without a teacher the mean of both heads is trained here, one of them there"
            reading.differs("model", text, {**settings, "model.dist_token": True})
        else:
            reading.same("model", {**settings, "model.dist_token": True})
    elif found := re.fullmatch(r"deit_(tiny|small|medium|base|large|huge)_patch(14|16)_LS", name):
        size = _SIZES.get(found[1], "b")
        settings = {"model.name": f"vit_{size}{found[2]}", **_DEIT3}
        if found[1] == "medium":
            settings |= {"model.embed_dim": 512, "model.num_heads": 8}
        reading.same("model", settings)
    elif found := re.fullmatch(r"vit5_(small|base|large)", name):
        settings = {"model.name": f"vit_{_SIZES[found[1]]}16", **_PARTS_OF_VIT5}
        text = "the class token starts at std 1e-6 here, at 0.02 there"
        reading.differs("model", text, settings)
    elif found := re.fullmatch(
        r"rope_(axial|mixed)_(ape_)?deit_(small|base|large)_patch16_LS", name
    ):
        settings = {"model.name": f"vit_{_SIZES[found[3]]}16", "model.init_values": 1e-4}
        settings |= {"model.rope_type": "axial", "model.rope_temperature": 100.0}
        settings |= {"model.no_embed_class": True} if found[2] else {"model.pos_embed": "none"}
        if found[1] == "axial":
            reading.same("model", settings)
        else:
            text = "frequencies of rotary positions that are learned (RoPE-Mixed): axial ones here"
            reading.cannot("model", text, settings)
    else:
        raise ValueError(
            f"--model {name}: known are deit_{{tiny,small,base}}_patch16_{{224,384}},"
            " deit_{tiny,small,medium,base,large}_patch16_LS, deit_huge_patch14_LS,"
            " vit5_{small,base,large} and rope_{axial,mixed}[_ape]_deit_{small,base,large}"
            "_patch16_LS"
        )
    _say_image_size(reading, 14 if "patch14" in name else 16)
    _say_dropping(reading, has_one_rate="_LS" in name or name.startswith("vit5"))


def _say_image_size(reading: Reading, patch: int) -> None:
    size = reading.args["input_size"]
    used = size // patch * patch
    if used == size:
        reading.same("input_size", {"model.image_size": size})
        return
    text = (
        f"of {size} px only {used} are seen there, {used // patch} patches of {patch} px: {used} px"
        " here"
    )
    reading.differs("input_size", text, {"model.image_size": used})


def _say_dropping(reading: Reading, has_one_rate: bool) -> None:
    """Dropout and drop path. has_one_rate: of all blocks."""
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
        reading.cannot("train_mode", "training without dropout and drop path, whatever they are")


def _say_start(reading: Reading) -> None:
    """The weights to start from, teachers, and parts that are trained."""
    args = reading.args
    if args["finetune"] and args["data_set"] != "IMNET":
        file, how = file_here(args["finetune"])
        text = "a head of another number of classes is new there; here it is new in any case"
        start = {"init.checkpoint": file, "init.reset_head": True}
        reading.differs("finetune", "; ".join(filter(None, (how, text))), start)
    elif args["finetune"]:
        file, how = file_here(args["finetune"])
        reading.same("finetune", {"init.checkpoint": file}, how)
    else:
        reading.same("finetune")
    if "load_ema" in args:
        if args["finetune"] and args["load_ema"]:
            text = "of their checkpoint the averaged weights: give a file of those"
            reading.differs("load_ema", text)
        else:
            reading.same("load_ema")
    _say_teacher(reading)
    reading.expect_off(
        {"cosub": "two submodels that learn from each other", "attn_only": "only attention trains"}
    )


def _say_teacher(reading: Reading) -> None:
    """The teacher of a model with two heads; of one head main.py refuses it (losses.py)."""
    args = reading.args
    kind = args["distillation_type"]
    alpha = args["distillation_alpha"]
    path = args["teacher_path"]
    if kind == "none":
        reading.same("distillation_type")
        names = "teacher_model teacher_path distillation_alpha distillation_tau"
        reading.inert(names, "there is no teacher")
        return
    if kind not in ("hard", "soft") or not path or not 0 < alpha < 1:
        raise ValueError(
            f"--distillation-type {kind} --distillation-alpha {alpha:g} --teacher-path"
            f" {path or '-'}: expected none, or hard or soft with an alpha between 0 and 1 and the"
            " file of the teacher's weights"
        )
    if "_distilled" not in args["model"]:
        raise ValueError(
            f"--distillation-type {kind}: {args['model']} has one head, and main.py refuses it:"
            " take deit_{tiny,small,base}_distilled_patch16_{224,384}"
        )
    reading.same("distillation_type", {"distill.distill_type": kind})
    file, how = file_here(path)
    reading.same("teacher_path", {"distill.teacher": file}, how)
    text = f"timm's {args['teacher_model']}, which needs timm if it is no ViT"
    reading.same("teacher_model", {"distill.teacher_model": args["teacher_model"]}, text)
    weights = {"distill.task_loss_weight": 1 - alpha, "distill.distill_loss_weight": alpha}
    if kind == "hard":
        reading.inert("distillation_tau", "of soft distillation")
        reading.same("distillation_alpha", weights)
        return
    classes = args["nb_classes"]
    weights["distill.distill_loss_weight"] = alpha / classes
    how = f"theirs is a mean over {classes} classes, here is a sum"
    reading.same("distillation_alpha", weights)
    reading.comments["distill.distill_loss_weight"] = how
    reading.same("distillation_tau", {"distill.temperature": args["distillation_tau"]})


def _say_images(reading: Reading, is_distributed: bool) -> None:
    """Crops, colours and repetitions of training images, and the view of evaluation."""
    args = reading.args
    reading.same("eval_crop_ratio", {"eval.crop_pct": args["eval_crop_ratio"]})
    if args["ThreeAugment"]:
        reading.same("ThreeAugment", {"augment.three_augment": True})
        reading.same("src", {"augment.crop": "simple"} if args["src"] else {})
        text = "ThreeAugment has its own transforms"
        reading.inert("aa reprob remode recount resplit train_interpolation", text)
        say_color_jitter(reading, applies=True)
    else:
        reading.same("ThreeAugment")
        if args["src"]:
            reading.inert("src", "only with --ThreeAugment")
        else:
            reading.same("src")
        _say_interpolation(reading)
        say_policy(reading, args["train_interpolation"])
        say_color_jitter(reading, applies=args["aa"] in ("", None, "3a"))
        say_erasing(reading)
    if args["repeated_aug"] and is_distributed:
        repeats = {"data.aug_repeats": 3, "data.aug_repeats_form": "sampler"}
        reading.same("repeated_aug", repeats)
    elif args["repeated_aug"]:
        reading.inert("repeated_aug", "one process without torchrun takes a random sampler")
    else:
        reading.same("repeated_aug")


def _say_interpolation(reading: Reading) -> None:
    interpolation = reading.args["train_interpolation"]
    if interpolation in ("bicubic", "bilinear"):
        reading.same("train_interpolation", {"data.interpolation": interpolation})
    else:
        text = f"{interpolation} there, bicubic here"
        reading.differs("train_interpolation", text, {"data.interpolation": "bicubic"})


def _say_loss(reading: Reading) -> None:
    args = reading.args
    if not args["bce_loss"]:
        reading.same("bce_loss")
        return
    if args["smoothing"]:
        text = "with --smoothing above 0 all targets of --bce-loss become 1: cross-entropy here"
        reading.cannot("bce_loss", text)
    else:
        reading.same("bce_loss", {"loss.name": "bce", "loss.bce_target_thresh": 0.0})


def _say_schedule(reading: Reading, lr: float) -> None:
    args = reading.args
    reading.inert("lr_noise_pct lr_noise_std", "there is no --lr-noise")
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
        reading.cannot(names, f"the schedule {args['sched']}: a cosine here", with_effect(settings))
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
    reasons = "theirs is an epoch late: its first two have --warmup-lr"
    say_rate(reading, "min_lr warmup_lr warmup_epochs", theirs, settings, reasons)
