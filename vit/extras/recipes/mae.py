"""Map commands of MAE's main_finetune.py and submitit_finetune.py to settings of this project.

In MAE, the learning rate is --blr times the global batch size divided by 256. Learning rates
decrease from the last to the first block. The head uses the mean over patches unless --cls_token is
passed. The learning rate changes each step and starts at 0. Up to 224 px, evaluation uses a center
crop of 224/256 of the image. At larger sizes, evaluation uses the whole image.
"""

from __future__ import annotations

import re
from typing import Any

from vit.extras.recipes.arguments import ParsedArguments, Table, make_table
from vit.extras.recipes.command import Command
from vit.extras.recipes.rates import after_warmup, map_rate
from vit.extras.recipes.reading import Reading
from vit.extras.recipes.timm_common import (
    local_file,
    map_batch,
    map_color_jitter,
    map_erasing,
    map_initial_weights,
    map_layer_decay,
    map_mixing,
    map_policy,
    map_precision,
)

_RECIPE = """
--batch_size              int     64      per GPU; data.global_batch_size is the total
--epochs                  int     50      train.epochs
--accum_iter              int     1       batches per step
--model                   str     vit_large_patch16   model.name
--input_size              int     224     model.image_size
--drop_path               float   0.1     model.drop_path_rate
--clip_grad               float   -       optim.clip_grad_norm
--weight_decay            float   0.05    optim.weight_decay
--lr                      float   -       optim.lr
--blr                     float   1e-3    optim.lr, for a batch of 256
--layer_decay             float   0.75    layer-wise rates
--min_lr                  float   1e-6    schedule.min_lr
--warmup_epochs           int     5       schedule.warmup_epochs
--color_jitter            float   -       augment.color_jitter
--aa                      str     rand-m9-mstd0.5-inc1  augment.randaugment_layers and others
--smoothing               float   0.1     loss.label_smoothing
--reprob                  float   0.25    augment.erasing_prob
--remode                  str     pixel   augment.erasing_mode
--recount                 int     1       number of erased boxes
--resplit                 on      -       -
--mixup                   float   0       augment.mixup_alpha
--cutmix                  float   0       augment.cutmix_alpha
--cutmix_minmax           floats  -       -
--mixup_prob              float   1.0     augment.mix_prob
--mixup_switch_prob       float   0.5     augment.cutmix_switch_prob
--mixup_mode              str     batch   augment.mixup_mode
--finetune                str     -       init.checkpoint
--global_pool             on      true    model.global_pool
--cls_token               off:global_pool   -
--nb_classes              int     1000    follows from the data
--seed                    int     0       train.seed
"""
_PLACES = """
--data_path               str     /datasets01/imagenet_full_size/061417/
--output_dir              str     ./output_dir
--log_dir                 str     ./output_dir
--device                  str     cuda
--resume                  str     -
--start_epoch             int     0
--eval                    on      -
--dist_eval               on      -
--num_workers             int     10
--pin_mem                 on      true
--no_pin_mem              off:pin_mem  -
--world_size              int     1
--local_rank              int     -1
--dist_on_itp             on      -
--dist_url                str     env://
"""
_SUBMITIT = """
--ngpus                   int     8       GPUs per node
--nodes                   int     2       nodes
"""
_SUBMITIT_PLACES = """
--timeout                 int     4320
--job_dir                 str     -
--partition               str     learnfair
--use_volta32             on      -
--comment                 str     -
"""
TABLE = make_table(
    "MAE's main_finetune.py", "facebookresearch/mae@efb2a806:main_finetune.py", _RECIPE, _PLACES
)
SUBMITIT = make_table(
    "MAE's submitit_finetune.py",
    "facebookresearch/mae@efb2a806:submitit_finetune.py",
    _RECIPE + _SUBMITIT,
    _PLACES + _SUBMITIT_PLACES,
)
_NAMES = {"base": "b", "large": "l", "huge": "h"}


def table_for(command: Command) -> Table:
    """Return the argument table of the script that `command` runs."""
    return SUBMITIT if "submitit" in command.script else TABLE


def read(
    table: Table, parsed: ParsedArguments, num_gpus: int | None, is_distributed: bool
) -> Reading:
    """Map the arguments of MAE's fine-tuning script."""
    reading = Reading(table, parsed)
    args = reading.args
    if args["eval"]:
        raise ValueError(
            "--eval only evaluates: run python launch/eval.py --checkpoint FILE --data SHARDS"
        )
    if table is SUBMITIT:
        num_gpus = num_gpus or args["ngpus"] * args["nodes"]
        reading.same("ngpus nodes")
    batch = map_batch(reading, "batch_size accum_iter", num_gpus, args["accum_iter"])
    reading.same("epochs", {"train.epochs": args["epochs"]})
    _map_model(reading)
    map_policy(reading, "bicubic")
    map_color_jitter(reading, applies=args["aa"] in ("", None, "3a"))
    map_erasing(reading)
    map_mixing(reading, args["batch_size"])
    _map_optimizer(reading, batch)
    reading.same("seed", {"train.seed": args["seed"]})
    reading.same("", {"eval.every_epochs": 1})
    map_precision(reading, "fp16 with a scaled loss")
    map_initial_weights(reading, "Xavier's everywhere, and a head of std 2e-5")
    reading.finish()
    return reading


def _map_model(reading: Reading) -> None:
    args = reading.args
    match = re.fullmatch(r"vit_(base|large|huge)_patch(14|16)", args["model"])
    if not match:
        raise ValueError(
            f"--model {args['model']}: expected vit_base_patch16, vit_large_patch16 or"
            " vit_huge_patch14"
        )
    reading.same("model", {"model.name": f"vit_{_NAMES[match[1]]}{match[2]}"})
    size = args["input_size"]
    view = {"model.image_size": size, "eval.crop_pct": 0.875 if size <= 224 else 1.0}
    reading.same("input_size", view)
    reading.same("drop_path", {"model.drop_path_rate": args["drop_path"]})
    pool: dict[str, Any] = {"model.global_pool": "avg", "model.class_token": True}
    reading.same("global_pool", pool if args["global_pool"] else {})
    reading.same("nb_classes")
    if args["finetune"]:
        file, note = local_file(args["finetune"])
        reading.same("finetune", {"init.checkpoint": file, "init.reset_head": True}, note)
    else:
        reading.same("finetune")


def _map_optimizer(reading: Reading, batch: int) -> None:
    args = reading.args
    reading.same("", {"optim.name": "adamw"})
    lr = args["lr"]
    if lr is None:
        lr = args["blr"] * batch / 256
        reading.same("lr blr", {"optim.lr": lr}, f"{args['blr']:g} x {batch} / 256")
    else:
        reading.same("lr", {"optim.lr": lr})
        reading.inert("blr", "--lr is stated")
    reading.same("weight_decay", {"optim.weight_decay": args["weight_decay"]})
    reading.same("clip_grad", {"optim.clip_grad_norm": args["clip_grad"]})
    map_layer_decay(reading, "layer_decay", args["layer_decay"], "beit")
    settings = {
        "schedule.name": "cosine",
        "schedule.warmup_epochs": args["warmup_epochs"],
        "schedule.warmup_lr": 0.0,
        "schedule.min_lr": min(args["min_lr"], lr),
    }
    theirs = after_warmup(
        lr, args["epochs"], warmup_epochs=args["warmup_epochs"], min_lr=args["min_lr"]
    )
    map_rate(reading, "min_lr warmup_epochs", theirs, settings, "")
