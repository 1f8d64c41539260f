"""Map commands of deit3-jax's main.py (DeiT and DeiT III in JAX) to settings of this project.

In deit3-jax, the batch size is the total over all devices. Lengths are in steps. The learning rate
changes each step, starts at 1e-6 and ends at 1e-5. Weight decay applies only to kernels. All blocks
have the same drop-path rate. LAMB clips gradients only with `--clip-grad`. All copies of an image
are in the same batch.
"""

from __future__ import annotations

from typing import Any

from vit.extras.recipes.arguments import ParsedArguments, Table, make_table
from vit.extras.recipes.rates import IMAGENET, after_warmup, map_rate
from vit.extras.recipes.reading import Reading
from vit.extras.recipes.timm_common import (
    map_initial_weights,
    map_optimizer_name,
    map_policy,
    map_precision,
)

_RECIPE = """
--train-batch-size        int     2048    data.global_batch_size
--random-crop             str     rrc     augment.crop
--color-jitter            float   0.0     augment.color_jitter
--auto-augment            str     rand-m9-mstd0.5-inc1   augment
--random-erasing          float   0.25    augment.erasing_prob
--augment-repeats         int     3       order.aug_repeats
--test-crop-ratio         float   0.875   eval.crop_pct
--mixup                   float   0.8     augment.mixup_alpha
--cutmix                  float   1.0     augment.cutmix_alpha
--criterion               str     ce      loss
--label-smoothing         float   0.1     loss.label_smoothing
--layers                  int     12      model.depth
--dim                     int     768     model.embed_dim
--heads                   int     12      model.num_heads
--labels                  int     -1      follows from the data
--layerscale              on      -       model.init_values
--patch-size              int     16      model.patch_size
--image-size              int     224     model.image_size
--posemb                  str     learnable   model.pos_embed
--pooling                 str     cls     model.global_pool
--dropout                 float   0.0     model.proj_drop_rate, model.attn_drop_rate
--droppath                float   0.1     model.drop_path_rate
--init-seed               int     -       train.seed
--mixup-seed              int     -       train.seed
--dropout-seed            int     -       train.seed
--shuffle-seed            int     -       train.seed
--pretrained-ckpt         str     -       init.checkpoint
--label-mapping           str     -       class table for a pretrained head
--optimizer               str     adamw   optim.name
--learning-rate           float   1e-3    optim.lr
--weight-decay            float   0.05    optim.weight_decay
--adam-b1                 float   0.9     optim.betas
--adam-b2                 float   0.999   optim.betas
--adam-eps                float   1e-8    optim.eps
--lr-decay                float   1.0     layer-wise rates
--clip-grad               float   0.0     optim.clip_grad_norm
--warmup-steps            int     10000   schedule.warmup_steps
--training-steps          int     200000  train.steps
--eval-interval           int     0       eval.every_steps
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


def read(
    table: Table, parsed: ParsedArguments, num_gpus: int | None, is_distributed: bool
) -> Reading:
    """Map the arguments of deit3-jax."""
    reading = Reading(table, parsed)
    args = reading.args
    batch = args["train_batch_size"]
    reading.same("train_batch_size", {"data.global_batch_size": batch})
    _map_model(reading)
    _map_images(reading)
    _map_mixing(reading)
    _map_optimizer(reading)
    seed = args["shuffle_seed"]
    seeds = "init_seed mixup_seed dropout_seed shuffle_seed"
    reading.same(seeds, {} if seed is None else {"train.seed": seed})
    every = {"eval.every_steps": args["eval_interval"]} if args["eval_interval"] else {}
    reading.same("eval_interval", every)
    map_precision(reading, "fp32 with matrix products in bf16, as on TPUs")
    map_initial_weights(
        reading, "normal with std 0.02 everywhere, including class token and patches"
    )
    reading.finish()
    return reading


def _map_model(reading: Reading) -> None:
    args = reading.args
    shape = (args["layers"], args["dim"], args["heads"])
    settings: dict[str, Any] = {"model.name": f"vit_{_SHAPES.get(shape, 'b')}{args['patch_size']}"}
    if shape not in _SHAPES:
        settings |= {"model.depth": shape[0], "model.embed_dim": shape[1]}
        settings |= {"model.num_heads": shape[2]}
    reading.same("layers dim heads patch_size", settings)
    reading.same("image_size", {"model.image_size": args["image_size"]})
    reading.same("layerscale", {"model.init_values": 1e-4} if args["layerscale"] else {})
    pool = args["pooling"] == "gap"
    gap = {"model.class_token": False, "model.global_pool": "avg"}
    reading.same("pooling", gap if pool else {"model.no_embed_class": True})
    sincos = {"model.pos_embed": "sincos2d"}
    reading.same("posemb", sincos if args["posemb"] == "sincos2d" else {})
    reading.same("labels")
    rate = args["droppath"]
    constant = {"model.drop_path_schedule": "constant"} if rate else {}
    reading.same("droppath", {"model.drop_path_rate": rate, **constant})
    drops = {"model.proj_drop_rate": args["dropout"], "model.attn_drop_rate": args["dropout"]}
    reading.same("dropout", drops if args["dropout"] else {})
    start = {"init.checkpoint": args["pretrained_ckpt"]} if args["pretrained_ckpt"] else {}
    reading.same("pretrained_ckpt", start)
    reading.expect_off({"label_mapping": "a pretrained head remapped by a table of classes"})


def _map_images(reading: Reading) -> None:
    args = reading.args
    reading.same("test_crop_ratio", {"eval.crop_pct": args["test_crop_ratio"]})
    if args["random_crop"] in ("rrc", "src"):
        simple = {"augment.crop": "simple"} if args["random_crop"] == "src" else {}
        reading.same("random_crop", simple)
    else:
        reading.cannot("random_crop", "center crops in training: replaced by random crops")
    policy = args["auto_augment"]
    if policy == "3a":
        reading.same("auto_augment", {"augment.auto_augment": "three_augment"})
    elif policy == "none":
        reading.same("auto_augment")
    else:
        args["aa"] = policy  # `map_policy` reads timm's argument name
        map_policy(reading, "bilinear or bicubic")
        reading.rename("aa", "auto_augment")
    strength = args["color_jitter"]
    jitter = {"augment.color_jitter": [strength, strength, strength, 0]} if strength else {}
    reading.same("color_jitter", jitter)
    erased = {
        "augment.erasing_prob": args["random_erasing"],
        "augment.erasing_area": [0.02, 0.33],
        "augment.erasing_aspect": [0.3, 3.3],
    }
    reading.same("random_erasing", erased if args["random_erasing"] else {})
    repeats = args["augment_repeats"]
    if repeats > 1:
        text = (
            "all copies of an image are in one batch, as in this project, but an epoch of deit3-jax"
            f" has {repeats} times as many steps"
        )
        settings = {"order.aug_repeats": repeats}
        if args["train_batch_size"] % repeats:
            text += (
                f"; a batch of {args['train_batch_size']} is not a multiple of {repeats} copies, so"
                " samples are drawn like DeiT's sampler"
            )
            settings["order.aug_repeats_form"] = "sampler"
        reading.differs("augment_repeats", text, settings)
    else:
        reading.same("augment_repeats")


def _map_mixing(reading: Reading) -> None:
    args = reading.args
    reading.same("mixup", {"augment.mixup_alpha": args["mixup"]})
    reading.same("cutmix", {"augment.cutmix_alpha": args["cutmix"]})
    if args["mixup"] or args["cutmix"]:
        text = (
            "deit3-jax draws one lambda and box for the images of a device, with random partners;"
            " this project draws one for each augment.mix_group_size images, with neighbours"
        )
        reading.differs("", text)
    if args["criterion"] == "ce":
        reading.same("criterion")
        reading.same("label_smoothing", {"loss.label_smoothing": args["label_smoothing"]})
    else:
        reading.same("criterion", {"loss.name": "bce", "loss.bce_target_thresh": 0.0})
        reading.inert("label_smoothing", "only with --criterion ce")


def _map_optimizer(reading: Reading) -> None:
    args = reading.args
    lr = args["learning_rate"]
    map_optimizer_name(reading, "optimizer", args["optimizer"])
    reading.same("learning_rate", {"optim.lr": lr})
    kernels = {"optim.no_weight_decay": "not_kernels"} if args["weight_decay"] else {}
    reading.same("weight_decay", {"optim.weight_decay": args["weight_decay"], **kernels})
    reading.same("adam_b1 adam_b2", {"optim.betas": [args["adam_b1"], args["adam_b2"]]})
    reading.same("adam_eps", {"optim.eps": args["adam_eps"]})
    reading.same("clip_grad", {"optim.clip_grad_norm": args["clip_grad"] or None})
    if args["lr_decay"] == 1:
        reading.same("lr_decay")
    else:
        text = (
            f"layer-wise rates with a factor of {args['lr_decay']}; the head has the last block's"
        )
        reading.cannot("lr_decay", text)
    steps = args["training_steps"]
    reading.same("training_steps", {"train.steps": steps})
    per_epoch = max(IMAGENET // max(args["train_batch_size"], 1), 1)
    settings = {
        "schedule.name": "cosine",
        "schedule.warmup_steps": args["warmup_steps"],
        "schedule.warmup_lr": min(1e-6, lr),
        "schedule.min_lr": 1e-5 if lr >= 1e-5 else lr,
    }
    theirs = after_warmup(
        lr,
        steps / per_epoch,
        warmup_epochs=args["warmup_steps"] / per_epoch,
        warmup_lr=1e-6,
        min_lr=1e-5,
    )
    map_rate(reading, "warmup_steps", theirs, settings, "")
