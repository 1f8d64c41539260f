"""Map commands of DeiT's main.py, and of its forks in ViT-5 and RoPE-ViT, to our settings.

In DeiT, the batch size is per GPU. The learning rate is for a batch of 512 images, and is scaled to
the actual batch size unless `--unscale-lr` is given. ThreeAugment replaces timm's transforms,
including erasing. Models with LS in their names have the same drop-path rate in all blocks. The
learning rate changes once per epoch, one epoch late.
"""

import re
from functools import partial

from vit.extras.recipes.arguments import ParsedArguments, make_table, read_words
from vit.extras.recipes.command import Command
from vit.extras.recipes.rates import map_schedule, timm_cosine
from vit.extras.recipes.reading import (
    Findings,
    Program,
    Reading,
    Settings,
    cannot,
    differs,
    implied,
    inert,
    same,
    same_if_used,
)
from vit.extras.recipes.timm_common import (
    initial_weights,
    local_file,
    map_batch,
    map_clipping,
    map_color_jitter,
    map_erasing,
    map_mixing,
    map_optimizer,
    map_policy,
    map_repeats,
    precision,
    train_interpolation,
)
from vit.layers.presets import SIZES

_RECIPE = """
--batch-size              int     64      per GPU; data.global_batch_size is the total
--epochs                  int     300     train.epochs
--model                   str     deit_base_patch16_224   model
--input-size              int     224     model.image_size
--drop-path               float   0.1     model.drop_path_rate
--drop                    float   0.0     model.proj_drop_rate, model.pos_drop_rate
--nb-classes              int     1000    -
--train-mode              on      true    {true: {}, else: training with dropout and drop path\
 switched off}
--no-train-mode           off:train_mode   -
--finetune                str     -       init.checkpoint, init.reset_head
--distillation-type       str     none    distill
--teacher-model           str     regnety_160   distill
--teacher-path            str     -       distill
--distillation-alpha      float   0.5     distill
--distillation-tau        float   1.0     distill
--cosub                   on      -       off: two submodels that learn from each other
--attn-only               on      -       off: training of attention only
--eval-crop-ratio         float   0.875   eval.crop_pct
--ThreeAugment            on      -       augment.auto_augment
--src                     on      -       augment.crop
--train-interpolation     str     bicubic  data.interpolation
--aa                      str     rand-m9-mstd0.5-inc1  augment.randaugment_layers and others
--color-jitter            float   0.3     augment.color_jitter
--reprob                  float   0.25    [augment.erasing_prob]
--remode                  str     pixel   augment.erasing_mode
--recount                 int     1       {1: {}, else: "up to {} erased boxes: replaced by one"}
--resplit                 on      -       off: no erasing in the first split of a batch
--repeated-aug            on      true    order.aug_repeats
--no-repeated-aug         off:repeated_aug   -
--cutmix-minmax           floats  -       off: CutMix boxes with a side between two fractions
--mixup                   float   0.8     augment.mixup_alpha
--cutmix                  float   1.0     augment.cutmix_alpha
--smoothing               float   0.1     loss.label_smoothing
--mixup-prob              float   1.0     augment.mix_prob
--mixup-switch-prob       float   0.5     augment.cutmix_switch_prob
--mixup-mode              str     batch   augment.mixup_mode
--bce-loss                on      -       loss
--opt                     str     adamw   optim.name
--opt-eps                 float   1e-8    optim.eps
--opt-betas               floats  -       optim.betas
--momentum                float   0.9     optim.momentum
--lr                      float   5e-4    optim.lr
--unscale-lr              on      -       optim.lr is --lr; else --lr is for a batch of 512
--weight-decay            float   0.05    optim.weight_decay
--clip-grad               float   -       optim.clip_grad_norm
--lr-noise-pct            float   0.67    inert: --lr-noise is off
--lr-noise-std            float   1.0     inert: --lr-noise is off
--lr-noise                floats  -       off: noise on the learning rate
--cooldown-epochs         int     10      inert: the loop ends at --epochs
--sched                   str     cosine  schedule.name
--warmup-lr               float   1e-6    schedule.warmup_lr
--min-lr                  float   1e-5    schedule.min_lr
--warmup-epochs           int     5       schedule.warmup_epochs
--decay-epochs            float   30      for step schedules
--decay-rate --dr         float   0.1     for step schedules
--patience-epochs         int     10      for the plateau schedule
--model-ema               on      true    -
--no-model-ema            off:model_ema   -
--model-ema-decay         float   0.99996  ema.decay
--seed                    int     0       train.seed
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
--eval                    on      -       evaluates: {program} --eval
--dist-eval               on      -
--num_workers             int     10
--pin-mem                 on      true
--no-pin-mem              off:pin_mem  -
--distributed             on      -
--world_size              int     1
--dist_url                str     env://
"""

SUBMITIT_RECIPE = """
--ngpus                   int     8       -
--nodes                   int     2       -
"""
SUBMITIT_PLACES = """
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

TABLE = make_table("DeiT's main.py", "facebookresearch/deit@7e160fe4:main.py", _RECIPE, _PLACES)
SUBMITIT = make_table(
    "DeiT's run_with_submitit.py",
    "facebookresearch/deit@7e160fe4:run_with_submitit.py",
    SUBMITIT_RECIPE + _RECIPE,
    _PLACES + SUBMITIT_PLACES,
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

_DEIT3 = {"model.init_values": 1e-4, "model.no_embed_class": True}
"""The DeiT III model settings (facebookresearch/deit@7e160fe4:models_v2.py, vit_models)."""
_ROPE = {"model.init_values": 1e-4, "model.rope_type": "axial", "model.rope_temperature": 100.0}

_MODELS: dict[str, Settings] = {
    r"deit_(?P<size>tiny|small|base)_patch16_(224|384)": {},
    r"deit_(?P<size>tiny|small|base)_distilled_patch16_(224|384)": {"model.dist_token": True},
    r"deit_(?P<size>tiny|small|base|large|huge)_patch(14|16)_LS": _DEIT3,
    r"deit_(?P<size>medium)_patch(14|16)_LS": {
        **_DEIT3,
        "model.embed_dim": 512,
        "model.num_heads": 8,
    },
    r"rope_(axial|mixed)_deit_(?P<size>small|base|large)_patch16_LS": {
        **_ROPE,
        "model.pos_embed": "none",
    },
    r"rope_(axial|mixed)_ape_deit_(?P<size>small|base|large)_patch16_LS": {
        **_ROPE,
        "model.no_embed_class": True,
    },
    # wangf3014/ViT-5@b7b07960:models_vit5.py
    r"vit5_(?P<size>small|base|large)": {
        **_DEIT3,
        "model.norm_layer": "rmsnorm",
        "model.qkv_bias": False,
        "model.qk_norm": True,
        "model.reg_tokens": 4,
        "model.rope_type": "axial",
        "model.rope_reg_temperature": 100.0,
    },
}
"""Maps patterns for model names to settings."""


def _parse(command: Command) -> ParsedArguments:
    """Parse the arguments of the main.py that `command` runs. Three projects have a main.py."""
    line = " ".join(command.words)
    if "submitit" in command.script:
        table = SUBMITIT
    elif re.search(r"--model[= ]rope_", line):
        table = ROPE
    elif re.search(r"--model[= ]vit5_|--accum_iter|--load_ema", line):
        table = VIT5
    else:
        table = TABLE
    return read_words(table, command.words)


def _map_rest(reading: Reading) -> Findings:
    """Map what no argument of main.py controls."""
    yield implied({"eval.every_epochs": 1})
    yield precision("fp16 with a scaled loss")
    yield initial_weights(reading, "a class token of std 0.02", "timm")


def _map_model(reading: Reading) -> Findings:
    """Map `--model`, and state in which details this project's model differs."""
    name = reading.args["model"]
    size, parts = _find_model(name)
    settings = {"model.name": f"vit_{size}{_patch_size(reading)}", **parts}
    if "model.dist_token" in parts:
        yield differs("", "DeiT decays the distillation token, this project does not")

    if name.startswith("vit5"):
        yield differs(
            "model",
            "the class token is initialized with std 1e-6 in this project and 0.02 in ViT-5",
            settings,
        )
    elif name.startswith("rope_mixed"):
        yield cannot(
            "model",
            "learned rotary frequencies (RoPE-Mixed): replaced by axial frequencies",
            settings,
        )
    elif "_distilled" in name and reading.args["distillation_type"] == "none":
        yield differs(
            "model",
            "without a teacher, this project trains the mean of both heads, DeiT one head",
            settings,
        )
    else:
        yield same("model", settings)


def _find_model(name: str) -> tuple[str, Settings]:
    """Return the size of a model, such as `s`, and the settings that it has besides its name."""
    for pattern, settings in _MODELS.items():
        match = re.fullmatch(pattern, name)
        if match is not None:
            return SIZES.get(match["size"], "b"), settings  # medium is a narrower base

    raise ValueError(
        f"--model {name}: expected deit_{{tiny,small,base}}_patch16_{{224,384}},"
        " deit_{tiny,small,medium,base,large}_patch16_LS, deit_huge_patch14_LS,"
        " vit5_{small,base,large} or rope_{axial,mixed}[_ape]_deit_{small,base,large}"
        "_patch16_LS"
    )


def _patch_size(reading: Reading) -> int:
    return 14 if "patch14" in reading.args["model"] else 16


def _has_one_rate(reading: Reading) -> bool:
    """Return whether all blocks have the same drop-path rate."""
    return "_LS" in reading.args["model"] or reading.args["model"].startswith("vit5")


def _map_image_size(reading: Reading) -> Findings:
    size = reading.args["input_size"]
    patch = _patch_size(reading)
    used = size // patch * patch
    settings = {"model.image_size": used}
    text = f"DeiT uses only {used} of {size} px, because patches have {patch} px: set to {used} px"
    yield same("input_size", settings) if used == size else differs("input_size", text, settings)


def _map_drop_path(reading: Reading) -> Findings:
    rate = reading.args["drop_path"]
    settings: Settings = {"model.drop_path_rate": rate}
    if _has_one_rate(reading) and rate:
        settings["model.drop_path_schedule"] = "constant"
    yield same("drop_path", settings)


def _map_dropout(reading: Reading) -> Findings:
    rate = reading.args["drop"]
    if rate and _has_one_rate(reading):
        yield cannot("drop", "dropout of the head's input")
    elif rate:
        yield same("drop", {"model.pos_drop_rate": rate, "model.proj_drop_rate": rate})
    else:
        yield same("drop")


def _map_start(reading: Reading) -> Findings:
    """Map the initial weights, and whether the head is new because the classes differ."""
    args = reading.args
    file, note = local_file(args["finetune"] or "")
    start: Settings = {"init.checkpoint": file} if file else {}
    if file and args["data_set"] != "IMNET":
        text = (
            "DeiT resets the head only if the number of classes differs, this project always does"
        )
        start["init.reset_head"] = True
        yield differs("finetune", f"{note}; {text}" if note else text, start)
    else:
        yield same("finetune", start, note)

    if file and args.get("load_ema"):
        yield differs(
            "load_ema", "the averaged weights of the checkpoint: pass a file with those weights"
        )
    elif "load_ema" in args:
        yield same("load_ema")


def _map_teacher(reading: Reading) -> Findings:
    """Map the teacher. main.py requires a model with two heads (losses.py)."""
    args = reading.args
    kind, alpha = args["distillation_type"], args["distillation_alpha"]
    path = args["teacher_path"]
    if kind == "none":
        yield same("distillation_type")
        yield inert(
            "teacher_model teacher_path distillation_alpha distillation_tau",
            "the recipe has no teacher",
        )
        return

    is_valid = kind in ("hard", "soft") and path and 0 < alpha < 1
    if not is_valid:
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

    yield same("distillation_type", {"distill.distill_type": kind})
    file, note = local_file(path)
    yield same("teacher_path", {"distill.teacher": file}, note)
    yield same(
        "teacher_model",
        {"distill.teacher_model": args["teacher_model"]},
        f"timm's {args['teacher_model']}, which needs timm unless it is a ViT",
    )

    comments = {}
    weights = {"distill.task_loss_weight": 1 - alpha, "distill.distill_loss_weight": alpha}
    if kind == "soft":
        classes = args["nb_classes"]
        weights["distill.distill_loss_weight"] = alpha / classes
        comments["distill.distill_loss_weight"] = (
            f"DeiT takes the mean over {classes} classes, this project the sum"
        )
    yield same("distillation_alpha", weights)._replace(comments=comments)

    yield same_if_used(
        kind == "soft",
        "distillation_tau",
        {"distill.temperature": args["distillation_tau"]},
        "only for soft distillation",
    )


def _map_three_augment(reading: Reading) -> Findings:
    """Map `--ThreeAugment` and `--src`, and note which arguments the former replaces."""
    args = reading.args
    if args["ThreeAugment"]:
        yield same("ThreeAugment", {"augment.auto_augment": "three_augment"})
        yield same("src", {"augment.crop": "simple"} if args["src"] else {})
        yield inert(
            "aa reprob remode recount resplit train_interpolation",
            "ThreeAugment replaces these transforms",
        )
    else:
        yield same("ThreeAugment")
        yield same_if_used(not args["src"], "src", {}, "only with --ThreeAugment")


def _map_repeats(reading: Reading) -> Findings:
    return map_repeats(
        reading,
        "repeated_aug",
        repeats=3 if reading.args["repeated_aug"] else 1,
        text="a single process without torchrun uses a random sampler",
    )


def _map_interpolation(reading: Reading) -> Findings:
    theirs = reading.args["train_interpolation"]
    yield train_interpolation(theirs, f"DeiT resizes by {theirs}, this project by bicubic")


def _map_loss(reading: Reading) -> Findings:
    args = reading.args
    if args["bce_loss"] and args["smoothing"]:
        yield cannot(
            "bce_loss",
            "with --smoothing above 0 --bce-loss makes all targets 1: replaced by cross-entropy",
        )
    else:
        bce = {"loss.name": "bce", "loss.bce_target_thresh": 0.0}
        yield same("bce_loss", bce if args["bce_loss"] else {})


def _map_optimizer(reading: Reading) -> Findings:
    lr = reading.args["lr"]
    formula = ""
    if not reading.args["unscale_lr"]:
        batch = reading.settings["data.global_batch_size"]
        formula = f"{lr:g} x {batch} / 512"
        lr *= batch / 512
    return map_optimizer(reading, lr, formula, "lr unscale_lr")


def _map_schedule(reading: Reading) -> Findings:
    """Map `--sched` and its arguments, and replace schedules other than a cosine by one."""
    args = reading.args
    settings = {
        "schedule.name": "cosine",
        "schedule.interval": "epoch",
        "schedule.warmup_epochs": args["warmup_epochs"],
        "schedule.warmup_lr": args["warmup_lr"],
        "schedule.warmup_prefix": False,
        "schedule.min_lr": args["min_lr"],
    }

    kind = args["sched"]
    names = "min_lr warmup_lr warmup_epochs"
    if kind == "cosine":
        yield same("sched")
        kind = ""
    else:
        names = f"sched {names}"

    yield from map_schedule(
        reading,
        names,
        settings,
        partial(timm_cosine, late=1),
        kind=kind,
        unused="decay_epochs decay_rate patience_epochs",
        reasons="DeiT's schedule is one epoch late, so the first two epochs use --warmup-lr",
    )


def _map_average(reading: Reading) -> Findings:
    if reading.args["model_ema"]:
        yield differs(
            "model_ema_decay",
            "DeiT never evaluates the average, this project evaluates both",
            {"ema.decay": reading.args["model_ema_decay"]},
        )
    else:
        yield inert("model_ema_decay", "the average is off")


PROGRAM = Program(
    parse=_parse,
    handlers={
        "batch_size": map_batch,
        "model": _map_model,
        "input_size": _map_image_size,
        "drop_path": _map_drop_path,
        "drop": _map_dropout,
        "finetune": _map_start,
        "distillation_type": _map_teacher,
        "ThreeAugment": _map_three_augment,
        "train_interpolation": _map_interpolation,
        "aa": map_policy,
        "color_jitter": map_color_jitter,
        "remode": map_erasing,
        "repeated_aug": _map_repeats,
        "mixup_prob": map_mixing,
        "bce_loss": _map_loss,
        "opt": _map_optimizer,
        "clip_grad": map_clipping,
        "sched": _map_schedule,
        "model_ema_decay": _map_average,
    },
    rest=_map_rest,
)
