"""torchvision's references/classification/train.py, for its ViTs.

Its own meanings: the batch is that of a GPU, the rate is as given; MixUp and CutMix take turns;
everything is decayed unless one of three other decays is given; the average moves each
--model-ema-steps by a decay that depends on batch and epochs; images are resized bilinearly.
"""

from __future__ import annotations

import re
from typing import Any

from vit.extras.recipes.arguments import Given, Table, make_table
from vit.extras.recipes.rates import say_rate, torchvision_cosine, with_effect
from vit.extras.recipes.reading import Reading
from vit.extras.recipes.timm_common import (
    not_available,
    say_batch,
    say_initial_weights,
    say_precision,
)
from vit.system.spelling import did_you_mean

_RECIPE = """
--model                   str     resnet18   model.name
-b --batch-size           int     32      of a GPU: data.global_batch_size is that of all GPUs
--epochs                  int     90      train.epochs
--opt                     str     sgd     optim.name
--lr                      float   0.1     optim.lr
--momentum                float   0.9     optim.momentum
--weight-decay --wd       float   1e-4    optim.weight_decay
--norm-weight-decay       float   -       decay of norms; as --wd if not given
--bias-weight-decay       float   -       decay of biases; as --wd if not given
--transformer-embedding-decay  float  -   decay of class token and positions; as --wd if not given
--label-smoothing         float   0.0     loss.label_smoothing
--mixup-alpha             float   0.0     augment.mixup_alpha
--cutmix-alpha            float   0.0     augment.cutmix_alpha
--lr-scheduler            str     steplr  schedule.name
--lr-warmup-epochs        int     0       schedule.warmup_epochs
--lr-warmup-method        str     constant   linear, or constant
--lr-warmup-decay         float   0.01    rate at the start, as a factor
--lr-step-size            int     30      of step schedules
--lr-gamma                float   0.1     of step schedules
--lr-min                  float   0.0     schedule.min_lr
--sync-bn                 on      -       of batch norm
--pretrained              on      -       init.checkpoint, in old versions
--auto-augment            str     -       augment.auto_augment, or augment.randaugment_ops
--ra-magnitude            int     9       augment.randaugment_magnitude
--augmix-severity         int     3       of AugMix
--random-erase            float   0.0     augment.erasing_prob
--amp                     on      -       train.precision
--model-ema               on      -       train.ema_decay
--model-ema-steps         int     32      steps from one move of the average to the next
--model-ema-decay         float   0.99998  train.ema_decay
--interpolation           str     bilinear   data.interpolation
--val-resize-size         int     256     eval.resize_px
--val-crop-size           int     224     model.image_size
--train-crop-size         int     224     model.image_size
--clip-grad-norm          float   -       optim.clip_grad_norm
--ra-sampler              on      -       data.aug_repeats
--ra-reps                 int     3       data.aug_repeats
--weights                 str     -       init.checkpoint
"""
_PLACES = """
--data-path               str     /datasets01/imagenet_full_size/061417/
--device                  str     cuda
-j --workers              int     16
--print-freq              int     10
--output-dir              str     .
--resume                  str     -
--start-epoch             int     0
--cache-dataset           on      -
--test-only               on      -
--world-size              int     1
--dist-url                str     env://
--use-deterministic-algorithms  on  -
--backend                 str     PIL
--use-v2                  on      -
"""
TABLE = make_table(
    "torchvision's train.py",
    "pytorch/vision:references/classification/train.py, as its README of 2024 uses it",
    _RECIPE,
    _PLACES,
)


def read(table: Table, given: Given, num_gpus: int | None, is_distributed: bool) -> Reading:
    """Account for a command of torchvision's references."""
    reading = Reading(table, given)
    args = reading.args
    if args["test_only"]:
        raise ValueError(
            "--test-only evaluates, there is nothing to train: python launch/eval.py --checkpoint"
            " FILE --data SHARDS"
        )
    found = re.fullmatch(r"vit_([blh])_(\d\d)", args["model"])
    if not found:
        raise ValueError(
            f"--model {args['model']}: of torchvision's models only vit_b_16, vit_b_32, vit_l_16,"
            " vit_l_32 and vit_h_14 are known here"
        )
    reading.same("model", {"model.name": f"vit_{found[1]}{found[2]}"})
    batch = say_batch(reading, "batch_size", num_gpus)
    reading.same("epochs", {"train.epochs": args["epochs"]})
    _say_images(reading, is_distributed)
    _say_mixing(reading)
    _say_optimizer(reading)
    _say_decay(reading)
    _say_schedule(reading)
    _say_average(reading, batch)
    _say_weights(reading)
    reading.same("", {"eval.every_epochs": 1})
    reading.same("amp")
    say_precision(reading, "fp16 with a scaled loss" if args["amp"] else "fp32")
    say_initial_weights(reading, "Xavier's in MLPs, a head of zeros, patches normal")
    reading.finish()
    return reading


def _say_images(reading: Reading, is_distributed: bool) -> None:
    args = reading.args
    size = args["train_crop_size"]
    reading.same("train_crop_size", {"model.image_size": size})
    if args["val_crop_size"] == size:
        reading.same("val_crop_size")
    else:
        text = f"evaluation at {args['val_crop_size']} px; here as in training (launch/eval.py has"
        reading.cannot("val_crop_size", f"{text} model.image_size)")
    if args["val_resize_size"] >= size:
        view = {"eval.resize_px": args["val_resize_size"]}
        if args["val_resize_size"] == size / 0.875:
            view = {"eval.crop_pct": 0.875}
        reading.same("val_resize_size", view)
    else:
        reading.cannot("val_resize_size", "a resized image that is smaller than its crop")
    reading.same("interpolation", {"data.interpolation": args["interpolation"]})
    _say_policy(reading)
    reading.same("random_erase", _erasing(args["random_erase"]))
    if args["ra_sampler"] and is_distributed:
        repeats = {"data.aug_repeats": args["ra_reps"], "data.aug_repeats_form": "sampler"}
        reading.same("ra_sampler ra_reps", repeats)
    elif args["ra_sampler"]:
        reading.inert("ra_sampler ra_reps", "one process takes a random sampler")
    else:
        reading.same("ra_sampler")
        reading.inert("ra_reps", "there is no --ra-sampler")


def _erasing(prob: float) -> dict[str, Any]:
    """RandomErasing after the normalisation: the mean colour, its own ranges."""
    if not prob:
        return {}
    return {
        "augment.erasing_prob": prob,
        "augment.erasing_mode": "const",
        "augment.erasing_area": [0.02, 0.33],
        "augment.erasing_aspect": [0.3, 3.3],
    }


def _say_policy(reading: Reading) -> None:
    policy = reading.args["auto_augment"]
    if policy == "ra":
        settings = {
            "augment.randaugment_layers": 2,
            "augment.randaugment_ops": "torchvision",
            "augment.randaugment_magnitude": float(reading.args["ra_magnitude"]),
        }
        reading.same("auto_augment ra_magnitude", settings)
        reading.inert("augmix_severity", "the policy is not AugMix")
        return
    if policy is None:
        reading.same("auto_augment")
    elif policy in ("ta_wide", "imagenet", "cifar10", "svhn"):
        reading.same("auto_augment", {"augment.auto_augment": policy})
    elif policy == "augmix":
        reading.cannot("auto_augment", "AugMix")
    else:
        known = ("ra", "ta_wide", "augmix", "imagenet", "cifar10", "svhn")
        raise ValueError(
            f"--auto-augment {policy}: train.py stops at it{did_you_mean(policy, known)}: expected"
            f" {', '.join(known)}"
        )
    reading.inert("ra_magnitude augmix_severity", "the policy is another")


def _say_mixing(reading: Reading) -> None:
    args = reading.args
    reading.same("label_smoothing", {"loss.label_smoothing": args["label_smoothing"]})
    reading.same("mixup_alpha", {"augment.mixup_alpha": args["mixup_alpha"]})
    reading.same("cutmix_alpha", {"augment.cutmix_alpha": args["cutmix_alpha"]})
    if args["mixup_alpha"] or args["cutmix_alpha"]:
        text = (
            f"one draw of lambda and box for the {args['batch_size']} images of a GPU there, for"
            " each augment.mix_group_size images here, so that batches do not depend on the GPUs"
        )
        reading.differs("", text)


def _say_optimizer(reading: Reading) -> None:
    args = reading.args
    name = args["opt"].lower()
    if name.startswith("sgd"):
        reading.same("opt", {"optim.name": "sgd", "optim.nesterov": "nesterov" in name})
        reading.same("momentum", {"optim.momentum": args["momentum"]})
    elif name == "adamw":
        reading.same("opt", {"optim.name": "adamw"})
        reading.inert("momentum", "adamw has betas")
    else:
        raise not_available(f"--opt {args['opt']}")
    reading.same("lr", {"optim.lr": args["lr"]})
    reading.same("clip_grad_norm", {"optim.clip_grad_norm": args["clip_grad_norm"]})
    if args["clip_grad_norm"] is not None:
        text = (
            "some revisions of train.py clip after the update, which has no effect"
            " (pytorch/vision@017e9b99)"
        )
        reading.differs("", text)


def _say_decay(reading: Reading) -> None:
    """Decays of weights, norms, biases and positions; what is not given is as --wd."""
    args = reading.args
    decay = args["weight_decay"]
    reading.same("weight_decay", {"optim.weight_decay": decay})
    names = ("norm_weight_decay", "bias_weight_decay", "transformer_embedding_decay")
    theirs = tuple(decay if args[name] is None else args[name] for name in names)
    lists = {
        (decay, decay, decay): "nothing",
        (0.0, decay, decay): "norms",
        (decay, decay, 0.0): "embeddings",
        (0.0, 0.0, 0.0): "timm",
    }
    if not decay:
        reading.same(" ".join(names))
    elif theirs in lists:
        reading.same(" ".join(names), {"optim.no_weight_decay": lists[theirs]})
    else:
        parts = zip(("norms", "biases", "class token and positions"), theirs, strict=True)
        text = ", ".join(f"{what} are decayed by {value:g}" for what, value in parts)
        reading.cannot(" ".join(names), f"{text}; here not at all")


def _say_schedule(reading: Reading) -> None:
    args = reading.args
    lr = args["lr"]
    warmup = args["lr_warmup_epochs"]
    settings = {
        "schedule.name": "cosine",
        "schedule.interval": "epoch",
        "schedule.warmup_epochs": warmup,
        "schedule.warmup_lr": lr * args["lr_warmup_decay"],
        "schedule.min_lr": min(args["lr_min"], lr),
    }
    names = "lr_scheduler lr_warmup_epochs lr_warmup_method lr_warmup_decay lr_min"
    if args["lr_scheduler"].lower() != "cosineannealinglr":
        text = f"the schedule {args['lr_scheduler']}: a cosine here"
        reading.cannot(f"{names} lr_step_size lr_gamma", text, with_effect(settings))
        return
    reading.inert("lr_step_size lr_gamma", "the schedule is a cosine")
    theirs = torchvision_cosine(
        lr,
        args["epochs"],
        warmup_epochs=warmup,
        warmup_factor=args["lr_warmup_decay"] if warmup else 1.0,
        min_lr=args["lr_min"],
        linear=args["lr_warmup_method"] == "linear",
    )
    is_linear = args["lr_warmup_method"] == "linear"
    reasons = "" if is_linear else "the warm-up is a line here, one value there"
    say_rate(reading, names, theirs, settings, reasons)


def _say_average(reading: Reading, batch: int) -> None:
    """The average: it moves each so many steps, and is a copy of the weights in the warm-up."""
    args = reading.args
    reading.same("model_ema")
    if not args["model_ema"]:
        reading.inert("model_ema_decay model_ema_steps", "no average is kept")
        return
    steps = args["model_ema_steps"]
    share = min(1.0, (1 - args["model_ema_decay"]) * batch * steps / args["epochs"])
    if share == 1:
        text = "an average that is a copy of the weights"
        reading.cannot("model_ema_decay model_ema_steps", text)
        return
    settings = {"train.ema_decay": 1 - share, "train.ema_every_steps": steps}
    if args["lr_warmup_epochs"]:
        settings["train.ema_after_epochs"] = args["lr_warmup_epochs"]
    how = f"1 - {1 - args['model_ema_decay']:.5g} x {batch} x {steps} / {args['epochs']}"
    reading.same("model_ema_decay model_ema_steps", settings, how)


def _say_weights(reading: Reading) -> None:
    args = reading.args
    reading.expect_off({"sync_bn": "of batch norm: a ViT has none"})
    if args["weights"] or args["pretrained"]:
        text = f"torchvision's weights {args['weights'] or args['model']}: give their file"
        reading.differs("weights pretrained", text, {"init.checkpoint": f"{args['model']}.pth"})
    else:
        reading.same("weights pretrained")
