"""Map commands of torchvision's references/classification/train.py for ViTs to our settings.

In torchvision, the batch size is per GPU, and the learning rate is not scaled. Each batch gets
either MixUp or CutMix. Weight decay applies to all parameters, unless one of three extra decay
flags is given. The weight average is updated every --model-ema-steps steps, with a decay that
depends on batch size and epochs. Images are resized bilinearly.
"""

from __future__ import annotations

import re

from vit.extras.recipes.arguments import make_table
from vit.extras.recipes.rates import map_rate, torchvision_cosine, with_effect
from vit.extras.recipes.reading import Case, Reading
from vit.extras.recipes.timm_common import (
    erasing_as_in_torchvision,
    map_batch,
    map_initial_weights,
    map_precision,
    map_repeats,
    not_available,
)
from vit.system.spelling import did_you_mean

_RECIPE = """
--model                   str     resnet18   model.name
-b --batch-size           int     32      per GPU; data.global_batch_size is the total
--epochs                  int     90      = train.epochs
--opt                     str     sgd     optim.name
--lr                      float   0.1     = optim.lr
--momentum                float   0.9     = optim.momentum
--weight-decay --wd       float   1e-4    = optim.weight_decay
--norm-weight-decay       float   -       =
--bias-weight-decay       float   -       =
--transformer-embedding-decay  float  -   =
--label-smoothing         float   0.0     = loss.label_smoothing
--mixup-alpha             float   0.0     = augment.mixup_alpha
--cutmix-alpha            float   0.0     = augment.cutmix_alpha
--lr-scheduler            str     steplr  schedule.name
--lr-warmup-epochs        int     0       schedule.warmup_epochs
--lr-warmup-method        str     constant   linear, or constant
--lr-warmup-decay         float   0.01    first rate as a factor
--lr-step-size            int     30      of step schedules
--lr-gamma                float   0.1     of step schedules
--lr-min                  float   0.0     schedule.min_lr
--sync-bn                 on      -       off: synchronized batch norm, which a ViT does not have
--pretrained              on      -       =
--auto-augment            str     -       =? augment.auto_augment
--ra-magnitude            int     9       augment.randaugment_magnitude
--augmix-severity         int     3       of AugMix
--random-erase            float   0.0     =
--amp                     on      -       =
--model-ema               on      -       =
--model-ema-steps         int     32      steps between updates of the average
--model-ema-decay         float   0.99998  train.ema_decay
--interpolation           str     bilinear   = data.interpolation
--val-resize-size         int     256     = eval.resize_px
--val-crop-size           int     224     =
--train-crop-size         int     224     = model.image_size
--clip-grad-norm          float   -       = optim.clip_grad_norm
--ra-sampler              on      -       =
--ra-reps                 int     3       data.aug_repeats
--weights                 str     -       =
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


_POLICIES = ("ra", "ta_wide", "augmix", "imagenet", "cifar10", "svhn")
_CASES = (
    Case(
        "cannot",
        "val_crop_size",
        lambda a: a["val_crop_size"] != a["train_crop_size"],
        "evaluation at {val_crop_size} px: replaced by the training size (set model.image_size in"
        " launch/eval.py)",
    ),
    Case(
        "cannot",
        "val_resize_size",
        lambda a: a["val_resize_size"] < a["train_crop_size"],
        "an evaluation image smaller than the crop",
    ),
    Case(
        "same",
        "val_resize_size",
        lambda a: a["val_resize_size"] == a["train_crop_size"] / 0.875,
        settings={"eval.crop_pct": 0.875},
    ),
    Case(
        "same",
        "random_erase",
        lambda a: a["random_erase"],
        # torchvision fills erased boxes with the mean color.
        settings=lambda a: {
            "augment.erasing_mode": "const",
            **erasing_as_in_torchvision(a["random_erase"]),
        },
    ),
    Case("inert", "ra_reps", lambda a: not a["ra_sampler"], "--ra-sampler is off"),
    Case(
        "differs",
        "",
        lambda a: a["mixup_alpha"] or a["cutmix_alpha"],
        "torchvision draws one lambda and box for the {batch_size} images of a GPU; this project"
        " draws one for each augment.mix_group_size images, which makes batches independent of the"
        " number of GPUs",
    ),
    Case(
        "same",
        "auto_augment ra_magnitude",
        lambda a: a["auto_augment"] == "ra",
        settings=lambda a: {
            "augment.randaugment_layers": 2,
            "augment.randaugment_ops": "torchvision",
            "augment.randaugment_magnitude": float(a["ra_magnitude"]),
        },
    ),
    Case("cannot", "auto_augment", lambda a: a["auto_augment"] == "augmix", "AugMix"),
    Case("inert", "ra_magnitude augmix_severity", lambda a: True, "the policy does not use it"),
    Case("same", "opt", lambda a: a["opt"].lower() == "adamw", settings={"optim.name": "adamw"}),
    Case(
        "same",
        "opt",
        lambda a: True,
        settings=lambda a: {"optim.name": "sgd", "optim.nesterov": "nesterov" in a["opt"].lower()},
    ),
    Case("inert", "momentum", lambda a: a["opt"].lower() == "adamw", "AdamW uses betas"),
    Case(
        "differs",
        "",
        lambda a: a["clip_grad_norm"] is not None,
        "some revisions of train.py clip gradients after the update, which has no effect"
        " (pytorch/vision@017e9b99)",
    ),
    Case(
        "inert",
        "lr_step_size lr_gamma",
        lambda a: a["lr_scheduler"].lower() == "cosineannealinglr",
        "the schedule is a cosine",
    ),
    Case(
        "inert",
        "model_ema_decay model_ema_steps",
        lambda a: not a["model_ema"],
        "the average is off",
    ),
    Case(
        "differs",
        "weights pretrained",
        lambda a: a["weights"] or a["pretrained"],
        "torchvision's weights of {model}: download the file",
        lambda a: {"init.checkpoint": f"{a['model']}.pth"},
    ),
)


def map_arguments(reading: Reading, num_gpus: int | None, is_distributed: bool) -> None:
    """Map the arguments of torchvision's training script."""
    args = reading.args
    match = re.fullmatch(r"vit_([blh])_(\d\d)", args["model"])
    if not match:
        raise ValueError(
            f"--model {args['model']}: expected one of torchvision's ViTs: vit_b_16, vit_b_32,"
            " vit_l_16, vit_l_32 or vit_h_14"
        )
    reading.same("model", {"model.name": f"vit_{match[1]}{match[2]}"})
    policy = args["auto_augment"]
    if policy not in (None, *_POLICIES):
        raise ValueError(
            f"--auto-augment {policy}: train.py rejects it{did_you_mean(policy, _POLICIES)}:"
            f" expected {', '.join(_POLICIES)}"
        )
    batch = map_batch(reading, "batch_size", num_gpus)
    copies = args["ra_reps"] if args["ra_sampler"] else 1
    map_repeats(reading, "ra_sampler ra_reps", copies, is_distributed)
    if not re.match("sgd|adamw$", args["opt"].lower()):
        raise not_available(f"--opt {args['opt']}")
    reading.apply(_CASES)
    _map_decay(reading)
    _map_schedule(reading)
    _map_average(reading, batch)
    reading.same("", {"eval.every_epochs": 1})
    map_precision(reading, "fp16 with a scaled loss" if args["amp"] else "fp32")
    map_initial_weights(reading, "Xavier's in MLPs, a head of zeros, patches normal")


def _map_decay(reading: Reading) -> None:
    """Map the weight decay of weights, norms, biases and embeddings, which defaults to --wd."""
    args = reading.args
    decay = args["weight_decay"]
    names = ("norm_weight_decay", "bias_weight_decay", "transformer_embedding_decay")
    theirs = tuple(decay if args[name] is None else args[name] for name in names)
    lists = {
        (decay, decay, decay): "nothing",
        (0.0, decay, decay): "norms",
        (decay, decay, 0.0): "embeddings",
        (0.0, 0.0, 0.0): "timm",
    }
    if not decay:
        return
    if theirs in lists:
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
    is_linear = args["lr_warmup_method"] == "linear"
    theirs = torchvision_cosine(
        lr,
        args["epochs"],
        warmup_epochs=warmup,
        warmup_factor=args["lr_warmup_decay"] if warmup else 1.0,
        min_lr=args["lr_min"],
        linear=is_linear,
    )
    reasons = (
        "" if is_linear else "the warm-up is linear in this project and constant in torchvision"
    )
    map_rate(reading, names, theirs, settings, reasons)


def _map_average(reading: Reading, batch: int) -> None:
    """Map the weight average, which equals the weights during the warm-up."""
    args = reading.args
    if not args["model_ema"]:
        return
    steps = args["model_ema_steps"]
    share = min(1.0, (1 - args["model_ema_decay"]) * batch * steps / args["epochs"])
    if share == 1:
        text = "a decay of 0, which makes the average equal to the weights"
        reading.cannot("model_ema_decay model_ema_steps", text)
        return
    settings = {"train.ema_decay": 1 - share, "train.ema_every_steps": steps}
    if args["lr_warmup_epochs"]:
        settings["train.ema_after_epochs"] = args["lr_warmup_epochs"]
    formula = f"1 - {1 - args['model_ema_decay']:.5g} x {batch} x {steps} / {args['epochs']}"
    reading.same("model_ema_decay model_ema_steps", settings, formula)
