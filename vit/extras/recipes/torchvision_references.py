"""Map commands of torchvision's references/classification/train.py for ViTs to our settings.

In torchvision, the batch size is per GPU, and the learning rate is not scaled. Each batch gets
either MixUp or CutMix. Weight decay applies to all parameters, unless one of three extra decay
flags is given. The weight average is updated every --model-ema-steps steps. Its decay depends on
the batch size and the number of epochs. Images are resized bilinearly.
"""

from __future__ import annotations

import re
from typing import Any

from vit.extras.recipes.arguments import ParsedArguments, Table, make_table
from vit.extras.recipes.rates import map_rate, torchvision_cosine, with_effect
from vit.extras.recipes.reading import Reading, crop_pct_for
from vit.extras.recipes.timm_common import (
    map_batch,
    map_initial_weights,
    map_precision,
    not_available,
)
from vit.system.spelling import did_you_mean

_RECIPE = """
--model                   str     resnet18   model.name
-b --batch-size           int     32      per GPU; data.global_batch_size is the total
--epochs                  int     90      train.epochs
--opt                     str     sgd     optim.name
--lr                      float   0.1     optim.lr
--momentum                float   0.9     optim.momentum
--weight-decay --wd       float   1e-4    optim.weight_decay
--norm-weight-decay       float   -       decay of norms, by default --wd
--bias-weight-decay       float   -       decay of biases, by default --wd
--transformer-embedding-decay  float  -   decay of class token and positions, by default --wd
--label-smoothing         float   0.0     loss.label_smoothing
--mixup-alpha             float   0.0     augment.mixup_alpha
--cutmix-alpha            float   0.0     augment.cutmix_alpha
--lr-scheduler            str     steplr  schedule.name
--lr-warmup-epochs        int     0       schedule.warmup_epochs
--lr-warmup-method        str     constant   linear, or constant
--lr-warmup-decay         float   0.01    first rate as a factor
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
--model-ema               on      -       ema.decay
--model-ema-steps         int     32      steps between updates of the average
--model-ema-decay         float   0.99998  ema.decay
--interpolation           str     bilinear   data.interpolation
--val-resize-size         int     256     eval.crop_pct
--val-crop-size           int     224     model.image_size
--train-crop-size         int     224     model.image_size
--clip-grad-norm          float   -       optim.clip_grad_norm
--ra-sampler              on      -       order.aug_repeats
--ra-reps                 int     3       order.aug_repeats
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


def read(
    table: Table, parsed: ParsedArguments, num_gpus: int | None, is_distributed: bool
) -> Reading:
    """Map the arguments of torchvision's training script."""
    reading = Reading(table, parsed)
    args = reading.args
    if args["test_only"]:
        raise ValueError(
            "--test-only only evaluates: run python launch/eval.py --checkpoint FILE --data SHARDS"
        )
    match = re.fullmatch(r"vit_([blh])_(\d\d)", args["model"])
    if not match:
        raise ValueError(
            f"--model {args['model']}: expected one of torchvision's ViTs: vit_b_16, vit_b_32,"
            " vit_l_16, vit_l_32 or vit_h_14"
        )
    reading.same("model", {"model.name": f"vit_{match[1]}{match[2]}"})
    batch = map_batch(reading, "batch_size", num_gpus)
    reading.same("epochs", {"train.epochs": args["epochs"]})
    _map_images(reading, is_distributed)
    _map_mixing(reading)
    _map_optimizer(reading)
    _map_decay(reading)
    _map_schedule(reading)
    _map_average(reading, batch)
    _map_weights(reading)
    reading.same("", {"eval.every_epochs": 1})
    reading.same("amp")
    map_precision(reading, "fp16 with a scaled loss" if args["amp"] else "fp32")
    map_initial_weights(reading, "Xavier's in MLPs, a head of zeros, patches normal")
    reading.finish()
    return reading


def _map_images(reading: Reading, is_distributed: bool) -> None:
    args = reading.args
    size = args["train_crop_size"]
    reading.same("train_crop_size", {"model.image_size": size})
    if args["val_crop_size"] == size:
        reading.same("val_crop_size")
    else:
        text = f"evaluation at {args['val_crop_size']} px: replaced by the training size"
        reading.cannot("val_crop_size", f"{text} (set model.image_size in launch/eval.py)")
    crop_pct = crop_pct_for(size, args["val_resize_size"])
    if crop_pct is None:
        reading.cannot("val_resize_size", "an evaluation image smaller than the crop")
    else:
        reading.same("val_resize_size", {"eval.crop_pct": crop_pct})
    reading.same("interpolation", {"data.interpolation": args["interpolation"]})
    _map_policy(reading)
    reading.same("random_erase", _erasing(args["random_erase"]))
    if args["ra_sampler"] and is_distributed:
        repeats = {"order.aug_repeats": args["ra_reps"], "order.aug_repeats_form": "sampler"}
        reading.same("ra_sampler ra_reps", repeats)
    elif args["ra_sampler"]:
        reading.inert("ra_sampler ra_reps", "a single process uses a random sampler")
    else:
        reading.same("ra_sampler")
        reading.inert("ra_reps", "--ra-sampler is off")


def _erasing(prob: float) -> dict[str, Any]:
    """Return settings for torchvision's RandomErasing, which fills boxes with the mean color."""
    if not prob:
        return {}
    return {
        "augment.erasing_prob": prob,
        "augment.erasing_mode": "const",
        "augment.erasing_area": [0.02, 0.33],
        "augment.erasing_aspect": [0.3, 3.3],
    }


def _map_policy(reading: Reading) -> None:
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
        policies = ("ra", "ta_wide", "augmix", "imagenet", "cifar10", "svhn")
        raise ValueError(
            f"--auto-augment {policy}: train.py rejects it{did_you_mean(policy, policies)}:"
            f" expected {', '.join(policies)}"
        )
    reading.inert("ra_magnitude augmix_severity", "the policy does not use it")


def _map_mixing(reading: Reading) -> None:
    args = reading.args
    reading.same("label_smoothing", {"loss.label_smoothing": args["label_smoothing"]})
    reading.same("mixup_alpha", {"augment.mixup_alpha": args["mixup_alpha"]})
    reading.same("cutmix_alpha", {"augment.cutmix_alpha": args["cutmix_alpha"]})
    if args["mixup_alpha"] or args["cutmix_alpha"]:
        text = (
            "torchvision draws one lambda and box for the"
            f" {args['batch_size']} images of a GPU; this project draws one for each"
            " augment.mix_group_size images, which makes batches independent of the number of GPUs"
        )
        reading.differs("", text)


def _map_optimizer(reading: Reading) -> None:
    args = reading.args
    name = args["opt"].lower()
    if name.startswith("sgd"):
        reading.same("opt", {"optim.name": "sgd", "optim.nesterov": "nesterov" in name})
        reading.same("momentum", {"optim.momentum": args["momentum"]})
    elif name == "adamw":
        reading.same("opt", {"optim.name": "adamw"})
        reading.inert("momentum", "AdamW uses betas")
    else:
        raise not_available(f"--opt {args['opt']}")
    reading.same("lr", {"optim.lr": args["lr"]})
    reading.same("clip_grad_norm", {"optim.clip_grad_norm": args["clip_grad_norm"]})
    if args["clip_grad_norm"] is not None:
        text = (
            "some revisions of train.py clip gradients after the update, which has no effect"
            " (pytorch/vision@017e9b99)"
        )
        reading.differs("", text)


def _map_decay(reading: Reading) -> None:
    """Map the weight decay of weights, norms, biases and embeddings. All default to --wd."""
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
        text = ", ".join(f"{part} have a weight decay of {value:g}" for part, value in parts)
        reading.cannot(" ".join(names), f"{text}, in this project none")


def _map_schedule(reading: Reading) -> None:
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
        text = f"the schedule {args['lr_scheduler']}: replaced by a cosine"
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
    reasons = (
        "" if is_linear else "the warm-up is linear in this project and constant in torchvision"
    )
    map_rate(reading, names, theirs, settings, reasons)


def _map_average(reading: Reading, batch: int) -> None:
    """Map the weight average, which equals the weights during the warm-up."""
    args = reading.args
    reading.same("model_ema")
    if not args["model_ema"]:
        reading.inert("model_ema_decay model_ema_steps", "the average is off")
        return
    steps = args["model_ema_steps"]
    share = min(1.0, (1 - args["model_ema_decay"]) * batch * steps / args["epochs"])
    if share == 1:
        text = "a decay of 0, which makes the average equal to the weights"
        reading.cannot("model_ema_decay model_ema_steps", text)
        return
    settings = {"ema.decay": 1 - share, "ema.every_steps": steps}
    if args["lr_warmup_epochs"]:
        settings["ema.after_epochs"] = args["lr_warmup_epochs"]
    formula = f"1 - {1 - args['model_ema_decay']:.5g} x {batch} x {steps} / {args['epochs']}"
    reading.same("model_ema_decay model_ema_steps", settings, formula)


def _map_weights(reading: Reading) -> None:
    args = reading.args
    reading.expect_off({"sync_bn": "synchronized batch norm, which a ViT does not have"})
    if args["weights"] or args["pretrained"]:
        text = f"torchvision's weights {args['weights'] or args['model']}: download the file"
        reading.differs("weights pretrained", text, {"init.checkpoint": f"{args['model']}.pth"})
    else:
        reading.same("weights pretrained")
