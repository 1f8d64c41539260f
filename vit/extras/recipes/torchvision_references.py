"""Map commands of torchvision's references/classification/train.py for ViTs to our settings.

In torchvision, the batch size is per GPU, and the learning rate is not scaled. Each batch gets
either MixUp or CutMix. Weight decay applies to all parameters, unless one of three extra decay
flags is given. The weight average is updated every --model-ema-steps steps. Its decay depends on
the batch size and the number of epochs. Images are resized bilinearly.
"""

from functools import partial

from vit.extras.recipes.arguments import make_table, read_words
from vit.extras.recipes.rates import after_warmup, map_schedule
from vit.extras.recipes.reading import (
    Findings,
    Program,
    Reading,
    cannot,
    differs,
    implied,
    inert,
    same,
)
from vit.extras.recipes.timm_common import (
    crop_pct_for,
    initial_weights,
    map_batch,
    map_repeats,
    not_available,
    one_draw_per_gpu,
    precision,
)
from vit.system.spelling import did_you_mean

_RECIPE = """
--model                   str     resnet18   {vit_b_16: {model.name: vit_b16},\
 vit_b_32: {model.name: vit_b32}, vit_l_16: {model.name: vit_l16},\
 vit_l_32: {model.name: vit_l32}, vit_h_14: {model.name: vit_h14}, refuse: "expected one of\
 torchvision's ViTs: vit_b_16, vit_b_32, vit_l_16, vit_l_32 or vit_h_14"}
-b --batch-size           int     32      per GPU; data.global_batch_size is the total
--epochs                  int     90      train.epochs
--train-crop-size         int     224     model.image_size
--val-crop-size           int     224     model.image_size
--val-resize-size         int     256     eval.crop_pct
--interpolation           str     bilinear   data.interpolation
--auto-augment            str     -       augment.auto_augment, or augment.randaugment_ops
--ra-magnitude            int     9       augment.randaugment_magnitude
--augmix-severity         int     3       of AugMix
--random-erase            float   0.0     {0: {}, else: {augment.erasing_prob: VALUE,\
 augment.erasing_mode: const, augment.erasing_area: [0.02, 0.33],\
 augment.erasing_aspect: [0.3, 3.3]}}
--ra-sampler              on      -       order.aug_repeats
--ra-reps                 int     3       order.aug_repeats
--label-smoothing         float   0.0     loss.label_smoothing
--mixup-alpha             float   0.0     augment.mixup_alpha
--cutmix-alpha            float   0.0     augment.cutmix_alpha
--opt                     str     sgd     optim.name
--momentum                float   0.9     optim.momentum
--lr                      float   0.1     optim.lr
--clip-grad-norm          float   -       optim.clip_grad_norm
--weight-decay --wd       float   1e-4    optim.weight_decay
--norm-weight-decay       float   -       decay of norms, by default --wd
--bias-weight-decay       float   -       decay of biases, by default --wd
--transformer-embedding-decay  float  -   decay of class token and positions, by default --wd
--lr-scheduler            str     steplr  schedule.name
--lr-warmup-epochs        int     0       schedule.warmup_epochs
--lr-warmup-method        str     constant   linear, or constant
--lr-warmup-decay         float   0.01    first rate as a factor
--lr-min                  float   0.0     schedule.min_lr
--lr-step-size            int     30      of step schedules
--lr-gamma                float   0.1     of step schedules
--model-ema               on      -       -
--model-ema-decay         float   0.99998  ema.decay
--model-ema-steps         int     32      ema.every_steps
--sync-bn                 on      -       off: synchronized batch norm, which a ViT does not have
--pretrained              on      -       init.checkpoint, in old versions
--weights                 str     -       init.checkpoint
--amp                     on      -       -
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
--test-only               on      -       evaluates: --test-only
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


def _map_rest(reading: Reading) -> Findings:
    """Map what no argument of torchvision's training script controls."""
    args = reading.args
    yield implied({"eval.every_epochs": 1})
    if args["mixup_alpha"] or args["cutmix_alpha"]:
        yield differs("", one_draw_per_gpu("torchvision", args["batch_size"]))
    if args["clip_grad_norm"] is not None:
        yield differs(
            "",
            "some revisions of train.py clip gradients after the update, which has no effect"
            " (pytorch/vision@017e9b99)",
        )

    yield precision("fp16 with a scaled loss" if args["amp"] else "fp32")
    yield initial_weights(
        reading, "Xavier's in MLPs and attention, a head of zeros, patches normal"
    )


def _map_view(reading: Reading) -> Findings:
    """Map the sizes of evaluation images."""
    size, crop, resized = (
        reading.args[name] for name in ("train_crop_size", "val_crop_size", "val_resize_size")
    )
    if crop == size:
        yield same("val_crop_size")
    else:
        yield cannot(
            "val_crop_size",
            f"evaluation at {crop} px: replaced by the training size (set model.image_size in"
            " launch/eval.py)",
        )

    crop_pct = crop_pct_for(size, resized)
    if crop_pct is None:
        yield cannot("val_resize_size", "an evaluation image smaller than the crop")
    else:
        yield same("val_resize_size", {"eval.crop_pct": crop_pct})


def _map_repeats(reading: Reading) -> Findings:
    if reading.args["ra_sampler"]:
        yield from map_repeats(
            reading,
            "ra_sampler ra_reps",
            reading.args["ra_reps"],
            "a single process uses a random sampler",
        )
    else:
        yield same("ra_sampler")
        yield inert("ra_reps", "--ra-sampler is off")


def _map_policy(reading: Reading) -> Findings:
    """Map `--auto-augment`. Only its value `ra` uses `--ra-magnitude`."""
    policy = reading.args["auto_augment"]
    policies = ("ra", "ta_wide", "augmix", "imagenet", "cifar10", "svhn")
    if policy not in (None, *policies):
        raise ValueError(
            f"--auto-augment {policy}: train.py rejects it{did_you_mean(policy, policies)}:"
            f" expected {', '.join(policies)}"
        )

    if policy == "ra":
        settings = {
            "augment.randaugment_layers": 2,
            "augment.randaugment_ops": "torchvision",
            "augment.randaugment_magnitude": float(reading.args["ra_magnitude"]),
        }
        yield same("auto_augment ra_magnitude", settings)
        yield inert("augmix_severity", "the policy is not AugMix")
        return

    if policy == "augmix":
        yield cannot("auto_augment", "AugMix")
    else:
        yield same("auto_augment", {"augment.auto_augment": policy} if policy else {})
    yield inert("ra_magnitude augmix_severity", "the policy does not use it")


def _map_optimizer(reading: Reading) -> Findings:
    args = reading.args
    name = args["opt"].lower()
    if name.startswith("sgd"):
        yield same("opt", {"optim.name": "sgd", "optim.nesterov": "nesterov" in name})
    elif name == "adamw":
        yield same("opt", {"optim.name": "adamw"})
        yield inert("momentum", "AdamW uses betas")
    else:
        raise not_available(f"--opt {args['opt']}")


def _map_decay(reading: Reading) -> Findings:
    """Map the weight decay of weights, norms, biases and embeddings. All default to --wd."""
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
        yield same(" ".join(names))
    elif theirs in lists:
        yield same(" ".join(names), {"optim.no_weight_decay": lists[theirs]})
    else:
        parts = zip(("norms", "biases", "class token and positions"), theirs, strict=True)
        text = ", ".join(f"{part} have a weight decay of {value:g}" for part, value in parts)
        yield cannot(" ".join(names), f"{text}, in this project none")


def _map_schedule(reading: Reading) -> Findings:
    """Map `--lr-scheduler`, which torchvision steps once per epoch, and the warm-up."""
    args = reading.args
    settings = {
        "schedule.name": "cosine",
        "schedule.interval": "epoch",
        "schedule.warmup_epochs": args["lr_warmup_epochs"],
        "schedule.warmup_lr": args["lr"] * args["lr_warmup_decay"],
        "schedule.min_lr": args["lr_min"],
    }

    kind = args["lr_scheduler"]
    is_linear = args["lr_warmup_method"] == "linear"
    reasons = "the warm-up is linear in this project and constant in torchvision"

    return map_schedule(
        reading,
        "lr_scheduler lr_warmup_epochs lr_warmup_method lr_warmup_decay lr_min",
        settings,
        partial(
            after_warmup, warmup_changes="each epoch" if is_linear else "never", per_epoch=True
        ),
        limited=["schedule.min_lr"],
        kind="" if kind.lower() == "cosineannealinglr" else kind,
        unused="lr_step_size lr_gamma",
        reasons="" if is_linear else reasons,
    )


def _map_average(reading: Reading) -> Findings:
    """Map the weight average, which equals the weights during the warm-up."""
    args = reading.args
    names = "model_ema_decay model_ema_steps"
    steps = args["model_ema_steps"]
    batch = reading.settings["data.global_batch_size"]
    if not args["model_ema"]:
        yield inert(names, "the average is off")
        return

    share = (1 - args["model_ema_decay"]) * batch * steps / args["epochs"]
    if share >= 1:
        yield cannot(names, "a decay of 0, which makes the average equal to the weights")
    else:
        settings = {"ema.decay": 1 - share, "ema.every_steps": steps}
        if args["lr_warmup_epochs"]:
            settings["ema.after_epochs"] = args["lr_warmup_epochs"]
        formula = f"1 - {1 - args['model_ema_decay']:.5g} x {batch} x {steps} / {args['epochs']}"
        yield same(names, settings, formula)


def _map_weights(reading: Reading) -> Findings:
    args = reading.args
    if args["weights"] or args["pretrained"]:
        yield differs(
            "weights pretrained",
            f"torchvision's weights {args['weights'] or args['model']}: download the file",
            {"init.checkpoint": f"{args['model']}.pth"},
        )
    else:
        yield same("weights pretrained")


PROGRAM = Program(
    parse=lambda command: read_words(TABLE, command.words),
    handlers={
        "batch_size": map_batch,
        "val_crop_size": _map_view,
        "auto_augment": _map_policy,
        "ra_sampler": _map_repeats,
        "opt": _map_optimizer,
        "norm_weight_decay": _map_decay,
        "lr_scheduler": _map_schedule,
        "model_ema_decay": _map_average,
        "pretrained": _map_weights,
    },
    rest=_map_rest,
)
