"""Map commands of MAE's main_finetune.py and submitit_finetune.py to settings of this project.

In MAE, the learning rate is --blr times the global batch size divided by 256. Learning rates
decrease from the last to the first block. The head uses the mean over patches unless --cls_token is
passed. The learning rate changes each step and starts at 0. Up to 224 px, evaluation uses a center
crop of 224/256 of the image. At larger sizes, evaluation uses the whole image.
"""

from vit.extras.recipes.arguments import ParsedArguments, make_table, read_words
from vit.extras.recipes.command import Command
from vit.extras.recipes.deit import SUBMITIT_PLACES, SUBMITIT_RECIPE
from vit.extras.recipes.rates import map_schedule
from vit.extras.recipes.reading import Findings, Program, Reading, implied, inert, same
from vit.extras.recipes.timm_common import (
    initial_weights,
    local_file,
    map_batch,
    map_color_jitter,
    map_erasing,
    map_mixing,
    precision,
    timm_policy,
)

_RECIPE = """
--batch_size              int     64      per GPU; data.global_batch_size is the total
--accum_iter              int     1       batches per step
--epochs                  int     50      train.epochs
--model                   str     vit_large_patch16   {vit_base_patch16: {model.name: vit_b16},\
 vit_large_patch16: {model.name: vit_l16}, vit_huge_patch14: {model.name: vit_h14},\
 refuse: "expected vit_base_patch16, vit_large_patch16 or vit_huge_patch14"}
--input_size              int     224     model.image_size
--drop_path               float   0.1     model.drop_path_rate
--global_pool             on      true    {true: {model.global_pool: avg, model.class_token: true}}
--cls_token               off:global_pool   -
--nb_classes              int     1000    -
--finetune                str     -       init.checkpoint
--aa                      str     rand-m9-mstd0.5-inc1  augment.randaugment_layers and others
--color_jitter            float   -       augment.color_jitter
--reprob                  float   0.25    [augment.erasing_prob]
--remode                  str     pixel   augment.erasing_mode
--recount                 int     1       {1: {}, else: "up to {} erased boxes: replaced by one"}
--resplit                 on      -       off: no erasing in the first split of a batch
--cutmix_minmax           floats  -       off: CutMix boxes with a side between two fractions
--mixup                   float   0       augment.mixup_alpha
--cutmix                  float   0       augment.cutmix_alpha
--smoothing               float   0.1     loss.label_smoothing
--mixup_prob              float   1.0     augment.mix_prob
--mixup_switch_prob       float   0.5     augment.cutmix_switch_prob
--mixup_mode              str     batch   augment.mixup_mode
--lr                      float   -       optim.lr
--blr                     float   1e-3    optim.lr, for a batch of 256
--weight_decay            float   0.05    optim.weight_decay
--clip_grad               float   -       optim.clip_grad_norm
--layer_decay             float   0.75    {null: {}, 1: {}, else: {optim.layer_decay: VALUE,\
 optim.layer_decay_form: beit}}
--min_lr                  float   1e-6    schedule.min_lr
--warmup_epochs           int     5       schedule.warmup_epochs
--seed                    int     0       train.seed
"""

_PLACES = """
--data_path               str     /datasets01/imagenet_full_size/061417/
--output_dir              str     ./output_dir
--log_dir                 str     ./output_dir
--device                  str     cuda
--resume                  str     -
--start_epoch             int     0
--eval                    on      -       evaluates: --eval
--dist_eval               on      -
--num_workers             int     10
--pin_mem                 on      true
--no_pin_mem              off:pin_mem  -
--world_size              int     1
--local_rank              int     -1
--dist_on_itp             on      -
--dist_url                str     env://
"""

TABLE = make_table(
    "MAE's main_finetune.py", "facebookresearch/mae@efb2a806:main_finetune.py", _RECIPE, _PLACES
)
SUBMITIT = make_table(
    "MAE's submitit_finetune.py",
    "facebookresearch/mae@efb2a806:submitit_finetune.py",
    SUBMITIT_RECIPE + _RECIPE,
    _PLACES + SUBMITIT_PLACES.replace("2800", "4320"),
)


def _parse(command: Command) -> ParsedArguments:
    return read_words(SUBMITIT if "submitit" in command.script else TABLE, command.words)


def _map_rest(reading: Reading) -> Findings:
    """Map what no argument of MAE's fine-tuning script controls."""
    yield implied({"eval.every_epochs": 1})
    yield precision("fp16 with a scaled loss")
    yield initial_weights(reading, "torch's default for patches, and a head of std 2e-5")


def _map_image_size(reading: Reading) -> Findings:
    size = reading.args["input_size"]
    yield same(
        "input_size", {"model.image_size": size, "eval.crop_pct": 0.875 if size <= 224 else 1.0}
    )


def _map_start(reading: Reading) -> Findings:
    file, note = local_file(reading.args["finetune"] or "")
    start = {"init.checkpoint": file, "init.reset_head": True}
    yield same("finetune", start if file else {}, note)


def _map_rate(reading: Reading) -> Findings:
    args = reading.args
    yield implied({"optim.name": "adamw"})

    if args["lr"] is None:
        batch = reading.settings["data.global_batch_size"]
        yield same(
            "lr blr", {"optim.lr": args["blr"] * batch / 256}, f"{args['blr']:g} x {batch} / 256"
        )
    else:
        yield same("lr", {"optim.lr": args["lr"]})
        yield inert("blr", "--lr is stated")


def _map_schedule(reading: Reading) -> Findings:
    settings = {
        "schedule.name": "cosine",
        "schedule.warmup_epochs": reading.args["warmup_epochs"],
        "schedule.warmup_lr": 0.0,
        "schedule.min_lr": reading.args["min_lr"],
    }
    return map_schedule(reading, "min_lr warmup_epochs", settings)


PROGRAM = Program(
    parse=_parse,
    handlers={
        "batch_size": map_batch,
        "input_size": _map_image_size,
        "finetune": _map_start,
        "aa": lambda reading: [timm_policy("aa", reading.args["aa"], "bicubic")],
        "color_jitter": map_color_jitter,
        "remode": map_erasing,
        "mixup_prob": map_mixing,
        "lr": _map_rate,
        "min_lr": _map_schedule,
    },
    rest=_map_rest,
)
