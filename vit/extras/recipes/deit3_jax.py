"""Map commands of deit3-jax's main.py (DeiT and DeiT III in JAX) to settings of this project.

In deit3-jax, the batch size is the total over all devices. Lengths are in steps. The learning rate
changes each step, starts at 1e-6 and ends at 1e-5. Weight decay applies only to kernels. All blocks
have the same drop-path rate. LAMB clips gradients only with `--clip-grad`. All copies of an image
are in the same batch.
"""

from __future__ import annotations

from typing import Any

from vit.extras.recipes.arguments import make_table
from vit.extras.recipes.rates import IMAGENET, after_warmup, map_rate
from vit.extras.recipes.reading import Case, Reading
from vit.extras.recipes.timm_common import (
    color_jitter,
    erasing_as_in_torchvision,
    map_initial_weights,
    map_optimizer_name,
    map_policy,
    map_precision,
)

_RECIPE = """
--train-batch-size        int     2048    = data.global_batch_size
--random-crop             str     rrc     =
--color-jitter            float   0.0     =
--auto-augment            str     rand-m9-mstd0.5-inc1   =
--random-erasing          float   0.25    =
--augment-repeats         int     3       =
--test-crop-ratio         float   0.875   = eval.crop_pct
--mixup                   float   0.8     = augment.mixup_alpha
--cutmix                  float   1.0     = augment.cutmix_alpha
--criterion               str     ce      =
--label-smoothing         float   0.1     = loss.label_smoothing
--layers                  int     12      model.depth
--dim                     int     768     model.embed_dim
--heads                   int     12      model.num_heads
--labels                  int     -1      =
--layerscale              on      -       =
--patch-size              int     16      model.patch_size
--image-size              int     224     = model.image_size
--posemb                  str     learnable   =
--pooling                 str     cls     =
--dropout                 float   0.0     =? model.proj_drop_rate model.attn_drop_rate
--droppath                float   0.1     model.drop_path_rate
--init-seed               int     -       =
--mixup-seed              int     -       =
--dropout-seed            int     -       =
--shuffle-seed            int     -       =
--pretrained-ckpt         str     -       =? init.checkpoint
--label-mapping           str     -       off: a pretrained head remapped by a table of classes
--optimizer               str     adamw   optim.name
--learning-rate           float   1e-3    = optim.lr
--weight-decay            float   0.05    = optim.weight_decay
--adam-b1                 float   0.9     optim.betas
--adam-b2                 float   0.999   optim.betas
--adam-eps                float   1e-8    = optim.eps
--lr-decay                float   1.0     =
--clip-grad               float   0.0     =
--warmup-steps            int     10000   schedule.warmup_steps
--training-steps          int     200000  = train.steps
--eval-interval           int     0       =? eval.every_steps
"""
_PLACES = """
--train-dataset-shards    str     -
--valid-dataset-shards    str     -
--valid-batch-size        int     256
--train-loader-workers    int     40
--valid-loader-workers    int     5
--grad-ckpt               on      -
--grad-accum              int     1
--log-interval            int     50
--project                 str     -
--name                    str     -
--ipaddr                  str     -
--hostname                str     -
--output-dir              str     .
"""
TABLE = make_table(
    "deit3-jax's main.py", "affjljoo3581/deit3-jax@753d01ba:src/main.py", _RECIPE, _PLACES
)
_SHAPES = {
    (12, 192, 3): "ti",
    (12, 384, 6): "s",
    (12, 768, 12): "b",
    (24, 1024, 16): "l",
    (32, 1280, 16): "h",
}


_CASES = (
    Case("same", "layerscale", lambda a: a["layerscale"], settings={"model.init_values": 1e-4}),
    Case(
        "same",
        "pooling",
        lambda a: a["pooling"] == "gap",
        settings={"model.class_token": False, "model.global_pool": "avg"},
    ),
    Case("same", "pooling", lambda a: True, settings={"model.no_embed_class": True}),
    Case(
        "same",
        "posemb",
        lambda a: a["posemb"] == "sincos2d",
        settings={"model.pos_embed": "sincos2d"},
    ),
    Case(
        "same",
        "random_crop",
        lambda a: a["random_crop"] == "src",
        settings={"augment.crop": "simple"},
    ),
    Case(
        "cannot",
        "random_crop",
        lambda a: a["random_crop"] != "rrc",
        "center crops in training: replaced by random crops",
    ),
    Case("same", "color_jitter", lambda a: a["color_jitter"], settings=color_jitter),
    Case(
        "same",
        "random_erasing",
        lambda a: a["random_erasing"],
        settings=lambda a: erasing_as_in_torchvision(a["random_erasing"]),
    ),
    Case(
        "differs",
        "",
        lambda a: a["mixup"] or a["cutmix"],
        "deit3-jax draws one lambda and box for the images of a device, with random partners; this"
        " project draws one for each augment.mix_group_size images, with neighbours",
    ),
    Case(
        "same",
        "criterion",
        lambda a: a["criterion"] != "ce",
        settings={"loss.name": "bce", "loss.bce_target_thresh": 0.0},
    ),
    Case("inert", "label_smoothing", lambda a: a["criterion"] != "ce", "only with --criterion ce"),
    Case(
        "same",
        "weight_decay",
        lambda a: a["weight_decay"],
        settings=lambda a: {
            "optim.weight_decay": a["weight_decay"],
            "optim.no_weight_decay": "not_kernels",
        },
    ),
    Case(
        "same",
        "adam_b1 adam_b2",
        lambda a: True,
        settings=lambda a: {"optim.betas": [a["adam_b1"], a["adam_b2"]]},
    ),
    Case(
        "same",
        "clip_grad",
        lambda a: True,
        settings=lambda a: {"optim.clip_grad_norm": a["clip_grad"] or None},
    ),
    Case(
        "cannot",
        "lr_decay",
        lambda a: a["lr_decay"] != 1,
        "layer-wise rates with a factor of {lr_decay}; the head has the last block's",
    ),
    Case(
        "same",
        "shuffle_seed",
        lambda a: a["shuffle_seed"] is not None,
        settings=lambda a: {"train.seed": a["shuffle_seed"]},
    ),
)


def map_arguments(reading: Reading, num_gpus: int | None, is_distributed: bool) -> None:
    """Map the arguments of deit3-jax."""
    _map_model(reading)
    _map_images(reading)
    _map_optimizer(reading)
    reading.apply(_CASES)
    map_precision(reading, "fp32 with matrix products in bf16, as on TPUs")
    map_initial_weights(
        reading, "normal with std 0.02 everywhere, including class token and patches"
    )


def _map_model(reading: Reading) -> None:
    args = reading.args
    shape = (args["layers"], args["dim"], args["heads"])
    settings: dict[str, Any] = {"model.name": f"vit_{_SHAPES.get(shape, 'b')}{args['patch_size']}"}
    if shape not in _SHAPES:
        settings |= zip(("model.depth", "model.embed_dim", "model.num_heads"), shape, strict=True)
    reading.same("layers dim heads patch_size", settings)
    constant = {"model.drop_path_schedule": "constant"} if args["droppath"] else {}
    reading.same("droppath", {"model.drop_path_rate": args["droppath"], **constant})


def _map_images(reading: Reading) -> None:
    args = reading.args
    if args["auto_augment"] != "none":
        map_policy(reading, "bilinear or bicubic", "auto_augment")
    batch, repeats = args["train_batch_size"], args["augment_repeats"]
    if repeats <= 1:
        return
    text = (
        "all copies of an image are in one batch, as in this project, but an epoch of deit3-jax"
        f" has {repeats} times as many steps"
    )
    settings = {"data.aug_repeats": repeats}
    if batch % repeats:
        text += (
            f"; a batch of {batch} is not a multiple of {repeats} copies, so samples are drawn like"
            " DeiT's sampler"
        )
        settings["data.aug_repeats_form"] = "sampler"
    reading.differs("augment_repeats", text, settings)


def _map_optimizer(reading: Reading) -> None:
    args = reading.args
    lr = args["learning_rate"]
    map_optimizer_name(reading, "optimizer", args["optimizer"])
    per_epoch = max(IMAGENET // max(args["train_batch_size"], 1), 1)
    settings = {
        "schedule.name": "cosine",
        "schedule.warmup_steps": args["warmup_steps"],
        "schedule.warmup_lr": min(1e-6, lr),
        "schedule.min_lr": 1e-5 if lr >= 1e-5 else lr,
    }
    theirs = after_warmup(
        lr,
        args["training_steps"] / per_epoch,
        warmup_epochs=args["warmup_steps"] / per_epoch,
        warmup_lr=1e-6,
        min_lr=1e-5,
    )
    map_rate(reading, "warmup_steps", theirs, settings, "")
